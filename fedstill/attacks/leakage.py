"""What an attack got, as reports have it: figures, columns of comparisons, pictures side by side.

A run's ``leakage.json`` holds these ready to be shown, so that its report needs no attack's code.

What attacks got from a run, as its ``leakage.json`` holds it: ready to be shown, whichever they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedstill.core.config_tables import load_record
from fedstill.core.run_writer import read_result

LEAKAGE_FILE = "leakage.json"


@dataclass(frozen=True, kw_only=True)
class LeakageMetric:
    """One figure that an attack got; those of one ``attack`` on one ``target`` make a line of a table.

    Args:
        attack: which one, where an attack is tried in several ways; may be empty.
        target: whom or what it was tried on: a node's name, "student".
        metric: what the number is: "AUC".
        value: the number itself, in the unit in which it is written; None where words alone tell it.
        interval: the ends of its confidence interval, in the same unit.
        text: the figure as it is written, with its unit; empty: the number, to four digits.
        baseline: what comes without attacking, as by guessing.
        note: small print beside it.
        column: name of the :class:`LeakageColumn` of a comparison that it stands in.
        detail: for the page alone, and not for the terminal.
    """

    target: str
    metric: str
    attack: str = ""
    value: float | None = None
    interval: tuple[float, float] | None = None
    text: str = ""
    baseline: str = ""
    note: str = ""
    column: str = ""
    detail: bool = False

    @property
    def written(self) -> str:
        """The figure as it is written, without its small print.

        >>> LeakageMetric(target="node-0", metric="right", value=0.51236).written
        '0.5124'
        """
        return self.text or ("-" if self.value is None else f"{self.value:.4g}")


@dataclass(frozen=True, kw_only=True)
class LeakageColumn:
    """A figure by which a comparison sets methods side by side: that of the strongest attack of those tried.

    Args:
        name: in CSV files, and in :class:`LeakageMetric`.
        head: in terminals and Markdown: "membership AUC".
        title: on the page, with its unit: "Membership AUC %"; empty: as in terminals.
        description: how to read it, in a sentence.
        digits: after the point.
        lower_is_stronger: whether the least of several values is the strongest attack's, as with p-values.
        guess: of a figure in percent: what guessing gets, beside which it is drawn.
        axis: what the figure is called where methods are drawn against it; empty: they are not.
    """

    name: str
    head: str
    title: str = ""
    description: str = ""
    digits: int = 1
    lower_is_stronger: bool = False
    guess: float | None = None
    axis: str = ""

    @property
    def heading(self) -> str:
        """What the page calls it."""
        return self.title or f"{self.head[:1].upper()}{self.head[1:]}"


@dataclass(frozen=True, kw_only=True)
class ImageStrip:
    """One row of pictures: its head, the name of its stack ``(N, C, H, W)`` uint8, and words below each."""

    head: str
    stack: str
    below: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ImageTable:
    """Pictures side by side: strips, from top to bottom, of as many as there are ``heads``; ``says`` is what
    whoever has them should know.
    """

    title: str
    heads: tuple[str, ...]
    strips: tuple[ImageStrip, ...]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class AttackReport:
    """What one attack got; its parts are those of :class:`fedstill.attacks.attack.Attack`."""

    name: str
    title: str = ""
    strength: str = ""
    about: tuple[tuple[str, str], ...] = ()
    rows: tuple[LeakageMetric, ...] = ()
    columns: tuple[LeakageColumn, ...] = ()
    notes: tuple[str, ...] = ()
    pictures: tuple[ImageTable, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SkippedAttack:
    """An attack that was not tried, and why."""

    attack: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Leakage:
    """All of it.

    Args:
        audit: how what was heard differs from the run's audit log; None: it does not.
        epsilon: that holds at each node; None: there is no guarantee.
        config: the attacks with their options, as a table.
    """

    audit: str | None
    attacks: tuple[AttackReport, ...] = ()
    skipped: tuple[SkippedAttack, ...] = ()
    sentence: str = ""
    leaves: tuple[str, ...] = ()
    epsilon: float | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    machine: str = ""
    seconds: float | None = None

    @classmethod
    def read(cls, folder: Path) -> Leakage | None:
        """Of the run in a folder; None where nobody attacked it.

        Raises:
            RunFolderError: the file is spoilt.
        """
        path = folder / LEAKAGE_FILE
        return load_record(cls, read_result(path), path) if path.exists() else None


@dataclass(frozen=True)
class TableLine:
    """The figures that one attack got of one target, by their names."""

    attack: str
    target: str
    metrics: Mapping[str, LeakageMetric]


def table_lines(rows: Iterable[LeakageMetric]) -> list[TableLine]:
    """Rows of one attack on one target as a line each, in the order of their first ones."""
    found: dict[tuple[str, str], dict[str, LeakageMetric]] = {}
    for row in rows:
        found.setdefault((row.attack, row.target), {})[row.metric] = row
    return [TableLine(attack, target, metrics) for (attack, target), metrics in found.items()]


def group_tables(lines: Sequence[TableLine]) -> list[list[TableLine]]:
    """Lines as tables: those that follow each other and have a figure in common.

    >>> right, auc = (LeakageMetric(target="student", metric=name) for name in ("right", "AUC"))
    >>> metrics = {"AUC": auc}, {"AUC": auc, "right": right}, {"right": right}, {}
    >>> [len(table) for table in group_tables([TableLine("LiRA", "student", each) for each in metrics])]
    [3, 1]
    """
    found: list[list[TableLine]] = []
    for line in lines:
        if found and any(line.metrics.keys() & before.metrics.keys() for before in found[-1]):
            found[-1].append(line)
        else:
            found.append([line])
    return found


def skipped_texts(found: Leakage) -> list[str]:
    """What was not tried, and why; one text a reason."""
    reasons: dict[str, list[str]] = {}
    for part in found.skipped:
        reasons.setdefault(part.reason, []).append(part.attack)
    return [f"{', '.join(attacks)}: {reason}" for reason, attacks in reasons.items()]


def format_percent(value: float | None) -> str:
    """A part of 1 in percent.

    >>> format_percent(0.6141), format_percent(None)
    ('61.4%', '-')
    """
    return "-" if value is None else f"{100 * value:.1f}%"


def percent_fields(value: float, low: float, high: float) -> dict[str, Any]:
    """Value, interval and text of a row that is a part of 1.

    >>> percent_fields(0.614, 0.58, 0.64)["text"]
    '61.4% (58.0 to 64.0)'
    """
    text = f"{format_percent(value)} ({100 * low:.1f} to {100 * high:.1f})"
    return {"value": 100 * value, "interval": (100 * low, 100 * high), "text": text}
