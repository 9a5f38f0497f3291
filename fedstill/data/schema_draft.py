"""Drafts the schema of a table from some of its rows, for whoever knows the columns to correct.

It is measured on the rows, as no schema of a federation should be: its ranges and categories must be widened
to all that can be, at every node.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from fedstill.core.errors import ArgumentError, DataError
from fedstill.core.names import alike_note, has_decimal_comma, number_of, plain, without_point
from fedstill.core.table_schema import EMPTY, Schema, SchemaColumn
from fedstill.core.text_format import more_such

METADATA_COLUMNS = ("split", "patient", "site")  # columns that are read, and never learned from
MAX_CATEGORIES = 50  # categories: of a column with more different texts each is likely a name, or free text
MIN_SPAN = 1e-300  # a span below it has no digits to round to
MAX_TARGET_CLASSES = 20  # different whole numbers that are the classes of a target, and not amounts


def draft_schema(
    cells: Mapping[str, Sequence[str]],
    target: str,
    event: str = "",
    where: Callable[[int], str] = "row {}".format,
) -> tuple[Schema, dict[str, str]]:
    """A schema that allows some rows, and why it leaves columns out.

    A column of numbers has for its range what they span, rounded outwards to a digit of the span; any other
    has for its categories the texts that there are.

    Args:
        cells: by column.
        target: the column that is to be learned.
        event: of survival: the column that says whether the event came.
        where: for errors: where a row stands.

    Raises:
        ArgumentError: there is no such column.
        DataError: the target is empty somewhere, or says nothing; or no other column says anything.

    >>> cells = {"age": ["63", "48"], "id": ["a", "a"], "ill": ["no", "yes"]}
    >>> schema, left_out = draft_schema(cells, "ill")
    >>> schema.columns[0].range, schema.classes, left_out
    ((45.0, 65.0), ('no', 'yes'), {'id': "it is 'a' throughout"})
    """
    cells = {plain(key): [plain(cell) for cell in column] for key, column in cells.items()}
    target, event = plain(target), plain(event)
    for option, asked in (("--target", target), *((("--event", event),) if event else ())):
        if asked not in cells:
            raise ArgumentError(option, asked, f"one of the columns {', '.join(cells)}")
    columns, left_out = [], dict[str, str]()
    for key, column in cells.items():
        learned = key in (target, event)
        if not key or (
            key in METADATA_COLUMNS and not learned
        ):  # without a name it is a table's own numbering
            left_out |= {key: "it says what a row belongs to"} if key else {}
            continue
        whole = [cell for cell in column if cell.lower() not in EMPTY]
        if learned and len(whole) < len(column):
            empty = [row for row, cell in enumerate(column) if cell.lower() in EMPTY]
            more = more_such(len(empty))
            raise DataError(f"{where(empty[0])}: column {key!r} is empty, and is to be learned{more}")
        classes = key == event or (key == target and not event)
        found = _draft_column(key, whole, len(whole) < len(column), classes=classes)
        if isinstance(found, SchemaColumn):
            columns.append(found)
        elif learned:
            raise DataError(f"column {key!r} cannot be learned: {found}")
        else:
            left_out[key] = found
    if all(column.name in (target, event) for column in columns):
        raise DataError(f"no column beside {target!r} says anything")
    return Schema(target, tuple(columns), event), left_out


def find_rare_categories(schema: Schema, cells: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Categories that one row alone has, by column, where most of the column's are common.

    >>> cells = {"ward": [*"aaabbb", "B"], "ill": [*"yyynnny"]}
    >>> find_rare_categories(draft_schema(cells, "ill")[0], cells)
    {'ward': ['B']}
    """
    found = {}
    for column in schema.columns:
        counts = Counter(without_point(plain(cell)) for cell in cells[column.name])
        once = [each for each in column.categories if counts[each] == 1]
        if 0 < 2 * len(once) < len(column.categories):
            found[column.name] = once
    return found


def similar_category_notes(schema: Schema) -> list[str]:
    """Return a note on categories that differ by case, width or number form alone.

    >>> cells = {"ward": ["a", "A", "b"], "ill": ["y", "n", "y"]}
    >>> similar_category_notes(draft_schema(cells, "ill")[0])
    ["categories of 'ward' 'A' and 'a' differ by case alone, and count as two"]
    """
    notes = [alike_note(f"categories of {column.name!r}", column.categories) for column in schema.columns]
    return [note for note in notes if note]


def _draft_column(key: str, cells: Sequence[str], missing: bool, *, classes: bool) -> SchemaColumn | str:
    """A column, or why it is none; ``classes``: few whole numbers are categories."""
    different = sorted(set(map(without_point, cells)))
    commas = [cell for cell in different if has_decimal_comma(cell)]
    if commas and all(has_decimal_comma(cell) or number_of(cell) is not None for cell in different):
        return f"its numbers have commas, as {commas[0]!r}: write a decimal point, and no other separator"
    if len(different) < 2:
        return f"it is {different[0]!r} throughout" if different else "it is empty"
    numbers = [_parse_number(cell) for cell in different]
    amounts = [number for number in numbers if number is not None]
    few = classes and len(different) <= MAX_TARGET_CLASSES and all(number.is_integer() for number in amounts)
    if len(amounts) == len(different) and not few and min(amounts) < max(amounts):
        return SchemaColumn(name=key, range=round_outwards(amounts), missing=missing)
    if len(different) > MAX_CATEGORIES:
        odd = [cell for cell, number in zip(different, numbers, strict=True) if number is None]
        nearly = f", of which {len(amounts)} are numbers and {odd[0]!r} is none" if amounts and odd else ""
        return f"it has {len(different)} different texts{nearly}"
    if len(amounts) == len(different):
        different.sort(key=float)
    return SchemaColumn(name=key, type="category", categories=tuple(different), missing=missing)


def _parse_number(cell: str) -> float | None:
    value = number_of(cell)
    return value if value is not None and math.isfinite(value) else None


def round_outwards(numbers: Sequence[float]) -> tuple[float, float]:
    """The least and the largest of some numbers, moved apart to multiples of half a digit of their span.

    >>> round_outwards([18, 97]), round_outwards([0.0312, 0.0388]), round_outwards([-3, 4])
    ((15.0, 100.0), (0.031, 0.039), (-3.0, 4.0))
    """
    least, most = min(numbers), max(numbers)
    if not MIN_SPAN < most - least < math.inf:
        return least, most
    digit = math.floor(math.log10(most - least))
    step = 0.5 * 10.0**digit
    low = round(math.floor(least / step) * step, 1 - digit)
    high = round(math.ceil(most / step) * step, 1 - digit)
    return min(low, least), max(high, most)  # where floats are too coarse for it
