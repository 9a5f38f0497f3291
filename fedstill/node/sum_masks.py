"""Masks of secure aggregation: the server can read only the sum of all members' contributions.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017. Each pair
of nodes agrees on a key (X25519), which gives a stream of numbers (ChaCha20) for each sum: one node adds
it, the other subtracts it. The stream is bound (HKDF) to all that the response depends on and that the
server could send differently to different nodes (:meth:`SumMasks.mask_function`): the run's plan and public
data, all earlier queries, the bits of this query, the sum's number and its members. If a server sends
different values, the masks do not cancel.

If a sum may be read without nodes that fail (``recover``), each node adds a mask of its own as well, so
that a late response stays masked. The remaining nodes first agree, pair by pair, on the set of survivors.
Only then does each reveal its own mask of this sum, and the masks that it shares with the lost nodes. A
node agrees once per sum: either it reveals its own mask, or others reveal those that they share with it,
never both.

Differences from the paper: every process makes new keys, which the node's certificate proves. There are no
secret shares of keys, so a sum is lost if a node fails between agreeing and revealing. Members and
weightings are restricted so that no combination of sums reveals a response
(:mod:`fedstill.node.sum_history`).
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

MAX_OPEN_SUMS = 8  # sums that a server may still finish: responses and gradients of recent queries
KEY_BYTES = 32  # bytes

Mask = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass
class _OpenSum:
    """State of one sum, from its admission to its end.

    Args:
        call: the request.
        weightings: weighting by subject.
        context: bytes to which the masks are bound; empty before the node has added.
        survivors: nodes of which the sum is read, once agreed.
        corrupted: whether random numbers replace this node's contribution.
    """

    call: SumRequest
    weightings: Mapping[str, str] = field(default_factory=dict)
    context: bytes = b""
    survivors: tuple[str, ...] = ()
    corrupted: bool = False


class SumMasks:
    """Masks of one node in one run.

    Args:
        plan: the run's plan as JSON values, with a fingerprint of its public data.
        name: the node's name.
        identity: signs this node's key and verifies those of others.
        policy: the owner's policy.
        history: record of earlier sums.
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
        self._identity, self._own_secret = identity, secrets.token_bytes(KEY_BYTES)
        self._private_key = X25519PrivateKey.generate()
        self._shared_keys: dict[str, bytes] = {}  # secret shared with each other node
        self._open_sums: OrderedDict[int, _OpenSum] = OrderedDict()
        self._last_number = -1

    @classmethod
    def from_folder(
        cls, folder: Path, name: str, policy: PolicyConfig, plan: RunPlan, public: PublicData | None
    ) -> SumMasks:
        """Create the masks of the node in ``folder`` for a run; ``public`` is None if the run has no public
        data.
        """
        identity, cohort = KitIdentity(folder / KIT_FOLDER), SumHistory(folder / SUM_HISTORY_FILE)
        tensors = {} if public is None else public_tensors(public)
        context = {**plan.to_dict(), "public bits": sha256_digest(tensors)}
        return cls(context, name, identity, policy, cohort)

    @property
    def min_nodes(self) -> int:
        """Minimum number of nodes in a sum."""
        return max(self.policy.min_nodes, MIN_SUM_NODES)

    @property
    def has_reached_corruption_limit(self) -> bool:
        """True if this node has corrupted as many sums as its policy allows. All further sums are
        corrupted, so that neither its responses nor its identity can be inferred.
        """
        return 0 < self.policy.max_corrupted_sums <= self.history.corrupted

    # --- identities -----------------------------------------------------------------------------------

    def make_key_card(self) -> bytes:
        """Return the node's public key for this run and process, with its certificate and signature."""
        public = self._private_key.public_key().public_bytes_raw()
        return self._identity.sign(self._key_claim(self.name, public), public)

    def exchange_keys(self, cards: Mapping[str, bytes]) -> None:
        """Agree on a shared key with each node that sent a card.

        Raises:
            QueryRefused: the authority's certificate does not prove a card, this node's own card is
                missing, or two cards have one key.
        """
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

        shared_keys, own_key = {}, self._private_key.public_key().public_bytes_raw()
        seen_keys: set[bytes] = set()
        for name, card in cards.items():
            try:
                public = self._identity.verify(card, name, partial(self._key_claim, name))
                if public in seen_keys:  # with a copied key, masks cancel in a sum of fewer nodes
                    raise ValueError("it has another node's key")
                seen_keys.add(public)
                if name == self.name:
                    if public != own_key:
                        raise ValueError("it has another key for this node")
                    continue
                secret = self._private_key.exchange(X25519PublicKey.from_public_bytes(public))
            except ValueError as error:
                raise QueryRefused(
                    self.name, "receive_keys", f"sums: the card of {name!r}: {error}"
                ) from error
            pair = sorted(((self.name, own_key.hex()), (name, public.hex())))
            shared_keys[name] = _derive_key(secret, b"pair" + _encode_strings(*pair[0], *pair[1]))
        if self.name not in cards:
            raise QueryRefused(self.name, "receive_keys", "sums: this node's own card is missing")
        self._shared_keys = shared_keys
        self._open_sums.clear()  # they belong to the earlier keys

    def _key_claim(self, name: str, public: bytes) -> bytes:
        return _encode_strings("fedstill sums", self._plan_hash, name, public.hex())

    # --- one sum ----------------------------------------------------------------------------------------

    def admit(
        self, query: str, request: SumRequest | None, weightings: Mapping[str, str] | None = None
    ) -> SumRequest:
        """Admit a sum, or refuse it before anything is computed.

        Args:
            query: name of the query.
            request: the requested sum.
            weightings: statistic and weighting of the contribution (:meth:`NodeSide.weightings`).

        Raises:
            QueryRefused: no sum is requested; too few members, or members without exchanged keys; a number
                that is not above all earlier ones; other members or weightings than before.
        """
        if request is None:
            raise QueryRefused(self.name, query, "sums: responses of this run are released under masks only")
        unknown = sorted(set(request.members) - {*self._shared_keys, self.name})
        rule = None
        if request.number <= self._last_number:  # repeated messages are handled before this call
            rule = f"number {request.number} is not above {self._last_number}"
        elif self.name not in request.members:
            rule = "this node is not a member"
        elif unknown:
            rule = f"{', '.join(unknown)}: no keys were exchanged with them"
        elif len(request.members) < self.min_nodes:
            rule = f"{len(request.members)} members (expected {self.min_nodes} or more)"
        elif request.recover and not self.policy.sums_may_differ:
            rule = f"no sum is read without failed nodes, {UNLESS_ALLOWED}"
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

    def mask_function(self, request: SumRequest, query: str, context_hashes: Sequence[str]) -> Mask:
        """Return a function that adds the mask to each tensor (given the tensor and its index) of this
        node's response.

        Args:
            request: the sum, as admitted.
            query: name of the query and of the part.
            context_hashes: hashes of everything sent to this node on which the response depends.

        Raises:
            QueryRefused: the sum was not admitted, or was for another response: no mask is used twice.
        """
        members = sorted(request.members)
        context = _encode_strings(
            self._plan_hash,
            query,
            str(request.number),
            str(request.recover),
            *members,
            "inputs",
            *context_hashes,
        )
        open_sum = self._open_sum(request.number, query)
        if open_sum.context not in (b"", context):
            raise QueryRefused(self.name, query, f"sums: number {request.number} was used for another sum")
        open_sum.context = context
        self.history.record_sum(request.members, open_sum.weightings)
        keys = {name: self._pairwise_key(name, context) for name in members if name != self.name}

        def add_mask(tensor: torch.Tensor, index: int) -> torch.Tensor:
            masked = tensor.clone()
            for name, key in keys.items():
                masked += mask_sign(self.name, name) * mask_tensor(key, index, tensor.shape)
            return (
                masked + mask_tensor(self._own_mask_key(context), index, tensor.shape)
                if request.recover
                else masked
            )

        return add_mask

    def check_weights(self, weighting: str, counts: torch.Tensor) -> None:
        """Record these counts as the weights of all runs, or refuse them.

        Raises:
            QueryRefused: earlier sums had other counts: the data grew, or labels or their order changed.
        """
        rule = self.history.record_weights(
            weighting, sha256_digest({weighting: counts}), self.policy.sums_may_differ
        )
        if rule is not None:
            raise QueryRefused(self.name, "counts", f"sums: {rule}, {UNLESS_ALLOWED}")

    def random_replacement_function(self, request: SumRequest) -> Replacement:
        """Return a function that generates random integers, known to this node only, in place of a response
        that cannot be added.
        """
        open_sum = self._open_sum(request.number, "answer_query")

        def random_numbers(shape: Sequence[int], index: int) -> torch.Tensor:
            if not open_sum.corrupted:
                open_sum.corrupted = True
                if not self.has_reached_corruption_limit:
                    self.history.count_corrupted_sum()
                logger.warning("sum %d was corrupted here (policy.max_corrupted_sums)", request.number)
            return mask_tensor(_derive_key(self._own_secret, b"corrupted" + open_sum.context), index, shape)

        return random_numbers

    def confirm_survivors(self, number: int, survivors: Sequence[str]) -> dict[str, str]:
        """Return this node's confirmation of the survivors, one code for each other survivor. It agrees
        once per sum.

        Raises:
            QueryRefused: it has agreed on others, they are too few, or they are no subset of the members.
        """
        open_sum, ordered = self._open_sum(number, "confirm_survivors"), tuple(sorted(survivors))
        rule = None
        if not open_sum.context:
            rule = "this node has not added to it"
        elif not open_sum.call.recover:
            rule = "it is read from all its members"
        elif open_sum.survivors not in ((), ordered):
            rule = "this node has agreed on other survivors"
        elif not {self.name} <= set(ordered) <= set(open_sum.call.members) or len(set(ordered)) < len(
            ordered
        ):
            rule = "survivors must be members, including this node"
        elif len(ordered) < self.min_nodes:
            rule = f"{len(ordered)} survivors (expected {self.min_nodes} or more)"
        if rule is not None:
            raise QueryRefused(self.name, "confirm_survivors", f"sums: {rule}")
        open_sum.survivors = ordered
        receivers = [name for name in ordered if name != self.name]
        return {name: self._agreement_code(open_sum, self.name, name) for name in receivers}

    def reveal_mask_keys(self, number: int, codes: Mapping[str, str]) -> dict[str, str]:
        """Return keys as hexadecimal digits: of this node's own mask under its own name, and of the masks
        that it shares with lost nodes under their names.

        Args:
            number: the sum's number.
            codes: confirmations of the other survivors.

        Raises:
            QueryRefused: not all survivors have agreed on the same set.
        """
        open_sum = self._open_sum(number, "reveal_masks")
        others = set(open_sum.survivors) - {self.name}
        is_complete = bool(open_sum.survivors) and set(codes) == others
        if not is_complete or not all(
            hmac.compare_digest(codes[name], self._agreement_code(open_sum, name, self.name))
            for name in others
        ):
            rule = "sums: not all survivors have confirmed the same set"
            raise QueryRefused(self.name, "reveal_masks", rule)
        lost = set(open_sum.call.members) - set(open_sum.survivors)
        shared_keys = {name: self._pairwise_key(name, open_sum.context).hex() for name in sorted(lost)}
        return {self.name: self._own_mask_key(open_sum.context).hex(), **shared_keys}

    # --- keys -------------------------------------------------------------------------------------------

    def _open_sum(self, number: int, query: str) -> _OpenSum:
        if number not in self._open_sums:
            raise QueryRefused(self.name, query, f"sums: number {number} is unknown")
        return self._open_sums[number]

    def _pairwise_key(self, name: str, context: bytes) -> bytes:
        return _derive_key(self._shared_keys[name], b"mask" + context)

    def _own_mask_key(self, context: bytes) -> bytes:
        return _derive_key(self._own_secret, b"own" + context)

    def _agreement_code(self, open_sum: _OpenSum, sender: str, receiver: str) -> str:
        partner = receiver if sender == self.name else sender
        context = b"word" + open_sum.context + _encode_strings(sender, receiver, *open_sum.survivors)
        return _derive_key(self._shared_keys[partner], context).hex()


def mask_sign(name: str, other: str) -> int:
    """Return 1 if the first of two nodes adds their shared mask, and -1 if it subtracts it."""
    return 1 if name < other else -1


def mask_tensor(key: bytes, index: int, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor of 64-bit integers that look random without the key; equal keys and indices give
    equal numbers.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    count = torch.Size(shape).numel()
    if not count:
        return torch.zeros(tuple(shape), dtype=torch.int64)
    nonce = bytes(8) + index.to_bytes(8, "little")  # block counter and tensor index
    encryptor = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor()
    numbers = bytearray(encryptor.update(bytes(8 * count)))
    return torch.frombuffer(numbers, dtype=torch.int64).reshape(tuple(shape))


def _derive_key(secret: bytes, context: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), KEY_BYTES, salt=None, info=b"fedstill 1 " + context).derive(secret)


def _encode_strings(*words: str) -> bytes:
    """Encode words as bytes, differently for any two lists."""
    return json.dumps(words).encode()
