"""Ensembles: functions that combine the responses of K nodes to B inputs into one output per input.

``ensemble(responses, weights, task)`` receives the nodes' outputs ``(K, B, C, ...)``, importance weights
``(K, B or 1, C, 1...)`` that broadcast with them and sum to 1 over nodes, and the task, which knows the
meaning of its outputs. It returns ``(B, C, ...)``, an output as a model gives it, and lets gradients through.

The robust ensembles bound the influence of a minority of malicious nodes
(:mod:`fedstill.federation.adversaries`): :func:`median`, :func:`trimmed_mean`, :func:`geometric_median`,
:func:`cronus` and :func:`expguard`. All of them lose accuracy if each class is known to few nodes, which are
then outliers themselves. Importance weights follow from what nodes say about their own data: a node that
claims many examples weighs much.
"""

from __future__ import annotations

import torch

from fedstill.tasks.task import Task


def logits(responses: torch.Tensor, weights: torch.Tensor, task: Task) -> torch.Tensor:
    """Return ``A(z_1..z_K, x) = sum_k pi_k(x) * z_k``: FedIOD Eq. 9, FedKD Eq. 2."""
    return (weights * responses).sum(0)


def logit_sum(responses: torch.Tensor, weights: torch.Tensor, task: Task) -> torch.Tensor:
    """Return ``sum_k z_k`` without weights, as FedIOD's published code for label maps.

    With K nodes it is K times their mean: it predicts the same classes, with more certainty.
    """
    return responses.sum(0)


def log_probs(responses: torch.Tensor, weights: torch.Tensor, task: Task) -> torch.Tensor:
    """Return the weighted mean of normalized outputs, without each node's arbitrary offset."""
    return (weights * task.normalize_outputs(responses)).sum(0)


def probs(responses: torch.Tensor, weights: torch.Tensor, task: Task) -> torch.Tensor:
    """Return the output that predicts the weighted mean of the nodes' predictions."""
    return task.mix_outputs(responses, weights)


def consensus(responses: torch.Tensor, weights: torch.Tensor, task: Task) -> torch.Tensor:
    """Return the weighted mean prediction of the nodes that hold the classes which the input shows."""
    return task.consensus(responses, weights)


# --- robust ensembles -----------------------------------------------------------------------------------

TRIM = 0.2  # share that is left out at each end, or in each pass
WEISZFELD_STEPS, SMALLEST_DISTANCE = 50, 1e-4
EXPGUARD_RATE = 10.0


def median(responses: torch.Tensor, weights: torch.Tensor, task: Task) -> torch.Tensor:
    """Return the weighted median of the nodes' predictions, class by class; classes are then normalized.

    Yin, Chen, Ramchandran, Bartlett: "Byzantine-Robust Distributed Learning", ICML 2018, for predictions.
    """
    with torch.no_grad():
        order, w, upper = _cumulative_weights(responses, weights, task)
        is_lower = (upper >= 0.5 - 1e-6) & (upper - w < 0.5 - 1e-6)  # the first that reaches a half
        is_upper = (upper > 0.5 + 1e-6) & (upper - w <= 0.5 + 1e-6)  # the first above it, mostly the same
        chosen = torch.zeros_like(w).scatter(0, order, 0.5 * (is_lower.to(w) + is_upper.to(w)))
    return task.mix_outputs(responses, chosen)


def trimmed_mean(responses: torch.Tensor, weights: torch.Tensor, task: Task) -> torch.Tensor:
    """Return the weighted mean prediction without the lowest and the highest fifth of the weight, class by
    class; classes are then normalized.

    Yin, Chen, Ramchandran, Bartlett: "Byzantine-Robust Distributed Learning", ICML 2018, for predictions.
    """
    with torch.no_grad():
        order, w, upper = _cumulative_weights(responses, weights, task)
        inside = upper.clamp_max(1 - TRIM) - (upper - w).clamp_min(TRIM)
        chosen = torch.zeros_like(w).scatter(0, order, inside.clamp_min(0) / (1 - 2 * TRIM))
    return task.mix_outputs(responses, chosen)


def geometric_median(responses: torch.Tensor, weights: torch.Tensor, task: Task) -> torch.Tensor:
    """Return the geometric median of the nodes' predictions for each input, by Weiszfeld's algorithm.

    Pillutla, Kakade, Harchaoui: "Robust Aggregation for Federated Learning", IEEE Transactions on Signal
    Processing 2022, for predictions.
    """
    with torch.no_grad():
        p, w = _vectors(responses, weights, task)
        share, _ = _weiszfeld(p, w)
    return _mix_by_node(responses, share, task)


def cronus(responses: torch.Tensor, weights: torch.Tensor, task: Task) -> torch.Tensor:
    """Return the weighted mean prediction of the nodes that a spectral filter leaves, for each input.

    Chang, Shejwalkar, Shokri, Houmansadr: "Cronus", arXiv:1912.11279. Each of two passes leaves out the fifth
    of the nodes, or one, that is furthest from the mean in the direction in which predictions differ most.
    """
    with torch.no_grad():
        p, w = _vectors(responses, weights, task)
        out = max(int(TRIM * len(p)), 1)
        for _ in range(2):
            if int((w > 0).sum(0).min()) <= out:
                break
            scores = _spectral_scores(p, w).masked_fill(w == 0, -1)  # (K, N)
            w = w.scatter(0, scores.topk(out, 0).indices, 0.0)
    return _mix_by_node(responses, w / w.sum(0).clamp_min(1e-30), task)


def expguard(responses: torch.Tensor, weights: torch.Tensor, task: Task) -> torch.Tensor:
    """Return the mean prediction with weights that fall exponentially with a node's distance from the others.

    ExpGuard of Roux, Zimmer, Pokutta: "On the Byzantine-Resilience of Distillation-Based Federated Learning",
    ICLR 2025. There distances are summed over the rounds; here they are a mean over the inputs of one query,
    as methods with one round have no others. The distance is that from the geometric median.
    """
    with torch.no_grad():
        p, w = _vectors(responses, weights, task)
        _, distance = _weiszfeld(p, w)  # (K, N)
        share = w * (-EXPGUARD_RATE * distance.mean(1, keepdim=True)).exp()
    return _mix_by_node(responses, share / share.sum(0).clamp_min(1e-30), task)


def _cumulative_weights(
    responses: torch.Tensor, weights: torch.Tensor, task: Task
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the order of the nodes by prediction, their weights, and the sum of these up to each node,
    ``(K, B, C, ...)`` each."""
    order = task.predictions(responses).argsort(0)
    w = weights.expand_as(responses).gather(0, order)
    w = w / w.sum(0)
    return order, w, w.cumsum(0)


def _vectors(responses: torch.Tensor, weights: torch.Tensor, task: Task) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the predictions as vectors ``(K, N, C)``, one for each input or pixel, and weights of the nodes
    ``(K, N)``, the means of theirs over classes."""
    p = task.predictions(responses).movedim(2, -1)  # (K, B, ..., C)
    w = weights.mean(2).expand(p.shape[:-1])  # (K, B, ...)
    return p.flatten(1, -2), w.flatten(1)


def _mix_by_node(responses: torch.Tensor, share: torch.Tensor, task: Task) -> torch.Tensor:
    """Return the mixture with one weight ``(K, N)`` for each node and input or pixel."""
    rows = (*responses.shape[:2], *responses.shape[3:])  # (K, B, ...)
    return task.mix_outputs(responses, share.reshape(rows).unsqueeze(2))


def _weiszfeld(p: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the shares ``(K, N)`` whose mean is the geometric median, and the distances from it."""
    share = w / w.sum(0)
    for _ in range(WEISZFELD_STEPS):
        distance = (p - (share.unsqueeze(2) * p).sum(0)).norm(dim=2)  # (K, N)
        share = w / distance.clamp_min(SMALLEST_DISTANCE)
        share = share / share.sum(0)
    return share, (p - (share.unsqueeze(2) * p).sum(0)).norm(dim=2)


def _spectral_scores(p: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return how far nodes are from their mean, along the direction of largest variance: ``(K, N)``."""
    share = (w / w.sum(0)).unsqueeze(2)
    centered = (p - (share * p).sum(0)).transpose(0, 1)  # (N, K, C)
    scaled = share.sqrt().transpose(0, 1) * centered
    direction = torch.linalg.eigh(scaled.transpose(1, 2) @ scaled).eigenvectors[..., -1]  # (N, C)
    scores: torch.Tensor = (centered @ direction.unsqueeze(2)).squeeze(2).abs().T
    return scores
