"""What a server declares about inputs and classes, and every node's data and model must have."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fedstill.errors import ArgumentError


@dataclass(frozen=True)
class Form:
    """The form of a federation's inputs and labels.

    Args:
        task: its name, as in :mod:`fedstill.tasks`.
        classes: names, in the order of their numbers.
        shape: ``(C, H, W)`` of an input.
        mean, std: the normalisation ``(pixel - mean) / std`` of pixels from 0 to 1, per channel.

    Raises:
        ArgumentError: not one positive standard deviation and one mean for each channel, or fewer than two
            classes.
    """

    task: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if min(self.shape) < 1:
            raise ArgumentError("form.shape", self.shape, "channels, height and width, each 1 or more")
        if len(self.classes) < 2:
            raise ArgumentError("form.classes", self.classes, "two classes or more")
        for name in ("mean", "std"):
            if len(getattr(self, name)) != self.shape[0]:
                raise ArgumentError(
                    f"form.{name}", getattr(self, name), f"one value for each of {self.shape[0]} channels"
                )
        if min(self.std) <= 0:
            raise ArgumentError("form.std", self.std, "above 0")

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; :meth:`from_dict` gives the same form back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, table: dict[str, Any]) -> Form:
        """The form that JSON values describe.

        Raises:
            ArgumentError: they do not describe one.
        """
        try:
            channels, height, width = (int(size) for size in table["shape"])
            return cls(
                str(table["task"]),
                tuple(str(name) for name in table["classes"]),
                (channels, height, width),
                tuple(float(value) for value in table["mean"]),
                tuple(float(value) for value in table["std"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError("form", table, "task, classes, shape, mean and std") from error
