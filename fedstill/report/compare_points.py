"""What a comparison's drawings show: a point, a line or a spot a method, and the same in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from fedstill.attacks.rows import Column
from fedstill.core.words import human_bytes, percent
from fedstill.privacy.statement import epsilon_text
from fedstill.report.budgets import Line, named
from fedstill.report.drawing import Points
from fedstill.report.summary import Row, Setting, Summary

LETTERS = "abcdefghijklmnopqrstuvwxyz"  # of settings, in a drawing


@dataclass(frozen=True)
class Mark:
    """One method: its number, its name, bytes, what it reaches in percent, its deviation."""

    place: int
    name: str
    bytes: float
    value: float
    spread: float | None = None


@dataclass(frozen=True)
class Curve:
    """One method's line: (share of the run, percent), at least one point."""

    place: int
    name: str
    line: Points


@dataclass(frozen=True)
class Spot:
    """One method in one setting: its number and name, what attacks got and what it reaches, in percent.

    Args:
        bytes: up and down, all nodes, a whole run.
        tag: what stands beside it: its epsilon, its setting; may be empty.
        where: the same for a reader who sees no drawing.
        joined: whether it is on a line with the method's spot before it.
    """

    place: int
    name: str
    leak: float
    value: float
    bytes: float
    tag: str = ""
    where: str = ""
    joined: bool = False
    leak_spread: float | None = None
    spread: float | None = None

    def told(self, figure: str) -> str:
        """It in words, with what attacks' figure is called."""
        where = f", {self.where}" if self.where else ""
        reached = f"{percent(self.value)}, {figure} {percent(self.leak)}"
        return f"{self.name}{where}: {reached}, {human_bytes(round(self.bytes))}"


@dataclass(frozen=True)
class Leaking:
    """What methods reach against what attacks got: one picture of all settings.

    Args:
        column: the figure of attacks; None where they have none that can be an axis.
        spots: in the order in which a method's are joined.
        letters: of settings, where they differ in more than the budget.
        absent: rows that lack a figure, in words.
    """

    column: Column | None
    spots: tuple[Spot, ...]
    letters: tuple[tuple[str, str], ...]
    absent: tuple[str, ...]


def marks_of(setting: Setting) -> list[Mark]:
    """What each method reaches for its bytes, of those that have both figures."""
    return [
        Mark(place, row.name, sent, reached.mean, reached.std)
        for place, row in enumerate(setting.rows, start=1)
        if (reached := row.spread(row.metric)) is not None and (sent := row.traffic()) is not None
    ]


def curves_of(setting: Setting) -> list[Curve]:
    """What each method reaches over its run, of those that measured it on the way."""
    rows = enumerate(setting.rows, start=1)
    return [Curve(place, row.name, line) for place, row in rows if (line := row.curve())]


def leaking_of(summary: Summary) -> Leaking:
    """What methods reach against what attacks got.

    Settings that differ in the budget alone are joined by method; others have a letter.
    """
    by_budget = bool(summary.budgets())
    column = next((leak for leak in summary.leaks if leak.axis), None)
    several = len(summary.settings) > 1 and not by_budget
    lettered = list(zip(LETTERS, summary.settings, strict=False)) if several else []
    named = {setting.name: letter for letter, setting in lettered}
    found: list[tuple[float, Spot]] = []  # with the budget
    absent = []
    for setting in summary.settings:
        for place, row in enumerate(setting.rows, start=1):
            spot = None if column is None else _spot(column, place, row, setting, named.get(setting.name, ""))
            if spot is None:
                absent.append(", ".join(part for part in (row.name, setting.name) if part))
            else:
                found.append((row.budget if by_budget else 0.0, spot))
    spots: list[Spot] = []
    for _, spot in sorted(found, key=lambda item: (item[1].place, item[0])):
        joined = by_budget and bool(spots) and spots[-1].place == spot.place
        spots.append(dataclasses.replace(spot, joined=joined))
    letters = tuple((letter, setting.name) for letter, setting in lettered)
    return Leaking(column, tuple(spots), letters, tuple(absent))


def _spot(column: Column, place: int, row: Row, setting: Setting, letter: str) -> Spot | None:
    """One row in that picture; None where a figure is missing."""
    leak, reached, sent, kept = row.leak(column), row.spread(row.metric), row.traffic(), row.epsilon()
    if leak is None or reached is None or sent is None:
        return None
    epsilon = "" if kept is None else epsilon_text(kept[0])
    return Spot(
        place,
        row.name,
        leak[1].mean,
        reached.mean,
        sent,
        tag=", ".join(part for part in (letter, epsilon and f"\u03b5 {epsilon}") if part),
        where=", ".join(part for part in (setting.name, epsilon and f"epsilon {epsilon}") if part),
        leak_spread=leak[1].std,
        spread=reached.std,
    )


# --- in words ---------------------------------------------------------------------------------------------


def traffic_told(marks: Sequence[Mark], title: str) -> str:
    """What methods reach against bytes."""
    told = "; ".join(f"{mark.name} {percent(mark.value)}, {human_bytes(round(mark.bytes))}" for mark in marks)
    return f"{title} against bytes. {told}."


def curves_told(lines: Sequence[Curve], title: str) -> str:
    """What they reach over the run."""
    told = "; ".join(f"{curve.name} {percent(curve.line[-1][1])}" for curve in lines)
    return f"{title} over the share of the run. At the end: {told}."


def against_epsilon_told(lines: Sequence[Line], title: str) -> str:
    """What they reach against epsilon."""
    told = "; ".join(
        f"{line.name}: "
        + ", ".join(
            f"{named(point.epsilon)} {percent(point.value)}"
            for point in sorted(line.points, key=lambda point: point.epsilon)
        )
        for line in lines
        if line.points
    )
    return f"{title} against epsilon. {told}."


def against_leakage_told(spots: Sequence[Spot], column: Column, title: str) -> str:
    """What they reach against leakage."""
    return f"{title} against the {column.axis}. {'; '.join(spot.told(column.head) for spot in spots)}."
