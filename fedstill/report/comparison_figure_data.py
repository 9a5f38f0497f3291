"""Points and curves of a comparison's figures, and their descriptions in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from string import ascii_lowercase

from fedstill.attacks.attack_results import ComparisonColumn
from fedstill.core.text_format import format_bytes, format_percent
from fedstill.privacy.statement import format_epsilon_bound
from fedstill.report.compare_summary import ComparedSetting, ComparisonSummary, MethodCurve
from fedstill.report.compared_method import ComparedMethod, Spread

NO_LEAKAGE = Spread(0.0)


@dataclass(frozen=True)
class Point:
    """Point of a scatter plot: one method in one setting.

    Args:
        number: number of the method.
        name: name of the method.
        value: main metric in percent.
        bytes: bytes up and down of a whole run over all nodes.
        leakage: metric of attacks in percent, if it is an axis.
        label: epsilon and letter of the setting, next to the number.
        details: epsilon and setting in words.
        connected: whether a line connects the point to the method's previous point.
    """

    number: int
    name: str
    value: Spread
    bytes: float
    leakage: Spread = NO_LEAKAGE
    label: str = ""
    details: str = ""
    connected: bool = False

    def describe(self, leakage_name: str) -> str:
        """Return the point in words; ``leakage_name`` is the name of the attacks' metric."""
        name = f"{self.name}, {self.details}" if self.details else self.name
        values = f"{format_percent(self.value.mean)}, {leakage_name} {format_percent(self.leakage.mean)}"
        return f"{name}: {values}, {format_bytes(round(self.bytes))}"


@dataclass(frozen=True)
class LeakageScatter:
    """Main metric against leakage.

    Args:
        column: metric of attacks on the axis; None if no metric can be an axis.
        points: points, those of one method in the order in which lines connect them.
        letters: letters of settings with their names.
        missing: methods and settings that lack a metric, in words.
    """

    column: ComparisonColumn | None
    points: Sequence[Point]
    letters: Sequence[tuple[str, str]]
    missing: Sequence[str]


def scatter_points(setting: ComparedSetting) -> list[Point]:
    """Return main metric and bytes of each method that has both."""
    return [point for entry in setting.entries if (point := _point(entry)) is not None]


def _point(entry: ComparedMethod) -> Point | None:
    value, total_bytes = entry.spread(entry.metric), entry.total_bytes()
    if value is None or total_bytes is None:
        return None
    return Point(entry.number, entry.name, value, total_bytes)


def learning_curves(setting: ComparedSetting) -> list[MethodCurve]:
    """Return the learning curve of each method that measured its main metric during the run."""
    return [
        MethodCurve(entry.number, entry.name, curve)
        for entry in setting.entries
        if (curve := entry.learning_curve())
    ]


def leakage_scatter(summary: ComparisonSummary) -> LeakageScatter:
    """Return main metric against leakage over all settings.

    If settings differ in the privacy budget alone, lines connect the points of each method. Otherwise
    settings have letters.
    """
    by_budget = bool(summary.budget_curves())
    column = next((column for column in summary.leakage_columns if column.axis), None)
    names = [setting.name for setting in summary.settings]
    letters = dict(zip(names, ascii_lowercase, strict=False)) if len(names) > 1 and not by_budget else {}
    entries = [(setting.name, entry) for setting in summary.settings for entry in setting.entries]
    if by_budget:
        entries.sort(key=lambda pair: (pair[1].number, pair[1].budget))
    points: list[Point] = []
    missing = []
    for name, entry in entries:
        point, leakage = _point(entry), None if column is None else entry.strongest_attack_and_value(column)
        if point is None or leakage is None:
            missing.append(", ".join(part for part in (entry.name, name) if part))
            continue
        bound = entry.privacy_bound()
        epsilon = "" if bound is None else format_epsilon_bound(bound[0])
        label = ", ".join(filter(None, (letters.get(name), epsilon and f"\u03b5 {epsilon}")))
        details = ", ".join(filter(None, (name, epsilon and f"epsilon {epsilon}")))
        connected = by_budget and bool(points) and points[-1].number == point.number
        points.append(replace(point, leakage=leakage[1], label=label, details=details, connected=connected))
    return LeakageScatter(column, points, [(letter, name) for name, letter in letters.items()], missing)


def format_budget(epsilon: float) -> str:
    """Return a privacy budget as text, as "7.7"; the infinity sign without a budget."""
    return f"{epsilon:g}".replace("inf", "\u221e")


def sorted_budgets(curves: Sequence[MethodCurve]) -> list[float]:
    """Return the budgets of all curves in ascending order."""
    return sorted({epsilon for curve in curves for epsilon in curve.values})
