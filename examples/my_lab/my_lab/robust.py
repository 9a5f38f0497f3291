"""Robust ensembles: one node that is wrong, by accident or on purpose, cannot move them far.

Yin, Chen, Ramchandran, Bartlett: "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates",
ICML 2018, takes median and trimmed mean of gradients, coordinate by coordinate. Here they are of answers.
"""

from __future__ import annotations

import torch

from fedstill.tasks import Task


def median(responses: torch.Tensor, weights: torch.Tensor, task: Task) -> torch.Tensor:
    """The median of the nodes' log-probabilities ``(K, B, C, ...)``; of an even number, of the middle two.

    All nodes count alike: ``weights`` have no part in it.
    """
    nodes, ordered = len(responses), task.normalize_outputs(responses).sort(0).values
    return ordered[(nodes - 1) // 2 : nodes // 2 + 1].mean(0)


def trimmed_mean(responses: torch.Tensor, weights: torch.Tensor, task: Task) -> torch.Tensor:
    """The mean of log-probabilities without the lowest and the highest fifth of the nodes, rounded up."""
    nodes, ordered = len(responses), task.normalize_outputs(responses).sort(0).values
    cut = min(-(-nodes // 5), (nodes - 1) // 2)
    return ordered[cut : nodes - cut].mean(0)
