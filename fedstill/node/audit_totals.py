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
    ``total_bytes`` have left in all runs.
    """

    run_events: Mapping[str, int]
    total_events: Mapping[str, int]
    run_no_guarantee: int = 0
    total_no_guarantee: int = 0
    run_queries: int = 0
    total_queries: int = 0
    total_bytes: int = 0


class EntryTotals:
    """What entries add up to, in memory: a charge looks up and adds, however many there are.

    Attributes:
        events: by payer and run (:data:`ALL` is all of them): events, and what limits count; up to
            :data:`~fedstill.node.audit_entries.LARGEST` of each.
        bytes: by run, node, way ("down" or "up") and kind, of what has left.
        response_counts: by run, node and query, how often it was answered (again, where a bit of that is another
            one), and further gradients of the same answer.
    """

    def __init__(self) -> None:
        self.events: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self.bytes: Counter[tuple[str, str, str, str]] = Counter()
        self.response_counts: Counter[tuple[str, str, str]] = Counter()
        self._entry_numbers: dict[tuple[Any, ...], dict[tuple[str, str], int]] = defaultdict(dict)
        self._query_names: dict[tuple[str, int, str], str] = {}  # run, number and content -> the query's name
        self._unreported: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)  # by run and node
        self._charged_runs: set[str] = set()  # runs
        self._head_rows: dict[tuple[str, str], str] = {}  # of a head; empty where more was spent since

    def add(self, number: int, told: Mapping[str, Any]) -> None:
        """Count one entry, as :func:`parsed` gives it."""
        run, node, part = told["run"], told["node"], told["part"]
        if part == REFUSED:
            return
        self._charged_runs.add(run)
        cost = dict(told["cost"])
        counted = (
            (QUERIES, told["queries"]),
            (BYTES, sum(told["up"].values())),
            (NO_GUARANTEE, told["no_guarantee"]),
        )
        cost.update({name: count for name, count in counted if count})
        for name in (run, ALL_RUNS):
            spent = self.events[told["payer"], name]
            for event, times in cost.items():
                spent[event] = min(spent[event] + times, MAX_COUNT)
            if told["unit"]:
                spent[f"{UNIT_PREFIX}{told['unit']}"] = 1
        if run != ALL_RUNS:
            self._head_rows[told["payer"], run] = ""
        if part == RESPONSE or (part == GRADIENT and self.sibling_contents(told)):
            self.response_counts[run, node, told["query"]] += 1
        self._entry_numbers[_query_key(told)][told["content_hash"], told["release_hash"]] = number
        if part == TRAINING:
            self._unreported[run, node].update(cost)
        if part not in RELEASES:
            return
        if told["training_cost"]:
            self._unreported[run, node].subtract(told["training_cost"])
        if part == RESPONSE:
            self._query_names[run, told["number"], told["content_hash"]] = told["query"]
        for way in ("down", "up"):
            for kind, size in told[way].items():
                self.bytes[run, node, way, kind] += size

    def spending(self, payer: str, run: str) -> Spending:
        """What a payer has spent, in one run and in all."""
        here, total = (
            Counter(
                {
                    what: n
                    for what, n in self._events_of(payer, name).items()
                    if not what.startswith(UNIT_PREFIX)
                }
            )
            for name in (run, ALL_RUNS)
        )
        bare_run, bare_total = here.pop(NO_GUARANTEE, 0), total.pop(NO_GUARANTEE, 0)
        queries_run, queries = here.pop(QUERIES, 0), total.pop(QUERIES, 0)
        here.pop(BYTES, 0)
        left = total.pop(BYTES, 0)
        return Spending(here, total, bare_run, bare_total, queries_run, queries, left)

    def units(self, payer: str, run: str = ALL_RUNS) -> set[str]:
        """What a payer's prices protect, in one run or in all: events of two units add up to nothing."""
        return {
            what.removeprefix(UNIT_PREFIX)
            for what in self._events_of(payer, run)
            if what.startswith(UNIT_PREFIX)
        }

    def _events_of(self, payer: str, run: str) -> Mapping[str, int]:
        return self.events.get((payer, run), {})

    def entry_number(self, told: Mapping[str, Any]) -> int:
        """The entry that says the same of the same release; 0 if there is none."""
        return self._entry_numbers.get(_query_key(told), {}).get(
            (told["content_hash"], told["release_hash"]), 0
        )

    def sibling_contents(self, told: Mapping[str, Any]) -> list[str]:
        """What was asked in the entries that differ from one, if at all, in what was asked and what left."""
        return [content for content, _ in self._entry_numbers.get(_query_key(told), ())]

    def unreported(self, run: str, node: str) -> dict[str, int]:
        """What was charged for learning, and no server was told of yet."""
        return {name: min(count, MAX_COUNT) for name, count in (+self._unreported[run, node]).items()}

    def run_totals(self) -> dict[tuple[str, str], Counter[str]]:
        """What was spent by now, by payer and run, as a head has it."""
        return {names: Counter(counts) for names, counts in self.events.items() if names[1] != ALL_RUNS}

    def head_rows(self) -> Iterable[str]:
        """The same as text. A node has seen thousands of runs, and spends in one."""
        for names, text in self._head_rows.items():
            if not text:
                self._head_rows[names] = audit_head.head_row(*names, self.events[names])
        return self._head_rows.values()

    def has_charged(self, run: str) -> bool:
        """Whether anything of a run has left or is paid for."""
        return run in self._charged_runs

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
        names = [name for (of, _, _), name in self._query_names.items() if run in (None, of)]
        return {
            **total,
            "by_kind": by_kind,
            "by_node": by_node,
            "queries": len(names),  # one to K nodes, answered in parts, is one
            "queries_by_name": dict(sorted(Counter(names).items())),
        }


def _query_key(told: Mapping[str, Any]) -> tuple[Any, ...]:
    return told["run"], told["node"], told["number"], told["part"], told["history_hash"]
