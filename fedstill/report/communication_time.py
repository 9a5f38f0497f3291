"""Time of a distributed run by activity, and the cost of a message."""

from __future__ import annotations

from typing import NamedTuple

from markupsafe import Markup

from fedstill.core.text_format import format_bytes, format_percent, format_seconds
from fedstill.report.result import Result
from fedstill.report.table_formats import Cell, Column, Row, Table

# Parts of a run's time in the order of the bar: key in the result, name, description.
PARTS = (
    ("starting", "start and end", "processes connect before the first message, and stop after the last"),
    ("training", "local training", "the nodes train their local models before the first query"),
    ("nodes", "nodes", "the nodes compute responses (mean over nodes)"),
    ("waiting", "waiting", "the other nodes are done, the slowest one is not"),
    ("absent", "absent nodes", "nodes do not respond, until they are excluded"),
    ("link", "link", "messages are serialized, sent and parsed"),
    ("server", "server", "the server computes"),
)


class TimePart(NamedTuple):
    """Time of one activity; ``share`` is its share of the whole run, from 0 to 1."""

    key: str
    name: str
    description: str
    seconds: float
    share: float


def time_parts(result: Result) -> list[TimePart]:
    """Return the time of a run by activity; empty for a run in one process."""
    known = [(*part, result.link.get(part[0]) or 0.0) for part in PARTS]
    total = sum(seconds for *_, seconds in known)
    return [
        TimePart(key, name, description, seconds, seconds / total)
        for key, name, description, seconds in known
        if seconds > 0
    ]


def message_cost_text(result: Result) -> str | None:
    """Return number, time and size of messages as a sentence; None for a run in one process."""
    count, seconds, size, share = map(result.link.get, ("messages", "seconds_each", "bytes_each", "share"))
    if count is None or seconds is None or size is None or share is None:
        return None
    time_each = f"{1000 * seconds:.0f} ms" if seconds < 1 else format_seconds(seconds)
    cost = f"{count:,.0f} message rounds, {time_each} and {format_bytes(round(size))} each"
    return f"{cost}; the link took {format_percent(100 * share)} of the run's time"


def time_parts_text(result: Result) -> str | None:
    """Return the time by activity as a list in words; None for a run in one process."""
    return ", ".join(f"{part.name} {format_seconds(part.seconds)}" for part in time_parts(result)) or None


def time_table(result: Result) -> Table | None:
    """Return the time by activity as a table that is also the legend of :func:`time_bar`."""
    swatch, rows = Markup('<span class="swatch {}"></span> {}'), []
    for part in time_parts(result):
        texts = (format_seconds(part.seconds), format_percent(100 * part.share), part.description)
        rows.append(Row(swatch.format(part.key, part.name), list(map(Cell, texts))))
    columns = [Column(""), Column(""), Column("", "meaning")]
    return Table("Time of the run by activity", "", columns, rows, style="parts") if rows else None


def time_bar(result: Result) -> Markup:
    """Return the time by activity as one stacked bar."""
    parts, rectangles, start = time_parts(result), [], 0.0
    rectangle = (
        '<rect class="part {}" x="{:.2f}%" width="{:.2f}%" y="4" height="16"><title>{}: {}</title></rect>'
    )
    for part in parts:
        position = (100 * start, 100 * part.share)
        rectangles.append(
            Markup(rectangle).format(part.key, *position, part.name, format_seconds(part.seconds))
        )
        start += part.share
    return Markup('<svg class="bars" width="100%" height="24" role="img" aria-label="{}">{}</svg>').format(
        "; ".join(f"{part.name} {format_percent(100 * part.share)}" for part in parts),
        Markup("").join(rectangles),
    )
