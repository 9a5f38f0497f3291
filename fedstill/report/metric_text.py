"""Text forms of metric values: digits, unit, spread and direction."""

from __future__ import annotations

from fedstill.core.text_format import NOT_MEASURED
from fedstill.report.result_records import MetricOverNodes
from fedstill.tasks.task import Metric

PROPER_NAMES = ("Dice",)  # first words of titles that keep their capital within a sentence


def format_value_without_unit(metric: Metric, value: float) -> str:
    """Return a value without its unit, for columns whose header has the unit."""
    return f"{value:.{metric.digits}f}"


def format_with_unit(metric: Metric, value: float) -> str:
    """Return a value with its unit.

    >>> format_with_unit(Metric("accuracy", "Accuracy"), 93.37)
    '93.4%'
    >>> format_with_unit(Metric("hd95", "HD95", "px", 2, "lower"), 12.3456)
    '12.35 px'
    """
    return format_value_without_unit(metric, value) + (
        metric.unit if metric.unit in ("%", "") else f" {metric.unit}"
    )


def format_spread(metric: Metric, stats: MetricOverNodes) -> str:
    """Return mean and standard deviation with the unit, as "81.1% ± 4.2", or "not measured"."""
    if stats.mean is None:
        return NOT_MEASURED
    return format_with_unit(metric, stats.mean) + _deviation(metric, stats)


def format_spread_without_unit(metric: Metric, stats: MetricOverNodes) -> str:
    """Return mean and standard deviation without the unit, as "81.1 ± 4.2"; "-" if not measured."""
    return (
        "-"
        if stats.mean is None
        else format_value_without_unit(metric, stats.mean) + _deviation(metric, stats)
    )


def _deviation(metric: Metric, stats: MetricOverNodes) -> str:
    return "" if stats.std is None else f" \u00b1 {format_value_without_unit(metric, stats.std)}"


def format_difference(metric: Metric, difference: float) -> str:
    """Return a difference with its sign and without a unit, as "+12.3"; "0.0" if it rounds to zero."""
    rounded = round(difference, metric.digits)
    return f"{rounded:+.{metric.digits}f}" if rounded else format_value_without_unit(metric, 0.0)


def format_header(metric: Metric, *, units: bool = False) -> str:
    """Return the column header of a metric; a down arrow means that lower is better."""
    arrow = " \u2193" if metric.better == "lower" else ""
    return f"{metric.title}{arrow}" + (f" {metric.unit}" if units and metric.unit else "")


def lowercase_title(title: str) -> str:
    """Return a title as written within a sentence; abbreviations and proper names keep their capitals.

    >>> lowercase_title("Accuracy"), lowercase_title("Object Dice"), lowercase_title("HD95")
    ('accuracy', 'object Dice', 'HD95')
    """
    first = title.partition(" ")[0]
    keeps_capital = first[1:] != first[1:].lower() or len(first) < 2 or first in PROPER_NAMES
    return title if keeps_capital else title[0].lower() + title[1:]
