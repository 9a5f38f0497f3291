"""How a run's nodes were reached: where the time went, what a message cost, who was left out and when."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from fedstill.core.words import human_bytes, human_seconds, percent
from fedstill.report.result import Result

# Parts of a run's time, in the order of the bar: key in the result, name, what it is.
PARTS = (
    ("starting", "start and end", "processes find each other before the first message, part after the last"),
    ("training", "local training", "the nodes train their own models before the first question"),
    ("nodes", "nodes", "the nodes at work on answers, on average"),
    ("waiting", "waiting", "for the slowest node, while the others are done"),
    ("absent", "absent nodes", "for nodes that stayed away, until they were left out"),
    ("link", "link", "messages on their way: packed, sent, unpacked"),
    ("server", "server", "the server's own work"),
)


@dataclass(frozen=True)
class Part:
    """One part of a run's time."""

    key: str
    name: str
    meaning: str
    seconds: float
    share: float  # from 0 to 1


def parts(result: Result) -> list[Part]:
    """Where the time of a run went; empty for a run whose nodes were in its own process."""
    told = result.link or {}
    known = {key: seconds for key, _, _ in PARTS if (seconds := told.get(key)) is not None}
    total = sum(known.values())
    return [
        Part(key, name, meaning, known[key], known[key] / total)
        for key, name, meaning in PARTS
        if known.get(key, 0) > 0
    ]


def message_cost(result: Result) -> str | None:
    """What a message cost, in words; None for a run whose nodes were in its own process.

    >>> link = {"messages": 81, "seconds_each": 0.0383, "bytes_each": 60071.9, "share": 0.102}
    >>> message_cost(Result.of({"link": link}))
    '81 rounds of messages, 38 ms and 60.1 kB each; the link took 10.2% of the run'
    """
    told = result.link or {}
    count, seconds, size, share = map(told.get, ("messages", "seconds_each", "bytes_each", "share"))
    if count is None or seconds is None or size is None or share is None:
        return None
    each = f"{1000 * seconds:.0f} ms" if seconds < 1 else human_seconds(seconds)
    cost = f"{count:,.0f} rounds of messages, {each} and {human_bytes(round(size))} each"
    return f"{cost}; the link took {percent(100 * share)} of the run"


def time_split(result: Result) -> str | None:
    """Where the time went, in words; None for a run whose nodes were in its own process."""
    told = parts(result)
    return ", ".join(f"{part.name} {human_seconds(part.seconds)}" for part in told) if told else None


def time_bar(told: list[Part]) -> Markup:
    """The parts of a run's time as one bar."""
    drawn, start = [], 0.0
    for part in told:
        piece = Markup('<rect class="part {}" x="{:.2f}%" width="{:.2f}%" y="4" height="16">{}</rect>')
        title = Markup("<title>{}: {}</title>").format(part.name, human_seconds(part.seconds))
        drawn.append(piece.format(part.key, 100 * start, 100 * part.share, title))
        start += part.share
    return Markup('<svg class="bars" width="100%" height="24" role="img" aria-label="{}">{}</svg>').format(
        "; ".join(f"{part.name} {percent(100 * part.share)}" for part in told), Markup("").join(drawn)
    )
