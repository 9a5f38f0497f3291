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
        last: dict[str, int] | None = None,
        wire: WireConfig | None = None,
    ) -> None:
        self.group, self.side, self.compute = group, side, compute
        # What is frozen learns nothing and draws nothing, so that no network that learns is like it.
        first = group.nodes[0]
        self.stacking_key = tuple(
            (stacking_key(module), first.frozen[role]) for role, module in first.modules.items()
        )
        self.wire = wire or WireConfig()
        self._last_numbers = {node.name: -1 for node in group.nodes} if last is None else last
        self._exchanges = RecentExchanges()
        self._pending: Exchange | None = None
        self._call_handler = QueryHandlers(group, compute)
        self._failed_query = ""  # the query at which a network may have learned half of what it should

    def require_complete_training(self, what: str) -> None:
        """Refuse to go on from networks that may have learned half of what they should.

        Nor may such a state be kept: learning for the failed query is paid for once, and would be learned
        once more on top of it.

        Raises:
            NodeFault: an earlier query failed while a network learned privately for it.
        """
        if self._failed_query:
            reason = f"it failed at query {self._failed_query}: the run goes on from an earlier mark"
            raise NodeFault(self.group.nodes[0].name, what, reason)

    @property
    def trains_privately(self) -> bool:
        """Whether networks here learn privately, which is charged while they compute."""
        return bool(self.group.nodes[0].private_steps)

    def respond(
        self, name: str, number: int, tensors: Tensors, differentiable: bool, call: SumRequest | None = None
    ) -> Sequence[Tensors]:
        """Each node's answer, in the group's order.

        That is :meth:`receive`, :meth:`compute_answers` and :meth:`release_answers`.

        Args:
            number: that the server gave it, rising from query to query.
            differentiable: keep what :meth:`pull_back` needs.
            call: of which nodes a sum is made, where the query is summed.
        """
        self.receive(name, number, tensors, differentiable, call)
        self.compute_responses(number)
        return self.release_responses(number)

    def receive(
        self,
        name: str,
        number: int,
        tensors: Tensors,
        differentiable: bool,
        call: SumRequest | None = None,
        content: str | None = None,
    ) -> None:
        """Take a query, if it may be answered.

        Args:
            content: its fingerprint, where that was taken already.

        Raises:
            ArgumentError: other tensors than the query declares.
            QueryRefused: a gate's policy forbids it; then no node of the group has answered. What follows
                from an answer itself may strike later, at its release: its bytes and rows, or its price.
            QueryMismatch: the number was used for another query or other content.
            NodeFault: an earlier query failed while a network learned privately for it, perhaps half of
                what it should, and that is not paid for.
        """
        self.require_complete_training(name)
        arrived, tensors = tensors, decompress(tensors)
        query = self.side.queries[name]
        query.check_inputs(tensors)
        content = digest(name, arrived) if content is None else content
        kept = self._exchanges.get(number)
        if kept is not None:
            if kept.content_hash != content or kept.sum_request != call:
                raise QueryMismatch(self.group.nodes[0].name, name, number)
            kept.tensors = tensors
            return
        if any(number <= self._last_numbers[node.name] for node in self.group.nodes):
            raise QueryMismatch(self.group.nodes[0].name, name, number)
        for node in self.group.nodes:
            node.gate.read_values(query, tensors)
        down = bytes_by_kind(arrived, query.sends)
        asked = [_receive(node, query, number, content, down) for node in self.group.nodes]
        for node, here in zip(self.group.nodes, asked, strict=True):
            node.gate.admit(here, query, tensors)
        bits = self._hash_history(name, number, arrived, differentiable, call)
        call = self._admit_sum(query, call)
        for node, here in zip(self.group.nodes, asked, strict=True):  # when no more refusal can come
            node.gate.charge_training(here, query, tensors)
        self._pending = Exchange(
            query, content, asked, tensors, differentiable, query_history_hash=bits, sum_request=call
        )

    def compute_responses(self, number: int) -> None:
        """Compute the answers to what was received, unless they are there already."""
        if number in self._exchanges:
            return
        now, node = self._pending, self.group.nodes[0]
        assert now is not None  # received before
        budgets = node.gate.budgets if self.trains_privately else None
        try:
            if budgets is not None and (now.query.trains or now.query.span is not None):
                self._compute_with_private_training(budgets, now)
            else:
                self._compute_outputs(now)
        except BaseException:  # it may have changed networks: no later answer passes for one without it
            failed = f"{number} {now.content_hash}{now.query_history_hash} failed"  # of which masks know more than its content
            for each in self.group.nodes:
                each.history_hash, each.query_history_hash = (
                    chain_digest(each.history_hash, failed),
                    chain_digest(each.query_history_hash, failed),
                )
            raise
        finally:
            for each in self.group.nodes:
                each.remaining_private_steps = None
        self._store_exchange(number, now)

    def release_responses(self, number: int) -> Sequence[Tensors]:
        """Each node's answer, in the group's order, through its gate.

        Raises:
            QueryMismatch: some are outstanding, and a later query has been answered meanwhile.
        """
        kept = self._exchanges[number]
        if kept.is_graph_freed and len(kept.releases) < len(self.group.nodes):
            raise QueryMismatch(self.group.nodes[0].name, kept.query.name, number)
        for row, node in list(enumerate(self.group.nodes))[len(kept.releases) :]:
            mine = {key: out[row].detach() for key, out in kept.outputs.items()}
            about, adding = (kept.query, kept.tensors), self._sum_contribution(node, kept.sum_request, kept)
            kept.releases.append(
                node.gate.release(kept.received[row], RESPONSE, mine, *about, self.wire, adding)
            )
        kept.tensors = {}
        return kept.releases

    # What a node does more whose answers leave under masks (:mod:`fedstill.node.masked_handler`). In the
    # server's own process there are none, and sums need nothing more.

    def _hash_history(
        self, name: str, number: int, arrived: Tensors, differentiable: bool, call: SumRequest | None
    ) -> str:
        """A fingerprint of a query and of what was asked before."""
        return ""

    def _admit_sum(
        self, query: Query, call: SumRequest | None, pulls: Iterable[Tensors] = ()
    ) -> SumRequest | None:
        """The sum that an answer, or gradients pulled back, may become a part of."""
        return call

    def _sum_contribution(
        self, node: Node, call: SumRequest | None, kept: Exchange, pull: Tensors | None = None
    ) -> SumContribution | None:
        """How a node's answer or gradient becomes a part of a sum; None: it leaves by itself."""
        if not kept.query.sums or call is None:
            return None
        budgets = node.gate.budgets
        noised = budgets is not None and budgets.mechanism.protects
        return SumContribution(node.released_counts, min_count=1.0 if noised else 0.0)

    def backward(
        self, number: int, pulls: Mapping[str, Tensors], call: SumRequest | None = None
    ) -> Mapping[str, Tensors]:
        """Pull gradients that reached the answer, by node and name, back through each node's networks:
        :meth:`compute_gradients` and :meth:`release_gradients`.

        Returns:
            By node, the gradients by the names of the query's inputs, ``(B, ...)``. Nodes of the group
            that were given none release nothing.
        """
        self.compute_gradients(number, pulls, call)
        return self.release_gradients(number, pulls)

    def compute_gradients(
        self,
        number: int,
        pulls: Mapping[str, Tensors],
        call: SumRequest | None = None,
        contents: Mapping[str, str] | None = None,
    ) -> None:
        """Compute the gradients of the inputs, unless they are there already.

        Args:
            contents: fingerprints of what is pulled, by node, where they were taken already.

        Raises:
            QueryMismatch: the query was pulled with other gradients, or is not known any more: pull
                one back before asking the next.
            QueryRefused: gradients that do not belong to its answer.
        """
        first = self.group.nodes[0].name
        kept = self._exchanges.get(number)
        if kept is None or len(kept.releases) < len(self.group.nodes):  # refused: no gradient of it leaves
            raise QueryMismatch(first, "unknown", number)
        name = kept.query.name
        mine = {node.name: asked for node, asked in zip(self.group.nodes, kept.received, strict=True)}
        pulled = {
            node: replace(
                mine[node],
                content_hash=digest(name, pull) if contents is None else contents[node],
                history_hash=mine[node].next_history_hash,
                received_bytes=bytes_by_kind(pull, dict.fromkeys(decompress(pull), GRADIENTS)),
            )
            for node, pull in pulls.items()
        }
        if kept.input_gradients:
            if pulled != kept.received_gradients or call != kept.gradient_sum_request:
                raise QueryMismatch(first, name, number)
            return
        if not kept.outputs:  # pulled only after the next query
            raise QueryMismatch(first, name, number)
        for node, pull in pulls.items():
            check_output_gradients(kept, node, pull)
        call = self._admit_sum(kept.query, call, pulls.values())
        kept.input_gradients = compute_input_gradients(kept, self.group.nodes, pulls)
        if not kept.input_gradients:  # asked without gradients, or of what no input reaches
            raise QueryMismatch(first, name, number)
        kept.received_gradients, kept.gradient_sum_request = pulled, call
        kept.inputs, kept.outputs = {}, {}  # the graph has done its work

    def release_gradients(self, number: int, pulls: Mapping[str, Tensors]) -> Mapping[str, Tensors]:
        """The gradients of those nodes that were given some, through their gates."""
        kept = self._exchanges[number]
        wanted = kept.query.differentiable
        for row, node in enumerate(self.group.nodes):
            if node.name in pulls and node.name not in kept.released_gradients:
                own = {f"d/d{key}": grad[row] for key, grad in zip(wanted, kept.input_gradients, strict=True)}
                asked = kept.received_gradients[node.name]
                adding = self._sum_contribution(node, kept.gradient_sum_request, kept, pulls[node.name])
                kept.released_gradients[node.name] = node.gate.release(
                    asked, GRADIENT, own, kept.query, {}, self.wire, adding
                )
        return {node: kept.released_gradients[node] for node in pulls}

    def _compute_with_private_training(self, budgets: RunBudgets, now: Exchange) -> None:
        """Compute where a network learns privately first, and that is charged.

        What was learned before, as before a stop, is learned again with the same draws, and costs nothing
        if it comes out the same to the last bit. If it does not (other threads, another machine), no draw may
        serve twice: it is another attempt, on other records with other noise, and charged as such.
        """
        (node,), (asked,) = self.group.nodes, now.received  # who learns privately is computed alone
        attempt, known = budgets.last_attempt(asked, now.query, now.tensors)
        before = copy.deepcopy(node.state_dict()) if known else {}
        self._failed_query = f"{asked.number} ({now.query.name})"
        while True:
            failed = None
            try:
                self._compute_outputs(now, attempt)
            except Exception as error:
                if any(left for _, left in (node.remaining_private_steps or {}).values()):
                    raise  # half of it, which the whole will tell no less of
                failed = error  # which tells of what was learned, too
            asked = replace(asked, training_hash=budgets.fingerprint("learned", node.private_state()))
            if budgets.is_reproduced(asked, now.query, attempt):
                break
            node.load_state_dict(before)
            attempt += 1
            budgets.charge_training(asked, now.query, now.tensors, attempt)
        if failed is not None:
            raise failed
        self._failed_query = ""
        now.received = [asked]

    def _compute_outputs(self, now: Exchange, attempt: int = 0) -> None:
        """A handler's inputs and outputs, ``(G, ...)`` each."""
        query, number = now.query, now.received[0].number
        arrived = query.decode_inputs(now.tensors)
        inputs = {
            key: self._copy_per_node(tensor, now.differentiable and key in query.differentiable)
            for key, tensor in arrived.items()
            if isinstance(tensor, torch.Tensor) and tensor.ndim
        }
        plain = {key: arrived[key] for key in arrived if key not in inputs}
        values = {key: each.item() if isinstance(each, torch.Tensor) else each for key, each in plain.items()}
        first = self.group.nodes[0]
        # Of responses with few digits, such as bfloat16's, a sum reveals more than of those with many.
        compute = self.compute.exact if query.finite_differences or query.sums_outputs else self.compute
        for node in self.group.nodes:
            node.query_context_hash = chain_digest(
                node.history_hash, f"{number} {now.content_hash} {attempt}"
            )
            if node.private_steps and node.gate.budgets is not None:
                node.remaining_private_steps = node.gate.budgets.mechanism.charged_steps(query, now.tensors)
        with (
            compute.step(first.seed, first.name, query.name, number),
            torch.set_grad_enabled(now.differentiable),
        ):
            self.group.module("model").train(False)  # nodes answer with models as used, not as they learn
            now.inputs = inputs
            given = self._call_handler(query, number, inputs, values)
            now.outputs = query.encode_response(given, len(self.group))

    def _copy_per_node(self, tensor: torch.Tensor, differentiable: bool) -> torch.Tensor:
        """One copy a node, so that each node's gradient is its own: ``(B, ...)`` to ``(G, B, ...)``."""
        each = tensor.detach().unsqueeze(0).expand(len(self.group), *tensor.shape)
        return each.requires_grad_() if differentiable else each

    def _store_exchange(self, number: int, kept: Exchange) -> None:
        self._exchanges.keep(number, kept)
        for node, asked in zip(self.group.nodes, kept.received, strict=True):
            self._last_numbers[node.name] = number
            node.history_hash = replace(asked, history_hash=node.history_hash).next_history_hash
            node.query_history_hash = kept.query_history_hash


def _receive(node: Node, query: Query, number: int, content: str, down: Mapping[str, int]) -> ReceivedQuery:
    budgets = node.gate.budgets
    if budgets is not None and "model" in node.private_steps and not node.history_hash:
        node.pretraining_hash = budgets.fingerprint("origin", node.model.state_dict())
        node.history_hash = node.pretraining_hash  # all that it will answer follows from this
    after = "" if query.constant else node.history_hash
    return ReceivedQuery(number, query.name, content, after, down, node.pretraining_hash)
