"""Formulas of the papers, as pure functions of logits.

Logits have the classes on one axis: ``(B, C, ...)`` for one model and ``(K, B, C, ...)`` for K nodes. Axes
after C (none for one class per input, H and W for one class per pixel) are averaged like further examples.
"""

from __future__ import annotations

import math

import torch

CONSENSUS_STEPS = 5  # enough to weigh all nodes, before nodes with many classes dominate


def entropy(logits: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the Shannon entropy in nats of the softmax along ``axis`` (FedIOD, below Eq. 2).

    >>> round(entropy(torch.zeros(2), 0).item(), 4)  # a fair coin: log 2
    0.6931
    """
    log_q = logits.log_softmax(axis)
    return -(log_q.exp() * log_q).sum(axis)


def entropy_from_probs(probs: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the Shannon entropy in nats of probabilities along ``axis``, with 0 log 0 = 0."""
    # At exactly 0 the gradient of p log p is infinite, and infinity times a softmax's 0 is NaN.
    entropies: torch.Tensor = torch.special.entr(probs.clamp_min(torch.finfo(probs.dtype).tiny))
    return entropies.sum(axis)


def mean_entropy(responses: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Return the nodes' mean entropy, FedIOD Eq. 3: ``sum_k share_k H(q_k)``, averaged over all examples.

    Args:
        responses: logits ``(K, B, C, ...)``.
        share: shares of the nodes in all examples ``(K,)``: pi_k of Eq. 2 to 5.
    """
    return share @ entropy(responses, 2).flatten(1).mean(1)


def js_divergence(responses: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Return the generalized Jensen-Shannon divergence of the nodes' predictions in nats, FedIOD Eq. 4.

    It lies between 0 (all nodes agree) and the entropy of the shares (all nodes certain and different).

    Args:
        responses: logits ``(K, B, C, ...)``.
        share: shares of the nodes in all examples ``(K,)``: pi_k of Eq. 2 to 5.
    """
    q_mean = torch.tensordot(share, responses.softmax(2), dims=([0], [0]))  # (B, C, ...)
    return entropy_from_probs(q_mean, 1).mean() - mean_entropy(responses, share)


def importance_weights(counts: torch.Tensor, ratio: torch.Tensor | None = None) -> torch.Tensor:
    """Return the importance weights per class and input, FedIOD Eq. 8, normalized over nodes.

    All nodes have equal weights for a class without examples.

    Args:
        counts: number of examples of each class at each node, ``(K, C)``, not negative.
        ratio: critic factor ``D_k(x) / E D_k(x')``, ``(K, B)``. None: counts only, as in the published code.

    Returns:
        ``(K, B, C)``, or ``(K, 1, C)`` without a ratio, summing to 1 over the nodes.

    >>> importance_weights(torch.tensor([[3.0, 0.0], [1.0, 0.0]])).squeeze(1)
    tensor([[0.7500, 0.5000],
            [0.2500, 0.5000]])
    """
    weights = counts.unsqueeze(1)  # (K, 1, C)
    if ratio is not None:
        weights = weights * ratio.unsqueeze(2)  # (K, B, C)
    total = weights.sum(0, keepdim=True)
    return torch.where(total > 0, weights / total.clamp_min(1e-30), torch.full_like(weights, 1 / len(counts)))


def consensus(log_q: torch.Tensor, weights: torch.Tensor, steps: int = CONSENSUS_STEPS) -> torch.Tensor:
    """Return log-probabilities that weigh nodes by the classes which, by agreement, the input shows:
    ``(B, C, ...)``.

    A node with few classes is certain of one of them on any input, and per-class weights count its vote
    fully. Here each node has one weight instead: ``share_k ~ sum_c pi_k^c p^c``, where p is the weighted
    prediction ``p = sum_k share_k q_k``. The iteration starts from the mean of log-probabilities. No gradient
    flows through the shares. This ensemble is fedstill's own (``docs/methods/fediod.md``) and not in the
    papers.

    Args:
        log_q: log-probabilities of the nodes, ``(K, B, C, ...)``.
        weights: pi_k(x), with the same number of axes, ``(K, B or 1, C, ...)``.
        steps: number of iterations, 1 or more.
    """
    with torch.no_grad():
        share = _node_shares(weights, (weights * log_q).sum(0).softmax(1))  # (K, B, 1, ...)
        for _ in range(steps - 1):
            share = _node_shares(weights, (share * log_q.exp()).sum(0))
    return log_mixture(log_q, share)


def _node_shares(weights: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return ``share_k ~ sum_c pi_k^c p^c``: ``(K, B, 1, ...)``, summing to 1 over nodes."""
    share = (weights * p).sum(2, keepdim=True)
    return share / share.sum(0, keepdim=True).clamp_min(1e-30)


def log_mixture(log_q: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the log of the weighted mean of probabilities, without underflow: ``(K, B, C, ...)`` to
    ``(B, C, ...)``.

    Args:
        log_q: log-probabilities of the nodes.
        weights: weights with the same number of axes, summing to 1 over the nodes.
    """
    smallest = math.log(torch.finfo(log_q.dtype).tiny)
    return (weights.clamp_min(1e-30).log() + log_q).logsumexp(0).clamp_min(smallest)


def distillation_loss(student: torch.Tensor, target: torch.Tensor, tau: float) -> torch.Tensor:
    """Return the distance between student and ensemble, FedIOD Eq. 6 and 10: ``(B,)`` from logits
    ``(B, C, ...)``.

    For finite tau it is ``tau^2 KL(p_tau(target) || p_tau(student))``. For infinite tau it is the limit: half
    the mean squared difference of the centered logits (Hinton et al. 2015).

    >>> s, t = torch.tensor([[1.0, -1.0]]), torch.tensor([[0.0, 0.0]])
    >>> distillation_loss(s, t, math.inf), distillation_loss(s, t, 1e3)
    (tensor([0.5000]), tensor([0.5000]))
    """
    if math.isinf(tau):
        student = student - student.mean(1, keepdim=True)
        target = target - target.mean(1, keepdim=True)
        return 0.5 * (student - target).square().mean(1).reshape(len(student), -1).mean(1)
    # With a high tau, differences are near 1e-4 and their squares matter: float32 would lose them.
    precision = torch.float64 if tau > 10 else student.dtype
    log_t = (target.to(precision) / tau).log_softmax(1)
    log_s = (student.to(precision) / tau).log_softmax(1)
    kl = (log_t.exp() * (log_t - log_s)).sum(1).reshape(len(student), -1).mean(1)
    return (tau**2 * kl).to(student.dtype)
