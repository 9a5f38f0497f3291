"""Base class of all federations: the server queries nodes and differentiates through their responses.

``responses = federation.query("predict_logits", x=x)`` returns the nodes' responses with gradients attached.
On ``loss.backward()`` the federation sends each node the gradient of the loss with respect to its response.
The node backpropagates it through its own networks, and the gradients that its gate releases are added to
``x.grad``. Subclasses (engines) define how nodes are reached. A method works on all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedstill.core.errors import ArgumentError, DataError, NodeFault, list_names
from fedstill.federation.autograd import DifferentiableQueryState, FederatedQuery, ResponseSource
from fedstill.federation.exclusions import ExcludedNode, Exclusions
from fedstill.federation.link_config import LinkConfig
from fedstill.federation.response_checks import (
    find_faults,
    invalid_dtype_fault,
    l2_norms,
    mismatched_gradient_faults,
    non_finite_faults,
    oversized_gradient_faults,
    require_finite_gradients,
    require_finite_inputs,
)
from fedstill.federation.responses import Responses
from fedstill.protocol.payload_kinds import GRADIENTS, INPUTS
from fedstill.protocol.queries import Query
from fedstill.protocol.wire_format import Tensors, decompress, json_from_tensor, json_to_tensor


@dataclass(frozen=True)
class SentQuery:
    """A query as it is sent to nodes.

    Args:
        query: its name.
        number: its number.
        tensors: inputs in wire format.
        differentiable: whether gradients will be requested.
        encoding: what the nodes' encoders need to know. The responses are then what these encoders return,
            and stay as they are; None: no encoder.
    """

    query: str
    number: int
    tensors: Tensors
    differentiable: bool
    encoding: Any = None


def send_query(
    source: ResponseSource, query: str, queried: tuple[str, ...], number: int, inputs: Mapping[str, Any]
) -> Responses:
    """Send a query and return its responses, stacked and with gradients attached.

    Args:
        source: where responses and gradients come from.
        query: name of the query.
        queried: names of the nodes to query.
        number: number of the query.
        inputs: as in :meth:`Federation.query`.
    """
    declared = source.queries[query]
    tensors: dict[str, torch.Tensor] = {
        name: json_to_tensor(value) if name in declared.details.json_values else value
        for name, value in inputs.items()
    }
    needs_grad = torch.is_grad_enabled() and any(
        tensor.requires_grad for name, tensor in tensors.items() if name in declared.differentiable
    )
    if not needs_grad:
        sent = {name: tensor.detach() for name, tensor in tensors.items()}
        responses = source.valid_responses(queried, query, number, sent, False)
        first = next(iter(responses.values()))
        stacked = [name for name in first if name not in declared.unstacked]
        return Responses(
            number,
            tuple(responses),
            {name: torch.stack([each[name] for each in responses.values()]) for name in stacked},
            {name: _unstacked_values(declared, name, responses) for name in declared.unstacked},
        )
    call = DifferentiableQueryState(source, queried, query, number, tuple(tensors))
    outputs = FederatedQuery.apply(call, *tensors.values())  # type: ignore[no-untyped-call]
    return Responses(number, call.responding_nodes, dict(zip(call.output_names, outputs, strict=True)))


def _unstacked_values(query: Query, name: str, responses: Mapping[str, Tensors]) -> tuple[Any, ...]:
    """Return an output that is not stacked, one entry per node."""
    read = json_from_tensor if name in query.details.json_values else torch.Tensor.detach
    return tuple(read(each[name]) for each in responses.values())


class Federation(ABC):
    """K nodes and a way to reach them.

    Args:
        nodes: their names, in order.
        queries: queries that the method declares, by name.
        link: wire formats, and rules for nodes that fail.

    Attributes:
        outputs: shape of the logits of one input, if the engine knows it.
        number: number of the next query. Saved in checkpoints.
        exclusions: nodes that the run continues without. Saved in checkpoints.
    """

    def __init__(
        self, nodes: Sequence[str], queries: Mapping[str, Query], link: LinkConfig | None = None
    ) -> None:
        self.nodes, self.queries = tuple(nodes), queries
        self.link = link or LinkConfig()
        self.outputs: tuple[int, ...] | None = None
        self.number = 0
        self.exclusions = Exclusions(self.nodes)

    # --- a query --------------------------------------------------------------------------------------------

    def query(
        self, query: str, *, nodes: Sequence[str] | None = None, number: int | None = None, **inputs: Any
    ) -> Responses:
        """Send a query to all nodes, or to some, and return their responses.

        A node that is unreachable or responds with invalid data is excluded from then on, as long as a
        quorum remains.

        Args:
            query: name of the query.
            nodes: names of the nodes to query; None is all. Excluded nodes are skipped.
            number: number of an earlier query, to repeat it; None takes the next one.
            inputs: tensors to send, and JSON values where the query declares them. If the query is
                differentiable and a tensor requires gradients, the responses do too.

        Returns:
            Stacked outputs ``(K, B, ...)``.

        Raises:
            ArgumentError: no such query or node.
            QueryRefused: a node's gate refuses it.
            QueryMismatch: the number was used with other content.
            NodeFault: a node failed and too few remain, or responses differ and it is unknown which is wrong.
        """
        return send_query(self, query, *self.prepare_query(query, nodes, number), inputs)

    def prepare_query(
        self, query: str, nodes: Sequence[str] | None, number: int | None
    ) -> tuple[tuple[str, ...], int]:
        """Return the nodes to query, and the number of a query; arguments as in :meth:`query`."""
        if query not in self.queries:
            raise ArgumentError("query", query, f"one of {', '.join(self.queries)}")
        queried = self._select_nodes(nodes)
        number = self.number if number is None else number
        self.number = max(self.number, number + 1)
        return queried, number

    def _select_nodes(self, names: Sequence[str] | None) -> tuple[str, ...]:
        if names is None:
            return self.nodes
        known, selected = set(self.nodes), set(names)
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise ArgumentError("nodes", unknown or list(names), f"some of {list_names(self.nodes)}")
        return tuple(name for name in self.nodes if name in selected)

    def valid_responses(
        self, queried: tuple[str, ...], query: str, number: int, tensors: Tensors, differentiable: bool
    ) -> Mapping[str, Tensors]:
        """Send one query and return the valid responses by node; exclude nodes with invalid ones.

        Raises:
            DataError: the inputs are not finite, which is no node's fault.
            NodeFault: none of the queried nodes remains.
        """
        declared = self.queries[query]
        require_finite_inputs(tensors, query)
        sent = SentQuery(query, number, self.link.compress(tensors, declared.sends), differentiable)
        present = tuple(name for name in queried if name not in self.excluded)
        responses = self._to_float32(self.collect_responses(present, sent), query, number)
        input_counts = [len(tensor) for name, tensor in tensors.items() if declared.sends[name] == INPUTS]
        rows = input_counts[0] if input_counts else None
        for node, fault in find_faults(responses, declared, self.link.outlier, rows, self.outputs).items():
            self.exclude(node, query, fault, may_rejoin=False, since_query=number)
            del responses[node]
        if not responses:
            raise NodeFault(list_names(queried), query, "none of the queried nodes is left")
        return responses

    def _to_float32(
        self, received: Mapping[str, Tensors], query: str, since_query: int | None
    ) -> dict[str, Tensors]:
        """Convert tensors from nodes to float32; exclude nodes whose tensors cannot be converted."""
        converted: dict[str, Tensors] = {}
        for node, tensors in received.items():
            try:
                dtype_fault = invalid_dtype_fault(tensors)
                if dtype_fault is not None:
                    raise DataError(dtype_fault)
                converted[node] = decompress(tensors)
            except DataError as fault:
                self.exclude(node, query, str(fault), may_rejoin=False, since_query=since_query)
        return converted

    def valid_gradients(
        self, number: int, query: str, output_gradients: Mapping[str, Tensors], inputs: Tensors
    ) -> Mapping[str, Tensors]:
        """Backpropagate at the nodes and return their valid gradients; a node that fails adds nothing.

        Args:
            output_gradients: by node, gradients of the loss with respect to its outputs.
            inputs: differentiable inputs of the query.

        Raises:
            DataError: these gradients are not finite, which is no node's fault.
        """
        sent = {
            node: self.link.compress(node_gradients, dict.fromkeys(node_gradients, GRADIENTS))
            for node, node_gradients in output_gradients.items()
            if node not in self.excluded
        }
        gradients = self._to_float32(self.collect_gradients(number, query, sent), query, None)
        norms = l2_norms(gradients)
        non_finite = non_finite_faults(gradients, norms)
        if non_finite:
            require_finite_gradients(output_gradients, query)
        self._drop_faulty(gradients, query, mismatched_gradient_faults(gradients, inputs) | non_finite)
        oversized = oversized_gradient_faults(gradients, output_gradients, norms, self.link.outlier, query)
        self._drop_faulty(gradients, query, oversized)
        return gradients

    def _drop_faulty(self, gradients: dict[str, Tensors], query: str, faults: Mapping[str, str]) -> None:
        for node, fault in faults.items():
            self.exclude(node, query, fault, may_rejoin=False)
            del gradients[node]

    # --- nodes that take part -------------------------------------------------------------------------------

    @property
    def excluded(self) -> dict[str, ExcludedNode]:
        """Nodes that the run continues without, by name."""
        return self.exclusions.excluded

    @property
    def present(self) -> tuple[str, ...]:
        """Names of the nodes that take part, without excluded ones."""
        return self.exclusions.present

    @property
    def sources(self) -> tuple[str, ...]:
        """Names under which responses arrive: the nodes, including excluded ones, which may return."""
        return self.nodes

    @property
    def present_sources(self) -> tuple[str, ...]:
        """Names under which responses to the next query arrive."""
        return self.present

    def exclude(
        self, node: str, query: str, reason: str, *, may_rejoin: bool, since_query: int | None = None
    ) -> None:
        """Exclude a node that failed at a query; see :meth:`Exclusions.exclude`.

        Args:
            since_query: number of the first query without it; None is the next one.
        """
        since = self.number if since_query is None else since_query
        min_nodes = self.link.min_nodes(len(self.nodes))
        self.exclusions.exclude(node, query, reason, since, min_nodes, may_rejoin=may_rejoin)

    def exclude_refusing_nodes(self, query_names: Sequence[str]) -> None:
        """Check before training that nodes allow these queries; exclude nodes that do not, if a quorum
        remains.

        Raises:
            QueryRefused: too few nodes allow them. Names all of these nodes, with queries and rules.
        """
        queries = [self.queries[name] for name in query_names]
        objections = {query.name: self.objections(query) for query in queries}
        limits, min_nodes = self.query_limits(), self.link.min_nodes(len(self.nodes))
        self.exclusions.exclude_refusing(queries, objections, limits, self.number, min_nodes)

    def objections(self, query: Query) -> Mapping[str, str]:
        """Return the policy rule by which each unwilling node would refuse a query, by the node's name."""
        rules = {node: self._refusal_rule(node, query) for node in self.present}
        return {node: rule for node, rule in rules.items() if rule is not None}

    def query_limits(self) -> Mapping[str, int]:
        """Return the largest number of queries of each node that has a limit, by the node's name."""
        limits = {node: self._query_limit(node) for node in self.present}
        return {node: limit for node, limit in limits.items() if limit is not None}

    # --- state and evaluation -------------------------------------------------------------------------------

    def expect_outputs(self, shape: tuple[int, ...]) -> None:
        """Set the shape of the logits of one input, by which responses are checked."""
        self.outputs = shape

    def restart_numbers(self) -> None:
        """Number the next query 0, to repeat all queries."""
        self.number = 0

    def as_responses(self, nodes: Sequence[str], outputs: Tensors) -> Responses:
        """Return outputs ``(K, ...)`` of some nodes as the server would receive them; nothing is sent."""
        return Responses(-1, tuple(nodes), outputs)

    def state_dict(self) -> dict[str, Any]:
        """Return the part of the server's checkpoint that belongs to the federation."""
        return {"number": self.number, **self.exclusions.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state returned by :meth:`state_dict`."""
        self.number = state["number"]
        self.exclusions.load_state_dict(state)

    # --- implemented by engines -----------------------------------------------------------------------------

    @abstractmethod
    def collect_responses(self, queried: tuple[str, ...], sent: SentQuery) -> Mapping[str, Tensors]:
        """Return the response of each queried node by name and in order.

        Nodes that are excluded meanwhile have no entry.
        """

    @abstractmethod
    def collect_gradients(
        self, number: int, query: str, output_gradients: Mapping[str, Tensors], encoding: Any = None
    ) -> Mapping[str, Tensors]:
        """Return each node's gradients with respect to the query's inputs, by name and in order.

        Args:
            output_gradients: by node, gradients of the loss with respect to its outputs.
            encoding: as in :class:`SentQuery`.
        """

    def to_device(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Move tensors to the server's device."""
        return dict(tensors)

    @abstractmethod
    def _refusal_rule(self, node: str, query: Query) -> str | None:
        """Return the policy rule by which a node would refuse a query, or None."""

    @abstractmethod
    def _query_limit(self, node: str) -> int | None:
        """Return the largest number of queries of a node; None is no limit."""
