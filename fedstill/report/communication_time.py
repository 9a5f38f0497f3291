"""How a run's nodes were reached: where the time went, and what a message cost."""

from __future__ import annotations

from typing import NamedTuple

from markupsafe import Markup

from fedstill.core.text_format import format_bytes, format_percent, format_seconds
from fedstill.report.result import Result
from fedstill.report.table_formats import Cell, Column, Row, Table

# Parts of a run's time, in the order of the bar: key in the result, name, what it is.
PARTS = (
    ("starting", "start and end", "processes find each other before the first message, part after the last"),
    ("training", "local training", "the nodes train their own models before the first query"),
    ("nodes", "nodes", "the nodes at work on answers, on average"),
    ("waiting", "waiting", "for the slowest node, while the others are done"),
    ("absent", "absent nodes", "for nodes that stayed away, until they were left out"),
    ("link", "link", "messages on their way: packed, sent, unpacked"),
    ("server", "server", "the server's own work"),
)


class TimePart(NamedTuple):
    """One part of a run's time; its share is from 0 to 1."""

    key: str
    name: str
    meaning: str
    seconds: float
    share: float


def parts(result: Result) -> list[TimePart]:
    """Where the time of a run went; empty for a run whose nodes were in its own process."""
    known = [(*part, result.link.get(part[0]) or 0.0) for part in PARTS]
    total = sum(seconds for *_, seconds in known)
    return [TimePart(key, name, says, time, time / total) for key, name, says, time in known if time > 0]


def message_cost(result: Result) -> str | None:
    """What a message cost, in words; None for a run whose nodes were in its own process."""
    count, seconds, size, share = map(result.link.get, ("messages", "seconds_each", "bytes_each", "share"))
    if count is None or seconds is None or size is None or share is None:
        return None
    each = f"{1000 * seconds:.0f} ms" if seconds < 1 else format_seconds(seconds)
    cost = f"{count:,.0f} rounds of messages, {each} and {format_bytes(round(size))} each"
    return f"{cost}; the link took {format_percent(100 * share)} of the run"


def time_split(result: Result) -> str | None:
    """Where the time went, in words; None for a run whose nodes were in its own process."""
    return ", ".join(f"{part.name} {format_seconds(part.seconds)}" for part in parts(result)) or None


def time_table(result: Result) -> Table | None:
    """The same as a table, with the colors of the bar."""
    swatch, rows = Markup('<span class="swatch {}"></span> {}'), []
    for part in parts(result):
        words = (format_seconds(part.seconds), format_percent(100 * part.share), part.meaning)
        rows.append(Row(swatch.format(part.key, part.name), list(map(Cell, words))))
    columns = [Column(""), Column(""), Column("", "meaning")]
    return Table("Where the time of the run went", "", columns, rows, style="parts") if rows else None


def time_bar(result: Result) -> Markup:
    """The parts of a run's time as one bar."""
    told, drawn, start = parts(result), [], 0.0
    piece = '<rect class="part {}" x="{:.2f}%" width="{:.2f}%" y="4" height="16"><title>{}: {}</title></rect>'
    for part in told:
        at = (100 * start, 100 * part.share)
        drawn.append(Markup(piece).format(part.key, *at, part.name, format_seconds(part.seconds)))
        start += part.share
    return Markup('<svg class="bars" width="100%" height="24" role="img" aria-label="{}">{}</svg>').format(
        "; ".join(f"{part.name} {format_percent(100 * part.share)}" for part in told), Markup("").join(drawn)
    )
