"""Request handler of a group of nodes: queries come in, responses are released through the gates.

Recent queries and responses are kept for a server that repeats a query because a reply was lost. Gradients
of a query's inputs are computed from the server's gradients of the outputs.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedstill.core.compute import Compute
from fedstill.core.errors import NodeFault, QueryMismatch
from fedstill.node.admission import json_size, refuse
from fedstill.node.architectures import stacking_key
from fedstill.node.audit_entries import GRADIENT, RESPONSE, ReceivedQuery
from fedstill.node.captured_functions import CapturedFunctions
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup
from fedstill.node.run_budgets import RunBudgets
from fedstill.node.stacked_modules import stack_tensors
from fedstill.protocol.digests import chain_digest, digest
from fedstill.protocol.node_side import NodeSide
from fedstill.protocol.payload_kinds import GRADIENTS
from fedstill.protocol.queries import Query
from fedstill.protocol.tensor_forms import sent_query_fault
from fedstill.protocol.wire_format import Tensors, WireConfig, bytes_by_kind, decompress, tensor_bytes


class RequestHandler:
    """Responds to queries for a group of nodes, each node's part through its own gate.

    A repeated query with the same number gets the same response: no function runs, and nothing is counted.
    This holds too if a gate failed half-way, for example on a full disk: computed tensors are kept until
    the next query, and a repeated query releases the rest.

    Args:
        group: the nodes.
        side: the method's part at the nodes.
        compute: device and precision.
        last_numbers: number of the last query of each node, by name; shared by all handlers of a node, so
            that no number is used twice.
        wire: number formats of messages; None is float32.
    """

    def __init__(
        self,
        group: NodeGroup,
        side: NodeSide,
        compute: Compute,
        last_numbers: dict[str, int] | None = None,
        wire: WireConfig | None = None,
    ) -> None:
        self.group, self.side, self.compute = group, side, compute
        # Frozen parameters are part of the key: frozen and trained networks are never stacked.
        first_node = group.nodes[0]
        self.stacking_key = tuple(
            (stacking_key(module), first_node.frozen[role]) for role, module in first_node.modules.items()
        )
        self.wire = wire or WireConfig()
        self._last_numbers = {node.name: -1 for node in group.nodes} if last_numbers is None else last_numbers
        self._exchanges = RecentExchanges()
        self._pending: Exchange | None = None
        self._run_function = CapturedFunctions(group, side.setting, compute)
        self._failed_query = ""  # query at which private training may have stopped half-way

    def require_complete_training(self, operation: str) -> None:
        """Refuse to continue from networks that may have been trained half-way.

        Nor may such a state be saved: training for the failed query is charged once, and would be repeated
        on top of it.

        Raises:
            NodeFault: an earlier query failed during private training.
        """
        if self._failed_query:
            reason = f"it failed at query {self._failed_query}: resume the run from an earlier checkpoint"
            raise NodeFault(self.group.nodes[0].name, operation, reason)

    def has_responded(self, number: int) -> bool:
        """Return whether the responses to a query are kept."""
        return number in self._exchanges

    @property
    def trains_privately(self) -> bool:
        """True if networks here train privately; their training is charged while they compute."""
        return bool(self.group.nodes[0].dp_sgd_parameters)

    def respond(
        self,
        name: str,
        number: int,
        tensors: Tensors,
        differentiable: bool,
    ) -> Sequence[Tensors]:
        """Return each node's response, in the group's order.

        Calls :meth:`admit_query`, :meth:`compute_responses` and :meth:`release_responses`.

        Args:
            name: name of the query.
            number: the server's number of the query; it rises from query to query.
            tensors: tensors that came with the query.
            differentiable: keep the graph for :meth:`backward`.
        """
        self.admit_query(name, number, tensors, differentiable)
        self.compute_responses(number)
        return self.release_responses(number)

    def admit_query(
        self,
        name: str,
        number: int,
        tensors: Tensors,
        differentiable: bool,
        content_hash: str | None = None,
    ) -> None:
        """Receive a query and admit it.

        Args:
            content_hash: digest of the query, if already computed.

        Raises:
            ArgumentError: other tensors than the query declares.
            QueryRefused: a gate's policy forbids it; then no node of the group has responded. Limits that
                depend on the response itself (bytes, rows, cost) are checked later, at the release.
            QueryMismatch: the number was used for another query or other content.
            NodeFault: an earlier query failed during private training, which may be incomplete and is not
                charged.
        """
        self.require_complete_training(name)
        wire_tensors, tensors = tensors, decompress(tensors)
        query = self.side.queries[name]
        query.check_inputs(tensors)
        self._require_sent_forms(query, tensors)
        content_hash = digest(name, wire_tensors) if content_hash is None else content_hash
        exchange = self._exchanges.get(number)
        if exchange is not None:
            if exchange.content_hash != content_hash:
                raise QueryMismatch(self.group.nodes[0].name, name, number)
            exchange.tensors = tensors
            return
        if any(number <= self._last_numbers[node.name] for node in self.group.nodes):
            raise QueryMismatch(self.group.nodes[0].name, name, number)
        for node in self.group.nodes:
            refuse(node.name, name, json_size(node.gate.policy, query, tensors))
        query.decode_inputs(tensors)  # invalid JSON values, before anything is charged
        received_bytes = bytes_by_kind(wire_tensors, query.sends)
        received = [
            _make_received_query(node, query, number, content_hash, received_bytes)
            for node in self.group.nodes
        ]
        for node, received_query in zip(self.group.nodes, received, strict=True):
            node.gate.admit(received_query, query, tensors)
        for node, received_query in zip(self.group.nodes, received, strict=True):  # after all checks
            node.gate.charge_training(received_query, query, tensors)
        self._pending = Exchange(
            query,
            content_hash,
            received,
            tensors,
            differentiable,
        )

    def _require_sent_forms(self, query: Query, tensors: Tensors) -> None:
        """Refuse tensors of another dtype or shape than their payload kinds', before anything is charged."""
        for node in self.group.nodes:
            inputs, outputs = node.data.inputs, node.gate.output_shape
            fault = sent_query_fault(query, tensors, inputs.shape[1:], outputs, inputs.dtype)
            refuse(node.name, query.name, None if fault is None else f"tensors: {fault}")

    def compute_responses(self, number: int) -> None:
        """Compute the responses to the received query, unless they exist already."""
        if number in self._exchanges:
            return
        exchange, node = self._pending, self.group.nodes[0]
        assert exchange is not None
        budgets = node.gate.budgets if self.trains_privately else None
        try:
            if budgets is not None and (exchange.query.trains or exchange.query.span is not None):
                self._compute_with_private_training(budgets, exchange)
            else:
                self._compute_outputs(exchange)
        except (
            BaseException
        ):  # networks may have changed: later responses must differ from those without this query
            for member in self.group.nodes:
                event = f"{number} {exchange.content_hash} failed"
                member.history_hash = chain_digest(member.history_hash, event)
            raise
        finally:
            for member in self.group.nodes:
                member.remaining_private_steps = None
        self._store_exchange(number, exchange)

    def release_responses(self, number: int) -> Sequence[Tensors]:
        """Return each node's response, in the group's order, through its gate.

        Raises:
            QueryMismatch: some responses are outstanding, and a later query was computed meanwhile.
        """
        exchange = self._exchanges[number]
        if exchange.is_graph_freed and len(exchange.releases) < len(self.group.nodes):
            raise QueryMismatch(self.group.nodes[0].name, exchange.query.name, number)
        for row, node in list(enumerate(self.group.nodes))[len(exchange.releases) :]:
            outputs = {key: output[row].detach() for key, output in exchange.outputs.items()}
            received = exchange.received[row]
            exchange.releases.append(
                node.gate.release(received, RESPONSE, outputs, exchange.query, exchange.tensors, self.wire)
            )
        exchange.tensors = {}
        return exchange.releases

    def backward(self, number: int, output_gradients: Mapping[str, Tensors]) -> Mapping[str, Tensors]:
        """Compute and release input gradients from gradients of the outputs.

        Calls :meth:`compute_gradients` and :meth:`release_gradients`.

        Args:
            number: number of the query.
            output_gradients: gradients of the loss with respect to the response, by node and name.

        Returns:
            Input gradients by node and by ``d/dNAME`` of the query's inputs, ``(B, ...)``. Nodes without
                output gradients release nothing.
        """
        self.compute_gradients(number, output_gradients)
        return self.release_gradients(number, output_gradients)

    def compute_gradients(
        self,
        number: int,
        output_gradients: Mapping[str, Tensors],
        content_hashes: Mapping[str, str] | None = None,
    ) -> None:
        """Compute the input gradients, unless they exist already.

        Args:
            content_hashes: digests of the output gradients by node, if already computed.

        Raises:
            QueryMismatch: other gradients came for this query before, or the query is no longer known. Send
                gradients before the next query.
            QueryRefused: gradients that do not belong to the response.
        """
        first_name = self.group.nodes[0].name
        exchange = self._exchanges.get(number)
        if exchange is None or len(exchange.releases) < len(self.group.nodes):  # refused: no gradients either
            raise QueryMismatch(first_name, "unknown", number)
        name = exchange.query.name
        queries = {node.name: query for node, query in zip(self.group.nodes, exchange.received, strict=True)}
        received = {
            node: replace(
                queries[node],
                content_hash=digest(name, gradients) if content_hashes is None else content_hashes[node],
                history_hash=queries[node].next_history_hash,
                received_bytes=bytes_by_kind(gradients, dict.fromkeys(decompress(gradients), GRADIENTS)),
            )
            for node, gradients in output_gradients.items()
        }
        if exchange.input_gradients:
            if received != exchange.received_gradients:
                raise QueryMismatch(first_name, name, number)
            return
        if not exchange.outputs:  # the next query has freed the graph
            raise QueryMismatch(first_name, name, number)
        for node, gradients in output_gradients.items():
            check_output_gradients(exchange, node, gradients)
        exchange.input_gradients = compute_input_gradients(exchange, self.group.nodes, output_gradients)
        if not exchange.input_gradients:  # no graph, or the outputs do not depend on the inputs
            raise QueryMismatch(first_name, name, number)
        exchange.received_gradients = received
        exchange.inputs, exchange.outputs = {}, {}  # free the graph

    def release_gradients(
        self, number: int, output_gradients: Mapping[str, Tensors]
    ) -> Mapping[str, Tensors]:
        """Return the input gradients of the nodes with output gradients, through their gates."""
        exchange = self._exchanges[number]
        input_names = exchange.query.differentiable
        for row, node in enumerate(self.group.nodes):
            if node.name in output_gradients and node.name not in exchange.released_gradients:
                gradients = {
                    f"d/d{key}": grad[row]
                    for key, grad in zip(input_names, exchange.input_gradients, strict=True)
                }
                received = exchange.received_gradients[node.name]
                exchange.released_gradients[node.name] = node.gate.release(
                    received, GRADIENT, gradients, exchange.query, {}, self.wire
                )
        return {node: exchange.released_gradients[node] for node in output_gradients}

    def _compute_with_private_training(self, budgets: RunBudgets, exchange: Exchange) -> None:
        """Compute a response that needs private training first, which is charged.

        Training that was interrupted is repeated with the same random numbers, and costs nothing if the
        result is equal to the last bit. If it differs (other threads, another machine), no random number
        may be used twice: it is another attempt, with other records and other noise, and charged as such.
        """
        (node,), (received,) = (
            self.group.nodes,
            exchange.received,
        )  # nodes with private training form their own groups
        attempt, is_known = budgets.last_attempt(received, exchange.query, exchange.tensors)
        state_before = copy.deepcopy(node.state_dict()) if is_known else {}
        self._failed_query = f"{received.number} ({exchange.query.name})"
        while True:
            failure = None
            try:
                self._compute_outputs(exchange, attempt)
            except Exception as error:
                if any(remaining for _, remaining in (node.remaining_private_steps or {}).values()):
                    raise  # incomplete: the repeated attempt reveals no less
                failure = error  # the failure depends on the training, too
            received = replace(
                received, training_hash=budgets.fingerprint("learned", node.dp_trained_state())
            )
            if budgets.is_reproduced(received, exchange.query, attempt):
                break
            node.load_state_dict(state_before)
            attempt += 1
            budgets.charge_training(received, exchange.query, exchange.tensors, attempt)
        if failure is not None:
            raise failure
        self._failed_query = ""
        exchange.received = [received]

    def _compute_outputs(self, exchange: Exchange, attempt: int = 0) -> None:
        """Compute the inputs and outputs of a query's function, ``(G, ...)`` each."""
        query, number = exchange.query, exchange.received[0].number
        values_by_name = query.decode_inputs(exchange.tensors)
        inputs = {
            key: self._copy_tensor_per_node(tensor, exchange.differentiable and key in query.differentiable)
            for key, tensor in values_by_name.items()
            if isinstance(tensor, torch.Tensor) and tensor.ndim
        }
        scalars = {key: values_by_name[key] for key in values_by_name if key not in inputs}
        values = {
            key: value.item() if isinstance(value, torch.Tensor) else value for key, value in scalars.items()
        }
        first_node = self.group.nodes[0]
        compute = self.compute.as_float32 if query.needs_float32 else self.compute
        for node in self.group.nodes:
            node.records_read = False
            node.query_context_hash = chain_digest(
                node.history_hash, f"{number} {exchange.content_hash} {attempt}"
            )
            if node.dp_sgd_parameters and node.gate.budgets is not None:
                node.remaining_private_steps = node.gate.budgets.mechanism.charged_steps_by_role(
                    query, exchange.tensors
                )
        with (
            compute.step(first_node.seed, first_node.name, "query", number),
            torch.set_grad_enabled(exchange.differentiable),
        ):
            self.group.module("model").train(False)  # evaluation mode
            exchange.inputs = inputs
            exchange.outputs = self._run_function(query, number, inputs, values)

    def _copy_tensor_per_node(self, tensor: torch.Tensor, differentiable: bool) -> torch.Tensor:
        """Return one copy per node, ``(B, ...)`` to ``(G, B, ...)``, so that each node has its own
        gradient.
        """
        copies = tensor.detach().unsqueeze(0).expand(len(self.group), *tensor.shape)
        return copies.requires_grad_() if differentiable else copies

    def _store_exchange(self, number: int, exchange: Exchange) -> None:
        self._exchanges.keep(number, exchange)
        for node, received in zip(self.group.nodes, exchange.received, strict=True):
            self._last_numbers[node.name] = number
            node.history_hash = replace(received, history_hash=node.history_hash).next_history_hash


def _make_received_query(
    node: Node, query: Query, number: int, content_hash: str, received_bytes: Mapping[str, int]
) -> ReceivedQuery:
    budgets = node.gate.budgets
    if budgets is not None and "model" in node.dp_sgd_parameters and not node.history_hash:
        node.pretraining_hash = budgets.fingerprint("origin", node.model.state_dict())
        node.history_hash = node.pretraining_hash  # all responses depend on this
    history_hash = "" if query.details.constant else node.history_hash
    return ReceivedQuery(
        number, query.name, content_hash, history_hash, received_bytes, node.pretraining_hash
    )


MAX_EXCHANGES = 4
MAX_BYTES = 2**26  # fewer if they are large, but at least one


# --- recent queries and responses -------------------------------------------------------------------


@dataclass
class Exchange:
    """One query and its response, from arrival until it is dropped.

    Attributes:
        query: the declaration.
        content_hash: digest of the query.
        received: the query as received, one per node in the group's order.
        tensors: tensors that came with it, until all responses are released.
        differentiable: whether the graph is kept.
        inputs: ``(G, ...)``, leaves of the graph.
        outputs: ``(G, ...)``, with the graph until the next query; lists if they cannot be stacked.
        releases: released tensors, one per node in the group's order.
        received_gradients: output gradients as received, by node.
        input_gradients: ``(G, ...)``, one per differentiable input.
        released_gradients: released input gradients, by node.
        is_graph_freed: whether graph and outstanding responses were dropped.
    """

    query: Query
    content_hash: str
    received: list[ReceivedQuery]
    tensors: Tensors
    differentiable: bool
    inputs: Tensors = field(default_factory=dict)
    outputs: Mapping[str, Any] = field(default_factory=dict)
    releases: list[Tensors] = field(default_factory=list)
    received_gradients: dict[str, ReceivedQuery] = field(default_factory=dict)
    input_gradients: list[torch.Tensor] = field(default_factory=list)
    released_gradients: dict[str, Tensors] = field(default_factory=dict)
    is_graph_freed: bool = False


class RecentExchanges(OrderedDict[int, Exchange]):
    """The last exchanges, by query number."""

    def keep(self, number: int, exchange: Exchange) -> None:
        """Add an exchange; free the graphs of earlier ones and drop the oldest."""
        for older in self.values():
            older.inputs, older.outputs, older.is_graph_freed = {}, {}, True
        self[number] = exchange
        while len(self) > (MAX_EXCHANGES if self._bytes() <= MAX_BYTES else 1):
            self.popitem(last=False)

    def _bytes(self) -> int:
        releases = [release for exchange in self.values() for release in exchange.releases]
        return sum(tensor_bytes(tensor) for release in releases for tensor in release.values())


# --- input gradients --------------------------------------------------------------------------------


def check_output_gradients(exchange: Exchange, node: str, gradients: Tensors) -> None:
    """Refuse output gradients that do not belong to a response, before anything is computed with them.

    Only facts that the server knows are used: names and shapes of the released tensors. Whether the numbers
    are finite is checked on arrival (:meth:`~fedstill.node.gate.Gate.check_tensors`).

    Args:
        exchange: the query, with outputs and their graph.
        node: name of the node.
        gradients: output gradients of this node, as they were sent.

    Raises:
        QueryRefused: names that were not released, dtypes other than float32, other shapes, or a query
            without differentiable inputs.
    """
    decompressed, rule = decompress(gradients), None
    outputs = {name: part for name, part in exchange.outputs.items() if isinstance(part, torch.Tensor)}
    if not exchange.query.differentiable:
        rule = "gradients: the response has no differentiable inputs"
    elif not decompressed or not decompressed.keys() <= outputs.keys():
        rule = f"gradients: expected some of {sorted(outputs)}, got {sorted(decompressed)}"
    else:
        for name, tensor in decompressed.items():
            shape = tuple(outputs[name].shape[1:])  # without the node axis
            if tensor.dtype != torch.float32 or tuple(tensor.shape) != shape:
                received = f"{tensor.dtype} {tuple(tensor.shape)}"
                rule = f"gradients: {name} is {received} (expected torch.float32 {shape})"
    refuse(node, exchange.query.name, rule)


def compute_input_gradients(
    exchange: Exchange, nodes: Sequence[Node], output_gradients: Mapping[str, Tensors]
) -> list[torch.Tensor]:
    """Compute the gradients of a query's inputs, ``(G, ...)`` each, zero for nodes without output
    gradients.

    Args:
        exchange: the query, its inputs, and outputs with their graph.
        nodes: the nodes of the group.
        output_gradients: output gradients, by node and name.

    Returns:
        One tensor per differentiable input; an empty list if no output with a gradient depends on them.
    """
    weighted = {
        node.name: _decode(node, exchange, gradients)
        for node in nodes
        if (gradients := output_gradients.get(node.name))
    }
    sample = next(iter(weighted.values()), {})
    # Outputs that do not depend on the inputs (a mean over the node's examples) have no gradient.
    outputs = {key: output for key, output in exchange.outputs.items() if isinstance(output, torch.Tensor)}
    names = [key for key, output in outputs.items() if output.requires_grad and key in sample]
    if not names:
        return []
    zeros = {key: torch.zeros_like(sample[key]) for key in names}
    per_node = [weighted.get(node.name, zeros) for node in nodes]
    grads = torch.autograd.grad(
        [exchange.outputs[key] for key in names],
        [exchange.inputs[key] for key in exchange.query.differentiable],
        [stack_tensors([gradients[key] for gradients in per_node]) for key in names],
    )
    return list(grads)


def _decode(node: Node, exchange: Exchange, gradients: Tensors) -> Tensors:
    encoder = node.gate.encoder
    return decompress(gradients) if encoder is None else encoder.weight_gradients(exchange.query, gradients)
