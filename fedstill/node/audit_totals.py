"""What the entries of an audit log add up to."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedstill.node import audit_head
from fedstill.node.audit_entries import (
    ALL_RUNS,
    BYTES,
    GRADIENT,
    MAX_COUNT,
    NO_GUARANTEE,
    QUERIES,
    REFUSED,
    RELEASES,
    RESPONSE,
    TRAINING,
    UNIT_PREFIX,
)


@dataclass(frozen=True)
class Spending:
    """What somebody has paid, in one run and in all: events as text and how often each.

    ``bare`` are releases without guarantee. Each answer is a query, and each further gradient of it;
    ``bytes`` have left in all runs.
    """

    run: Mapping[str, int]
    total: Mapping[str, int]
    bare_run: int = 0
    bare_total: int = 0
    queries_run: int = 0
    queries: int = 0
    bytes: int = 0


class EntryTotals:
    """What entries add up to, in memory: a charge looks up and adds, however many there are.

    Attributes:
        spent: by payer and run (:data:`ALL` is all of them): events, and what limits count; up to
            :data:`~fedstill.node.audit_entries.LARGEST` of each.
        bytes: by run, node, way ("down" or "up") and kind, of what has left.
        asked: by run, node and query, how often it was answered (again, where a bit of that is another
            one), and further gradients of the same answer.
    """

    def __init__(self) -> None:
        self.spent: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self.bytes: Counter[tuple[str, str, str, str]] = Counter()
        self.asked: Counter[tuple[str, str, str]] = Counter()
        self._known: dict[tuple[Any, ...], dict[tuple[str, str], int]] = defaultdict(dict)
        self._asked: dict[tuple[str, int, str], str] = {}  # run, number and content -> the query's name
        self._untold: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)  # by run and node
        self._charged: set[str] = set()  # runs
        self._rows: dict[tuple[str, str], str] = {}  # of a head; empty where more was spent since

    def add(self, number: int, told: Mapping[str, Any]) -> None:
        """Count one entry, as :func:`parsed` gives it."""
        run, node, part = told["run"], told["node"], told["part"]
        if part == REFUSED:
            return
        self._charged.add(run)
        cost = dict(told["price"])
        counted = (QUERIES, told["queries"]), (BYTES, sum(told["up"].values())), (BARE, told["bare"])
        cost.update({name: count for name, count in counted if count})
        for name in (run, ALL):
            spent = self.spent[told["payer"], name]
            for event, times in cost.items():
                spent[event] = min(spent[event] + times, LARGEST)
            if told["unit"]:
                spent[f"{UNIT}{told['unit']}"] = 1
        if run != ALL:
            self._rows[told["payer"], run] = ""
        if part == ANSWER or (part == GRADIENT and self.siblings(told)):
            self.asked[run, node, told["query"]] += 1
        self._known[_query_key(told)][told["content"], told["left"]] = number
        if part == TRAINING:
            self._untold[run, node].update(cost)
        if part not in RELEASES:
            return
        if told["learned"]:
            self._untold[run, node].subtract(told["learned"])
        if part == ANSWER:
            self._asked[run, told["number"], told["content"]] = told["query"]
        for way in ("down", "up"):
            for kind, size in told[way].items():
                self.bytes[run, node, way, kind] += size

    def spent_by(self, payer: str, run: str) -> Spending:
        """What a payer has spent, in one run and in all."""
        here, total = (
            Counter({what: n for what, n in self._spent(payer, name).items() if not what.startswith(UNIT)})
            for name in (run, ALL)
        )
        bare_run, bare_total = here.pop(BARE, 0), total.pop(BARE, 0)
        queries_run, queries = here.pop(QUERIES, 0), total.pop(QUERIES, 0)
        here.pop(BYTES, 0)
        left = total.pop(BYTES, 0)
        return Spending(here, total, bare_run, bare_total, queries_run, queries, left)

    def units(self, payer: str, run: str = ALL) -> set[str]:
        """What a payer's prices protect, in one run or in all: events of two units add up to nothing."""
        return {what.removeprefix(UNIT) for what in self._spent(payer, run) if what.startswith(UNIT)}

    def _spent(self, payer: str, run: str) -> Mapping[str, int]:
        return self.spent.get((payer, run), {})

    def number(self, told: Mapping[str, Any]) -> int:
        """The entry that says the same of the same release; 0 if there is none."""
        return self._known.get(_query_key(told), {}).get((told["content"], told["left"]), 0)

    def siblings(self, told: Mapping[str, Any]) -> list[str]:
        """What was asked in the entries that differ from one, if at all, in what was asked and what left."""
        return [content for content, _ in self._known.get(_query_key(told), ())]

    def untold(self, run: str, node: str) -> dict[str, int]:
        """What was charged for learning, and no server was told of yet."""
        return {name: min(count, LARGEST) for name, count in (+self._untold[run, node]).items()}

    def by_run(self) -> dict[tuple[str, str], Counter[str]]:
        """What was spent by now, by payer and run, as a head has it."""
        return {names: Counter(counts) for names, counts in self.spent.items() if names[1] != ALL}

    def rows(self) -> Iterable[str]:
        """The same as text. A node has seen thousands of runs, and spends in one."""
        for names, text in self._rows.items():
            if not text:
                self._rows[names] = audit_head.head_row(*names, self.spent[names])
        return self._rows.values()

    def has_charged(self, run: str) -> bool:
        """Whether anything of a run has left or is paid for."""
        return run in self._charged

    def summary(self, run: str | None = None) -> dict[str, Any]:
        """Bytes ``up`` and ``down``, in all, ``by_kind`` and ``by_node``, and queries asked: in one run, or
        in all."""
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
            "queries": len(names),  # one to K nodes, answered in parts, is one
            "queries_by_name": dict(sorted(Counter(names).items())),
        }


def _query_key(told: Mapping[str, Any]) -> tuple[Any, ...]:
    return told["run"], told["node"], told["number"], told["part"], told["after"]
