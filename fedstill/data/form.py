"""What a server declares about inputs and classes, and every node's data and model must have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fedstill.core.dataset import DataSet
from fedstill.core.errors import ArgumentError
from fedstill.tasks import Task, TaskConfig, make_task, task_type


@dataclass(frozen=True)
class Form:
    """The form of a federation's inputs and labels.

    Args:
        task: what is learned, as in :mod:`fedstill.tasks`.
        classes: names of classes, labels or channels of an output, in the order of their numbers.
        shape: ``(C, H, W)`` of an image, ``(L,)`` of a text.
        mean, std: the normalisation ``(pixel - mean) / std`` of pixels from 0 to 1, per channel; empty for
            texts.
        vocabulary: how many token ids there are, where inputs are texts.

    Raises:
        ArgumentError: another shape than the task's inputs have; not one mean and one standard deviation for
            each channel, or wild ones; fewer than two classes where there are classes.
    """

    task: TaskConfig
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    vocabulary: int = 0

    def __post_init__(self) -> None:
        kind = task_type(self.task.name)
        axes = "length" if kind.tokens else "channels, height and width"
        if len(self.shape) != (1 if kind.tokens else 3) or not all(1 <= size < 2**31 for size in self.shape):
            raise ArgumentError("form.shape", self.shape, f"{axes}, each 1 or more, below 2**31")
        if len(self.classes) < kind.least:
            raise ArgumentError("form.classes", self.classes, f"{kind.least} or more")
        if (self.vocabulary > 1) != kind.tokens or self.vocabulary > 2**31:
            allowed = "2 or more, for texts" if kind.tokens else "0, for images"
            raise ArgumentError("form.vocabulary", self.vocabulary, allowed)
        channels = 0 if kind.tokens else self.shape[0]
        for name in ("mean", "std"):
            if len(getattr(self, name)) != channels:
                raise ArgumentError(
                    f"form.{name}", getattr(self, name), f"one value for each of {channels} channels"
                )
        # Wilder ones would train a node on constants, or on numbers without end.
        if not all(1e-3 <= value <= 1e3 for value in self.std):
            raise ArgumentError("form.std", self.std, "from 0.001 to 1000")
        if not all(abs(value) <= 1e3 for value in self.mean):
            raise ArgumentError("form.mean", self.mean, "from -1000 to 1000")

    @classmethod
    def of(cls, task: TaskConfig, data: DataSet) -> Form:
        """The form that a server's own data have."""
        part = data.test if len(data.test) else data.train
        return cls(task, data.classes, tuple(part.inputs.shape[1:]), data.mean, data.std, data.vocabulary)

    def make_task(self) -> Task:
        """The task, with as many classes."""
        return make_task(self.task, self.classes)

    @property
    def outputs(self) -> tuple[int, ...]:
        """The shape of a model's output for one input."""
        return self.make_task().outputs(self.shape)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; :meth:`from_dict` gives the same form back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, table: Any) -> Form:
        """The form that JSON values describe.

        Raises:
            ArgumentError: they do not describe one.
        """
        from fedstill.core.tables import read_table  # which reads what nodes are configured with, too

        if not isinstance(table, Mapping):
            raise ArgumentError("form", type(table).__name__, "a table")
        return read_table(cls, table, "form.")
