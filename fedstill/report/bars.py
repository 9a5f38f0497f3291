"""Bars from 0 to 100% and plain lines, for the cells of tables and for pages that are drawn again and again.

They stretch to any width while their strokes keep theirs, and need no matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

Levels = Sequence[tuple[str, float]]  # style classes with values in percent


def bar(
    fill: tuple[str, float] | None = None,
    *,
    whisker: tuple[float, float] | None = None,
    rings: Sequence[float] = (),
    levels: Levels = (),
) -> Markup:
    """A track with what is drawn on it, in percent: a fill of some style, a line from value to value, a ring
    a value, upright lines.
    """
    parts = ['<rect class="track" width="100%" y="5" height="14" rx="3"/>']
    if fill:
        parts.append(f'<rect class="{fill[0]}" width="{_x(fill[1])}" y="5" height="14" rx="3"/>')
    parts += [f'<line class="{name}" x1="{_x(at)}" x2="{_x(at)}" y1="2" y2="22"/>' for name, at in levels]
    parts += [f'<circle class="node" cx="{_x(value)}" cy="12" r="3"/>' for value in rings]
    if whisker:
        parts.append(f'<line class="whisker" x1="{_x(whisker[0])}" x2="{_x(whisker[1])}" y1="12" y2="12"/>')
    inside = "".join(parts)
    return Markup(f'<svg class="bars" width="100%" height="24" aria-hidden="true">{inside}</svg>')


MOST = 200  # points of a line


def sparkline(values: Sequence[float]) -> Markup:
    """A line through finite values, from the lowest to the highest; of many, some in equal steps."""
    step = -(-len(values) // MOST) or 1
    kept = [*values[:-1:step], *values[-1:]]
    low, high = min(kept, default=0.0), max(kept, default=0.0)
    across, up = 100 / max(len(kept) - 1, 1), 30 / ((high - low) or 1.0)
    points = " ".join(
        f"{place * across:.2f},{35 - (value - low) * up:.2f}" for place, value in enumerate(kept)
    )
    line = Markup('<polyline points="{}" vector-effect="non-scaling-stroke"/>').format(points)
    box = Markup(
        '<svg class="spark" viewBox="0 0 100 40" preserveAspectRatio="none" aria-hidden="true">{}</svg>'
    )
    return box.format(line)


def _x(value: float) -> str:
    return f"{min(max(value, 0.0), 100.0):.2f}%"
