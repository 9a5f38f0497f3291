"""One question as it reached a node, and one entry of the node's audit log with its canonical text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedstill.protocol.digests import chained

ANSWER, GRADIENT = "answer", "gradient"  # parts of a question: each that is answered has the first
TRAINING = "training"  # what networks learn from the records before something is released
LEARNED = "learned"  # what came of that, by its fingerprint: nothing is paid, and nothing leaves
KEPT = "kept"  # which file of answers was let out, and may leave again
REFUSED = "refused"  # a question that was refused, by which rule
SETTLED = "settled"  # the owner has accepted a log with which something was wrong
RELEASES = (ANSWER, GRADIENT)

DATA = "these data"
"""Who pays at a real node: its data, whatever the node is called, so that no other name has another total."""

ALL, BARE = "", ""  # among totals: the run that stands for all runs, the event that is no guarantee
QUESTIONS, BYTES = "questions", "bytes"  # there too, beside events: what a policy's limits count

Table = Mapping[str, int]


@dataclass(frozen=True)
class Asked:
    """One question as it reached the node."""

    number: int
    question: str
    content: str  # digest of the tensors that came with it
    after: str  # fingerprint of all that the node had answered before: its answer depends on that, too
    down: Mapping[str, int]  # bytes by kind
    origin: str = ""  # fingerprint of what it had learned privately before the first question
    learned: str = ""  # and of what it has learned privately for this one

    @property
    def past(self) -> str:
        """A fingerprint of all that its answer follows from, and so of what comes after it."""
        return chained(self.after, f"{self.number} {self.content} {self.learned}")


@dataclass(frozen=True)
class Entry:
    """What happened to one question, or what was paid for it.

    Args:
        payer: whose totals it counts in: :data:`DATA`, or a simulation's node.
        node: that releases or refuses.
        number: of the question; -1 for what comes before the first.
        part: one of those above.
        content: digest of what was asked.
        after: fingerprint of what the node had answered before.
        left: fingerprint of what leaves, and of what that was before the noise.
        down, up: bytes that came with the question, and that leave, by kind.
        rule: what is done to it, or by which rule it is refused, in one line.
        price: events as text (:func:`fedstill.privacy.events.as_text`) and how often each.
        bare: releases without any guarantee that it stands for.
        learned: what was charged before for this release, with which the server is told of it.
        questions: as how many it counts for a policy's limit.
    """

    run: str
    payer: str
    node: str
    number: int
    question: str
    part: str
    content: str = ""
    after: str = ""
    left: str = ""
    down: Table = field(default_factory=dict)
    up: Table = field(default_factory=dict)
    mechanism: str = ""
    rule: str = ""
    price: Table = field(default_factory=dict)
    bare: int = 0
    learned: Table = field(default_factory=dict)
    questions: int = 0

    def line(self, at: str) -> str:
        """The canonical text of an entry written at a time: JSON, without what it does not have."""
        told = {name: value for name, value in vars(self).items() if value or name in REQUIRED}
        return json.dumps({"at": at, **told}, separators=(",", ":"), sort_keys=True)


REQUIRED = ("run", "payer", "node", "number", "question", "part")
NOTHING = {name: value for name, value in vars(Entry("", "", "", 0, "", "")).items() if name not in REQUIRED}


def parsed(line: str) -> dict[str, Any] | None:
    """All fields of a line, with ``at``; None for what no node could have written.

    >>> parsed(Entry("r", "n", "n", 3, "predict", "answer", up={"logits": 8}).line("now"))["up"]
    {'logits': 8}
    >>> parsed("[1]")
    """
    try:
        told = {**NOTHING, **json.loads(line)}
        counts = [told["bare"], told["questions"]]
        for name in ("up", "down", "price", "learned"):
            counts += told[name].values()
        sound = all(isinstance(told[name], str) for name in ("at", "run", "payer", "node", "part"))
    except (ValueError, TypeError, AttributeError, LookupError):
        return None
    return told if sound and all(type(n) is int and 0 <= n < 2**53 for n in counts) else None
