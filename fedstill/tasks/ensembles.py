"""Ensembles: functions that combine the responses of K nodes to B inputs into one output per input.

``ensemble(responses, weights, task)`` receives the nodes' outputs ``(K, B, C, ...)``, importance weights
``(K, B or 1, C, 1...)`` that broadcast with them and sum to 1 over nodes, and the task, which knows the
meaning of its outputs. It returns ``(B, C, ...)``, an output as a model gives it, and lets gradients through.
"""

from __future__ import annotations

import torch

from fedstill.tasks.task import Task


def logits(responses: torch.Tensor, weights: torch.Tensor, task: Task) -> torch.Tensor:
    """Return ``A(z_1..z_K, x) = sum_k pi_k(x) * z_k``: FedIOD Eq. 9, FedKD Eq. 2."""
    return (weights * responses).sum(0)


def log_probs(responses: torch.Tensor, weights: torch.Tensor, task: Task) -> torch.Tensor:
    """Return the weighted mean of normalized outputs, without each node's arbitrary offset."""
    return (weights * task.normalize_outputs(responses)).sum(0)


def probs(responses: torch.Tensor, weights: torch.Tensor, task: Task) -> torch.Tensor:
    """Return the output that predicts the weighted mean of the nodes' predictions."""
    return task.mix_outputs(responses, weights)


def consensus(responses: torch.Tensor, weights: torch.Tensor, task: Task) -> torch.Tensor:
    """Return the weighted mean prediction of the nodes that hold the classes which the input shows."""
    return task.consensus(responses, weights)
