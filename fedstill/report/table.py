"""The figures of a run, in words and numbers that people read: percent, bytes, time.

The page and the terminal share what is here, so that they can never disagree.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

MISSING = "not measured"
UNBROKEN = "\u00a0"  # a space at which no line ends
LARGEST = 1e300  # what lies beyond, NaN and infinity too, is no figure to show


@dataclass(frozen=True)
class Row:
    """One line of the comparison. Accuracies are percent, from 0 to 100; None is not measured."""

    name: str
    meaning: str
    accuracy: float | None
    spread: float | None = None  # standard deviation over the nodes
    each: tuple[float, ...] = ()  # one accuracy a node
    is_student: bool = False


def pick(record: object, *keys: str) -> Any:
    """The value at a path of keys, or None where any part of the path is missing.

    >>> pick({"bytes": {"up": 3}}, "bytes", "up")
    3
    >>> pick({"bytes": None}, "bytes", "up") is None
    True
    """
    for key in keys:
        if not isinstance(record, Mapping):
            return None
        record = record.get(key)
    return record


def number(record: object, *keys: str) -> float | None:
    """The finite number at a path of keys, or None: a report shows no NaN and no guess.

    >>> number({"seconds": {"total": 2}}, "seconds", "total")
    2.0
    >>> number({"accuracy": float("nan")}, "accuracy") is None
    True
    """
    value = pick(record, *keys)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -LARGEST < value < LARGEST:
        return None
    return float(value)


def whole(record: object, *keys: str) -> int | None:
    """The number at a path of keys as a whole number (bytes, counts), or None."""
    value = number(record, *keys)
    return None if value is None else round(value)


def words(record: object, *keys: str) -> str | None:
    """The value at a path of keys as text, or None where it is missing or empty."""
    value = pick(record, *keys)
    return None if value in (None, "") else str(value)


def listed(names: Sequence[str]) -> str:
    """Names in a sentence.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    *before, last = names
    return f"{', '.join(before)} and {last}" if before else last


def percent(value: float) -> str:
    """A percentage with one decimal.

    >>> percent(93.37)
    '93.4%'
    """
    return f"{value:.1f}%"


def points(difference: float) -> str:
    """A difference of two percentages, with its sign.

    >>> points(12.34), points(-2), points(-0.01)
    ('+12.3', '-2.0', '0.0')
    """
    rounded = round(difference, 1)
    return f"{rounded:+.1f}" if rounded else "0.0"


def human_bytes(count: int) -> str:
    """Bytes in decimal units (1 kB is 1000 bytes), to about three digits.

    >>> human_bytes(999), human_bytes(16384), human_bytes(786_000), human_bytes(999_500)
    ('999 B', '16.4 kB', '786 kB', '1.0 MB')
    """
    if count < 1000:
        return f"{count} B"
    value = float(count)
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if value < 999.5:  # from here on it would print as 1000
            break
        value, unit = value / 1000, larger
    return f"{value:.1f} {unit}" if value < 99.95 else f"{value:.0f} {unit}"


def human_seconds(seconds: float) -> str:
    """A duration as a person says it.

    >>> human_seconds(0.01), human_seconds(42.34), human_seconds(192), human_seconds(7500)
    ('under 0.1 s', '42.3 s', '3 min 12 s', '2 h 5 min')
    """
    if seconds < 0.05:
        return "under 0.1 s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if seconds < 3599.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    hours, rest = divmod(round(seconds / 60), 60)
    return f"{hours} h {rest} min"


def method_title(result: Mapping[str, Any]) -> str:
    """The method as people write it ("FedIOD"), or its name in the code where no title is given."""
    return words(result, "title") or words(result, "method") or "method " + MISSING


# What a method is judged by: what to call it, and what it is.
CENTRAL: Mapping[str, tuple[str, str]] = {
    "student": ("student", "the central model that the server trained"),
    "virtual": ("average", "the nodes' models averaged, weighed by their data: made only to be measured"),
    "ensemble": ("ensemble", "all nodes' models answering together; there is no central model"),
    "nodes": ("nodes' mean", "the mean over the nodes' own models; there is no central model"),
}

NEEDS: Mapping[str, str] = {
    "same_architecture": "same architecture",
    "public": "public data",
    "public_labels": "labels of it",
    "split": "extractor and head",
    "student_kind": "student like a node's model",
}


def needs_words(needs: object) -> tuple[str, ...]:
    """What a method needs, in words, from its ``Needs`` or from what a result keeps of them.

    >>> needs_words({"public": True, "split": False})
    ('public data',)
    """
    told = needs if isinstance(needs, Mapping) else vars(needs)
    return tuple(word for key, word in NEEDS.items() if told.get(key) is True)


def central_of(result: Mapping[str, Any]) -> str:
    """What a run is judged by; a student, where its result is of before there was anything else."""
    central = words(result, "central") or ""
    return central if central in CENTRAL else "student"


def accuracy_of(result: Mapping[str, Any]) -> float | None:
    """Accuracy in percent of what a run is judged by."""
    accuracy = number(result, "accuracy")
    return number(result, "student", "accuracy") if accuracy is None else accuracy


def comparison(result: Mapping[str, Any]) -> list[Row]:
    """The lines that a run is judged by, in the order of the papers' tables.

    What a method does not have (a node's model trained alone, an ensemble) its result holds as null, and
    there is no line; what a result does not hold at all was not measured.
    """
    name, meaning = CENTRAL[central_of(result)]
    ours = Row(f"{name} ({method_title(result)})", meaning, accuracy_of(result), is_student=True)
    rows = []
    if not _has_none(result, "standalone"):
        alone = "each node alone, on its own data"
        rows.append(_over_nodes("standalone mean", alone, pick(result, "standalone", "accuracy")))
    if central_of(result) == "nodes":
        ours = dataclasses.replace(_over_nodes(ours.name, meaning, pick(result, "local", "accuracy")),
                                   accuracy=accuracy_of(result), is_student=True)  # fmt: skip
        rows = []  # the same models
    elif _has_none(result, "standalone") and pick(result, "local", "accuracy") is not None:
        own = "each node's own model, at the end"
        rows.append(_over_nodes("nodes' own models", own, pick(result, "local", "accuracy")))
    rows.append(ours)
    if not _has_none(result, "ensemble") and central_of(result) != "ensemble":
        together = _among("the nodes' models, answering together", pick(result, "ensemble"))
        rows.append(Row("teachers' ensemble", together, number(result, "ensemble", "accuracy")))
    rows.append(Row("centralised", "one model, if all data lay in one place",
                    number(result, "centralised", "accuracy")))  # fmt: skip
    return rows


def _over_nodes(name: str, meaning: str, figures: object) -> Row:
    """A line with one accuracy a node."""
    per_node = pick(figures, "per_node")
    each = [number({"node": value}, "node") for value in per_node] if isinstance(per_node, list) else []
    known = tuple(value for value in each if value is not None)
    return Row(name, _among(meaning, figures), number(figures, "mean"), number(figures, "std"), known)


def _among(meaning: str, figures: object) -> str:
    """What a figure means; where it is not over all nodes, it names them."""
    names = pick(figures, "nodes")
    return f"{meaning} (only {', '.join(map(str, names))})" if isinstance(names, list) else meaning


def _has_none(result: Mapping[str, Any], key: str) -> bool:
    return key in result and result[key] is None


def accuracy_text(row: Row) -> str:
    """The accuracy of a row with its spread, in percent: "81.1% ± 4.2" or "not measured"."""
    if row.accuracy is None:
        return MISSING
    return percent(row.accuracy) + ("" if row.spread is None else f" ± {row.spread:.1f}")


def print_table(result: Mapping[str, Any], console: Console) -> None:
    """Print the table at the end of a run: accuracies in percent, then bytes and time.

    ``result`` is the content of ``result.json``; what it lacks is printed as "not measured".
    Names come from users: they are printed as they are, never read as markup.
    """
    # An explicit Text keeps rich from reading a name such as "[red]" as a colour.
    table = Table(box=box.SIMPLE_HEAD, title=Text(words(result, "name") or "run"), title_justify="left")
    table.add_column("")
    table.add_column("accuracy", justify="right", no_wrap=True)
    for row in comparison(result):
        style = "bold" if row.is_student else ""
        table.add_row(Text(row.name, style=style), Text(accuracy_text(row), style=style))
    console.print(table)

    from fedstill.report.privacy import in_words

    up, down = whole(result, "bytes", "up"), whole(result, "bytes", "down")
    seconds = number(result, "seconds", "total")
    for label, value in (
        ("left the nodes", MISSING if up is None else human_bytes(up)),
        ("came to the nodes", MISSING if down is None else human_bytes(down)),
        ("privacy", in_words(result) or MISSING),
        ("time", MISSING if seconds is None else human_seconds(seconds)),
        *_reached(result),
    ):
        # Under each other where the terminal is narrow, and no figure parted from its unit.
        figures = re.sub(r"(?<=[0-9]) (?=\S)", UNBROKEN, value)
        told = textwrap.fill(
            f"  {label + ':':<19}{figures}",
            width=console.width,
            subsequent_indent=" " * 21,
            break_on_hyphens=False,
            drop_whitespace=True,
        )
        console.print(Text(told.replace(UNBROKEN, " ")), soft_wrap=True)


def _reached(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How the nodes were reached, for a run whose nodes were elsewhere."""
    from fedstill.report.link import events, message_cost, time_split

    split, cost = time_split(result), message_cost(result)
    lines = [] if split is None else [("of it", split)]
    lines += [] if cost is None else [("messages", cost)]
    for event in events(result):
        why = f": {event['why']}" if event["why"] else ""
        lines.append((str(event["node"]), f"{event['what']} at question {event['number']}{why}"))
    return lines
