"""What is learned: losses, how answers are ensembled, metrics. Methods know only :class:`Task`.

One file a task (``classification``, ``multi_label``, ``segmentation``, ``instances``, ``reconstruction``,
``regression``, ``survival``): a subclass of ``task.Task``, and one of ``config.TaskConfig`` with its options;
``map_task`` is what those share whose answer is a class a pixel, ``numbers`` what those do whose answer is no
class. ``formulas`` are the papers', as pure functions of logits; ``ensembles`` the ways to make one answer of
the nodes'; a ``metric`` is one of a task's metrics, ``classification_metrics``, ``segmentation_metrics``,
``instance_metrics``, ``reconstruction_metrics`` and ``survival_metrics`` compute them, ``cases`` are whose
they are means over. ``synthetic_maps``, ``instance_classes`` and ``body_mask`` are what maps are made of.

May import core. A newcomer adds a task: a file here, and a line in ``TASKS``; an ensemble: a function in
``ensembles``, and a line in ``ENSEMBLES``; or a file anywhere (docs/own-task.md, docs/own-model.md).
"""

from __future__ import annotations

from fedstill.tasks.config import TASKS, Targets, TaskConfig
from fedstill.tasks.task import ENSEMBLES, Ensemble, Kind, Metric, Task

__all__ = ["ENSEMBLES", "TASKS", "Ensemble", "Metric", "Kind", "Targets", "Task", "TaskConfig"]
