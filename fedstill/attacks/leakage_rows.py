"""What an attack got, as reports have it: figures, columns of comparisons, pictures side by side.

A run's ``leakage.json`` holds these ready to be shown, so that its report needs no attack's code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LeakageFigure:
    """One figure that an attack got; those of one ``attack`` on one ``who`` make a line of a table.

    Args:
        attack: which one, where an attack is tried in several ways; may be empty.
        who: whom or what it was tried on: a node's name, "student".
        figure: what the number is: "AUC".
        value: the number itself, in the unit in which it is written; None where words alone tell it.
        interval: the ends of its confidence interval, in the same unit.
        text: the figure as it is written, with its unit; empty: the number, to four digits.
        without: what comes without attacking, as by guessing.
        says: small print beside it.
        column: name of the :class:`LeakageColumn` of a comparison that it stands in.
        detail: for the page alone, and not for the terminal.
    """

    who: str
    figure: str
    attack: str = ""
    value: float | None = None
    interval: tuple[float, float] | None = None
    text: str = ""
    without: str = ""
    says: str = ""
    column: str = ""
    detail: bool = False

    @property
    def written(self) -> str:
        """The figure as it is written, without its small print.

        >>> LeakageFigure(who="node-0", figure="right", value=0.51236).written
        '0.5124'
        """
        return self.text or ("-" if self.value is None else f"{self.value:.4g}")


@dataclass(frozen=True, kw_only=True)
class LeakageColumn:
    """A figure by which a comparison sets methods side by side: that of the strongest attack of those tried.

    Args:
        name: in CSV files, and in :class:`LeakageFigure`.
        head: in terminals and Markdown: "membership AUC".
        title: on the page, with its unit: "Membership AUC %"; empty: as in terminals.
        says: how to read it, in a sentence.
        digits: after the point.
        lowest: whether the least of several values is the strongest attack's, as with p-values.
        guess: of a figure in percent: what guessing gets, beside which it is drawn.
        axis: what the figure is called where methods are drawn against it; empty: they are not.
    """

    name: str
    head: str
    title: str = ""
    says: str = ""
    digits: int = 1
    lowest: bool = False
    guess: float | None = None
    axis: str = ""

    @property
    def heading(self) -> str:
        """What the page calls it."""
        return self.title or f"{self.head[:1].upper()}{self.head[1:]}"


@dataclass(frozen=True, kw_only=True)
class Strip:
    """One row of pictures: its head, the name of its stack ``(N, C, H, W)`` uint8, and words below each."""

    head: str
    stack: str
    below: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Pictures side by side: strips, from top to bottom, of as many as there are ``heads``; ``says`` is what
    whoever has them should know.
    """

    title: str
    heads: tuple[str, ...]
    strips: tuple[Strip, ...]
    says: str = ""


def share(value: float | None) -> str:
    """A part of 1 in percent.

    >>> share(0.6141), share(None)
    ('61.4%', '-')
    """
    return "-" if value is None else f"{100 * value:.1f}%"


def in_percent(value: float, low: float, high: float) -> dict[str, Any]:
    """Value, interval and text of a row that is a part of 1.

    >>> in_percent(0.614, 0.58, 0.64)["text"]
    '61.4% (58.0 to 64.0)'
    """
    text = f"{share(value)} ({100 * low:.1f} to {100 * high:.1f})"
    return {"value": 100 * value, "interval": (100 * low, 100 * high), "text": text}
