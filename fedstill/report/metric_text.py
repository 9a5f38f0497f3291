"""How figures are written: with unit and digits, and which way is better."""

from __future__ import annotations

from fedstill.core.text_format import MISSING
from fedstill.report.result_parts import OverNodes
from fedstill.tasks.task import Metric

NAMES = ("Dice",)  # figures called after a person


def bare(metric: Metric, value: float) -> str:
    """A value without its unit, for columns whose heads have it."""
    return f"{value:.{metric.digits}f}"


def told(metric: Metric, value: float) -> str:
    """A value with its unit.

    >>> told(Metric("accuracy", "Accuracy"), 93.37), told(Metric("hd95", "HD95", "px", 2, "lower"), 12.3456)
    ('93.4%', '12.35 px')
    """
    return bare(metric, value) + (metric.unit if metric.unit in ("%", "") else f" {metric.unit}")


def spread_text(metric: Metric, measured: OverNodes) -> str:
    """A value with its unit and its spread, or "not measured": "81.1% ± 4.2"."""
    return MISSING if measured.mean is None else told(metric, measured.mean) + _spread(metric, measured)


def bare_text(metric: Metric, measured: OverNodes) -> str:
    """The same without its unit, and with a dash for what is not measured: "81.1 ± 4.2"."""
    return "-" if measured.mean is None else bare(metric, measured.mean) + _spread(metric, measured)


def _spread(metric: Metric, measured: OverNodes) -> str:
    return "" if measured.std is None else f" \u00b1 {bare(metric, measured.std)}"


def gap_text(metric: Metric, difference: float) -> str:
    """A difference of two values, with its sign, without a unit: "+12.3", and "0.0" without one."""
    rounded = round(difference, metric.digits)
    return f"{rounded:+.{metric.digits}f}" if rounded else bare(metric, 0.0)


def head(metric: Metric, *, units: bool = False) -> str:
    """A figure over its column; an arrow where lower is better."""
    arrow = " \u2193" if metric.better == "lower" else ""
    return f"{metric.title}{arrow}" + (f" {metric.unit}" if units and metric.unit else "")


def in_a_sentence(title: str) -> str:
    """A title within a sentence: "accuracy", but "AUC" and "HD95" keep their capitals.

    >>> in_a_sentence("Accuracy"), in_a_sentence("Object Dice"), in_a_sentence("HD95")
    ('accuracy', 'object Dice', 'HD95')
    """
    first = title.partition(" ")[0]
    name = first[1:] != first[1:].lower() or len(first) < 2 or first in NAMES
    return title if name else title[0].lower() + title[1:]
