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
        ArgumentError: not one mean and one standard deviation for each channel, or wild ones; fewer than two
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
        # Wilder ones would train a node on constants, or on numbers without end.
        if not all(1e-3 <= value <= 1e3 for value in self.std):
            raise ArgumentError("form.std", self.std, "from 0.001 to 1000")
        if not all(abs(value) <= 1e3 for value in self.mean):
            raise ArgumentError("form.mean", self.mean, "from -1000 to 1000")

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
