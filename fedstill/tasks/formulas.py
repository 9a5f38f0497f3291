"""The papers' formulas as pure functions of logits.

Logits carry the classes on one axis: ``(B, C, ...)`` for one model and ``(K, B, C, ...)`` for K
nodes. What follows C (nothing for one label an image, H and W for a label a pixel) is averaged like
further examples, so the same formulas serve both.
"""

from __future__ import annotations

import math

import torch

CONSENSUS_STEPS = (
    5  # turns of the consensus: enough to hear all, before nodes of many classes drown the others
)


def entropy(logits: torch.Tensor, axis: int) -> torch.Tensor:
    """Shannon entropy in nats of the softmax along ``axis`` (below FedIOD Eq. 2).

    >>> round(entropy(torch.zeros(2), 0).item(), 4)  # a fair coin: log 2
    0.6931
    """
    log_q = logits.log_softmax(axis)
    return -(log_q.exp() * log_q).sum(axis)


def entropy_from_probs(probs: torch.Tensor, axis: int) -> torch.Tensor:
    """Shannon entropy in nats of probabilities along ``axis``; 0 log 0 is 0."""
    # At exactly 0 the slope of p log p is infinite, and infinity times a softmax's 0 is NaN.
    entropies: torch.Tensor = torch.special.entr(probs.clamp_min(torch.finfo(probs.dtype).tiny))
    return entropies.sum(axis)


def mean_entropy(responses: torch.Tensor, pi: torch.Tensor) -> torch.Tensor:
    """FedIOD Eq. 3: the nodes' mean entropy, ``sum_k pi_k H(q_k)``, over all examples.

    Args:
        responses: logits ``(K, B, C, ...)``.
        pi: the nodes' weights ``(K,)``, summing to 1.
    """
    return pi @ entropy(responses, 2).flatten(1).mean(1)


def js_divergence(responses: torch.Tensor, pi: torch.Tensor) -> torch.Tensor:
    """FedIOD Eq. 4: generalized Jensen-Shannon divergence of the nodes' predictions ``(K, B, C, ...)``, in
    nats.

    Between 0 (all agree) and the entropy of ``pi`` (K,) (all certain, all different).
    """
    q_mean = torch.tensordot(pi, responses.softmax(2), dims=([0], [0]))  # (B, C, ...)
    return entropy_from_probs(q_mean, 1).mean() - mean_entropy(responses, pi)


def importance_weights(counts: torch.Tensor, ratio: torch.Tensor | None = None) -> torch.Tensor:
    """FedIOD Eq. 8, normalized over nodes: how much each node is listened to, per class and input.

    Where no node holds an example of a class all weigh the same there.

    Args:
        counts: how many examples of each class each node holds, ``(K, C)``, not negative.
        ratio: the critic factor ``D_k(x) / E D_k(x')``, ``(K, B)``; None: by counts alone, as published code.

    Returns:
        ``(K, B, C)``, or ``(K, 1, C)`` without a ratio; sums to 1 over the nodes.

    >>> importance_weights(torch.tensor([[3.0, 0.0], [1.0, 0.0]])).squeeze(1)
    tensor([[0.7500, 0.5000],
            [0.2500, 0.5000]])
    """
    weights = counts.unsqueeze(1)  # (K, 1, C)
    if ratio is not None:
        weights = weights * ratio.unsqueeze(2)  # (K, B, C)
    total = weights.sum(0, keepdim=True)
    return torch.where(total > 0, weights / total.clamp_min(1e-30), torch.full_like(weights, 1 / len(counts)))


def consensus(log_q: torch.Tensor, weights: torch.Tensor, turns: int = CONSENSUS_STEPS) -> torch.Tensor:
    """Listen to the nodes that hold the classes which, as all agree, the input shows: ``(B, C, ...)``.

    A node of few classes is sure of one of them on any input, and class weights let its vote count fully
    there, since it does hold that class. So nodes are weighed as wholes: ``share_k ~ sum_c pi_k^c p^c``, and
    p is what the nodes so weighed say, ``p = sum_k share_k q_k``; starting from the mean of
    log-probabilities, a few turns. No gradient flows through the shares. fedstill's own
    (``docs/methods/fediod.md``); not in the papers.

    Args:
        log_q: the nodes' log-probabilities ``(K, B, C, ...)``.
        weights: pi_k(x), of equal rank, ``(K, B or 1, C, ...)``.
        turns: how often say is handed on, 1 or more.
    """
    with torch.no_grad():
        share = _node_shares(weights, (weights * log_q).sum(0).softmax(1))  # (K, B, 1, ...)
        for _ in range(turns - 1):
            share = _node_shares(weights, (share * log_q.exp()).sum(0))
    return log_mixture(log_q, share)


def _node_shares(weights: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """The nodes' shares, ``share_k ~ sum_c pi_k^c p^c``: ``(K, B, 1, ...)``, summing to 1 over nodes."""
    share = (weights * p).sum(2, keepdim=True)
    return share / share.sum(0, keepdim=True).clamp_min(1e-30)


def log_mixture(log_q: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """log of the weighted mean of probabilities, without underflow: ``(K, B, C, ...)`` to ``(B, C, ...)``.

    Args:
        log_q: the nodes' log-probabilities.
        weights: of equal rank, summing to 1 over the nodes.
    """
    smallest = math.log(torch.finfo(log_q.dtype).tiny)
    return (weights.clamp_min(1e-30).log() + log_q).logsumexp(0).clamp_min(smallest)


def distillation_loss(student: torch.Tensor, target: torch.Tensor, tau: float) -> torch.Tensor:
    """FedIOD Eq. 6 and 10: how far the student is from the ensemble, one value an example of ``(B, C, ...)``.

    For finite tau, ``tau^2 KL(p_tau(target) || p_tau(student))``. For infinite tau its limit, half the mean
    squared difference of the logits after each one's mean is taken away (Hinton et al. 2015).

    >>> s, t = torch.tensor([[1.0, -1.0]]), torch.tensor([[0.0, 0.0]])
    >>> distillation_loss(s, t, math.inf), distillation_loss(s, t, 1e3)
    (tensor([0.5000]), tensor([0.5000]))
    """
    if math.isinf(tau):
        student = student - student.mean(1, keepdim=True)
        target = target - target.mean(1, keepdim=True)
        return 0.5 * (student - target).square().mean(1).reshape(len(student), -1).mean(1)
    # A high tau leaves differences near 1e-4 whose squares matter: float32 would lose them.
    precision = torch.float64 if tau > 10 else student.dtype
    log_t = (target.to(precision) / tau).log_softmax(1)
    log_s = (student.to(precision) / tau).log_softmax(1)
    kl = (log_t.exp() * (log_t - log_s)).sum(1).reshape(len(student), -1).mean(1)
    return (tau**2 * kl).to(student.dtype)
