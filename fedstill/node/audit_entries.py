"""One query as it reached a node, and one entry of the node's audit log with its canonical text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from fedstill.core.errors import ArgumentError
from fedstill.privacy.events import Event
from fedstill.protocol.digests import chain_digest

RESPONSE, GRADIENT = "answer", "gradient"  # parts of a query: each that is answered has the first
TRAINING = "training"  # what networks learn from the records before something is released
TRAINING_RESULT = "learned"  # what came of that, by its fingerprint: nothing is paid, and nothing leaves
RESPONSE_FILE = "kept"  # which file of answers was let out, and may leave again
REFUSED = "refused"  # a query that was refused, by which rule
SETTLED = "settled"  # the owner has accepted a log with which something was wrong
RELEASES = (RESPONSE, GRADIENT)

NODE_DATA = "these data"
"""Who pays at a real node: its data, whatever the node is called, so that no other name has another total."""

ALL_RUNS, NO_GUARANTEE = (
    "",
    "",
)  # among totals: the run that stands for all runs, the event that is no guarantee
QUERIES, BYTES = "queries", "bytes"  # there too, beside events: what a policy's limits count
UNIT_PREFIX = "unit: "  # and, before its name, each unit that was paid for

MAX_COUNT = 2**53 - 1
"""The largest count, in an entry and of a total: up to this all who read JSON read the same number."""

Counts = Mapping[str, int]


@dataclass(frozen=True)
class ReceivedQuery:
    """One query as it reached the node."""

    number: int
    query: str
    content_hash: str  # digest of the tensors that came with it
    history_hash: str  # fingerprint of all that the node had answered before: its answer depends on that, too
    received_bytes: Mapping[str, int]  # bytes by kind
    pretraining_hash: str = ""  # fingerprint of what it had learned privately before the first query
    training_hash: str = ""  # and of what it has learned privately for this one

    @property
    def next_history_hash(self) -> str:
        """A fingerprint of all that its answer follows from, and so of what comes after it."""
        return chain_digest(self.history_hash, f"{self.number} {self.content_hash} {self.training_hash}")


@dataclass(frozen=True)
class Entry:
    """What happened to one query, or what was paid for it.

    Args:
        payer: whose totals it counts in: :data:`DATA`, or a simulation's node.
        node: that releases or refuses.
        number: of the query; -1 for what comes before the first.
        part: one of those above.
        content_hash: digest of what was asked.
        history_hash: fingerprint of what the node had answered before.
        release_hash: fingerprint of what leaves, and of what that was before the noise.
        down, up: bytes that came with the query, and that leave, by kind.
        rule: what is done to it, or by which rule it is refused, in one line.
        cost: events as text (:func:`fedstill.privacy.events.cost_to_dict`) and how often each.
        no_guarantee: releases without any guarantee that it stands for.
        unit: what its price protects (:meth:`.PrivacyConfig.unit`); empty: nothing was paid.
        training_cost: what was charged before for this release, with which the server is told of it.
        queries: as how many it counts for a policy's limit.
    """

    run: str
    payer: str
    node: str
    number: int
    query: str
    part: str
    content_hash: str = ""
    history_hash: str = ""
    release_hash: str = ""
    down: Counts = field(default_factory=dict)
    up: Counts = field(default_factory=dict)
    mechanism: str = ""
    rule: str = ""
    cost: Counts = field(default_factory=dict)
    no_guarantee: int = 0
    unit: str = ""
    training_cost: Counts = field(default_factory=dict)
    queries: int = 0

    def to_line(self, time: str) -> str:
        """The canonical text of an entry written at a time: JSON, without what it does not have."""
        fields = {name: value for name, value in vars(self).items() if value or name in REQUIRED}
        return json.dumps({"at": time, **fields}, separators=(",", ":"), sort_keys=True)


REQUIRED = ("run", "payer", "node", "number", "query", "part")
ENTRY_DEFAULTS = {
    name: value for name, value in vars(Entry("", "", "", 0, "", "")).items() if name not in REQUIRED
}


def is_text(value: object) -> bool:
    """Whether a value is text that can be written."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def is_count(value: object, minimum: int = 0) -> bool:
    """Whether a value is a whole number from the least to the largest count."""
    return type(value) is int and minimum <= value <= MAX_COUNT


@lru_cache(maxsize=10_000)
def is_event(name: str) -> bool:
    """Whether a name is an event's."""
    try:
        Event.parse(name)
    except ArgumentError:
        return False
    return True


def _is_counts(value: object) -> bool:
    return isinstance(value, dict) and all(is_text(name) and is_count(n) for name, n in value.items())


def _is_cost(value: object) -> bool:
    return _is_counts(value) and isinstance(value, dict) and all(n and is_event(e) for e, n in value.items())


FIELD_CHECKS: dict[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(("at", *ENTRY_DEFAULTS, *REQUIRED), (is_text, "text")),
    "number": (lambda value: is_count(value, -MAX_COUNT), "a whole number within 2**53"),
    **dict.fromkeys(("no_guarantee", "queries"), (is_count, "a whole number from 0, below 2**53")),
    **dict.fromkeys(
        ("down", "up", "training_cost"), (_is_counts, "names, and a whole number below 2**53 of each")
    ),
    "cost": (_is_cost, "events as text, and from 1 to below 2**53 of each"),
}
"""What each field of a line may be, and the same in words."""


def parse_line(line: object) -> dict[str, Any] | None:
    """All fields of a line, with ``at``; None for what no node could have written.

    >>> parsed(Entry("r", "n", "n", 3, "predict", "response", up={"logits": 8}).line("now"))["up"]
    {'logits': 8}
    >>> parsed("[1]")
    """
    if not isinstance(line, str) or not is_text(line):
        return None
    try:
        fields = json.loads(line)
        is_complete = fields.keys() >= {"at", *REQUIRED} and all(
            FIELD_CHECKS[name][0](fields[name]) for name in fields
        )
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return None
    return (
        {**ENTRY_DEFAULTS, **fields} if is_complete and (fields["run"] or fields["part"] == SETTLED) else None
    )


def check_entry(entry: Entry) -> None:
    """Refuse an entry whose line would not give it back, with :class:`ArgumentError`."""
    for name, value in vars(entry).items():
        is_allowed, expected = FIELD_CHECKS[name]
        if not is_allowed(value):
            raise ArgumentError(f"{name} of an entry", value, expected)
    if parse_line(entry.to_line("")) != {"at": "", **vars(entry)}:
        raise ArgumentError("entry of an audit log", vars(entry), "what its line gives back")
