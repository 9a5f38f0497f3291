"""Table schemas: the columns of a federation's tables with their ranges and categories.

The server proposes a schema, and every node checks its rows against it. Numbers are scaled by the declared
range or scale, never by statistics of the rows: each statistic that is measured on private rows and then
shared is a release of its own, for which there is the method column-sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from fedstill.core.errors import ArgumentError
from fedstill.core.name_normalization import normalize_name, strip_decimal_zeros
from fedstill.core.text_format import brief_repr, format_number

MAX_FEATURES = 100_000  # features
EMPTY_CELLS = ("", "na", "n/a", "<na>", "nan", "null", "none", "?")  # missing cells, in any case
MAX_INTERVALS = 1000  # time intervals of survival


@dataclass(frozen=True, kw_only=True)
class SchemaColumn:
    """One column of a table.

    Raises:
        ArgumentError: neither a range nor categories, or both.

    Example:
        >>> SchemaColumn(name="age", range=(0.0, 100.0)).feature_names
        ('age',)
    """

    name: str
    """Name in the header."""

    type: Literal["number", "category"] = "number"
    """Type of its cells."""

    range: tuple[float, ...] = ()
    """Numbers: the lowest and the highest valid value."""

    scale: tuple[float, ...] = ()
    """Numeric inputs: the two values within the range that become -1 and 1. Values outside are clamped.
    Empty: the range."""

    categories: tuple[str, ...] = ()
    """Categories: two or more, in the order of their indices."""

    missing: bool = False
    """Allow empty cells. A further feature is 1 for empty cells."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", normalize_name(self.name))
        object.__setattr__(self, "categories", tuple(map(normalize_name, self.categories)))
        suffix = f" of column {self.name!r}"
        if not self.name:
            raise ArgumentError("name", self.name, "the name in the header")
        if self.type == "number":
            is_range = len(self.range) == 2 and self.range[0] < self.range[1]
            if not is_range or not all(math.isfinite(value) for value in self.range):
                raise ArgumentError(f"range{suffix}", list(self.range), "the lowest and a higher number")
            if self.categories:
                raise ArgumentError(f"categories{suffix}", list(self.categories), "none for a number")
            (low, high), scale = self.range, self.scale
            if scale and not (len(scale) == 2 and low <= scale[0] < scale[1] <= high):
                raise ArgumentError(
                    f"scale{suffix}", list(scale), f"two rising numbers of {low:g} to {high:g}"
                )
            return
        for part in ("range", "scale"):
            if getattr(self, part):
                raise ArgumentError(f"{part}{suffix}", list(getattr(self, part)), "none for a category")
        plain_names = [strip_decimal_zeros(value) for value in self.categories]  # 1 and 1.0 are equal
        if len(self.categories) < 2 or "" in self.categories or first_duplicate(plain_names):
            expected = "two or more different texts"
            raise ArgumentError(f"categories{suffix}", list(self.categories), expected)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the column's features.

        >>> SchemaColumn(name="sex", type="category", categories=("f", "m"), missing=True).feature_names
        ('sex: f', 'sex: m', 'sex: missing')
        """
        names = (
            [self.name]
            if self.type == "number"
            else [f"{self.name}: {category}" for category in self.categories]
        )
        return (*names, *([f"{self.name}: missing"] if self.missing else []))

    def category_index(self, text: str) -> int | None:
        """Return the index of a category, from 0, where 1.0 equals 1; None if it is not a category."""
        if text in self.categories:
            return self.categories.index(text)
        plain_name = strip_decimal_zeros(text)
        return next(
            (
                index
                for index, category in enumerate(self.categories)
                if strip_decimal_zeros(category) == plain_name
            ),
            None,
        )

    @property
    def scaled_range(self) -> tuple[float, float]:
        """The two numbers that become -1 and 1."""
        low, high = self.scale or self.range
        return low, high

    @property
    def allowed_values(self) -> str:
        """Valid cells in words."""
        if self.type == "category":
            some = ", ".join(self.categories)
        else:
            some = f"{format_number(self.range[0])} to {format_number(self.range[1])}"
        return f"{some}, or nothing" if self.missing else some


@dataclass(frozen=True)
class TableSchema:
    """The columns of a table and its target. Without columns it is false.

    A number becomes the feature ``2 (value - low) / (high - low) - 1`` of its range, or of its scale and then
    clamped to -1..1. A category becomes one-hot features. If cells may be missing, one more feature is 1 for
    a missing cell, whose other features are 0.

    Args:
        target: name of the target column.
        columns: all columns that are read.
        event: survival: the column that says whether the target, a time, ended with the event or was
            censored. It has two categories, of which the second is the event. Empty: the target is not a time
            until an event.
        intervals: survival: number of equal intervals of the target's range.

    >>> age = SchemaColumn(name="age", range=(0.0, 100.0), missing=True)
    >>> ill = SchemaColumn(name="ill", type="category", categories=("no", "yes"))
    >>> schema = TableSchema("ill", (age, ill))
    >>> schema.feature_names, schema.classes
    (('age', 'age: missing'), ('no', 'yes'))

    For survival, the hazards of the intervals are learned. The intervals are the classes.

    >>> died = SchemaColumn(name="died", type="category", categories=("no", "yes"))
    >>> months = SchemaColumn(name="months", range=(0.0, 60.0))
    >>> schema = TableSchema("months", (age, months, died), event="died", intervals=3)
    >>> schema.feature_names, schema.classes
    (('age', 'age: missing'), ('0 to 20', '20 to 40', '40 to 60'))

    Raises:
        ArgumentError: no such target or event; a target that may be missing or has a scale; an event that
            does not have two categories, or whose target is not a number; duplicate columns; no other column,
            or more than 100,000 features.
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
            raise ArgumentError(f"missing of column {self.target!r}", True, "false, as it is the target")
        if self.target_column.scale:
            expected = "none, as it is the target"
            raise ArgumentError(f"scale of column {self.target!r}", list(self.target_column.scale), expected)
        if self.event:
            self._check_event()
        if not 1 <= len(self.feature_names) <= MAX_FEATURES:
            raise ArgumentError(
                "columns", names, f"one or more besides the target, with up to {MAX_FEATURES} features"
            )

    def _check_event(self) -> None:
        event_column = next((column for column in self.columns if column.name == self.event), None)
        if event_column is None or event_column.missing or len(event_column.categories) != 2:
            expected = "a column of two categories that is never missing; the second category is the event"
            raise ArgumentError("event", self.event, expected)
        if self.target_column.categories:
            raise ArgumentError("target", self.target, "a number: the time until the event or censoring")
        if not 1 <= self.intervals <= MAX_INTERVALS:
            raise ArgumentError("intervals", self.intervals, f"from 1 to {MAX_INTERVALS}")

    def __bool__(self) -> bool:
        return bool(self.columns)

    @property
    def target_kind(self) -> Literal["category", "number", "time until an event"]:
        """Kind of the target."""
        return "time until an event" if self.event else self.target_column.type

    @property
    def target_column(self) -> SchemaColumn:
        """The target column."""
        return next(column for column in self.columns if column.name == self.target)

    @property
    def input_columns(self) -> tuple[SchemaColumn, ...]:
        """The input columns, in their order."""
        return tuple(column for column in self.columns if column.name not in (self.target, self.event))

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of all features, in their order."""
        return tuple(name for column in self.input_columns for name in column.feature_names)

    @property
    def classes(self) -> tuple[str, ...]:
        """Categories of the target, intervals of a time, or the name of a numeric target."""
        if not self.event:
            return self.target_column.categories or (self.target,)
        (low, high), count = self.target_column.range, self.intervals
        ends = [low + (high - low) * step / count for step in range(count + 1)]
        return tuple(f"{first:g} to {end:g}" for first, end in pairwise(ends))

    def feature_slices(self) -> list[tuple[SchemaColumn, slice]]:
        """Return each input column with the slice of its features."""
        ends = [0]
        for column in self.input_columns:
            ends.append(ends[-1] + len(column.feature_names))
        slices = [slice(first, end) for first, end in pairwise(ends)]
        return list(zip(self.input_columns, slices, strict=True))


NO_SCHEMA = TableSchema()


def schema_difference(one: TableSchema, other: TableSchema) -> str:
    """Return the differences of two schemas in words; empty if they are equal.

    >>> age, old = (SchemaColumn(name="age", range=(0.0, most)) for most in (99.0, 120.0))
    >>> ill = SchemaColumn(name="ill", range=(0.0, 1.0))
    >>> schema_difference(TableSchema("ill", (age, ill)), TableSchema("age", (old, ill)))
    "target, column 'age'"
    """
    if one == other:
        return ""
    columns, other_columns = ({column.name: column for column in schema.columns} for schema in (one, other))
    parts = [part for part in ("target", "event", "intervals") if getattr(one, part) != getattr(other, part)]
    parts += [
        f"column {name!r}" for name in columns | other_columns if columns.get(name) != other_columns.get(name)
    ]
    return ", ".join(parts) or "the order of columns"


def decode_row(row: Sequence[float], schema: TableSchema) -> dict[str, str]:
    """Return the cells of a row of features by column, as text. A missing cell is empty.

    >>> age = SchemaColumn(name="age", range=(0.0, 100.0), missing=True)
    >>> ward = SchemaColumn(name="ward", type="category", categories=("a", "b"))
    >>> schema = TableSchema("x", (age, ward, SchemaColumn(name="x", range=(0.0, 1.0))))
    >>> decode_row([0.5, 0.0, 0.0, 1.0], schema)
    {'age': '75', 'ward': 'b'}
    """
    cells = {}
    for column, position in schema.feature_slices():
        values = list(row[position])
        if column.missing and values[-1] > 0.5:
            cells[column.name] = ""
        elif column.categories:
            cells[column.name] = column.categories[values.index(max(values))]
        else:
            low, high = column.scaled_range
            cells[column.name] = f"{low + (values[0] + 1) / 2 * (high - low):.4g}"
    return cells


def first_duplicate(names: Sequence[str]) -> str:
    """Return the first name that occurs twice; empty if there is none."""
    seen: set[str] = set()
    for name in names:  # linear time, as a server may send 100,000 names
        if name in seen:
            return name
        seen.add(name)
    return ""
