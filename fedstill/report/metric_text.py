"""How figures are written: with unit and digits, and which way is better."""

from __future__ import annotations

from fedstill.core.text_format import NOT_MEASURED
from fedstill.report.result_parts import OverNodes
from fedstill.tasks.task import Metric

NAMES = ("Dice",)  # figures called after a person


def format_value(metric: Metric, value: float) -> str:
    """A value without its unit, for columns whose heads have it."""
    return f"{value:.{metric.digits}f}"


def format_with_unit(metric: Metric, value: float) -> str:
    """A value with its unit.

    >>> format_with_unit(Metric("accuracy", "Accuracy"), 93.37), format_with_unit(Metric("hd95", "HD95", "px", 2, "lower"), 12.3456)
    ('93.4%', '12.35 px')
    """
    return format_value(metric, value) + (metric.unit if metric.unit in ("%", "") else f" {metric.unit}")


def format_spread(metric: Metric, measured: OverNodes) -> str:
    """A value with its unit and its spread, or "not measured": "81.1% ± 4.2"."""
    return (
        NOT_MEASURED
        if measured.mean is None
        else format_with_unit(metric, measured.mean) + _spread(metric, measured)
    )


def format_spread_without_unit(metric: Metric, measured: OverNodes) -> str:
    """The same without its unit, and with a dash for what is not measured: "81.1 ± 4.2"."""
    return "-" if measured.mean is None else format_value(metric, measured.mean) + _spread(metric, measured)


def _spread(metric: Metric, measured: OverNodes) -> str:
    return "" if measured.std is None else f" \u00b1 {format_value(metric, measured.std)}"


def format_difference(metric: Metric, difference: float) -> str:
    """A difference of two values, with its sign, without a unit: "+12.3", and "0.0" without one."""
    rounded = round(difference, metric.digits)
    return f"{rounded:+.{metric.digits}f}" if rounded else format_value(metric, 0.0)


def format_header(metric: Metric, *, units: bool = False) -> str:
    """A figure over its column; an arrow where lower is better."""
    arrow = " \u2193" if metric.better == "lower" else ""
    return f"{metric.title}{arrow}" + (f" {metric.unit}" if units and metric.unit else "")


def lowercase_title(title: str) -> str:
    """A title within a sentence: "accuracy", but "AUC" and "HD95" keep their capitals.

    >>> lowercase_title("Accuracy"), lowercase_title("Object Dice"), lowercase_title("HD95")
    ('accuracy', 'object Dice', 'HD95')
    """
    first = title.partition(" ")[0]
    name = first[1:] != first[1:].lower() or len(first) < 2 or first in NAMES
    return title if name else title[0].lower() + title[1:]
