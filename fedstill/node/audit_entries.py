"""A received query, and an entry of the audit log with its canonical text.

Entries are releases and charges, the owner's acceptances, and security events: joins, refusals, approvals and
changed rules. Security events cost nothing and count in no total.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from fedstill.core.errors import ArgumentError
from fedstill.privacy.events import Event
from fedstill.protocol.digests import chain_digest

RESPONSE, GRADIENT = "response", "gradient"  # parts of a query
TRAINING = "training"  # private training before a release
TRAINING_RESULT = "training result"  # hash of the trained weights; costs nothing
RESPONSE_FILE = "response file"  # released file of responses, which may be repeated
ACCEPTED = "accepted"  # the owner accepted a log with a fault
RELEASES = (RESPONSE, GRADIENT)

# Security events.
REFUSED = "refused"  # refused query or run, with the rule
JOINED = "joined"  # a server's run began or resumed
WAITS = "waits"  # a run waits for the owner's approval
APPROVED, REJECTED = "approved", "rejected"  # the owner's decision
RULES_CHANGED = "policy"  # the owner's rules at a start, if they differ from those written last
CERTIFICATE = "certificate"  # an invalid startup kit, or a server that does not admit the node
SECURITY_EVENTS = (REFUSED, JOINED, WAITS, APPROVED, REJECTED, RULES_CHANGED, CERTIFICATE)

NODE_DATA = "these data"
"""Payer at a real node: its data, whatever the node's name, so that another name does not get another
total."""

ALL_RUNS, NO_GUARANTEE = (
    "",
    "",
)  # in totals: all runs together; releases without a guarantee
QUERIES, BYTES = "queries", "bytes"  # in totals: counts for a policy's limits
UNIT_PREFIX = "unit: "  # in totals: prefix of each charged privacy unit

MAX_COUNT = 2**53 - 1
"""Largest count of an entry and of a total; all JSON readers read integers up to this exactly."""

Counts = Mapping[str, int]


@dataclass(frozen=True)
class ReceivedQuery:
    """One query as it reached the node.

    Attributes:
        number: the server's number of the query.
        query: its name.
        content_hash: digest of the tensors that came with it.
        history_hash: hash of the node's history before it, on which the response depends.
        received_bytes: bytes by payload kind.
        pretraining_hash: hash of private training before the first query.
        training_hash: hash of private training for this query.
    """

    number: int
    query: str
    content_hash: str
    history_hash: str
    received_bytes: Mapping[str, int]
    pretraining_hash: str = ""
    training_hash: str = ""

    def history_after(self, history_hash: str) -> str:
        """Return the hash of a history with this query at its end. Equal hashes mean equal state."""
        return chain_digest(history_hash, f"{self.number} {self.content_hash} {self.training_hash}")


@dataclass(frozen=True)
class Entry:
    """One release, refusal or charge in the audit log.

    Args:
        run: name of the run.
        payer: whose totals it counts in: :data:`NODE_DATA`, or a simulation's node; empty: a security event
            other than a refused query.
        node: the node that releases or refuses.
        number: number of the query; -1 before the first.
        query: name of the query.
        part: one of the constants above, for example ``"response"``.
        content_hash: digest of the query.
        history_hash: hash of the node's history before the query.
        release_hash: sealed hash of the release, with and without its noise.
        down, up: received and released bytes, by payload kind.
        mechanism: name of the privacy mechanism.
        rule: protection of the release, or rule of the refusal, in one line.
        cost: number of charges of each event, by its text (:func:`fedstill.privacy.events.cost_to_dict`).
        no_guarantee: number of releases without any guarantee for which it stands.
        unit: privacy unit of the cost (:meth:`.PrivacyConfig.unit`); empty: nothing was charged.
        training_cost: earlier charges for this release, which the server learns with it.
        queries: number of queries for a policy's limit.
        actor: cause of a security event: a server's fingerprint (empty: not proven), or an account of this
            machine.
        details: further facts of a security event, by name.
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
    actor: str = ""
    details: Mapping[str, str] = field(default_factory=dict)

    def to_line(self, time: str) -> str:
        """Return the canonical text of an entry: JSON without empty fields."""
        fields = {name: value for name, value in vars(self).items() if value or name in REQUIRED}
        return _ENCODER.encode({"at": time, **fields})


_ENCODER = json.JSONEncoder(separators=(",", ":"), sort_keys=True)
REQUIRED = ("run", "payer", "node", "number", "query", "part")
ENTRY_DEFAULTS = {
    name: value for name, value in vars(Entry("", "", "", 0, "", "")).items() if name not in REQUIRED
}

ENTRY_FIELDS = (*REQUIRED, *ENTRY_DEFAULTS)
_FIELD_TYPES = {name: type(value) for name, value in vars(Entry("", "", "", 0, "", "")).items()}
_REQUIRED_FIELDS = frozenset(("at", *REQUIRED))
EVENT_FIELDS = frozenset(("at", *REQUIRED, "rule", "actor", "details"))  # fields of a security event


def is_about_data(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry is a release, a charge, a refused query or an acceptance; others are security
    events only.
    """
    return bool(entry["payer"]) or entry["part"] not in SECURITY_EVENTS


def refusal_count(entry: Mapping[str, Any]) -> int:
    """Return the number of refusals for which an entry stands.

    >>> refusal_count({"part": "refused", "details": {}})
    1
    >>> refusal_count({"part": "refused", "details": {"refusals": "90"}})
    90
    >>> refusal_count({"part": "response", "details": {}})
    0
    """
    if entry["part"] != REFUSED:
        return 0
    count = entry["details"].get("refusals", "")
    # Anything may be in an edited log, and it is shown with its fault.
    return max(int(count), 1) if count.isdecimal() and len(count) <= len(str(MAX_COUNT)) else 1


def is_text(value: object) -> bool:
    """Return whether a value is text that can be encoded."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def is_count(value: object, minimum: int = 0) -> bool:
    """Return whether a value is an integer from ``minimum`` to :data:`MAX_COUNT`."""
    return type(value) is int and minimum <= value <= MAX_COUNT


@lru_cache(maxsize=10_000)
def is_event(name: str) -> bool:
    """Return whether a name is the text of an event."""
    try:
        Event.parse(name)
    except ArgumentError:
        return False
    return True


def _is_counts(value: object) -> bool:
    return isinstance(value, dict) and all(is_text(name) and is_count(n) for name, n in value.items())


def _is_texts(value: object) -> bool:
    return isinstance(value, dict) and all(is_text(name) and is_text(text) for name, text in value.items())


def _is_cost(value: object) -> bool:
    return _is_counts(value) and isinstance(value, dict) and all(n and is_event(e) for e, n in value.items())


FIELD_CHECKS: dict[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(("at", *ENTRY_DEFAULTS, *REQUIRED), (is_text, "text")),
    "number": (lambda value: is_count(value, -MAX_COUNT), "an integer within 2**53"),
    **dict.fromkeys(("no_guarantee", "queries"), (is_count, "an integer from 0, below 2**53")),
    **dict.fromkeys(("down", "up", "training_cost"), (_is_counts, "names with an integer below 2**53 each")),
    "details": (_is_texts, "names with a text each"),
    "cost": (_is_cost, "events as text with an integer from 1 to below 2**53 each"),
}
"""Check of each field of a line, and its description."""


def parse_entry_fields(line: object) -> dict[str, Any] | None:
    """Return all fields of a line, with ``at``; None if no node could have written it.

    >>> line = Entry("r", "n", "n", 3, "predict", "response", up={"logits": 8}).to_line("now")
    >>> parse_entry_fields(line)["up"]
    {'logits': 8}
    >>> parse_entry_fields("[1]")
    """
    if not isinstance(line, str) or not is_text(line):
        return None
    try:
        fields = json.loads(line)
        is_complete = fields.keys() >= _REQUIRED_FIELDS
        for name, value in fields.items():
            is_complete = is_complete and FIELD_CHECKS[name][0](value)
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return None
    if not is_complete:
        return None
    is_valid = _has_valid_part(fields["part"], fields["run"], fields)
    return {**ENTRY_DEFAULTS, **fields} if is_valid else None


def _has_valid_part(part: str, run: str, names: Iterable[str]) -> bool:
    """Return whether an entry's part may have fields of these names; most parts need a run."""
    if part in SECURITY_EVENTS:  # nothing that counts in a total may be written as an event
        return EVENT_FIELDS.issuperset(names)
    return bool(run) or part == ACCEPTED


def check_entry(entry: Entry) -> None:
    """Refuse an entry that its line would not restore.

    Raises:
        ArgumentError: with the field's name.
    """
    fields = vars(entry)
    for name, value in fields.items():
        if type(value) is _FIELD_TYPES[name] and (not value or (type(value) is str and value.isascii())):
            continue  # as most fields are
        is_allowed, expected = FIELD_CHECKS[name]
        if not is_allowed(value):
            raise ArgumentError(f"{name} of an entry", value, expected)
    if not _has_valid_part(entry.part, entry.run, (name for name, value in fields.items() if value)):
        raise ArgumentError("entry of an audit log", fields, "values that its line restores")
