"""Totals of the entries of an audit log."""

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
    RELEASES,
    RESPONSE,
    RULES_CHANGED,
    SECURITY_EVENTS,
    TRAINING,
    UNIT_PREFIX,
)


@dataclass(frozen=True)
class Spending:
    """Spending of one payer, in one run and in all: number of charges of each event, by its text.

    Attributes:
        run_events, total_events: charges in this run and in all runs.
        run_no_guarantee, total_no_guarantee: releases without a guarantee.
        run_queries, total_queries: queries; each response counts, and each further gradient of it.
        total_bytes: released bytes in all runs.
    """

    run_events: Mapping[str, int]
    total_events: Mapping[str, int]
    run_no_guarantee: int = 0
    total_no_guarantee: int = 0
    run_queries: int = 0
    total_queries: int = 0
    total_bytes: int = 0


class EntryTotals:
    """Totals of entries, in memory: a charge takes constant time, however many entries there are.

    Attributes:
        events: by payer and run (:data:`ALL_RUNS` is all of them): number of events, and counts for limits;
            each up to :data:`~fedstill.node.audit_entries.MAX_COUNT`.
        bytes: bytes of releases, by run, node, way ("down" or "up") and payload kind.
        response_counts: number of responses and of further gradients, by run, node and query; a repeated
            response counts again if a bit differs.
        rules: the owner's rules as written last, by node.
    """

    def __init__(self) -> None:
        self.events: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self.bytes: Counter[tuple[str, str, str, str]] = Counter()
        self.response_counts: Counter[tuple[str, str, str]] = Counter()
        self.rules: dict[str, Mapping[str, str]] = {}
        self._entry_numbers: dict[tuple[Any, ...], dict[tuple[str, str], int]] = defaultdict(dict)
        self._query_names: dict[tuple[str, int, str], str] = {}  # run, number and content hash -> query name
        self._unreported: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)  # by run and node
        self._charged_runs: set[str] = set()  # runs
        self._head_rows: dict[tuple[str, str], str] = {}  # texts of the head; empty if outdated

    def add(self, number: int, entry: Mapping[str, Any]) -> None:
        """Add one entry, as :func:`parse_entry_fields` returns it."""
        run, node, part = entry["run"], entry["node"], entry["part"]
        if part in SECURITY_EVENTS:
            if part == RULES_CHANGED:
                self.rules[node] = entry["details"]
            return
        self._charged_runs.add(run)
        cost = dict(entry["cost"])
        counted = (
            (QUERIES, entry["queries"]),
            (BYTES, sum(entry["up"].values())),
            (NO_GUARANTEE, entry["no_guarantee"]),
        )
        cost.update({name: count for name, count in counted if count})
        for name in (run, ALL_RUNS):
            events = self.events[entry["payer"], name]
            for event, times in cost.items():
                events[event] = min(events[event] + times, MAX_COUNT)
            if entry["unit"]:
                events[f"{UNIT_PREFIX}{entry['unit']}"] = 1
        if run != ALL_RUNS:
            self._head_rows[entry["payer"], run] = ""
        if part == RESPONSE or (part == GRADIENT and self.sibling_content_hashes(entry)):
            self.response_counts[run, node, entry["query"]] += 1
        self._entry_numbers[_query_key(entry)][entry["content_hash"], entry["release_hash"]] = number
        if part == TRAINING:
            self._unreported[run, node].update(cost)
        if part not in RELEASES:
            return
        if entry["training_cost"]:
            self._unreported[run, node].subtract(entry["training_cost"])
        if part == RESPONSE:
            self._query_names[run, entry["number"], entry["content_hash"]] = entry["query"]
        for direction in ("down", "up"):
            for kind, size in entry[direction].items():
                self.bytes[run, node, direction, kind] += size

    def spending(self, payer: str, run: str) -> Spending:
        """Return a payer's spending, in one run and in all."""
        run_events, total_events = (
            Counter(
                {key: n for key, n in self._events_of(payer, name).items() if not key.startswith(UNIT_PREFIX)}
            )
            for name in (run, ALL_RUNS)
        )
        run_no_guarantee, total_no_guarantee = (
            run_events.pop(NO_GUARANTEE, 0),
            total_events.pop(NO_GUARANTEE, 0),
        )
        run_queries, total_queries = run_events.pop(QUERIES, 0), total_events.pop(QUERIES, 0)
        run_events.pop(BYTES, 0)
        total_bytes = total_events.pop(BYTES, 0)
        return Spending(
            run_events,
            total_events,
            run_no_guarantee,
            total_no_guarantee,
            run_queries,
            total_queries,
            total_bytes,
        )

    def units(self, payer: str, run: str = ALL_RUNS) -> set[str]:
        """Return the privacy units of a payer's charges, in one run or in all; events of two units cannot
        be added.
        """
        return {
            name.removeprefix(UNIT_PREFIX)
            for name in self._events_of(payer, run)
            if name.startswith(UNIT_PREFIX)
        }

    def _events_of(self, payer: str, run: str) -> Mapping[str, int]:
        return self.events.get((payer, run), {})

    def entry_number(self, entry: Mapping[str, Any]) -> int:
        """Return the number of the entry with equal run, node, number, part and hashes; 0 if none."""
        return self._entry_numbers.get(_query_key(entry), {}).get(
            (entry["content_hash"], entry["release_hash"]), 0
        )

    def sibling_content_hashes(self, entry: Mapping[str, Any]) -> list[str]:
        """Return the content hashes of entries that differ from this one at most in content and release."""
        return [content_hash for content_hash, _ in self._entry_numbers.get(_query_key(entry), ())]

    def unreported_training_charges(self, run: str, node: str) -> dict[str, int]:
        """Return charges for training that no reply has reported to a server yet."""
        return {name: min(count, MAX_COUNT) for name, count in (+self._unreported[run, node]).items()}

    def run_totals(self) -> dict[tuple[str, str], Counter[str]]:
        """Return the totals by payer and run, as a head holds them."""
        return {names: Counter(counts) for names, counts in self.events.items() if names[1] != ALL_RUNS}

    def head_rows(self) -> Iterable[str]:
        """Yield the totals as texts. Only the rows of changed runs are computed again."""
        for names, text in self._head_rows.items():
            if not text:
                self._head_rows[names] = audit_head.format_head_total(*names, self.events[names])
        return self._head_rows.values()

    def has_charged(self, run: str) -> bool:
        """Return whether a run has entries other than refusals."""
        return run in self._charged_runs

    def traffic_totals(self, run: str | None = None) -> dict[str, Any]:
        """Return bytes ``up`` and ``down``, total, ``by_kind`` and ``by_node``, and numbers of queries: of
        one run, or of all.
        """
        by_kind: dict[str, dict[str, int]] = {}
        by_node: dict[str, dict[str, int]] = {}
        total = {"up": 0, "down": 0}
        for (entry_run, node, direction, kind), size in sorted(self.bytes.items()):
            if run in (None, entry_run):
                for table, key in ((by_kind, kind), (by_node, node)):
                    table.setdefault(key, {"up": 0, "down": 0})[direction] += size
                total[direction] += size
        names = [name for (entry_run, _, _), name in self._query_names.items() if run in (None, entry_run)]
        return {
            **total,
            "by_kind": by_kind,
            "by_node": by_node,
            "queries": len(names),  # a query to K nodes counts once
            "queries_by_name": dict(sorted(Counter(names).items())),
        }


def _query_key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return entry["run"], entry["node"], entry["number"], entry["part"], entry["history_hash"]
