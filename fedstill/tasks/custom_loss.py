"""A task with a user's function as its loss on labels."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable

import torch

from fedstill.core.errors import ArgumentError
from fedstill.tasks.task import Task

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (B, C, ...), (B, ...) to ()


def with_loss(task: Task, loss: Loss, argument: str) -> Task:
    """Return a copy of a task with another loss on labels.

    Args:
        task: the task.
        loss: function of the outputs ``(B, C, ...)`` of one model and the targets ``(B, ...)`` that returns
            the mean of one loss per example, as DP-SGD computes gradients per example. Label smoothing
            is left to it.
        argument: name of the argument, for errors.

    Raises:
        ArgumentError: when the loss is computed, if it is no scalar.

    >>> from fedstill.tasks.classification import Classification
    >>> task = with_loss(Classification(2), lambda z, y: (1 - z.gather(1, y[:, None])).mean(), "loss")
    >>> task.loss(torch.tensor([[[0.25, 0.75]], [[0.5, 0.5]]]), torch.tensor([[1], [0]]))
    tensor([0.2500, 0.5000])
    """

    def compute(
        self: Task, outputs: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0
    ) -> torch.Tensor:
        return torch.stack([_scalar(loss(z, y), argument) for z, y in zip(outputs, targets, strict=True)])

    custom = copy.copy(task)
    custom.__class__ = type(type(task).__name__, (type(task),), {"loss": compute, "__doc__": task.__doc__})
    return custom


def _scalar(value: object, argument: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and not value.ndim:
        return value
    found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    raise ArgumentError(argument, found, "a tensor without axes: the mean over the examples")


def describe_loss(loss: Loss | None) -> str:
    """Return a text that changes with a function's name and code, but not with its place in a file.

    >>> describe_loss(torch.nn.functional.cross_entropy).partition(" ")[0]
    'torch.nn.functional.cross_entropy'
    """
    if loss is None:
        return ""
    name = f"{loss.__module__}.{getattr(loss, '__qualname__', type(loss).__qualname__)}"
    code = getattr(loss, "__code__", None)
    if code is None:  # an object with its own options
        return f"{name} {loss!r}"
    constants = [value for value in code.co_consts if isinstance(value, int | float | str)]
    described = repr((code.co_code, code.co_names, constants)).encode()
    return f"{name} {hashlib.sha256(described).hexdigest()[:16]}"
