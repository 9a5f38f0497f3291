"""Robust ensembles: one faulty or malicious node cannot change them much.

Yin, Chen, Ramchandran, Bartlett: "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates",
ICML 2018, uses the coordinate-wise median and trimmed mean of gradients, here of responses.
"""

from __future__ import annotations

import torch

from fedstill.tasks import Task


def median(responses: torch.Tensor, weights: torch.Tensor, task: Task) -> torch.Tensor:
    """Return the median of the nodes' log-probabilities ``(K, B, C, ...)``; ``weights`` are ignored."""
    nodes, ordered = len(responses), task.normalize_outputs(responses).sort(0).values
    return ordered[(nodes - 1) // 2 : nodes // 2 + 1].mean(0)


def trimmed_mean(responses: torch.Tensor, weights: torch.Tensor, task: Task) -> torch.Tensor:
    """Return the mean of log-probabilities without the lowest and the highest fifth of the nodes."""
    nodes, ordered = len(responses), task.normalize_outputs(responses).sort(0).values
    cut = min(-(-nodes // 5), (nodes - 1) // 2)
    return ordered[cut : nodes - cut].mean(0)
