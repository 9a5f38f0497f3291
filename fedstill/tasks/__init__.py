"""What is learned: losses, how answers are ensembled, metrics. Methods know only the protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from fedstill.data.dataset import TensorData
from fedstill.errors import ArgumentError
from fedstill.tasks.classification import Classification
from fedstill.tasks.functional import Ensemble

__all__ = ["TASKS", "Classification", "Ensemble", "Task", "make_task"]


class Task(Protocol):
    """What a method may ask of a task. K nodes, B inputs, G models; further axes are the task's own."""

    name: str
    metric: str
    classes: int

    def check(self, data: TensorData, what: str) -> None: ...
    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor: ...
    def counts(self, data: TensorData) -> torch.Tensor: ...
    def confidence(self, answers: torch.Tensor, pi: torch.Tensor) -> torch.Tensor: ...
    def uniqueness(self, answers: torch.Tensor, pi: torch.Tensor) -> torch.Tensor: ...
    def balance(self, ensembled: torch.Tensor) -> torch.Tensor: ...
    def importance(self, counts: torch.Tensor, ratio: torch.Tensor | None = None) -> torch.Tensor: ...
    def ensemble(self, answers: torch.Tensor, weights: torch.Tensor, how: Ensemble) -> torch.Tensor: ...
    def expertise(self, ensembled: torch.Tensor, weights: torch.Tensor) -> torch.Tensor: ...
    def mix(self, first: torch.Tensor, second: torch.Tensor, share: torch.Tensor) -> torch.Tensor: ...
    def distance(self, student: torch.Tensor, target: torch.Tensor, tau: float) -> torch.Tensor: ...
    def metrics(self, outputs: torch.Tensor, targets: torch.Tensor) -> Mapping[str, float]: ...


TASKS = {"classification": Classification}


def make_task(name: str, classes: int) -> Task:
    """A task by name.

    Raises:
        ArgumentError: no such task.
    """
    if name not in TASKS:
        raise ArgumentError("task", name, f"one of {', '.join(TASKS)}")
    return TASKS[name](classes)
