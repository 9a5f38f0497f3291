"""Options accept the values allowed by the types of their fields, and document themselves."""

from __future__ import annotations

import math
import pydoc
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import pytest
from annotated_types import Ge, Gt, Interval, Len, MultipleOf, Timezone

import fedstill
from fedstill.core.errors import ArgumentError
from fedstill.core.options import CheckedOptions, NonNegativeFloat, PositiveInt, Share


@dataclass(frozen=True)
class Part(CheckedOptions):
    """Options with every kind of constraint."""

    section: ClassVar[str] = "part"

    rounds: PositiveInt = 1
    rate: NonNegativeFloat = 0.0
    share: Share = 1.0
    budget: Annotated[float, Gt(0)] = math.inf
    smoothing: Annotated[float, Interval(ge=0, lt=1)] | None = None
    side: Annotated[int, Ge(0), MultipleOf(4), "0, or a multiple of 4"] = 0
    weights: tuple[Annotated[float, Gt(0)], ...] = ()
    names: Annotated[tuple[str, ...], Len(1, 2)] = ("a",)
    how: Literal["mean", "sum"] = "mean"
    free: int = -1


GOOD: list[dict[str, Any]] = [
    {},
    {"rounds": 3, "rate": 1e300, "share": 1, "budget": 0.1, "smoothing": 0.0},
    {"smoothing": None, "side": 8, "weights": (1.0, 2), "names": ("a", "b"), "how": "sum", "free": -3},
]
BAD: list[tuple[str, Any, str]] = [
    ("rounds", 0, "1 or more"),
    ("rounds", 1.5, "1 or more"),
    ("rounds", True, "1 or more"),
    ("rate", math.inf, "0 or more and finite"),
    ("rate", math.nan, "0 or more and finite"),
    ("share", 0.0, "above 0 and up to 1"),
    ("share", 1.1, "above 0 and up to 1"),
    ("budget", 0, "above 0"),
    ("smoothing", 1.0, "0 or more and below 1, or none"),
    ("side", 6, "0, or a multiple of 4"),
    ("side", -4, "0, or a multiple of 4"),
    ("weights", (1.0, 0.0), "each above 0"),
    ("weights", None, "each above 0"),
    ("names", (), "1 or more of them and 2 of them at most"),
    ("names", ("a", "b", "c"), "1 or more of them and 2 of them at most"),
    ("how", "median", "one of mean, sum"),
]


@pytest.mark.parametrize("values", GOOD)
def test_accepts_values_within_constraints(values: dict[str, Any]) -> None:
    assert {name: getattr(Part(**values), name) for name in values} == values


@pytest.mark.parametrize(("name", "value", "expected"), BAD)
def test_rejects_values_outside_constraints_in_one_line(name: str, value: Any, expected: str) -> None:
    with pytest.raises(ArgumentError) as error:
        Part(**{name: value})
    shown = list(value) if isinstance(value, tuple) else value
    assert str(error.value) == f"invalid part.{name} = {shown!r} (expected {expected})"


@dataclass(frozen=True)
class Narrower(Part):
    rounds: Annotated[int, Ge(2)] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounds > 2 and self.how == "sum":
            raise ArgumentError("part.rounds", self.rounds, "2 with sum")


def test_subclass_may_narrow_constraints() -> None:
    assert Narrower(rounds=3).share == 1.0
    for values in ({"rounds": 1}, {"rate": -1.0}, {"rounds": 3, "how": "sum"}):
        with pytest.raises(ArgumentError):
            Narrower(**values)


@dataclass(frozen=True)
class UnsupportedConstraint(CheckedOptions):
    when: Annotated[str, Timezone(None)] = ""


def test_rejects_unsupported_constraint() -> None:
    with pytest.raises(TypeError, match=r"Timezone.* \(expected Gt, Ge"):
        UnsupportedConstraint()


@dataclass(frozen=True)
class Training(CheckedOptions):
    """Local training."""

    epochs: int = 3
    """Passes over
    its data."""
    secret: int = 0
    lr: float = 0.1
    """Learning rate."""


@dataclass(frozen=True)
class LongTraining(Training):
    """The same, for longer.

    A second paragraph.
    """

    lr: float = 0.01
    """Smaller."""


@dataclass(frozen=True)
class Run(CheckedOptions):
    """A run with a group of options."""

    local: Training = field(default_factory=Training)
    """Local training."""


def test_group_of_options_must_be_one() -> None:
    with pytest.raises(ArgumentError) as caught:
        Run(local={"epochs": 3})  # type: ignore[arg-type]
    assert (caught.value.name, caught.value.expected) == ("local", "a Training(...)")
    assert Run(local=LongTraining()).local.lr == 0.01


def test_docstring_ends_with_options() -> None:
    assert Training.__doc__ == (
        "Local training.\n\nArgs:\n    epochs: Passes over its data.\n    lr: Learning rate."
    )
    rest = "A second paragraph.\n\nArgs:\n    epochs: Passes over its data.\n    lr: Smaller."
    assert LongTraining.__doc__ == LongTraining().__doc__ == f"The same, for longer.\n\n{rest}"


def test_help_of_method_lists_own_and_inherited_options() -> None:
    text = " ".join(pydoc.plain(pydoc.render_doc(fedstill.FedKD)).replace(" | ", " ").split())
    assert "levels: Levels of the quantizer (S in Eq. 4)" in text
    assert "student: The training of the student" in text
    group = pydoc.plain(pydoc.render_doc(type(fedstill.FedKD().student))).replace(" | ", " ")
    assert "batch: Public examples in a batch of the student." in " ".join(group.split())
