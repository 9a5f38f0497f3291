"""Messages of secure aggregation between queries: the server forwards key cards and agreements among nodes.

The server can read neither. If some nodes do not contribute to a sum, the others agree on the contributors
and reveal the masks that do not cancel, which the server then subtracts
(:mod:`fedstill.node.secure_aggregation`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fedstill.core.errors import DataError, NodeFault
from fedstill.federation.transport import MessageSender, parse_reply
from fedstill.node.replies import AgreementCodes
from fedstill.protocol.messages import ConfirmSurvivors, Message, ReceiveKeys, RevealMasks, SendKeys
from fedstill.protocol.secure_aggregation import KEY_BYTES, SumRequest, mask_sign, mask_tensor
from fedstill.protocol.wire_format import Tensors

CallNodes = Callable[
    [Sequence[str], str, Callable[[str], Any]], dict[str, Any]
]  # (nodes, operation, call) -> result by node


class MaskExchange:
    """Messages that secure aggregation needs in addition to queries.

    Args:
        send: sends messages to nodes.
        call_nodes: calls some nodes at once and excludes those that fail.
    """

    def __init__(self, send: MessageSender, call_nodes: CallNodes) -> None:
        self._send, self._call_nodes = send, call_nodes
        self._cards: dict[str, tuple[object, torch.Tensor]] = {}  # with the node's reply when it joined
        self._shared: dict[str, torch.Tensor] = {}  # the cards that all of these nodes have received

    def exchange_keys(self, members: Sequence[str], joined: Mapping[str, object]) -> None:
        """Exchange the key cards of nodes that have not exchanged them in their present processes.

        Args:
            members: nodes that will contribute to the next sum.
            joined: each node's reply when it joined: another object if it has joined again.
        """
        new = [node for node in members if self._cards.get(node, (None,))[0] is not joined[node]]
        for node, card in self._call_nodes(new, "send_keys", self._fetch_key_card).items():
            self._cards[node] = joined[node], card
        cards = {node: self._cards[node][1] for node in members if node in self._cards}
        known = cards.keys() <= self._shared.keys()
        if not known or any(self._shared[node] is not cards[node] for node in cards):
            self._call_nodes(
                list(cards), "receive_keys", lambda node: self._send.send(node, ReceiveKeys(), cards)
            )
            self._shared = cards

    def _fetch_key_card(self, node: str) -> torch.Tensor:
        tensors = self._send.deliver(node, "send_keys", self._send.pack(SendKeys())).tensors
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
        codes: dict[str, Mapping[str, str]] = self._call_nodes(
            nodes,
            operation,
            lambda node: parse_reply(AgreementCodes, self._send.send(node, messages[node])).codes,
        )
        if missing := [node for node in nodes if node not in codes]:
            raise NodeFault(", ".join(missing), operation, "without it the sum of this query cannot be read")
        return codes


def _parse_key(node: str, digits: str) -> bytes:
    try:
        key = bytes.fromhex(digits)
    except ValueError as error:
        raise NodeFault(node, "reveal_masks", "it reveals a malformed key") from error
    if len(key) != KEY_BYTES:
        raise NodeFault(node, "reveal_masks", "it reveals a malformed key")
    return key
