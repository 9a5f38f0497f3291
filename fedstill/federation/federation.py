"""The federation as a server sees it: a differentiable function of what it asks about.

``responses = federation.query("examine", x=x)`` gives the nodes' answers with gradients attached: when a
loss over them is pulled back, the federation sends each node the gradient that reached its answer,
the node pulls it through its own networks, and what its gate lets out arrives in ``x.grad``. An
engine says how nodes are reached; a method cannot tell engines apart.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fedstill.core.errors import (
    ArgumentError,
    DataError,
    NodeFault,
    QueryRefused,
    refused_by,
)
from fedstill.core.text_format import brief_repr, clip
from fedstill.federation.autograd import Call, FederatedQuery
from fedstill.federation.link_config import LinkConfig
from fedstill.federation.response_checks import (
    faults,
    invalid_dtype_fault,
    mismatched_gradients,
    not_finite,
    oversized_gradients,
    require_finite,
    require_finite_inputs,
)
from fedstill.federation.secure_aggregation import SentQuery, SumAggregation, check_secure_aggregation
from fedstill.protocol.payload_kinds import GRADIENTS, INPUTS
from fedstill.protocol.queries import Query
from fedstill.protocol.secure_aggregation import SUM
from fedstill.protocol.wire_format import Tensors, as_text, decompress, from_text


@dataclass(frozen=True)
class Responses:
    """What K nodes answered: ``responses["logits"]`` is ``(K, B, ...)``, in the order of ``nodes``."""

    number: int
    nodes: tuple[str, ...]
    tensors: Tensors
    apart: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # of parts that are not stacked

    __repr__ = brief_repr

    def __getitem__(self, name: str) -> torch.Tensor:
        """One part of the answers, of all nodes that answered.

        Raises:
            ArgumentError: the query's answer has no such part, or one that differs in shape by node.
        """
        if name not in self.tensors:
            known = f"one of {', '.join(self.tensors) or 'none'}"
            apart = f"a part that is one tensor; answers.by_node({name!r}) gives what each node answered"
            raise ArgumentError("answer", name, apart if name in self.apart else known)
        return self.tensors[name]

    def by_node(self, name: str) -> dict[str, Any]:
        """One part of the answers, node by node: ``(B, ...)`` each, or a JSON value where it is one.

        Raises:
            ArgumentError: the query's answer has no such part.
        """
        each = self.apart[name] if name in self.apart else self[name]
        return dict(zip(self.nodes, each, strict=True))


@dataclass(frozen=True)
class ExcludedNode:
    """A node that a run goes on without: since which query, why, and whether it may come back, having
    stayed away and not answered nonsense."""

    since: int
    reason: str
    back: bool


class Federation(SumAggregation):
    """K nodes and one way to reach them.

    Args:
        link: forms, and what is done about nodes that fail.
    """

    def __init__(
        self, nodes: Sequence[str], queries: Mapping[str, Query], link: LinkConfig | None = None
    ) -> None:
        self.nodes, self.queries = tuple(nodes), queries
        self.link = link or LinkConfig()
        if self.link.secure_aggregation:
            check_secure_aggregation(self.nodes, queries)
        self.outputs: tuple[int, ...] | None = None  # shape of an input's logits, where an engine knows
        self.number = 0  # of the next query; part of a run's state
        self.excluded: dict[str, ExcludedNode] = {}  # whom the run goes on without; part of its state too
        self.events: list[dict[str, Any]] = []  # who was left out and who came back, for the report

    @property
    def present(self) -> tuple[str, ...]:
        """The nodes that the run goes on with."""
        return tuple(name for name in self.nodes if name not in self.excluded)

    @property
    def response_sources(self) -> tuple[str, ...]:
        """By whose names answers come: the nodes' that the run goes on with, or one for all of them."""
        return (SUM,) if self.link.secure_aggregation else self.present

    def query(
        self, query: str, *, of: Sequence[str] | None = None, number: int | None = None, **given: Any
    ) -> Responses:
        """QueryCall all nodes, or a few, one query.

        A node that stays away or answers nonsense is left out from then on, as long as a quorum remains.

        Args:
            query: its name.
            of: names of the nodes to ask; None is all. Those that are out are not asked.
            number: to ask again under a number already used; None takes the next one.
            given: tensors that go down with it, and JSON values where the query declares them. Where the
                query is differentiable and a tensor requires gradients, the answers do too.

        Raises:
            ArgumentError: no such query or node.
            QueryRefused: a node's gate does not answer it.
            QueryMismatch: the number was used with other content.
            NodeFault: a node failed, and too few are left; or answers differ so that one must be wrong, and
                it is not known which.
        """
        if query not in self.queries:
            raise ArgumentError("query", query, f"one of {', '.join(self.queries)}")
        asked = self._chosen(of)
        if number is None:
            number = self.number
        self.number = max(self.number, number + 1)
        declared = self.queries[query]
        tensors: dict[str, torch.Tensor] = {
            name: as_text(value) if name in declared.values else value for name, value in given.items()
        }
        names, through = tuple(tensors), declared.differentiable
        wanted = torch.is_grad_enabled() and any(
            tensor.requires_grad for name, tensor in tensors.items() if name in through
        )
        if not wanted:
            sent = {name: tensor.detach() for name, tensor in tensors.items()}
            responses = self.valid_responses(asked, query, number, sent, False)
            first = next(iter(responses.values()))
            stacked = [name for name in first if name not in declared.apart]
            return Responses(
                number,
                (SUM,) if self.link.secure_aggregation else tuple(responses),
                {name: torch.stack([each[name] for each in responses.values()]) for name in stacked},
                {name: self._apart(declared, name, responses) for name in declared.apart},
            )
        call = Call(self, asked, query, number, names)
        flat = FederatedQuery.apply(call, *tensors.values())  # type: ignore[no-untyped-call]
        return Responses(number, call.nodes, dict(zip(call.answered, flat, strict=True)))

    @staticmethod
    def _apart(query: Query, name: str, responses: Mapping[str, Tensors]) -> tuple[Any, ...]:
        """A part of the answers that is not stacked, one a node."""
        read = from_text if name in query.values else torch.Tensor.detach
        return tuple(read(each[name]) for each in responses.values())

    def state(self) -> dict[str, Any]:
        """What a run must remember of its federation."""
        out = {node: [left.since, left.reason, left.back] for node, left in self.excluded.items()}
        return {"number": self.number, "out": out, "events": self.events}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take up a remembered state."""
        self.number, self.events = state["number"], list(state["events"])
        self.excluded = {node: ExcludedNode(*left) for node, left in state["out"].items()}

    def exclude(self, node: str, query: str, reason: str, *, back: bool, since: int | None = None) -> None:
        """Go on without a node that failed at a query.

        Args:
            since: number of the first query that it has no part in; None is the next one.

        Raises:
            NodeFault: too few nodes are left.
        """
        left, reason = len(self.present) - (node not in self.excluded), clip(reason)
        since = self.number if since is None else since
        self.events.append({"node": node, "number": since, "event": "left out", "reason": reason})
        self.excluded[node] = ExcludedNode(since, reason, back)
        needed = self.link.min_nodes(len(self.nodes))
        if left < needed:
            raise NodeFault(
                node,
                query,
                f"{reason}; {left} of {len(self.nodes)} nodes are left, link.quorum wants {needed}",
            )

    def require(self, names: Sequence[str]) -> None:
        """Refuse at the start what some node would refuse later; or go on without it, as the quorum says.

        Raises:
            QueryRefused: naming all such nodes, with queries and rules.
        """
        refusals = [
            QueryRefused(node, name, rule)
            for name in names
            for node, rule in self.objections(self.queries[name]).items()
        ]
        total = sum(self.queries[name].times for name in names)
        for node, limit in self.limits().items():
            if total > limit and all(node != refusal.node for refusal in refusals):
                rule = f"max_queries: {limit}, and the run asks {total}"
                refusals.append(QueryRefused(node, ", ".join(names), rule))
        unwilling = {refusal.node: refusal for refusal in reversed(refusals)}  # by its first rule
        needed = self.link.min_nodes(len(self.nodes))
        if refusals and (needed == len(self.nodes) or len(self.present) - len(unwilling) < needed):
            raise refused_by(refusals)
        for node, refusal in unwilling.items():
            self.exclude(node, refusal.query, f"refused: {refusal.rule}", may_rejoin=False)

    def _chosen(self, of: Sequence[str] | None) -> tuple[str, ...]:
        if of is None or (self.link.secure_aggregation and tuple(of) == (SUM,)):
            return self.nodes
        known, wanted = set(self.nodes), set(of)
        unknown = [name for name in of if name not in known]
        if unknown or not of:
            raise ArgumentError("of", unknown or list(of), f"some of {', '.join(self.nodes)}")
        return tuple(name for name in self.nodes if name in wanted)

    def valid_responses(
        self, asked: tuple[str, ...], query: str, number: int, tensors: Tensors, differentiable: bool
    ) -> Mapping[str, Tensors]:
        """The sound answers to one query, by node, as the nodes gave them.

        Raises:
            DataError: what is sent is not finite, which is no node's fault.
        """
        declared = self.queries[query]
        require_finite_inputs(tensors, query)
        sent = SentQuery(query, number, self.link.compress(tensors, declared.sends), differentiable)
        there = tuple(name for name in asked if name not in self.excluded)
        if declared.sums:
            return {SUM: self._summed_answers(there, sent)}
        responses = self._refined(self._answer(there, sent), query, number)
        asked_about = [len(tensor) for name, tensor in tensors.items() if declared.sends[name] == INPUTS]
        rows = asked_about[0] if asked_about else None
        for node, fault in faults(responses, declared, self.link.outlier, rows, self.outputs).items():
            self.exclude(node, query, fault, may_rejoin=False, since_query=number)
            del responses[node]
        if not responses:
            raise NodeFault(", ".join(asked), query, "none of the nodes that were asked is left")
        return responses

    def valid_gradients(
        self, number: int, query: str, pulls: Mapping[str, Tensors], inputs: Tensors
    ) -> Mapping[str, Tensors]:
        """The nodes' sound gradients; a node that fails here adds nothing to the sum.

        Raises:
            DataError: what is to be pulled back is not finite, which is no node's fault.
        """
        if SUM in pulls:
            return {SUM: self._summed_gradients(number, query, pulls[SUM], inputs)}
        sent = {
            node: self.link.compress(pull, dict.fromkeys(pull, GRADIENTS))
            for node, pull in pulls.items()
            if node not in self.excluded
        }
        pulled = self._refined(self._pull_back(number, query, sent, None), query, None)
        ill = not_finite(pulled)
        if ill:
            require_finite(pulls, query)
        self._part(pulled, query, mismatched_gradients(pulled, inputs) | ill)
        self._part(pulled, query, oversized_gradients(pulled, pulls, self.link.outlier, query))
        return pulled

    def _part(self, pulled: dict[str, Tensors], query: str, found: Mapping[str, str]) -> None:
        for node, fault in found.items():
            self.exclude(node, query, fault, may_rejoin=False)
            del pulled[node]

    def _refined(self, given: Mapping[str, Tensors], query: str, since: int | None) -> dict[str, Tensors]:
        """What nodes gave, in float32; without those who gave nothing of which that could be made."""
        whole: dict[str, Tensors] = {}
        for node, tensors in given.items():
            try:
                wrong = invalid_dtype_fault(tensors)
                if wrong is not None:
                    raise DataError(wrong)
                whole[node] = decompress(tensors)
            except DataError as fault:
                self.exclude(node, query, str(fault), may_rejoin=False, since_query=since)
        return whole

    def objections(self, query: Query) -> Mapping[str, str]:
        """The rule by which each unwilling node would refuse a query, by the node's name."""
        rules = {node: self._rule(node, query) for node in self.present}
        return {node: rule for node, rule in rules.items() if rule is not None}

    def limits(self) -> Mapping[str, int]:
        """How many queries each node that has a limit answers at most, by the node's name."""
        most = {node: self._limit(node) for node in self.present}
        return {node: limit for node, limit in most.items() if limit is not None}

    @abstractmethod
    def _rule(self, node: str, query: Query) -> str | None:
        """By which a node would refuse a query."""

    @abstractmethod
    def _limit(self, node: str) -> int | None:
        """How many queries a node answers at most; None: no limit."""
