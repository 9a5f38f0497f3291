"""Importance weights of the nodes for each input: pi_k(x), FedIOD Eq. 8 or FedGO's.

FedGO: Jang, Park, Lee, "Provably Near-Optimal Federated Ensemble Distillation with Negligible Overhead", ICML
2025.
"""

from __future__ import annotations

from typing import Literal

import torch

from fedstill.methods import LabelHistogram, Responses
from fedstill.tasks import Task

Importance = Literal["counts", "fakeness", "realness", "odds", "size"]


def importance_weights(
    importance: Importance, task: Task, histogram: LabelHistogram, responses: Responses
) -> torch.Tensor:
    """Return pi_k(x), ``(K, B or 1, classes)``, summing to 1 over the nodes.

    Args:
        importance: ``counts``: Eq. 8 by class counts alone. ``fakeness``: times D_k(x) / E D_k(x'_k), as
            printed. ``realness``: times the same ratio of 1 - D_k. ``odds``: data size times the odds that x
            is the node's own (FedGO). ``size``: data size alone.
        task: the task.
        histogram: the nodes' data sizes, by class and in all.
        responses: responses to x. Without critic values all but ``size`` are ``counts``.
    """
    histogram = histogram.select(responses.nodes)
    counts = histogram.counts  # |X'_k^c|  (K, classes)
    by_size = histogram.sizes.unsqueeze(1).expand_as(counts)
    if importance == "size":
        return task.importance_weights(by_size)
    if importance == "counts" or "critic" not in responses.tensors:  # x may have no label map to judge
        return task.importance_weights(counts)
    if importance == "odds":
        return task.importance_weights(by_size, critic_odds(responses["critic"].detach()))
    fake = responses["critic"].detach().sigmoid().flatten(2).mean(2)  # D_k(x)  (K, B)
    real = responses["critic_real"].detach().unsqueeze(1)  # E D_k(x'_k)  (K, 1)
    if importance == "realness":
        fake, real = 1 - fake, 1 - real
    return task.importance_weights(counts, fake / real.clamp_min(1e-6))  # Eq. 8


def critic_odds(d: torch.Tensor) -> torch.Tensor:
    """Return each critic's odds that an image is real, ``(K, B, h, w)`` to ``(K, B)``, up to a common factor.

    An optimal critic has odds p_k(x) / p_G(x) (Goodfellow et al. 2014), and p_G(x) is the same for all nodes.
    Multiplied by n_k and normalized over nodes, they are the probability that x came from node k (FedGO).
    Patches are combined by their geometric mean.

    >>> critic_odds(torch.tensor([[[[0.0]]], [[[-1.0]]]])).flatten()  # d is high for generated inputs
    tensor([0.3679, 1.0000])
    """
    log_odds = -d.flatten(2).mean(2)
    return (log_odds - log_odds.amax(0)).exp()
