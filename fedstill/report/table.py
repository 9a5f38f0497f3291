"""The figures of a run as lines of a table, and the table in the terminal.

The page takes its lines from here, so that it and the terminal can never disagree.
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

from fedstill.core.words import MISSING, human_bytes, human_seconds, number
from fedstill.report.metrics import Measured, bare, head, in_a_sentence, spread_text
from fedstill.report.names import labels
from fedstill.report.result import CENTRAL, Result
from fedstill.report.result_parts import OverNodes
from fedstill.tasks.task import Figure

UNBROKEN = "\u00a0"  # a space at which no line ends


@dataclass(frozen=True)
class Row:
    """One line of the comparison. Values are what models are judged by, in percent; None is not measured."""

    name: str
    meaning: str
    value: float | None
    spread: float | None = None  # standard deviation over the nodes
    each: tuple[float, ...] = ()  # one value a node
    is_student: bool = False
    others: tuple[Measured, ...] = ()  # the task's other figures, in their order

    @property
    def measured(self) -> tuple[Measured, ...]:
        """All of the task's figures, in their order."""
        return (Measured(self.value, self.spread, self.each), *self.others)


def method_title(result: Result) -> str:
    """The method as people write it ("FedIOD"), or its name in the code where no title is given."""
    return result.title or result.method or "method " + MISSING


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


def comparison(result: Result) -> list[Row]:
    """The lines that a run is judged by, in the order of the papers' tables.

    What a method does not have (a node's model trained alone, an ensemble) its result holds as null, and
    there is no line; what a result does not hold at all was not measured.
    """
    figures = result.figures
    name, meaning = CENTRAL[result.central]
    ours = [Measured(result.reached[figure.key]) for figure in figures]
    ours_name = f"{name} ({method_title(result)})"
    names = labels(result)
    has_own = figures[0].key in (result.local or {})
    rows = []
    if "standalone" not in result.missing:
        alone = "each node alone, on its own data"
        rows.append(_over_nodes("standalone mean", alone, result.standalone, figures, names))
    if result.central == "nodes":
        mean = _over_nodes(ours_name, meaning, result.local, figures, names)
        ours = [
            dataclasses.replace(each, value=own.value) for each, own in zip(mean.measured, ours, strict=True)
        ]
        meaning, rows = mean.meaning, []  # the same models
    elif "standalone" in result.missing and has_own:
        own_meaning = "each node's own model, at the end"
        rows.append(_over_nodes("nodes' own models", own_meaning, result.local, figures, names))
    rows.append(_row(ours_name, meaning, ours, is_student=True))
    if "ensemble" not in result.missing and result.central != "ensemble":
        together = _among(
            "the nodes' models, answering together", (result.ensemble or {}).get("nodes"), names
        )
        rows.append(_row("teachers' ensemble", together, _alone(result.ensemble, figures)))
    rows.append(
        _row(
            "centralised",
            "one model, if all data lay in one place",
            _alone(result.centralised, figures),
        )
    )
    return rows


def _row(name: str, meaning: str, measured: Sequence[Measured], is_student: bool = False) -> Row:
    first, *others = measured
    return Row(name, meaning, first.value, first.spread, first.each, is_student, tuple(others))


def _alone(record: Mapping[str, Any] | None, figures: Sequence[Figure]) -> list[Measured]:
    """Figures of one model."""
    return [Measured(number(record, figure.key)) for figure in figures]


def _over_nodes(
    name: str,
    meaning: str,
    record: Mapping[str, OverNodes] | None,
    figures: Sequence[Figure],
    names: Mapping[str, str],
) -> Row:
    """A line with one value a node."""
    found = [(record or {}).get(figure.key, OverNodes()) for figure in figures]
    measured = [
        Measured(told.mean, told.std, tuple(value for value in told.per_node if value is not None))
        for told in found
    ]
    return _row(name, _among(meaning, found[0].nodes, names), measured)


def _among(meaning: str, nodes: Sequence[str] | None, names: Mapping[str, str]) -> str:
    """What a figure means; where it is not over all nodes, it names them."""
    if nodes is None:
        return meaning
    return f"{meaning} (only {', '.join(names.get(node, node) for node in nodes)})"


def texts(row: Row, figures: Sequence[Figure]) -> list[str]:
    """The figures of a row, each with its spread and its unit: "81.1% ± 4.2" or "not measured"."""
    return [spread_text(figure, each) for figure, each in zip(figures, row.measured, strict=False)]


def bare_texts(row: Row, figures: Sequence[Figure]) -> list[str]:
    """The same without units, and with a dash for what is not measured: "81.1 ± 4.2"."""
    told = []
    for figure, each in zip(figures, row.measured, strict=False):
        spread = "" if each.spread is None else f" \u00b1 {bare(figure, each.spread)}"
        told.append("-" if each.value is None else f"{bare(figure, each.value)}{spread}")
    return told


def print_table(record: Mapping[str, Any], console: Console) -> None:
    """Print the table at the end of a run: the task's figures, then bytes and time.

    ``record`` is the content of ``result.json``; what it lacks is printed as "not measured".
    Names come from users: they are printed as they are, never read as markup.
    """
    result = Result.of(record)
    # An explicit Text keeps rich from reading a name such as "[red]" as a colour.
    title = Text(result.name or "run")
    figures = result.figures
    several = len(figures) > 1  # then units stand above, to make room
    table = Table(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=(0, 1, 0, 0 if several else 1)
    )
    table.add_column("")
    for figure in figures:
        table.add_column(Text(in_a_sentence(head(figure, units=several))), justify="right", no_wrap=True)
    for row in comparison(result):
        style = "bold" if row.is_student else ""
        cells = bare_texts(row, figures) if several else texts(row, figures)
        table.add_row(*(Text(cell, style=style) for cell in (row.name, *cells)))
    console.print(table)

    from fedstill.report.privacy import in_words

    up, down = result.bytes.up, result.came_down
    seconds = result.seconds.total
    for label, value in (
        ("left the nodes", MISSING if up is None else human_bytes(up)),
        ("came to the nodes", MISSING if down is None else human_bytes(down)),
        ("privacy", in_words(result) or MISSING),
        ("time", MISSING if seconds is None else human_seconds(seconds)),
        *_reached(result),
    ):
        # Under each other where the terminal is narrow, and no figure parted from its unit.
        unbroken = re.sub(r"(?<=[0-9]) (?=\S)", UNBROKEN, value)
        told = textwrap.fill(
            f"  {label + ':':<19}{unbroken}",
            width=console.width,
            subsequent_indent=" " * 21,
            break_on_hyphens=False,
            drop_whitespace=True,
        )
        console.print(Text(told.replace(UNBROKEN, " ")), soft_wrap=True)


def _reached(result: Result) -> list[tuple[str, str]]:
    """How the nodes were reached, for a run whose nodes were elsewhere."""
    from fedstill.report.link import message_cost, time_split

    split, cost = time_split(result), message_cost(result)
    lines = [] if split is None else [("of it", split)]
    lines += [] if cost is None else [("messages", cost)]
    for event in result.events:
        why = f": {event.reason}" if event.reason else ""
        lines.append((event.node, f"{event.event} at question {event.number}{why}"))
    return lines
