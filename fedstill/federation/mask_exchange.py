"""What a server carries between nodes whose answers it sees as sums only: their cards, and their agreement.

It can read neither. Of what nodes reveal once they agree, it takes away those masks that do not cancel in the
sum (:mod:`fedstill.node.sum_masks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fedstill.core.errors import DataError, NodeFault
from fedstill.federation.replies import read
from fedstill.federation.transport import MessageSender
from fedstill.node.replies import AgreementCodes
from fedstill.node.sum_masks import KEY_BYTES, mask_sign, mask_stream
from fedstill.protocol.messages import ConfirmSurvivors, Message, ReceiveKeys, RevealMasks, SendKeys
from fedstill.protocol.secure_aggregation import SumRequest
from fedstill.protocol.wire_format import Tensors

Each = Callable[[Sequence[str], str, Callable[[str], Any]], dict[str, Any]]  # a call to each of some nodes


class MaskExchange:
    """The messages beside queries that sums need.

    Args:
        each: calls some nodes at once; those that fail are left out.
    """

    def __init__(self, send: MessageSender, each: Each) -> None:
        self._send, self._each = send, each
        self._cards: dict[str, tuple[object, torch.Tensor]] = {}  # with what the node said when it joined
        self._met: dict[str, torch.Tensor] = {}  # the cards that all of its nodes have been shown

    def introduce(self, members: Sequence[str], joined: Mapping[str, object]) -> None:
        """Let nodes meet that have not met in their present processes.

        Args:
            members: that are to add to the next sum.
            joined: what each said as it joined: another object where it has joined anew.
        """
        new = [node for node in members if self._cards.get(node, (None,))[0] is not joined[node]]
        for node, card in self._each(new, "send_keys", self._card).items():
            self._cards[node] = joined[node], card
        shown = {node: self._cards[node][1] for node in members if node in self._cards}
        same = shown.keys() <= self._met.keys() and all(self._met[node] is shown[node] for node in shown)
        if not same:
            self._each(list(shown), "receive_keys", lambda node: self._send.tell(node, ReceiveKeys(), shown))
            self._met = shown

    def _card(self, node: str) -> torch.Tensor:
        told = self._send.deliver(node, "send_keys", self._send.pack(SendKeys())).tensors
        if set(told) != {"card"} or told["card"].dtype != torch.uint8:
            raise DataError("its reply is no card")
        return told["card"]

    def uncovered(self, call: SumRequest, ring: Tensors, added: Sequence[str]) -> dict[str, torch.Tensor]:
        """A sum of those that added to it, without the masks that do not cancel.

        Raises:
            NodeFault: one of them fails before it has revealed its mask, so that the sum cannot be read.
        """
        words = self._told(
            added, "confirm_survivors", dict.fromkeys(added, ConfirmSurvivors(call.number, tuple(added)))
        )
        revealing = {}
        for node in added:
            others = [other for other in added if other != node]
            if words[node].keys() != set(others):
                raise NodeFault(node, "confirm_survivors", "it does not agree with each of the others")
            heard = {other: words[other].get(node, "") for other in others}
            revealing[node] = RevealMasks(call.number, heard)
        keys = self._told(added, "reveal_masks", revealing)
        lost = set(call.members) - set(added)
        found = {name: tensor.clone() for name, tensor in ring.items()}
        for place, name in enumerate(sorted(found)):
            for node in added:
                if keys[node].keys() != {node, *lost}:
                    raise NodeFault(node, "reveal_masks", "it does not reveal what the sum needs")
                found[name] -= stream(_key(node, keys[node][node]), place, found[name].shape)
                for other in lost:
                    shared = stream(_key(node, keys[node][other]), place, found[name].shape)
                    found[name] -= sign(node, other) * shared
        return found

    def _told(
        self, nodes: Sequence[str], what: str, messages: Mapping[str, Message]
    ) -> dict[str, Mapping[str, str]]:
        told: dict[str, Mapping[str, str]] = self._each(
            nodes, what, lambda node: read(Words, self._send.tell(node, messages[node])).words
        )
        if missing := [node for node in nodes if node not in told]:
            raise NodeFault(", ".join(missing), what, "without it the sum of this query cannot be read")
        return told


def _key(node: str, digits: str) -> bytes:
    try:
        key = bytes.fromhex(digits)
    except ValueError as error:
        raise NodeFault(node, "reveal_masks", "it reveals what is no key") from error
    if len(key) != KEY:
        raise NodeFault(node, "reveal_masks", "it reveals what is no key")
    return key
