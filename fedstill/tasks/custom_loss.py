"""A task with a user's function as its loss on labels."""

from __future__ import annotations

import copy
import functools
import hashlib
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fedstill.core.errors import ArgumentError
from fedstill.tasks.task import Task

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (B, C, ...), (B, ...) to ()
LIBRARIES = ("torch", "fedstill", "numpy")  # whose functions are described by their names
PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


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
    """Return a text that changes with a function's code and with all values that it uses.

    It is equal in other processes and for other places of the code, so that an interrupted run can resume.

    >>> describe_loss(torch.nn.CrossEntropyLoss()) == describe_loss(torch.nn.CrossEntropyLoss())
    True
    >>> describe_loss(torch.nn.CrossEntropyLoss()) == describe_loss(torch.nn.CrossEntropyLoss(ignore_index=1))
    False
    """
    if loss is None:
        return ""
    return hashlib.sha256(_describe(loss, {}).encode()).hexdigest()


def _describe(value: Any, seen: dict[int, Any]) -> str:
    """Return a text of a value; functions with their code, defaults, closures and globals.

    ``seen`` holds the described values, so that none is freed and another gets its id.
    """
    if value is None or isinstance(value, PLAIN):
        return repr(value)
    if id(value) in seen:
        return "again"
    seen[id(value)] = value
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    if isinstance(value, torch.Tensor):
        array = value.detach().cpu().contiguous()
        return f"{array.dtype} {tuple(array.shape)} {array.flatten().tolist()!r}"
    parts: list[Any] = []
    if isinstance(value, list | tuple):
        parts = [*value]
    elif isinstance(value, set | frozenset):
        return f"{type(value).__name__} {sorted(_describe(each, seen) for each in value)}"
    elif isinstance(value, Mapping):
        parts = [part for pair in value.items() for part in pair]
    elif isinstance(value, types.CodeType):
        return f"{value.co_code!r} {value.co_names} {[_describe(each, seen) for each in value.co_consts]}"
    elif isinstance(value, types.MethodType):
        parts = [value.__func__, value.__self__]
    elif isinstance(value, types.FunctionType) and value.__module__.partition(".")[0] not in LIBRARIES:
        names, cells = value.__code__.co_names, value.__closure__ or ()
        used = {key: value.__globals__[key] for key in names if key in value.__globals__}
        inside = [cell.cell_contents for cell in cells]
        parts = [value.__code__, value.__defaults__, value.__kwdefaults__, inside, used]
    elif isinstance(value, functools.partial):
        parts = [value.func, value.args, value.keywords]
    elif not isinstance(value, type | types.ModuleType | types.FunctionType | types.BuiltinFunctionType):
        parts = [vars(value)] if hasattr(value, "__dict__") else []
    return f"{name} {[_describe(part, seen) for part in parts]}"
