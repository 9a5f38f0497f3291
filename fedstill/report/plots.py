"""Plots as inline SVG, drawn by hand: small, sharp, and at home in light and dark.

No plotting library, on purpose: the page's own style sheet colours the lines and sets the
type, so one drawing serves both colour schemes. Horizontal positions are percentages and
vertical ones pixels, so a drawing stretches to any width while its type keeps its size.
Every function is pure: the same figures give the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from fedstill.core.words import percent
from fedstill.report.axes import Frame, Points, nice_ticks, smooth, spread, step_text, text, thin, widen
from fedstill.report.table import Row


def metric_plot(
    line: Points,
    references: Sequence[tuple[str, str, float]],
    student: str,
    local: Points = (),
    turn: str = "step",
    title: str = "Accuracy",
) -> Markup:
    """What models are judged by over steps or rounds; reference levels are lines labelled at their ends.

    ``line`` holds (step, value), at least one; ``references`` holds (name, style class,
    value); ``local`` is the nodes' own models' line, if wanted; ``turn`` says what a step is called.
    Values are percent, from 0 to 100; ``title`` is the figure's. Returns an ``<svg>`` 320 pixels high.
    """
    values = [y for _, y in (*line, *local)] + [y for *_, y in references]
    lowest = max(0.0, min(min(values), max(values) - 1))  # at least one point is shown
    ticks = nice_ticks(lowest, max(max(values), lowest + 1))
    steps = [x for x, _ in line]
    frame = Frame((0.0, max(max(steps), 1.0)), (ticks[0], ticks[-1]), 320)

    parts = [frame.level(tick, "grid") for tick in ticks]
    parts += [text("0", frame.down(tick) + 4, f"{tick:g}%", "tick left", -10) for tick in ticks]
    for tick in nice_ticks(0, frame.x[1]):
        if tick <= frame.x[1]:
            parts.append(text(frame.percent(tick), frame.height + 22, step_text(tick), "tick middle"))
    parts += [frame.level(y, f"reference {style}") for _, style, y in references]

    if local:
        parts.append(frame.line(thin(local), "curve local"))
    shown = thin(line)
    parts.append(frame.line(shown, "curve"))
    if len(shown) <= 60:
        for x, y in shown:
            parts.append(
                Markup('<circle class="dot" cx="{}" cy="{}" r="3.5"><title>{} {}: {}</title></circle>')
                .format(frame.percent(x), frame.down(y), turn, step_text(x), percent(y))
            )  # fmt: skip

    labels = [(student, "student", shown[-1][1])] + [(name, "", y) for name, _, y in references]
    labels += [("nodes' own", "", local[-1][1])] if local else []
    places = spread([frame.down(y) for *_, y in labels], gap=18, bottom=frame.height)
    for (name, style, y), place in zip(labels, places, strict=True):
        parts.append(text("100%", place + 4, f"{name} {percent(y)}", f"label {style}", 12))
    told = "; ".join(f"{name} {percent(y)}" for name, _, y in labels)
    return frame.draw(
        f"{title} on the test data over {step_text(max(steps))} {turn}s. At the end: {told}.", parts
    )


def small_plot(label: str, line: Points, span: tuple[float, float] | None = None) -> Markup:
    """One quantity over steps, small: every step pale, the running mean strong.

    ``line`` holds (step, value), at least one, all finite; ``span`` fixes the lowest and highest
    value of the axis, so that several plots can share it. Returns an ``<svg>`` 96 pixels high.
    """
    shown = thin(line)
    low, high = span or (min(y for _, y in shown), max(y for _, y in shown))
    low, high = widen(low, high)
    if 0 < low < 0.3 * high:  # close enough to zero that the axis had better start there
        low = 0.0
    coarse, fine = (
        [tick for tick in nice_ticks(low, high, most=most) if low <= tick <= high] for most in (4, 8)
    )
    ticks = coarse if len(coarse) > 1 else fine  # one tick alone tells no scale
    first, last = line[0][0], line[-1][0]
    frame = Frame((first, last), (low, high), 96)
    parts = [frame.level(tick, "grid") for tick in [low, *ticks]]
    parts += [text("0", frame.down(tick) + 4, f"{tick:g}", "tick left", -8) for tick in ticks]
    if last > first:
        parts.append(text("0", frame.height + 20, step_text(first), "tick"))
        parts.append(text("100%", frame.height + 20, step_text(last), "tick left"))
    else:
        parts.append(text("50%", frame.height + 20, step_text(first), "tick middle"))
    if len(shown) == 1:
        spot = frame.down(shown[0][1])
        parts.append(Markup('<circle class="dot" cx="50%" cy="{}" r="3"/>').format(spot))
    parts += [frame.line(shown, "curve pale"), frame.line(smooth(shown), "curve")]
    steps = f"from step {step_text(first)} to {step_text(last)}"
    return frame.draw(f"{label}, {steps}: {line[0][1]:.4g} to {line[-1][1]:.4g}.", parts)


def value_bar(row: Row) -> Markup:
    """A bar from 0 to 100%; with the spread and one dot a node where the row has them."""
    if row.value is None:
        return Markup("")

    def x(value: float) -> str:
        return f"{min(max(value, 0.0), 100.0):.2f}%"

    parts = [
        Markup('<rect class="track" width="100%" y="5" height="14" rx="3"/>'),
        Markup('<rect class="{}" width="{}" y="5" height="14" rx="3"/>').format(
            "bar student" if row.is_student else "bar", x(row.value)
        ),
    ]
    parts += [Markup('<circle class="node" cx="{}" cy="12" r="3"/>').format(x(value)) for value in row.each]
    if row.spread is not None:
        parts.append(
            Markup('<line class="whisker" x1="{}" x2="{}" y1="12" y2="12"/>').format(
                x(row.value - row.spread), x(row.value + row.spread)
            )
        )
    return Markup('<svg class="bars" width="100%" height="24" aria-hidden="true">{}</svg>').format(
        Markup("").join(parts)
    )
