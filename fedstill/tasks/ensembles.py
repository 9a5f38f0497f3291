"""Ensembles: how the answers of K nodes to B inputs become one; each is a function.

``ensemble(responses, weights, task)`` is given the nodes' outputs ``(K, B, C, ...)``; how much each counts,
which broadcasts with them, ``(K, B or 1, C, 1...)``, and sums to 1 over nodes; and the task, which knows what
its outputs mean. It gives one output ``(B, C, ...)`` as a model would, and lets gradients through.
"""

from __future__ import annotations

import torch

from fedstill.tasks.task import Task


def logits(responses: torch.Tensor, weights: torch.Tensor, task: Task) -> torch.Tensor:
    """``A(z_1..z_K, x) = sum_k pi_k(x) * z_k``: FedIOD Eq. 9, FedKD Eq. 2."""
    return (weights * responses).sum(0)


def log_probs(responses: torch.Tensor, weights: torch.Tensor, task: Task) -> torch.Tensor:
    """The same, but each node's own offset, which training leaves arbitrary, is taken away first."""
    return (weights * task.normalize_outputs(responses)).sum(0)


def probs(responses: torch.Tensor, weights: torch.Tensor, task: Task) -> torch.Tensor:
    """The weighted mean of what the nodes predict, as an output."""
    return task.mix_outputs(responses, weights)


def consensus(responses: torch.Tensor, weights: torch.Tensor, task: Task) -> torch.Tensor:
    """Probabilities again, of those nodes that hold the classes which, as all agree, the input shows."""
    return task.consensus(responses, weights)
