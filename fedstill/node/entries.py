"""One entry of a node's audit log, and what entries add up to."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
class Entry:
    """What happened to one question, or what was paid for it.

    Args:
        run: that it is for.
        payer: whose totals it counts in: :data:`DATA`, or a simulation's node.
        node: that releases or refuses.
        number: of the question; -1 for what comes before the first.
        question: its name.
        part: one of those above.
        content: digest of what was asked.
        after: fingerprint of what the node had answered before.
        left: fingerprint of what leaves, and of what that was before the noise.
        down: bytes that came with the question, by kind.
        up: bytes that leave, by kind.
        mechanism: by which it is protected.
        rule: what is done to it, or by which rule it is refused, in one line.
        price: events as text (:func:`fedstill.privacy.events.as_text`) and how often each.
        bare: releases without any guarantee that it stands for.
        learned: what was charged before for this release, with which the server is told of it.
        questions: as how many it counts for a policy's limit.
        votes: behind a release, where the owner wants to keep them.
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
    votes: Sequence[Sequence[int]] = ()

    def line(self, at: str) -> str:
        """The canonical text of an entry written at a time: JSON, without what it does not have."""
        told = {name: value for name, value in vars(self).items() if value or name in REQUIRED}
        return json.dumps({"at": at, **told}, separators=(",", ":"), sort_keys=True)


REQUIRED = ("run", "payer", "node", "number", "question", "part")
NOTHING = {name: value for name, value in vars(Entry("", "", "", 0, "", "")).items() if name not in REQUIRED}
NOTHING["votes"] = []  # as JSON has it


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


class Sums:
    """What entries add up to, in memory: a charge looks up and adds, however many there are.

    Attributes:
        spent: by payer and run (:data:`ALL` is all of them): events, and what limits count.
        bytes: by run, node, way ("down" or "up") and kind, of what has left.
        votes: by run and node, behind what has left.
    """

    def __init__(self) -> None:
        self.spent: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self.bytes: Counter[tuple[str, str, str, str]] = Counter()
        self.votes: dict[tuple[str, str], list[Sequence[int]]] = defaultdict(list)
        self._known: dict[tuple[Any, ...], dict[tuple[str, str], int]] = defaultdict(dict)
        self._asked: dict[tuple[str, int, str], str] = {}  # run, number and content -> the question's name
        self._untold: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)  # by run and node
        self._charged: set[str] = set()  # runs

    def add(self, number: int, told: Mapping[str, Any]) -> None:
        """Count one entry, as :func:`parsed` gives it."""
        run, node, part = told["run"], told["node"], told["part"]
        if part == REFUSED:
            return
        self._charged.add(run)
        cost = dict(told["price"])
        counted = (QUESTIONS, told["questions"]), (BYTES, sum(told["up"].values())), (BARE, told["bare"])
        cost.update({name: count for name, count in counted if count})
        for name in (run, ALL):
            spent = self.spent[told["payer"], name]
            for event, times in cost.items():
                spent[event] += times
        self._known[_place(told)][told["content"], told["left"]] = number
        if part == TRAINING:
            self._untold[run, node].update(cost)
        if part not in RELEASES:
            return
        if told["learned"]:
            self._untold[run, node].subtract(told["learned"])
        if part == ANSWER:
            self._asked[run, told["number"], told["content"]] = told["question"]
        if told["votes"]:
            self.votes[run, node].extend(told["votes"])
        for way in ("down", "up"):
            for kind, size in told[way].items():
                self.bytes[run, node, way, kind] += size

    def number(self, told: Mapping[str, Any]) -> int:
        """The entry that says the same of the same release; 0 if there is none."""
        return self._known.get(_place(told), {}).get((told["content"], told["left"]), 0)

    def siblings(self, told: Mapping[str, Any]) -> list[str]:
        """What was asked in the entries that differ from one, if at all, in what was asked and what left."""
        return [content for content, _ in self._known.get(_place(told), ())]

    def untold(self, run: str, node: str) -> dict[str, int]:
        """What was charged for learning, and no server was told of yet."""
        return dict(+self._untold[run, node])

    def has_charged(self, run: str) -> bool:
        """Whether anything of a run has left or is paid for."""
        return run in self._charged

    def summary(self, run: str | None = None) -> dict[str, Any]:
        """Bytes ``up`` and ``down``, in all, ``by_kind`` and ``by_node``, and questions asked.

        Args:
            run: in which; None: in all.
        """
        by_kind: dict[str, dict[str, int]] = {}
        by_node: dict[str, dict[str, int]] = {}
        total = {"up": 0, "down": 0}
        for (of, node, way, kind), size in sorted(self.bytes.items()):
            if run in (None, of):
                for table, key in ((by_kind, kind), (by_node, node)):
                    table.setdefault(key, {"up": 0, "down": 0})[way] += size
                total[way] += size
        names = [name for (of, _, _), name in self._asked.items() if run in (None, of)]
        return {
            **total,
            "by_kind": by_kind,
            "by_node": by_node,
            "questions": len(names),  # one to K nodes, answered in parts, is one
            "questions_by_name": dict(sorted(Counter(names).items())),
        }


def _place(told: Mapping[str, Any]) -> tuple[Any, ...]:
    return told["run"], told["node"], told["number"], told["part"], told["after"]
