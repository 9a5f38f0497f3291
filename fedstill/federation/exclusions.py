"""Nodes that a run continues without, as long as a quorum of nodes remains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedstill.core.errors import NodeFault, QueryRefused, combine_refusals
from fedstill.core.text_format import to_printable_line
from fedstill.protocol.queries import Query


@dataclass(frozen=True)
class ExcludedNode:
    """A node that a run continues without.

    Args:
        since_query: number of the first query that it does not take part in.
        reason: error message.
        may_rejoin: whether it may rejoin. A node that was unreachable may; one that sent invalid data may
            not.
    """

    since_query: int
    reason: str
    may_rejoin: bool


class Exclusions:
    """The nodes of a federation, and those of them that are excluded.

    Args:
        nodes: names of all nodes, in order.

    Attributes:
        excluded: nodes that the run continues without, by name.
        events: exclusions and returns of nodes, for the report.
    """

    def __init__(self, nodes: Sequence[str]) -> None:
        self.nodes = tuple(nodes)
        self.excluded: dict[str, ExcludedNode] = {}
        self.events: list[dict[str, Any]] = []

    @property
    def present(self) -> tuple[str, ...]:
        """Names of the nodes that take part, without excluded ones."""
        return tuple(name for name in self.nodes if name not in self.excluded)

    def exclude(
        self, node: str, query: str, reason: str, since_query: int, min_nodes: int, *, may_rejoin: bool
    ) -> None:
        """Exclude a node that failed at a query.

        Args:
            node: its name.
            query: the query.
            reason: the failure, in one line.
            since_query: number of the first query without it.
            min_nodes: number of nodes that must remain (link.quorum).
            may_rejoin: whether it may take part again once it can be reached.

        Raises:
            NodeFault: too few nodes remain.
        """
        left, reason = len(self.present) - (node not in self.excluded), to_printable_line(reason)
        self.events.append({"node": node, "number": since_query, "event": "excluded", "reason": reason})
        self.excluded[node] = ExcludedNode(since_query, reason, may_rejoin)
        if left < min_nodes:
            missing = f"{left} of {len(self.nodes)} nodes are left, link.quorum wants {min_nodes}"
            raise NodeFault(node, query, f"{reason}; {missing}")

    def exclude_refusing(
        self,
        queries: Sequence[Query],
        objections: Mapping[str, Mapping[str, str]],
        limits: Mapping[str, int],
        since_query: int,
        min_nodes: int,
    ) -> None:
        """Exclude the nodes that will refuse queries of a run.

        Args:
            queries: the queries.
            objections: by the query's name, the rule by which each unwilling node would refuse it.
            limits: largest number of queries of each node that has a limit.
            since_query: number of the next query.
            min_nodes: number of nodes that must remain.

        Raises:
            QueryRefused: too few nodes remain. Names all of these nodes, with queries and rules.
        """
        refusals = [
            QueryRefused(node, query.name, rule)
            for query in queries
            for node, rule in objections[query.name].items()
        ]
        total = sum(query.times for query in queries)
        for node, limit in limits.items():
            if total > limit and all(node != refusal.node for refusal in refusals):
                rule = f"max_queries: {limit}, and the run asks {total}"
                refusals.append(QueryRefused(node, ", ".join(query.name for query in queries), rule))
        unwilling = {refusal.node: refusal for refusal in reversed(refusals)}  # by its first rule
        needs_all = min_nodes == len(self.nodes)
        if refusals and (needs_all or len(self.present) - len(unwilling) < min_nodes):
            raise combine_refusals(refusals)
        for node, refusal in unwilling.items():
            reason = f"refused: {refusal.rule}"
            self.exclude(node, refusal.query, reason, since_query, min_nodes, may_rejoin=False)

    def state_dict(self) -> dict[str, Any]:
        excluded = {
            node: [each.since_query, each.reason, each.may_rejoin] for node, each in self.excluded.items()
        }
        return {"excluded": excluded, "events": self.events}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.events = list(state["events"])
        self.excluded = {node: ExcludedNode(*values) for node, values in state["excluded"].items()}
