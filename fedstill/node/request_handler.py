"""The request handler of a group of nodes: a query comes in, answers go out through the gates."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from fedstill.core.compute import Compute
from fedstill.core.errors import NodeFault, QueryMismatch
from fedstill.node.audit_entries import GRADIENT, RESPONSE, ReceivedQuery
from fedstill.node.exchanges import Exchange, RecentExchanges
from fedstill.node.input_gradients import check_output_gradients, compute_input_gradients
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup, stacking_key
from fedstill.node.query_handlers import QueryHandlers
from fedstill.node.run_budgets import RunBudgets
from fedstill.node.sum_contribution import SumContribution
from fedstill.protocol.digests import chain_digest, digest
from fedstill.protocol.payload_kinds import GRADIENTS
from fedstill.protocol.queries import NodeSide, Query
from fedstill.protocol.secure_aggregation import SumRequest
from fedstill.protocol.wire_format import Tensors, WireConfig, bytes_by_kind, decompress


class RequestHandler:
    """Answers queries for a group of nodes, each node's part through its own gate.

    Asking again under the same number gives the same answer: no handler runs, nothing is counted. That
    holds too when a gate failed half-way, say on a full disk: what was computed is kept until the next
    query, and asking again releases what is outstanding.

    Args:
        last: the last number that each node has served, by name; shared by all that may serve a node, so
            that it takes none twice.
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
        # What is frozen learns nothing and draws nothing, so that no network that learns is like it.
        first = group.nodes[0]
        self.stacking_key = tuple(
            (stacking_key(module), first.frozen[role]) for role, module in first.modules.items()
        )
        self.wire = wire or WireConfig()
        self._last_numbers = {node.name: -1 for node in group.nodes} if last_numbers is None else last_numbers
        self._exchanges = RecentExchanges()
        self._pending: Exchange | None = None
        self._call_handler = QueryHandlers(group, compute)
        self._failed_query = ""  # the query at which a network may have learned half of what it should

    def require_complete_training(self, operation: str) -> None:
        """Refuse to go on from networks that may have learned half of what they should.

        Nor may such a state be kept: learning for the failed query is paid for once, and would be learned
        once more on top of it.

        Raises:
            NodeFault: an earlier query failed while a network learned privately for it.
        """
        if self._failed_query:
            reason = f"it failed at query {self._failed_query}: the run goes on from an earlier mark"
            raise NodeFault(self.group.nodes[0].name, operation, reason)

    @property
    def trains_privately(self) -> bool:
        """Whether networks here learn privately, which is charged while they compute."""
        return bool(self.group.nodes[0].private_steps)

    def respond(
        self,
        name: str,
        number: int,
        tensors: Tensors,
        differentiable: bool,
        request: SumRequest | None = None,
    ) -> Sequence[Tensors]:
        """Each node's answer, in the group's order.

        That is :meth:`receive`, :meth:`compute_answers` and :meth:`release_answers`.

        Args:
            number: that the server gave it, rising from query to query.
            differentiable: keep what :meth:`pull_back` needs.
            request: of which nodes a sum is made, where the query is summed.
        """
        self.receive(name, number, tensors, differentiable, request)
        self.compute_responses(number)
        return self.release_responses(number)

    def receive(
        self,
        name: str,
        number: int,
        tensors: Tensors,
        differentiable: bool,
        request: SumRequest | None = None,
        content_hash: str | None = None,
    ) -> None:
        """Take a query, if it may be answered.

        Args:
            content_hash: its fingerprint, where that was taken already.

        Raises:
            ArgumentError: other tensors than the query declares.
            QueryRefused: a gate's policy forbids it; then no node of the group has answered. What follows
                from an answer itself may strike later, at its release: its bytes and rows, or its price.
            QueryMismatch: the number was used for another query or other content.
            NodeFault: an earlier query failed while a network learned privately for it, perhaps half of
                what it should, and that is not paid for.
        """
        self.require_complete_training(name)
        wire_tensors, tensors = tensors, decompress(tensors)
        query = self.side.queries[name]
        query.check_inputs(tensors)
        content_hash = digest(name, wire_tensors) if content_hash is None else content_hash
        exchange = self._exchanges.get(number)
        if exchange is not None:
            if exchange.content_hash != content_hash or exchange.sum_request != request:
                raise QueryMismatch(self.group.nodes[0].name, name, number)
            exchange.tensors = tensors
            return
        if any(number <= self._last_numbers[node.name] for node in self.group.nodes):
            raise QueryMismatch(self.group.nodes[0].name, name, number)
        for node in self.group.nodes:
            node.gate.read_values(query, tensors)
        received_bytes = bytes_by_kind(wire_tensors, query.sends)
        received = [_receive(node, query, number, content_hash, received_bytes) for node in self.group.nodes]
        for node, received_query in zip(self.group.nodes, received, strict=True):
            node.gate.admit(received_query, query, tensors)
        history_hash = self._hash_history(name, number, wire_tensors, differentiable, request)
        request = self._admit_sum(query, request)
        for node, received_query in zip(
            self.group.nodes, received, strict=True
        ):  # when no more refusal can come
            node.gate.charge_training(received_query, query, tensors)
        self._pending = Exchange(
            query,
            content_hash,
            received,
            tensors,
            differentiable,
            query_history_hash=history_hash,
            sum_request=request,
        )

    def compute_responses(self, number: int) -> None:
        """Compute the answers to what was received, unless they are there already."""
        if number in self._exchanges:
            return
        exchange, node = self._pending, self.group.nodes[0]
        assert exchange is not None  # received before
        budgets = node.gate.budgets if self.trains_privately else None
        try:
            if budgets is not None and (exchange.query.trains or exchange.query.span is not None):
                self._compute_with_private_training(budgets, exchange)
            else:
                self._compute_outputs(exchange)
        except BaseException:  # it may have changed networks: no later answer passes for one without it
            event = f"{number} {exchange.content_hash}{exchange.query_history_hash} failed"  # of which masks know more than its content
            for member in self.group.nodes:
                member.history_hash, member.query_history_hash = (
                    chain_digest(member.history_hash, event),
                    chain_digest(member.query_history_hash, event),
                )
            raise
        finally:
            for member in self.group.nodes:
                member.remaining_private_steps = None
        self._store_exchange(number, exchange)

    def release_responses(self, number: int) -> Sequence[Tensors]:
        """Each node's answer, in the group's order, through its gate.

        Raises:
            QueryMismatch: some are outstanding, and a later query has been answered meanwhile.
        """
        exchange = self._exchanges[number]
        if exchange.is_graph_freed and len(exchange.releases) < len(self.group.nodes):
            raise QueryMismatch(self.group.nodes[0].name, exchange.query.name, number)
        for row, node in list(enumerate(self.group.nodes))[len(exchange.releases) :]:
            outputs = {key: output[row].detach() for key, output in exchange.outputs.items()}
            query_and_inputs, contribution = (
                (exchange.query, exchange.tensors),
                self._sum_contribution(node, exchange.sum_request, exchange),
            )
            exchange.releases.append(
                node.gate.release(
                    exchange.received[row], RESPONSE, outputs, *query_and_inputs, self.wire, contribution
                )
            )
        exchange.tensors = {}
        return exchange.releases

    # What a node does more whose answers leave under masks (:mod:`fedstill.node.masked_handler`). In the
    # server's own process there are none, and sums need nothing more.

    def _hash_history(
        self, name: str, number: int, tensors: Tensors, differentiable: bool, request: SumRequest | None
    ) -> str:
        """A fingerprint of a query and of what was asked before."""
        return ""

    def _admit_sum(
        self, query: Query, request: SumRequest | None, output_gradients: Iterable[Tensors] = ()
    ) -> SumRequest | None:
        """The sum that an answer, or gradients pulled back, may become a part of."""
        return request

    def _sum_contribution(
        self, node: Node, request: SumRequest | None, exchange: Exchange, gradients: Tensors | None = None
    ) -> SumContribution | None:
        """How a node's answer or gradient becomes a part of a sum; None: it leaves by itself."""
        if not exchange.query.sums or request is None:
            return None
        budgets = node.gate.budgets
        is_noised = budgets is not None and budgets.mechanism.protects
        return SumContribution(node.released_counts, min_count=1.0 if is_noised else 0.0)

    def backward(
        self, number: int, output_gradients: Mapping[str, Tensors], request: SumRequest | None = None
    ) -> Mapping[str, Tensors]:
        """Pull gradients that reached the answer, by node and name, back through each node's networks:
        :meth:`compute_gradients` and :meth:`release_gradients`.

        Returns:
            By node, the gradients by the names of the query's inputs, ``(B, ...)``. Nodes of the group
            that were given none release nothing.
        """
        self.compute_gradients(number, output_gradients, request)
        return self.release_gradients(number, output_gradients)

    def compute_gradients(
        self,
        number: int,
        output_gradients: Mapping[str, Tensors],
        request: SumRequest | None = None,
        content_hashes: Mapping[str, str] | None = None,
    ) -> None:
        """Compute the gradients of the inputs, unless they are there already.

        Args:
            content_hashes: fingerprints of what is pulled, by node, where they were taken already.

        Raises:
            QueryMismatch: the query was pulled with other gradients, or is not known any more: pull
                one back before asking the next.
            QueryRefused: gradients that do not belong to its answer.
        """
        first = self.group.nodes[0].name
        exchange = self._exchanges.get(number)
        if exchange is None or len(exchange.releases) < len(
            self.group.nodes
        ):  # refused: no gradient of it leaves
            raise QueryMismatch(first, "unknown", number)
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
            if received != exchange.received_gradients or request != exchange.gradient_sum_request:
                raise QueryMismatch(first, name, number)
            return
        if not exchange.outputs:  # pulled only after the next query
            raise QueryMismatch(first, name, number)
        for node, gradients in output_gradients.items():
            check_output_gradients(exchange, node, gradients)
        request = self._admit_sum(exchange.query, request, output_gradients.values())
        exchange.input_gradients = compute_input_gradients(exchange, self.group.nodes, output_gradients)
        if not exchange.input_gradients:  # asked without gradients, or of what no input reaches
            raise QueryMismatch(first, name, number)
        exchange.received_gradients, exchange.gradient_sum_request = received, request
        exchange.inputs, exchange.outputs = {}, {}  # the graph has done its work

    def release_gradients(
        self, number: int, output_gradients: Mapping[str, Tensors]
    ) -> Mapping[str, Tensors]:
        """The gradients of those nodes that were given some, through their gates."""
        exchange = self._exchanges[number]
        input_names = exchange.query.differentiable
        for row, node in enumerate(self.group.nodes):
            if node.name in output_gradients and node.name not in exchange.released_gradients:
                gradients = {
                    f"d/d{key}": grad[row]
                    for key, grad in zip(input_names, exchange.input_gradients, strict=True)
                }
                received = exchange.received_gradients[node.name]
                contribution = self._sum_contribution(
                    node, exchange.gradient_sum_request, exchange, output_gradients[node.name]
                )
                exchange.released_gradients[node.name] = node.gate.release(
                    received, GRADIENT, gradients, exchange.query, {}, self.wire, contribution
                )
        return {node: exchange.released_gradients[node] for node in output_gradients}

    def _compute_with_private_training(self, budgets: RunBudgets, exchange: Exchange) -> None:
        """Compute where a network learns privately first, and that is charged.

        What was learned before, as before a stop, is learned again with the same draws, and costs nothing
        if it comes out the same to the last bit. If it does not (other threads, another machine), no draw may
        serve twice: it is another attempt, on other records with other noise, and charged as such.
        """
        (node,), (received,) = self.group.nodes, exchange.received  # who learns privately is computed alone
        attempt, is_known = budgets.last_attempt(received, exchange.query, exchange.tensors)
        state_before = copy.deepcopy(node.state_dict()) if is_known else {}
        self._failed_query = f"{received.number} ({exchange.query.name})"
        while True:
            failure = None
            try:
                self._compute_outputs(exchange, attempt)
            except Exception as error:
                if any(remaining for _, remaining in (node.remaining_private_steps or {}).values()):
                    raise  # half of it, which the whole will tell no less of
                failure = error  # which tells of what was learned, too
            received = replace(received, training_hash=budgets.fingerprint("learned", node.private_state()))
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
        """A handler's inputs and outputs, ``(G, ...)`` each."""
        query, number = exchange.query, exchange.received[0].number
        values_by_name = query.decode_inputs(exchange.tensors)
        inputs = {
            key: self._copy_per_node(tensor, exchange.differentiable and key in query.differentiable)
            for key, tensor in values_by_name.items()
            if isinstance(tensor, torch.Tensor) and tensor.ndim
        }
        scalars = {key: values_by_name[key] for key in values_by_name if key not in inputs}
        values = {
            key: value.item() if isinstance(value, torch.Tensor) else value for key, value in scalars.items()
        }
        first_node = self.group.nodes[0]
        # Of responses with few digits, such as bfloat16's, a sum reveals more than of those with many.
        compute = self.compute.as_float32 if query.finite_differences or query.sums_outputs else self.compute
        for node in self.group.nodes:
            node.query_context_hash = chain_digest(
                node.history_hash, f"{number} {exchange.content_hash} {attempt}"
            )
            if node.private_steps and node.gate.budgets is not None:
                node.remaining_private_steps = node.gate.budgets.mechanism.charged_steps(
                    query, exchange.tensors
                )
        with (
            compute.step(first_node.seed, first_node.name, query.name, number),
            torch.set_grad_enabled(exchange.differentiable),
        ):
            self.group.module("model").train(False)  # nodes answer with models as used, not as they learn
            exchange.inputs = inputs
            outputs = self._call_handler(query, number, inputs, values)
            exchange.outputs = query.encode_response(outputs, len(self.group))

    def _copy_per_node(self, tensor: torch.Tensor, differentiable: bool) -> torch.Tensor:
        """One copy a node, so that each node's gradient is its own: ``(B, ...)`` to ``(G, B, ...)``."""
        copies = tensor.detach().unsqueeze(0).expand(len(self.group), *tensor.shape)
        return copies.requires_grad_() if differentiable else copies

    def _store_exchange(self, number: int, exchange: Exchange) -> None:
        self._exchanges.keep(number, exchange)
        for node, received in zip(self.group.nodes, exchange.received, strict=True):
            self._last_numbers[node.name] = number
            node.history_hash = replace(received, history_hash=node.history_hash).next_history_hash
            node.query_history_hash = exchange.query_history_hash


def _receive(
    node: Node, query: Query, number: int, content_hash: str, received_bytes: Mapping[str, int]
) -> ReceivedQuery:
    budgets = node.gate.budgets
    if budgets is not None and "model" in node.private_steps and not node.history_hash:
        node.pretraining_hash = budgets.fingerprint("origin", node.model.state_dict())
        node.history_hash = node.pretraining_hash  # all that it will answer follows from this
    history_hash = "" if query.constant else node.history_hash
    return ReceivedQuery(
        number, query.name, content_hash, history_hash, received_bytes, node.pretraining_hash
    )
