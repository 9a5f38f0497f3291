"""Draft the schema of a table from some of its rows, for a person to correct.

The draft is measured on rows, which the schema of a federation must not be: ranges and categories must be
widened to all values possible at any node.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from fedstill.core.errors import ArgumentError, DataError
from fedstill.core.name_normalization import (
    has_decimal_comma,
    normalize_name,
    parse_number,
    similar_names_note,
    strip_decimal_zeros,
)
from fedstill.core.table_schema import EMPTY_CELLS, SchemaColumn, TableSchema
from fedstill.core.text_format import more_suffix

METADATA_COLUMNS = ("split", "patient", "site")  # never used as inputs
MAX_CATEGORIES = 50  # columns with more distinct texts are likely names or free text
MIN_SPAN = 1e-300  # smaller spans cannot be rounded
MAX_TARGET_CLASSES = 20  # distinct whole numbers of a target that are classes, not quantities


def draft_schema(
    cells: Mapping[str, Sequence[str]],
    target: str,
    event: str = "",
    locate: Callable[[int], str] = "row {}".format,
) -> tuple[TableSchema, dict[str, str]]:
    """Return a schema that fits some rows, and why it leaves out columns.

    The range of a numeric column is its span, rounded outwards; other columns have their texts as categories.

    Args:
        cells: by column.
        target: column to be predicted.
        event: survival: column that says whether the event occurred.
        locate: returns the position of a row, for errors.

    Raises:
        ArgumentError: there is no such column.
        DataError: the target is empty somewhere or constant, or no other column is usable.

    >>> cells = {"age": ["63", "48"], "id": ["a", "a"], "ill": ["no", "yes"]}
    >>> schema, left_out = draft_schema(cells, "ill")
    >>> schema.columns[0].range, schema.classes, left_out
    ((45.0, 65.0), ('no', 'yes'), {'id': "it is 'a' throughout"})
    """
    cells = {normalize_name(key): [normalize_name(cell) for cell in column] for key, column in cells.items()}
    target, event = normalize_name(target), normalize_name(event)
    for option, requested in (("--target", target), *((("--event", event),) if event else ())):
        if requested not in cells:
            raise ArgumentError(option, requested, f"one of the columns {', '.join(cells)}")
    columns, left_out = [], dict[str, str]()
    for key, column in cells.items():
        is_target = key in (target, event)
        if not key or (key in METADATA_COLUMNS and not is_target):  # a column without a name numbers the rows
            left_out |= {key: "it is metadata"} if key else {}
            continue
        filled = [cell for cell in column if cell.lower() not in EMPTY_CELLS]
        if is_target and len(filled) < len(column):
            empty_rows = [row for row, cell in enumerate(column) if cell.lower() in EMPTY_CELLS]
            others = more_suffix(len(empty_rows))
            raise DataError(f"{locate(empty_rows[0])}: column {key!r} is empty, but is the target{others}")
        are_classes = key == event or (key == target and not event)
        column_draft = _draft_column(key, filled, len(filled) < len(column), are_classes=are_classes)
        if isinstance(column_draft, SchemaColumn):
            columns.append(column_draft)
        elif is_target:
            raise DataError(f"column {key!r} cannot be the target: {column_draft}")
        else:
            left_out[key] = column_draft
    if all(column.name in (target, event) for column in columns):
        raise DataError(f"no column except {target!r} is usable")
    return TableSchema(target, tuple(columns), event), left_out


def _draft_column(key: str, cells: Sequence[str], missing: bool, *, are_classes: bool) -> SchemaColumn | str:
    """Return a column of the schema, or the reason why there is none."""
    texts = sorted(set(map(strip_decimal_zeros, cells)))
    with_comma = [cell for cell in texts if has_decimal_comma(cell)]
    if with_comma and all(has_decimal_comma(cell) or parse_number(cell) is not None for cell in texts):
        return f"its numbers have commas, as {with_comma[0]!r}: write a decimal point, and no other separator"
    if len(texts) < 2:
        return f"it is {texts[0]!r} throughout" if texts else "it is empty"
    numbers = [_parse_number(cell) for cell in texts]
    numbers_found = [number for number in numbers if number is not None]
    is_categorical = (
        are_classes
        and len(texts) <= MAX_TARGET_CLASSES
        and all(number.is_integer() for number in numbers_found)
    )
    if len(numbers_found) == len(texts) and not is_categorical and min(numbers_found) < max(numbers_found):
        return SchemaColumn(name=key, range=round_outwards(numbers_found), missing=missing)
    if len(texts) > MAX_CATEGORIES:
        not_numbers = [cell for cell, number in zip(texts, numbers, strict=True) if number is None]
        detail = (
            f", of which {len(numbers_found)} are numbers and {not_numbers[0]!r} is none"
            if numbers_found and not_numbers
            else ""
        )
        return f"it has {len(texts)} different texts{detail}"
    if len(numbers_found) == len(texts):
        texts.sort(key=float)
    return SchemaColumn(name=key, type="category", categories=tuple(texts), missing=missing)


def _parse_number(cell: str) -> float | None:
    value = parse_number(cell)
    return value if value is not None and math.isfinite(value) else None


def round_outwards(numbers: Sequence[float]) -> tuple[float, float]:
    """Return minimum and maximum, rounded outwards to half a digit of their span.

    >>> round_outwards([18, 97]), round_outwards([0.0312, 0.0388]), round_outwards([-3, 4])
    ((15.0, 100.0), (0.031, 0.039), (-3.0, 4.0))
    """
    lowest, highest = min(numbers), max(numbers)
    if not MIN_SPAN < highest - lowest < math.inf:
        return lowest, highest
    digit = math.floor(math.log10(highest - lowest))
    step = 0.5 * 10.0**digit
    low = round(math.floor(lowest / step) * step, 1 - digit)
    high = round(math.ceil(highest / step) * step, 1 - digit)
    return min(low, lowest), max(high, highest)  # if floats are too coarse


def find_rare_categories(schema: TableSchema, cells: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return categories that occur once, by column, if most categories of the column are common.

    >>> cells = {"ward": [*"aaabbb", "B"], "ill": [*"yyynnny"]}
    >>> find_rare_categories(draft_schema(cells, "ill")[0], cells)
    {'ward': ['B']}
    """
    rare = {}
    for column in schema.columns:
        counts = Counter(strip_decimal_zeros(normalize_name(cell)) for cell in cells[column.name])
        single = [category for category in column.categories if counts[category] == 1]
        if 0 < 2 * len(single) < len(column.categories):
            rare[column.name] = single
    return rare


def similar_category_notes(schema: TableSchema) -> list[str]:
    """Return notes on categories that differ only by case, width or number format.

    >>> cells = {"ward": ["a", "A", "b"], "ill": ["y", "n", "y"]}
    >>> similar_category_notes(draft_schema(cells, "ill")[0])
    ["categories of 'ward' 'A' and 'a' differ by case only, and count as two"]
    """
    notes = [
        similar_names_note(f"categories of {column.name!r}", column.categories) for column in schema.columns
    ]
    return [note for note in notes if note]
