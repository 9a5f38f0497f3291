"""A table's schema: which columns a federation takes, with the ranges and categories that they may have.

A server proposes it and every node checks its own rows against it. Numbers are scaled by the declared range,
or by a declared scale within it, never by what a node measures by itself: each figure measured on private
rows and then shared is a release of its own, which a run of method column-sums asks for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from fedstill.core.errors import ArgumentError
from fedstill.core.names import normalize_name, strip_decimal_zeros
from fedstill.core.text_format import brief_repr

MAX_FEATURES = 100_000  # features
EMPTY_CELLS = ("", "na", "n/a", "<na>", "nan", "null", "none", "?")  # cells without a value, in whatever case
MAX_INTERVALS = 1000  # intervals of time


@dataclass(frozen=True, kw_only=True)
class SchemaColumn:
    """One column.

    Raises:
        ArgumentError: neither a range nor categories, or both.
    """

    name: str
    """As in the header."""

    type: Literal["number", "category"] = "number"
    """What its cells are."""

    range: tuple[float, ...] = ()
    """Of numbers: the lowest and the highest that are allowed."""

    scale: tuple[float, ...] = ()
    """Of numbers that are learned from: the two within the range that become -1 and 1; what lies beyond them
    is taken as the nearer. Empty: the range itself."""

    categories: tuple[str, ...] = ()
    """Of categories: all of them, two or more, in the order of their numbers."""

    missing: bool = False
    """Whether cells may be empty. Then a further feature says which are."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", normalize_name(self.name))
        object.__setattr__(self, "categories", tuple(map(normalize_name, self.categories)))
        prefix = f"column {self.name!r}: "
        if not self.name:
            raise ArgumentError("name", self.name, "a text, as in the header")
        if self.type == "number":
            ordered = len(self.range) == 2 and self.range[0] < self.range[1]
            if not ordered or not all(math.isfinite(each) for each in self.range):
                raise ArgumentError(f"{prefix}range", list(self.range), "the lowest and a higher number")
            if self.categories:
                raise ArgumentError(f"{prefix}categories", list(self.categories), "none, of numbers")
            (low, high), scale = self.range, self.scale
            if scale and not (len(scale) == 2 and low <= scale[0] < scale[1] <= high):
                raise ArgumentError(
                    f"{prefix}scale", list(scale), f"two rising numbers of {low:g} to {high:g}"
                )
            return
        for part in ("range", "scale"):
            if getattr(self, part):
                raise ArgumentError(f"{prefix}{part}", list(getattr(self, part)), "none, of categories")
        forms = [strip_decimal_zeros(each) for each in self.categories]  # 1 and 1.0 are one
        if len(self.categories) < 2 or "" in self.categories or first_duplicate(forms):
            allowed = "two or more different texts"
            raise ArgumentError(f"{prefix}categories", list(self.categories), allowed)

    @property
    def features(self) -> tuple[str, ...]:
        """The names of its features.

        >>> SchemaColumn(name="sex", type="category", categories=("f", "m"), missing=True).features
        ('sex: f', 'sex: m', 'sex: missing')
        """
        own = [self.name] if self.type == "number" else [f"{self.name}: {each}" for each in self.categories]
        return (*own, *([f"{self.name}: missing"] if self.missing else []))

    def category_index(self, text: str) -> int | None:
        """Return the index of a cell's category, from 0, where 1.0 is 1; None if it is none of them."""
        if text in self.categories:
            return self.categories.index(text)
        whole = strip_decimal_zeros(text)
        return next((n for n, each in enumerate(self.categories) if strip_decimal_zeros(each) == whole), None)

    @property
    def scaled_range(self) -> tuple[float, float]:
        """Of numbers: what becomes -1 and 1."""
        low, high = self.scale or self.range
        return low, high

    @property
    def allowed_values(self) -> str:
        """What its cells may be, in words."""
        if self.type == "category":
            some = ", ".join(self.categories)
        else:
            some = f"{self.range[0]:g} to {self.range[1]:g}"
        return f"{some}, or nothing" if self.missing else some


@dataclass(frozen=True)
class Schema:
    """The columns of a table and which of them is learned; without columns it is none.

    Args:
        target: the column that is learned.
        columns: all that are read.
        event: survival: the column that says whether the target, a time, ended with the event or was cut
            short (censored). A category of two, of which the second is the event. Empty: the target is no
            time until an event.
        intervals: survival: into how many equal intervals the target's range is cut.

    A number is the feature ``2 (value - lowest) / (highest - lowest) - 1`` of its range, or of its scale and
    then within -1..1; a category as many features as there are, of which one is 1 and the others 0. Where
    cells may be empty one more feature is 1 if this one is, and its others are 0.

    >>> age = SchemaColumn(name="age", range=(0.0, 100.0), missing=True)
    >>> ill = SchemaColumn(name="ill", type="category", categories=("no", "yes"))
    >>> schema = Schema("ill", (age, ill))
    >>> schema.features, schema.classes
    (('age', 'age: missing'), ('no', 'yes'))

    Of survival what is learned are the hazards of the intervals, and their names are its classes.

    >>> died = SchemaColumn(name="died", type="category", categories=("no", "yes"))
    >>> months = SchemaColumn(name="months", range=(0.0, 60.0))
    >>> schema = Schema("months", (age, months, died), event="died", intervals=3)
    >>> schema.features, schema.classes
    (('age', 'age: missing'), ('0 to 20', '20 to 40', '40 to 60'))

    Raises:
        ArgumentError: no such target or event, or one that may be missing or has a scale; an event that is
            no category of two, or of a target that is no number; a column twice, none beside these, or more
            features than a network can have.
    """

    target: str = ""
    columns: tuple[SchemaColumn, ...] = ()
    event: str = ""
    intervals: int = 10

    __repr__ = brief_repr

    def __post_init__(self) -> None:
        if not self:
            return
        object.__setattr__(self, "target", normalize_name(self.target))
        object.__setattr__(self, "event", normalize_name(self.event))
        names = [column.name for column in self.columns]
        if twice := first_duplicate(names):
            raise ArgumentError("columns", twice, "each name once")
        if self.target not in names:
            raise ArgumentError("target", self.target, f"one of the columns {', '.join(names)}")
        if self.target_column.missing:
            raise ArgumentError(f"column {self.target!r}: missing", True, "false, as it is the target")
        if self.target_column.scale:
            allowed = "none, as it is the target"
            raise ArgumentError(f"column {self.target!r}: scale", list(self.target_column.scale), allowed)
        if self.event:
            self._check_event()
        if not 1 <= len(self.features) <= MAX_FEATURES:
            raise ArgumentError(
                "columns", names, f"one or more beside the target, up to {MAX_FEATURES} features"
            )

    def _check_event(self) -> None:
        found = next((column for column in self.columns if column.name == self.event), None)
        if found is None or found.missing or len(found.categories) != 2:
            allowed = "one of the columns, a category of two that is never missing: the second is the event"
            raise ArgumentError("event", self.event, allowed)
        if self.target_column.categories:
            raise ArgumentError("target", self.target, "a number, the time at which the event came or not")
        if not 1 <= self.intervals <= MAX_INTERVALS:
            raise ArgumentError("intervals", self.intervals, f"from 1 to {MAX_INTERVALS}")

    def __bool__(self) -> bool:
        return bool(self.columns)

    @property
    def target_type(self) -> Literal["category", "number", "time until an event"]:
        """What its target is."""
        return "time until an event" if self.event else self.target_column.type

    @property
    def target_column(self) -> SchemaColumn:
        """The column that is learned."""
        return next(column for column in self.columns if column.name == self.target)

    @property
    def input_columns(self) -> tuple[SchemaColumn, ...]:
        """The columns that it is learned from, in their order."""
        return tuple(column for column in self.columns if column.name not in (self.target, self.event))

    @property
    def features(self) -> tuple[str, ...]:
        """The names of all features, in their order."""
        return tuple(name for column in self.input_columns for name in column.features)

    @property
    def classes(self) -> tuple[str, ...]:
        """The categories of the target, the intervals of a time, or the name of one that is a number."""
        if not self.event:
            return self.target_column.categories or (self.target,)
        (low, high), count = self.target_column.range, self.intervals
        ends = [low + (high - low) * place / count for place in range(count + 1)]
        return tuple(f"{first:g} to {end:g}" for first, end in pairwise(ends))

    def feature_slices(self) -> list[tuple[SchemaColumn, slice]]:
        """Where each column's features are."""
        ends = [0]
        for column in self.input_columns:
            ends.append(ends[-1] + len(column.features))
        slices = [slice(first, end) for first, end in pairwise(ends)]
        return list(zip(self.input_columns, slices, strict=True))


NO_SCHEMA = Schema()


def schema_difference(one: Schema, other: Schema) -> str:
    """In what two schemas differ, in words; empty: they are equal.

    >>> age, old = (SchemaColumn(name="age", range=(0.0, most)) for most in (99.0, 120.0))
    >>> ill = SchemaColumn(name="ill", range=(0.0, 1.0))
    >>> schema_difference(Schema("ill", (age, ill)), Schema("age", (old, ill)))
    "target, column 'age'"
    """
    if one == other:
        return ""
    mine, others = ({column.name: column for column in schema.columns} for schema in (one, other))
    parts = [part for part in ("target", "event", "intervals") if getattr(one, part) != getattr(other, part)]
    parts += [f"column {name!r}" for name in mine | others if mine.get(name) != others.get(name)]
    return ", ".join(parts) or "the order of columns"


def decode_row(row: Sequence[float], schema: Schema) -> dict[str, str]:
    """The cells of a row of features by column, as people read them; nothing where one is missing.

    >>> age = SchemaColumn(name="age", range=(0.0, 100.0), missing=True)
    >>> ward = SchemaColumn(name="ward", type="category", categories=("a", "b"))
    >>> decode_row([0.5, 0.0, 0.0, 1.0], Schema("x", (age, ward, SchemaColumn(name="x", range=(0.0, 1.0)))))
    {'age': '75', 'ward': 'b'}
    """
    cells = {}
    for column, place in schema.feature_slices():
        own = list(row[place])
        if column.missing and own[-1] > 0.5:
            cells[column.name] = ""
        elif column.categories:
            cells[column.name] = column.categories[own.index(max(own))]
        else:
            low, high = column.scaled_range
            cells[column.name] = f"{low + (own[0] + 1) / 2 * (high - low):.4g}"
    return cells


def first_duplicate(names: Sequence[str]) -> str:
    """The first name that stands twice; empty: none."""
    seen: set[str] = set()
    for name in names:  # a server may send a hundred thousand
        if name in seen:
            return name
        seen.add(name)
    return ""
