"""Request handler of a group of nodes: queries come in, responses are released through the gates.

A query goes through :meth:`~RequestHandler.admit_query`, :meth:`~RequestHandler.compute_responses` and
:func:`release_responses`. Gradients of its inputs are computed in
:mod:`fedstill.node.input_gradients`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence

import torch

from fedstill.core.compute import Compute
from fedstill.core.errors import QueryMismatch
from fedstill.node import input_gradients
from fedstill.node.admission import SIMULATION_RULES, TensorFacts, first_reason, json_size, refuse
from fedstill.node.architectures import stacking_key
from fedstill.node.audit_entries import ReceivedQuery
from fedstill.node.captured_functions import CapturedFunctions
from fedstill.node.exchanges import Exchange, RecentExchanges
from fedstill.node.gate import PreparedRelease, hand_over
from fedstill.node.input_gradients import OutputGradients
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup
from fedstill.node.received_tensors import ReceivedTensors
from fedstill.protocol.digests import chain_digest
from fedstill.protocol.node_side import NodeSide
from fedstill.protocol.queries import Query
from fedstill.protocol.wire_format import Tensors, WireConfig


class RequestHandler:
    """Responds to queries for a group of nodes, each node's part through its own gate.

    A repeated query with the same number gets the same response: no function runs, and nothing is counted.
    This holds too if a gate failed, for example on a full disk: computed tensors are kept until the next
    query, and a repeated query releases them.

    Args:
        group: the nodes.
        side: the method's part at the nodes.
        compute: device and precision.
        wire: number formats of messages; None is float32.
    """

    def __init__(
        self, group: NodeGroup, side: NodeSide, compute: Compute, wire: WireConfig | None = None
    ) -> None:
        self.group, self.side, self.compute, self.wire = group, side, compute, wire
        # Frozen parameters are part of the key: frozen and trained networks are never stacked.
        first_node = group.nodes[0]
        self.stacking_key = tuple(
            (stacking_key(module), first_node.frozen[role]) for role, module in first_node.modules.items()
        )
        self._exchanges = RecentExchanges()
        self._pending: Exchange | None = None  # admitted, not computed yet
        self._run_function = CapturedFunctions(group, side.setting, compute)

    def has_responded(self, number: int) -> bool:
        """Return whether the responses to a query are kept."""
        return number in self._exchanges

    def query_name(self, number: int) -> str:
        """Return the name of a recent query; QueryMismatch if it is no longer known."""
        if number not in self._exchanges:
            raise QueryMismatch(self.group.nodes[0].name, "unknown", number)
        return self._exchanges[number].query.name

    @property
    def trains_privately(self) -> bool:
        """True if networks here train privately; their training is charged while they compute."""
        return bool(self.group.nodes[0].dp_sgd_parameters)

    # --- responses ----------------------------------------------------------------------------------------

    def admit_query(self, received: ReceivedTensors, number: int, differentiable: bool) -> None:
        """Admit a query at all nodes, and charge private training for it.

        Raises:
            ArgumentError: other tensors than the query declares.
            QueryRefused: a gate's policy forbids it; then no node of the group has responded. Limits that
                depend on the response itself (bytes, rows, cost) are checked later, at the release.
            QueryMismatch: the number was used for another query or other content.
            NodeFault: an earlier query failed during private training, which may be incomplete and is not
                charged.
        """
        nodes, query = self.group.nodes, self.side.queries[received.query]
        for node in nodes:
            node.gate.ledger.require_complete_training(query.name)
        query.check_inputs(received.decompressed)
        for node in nodes:
            _require_declared_forms(node, query, received)
        exchange = self._exchanges.get(number)
        if exchange is not None:
            if exchange.content_hash != received.content_hash:
                raise QueryMismatch(nodes[0].name, query.name, number)
            return
        for node in nodes:
            node.gate.ledger.require_unused(query.name, number)
        sent = received.decompressed
        responses = [
            node.gate.admit(query, _make_received_query(node, query, number, received), sent)
            for node in nodes
        ]
        for node, response in zip(nodes, responses, strict=True):  # after all checks
            node.gate.ledger.charge_training(response, sent)
        self._pending = Exchange(query, number, received, responses, differentiable)

    def compute_responses(self, number: int) -> None:
        """Compute the responses to the admitted query, unless they exist already."""
        if number in self._exchanges:
            return
        exchange = self._pending
        if exchange is None or exchange.number != number:
            raise RuntimeError(f"query {number} was not admitted")
        try:
            if self.trains_privately and (exchange.query.trains or exchange.query.span is not None):
                self._train_and_compute(exchange)
            else:
                self._compute_outputs(exchange)
        except BaseException:
            # Networks may have changed: later responses must differ from those without this query.
            for node in self.group.nodes:
                event = f"{number} {exchange.content_hash} failed"
                node.history_hash = chain_digest(node.history_hash, event)
            raise
        finally:
            self._pending = None
            for node in self.group.nodes:
                node.remaining_private_steps = None
        self._exchanges.keep(exchange)
        for node, response in zip(self.group.nodes, exchange.responses, strict=True):
            node.gate.ledger.complete(response)
            node.history_hash = response.received.history_after(node.history_hash)

    def prepare_responses(self, number: int) -> Iterator[PreparedRelease]:
        """Yield the responses that were not released yet, from each node's gate.

        Raises:
            QueryMismatch: some responses are outstanding, and a later query was computed meanwhile.
        """
        exchange = self._exchanges[number]
        if exchange.is_graph_freed and not exchange.is_released:
            raise QueryMismatch(self.group.nodes[0].name, exchange.query.name, number)
        for row, (node, response) in enumerate(zip(self.group.nodes, exchange.responses, strict=True)):
            if not response.is_released:
                outputs = {key: output[row].detach() for key, output in exchange.outputs.items()}
                yield node.gate.prepare(response, outputs, exchange.received.decompressed, self.wire)

    def released_responses(self, number: int) -> Mapping[str, Tensors]:
        """Return the released responses to a query, by node."""
        exchange = self._exchanges[number]
        exchange.drop_received()
        responses = zip(self.group.nodes, exchange.responses, strict=True)
        return {node.name: response.tensors for node, response in responses}

    # --- input gradients ----------------------------------------------------------------------------------

    def compute_gradients(self, number: int, output_gradients: OutputGradients) -> None:
        """Compute the input gradients, unless they exist already.

        Raises:
            QueryMismatch: other gradients came for this query before, or the query is no longer known. Send
                gradients before the next query.
            QueryRefused: gradients that do not belong to the response.
        """
        exchange = self._exchanges.get(number)
        if exchange is None or not exchange.is_released:  # refused: no gradients either
            raise QueryMismatch(self.group.nodes[0].name, "unknown", number)
        input_gradients.compute_input_gradients(exchange, self.group.nodes, output_gradients)

    def prepare_gradients(self, number: int) -> Iterator[PreparedRelease]:
        """Yield the input gradients that were not released yet, from each node's gate."""
        exchange = self._exchanges[number]
        for row, node in enumerate(self.group.nodes):
            release = exchange.gradients.get(node.name)
            if release is not None and not release.is_released:
                gradients = {
                    f"d/d{key}": grad[row]
                    for key, grad in zip(exchange.query.differentiable, exchange.input_gradients, strict=True)
                }
                yield node.gate.prepare(release, gradients, {}, self.wire)

    def released_gradients(self, number: int) -> Mapping[str, Tensors]:
        """Return the released input gradients of a query, by node."""
        return {name: release.tensors for name, release in self._exchanges[number].gradients.items()}

    # --- computing ----------------------------------------------------------------------------------------

    def _train_and_compute(self, exchange: Exchange) -> None:
        """Compute a response that needs private training first, until an attempt gives a known result or the
        first one.
        """
        (node,), (response,) = self.group.nodes, exchange.responses  # such nodes form their own groups
        ledger, sent = node.gate.ledger, exchange.received.decompressed
        is_known = ledger.begin_training(response, sent)
        state_before = copy.deepcopy(node.state_dict()) if is_known else {}
        while True:
            failure = None
            try:
                self._compute_outputs(exchange)
            except Exception as error:
                if any(remaining for _, remaining in (node.remaining_private_steps or {}).values()):
                    raise  # incomplete: the repeated attempt reveals no less
                failure = error  # the failure depends on the training, too
            if ledger.end_training(response, node.dp_trained_state(), sent):
                break
            node.load_state_dict(state_before)
        if failure is not None:
            raise failure

    def _compute_outputs(self, exchange: Exchange) -> None:
        """Compute the inputs and outputs of a query's function, ``(G, ...)`` each."""
        query, number = exchange.query, exchange.number
        inputs = {}
        values = {}
        for key, value in exchange.received.decode().items():
            if not isinstance(value, torch.Tensor):
                values[key] = value
            elif value.ndim:
                differentiable = exchange.differentiable and key in query.differentiable
                inputs[key] = self._copy_tensor_per_node(value, differentiable)
            else:
                values[key] = value.item()
        first_node = self.group.nodes[0]
        compute = self.compute.as_float32 if query.needs_float32 else self.compute
        for node, response in zip(self.group.nodes, exchange.responses, strict=True):
            node.records_read = False
            context = f"{number} {exchange.content_hash} {response.attempt}"
            node.query_context_hash = chain_digest(node.history_hash, context)
            if node.dp_sgd_parameters and node.gate.budgets is not None:
                node.remaining_private_steps = node.gate.budgets.mechanism.charged_steps_by_role(
                    query, exchange.received.decompressed
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


def release_responses(handlers: Sequence[RequestHandler], number: int) -> dict[str, Tensors]:
    """Charge the nodes' responses to a query, all in one transaction, and return them by node."""
    hand_over([prepared for handler in handlers for prepared in handler.prepare_responses(number)])
    return {k: tensors for handler in handlers for k, tensors in handler.released_responses(number).items()}


def release_gradients(handlers: Sequence[RequestHandler], number: int) -> dict[str, Tensors]:
    """Charge the nodes' input gradients, all in one transaction, and return them by node."""
    hand_over([prepared for handler in handlers for prepared in handler.prepare_gradients(number)])
    return {k: tensors for handler in handlers for k, tensors in handler.released_gradients(number).items()}


def _require_declared_forms(node: Node, query: Query, received: ReceivedTensors) -> None:
    """Refuse too many rows, tensors of other forms than their payload kinds', and invalid JSON values."""
    refuse(node.name, query.name, json_size(node.gate.policy, query, received.decompressed))
    inputs, gate = node.data.inputs, node.gate
    facts = gate.policy, received, 0, gate.output_shape, inputs.shape[1:], inputs.dtype
    if (key := (id(gate.policy), *facts[3:])) not in received.refusals:
        received.refusals[key] = first_reason(SIMULATION_RULES, TensorFacts(*facts))
    refuse(node.name, query.name, received.refusals[key])
    if query.details.json_values:
        received.decode()  # DataError


def _make_received_query(node: Node, query: Query, number: int, received: ReceivedTensors) -> ReceivedQuery:
    budgets = node.gate.budgets
    if budgets is not None and "model" in node.dp_sgd_parameters and not node.history_hash:
        node.pretraining_hash = budgets.fingerprint("origin", node.model.state_dict())
        node.history_hash = node.pretraining_hash  # all responses depend on this
    history_hash = "" if query.details.constant else node.history_hash
    return ReceivedQuery(
        number, query.name, received.content_hash, history_hash, received.byte_counts, node.pretraining_hash
    )
