"""Secure aggregation at the server (experimental): a federation whose server sees sums over nodes only.

:class:`SecureAggregation` wraps a federation and has its interface: ``query`` returns the sum, or the
weighted mean, of all nodes' responses as if it were the response of one node, and sends its gradients to all
nodes. In one process the nodes' contributions are not masked. Remote nodes mask them, and
:class:`MaskExchange` forwards key cards and agreements among them, of which the server can read neither. If
some nodes do not contribute to a sum, the others agree on the contributors and reveal the masks that do not
cancel, which the server then subtracts (:mod:`fedstill.node.secure_aggregation`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fedstill.core.errors import ArgumentError, DataError, NodeFault, QueryMismatch, list_names
from fedstill.federation.federation import Federation, SentQuery, send_query
from fedstill.federation.remote import Remote
from fedstill.federation.response_checks import (
    mismatched_gradient_faults,
    require_finite_gradients,
    require_finite_inputs,
)
from fedstill.federation.responses import Responses
from fedstill.federation.transport import parse_reply
from fedstill.node.node import Node
from fedstill.node.replies import AgreementCodes
from fedstill.node.secure_aggregation import SumEncoder
from fedstill.protocol.messages import ConfirmSurvivors, Message, ReceiveKeys, RevealMasks, SendKeys
from fedstill.protocol.queries import Query
from fedstill.protocol.secure_aggregation import (
    KEY_BYTES,
    MIN_SUM_NODES,
    SUM,
    SumRequest,
    add_contributions,
    contribution_faults,
    decode_sums,
    is_corrupted,
    mask_sign,
    mask_tensor,
    power_of_two_scale,
)
from fedstill.protocol.wire_format import Tensors


class SecureAggregation:
    """A federation of which the server sees sums only, under the name ``SUM``.

    Attributes that are not listed here are the wrapped federation's.

    Args:
        federation: the nodes.
        masks: exchange of keys and masks with remote nodes; None: contributions are not masked.
        encoders: the encoders of nodes in this process.

    Raises:
        ArgumentError: too few nodes, or queries whose responses cannot be added.
    """

    def __init__(
        self,
        federation: Federation,
        masks: MaskExchange | None = None,
        encoders: Mapping[str, SumEncoder] | None = None,
    ) -> None:
        check_secure_aggregation(federation.nodes, federation.queries)
        self.federation, self.queries, self.link = federation, federation.queries, federation.link
        self._masks, self._encoders = masks, encoders or {}
        # Of the last sum: query number, nodes that contributed, and their total weights, for its gradients.
        self._last_sum: tuple[int, tuple[str, ...], Tensors] = (-1, (), {})
        self._sum_count = 0  # the last one's number

    @classmethod
    def remote(cls, federation: Remote) -> SecureAggregation:
        """Wrap a federation of remote nodes, which mask their contributions."""
        return cls(federation, MaskExchange(federation))

    @classmethod
    def in_process(cls, federation: Federation, nodes: Sequence[Node]) -> SecureAggregation:
        """Wrap a federation of nodes in this process, which get encoders."""
        encoders = {}
        for node in nodes:
            own = node.gate.encoder
            encoders[node.name] = own if isinstance(own, SumEncoder) else SumEncoder(node.gate)
        return cls(federation, encoders=encoders)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.federation, name)

    @property
    def sources(self) -> tuple[str, ...]:
        """Name under which responses arrive."""
        return (SUM,)

    @property
    def present_sources(self) -> tuple[str, ...]:
        """Name under which responses to the next query arrive."""
        return (SUM,)

    def query(
        self, query: str, *, nodes: Sequence[str] | None = None, number: int | None = None, **inputs: Any
    ) -> Responses:
        """Send a query and return the sum or weighted mean of the responses, ``(1, B, ...)``.

        Arguments and exceptions are those of :meth:`Federation.query`; ``nodes`` may also be ``[SUM]``, for
        all.
        """
        queried = None if nodes is not None and tuple(nodes) == (SUM,) else nodes
        return send_query(self, query, *self.federation.prepare_query(query, queried, number), inputs)

    def as_responses(self, nodes: Sequence[str], outputs: Tensors) -> Responses:
        """Return outputs ``(K, ...)`` of nodes of this process as the server would receive them."""
        query = next(each for each in self.queries.values() if outputs.keys() <= each.sums.keys())
        contributions = [
            self._encoders[node].contribution(query, {name: each[row] for name, each in outputs.items()})
            for row, node in enumerate(nodes)
        ]
        sums, _ = decode_sums(add_contributions(contributions), query.released_kinds())
        stacked = {name: tensor.unsqueeze(0) for name, tensor in sums.items()}
        return Responses(-1, (SUM,), self.federation.to_device(stacked))

    # --- sums ---------------------------------------------------------------------------------------------

    def valid_responses(
        self, queried: tuple[str, ...], query: str, number: int, tensors: Tensors, differentiable: bool
    ) -> Mapping[str, Tensors]:
        """Return the sum, or the weighted mean, of all responses to one query."""
        declared = self.queries[query]
        if not declared.sums:  # nothing is released
            return self.federation.valid_responses(queried, query, number, tensors, differentiable)
        require_finite_inputs(tensors, query)
        sent = SentQuery(query, number, self.link.compress(tensors, declared.sends), differentiable)
        request = self._new_request(name for name in queried if name not in self.federation.excluded)
        received = self.federation.collect_responses(request.members, replace(sent, encoding=request))
        kinds = declared.released_kinds()
        parts = [name for name in kinds if not name.startswith("d/d")]
        ring, contributors = self._sum(request, query, received, parts)
        sums, weights = decode_sums(ring, kinds)
        self._last_sum = number, contributors, self.federation.to_device(weights)
        return {SUM: self.federation.to_device(sums)}

    def valid_gradients(
        self, number: int, query: str, output_gradients: Mapping[str, Tensors], inputs: Tensors
    ) -> Mapping[str, Tensors]:
        """Return the sum of all nodes' input gradients.

        Args:
            output_gradients: gradient of the loss with respect to the sum of the responses, under its name.
        """
        last_number, contributors, weights = self._last_sum
        if last_number != number:
            raise QueryMismatch(SUM, query, number)
        # Divide by the total weight here; each node multiplies by its own weight.
        node_gradients = {
            name: grad / weights[name].to(grad) if name in weights else grad
            for name, grad in output_gradients[SUM].items()
        }
        require_finite_gradients({SUM: node_gradients}, query)
        scale = power_of_two_scale(node_gradients)  # nodes refuse any scale but 1
        scaled = {name: grad / scale for name, grad in node_gradients.items()}
        request = self._new_request(name for name in contributors if name in self.federation.present)
        received = self.federation.collect_gradients(
            number, query, dict.fromkeys(request.members, scaled), request
        )
        declared = self.queries[query]
        parts = [f"d/d{name}" for name in declared.differentiable]
        sums, _ = decode_sums(self._sum(request, query, received, parts)[0], declared.released_kinds())
        if faults := mismatched_gradient_faults({SUM: sums}, inputs):
            raise NodeFault(SUM, query, faults[SUM])
        return {SUM: self.federation.to_device({name: grad * scale for name, grad in sums.items()})}

    def _new_request(self, names: Iterable[str]) -> SumRequest:
        """Start another sum, with a number above those of earlier processes of this server."""
        members = tuple(names)
        if self._masks is not None:
            self._masks.exchange_keys(members)
            members = tuple(name for name in members if name not in self.federation.excluded)
        self._sum_count = max(self._sum_count + 1, time.time_ns() // 1_000_000)
        return SumRequest(self._sum_count, members, self.link.quorum < 1)

    def _sum(
        self, request: SumRequest, query: str, received: Mapping[str, Tensors], parts: Sequence[str]
    ) -> tuple[Tensors, tuple[str, ...]]:
        """Return the sum of the contributions, in the ring, and the names of the nodes that contributed."""
        contributions = dict(received)
        for node, fault in contribution_faults(contributions, parts).items():
            self.federation.exclude(node, query, fault, may_rejoin=False)
            del contributions[node]
        if not contributions or (len(contributions) < len(request.members) and not request.recover):
            missing = list_names(name for name in request.members if name not in contributions)
            raise NodeFault(missing, query, "without it the sum of all nodes' responses cannot be read")
        ring: Tensors = add_contributions(list(contributions.values()))
        if self._masks is not None and request.recover:
            ring = self._masks.unmask(request, ring, tuple(contributions))
        if is_corrupted(ring):
            why = "a response held NaN or numbers too large to add, now or in an earlier run"
            fault = f"the sum is corrupted: {why} (`fedstill node check` shows its owner which)"
            raise NodeFault(SUM, query, fault)
        return ring, tuple(contributions)


AnyFederation = Federation | SecureAggregation


def check_secure_aggregation(nodes: Sequence[str], queries: Mapping[str, Query]) -> None:
    """Refuse secure aggregation of too few nodes, or of queries whose responses cannot be contributions.

    Raises:
        ArgumentError: naming the first of them.
    """
    if len(nodes) < MIN_SUM_NODES:
        raise ArgumentError(
            "link.secure_aggregation",
            True,
            f"false with {len(nodes)} nodes: it needs {MIN_SUM_NODES} or more",
        )
    for name, query in queries.items():
        if query.released_kinds() and not query.sums:
            kinds = ", ".join(dict.fromkeys(query.released_kinds().values()))
            reason = f"query {name} releases each node's {kinds}, which are not added"
            raise ArgumentError("link.secure_aggregation", True, f"false for this method: {reason}")


# --- keys and masks of remote nodes ---------------------------------------------------------------------


class MaskExchange:
    """Messages that secure aggregation needs in addition to queries.

    Args:
        remote: the nodes.
    """

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._cards: dict[str, tuple[object, torch.Tensor]] = {}  # with the node's reply when it joined
        self._shared: dict[str, torch.Tensor] = {}  # the cards that all of these nodes have received

    def exchange_keys(self, members: Sequence[str]) -> None:
        """Exchange the key cards of nodes that have not exchanged them in their present processes.

        Args:
            members: nodes that will contribute to the next sum.
        """
        joined = self._remote.node_status  # another object for a node that has joined again
        new = [node for node in members if self._cards.get(node, (None,))[0] is not joined[node]]
        for node, card in self._remote.call_nodes(new, "send_keys", self._fetch_key_card).items():
            self._cards[node] = joined[node], card
        cards = {node: self._cards[node][1] for node in members if node in self._cards}
        known = cards.keys() <= self._shared.keys()
        if not known or any(self._shared[node] is not cards[node] for node in cards):
            self._remote.call_nodes(
                list(cards), "receive_keys", lambda node: self._remote.sender.send(node, ReceiveKeys(), cards)
            )
            self._shared = cards

    def _fetch_key_card(self, node: str) -> torch.Tensor:
        tensors = self._remote.sender.deliver(node, "send_keys", self._remote.sender.pack(SendKeys())).tensors
        if set(tensors) != {"card"} or tensors["card"].dtype != torch.uint8:
            raise DataError("its reply is no key card")
        return tensors["card"]

    def unmask(self, call: SumRequest, ring: Tensors, contributors: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return a sum without the masks that do not cancel in it.

        Args:
            contributors: nodes that contributed to the sum.

        Raises:
            NodeFault: a contributor fails before it has revealed its masks, so that the sum cannot be read.
        """
        confirmation = ConfirmSurvivors(call.number, tuple(contributors))
        codes = self._exchange_agreement_codes(
            contributors, "confirm_survivors", dict.fromkeys(contributors, confirmation)
        )
        requests = {}
        for node in contributors:
            others = [other for other in contributors if other != node]
            if codes[node].keys() != set(others):
                raise NodeFault(node, "confirm_survivors", "it does not agree with each of the others")
            received_codes = {other: codes[other].get(node, "") for other in others}
            requests[node] = RevealMasks(call.number, received_codes)
        keys = self._exchange_agreement_codes(contributors, "reveal_masks", requests)
        missing = set(call.members) - set(contributors)
        unmasked = {name: tensor.clone() for name, tensor in ring.items()}
        for index, name in enumerate(sorted(unmasked)):
            for node in contributors:
                if keys[node].keys() != {node, *missing}:
                    raise NodeFault(node, "reveal_masks", "it does not reveal the keys that the sum needs")
                unmasked[name] -= mask_tensor(_parse_key(node, keys[node][node]), index, unmasked[name].shape)
                for other in missing:
                    shared = mask_tensor(_parse_key(node, keys[node][other]), index, unmasked[name].shape)
                    unmasked[name] -= mask_sign(node, other) * shared
        return unmasked

    def _exchange_agreement_codes(
        self, nodes: Sequence[str], operation: str, messages: Mapping[str, Message]
    ) -> dict[str, Mapping[str, str]]:
        codes: dict[str, Mapping[str, str]] = self._remote.call_nodes(
            nodes,
            operation,
            lambda node: parse_reply(AgreementCodes, self._remote.sender.send(node, messages[node])).codes,
        )
        if missing := [node for node in nodes if node not in codes]:
            raise NodeFault(list_names(missing), operation, "without it the sum of this query cannot be read")
        return codes


def _parse_key(node: str, digits: str) -> bytes:
    try:
        key = bytes.fromhex(digits)
    except ValueError as error:
        raise NodeFault(node, "reveal_masks", "it reveals a malformed key") from error
    if len(key) != KEY_BYTES:
        raise NodeFault(node, "reveal_masks", "it reveals a malformed key")
    return key
