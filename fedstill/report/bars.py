"""SVG bars from 0 to 100% and sparklines, for table cells and for pages that refresh often.

They stretch to any width while their strokes keep their width. They need no matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

MAX_POINTS = 200  # points of a sparkline

VerticalLines = Sequence[tuple[str, float]]  # style class and position in percent


def bar(
    fill: tuple[str, float] | None = None,
    *,
    whisker: tuple[float, float] | None = None,
    rings: Sequence[float] = (),
    lines: VerticalLines = (),
) -> Markup:
    """Return a horizontal track from 0 to 100% with optional drawings on it; all positions in percent.

    Args:
        fill: style class and length of the filled bar.
        whisker: ends of a horizontal line.
        rings: positions of rings, one per node.
        lines: style classes and positions of vertical lines.
    """
    parts = ['<rect class="track" width="100%" y="5" height="14" rx="3"/>']
    if fill:
        parts.append(f'<rect class="{fill[0]}" width="{_percent(fill[1])}" y="5" height="14" rx="3"/>')
    parts += [
        f'<line class="{name}" x1="{_percent(x)}" x2="{_percent(x)}" y1="2" y2="22"/>' for name, x in lines
    ]
    parts += [f'<circle class="node" cx="{_percent(value)}" cy="12" r="3"/>' for value in rings]
    if whisker:
        parts.append(
            f'<line class="whisker" x1="{_percent(whisker[0])}" x2="{_percent(whisker[1])}" y1="12" y2="12"/>'
        )
    content = "".join(parts)
    return Markup(f'<svg class="bars" width="100%" height="24" aria-hidden="true">{content}</svg>')


def sparkline(values: Sequence[float]) -> Markup:
    """Return a line through finite values, scaled from their minimum to their maximum.

    Of more than :data:`MAX_POINTS` values, an evenly spaced subset and the last value are drawn.
    """
    step = -(-len(values) // MAX_POINTS) or 1
    shown = [*values[:-1:step], *values[-1:]]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    x_scale, y_scale = 100 / max(len(shown) - 1, 1), 30 / ((high - low) or 1.0)
    points = " ".join(
        f"{index * x_scale:.2f},{35 - (value - low) * y_scale:.2f}" for index, value in enumerate(shown)
    )
    line = Markup('<polyline points="{}" vector-effect="non-scaling-stroke"/>').format(points)
    svg = Markup(
        '<svg class="spark" viewBox="0 0 100 40" preserveAspectRatio="none" aria-hidden="true">{}</svg>'
    )
    return svg.format(line)


def _percent(value: float) -> str:
    return f"{min(max(value, 0.0), 100.0):.2f}%"
