"""Tasks: losses, ensembles of responses, and metrics. Methods use only :class:`Task`.

Each task has a file (``classification``, ``multi_label``, ``segmentation``, ``instances``,
``reconstruction``, ``regression``, ``survival``) with a subclass of ``task.Task``, its metrics, and a
subclass of ``task.TaskConfig`` with its options. ``logit_formulas`` holds the papers' formulas as pure
functions of logits, ``ensembles`` the ways to combine responses, ``label_maps`` functions that make maps.

This package may import core only. To add a task, add a file here and a line in ``TASKS``. To add an ensemble,
add a function to ``ensembles`` and a line in ``ENSEMBLES``. Custom tasks and ensembles can also live in any
other file (docs/custom-task.md, docs/custom-model.md).
"""

from __future__ import annotations

from fedstill.tasks.task import ENSEMBLES, TASKS, Ensemble, Metric, TargetKind, Targets, Task, TaskConfig

__all__ = ["ENSEMBLES", "TASKS", "Ensemble", "Metric", "TargetKind", "Targets", "Task", "TaskConfig"]
