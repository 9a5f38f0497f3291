"""What attacks got from a run, as its ``leakage.json`` holds it: ready to be shown, whichever they were."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedstill.attacks.leakage_rows import LeakageColumn, LeakageFigure, Pictures
from fedstill.core.config_tables import load
from fedstill.core.run_writer import read_result

FILE = "leakage.json"


@dataclass(frozen=True, kw_only=True)
class Attacked:
    """What one attack got; its parts are those of :class:`fedstill.attacks.attack.Attack`."""

    name: str
    title: str = ""
    strength: str = ""
    about: tuple[tuple[str, str], ...] = ()
    rows: tuple[LeakageFigure, ...] = ()
    columns: tuple[LeakageColumn, ...] = ()
    notes: tuple[str, ...] = ()
    pictures: tuple[Pictures, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Skipped:
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
    attacks: tuple[Attacked, ...] = ()
    skipped: tuple[Skipped, ...] = ()
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
        path = folder / FILE
        return load(cls, read_result(path), path) if path.exists() else None


@dataclass(frozen=True)
class TableLine:
    """The figures that one attack got of one target, by their names."""

    attack: str
    who: str
    figures: Mapping[str, LeakageFigure]


def lines(rows: Iterable[LeakageFigure]) -> list[TableLine]:
    """Rows of one attack on one target as a line each, in the order of their first ones."""
    found: dict[tuple[str, str], dict[str, LeakageFigure]] = {}
    for row in rows:
        found.setdefault((row.attack, row.who), {})[row.figure] = row
    return [TableLine(attack, who, figures) for (attack, who), figures in found.items()]


def tables(lines: Sequence[TableLine]) -> list[list[TableLine]]:
    """Lines as tables: those that follow each other and have a figure in common.

    >>> right, auc = (LeakageFigure(who="student", figure=name) for name in ("right", "AUC"))
    >>> figures = {"AUC": auc}, {"AUC": auc, "right": right}, {"right": right}, {}
    >>> [len(table) for table in tables([TableLine("LiRA", "student", each) for each in figures])]
    [3, 1]
    """
    found: list[list[TableLine]] = []
    for line in lines:
        if found and any(line.figures.keys() & before.figures.keys() for before in found[-1]):
            found[-1].append(line)
        else:
            found.append([line])
    return found


def skipped(found: Leakage) -> list[str]:
    """What was not tried, and why; one text a reason."""
    reasons: dict[str, list[str]] = {}
    for part in found.skipped:
        reasons.setdefault(part.reason, []).append(part.attack)
    return [f"{', '.join(attacks)}: {reason}" for reason, attacks in reasons.items()]
