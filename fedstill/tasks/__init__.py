"""What is learned: losses, how answers are ensembled, metrics. Methods know only :class:`Task`.

One file a task: a subclass of ``task.Task``, and one of ``config.TaskConfig`` with its options;
``functional`` has the papers' formulas as pure functions, ``overlap``, ``objects`` and ``fidelity`` the
metrics.

May import core. A newcomer adds a task: a file here, and a line in ``TASKS``; or a file anywhere
(docs/own-task.md).
"""

from __future__ import annotations

from fedstill.tasks.config import TASKS, TaskConfig
from fedstill.tasks.functional import Ensemble
from fedstill.tasks.task import Figure, Kind, Task

__all__ = ["TASKS", "Ensemble", "Figure", "Kind", "Task", "TaskConfig"]
