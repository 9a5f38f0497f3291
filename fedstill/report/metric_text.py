"""How figures are written: with unit and digits, and which way is better."""

from __future__ import annotations

from fedstill.core.text_format import MISSING
from fedstill.report.result_parts import OverNodes
from fedstill.tasks.task import Figure

NAMES = ("Dice",)  # figures called after a person


def bare(figure: Figure, value: float) -> str:
    """A value without its unit, for columns whose heads have it."""
    return f"{value:.{figure.digits}f}"


def told(figure: Figure, value: float) -> str:
    """A value with its unit.

    >>> told(Figure("accuracy", "Accuracy"), 93.37), told(Figure("hd95", "HD95", "px", 2, "lower"), 12.3456)
    ('93.4%', '12.35 px')
    """
    return bare(figure, value) + (figure.unit if figure.unit in ("%", "") else f" {figure.unit}")


def spread_text(figure: Figure, measured: OverNodes) -> str:
    """A value with its unit and its spread, or "not measured": "81.1% ± 4.2"."""
    return MISSING if measured.mean is None else told(figure, measured.mean) + _spread(figure, measured)


def bare_text(figure: Figure, measured: OverNodes) -> str:
    """The same without its unit, and with a dash for what is not measured: "81.1 ± 4.2"."""
    return "-" if measured.mean is None else bare(figure, measured.mean) + _spread(figure, measured)


def _spread(figure: Figure, measured: OverNodes) -> str:
    return "" if measured.std is None else f" \u00b1 {bare(figure, measured.std)}"


def gap_text(figure: Figure, difference: float) -> str:
    """A difference of two values, with its sign, without a unit: "+12.3", and "0.0" without one."""
    rounded = round(difference, figure.digits)
    return f"{rounded:+.{figure.digits}f}" if rounded else bare(figure, 0.0)


def head(figure: Figure, *, units: bool = False) -> str:
    """A figure over its column; an arrow where lower is better."""
    arrow = " \u2193" if figure.better == "lower" else ""
    return f"{figure.title}{arrow}" + (f" {figure.unit}" if units and figure.unit else "")


def in_a_sentence(title: str) -> str:
    """A title within a sentence: "accuracy", but "AUC" and "HD95" keep their capitals.

    >>> in_a_sentence("Accuracy"), in_a_sentence("Object Dice"), in_a_sentence("HD95")
    ('accuracy', 'object Dice', 'HD95')
    """
    first = title.partition(" ")[0]
    name = first[1:] != first[1:].lower() or len(first) < 2 or first in NAMES
    return title if name else title[0].lower() + title[1:]
