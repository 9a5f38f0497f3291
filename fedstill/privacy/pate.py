"""What GNMax has cost on the votes that were really cast: for the owner's eyes, never to be published.

Papernot et al., "Scalable Private Learning with PATE", ICLR 2018. Where teachers agree, a noisy majority
hardly depends on any one of them, and costs less than the worst case that budgets charge. But **the figure is
computed from the private votes and is itself not private**: it must not leave the node, and nothing may
be decided by it that shows outside. It holds for released labels only, not for released vote counts.

Rényi curves here are for one record more or less, which changes one teacher's vote.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from fedstill.core.errors import ArgumentError
from fedstill.privacy import renyi

Floats = NDArray[np.float64]


def log_other(votes: Floats, sigma: float) -> Floats:
    """Log of a bound on the chance that GNMax says another class than the one with most votes (Prop. 7).

    ``q = min(1/2 sum_{i != i*} erfc((n_i* - n_i) / (2 sigma)), 1 - 1/C)``

    Args:
        votes: without noise, (N, C), C of 2 or more.
        sigma: standard deviation of the noise on each count, in votes, above 0.

    Returns:
        (N,), at most log(1 - 1/C).
    """
    from scipy.special import log_ndtr, logsumexp

    ordered = np.sort(votes, axis=1)  # (N, C)
    gaps = ordered[:, -1:] - ordered[:, :-1]  # (N, C - 1)
    q = logsumexp(log_ndtr(-gaps / (math.sqrt(2) * sigma)), axis=1)
    return np.asarray(np.minimum(q, math.log1p(-1 / votes.shape[1])))


def curves(log_q: Floats, sigma: float, orders: Floats = renyi.ORDERS) -> Floats:
    """Data-dependent Rényi divergence of a mechanism that is (order, order / sigma^2)-RDP (Thm 6).

    With the two higher orders of Prop. 10, ``mu_2 = sigma sqrt(log(1/q))`` and ``mu_1 = mu_2 + 1``; the
    data-independent ``order / sigma^2`` (Prop. 8) wherever the theorem asks for more than is given.

    Args:
        log_q: log of the chance of all outcomes but a likely one, (N,), below 0.
        sigma: above 0.
        orders: above 1, (A,).

    Returns:
        (N, A).
    """
    worst = np.broadcast_to(orders / sigma**2, (len(log_q), len(orders)))
    with np.errstate(all="ignore"):  # rows where the theorem does not apply are left out below
        q = log_q[:, None]
        mu2 = sigma * np.sqrt(-q)
        mu1 = mu2 + 1
        e1, e2 = mu1 / sigma**2, mu2 / sigma**2
        applies = (
            (orders <= mu2)
            & (mu2 > 1)
            & (q + e2 < 0)
            & (q <= (mu2 - 1) * e2 - mu2 * (np.log(mu1 / (mu1 - 1)) + np.log(mu2 / (mu2 - 1))))
        )
        log_a = _log1mexp(q) - _log1mexp((q + e2) * (1 - 1 / mu2))
        log_b = e1 - q / (mu1 - 1)
        total = np.logaddexp(_log1mexp(q) + (orders - 1) * log_a, q + (orders - 1) * log_b)
        better = np.minimum(worst, np.maximum(total, 0) / (orders - 1))
    return np.where(applies, better, worst)


def epsilon_data_dependent(
    votes: torch.Tensor,
    sigma: float,
    delta: float,
    threshold: float = 0.0,
    threshold_noise: float = 0.0,
    answered: torch.Tensor | None = None,
) -> float:
    """Epsilon at delta of the labels that GNMax (or Confident-GNMax) has released for these votes.

    **Not to be published**, see above. Never more than the data-independent figure of the Rényi accountant.

    Args:
        votes: without noise, (N, C), one row a question.
        sigma: standard deviation of the noise on each count, in votes, above 0.
        delta: above 0 and below 1.
        threshold: of the most votes, which then is asked about every row; 0: all rows were answered.
        threshold_noise: standard deviation of that noise, above 0 with a threshold.
        answered: with a threshold: which rows passed it, bool (N,).

    Raises:
        ArgumentError: shapes or values outside their range.
    """
    from scipy.special import log_ndtr

    if votes.ndim != 2 or votes.shape[1] < 2:
        raise ArgumentError("votes", tuple(votes.shape), "of shape (rows, classes), 2 classes or more")
    if not 0 < sigma < math.inf:
        raise ArgumentError("sigma", sigma, "above 0")
    if not 0 < delta < 1:
        raise ArgumentError("delta", delta, "above 0 and below 1")
    counts: Floats = votes.detach().cpu().double().numpy()
    total = np.zeros_like(renyi.ORDERS)
    if threshold > 0:
        if not 0 < threshold_noise < math.inf:
            raise ArgumentError("threshold_noise", threshold_noise, "above 0")
        if answered is None or answered.shape != votes.shape[:1]:
            raise ArgumentError("answered", answered, "with a threshold, one truth for each row of votes")
        above = (counts.max(axis=1) - threshold) / threshold_noise
        rarer = np.minimum(log_ndtr(above), log_ndtr(-above))  # of the two outcomes
        total += curves(rarer, math.sqrt(2) * threshold_noise).sum(axis=0)  # one vote moves the most by 1
        counts = counts[answered.cpu().numpy()]
    total += curves(log_other(counts, sigma), sigma).sum(axis=0)
    return renyi.to_epsilon(total, delta) if len(votes) else 0.0


def _log1mexp(x: Floats) -> Floats:
    """``log(1 - exp(x))`` for x below 0."""
    return np.asarray(np.where(x > -math.log(2), np.log(-np.expm1(x)), np.log1p(-np.exp(x))))
