"""Selection of a task by name, with its options: a frozen dataclass next to each task's class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from inspect import isabstract
from typing import Any, ClassVar, Literal, get_args

from fedstill.core.registry import Registrable, Registry
from fedstill.tasks.task import Metric, TargetKind, Task

# Form of a data set's examples: the targets of images, or "texts", or rows of a table with a class ("rows"),
# a number ("values") or a time until an event ("times"), or images with separate objects ("instances").
Targets = Literal["class", "labels", "map", "image", "instances", "texts", "rows", "values", "times"]


class TaskConfig(Registrable):
    """Base class of task options. A subclass is a frozen dataclass whose fields are the task's keyword
    arguments.

    Attributes:
        task_class: class of the task. :meth:`make` calls it with the number of classes and with each field.

    Example:
        >>> from fedstill.tasks.segmentation import SegmentationConfig
        >>> SegmentationConfig(dice=0.0).make(["background", "tumor"]).classes
        2
    """

    section: ClassVar[str] = "task"

    default = "classification"
    task_class: ClassVar[type[Task]]

    @staticmethod
    def validate_class(kind: Any) -> str | None:
        """Return what a custom class is missing: all that options need, and a complete task class."""
        if missing := Registrable.validate_class(kind):
            return missing
        task_class = kind.task_class
        if not (isinstance(task_class, type) and issubclass(task_class, Task)):
            return "a class with task_class: ClassVar[type[Task]], the class of its task"
        if isabstract(task_class):
            missing = ", ".join(sorted(task_class.__abstractmethods__))
            return f"a class whose {task_class.__name__} also has {missing}"
        metrics = getattr(task_class, "metrics", ())
        if not metrics or not all(isinstance(metric, Metric) for metric in metrics):
            return f"a class whose {task_class.__name__} has metrics, a tuple of Metric"
        if getattr(task_class, "kind", None) not in get_args(TargetKind):
            return f"a class whose {task_class.__name__} has a kind, one of {', '.join(get_args(TargetKind))}"
        if not isinstance(getattr(task_class, "name", None), str):
            return f"a class whose {task_class.__name__} has a name, for messages"
        return None

    def make(self, classes: int | Sequence[str]) -> Task:
        """Return the task with these options.

        Args:
            classes: C, or the names of the C classes, labels or channels.
        """
        options: Any = self
        task_class: Any = self.task_class
        count = classes if isinstance(classes, int) else len(classes)
        task: Task = task_class(count, **{field.name: getattr(self, field.name) for field in fields(options)})
        return task

    def minimal_task(self) -> Task:
        """Return the task with the smallest number of classes, for checks that do not depend on it."""
        return self.make(self.task_class.min_classes)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Metrics of the task, the primary metric first."""
        return self.minimal_task().metrics

    @property
    def targets(self) -> Targets:
        """Form of the examples that this task needs. Tasks with equal forms share data sets."""
        if self.task_class.data_task == "instances":
            return "instances"
        kind = self.task_class.kind
        if kind == "number":
            return "values"
        if kind == "time":
            return "times"
        return kind if self.task_class.form == "images" else self.task_class.form


TASKS: Registry[type[TaskConfig]] = Registry(
    "task",
    {
        "classification": "fedstill.tasks.classification:ClassificationConfig",
        "text": "fedstill.tasks.classification:TextConfig",
        "tabular": "fedstill.tasks.classification:TabularConfig",
        "regression": "fedstill.tasks.regression:RegressionConfig",
        "survival": "fedstill.tasks.survival:SurvivalConfig",
        "multi-label": "fedstill.tasks.multi_label:MultiLabelConfig",
        "segmentation": "fedstill.tasks.segmentation:SegmentationConfig",
        "instances": "fedstill.tasks.instances:InstancesConfig",
        "reconstruction": "fedstill.tasks.reconstruction:ReconstructionConfig",
    },
    base=TaskConfig,
)

TaskConfig.registry = TASKS
