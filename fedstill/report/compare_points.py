"""What a comparison's drawings show: a spot or a line a method, and the same in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from string import ascii_lowercase

from fedstill.attacks.leakage import LeakageColumn
from fedstill.core.text_format import format_bytes, format_percent
from fedstill.privacy.statement import format_epsilon_bound
from fedstill.report.compare_summary import ComparedSetting, MethodCurve, Summary
from fedstill.report.compared_method import ComparedMethod, Spread

NOTHING = Spread(0.0)


@dataclass(frozen=True)
class Point:
    """One method in one setting: its number and name, what it reaches in percent, for how many bytes."""

    place: int
    name: str
    value: Spread
    bytes: float  # up and down, all nodes, a whole run
    leak: Spread = NOTHING  # what attacks got, in percent, where that is drawn
    tag: str = ""  # beside it: its epsilon, its setting
    where: str = ""  # the same in words
    joined: bool = False  # by a line with the method's spot before it

    def describe(self, metric: str) -> str:
        """It in words, with what attacks' figure is called."""
        name = f"{self.name}, {self.where}" if self.where else self.name
        reached = f"{format_percent(self.value.mean)}, {metric} {format_percent(self.leak.mean)}"
        return f"{name}: {reached}, {format_bytes(round(self.bytes))}"


@dataclass(frozen=True)
class LeakageScatter:
    """What methods reach against what attacks got: the figure of attacks, if one can be an axis; spots in
    the order in which a method's are joined; letters of settings; rows that lack a figure, in words.
    """

    column: LeakageColumn | None
    spots: Sequence[Point]
    letters: Sequence[tuple[str, str]]
    absent: Sequence[str]


def scatter_points(setting: ComparedSetting) -> list[Point]:
    """What each method reaches for its bytes, of those that have both figures."""
    return [spot for entry in setting.entries if (spot := _spot(entry)) is not None]


def _spot(entry: ComparedMethod) -> Point | None:
    reached, sent = entry.spread(entry.metric), entry.traffic()
    if reached is None or sent is None:
        return None
    return Point(entry.place, entry.name, reached, sent)


def learning_curves(setting: ComparedSetting) -> list[MethodCurve]:
    """What each method reaches over its run, of those that measured it on the way."""
    return [
        MethodCurve(entry.place, entry.name, line) for entry in setting.entries if (line := entry.curve())
    ]


def leakage_scatter(summary: Summary) -> LeakageScatter:
    """Settings that differ in the budget alone are joined by method; others have a letter."""
    by_budget = bool(summary.budgets())
    column = next((leak for leak in summary.leaks if leak.axis), None)
    names = [setting.name for setting in summary.settings]
    letters = dict(zip(names, ascii_lowercase, strict=False)) if len(names) > 1 and not by_budget else {}
    entries = [(setting.name, entry) for setting in summary.settings for entry in setting.entries]
    if by_budget:
        entries.sort(key=lambda each: (each[1].place, each[1].budget))
    spots: list[Point] = []
    absent = []
    for name, entry in entries:
        spot, leak = _spot(entry), None if column is None else entry.leak(column)
        if spot is None or leak is None:
            absent.append(", ".join(part for part in (entry.name, name) if part))
            continue
        kept = entry.epsilon()
        epsilon = "" if kept is None else format_epsilon_bound(kept[0])
        tag = ", ".join(filter(None, (letters.get(name), epsilon and f"\u03b5 {epsilon}")))
        where = ", ".join(filter(None, (name, epsilon and f"epsilon {epsilon}")))
        joined = by_budget and bool(spots) and spots[-1].place == spot.place
        spots.append(replace(spot, leak=leak[1], tag=tag, where=where, joined=joined))
    return LeakageScatter(column, spots, [(letter, name) for name, letter in letters.items()], absent)


def format_budget(epsilon: float) -> str:
    """An epsilon as people write it: "7.7" or the sign for no bound."""
    return f"{epsilon:g}".replace("inf", "\u221e")


def budgets(lines: Sequence[MethodCurve]) -> list[float]:
    """All epsilons, rising."""
    return sorted({epsilon for line in lines for epsilon in line.reached})
