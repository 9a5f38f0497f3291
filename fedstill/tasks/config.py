"""Which task, by name, and its options: a frozen dataclass beside each task's class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from inspect import isabstract
from typing import Any, ClassVar, Literal, get_args

from fedstill.core.registry import Registered, Registry
from fedstill.tasks.task import Kind, Metric, Task

# What examples teach: what a target is, or that inputs are texts, or rows of a table with a class, a value or
# a time until an event each, or pictures whose objects are told apart.
Targets = Literal["class", "labels", "map", "image", "instances", "texts", "rows", "values", "times"]


class TaskConfig(Registered):
    """The options of one task: below this base a frozen dataclass, whose fields its task is made with.

    Attributes:
        makes: the class of the task; called with the number of classes, and with each field by its name.
    """

    under: ClassVar[str] = "task"

    default = "classification"
    makes: ClassVar[type[Task]]

    @staticmethod
    def lacks(kind: Any) -> str | None:
        """As of all that have a name; and the task that it makes must be whole."""
        if missing := Registered.lacks(kind):
            return missing
        made = kind.makes
        if not (isinstance(made, type) and issubclass(made, Task)):
            return "one with makes: ClassVar[type[Task]], the class of its task"
        if isabstract(made):
            return f"one whose {made.__name__} also has {', '.join(sorted(made.__abstractmethods__))}"
        metrics = getattr(made, "metrics", ())
        if not metrics or not all(isinstance(metric, Metric) for metric in metrics):
            return f"one whose {made.__name__} has metrics, a tuple of Metric"
        if getattr(made, "kind", None) not in get_args(Kind):
            return f"one whose {made.__name__} has a kind, one of {', '.join(get_args(Kind))}"
        if not isinstance(getattr(made, "name", None), str):
            return f"one whose {made.__name__} has a name, for messages"
        return None

    def make(self, classes: int | Sequence[str]) -> Task:
        """The task.

        Args:
            classes: C, or the names of the C classes, labels or channels.
        """
        each: Any = self
        kind: Any = self.makes
        count = classes if isinstance(classes, int) else len(classes)
        made: Task = kind(count, **{part.name: getattr(self, part.name) for part in fields(each)})
        return made

    def minimal_task(self) -> Task:
        """The task of as few classes as it can have: what a method declares does not follow from how many."""
        return self.make(self.makes.min_classes)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The task's metrics; what models are judged by first."""
        return self.minimal_task().metrics

    @property
    def targets(self) -> Targets:
        """What examples must teach: data that serve one task serve all with the same targets."""
        if self.makes.data_task == "instances":
            return "instances"
        kind = self.makes.kind
        if kind == "number":
            return "values"
        if kind == "time":
            return "times"
        return kind if self.makes.form == "images" else self.makes.form


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
