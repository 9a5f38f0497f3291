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
from fedstill.core.startup_kit import KIT
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
        identity, cohort = KitIdentity(folder / KIT), SumHistory(folder / SUM_HISTORY_FILE)
        tensors = {} if public is None else public_tensors(public)
        about = {**plan.to_dict(), "public bits": sha256_digest(tensors)}
        return cls(about, name, identity, policy, cohort)

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

        shared, mine = {}, self._private_key.public_key().public_bytes_raw()
        keys: set[bytes] = set()
        for name, card in cards.items():
            try:
                public = self._identity.verify(card, name, partial(self._key_claim, name))
                if public in keys:  # who copies another's key has its masks cancel in a sum of fewer
                    raise ValueError("it shows another node's key")
                keys.add(public)
                if name == self.name:
                    if public != mine:
                        raise ValueError("it shows another key for this node")
                    continue
                agreed = self._private_key.exchange(X25519PublicKey.from_public_bytes(public))
            except ValueError as error:
                raise QueryRefused(
                    self.name, "receive_keys", f"sums: the card of {name!r}: {error}"
                ) from error
            pair = sorted(((self.name, mine.hex()), (name, public.hex())))
            shared[name] = _derive_key(agreed, b"pair" + _encode_words(*pair[0], *pair[1]))
        if self.name not in cards:
            raise QueryRefused(self.name, "receive_keys", "sums: this node's own card is missing")
        self._shared_keys = shared
        self._open_sums.clear()  # of the keys before

    def _key_claim(self, name: str, public: bytes) -> bytes:
        return _encode_words("fedstill sums", self._plan_hash, name, public.hex())

    # --- one sum ----------------------------------------------------------------------------------------

    def admit(
        self, query: str, call: SumRequest | None, forms: Mapping[str, str] | None = None
    ) -> SumRequest:
        """Let a sum be asked for, or refuse it before anything is computed.

        Args:
            query: its name.
            call: the sum.
            forms: the statistic that is added and its weighting (:meth:`NodeSide.weightings`).

        Raises:
            QueryRefused: no sum is asked for; too few members, or some whom this node has not met; a
                number that is not above every earlier one; or others than it has added with before, or other
                forms of the same answers.
        """
        if call is None:
            raise QueryRefused(self.name, query, "sums: this run's answers leave under masks only")
        unknown = sorted(set(call.members) - {*self._shared_keys, self.name})
        rule = None
        if call.number <= self._last_number:  # who sends a message again does not come here
            rule = f"number {call.number} is not above {self._last_number}"
        elif self.name not in call.members:
            rule = "this node is none of its members"
        elif unknown:
            rule = f"{', '.join(unknown)}: this node has not met them"
        elif len(call.members) < self.min_nodes:
            rule = f"{len(call.members)} members, allowed are {self.min_nodes} or more"
        elif call.recover and not self.policy.sums_may_differ:
            rule = f"none is read without nodes that fail, {UNLESS_ALLOWED}"
        elif not self.policy.sums_may_differ:
            rule = self.history.member_conflict(call.members) or self.history.weighting_conflict(forms or {})
            rule = None if rule is None else f"{rule}, {UNLESS_ALLOWED}"
        if rule is not None:
            raise QueryRefused(self.name, query, f"sums: {rule}")
        self._last_number = call.number
        self._open_sums[call.number] = _OpenSum(call, forms or {})
        while len(self._open_sums) > MAX_OPEN_SUMS:
            self._open_sums.popitem(last=False)
        return call

    def mask(self, call: SumRequest, query: str, told: Sequence[str]) -> Mask:
        """What is added to each part (its tensor, its place among the parts) of this node's answer.

        Args:
            call: the sum, admitted.
            query: what is answered, and as which part.
            told: all that the answer follows from and that was told to this node: fingerprints of it.

        Raises:
            QueryRefused: a sum that was not admitted, or was for another answer: no mask serves twice.
        """
        members = sorted(call.members)
        about = _encode_words(
            self._plan_hash, query, str(call.number), str(call.recover), *members, "told", *told
        )
        open_ = self._open_sum(call.number, query)
        if open_.context not in (b"", about):
            raise QueryRefused(self.name, query, f"sums: number {call.number} is another sum's")
        open_.context = about
        self.history.record_sum(call.members, open_.weightings)
        keys = {name: self._pairwise_key(name, about) for name in members if name != self.name}

        def add(tensor: torch.Tensor, place: int) -> torch.Tensor:
            covered = tensor.clone()
            for name, key in keys.items():
                covered += mask_sign(self.name, name) * mask_stream(key, place, tensor.shape)
            return (
                covered + mask_stream(self._own_mask_key(about), place, tensor.shape)
                if call.recover
                else covered
            )

        return add

    def check_weights(self, way: str, counts: torch.Tensor) -> None:
        """Weigh by these counts in all runs, or refuse them.

        Raises:
            QueryRefused: earlier sums had others: of data that grew, of other labels, or in another order.
        """
        rule = self.history.record_weights(way, sha256_digest({way: counts}), self.policy.sums_may_differ)
        if rule is not None:
            raise QueryRefused(self.name, "counts", f"sums: {rule}, {UNLESS_ALLOWED}")

    def replacement(self, call: SumRequest) -> Replacement:
        """Whole numbers that only this node knows, to stand for an answer that cannot be added."""
        open_ = self._open_sum(call.number, "answer_query")

        def drawn(shape: Sequence[int], place: int) -> torch.Tensor:
            if not open_.corrupted:
                open_.corrupted = True
                if not self.is_exhausted:
                    self.history.record_corrupted()
                logger.warning("sum %d is spoilt here (policy.max_corrupted_sums)", call.number)
            return mask_stream(_derive_key(self._own, b"spoilt" + open_.context), place, shape)

        return drawn

    def agree(self, number: int, survivors: Sequence[str]) -> dict[str, str]:
        """This node's word to each other survivor that a sum is read of these nodes; it is given once a sum.

        Raises:
            QueryRefused: it was given for others; they are too few, or no part of the members.
        """
        open_, wanted = self._open_sum(number, "confirm_survivors"), tuple(sorted(survivors))
        rule = None
        if not open_.context:
            rule = "this node has not added to it"
        elif not open_.call.recover:
            rule = "it is read of all its members"
        elif open_.survivors not in ((), wanted):
            rule = "this node has agreed on other survivors"
        elif not {self.name} <= set(wanted) <= set(open_.call.members) or len(set(wanted)) < len(wanted):
            rule = "survivors are some of its members, and this node among them"
        elif len(wanted) < self.min_nodes:
            rule = f"{len(wanted)} survivors, allowed are {self.min_nodes} or more"
        if rule is not None:
            raise QueryRefused(self.name, "confirm_survivors", f"sums: {rule}")
        open_.survivors = wanted
        others = [name for name in wanted if name != self.name]
        return {name: self._agreement_code(open_, self.name, name) for name in others}

    def reveal(self, number: int, words: Mapping[str, str]) -> dict[str, str]:
        """Keys, as hexadecimal digits: of this node's own mask of a sum, by its own name, and of those that
        it shares with nodes that are lost, by theirs.

        Args:
            words: what each other survivor told this node when it agreed.

        Raises:
            QueryRefused: not all survivors have agreed on the same.
        """
        open_ = self._open_sum(number, "reveal_masks")
        others = set(open_.survivors) - {self.name}
        sound = bool(open_.survivors) and set(words) == others
        if not sound or not all(
            hmac.compare_digest(words[name], self._agreement_code(open_, name, self.name)) for name in others
        ):
            rule = "sums: not all survivors have agreed on who they are"
            raise QueryRefused(self.name, "reveal_masks", rule)
        lost = set(open_.call.members) - set(open_.survivors)
        shared = {name: self._pairwise_key(name, open_.context).hex() for name in sorted(lost)}
        return {self.name: self._own_mask_key(open_.context).hex(), **shared}

    # --- keys -------------------------------------------------------------------------------------------

    def _open_sum(self, number: int, query: str) -> _OpenSum:
        if number not in self._open_sums:
            raise QueryRefused(self.name, query, f"sums: number {number} is none that it added to")
        return self._open_sums[number]

    def _pairwise_key(self, name: str, about: bytes) -> bytes:
        return _derive_key(self._shared_keys[name], b"mask" + about)

    def _own_mask_key(self, about: bytes) -> bytes:
        return _derive_key(self._own, b"own" + about)

    def _agreement_code(self, open_: _OpenSum, speaker: str, hearer: str) -> str:
        other = hearer if speaker == self.name else speaker
        about = b"word" + open_.context + _encode_words(speaker, hearer, *open_.survivors)
        return _derive_key(self._shared_keys[other], about).hex()


def mask_sign(name: str, other: str) -> int:
    """Whether of two nodes the first adds what both know (1) or takes it away (-1)."""
    return 1 if name < other else -1


def mask_stream(key: bytes, place: int, shape: Sequence[int]) -> torch.Tensor:
    """Numbers of 64 bits that without the key look random, the same for the same place."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    count = torch.Size(shape).numel()
    if not count:
        return torch.zeros(tuple(shape), dtype=torch.int64)
    nonce = bytes(8) + place.to_bytes(8, "little")  # a block counter, and which of the parts it is
    encryptor = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor()
    drawn = bytearray(encryptor.update(bytes(8 * count)))
    return torch.frombuffer(drawn, dtype=torch.int64).reshape(tuple(shape))


def _derive_key(secret: bytes, about: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), KEY_BYTES, salt=None, info=b"fedstill 1 " + about).derive(secret)


def _encode_words(*words: str) -> bytes:
    """Words as bytes, of which no two lists give the same."""
    return json.dumps(words).encode()
