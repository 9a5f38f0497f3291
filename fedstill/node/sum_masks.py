"""Masks under which a node's part of a sum leaves: the server can read nothing but the sum of all members.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017. Each two
nodes agree on a key (X25519), of which a stream of numbers (ChaCha20) is made for each sum: one of them adds
it, the other takes it away. Bound into that stream (HKDF) is all that the answer follows from and the server
could tell nodes differently (:meth:`SumMasks.mask`): the run's plan and public data, all queries before,
the very bits of this one, the sum's number and its members. A server that does so gets masks that do not
cancel.

Where a sum may be read without nodes that fail (``recover``), each node adds a mask of its own as well, so
that an answer which comes late stays covered. All who are left first agree, each with each, on who they are;
only then does each reveal its own mask of this one sum, and those that it shares with the lost. A node agrees
once a sum: so either it reveals its own mask, or others reveal what they share with it, and never both.

Other than in the paper: keys are made anew by every process and proved by the node's certificate; nobody
deals shares of keys, so that a sum is lost where a node fails between agreeing and revealing; and members may
not be chosen so that one sum less another is one node's answer, nor forms of the same answers so that they
are equations for it (:mod:`fedstill.node.sum_history`).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedstill.core.errors import QueryRefused
from fedstill.core.startup_kit import KIT_FOLDER
from fedstill.data.public import PublicData
from fedstill.node.kit_identity import KitIdentity
from fedstill.node.policy import PolicyConfig
from fedstill.node.sum_history import SUM_HISTORY_FILE, UNLESS_ALLOWED, SumHistory
from fedstill.protocol.digests import sha256_digest
from fedstill.protocol.run_plan import RunPlan, public_tensors
from fedstill.protocol.secure_aggregation import MIN_SUM_NODES, Replacement, SumRequest

logger = logging.getLogger("fedstill.node")

MAX_OPEN_SUMS = 8  # sums that a server may still finish: answers and gradients of the last queries
KEY_BYTES = 32  # bytes

Mask = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass
class _OpenSum:
    """One sum, from when the node is asked to add to it: what it is about, in bytes; and whom it is read of,
    once that is agreed on."""

    call: SumRequest
    weightings: Mapping[str, str] = field(default_factory=dict)
    context: bytes = b""
    survivors: tuple[str, ...] = ()
    corrupted: bool = False


class SumMasks:
    """One node's masks in one run.

    Args:
        plan: the run's, as JSON values, with a sha256_digest of its public data.
        identity: proves who the node is, and who others are.
        history: with whom it has added.
    """

    def __init__(
        self,
        plan: Mapping[str, Any],
        name: str,
        identity: KitIdentity,
        policy: PolicyConfig,
        cohort: SumHistory,
    ) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self.name, self.policy, self.history = name, policy, cohort
        self._plan_hash = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
        self._identity, self._own = identity, secrets.token_bytes(KEY_BYTES)
        self._private_key = X25519PrivateKey.generate()
        self._shared_keys: dict[str, bytes] = {}  # what is agreed on with each other node
        self._open_sums: OrderedDict[int, _OpenSum] = OrderedDict()
        self._last_number = -1

    @classmethod
    def from_folder(
        cls, folder: Path, name: str, policy: PolicyConfig, plan: RunPlan, public: PublicData | None
    ) -> SumMasks:
        """The masks of the node whose folder that is, in a run with a plan; public data are None for none."""
        identity, cohort = KitIdentity(folder / KIT_FOLDER), SumHistory(folder / SUM_HISTORY_FILE)
        tensors = {} if public is None else public_tensors(public)
        context = {**plan.to_dict(), "public bits": sha256_digest(tensors)}
        return cls(context, name, identity, policy, cohort)

    @property
    def min_nodes(self) -> int:
        """Nodes in a sum at least."""
        return max(self.policy.min_nodes, MIN_SUM_NODES)

    @property
    def is_exhausted(self) -> bool:
        """Whether this node has spoilt as many sums as it may, and spoils all from now on: neither what it
        answers nor that it is this node can be told any more."""
        return 0 < self.policy.max_corrupted_sums <= self.history.corrupted

    # --- who is there -----------------------------------------------------------------------------------

    def card(self) -> bytes:
        """The node's public key for this run and process, with its certificate and signature."""
        public = self._private_key.public_key().public_bytes_raw()
        return self._identity.sign(self._key_claim(self.name, public), public)

    def exchange_keys(self, cards: Mapping[str, bytes]) -> None:
        """Agree on a key with each node that shows a card.

        Raises:
            QueryRefused: a card that the authority's certificate does not prove, none of this node's own,
                or two of one key.
        """
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

        shared_keys, own_key = {}, self._private_key.public_key().public_bytes_raw()
        seen_keys: set[bytes] = set()
        for name, card in cards.items():
            try:
                public = self._identity.verify(card, name, partial(self._key_claim, name))
                if public in seen_keys:  # who copies another's key has its masks cancel in a sum of fewer
                    raise ValueError("it shows another node's key")
                seen_keys.add(public)
                if name == self.name:
                    if public != own_key:
                        raise ValueError("it shows another key for this node")
                    continue
                secret = self._private_key.exchange(X25519PublicKey.from_public_bytes(public))
            except ValueError as error:
                raise QueryRefused(
                    self.name, "receive_keys", f"sums: the card of {name!r}: {error}"
                ) from error
            pair = sorted(((self.name, own_key.hex()), (name, public.hex())))
            shared_keys[name] = _derive_key(secret, b"pair" + _encode_words(*pair[0], *pair[1]))
        if self.name not in cards:
            raise QueryRefused(self.name, "receive_keys", "sums: this node's own card is missing")
        self._shared_keys = shared_keys
        self._open_sums.clear()  # of the keys before

    def _key_claim(self, name: str, public: bytes) -> bytes:
        return _encode_words("fedstill sums", self._plan_hash, name, public.hex())

    # --- one sum ----------------------------------------------------------------------------------------

    def admit(
        self, query: str, request: SumRequest | None, weightings: Mapping[str, str] | None = None
    ) -> SumRequest:
        """Let a sum be asked for, or refuse it before anything is computed.

        Args:
            query: its name.
            request: the sum.
            weightings: the statistic that is added and its weighting (:meth:`NodeSide.weightings`).

        Raises:
            QueryRefused: no sum is asked for; too few members, or some whom this node has not met; a
                number that is not above every earlier one; or others than it has added with before, or other
                forms of the same answers.
        """
        if request is None:
            raise QueryRefused(self.name, query, "sums: this run's answers leave under masks only")
        unknown = sorted(set(request.members) - {*self._shared_keys, self.name})
        rule = None
        if request.number <= self._last_number:  # who sends a message again does not come here
            rule = f"number {request.number} is not above {self._last_number}"
        elif self.name not in request.members:
            rule = "this node is none of its members"
        elif unknown:
            rule = f"{', '.join(unknown)}: this node has not met them"
        elif len(request.members) < self.min_nodes:
            rule = f"{len(request.members)} members, allowed are {self.min_nodes} or more"
        elif request.recover and not self.policy.sums_may_differ:
            rule = f"none is read without nodes that fail, {UNLESS_ALLOWED}"
        elif not self.policy.sums_may_differ:
            rule = self.history.member_conflict(request.members) or self.history.weighting_conflict(
                weightings or {}
            )
            rule = None if rule is None else f"{rule}, {UNLESS_ALLOWED}"
        if rule is not None:
            raise QueryRefused(self.name, query, f"sums: {rule}")
        self._last_number = request.number
        self._open_sums[request.number] = _OpenSum(request, weightings or {})
        while len(self._open_sums) > MAX_OPEN_SUMS:
            self._open_sums.popitem(last=False)
        return request

    def mask(self, request: SumRequest, query: str, context_hashes: Sequence[str]) -> Mask:
        """What is added to each part (its tensor, its place among the parts) of this node's answer.

        Args:
            request: the sum, admitted.
            query: what is answered, and as which part.
            context_hashes: all that the answer follows from and that was told to this node: fingerprints of it.

        Raises:
            QueryRefused: a sum that was not admitted, or was for another answer: no mask serves twice.
        """
        members = sorted(request.members)
        context = _encode_words(
            self._plan_hash,
            query,
            str(request.number),
            str(request.recover),
            *members,
            "told",
            *context_hashes,
        )
        open_sum = self._open_sum(request.number, query)
        if open_sum.context not in (b"", context):
            raise QueryRefused(self.name, query, f"sums: number {request.number} is another sum's")
        open_sum.context = context
        self.history.record_sum(request.members, open_sum.weightings)
        keys = {name: self._pairwise_key(name, context) for name in members if name != self.name}

        def add_mask(tensor: torch.Tensor, index: int) -> torch.Tensor:
            masked = tensor.clone()
            for name, key in keys.items():
                masked += mask_sign(self.name, name) * mask_stream(key, index, tensor.shape)
            return (
                masked + mask_stream(self._own_mask_key(context), index, tensor.shape)
                if request.recover
                else masked
            )

        return add_mask

    def check_weights(self, weighting: str, counts: torch.Tensor) -> None:
        """Weigh by these counts in all runs, or refuse them.

        Raises:
            QueryRefused: earlier sums had others: of data that grew, of other labels, or in another order.
        """
        rule = self.history.record_weights(
            weighting, sha256_digest({weighting: counts}), self.policy.sums_may_differ
        )
        if rule is not None:
            raise QueryRefused(self.name, "counts", f"sums: {rule}, {UNLESS_ALLOWED}")

    def replacement(self, request: SumRequest) -> Replacement:
        """Whole numbers that only this node knows, to stand for an answer that cannot be added."""
        open_sum = self._open_sum(request.number, "answer_query")

        def random_numbers(shape: Sequence[int], index: int) -> torch.Tensor:
            if not open_sum.corrupted:
                open_sum.corrupted = True
                if not self.is_exhausted:
                    self.history.record_corrupted()
                logger.warning("sum %d is spoilt here (policy.max_corrupted_sums)", request.number)
            return mask_stream(_derive_key(self._own, b"spoilt" + open_sum.context), index, shape)

        return random_numbers

    def agree(self, number: int, survivors: Sequence[str]) -> dict[str, str]:
        """This node's word to each other survivor that a sum is read of these nodes; it is given once a sum.

        Raises:
            QueryRefused: it was given for others; they are too few, or no part of the members.
        """
        open_sum, ordered = self._open_sum(number, "confirm_survivors"), tuple(sorted(survivors))
        rule = None
        if not open_sum.context:
            rule = "this node has not added to it"
        elif not open_sum.call.recover:
            rule = "it is read of all its members"
        elif open_sum.survivors not in ((), ordered):
            rule = "this node has agreed on other survivors"
        elif not {self.name} <= set(ordered) <= set(open_sum.call.members) or len(set(ordered)) < len(
            ordered
        ):
            rule = "survivors are some of its members, and this node among them"
        elif len(ordered) < self.min_nodes:
            rule = f"{len(ordered)} survivors, allowed are {self.min_nodes} or more"
        if rule is not None:
            raise QueryRefused(self.name, "confirm_survivors", f"sums: {rule}")
        open_sum.survivors = ordered
        others = [name for name in ordered if name != self.name]
        return {name: self._agreement_code(open_sum, self.name, name) for name in others}

    def reveal(self, number: int, codes: Mapping[str, str]) -> dict[str, str]:
        """Keys, as hexadecimal digits: of this node's own mask of a sum, by its own name, and of those that
        it shares with nodes that are lost, by theirs.

        Args:
            codes: what each other survivor told this node when it agreed.

        Raises:
            QueryRefused: not all survivors have agreed on the same.
        """
        open_sum = self._open_sum(number, "reveal_masks")
        others = set(open_sum.survivors) - {self.name}
        is_complete = bool(open_sum.survivors) and set(codes) == others
        if not is_complete or not all(
            hmac.compare_digest(codes[name], self._agreement_code(open_sum, name, self.name))
            for name in others
        ):
            rule = "sums: not all survivors have agreed on who they are"
            raise QueryRefused(self.name, "reveal_masks", rule)
        lost = set(open_sum.call.members) - set(open_sum.survivors)
        shared_keys = {name: self._pairwise_key(name, open_sum.context).hex() for name in sorted(lost)}
        return {self.name: self._own_mask_key(open_sum.context).hex(), **shared_keys}

    # --- keys -------------------------------------------------------------------------------------------

    def _open_sum(self, number: int, query: str) -> _OpenSum:
        if number not in self._open_sums:
            raise QueryRefused(self.name, query, f"sums: number {number} is none that it added to")
        return self._open_sums[number]

    def _pairwise_key(self, name: str, context: bytes) -> bytes:
        return _derive_key(self._shared_keys[name], b"mask" + context)

    def _own_mask_key(self, context: bytes) -> bytes:
        return _derive_key(self._own, b"own" + context)

    def _agreement_code(self, open_sum: _OpenSum, sender: str, receiver: str) -> str:
        other = receiver if sender == self.name else sender
        context = b"word" + open_sum.context + _encode_words(sender, receiver, *open_sum.survivors)
        return _derive_key(self._shared_keys[other], context).hex()


def mask_sign(name: str, other: str) -> int:
    """Whether of two nodes the first adds what both know (1) or takes it away (-1)."""
    return 1 if name < other else -1


def mask_stream(key: bytes, index: int, shape: Sequence[int]) -> torch.Tensor:
    """Numbers of 64 bits that without the key look random, the same for the same place."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    count = torch.Size(shape).numel()
    if not count:
        return torch.zeros(tuple(shape), dtype=torch.int64)
    nonce = bytes(8) + index.to_bytes(8, "little")  # a block counter, and which of the parts it is
    encryptor = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor()
    numbers = bytearray(encryptor.update(bytes(8 * count)))
    return torch.frombuffer(numbers, dtype=torch.int64).reshape(tuple(shape))


def _derive_key(secret: bytes, context: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), KEY_BYTES, salt=None, info=b"fedstill 1 " + context).derive(secret)


def _encode_words(*words: str) -> bytes:
    """Words as bytes, of which no two lists give the same."""
    return json.dumps(words).encode()
