"""What is learned: losses, how answers are ensembled, metrics. Methods know only :class:`Task`.

One file a task, each a subclass of ``task.Task``; ``functional`` has the papers' formulas as pure
functions, ``ensembles`` the ways to make one answer of the nodes', and ``overlap``, ``objects`` and
``fidelity`` the metrics.

May import core. A newcomer adds a task: a file here, and a line in ``TASKS``; an
ensemble: a function in ``ensembles``, and a line in ``ENSEMBLES``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from fedstill.tasks.config import TaskConfig, TaskName
from fedstill.tasks.task import ENSEMBLES, Ensemble, Figure, Kind, Task

__all__ = [
    "ENSEMBLES",
    "TASKS",
    "Ensemble",
    "Figure",
    "Kind",
    "Task",
    "TaskConfig",
    "TaskName",
    "any_task",
    "make_task",
    "task_type",
]

# By name: the file of this room and its class. Read when needed, as some need libraries that take a while.
TASKS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "classification": ("classification", "Classification"),
        "text": ("text", "TextClassification"),
        "multi-label": ("multi_label", "MultiLabel"),
        "segmentation": ("segmentation", "Segmentation"),
        "instances": ("instances", "Instances"),
        "reconstruction": ("reconstruction", "Reconstruction"),
    }
)


def task_type(name: str) -> type[Task]:
    """The class of a task."""
    file, kind = TASKS[name]
    found: type[Task] = getattr(importlib.import_module(f"fedstill.tasks.{file}"), kind)
    return found


def any_task(config: TaskConfig) -> Task:
    """A task of as few classes as it can have: what a method declares does not follow from how many."""
    return make_task(config, task_type(config.name).least)


def make_task(config: TaskConfig, classes: int | Sequence[str]) -> Task:
    """A task with its options.

    Args:
        config: which, and how.
        classes: C, or the names of the C classes, labels or channels.
    """
    from_config = task_type(config.name).from_config
    return from_config(config, classes if isinstance(classes, int) else len(classes))
