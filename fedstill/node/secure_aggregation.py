"""Secure aggregation at a node (experimental): the node's releases leave it as masked parts of sums.

The gate bounds, noises and charges a release as always; its encoder then makes the release a contribution
to a sum over nodes. :class:`SumEncoder` multiplies by the node's weight and encodes as integers, for nodes in
the server's process. :class:`MaskedReleases` adds the masks, for deployed nodes. It holds the node's whole
state of secure aggregation: :class:`SumMasks` (keys and open sums of one process), :class:`SumHistory`
(members, weightings and weights of all sums, on disk), the released counts, and a hash of all queries.

The protocol is a variation on Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine
Learning", CCS 2017, without an outside review. Each pair of nodes agrees on a key
(X25519), which gives a stream of numbers (ChaCha20) for each sum: one node adds it, the other subtracts it.
The stream is bound (HKDF) to all that the response depends on and that the server could send differently to
different nodes: the run's plan and public data, all earlier queries, the bits of this query, the sum's
number and its members. If a server sends different values, the masks do not cancel.

If a sum may be read without nodes that fail (``recover``), each node adds a mask of its own as well, so
that a late response stays masked. The remaining nodes first agree, pair by pair, on the set of survivors.
Only then does each reveal its own mask of this sum, and the masks that it shares with the lost nodes. A
node agrees once per sum: either it reveals its own mask, or others reveal those that they share with it,
never both.

Differences from the paper: every process makes new keys, which the node's certificate proves. There are no
secret shares of keys, so a sum is lost if a node fails between agreeing and revealing. Members and
weightings are restricted so that no combination of sums reveals a response (:class:`SumHistory`).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedstill.core import private_files
from fedstill.core.errors import ArgumentError, DataError, QueryMismatch, QueryRefused, RunFolderError
from fedstill.core.startup_kit import KIT_FOLDER
from fedstill.data.public import PublicData
from fedstill.node.audit_entries import GRADIENT, RESPONSE, ReceivedQuery
from fedstill.node.exchanges import MAX_EXCHANGES
from fedstill.node.gate import Gate
from fedstill.node.kit_identity import KitIdentity
from fedstill.node.policy import PolicyConfig
from fedstill.node.received_tensors import ReceivedTensors
from fedstill.node.replies import AgreementCodes, ReplyPayload
from fedstill.node.request_handler import RequestHandler, release_gradients, release_responses
from fedstill.node.run_folder import RELEASED_COUNTS, RunFolder
from fedstill.protocol.digests import chain_digest, sha256_digest
from fedstill.protocol.messages import ConfirmSurvivors, ReceiveKeys, RevealMasks, SendKeys, SumMessage
from fedstill.protocol.node_side import NodeSide
from fedstill.protocol.queries import Query
from fedstill.protocol.run_plan import RunPlan, public_tensors
from fedstill.protocol.secure_aggregation import (
    KEY_BYTES,
    MIN_SUM_NODES,
    Replacement,
    SumRequest,
    SumWeighting,
    broadcast_weight,
    derive_key,
    encode_strings,
    mask_sign,
    mask_tensor,
    node_weight,
    power_of_two_scale,
    sum_contributions,
)
from fedstill.protocol.wire_format import Tensors

logger = logging.getLogger("fedstill.node")

SUM_HISTORY_FILE = "summed.json"
UNMASKED = "sums: responses of this run are released under masks only"
UNLESS_ALLOWED = "unless its owner sets sums_may_differ = true"
MAX_OPEN_SUMS = 8  # sums that a server may still finish: responses and gradients of recent queries

Mask = Callable[[torch.Tensor, int], torch.Tensor]


# --- weights and integers ------------------------------------------------------------------------------


class SumEncoder:
    """Encoder of a gate whose releases are added over nodes, without masks: weights, then integers.

    Args:
        gate: the node's gate, which gets this encoder.

    Attributes:
        counts: counts that the node has released, with noise if required, by weighting. They weight its
            responses; nothing else that has not passed the gate does. Only the first release counts.
    """

    def __init__(self, gate: Gate) -> None:
        self.gate, self.counts = gate, dict[str, torch.Tensor]()
        gate.encoder = self

    @property
    def has_noisy_counts(self) -> bool:
        """True if a mechanism adds noise to the node's counts, other noise in each run."""
        return self.gate.budgets is not None and self.gate.budgets.mechanism.protects

    def admit(self, query: Query) -> None:
        """Refuse a summed query before anything is computed, if counts that weight it were not queried."""
        for weighting in query.sums.values():
            if weighting in ("size", "counts") and weighting not in self.counts:
                rule = f"sums: '{weighting}' of its data, which weight its response, were not queried before"
                raise QueryRefused(self.gate.node, query.name, rule)

    def weight_gradients(self, query: Query, gradients: ReceivedTensors) -> Tensors:
        """Multiply output gradients of a sum by the node's weight in it, as the response was."""
        weighted = dict(gradients.decompressed)
        for name, weighting in query.sums.items():
            weight = node_weight(weighting, self.counts)
            if weight is not None and name in weighted:
                weighted[name] = weighted[name] * broadcast_weight(weight, weighted[name]).to(weighted[name])
        return weighted

    def encode(self, received: ReceivedQuery, part: str, query: Query, released: Tensors) -> Tensors:
        """Return the contribution to a sum in place of a release: 64-bit integers by name.

        Raises:
            QueryRefused: numbers are not finite. Without masks nothing hides whose they are.
        """
        return self.contribution(query, released) if query.sums else released

    def contribution(
        self,
        query: Query,
        released: Tensors,
        replacement: Replacement | None = None,
        always_replace: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Return :func:`~fedstill.protocol.secure_aggregation.sum_contributions` with this node's weights."""
        try:
            return sum_contributions(
                released, query.released_kinds(), query.sums, self.counts, replacement, always_replace
            )
        except DataError as error:
            raise QueryRefused(self.gate.node, query.name, f"sums: {error}") from error

    def record(self, query: Query, released: Tensors) -> None:
        """Use released counts as weights from now on.

        Noise may leave one node alone with a positive count of a class that no node has, and the sum would
        be that node's response. So noisy counts are raised to one.
        """
        least = 1.0 if self.has_noisy_counts else 0.0
        for weighting, counts in _released_counts(query, released):
            self.counts = {weighting: counts.clamp_min(least), **self.counts}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {"released": self.counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state. Counts that were released since stay: other weights of the same responses
        would reveal them.
        """
        self.counts = {**state["released"], **self.counts}


def _released_counts(query: Query, released: Tensors) -> Iterator[tuple[SumWeighting, torch.Tensor]]:
    """Yield the counts and sizes in a release, with their weighting."""
    kinds = query.released_kinds()
    for name, tensor in released.items():
        if kinds[name].category == "counts" and query.sums.get(name) == "sum":
            yield "counts" if tensor.ndim else "size", tensor.detach().cpu().clone()


# --- masks ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Contribution:
    """One part of a query (response or gradients) that is added under masks.

    Args:
        request: the sum, as it was admitted; None for a query without a sum.
        context: hashes of everything sent to this node on which the part depends.
    """

    request: SumRequest | None
    context: tuple[str, str]


class MaskedReleases(SumEncoder):
    """Secure aggregation of one deployed node in one run.

    Queries pass through :meth:`respond` and :meth:`backward` to the request handler; the gate then calls
    this object as its encoder. A repeated request gets the same masked bytes, or is refused: no mask serves
    two payloads.

    Args:
        masks: the node's masks in this run.
        gate: the node's gate.
        side: the method's part at the nodes.
        folder: the run's folder, where released counts are stored; None: not stored.

    Attributes:
        query_history_hash: hash of all queries received, in order; every node can compute the same.
    """

    def __init__(self, masks: SumMasks, gate: Gate, side: NodeSide, folder: RunFolder | None = None) -> None:
        super().__init__(gate)
        self.masks, self.side, self._folder = masks, side, folder
        self.query_history_hash = ""
        self._incoming: tuple[int, SumRequest | None] = -1, None  # query number and request
        self._contributions: OrderedDict[tuple[int, str], _Contribution] = OrderedDict()

    def resume(self) -> None:
        """Load the counts that an earlier process has released in this run."""
        if self._folder is not None:
            self.counts = {**(self._folder.load_state(RELEASED_COUNTS) or {}), **self.counts}

    def restart(self) -> None:
        """Forget recent queries, for a node that returned to a checkpoint. Sum numbers stay used."""
        self._contributions.clear()

    # --- a query and its gradients ------------------------------------------------------------------------

    def respond(
        self,
        handler: RequestHandler,
        number: int,
        received: ReceivedTensors,
        differentiable: bool,
        request: SumRequest | None,
    ) -> Tensors:
        """Return the masked response to a query, as :class:`~fedstill.node.plain_releases.PlainReleases`.

        Raises:
            QueryMismatch: the query came before, for another sum.
        """
        known = self._contributions.get((number, RESPONSE))
        if known is not None and known.request != request:
            raise QueryMismatch(self.gate.node, received.query, number)
        if known is None and handler.has_responded(number):  # no sum is bound to the response
            raise QueryMismatch(self.gate.node, received.query, number)
        query_hash = self._hash_query(number, received, differentiable, request)
        self._incoming = number, request
        handler.admit_query(received, number, differentiable)
        if known is None:
            # Before anything is computed: whatever happens then, later masks differ from those without it.
            previous, self.query_history_hash = self.query_history_hash, query_hash
            self._keep(number, RESPONSE, request, (query_hash, ""))
            try:
                handler.compute_responses(number)
            except BaseException:  # networks may have changed
                self.query_history_hash = chain_digest(previous, f"{number} {query_hash} failed")
                del self._contributions[number, RESPONSE]
                raise
        return release_responses([handler], number)[self.gate.node]

    def backward(
        self, handler: RequestHandler, number: int, received: ReceivedTensors, request: SumRequest | None
    ) -> Tensors:
        """Return masked input gradients, as :class:`~fedstill.node.plain_releases.PlainReleases`.

        Raises:
            QueryMismatch: the gradients came before, for another sum.
        """
        known = self._contributions.get((number, GRADIENT))
        if known is not None and known.request != request:
            raise QueryMismatch(self.gate.node, "gradient", number)
        self._incoming, by_node = (number, request), {self.gate.node: received}
        try:
            handler.compute_gradients(number, by_node)
        except BaseException:
            if known is None:
                self._contributions.pop((number, GRADIENT), None)
            raise
        return release_gradients([handler], number)[self.gate.node]

    def _keep(self, number: int, part: str, request: SumRequest | None, context: tuple[str, str]) -> None:
        self._contributions[number, part] = _Contribution(request, context)
        while len(self._contributions) > 4 * MAX_EXCHANGES:  # more than the handler keeps
            self._contributions.popitem(last=False)

    def _hash_query(
        self, number: int, received: ReceivedTensors, differentiable: bool, request: SumRequest | None
    ) -> str:
        """Return a hash of a query and of all earlier queries."""
        # A node that comes back has missed queries. Only summed queries with recovery may ignore the history:
        # only sums can be read without some nodes.
        name, tensors = received.query, received.sent
        summed = bool(self.side.queries[name].sums)
        history = "" if summed and request is not None and request.recover else self.query_history_hash
        return sha256_digest(
            tensors, name, str(number), str(differentiable), history, _memory_layout(tensors)
        )

    # --- the gate's encoder -------------------------------------------------------------------------------

    def admit(self, query: Query) -> None:
        """Admit the sum of a response, or refuse it before anything is computed."""
        if (rule := self._unmasked_rule(query)) is not None:
            raise QueryRefused(self.gate.node, query.name, rule)
        if query.sums:
            super().admit(query)
            self.masks.admit(query.name, self._incoming[1], self._weightings(query))

    def weight_gradients(self, query: Query, gradients: ReceivedTensors) -> Tensors:
        """Admit the sum of input gradients, and multiply output gradients by the node's weight.

        Raises:
            QueryRefused: gradients of other outputs, or at another scale; or as :meth:`SumMasks.admit`.
        """
        number, request = self._incoming
        if query.sums:
            decompressed, rule = gradients.decompressed, None
            if decompressed.keys() != query.sums.keys():
                rule = f"sums: expected gradients of {', '.join(query.sums)} only"
            elif power_of_two_scale(decompressed) != 1.0:
                rule = "sums: expected gradients with a scale of 1 (largest value from 0.5 to below 1)"
            if rule is not None:
                raise QueryRefused(self.gate.node, query.name, rule)
            super().admit(query)
            self.masks.admit(query.name, request, self._weightings(query))
        response = self._contributions[number, RESPONSE].context[0]
        gradients_hash = sha256_digest(gradients.sent, _memory_layout(gradients.sent))
        self._keep(number, GRADIENT, request, (response, gradients_hash))
        return super().weight_gradients(query, gradients)

    def encode(self, received: ReceivedQuery, part: str, query: Query, released: Tensors) -> Tensors:
        """Return the masked contribution to a sum in place of a release.

        Raises:
            QueryRefused: the sum was used for another payload, or counts differ from those of earlier sums.
        """
        if not released:
            return released
        contribution, masks = self._contributions[received.number, part], self.masks
        request = contribution.request
        if not query.sums or request is None:  # refused by admit already: nothing leaves without a mask
            raise QueryRefused(self.gate.node, query.name, UNMASKED)
        add_mask = masks.mask_function(request, query.name, contribution.context)
        replacement = masks.random_replacement_function(request)
        parts = self.contribution(query, released, replacement, masks.has_reached_corruption_limit)
        if not self.has_noisy_counts:
            for weighting, counts in _released_counts(query, released):
                masks.check_weights(weighting, counts)
        return {name: add_mask(parts[name], index) for index, name in enumerate(sorted(parts))}

    def record(self, query: Query, released: Tensors) -> None:
        """Use released counts as weights, from now on and in later processes: on disk before the release."""
        before = self.counts
        super().record(query, released)
        if self._folder is not None and self.counts.keys() != before.keys():
            recorded, self.counts = self.counts, before
            self._folder.save_state(RELEASED_COUNTS, recorded)
            self.counts = recorded

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {**super().state_dict(), "query_history_hash": self.query_history_hash}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        super().load_state_dict(state)
        self.query_history_hash = state["query_history_hash"]

    # --- rules and messages -------------------------------------------------------------------------------

    def rules_by_refused_query(self) -> dict[str, str]:
        """Return the rule that refuses each query whose response cannot be added, or not after earlier sums;
        checked before any training.
        """
        queries = self.side.queries.items()
        rules = {name: rule for name, query in queries if (rule := self._unmasked_rule(query)) is not None}
        if self.masks.policy.sums_may_differ:
            return rules
        return {**self.masks.history.weighting_conflicts(self.side, self._run_name_if_noised), **rules}

    @staticmethod
    def _unmasked_rule(query: Query) -> str | None:
        return UNMASKED if query.released_kinds() and not query.sums else None

    def _weightings(self, query: Query) -> Mapping[str, str]:
        return self.side.weightings(query.name, self._run_name_if_noised)

    @property
    def _run_name_if_noised(self) -> str:
        """Name of the run if counts have noise, which differs from run to run; else empty."""
        return self.gate.ledger.run if self.has_noisy_counts else ""

    def serve(self, message: SumMessage, tensors: Tensors) -> tuple[ReplyPayload, Tensors]:
        """Serve a message that nodes exchange through the server."""
        match message:
            case SendKeys():
                return None, {"card": torch.tensor(list(self.masks.make_key_card()), dtype=torch.uint8)}
            case ReceiveKeys():
                for name, card in tensors.items():
                    if card.dtype != torch.uint8 or card.ndim != 1:
                        description = f"{card.dtype} {tuple(card.shape)}"
                        raise ArgumentError(f"card of {name}", description, "bytes: uint8, (N,)")
                self.masks.exchange_keys({name: card.numpy().tobytes() for name, card in tensors.items()})
                return None, {}
            case ConfirmSurvivors():
                return AgreementCodes(self.masks.confirm_survivors(message.sum, message.survivors)), {}
            case RevealMasks():
                return AgreementCodes(self.masks.reveal_mask_keys(message.sum, message.words)), {}
            case _:
                raise ArgumentError("operation", message.operation, "a message of secure aggregation")


def _memory_layout(tensors: Tensors) -> str:
    """Return the strides of tensors as text. Equal values in another layout give responses with other last
    digits.
    """
    return " ".join(f"{name}{tuple(tensor.stride())}" for name, tensor in sorted(tensors.items()))


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
        history: SumHistory,
    ) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self.name, self.policy, self.history = name, policy, history
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
        identity, history = KitIdentity(folder / KIT_FOLDER), SumHistory(folder / SUM_HISTORY_FILE)
        tensors = {} if public is None else public_tensors(public)
        context = {**plan.to_dict(), "public bits": sha256_digest(tensors)}
        return cls(context, name, identity, policy, history)

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
            shared_keys[name] = derive_key(secret, b"pair" + encode_strings(*pair[0], *pair[1]))
        if self.name not in cards:
            raise QueryRefused(self.name, "receive_keys", "sums: this node's own card is missing")
        self._shared_keys = shared_keys
        self._open_sums.clear()  # they belong to the earlier keys

    def _key_claim(self, name: str, public: bytes) -> bytes:
        return encode_strings("fedstill sums", self._plan_hash, name, public.hex())

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
            raise QueryRefused(self.name, query, UNMASKED)
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
        context = encode_strings(
            self._plan_hash,
            query,
            str(request.number),
            str(request.recover),
            *members,
            "inputs",
            *context_hashes,
        )
        open_sum = self._open_sum(request.number, query)
        if open_sum.call != request or open_sum.context not in (b"", context):
            raise QueryRefused(self.name, query, f"sums: number {request.number} was used for another sum")
        self.history.record_sum(request.members, open_sum.weightings)
        open_sum.context = context
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
                if not self.has_reached_corruption_limit:
                    self.history.count_corrupted_sum()
                open_sum.corrupted = True
                logger.warning("sum %d was corrupted here (policy.max_corrupted_sums)", request.number)
            return mask_tensor(derive_key(self._own_secret, b"corrupted" + open_sum.context), index, shape)

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
        return derive_key(self._shared_keys[name], b"mask" + context)

    def _own_mask_key(self, context: bytes) -> bytes:
        return derive_key(self._own_secret, b"own" + context)

    def _agreement_code(self, open_sum: _OpenSum, sender: str, receiver: str) -> str:
        partner = receiver if sender == self.name else sender
        context = b"word" + open_sum.context + encode_strings(sender, receiver, *open_sum.survivors)
        return derive_key(self._shared_keys[partner], context).hex()


# --- history of sums ------------------------------------------------------------------------------------


class SumHistory:
    """Members and weightings of all sums to which this node has added, kept in a file over all runs.

    The difference of two sums with different members is the sum of the responses of the nodes that were in
    only one of them. Large differences are not enough either: a sum of seven nodes minus two sums of three
    of them is one node's response, and six of the seven see only two of the sums. So a node adds only with
    the members with which it has added before. If the owner allows other members, all sets are recorded, so
    that none of them is accepted once the permission is withdrawn.

    Sums of the same members are not harmless in any number either. The sums over three nodes of their
    logits with equal weights, by size and by counts are three equations with three unknowns; so are sums of
    log-probabilities and of entropies, which are functions of the same logits. So a node adds one statistic
    of its networks' outputs with one weighting, in all runs and queries (:meth:`NodeSide.weightings`). All
    that a server reads are then values and derivatives of one function, the weighted sum of the nodes'
    functions, and any other nodes with the same sum would have sent the same.

    Attributes:
        member_sets: sets of members of earlier sums.
        corrupted: number of sums in which random numbers replaced this node's response, because it could
            not be added. A server sees that a sum is corrupted; if it chooses the inputs, each such sum
            reveals one bit of a response.
        weightings: weightings of earlier sums, by subject.
        weight_digests: digest of the weights, by weighting.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        sets, self.corrupted, forms, self.weight_digests = (
            _read_history(path) if path.exists() else ([], 0, {}, {})
        )
        self.member_sets = [frozenset(names) for names in sets]
        self.weightings = {subject: frozenset(names) for subject, names in forms.items()}

    def member_conflict(self, members: Sequence[str]) -> str | None:
        """Return the reason why a sum of these members, together with earlier ones, could reveal responses;
        or None.

        >>> history = SumHistory(Path("none.json"))
        >>> history.member_sets = [frozenset("abcd")]
        >>> history.member_conflict("abc")
        'it would add with and without d, and the difference would reveal their responses'
        """
        changed = {name for earlier in self.member_sets for name in earlier ^ set(members)}
        if not changed:
            return None
        changed_names = " and ".join(sorted(changed))
        return (
            f"it would add with and without {changed_names}, and the difference would reveal their responses"
        )

    def weighting_conflict(self, weightings: Mapping[str, str]) -> str | None:
        """Return the reason why sums of these weightings, together with earlier ones, could reveal
        responses; or None.

        >>> history = SumHistory(Path("none.json"))
        >>> history.weightings = {"outputs": frozenset({"logits by size"})}
        >>> history.weighting_conflict({"outputs": "logits by mean"})
        'it has added logits by size, and would add logits by mean: both could reveal single responses'
        >>> history.weighting_conflict({"parameters": "parameters by size"})
        """
        for subject, weighting in weightings.items():
            if others := self.weightings.get(subject, frozenset()) - {weighting}:
                earlier = ", ".join(sorted(others))
                return (
                    f"it has added {earlier}, and would add {weighting}: both could reveal single responses"
                )
        return None

    def weighting_conflicts(self, side: NodeSide, run: str = "") -> dict[str, str]:
        """Return the queries of a method with a :meth:`weighting_conflict`, and the reason for each.

        ``run`` as in :meth:`NodeSide.weightings`.
        """
        reasons = {name: self.weighting_conflict(side.weightings(name, run)) for name in side.queries}
        return {
            name: f"sums: {reason}, {UNLESS_ALLOWED}"
            for name, reason in reasons.items()
            if reason is not None
        }

    def record_sum(self, members: Sequence[str], weightings: Mapping[str, str] | None = None) -> None:
        """Record a sum of these members and weightings, on disk before the release."""
        sets = [frozenset(members)] if frozenset(members) not in self.member_sets else []
        updated = {
            name: self.weightings.get(name, frozenset()) | {weighting}
            for name, weighting in (weightings or {}).items()
        }
        if sets or any(self.weightings.get(subject) != recorded for subject, recorded in updated.items()):
            self._save(self.member_sets + sets, {**self.weightings, **updated})

    def record_weights(self, weighting: str, digest: str, may_differ: bool = False) -> str | None:
        """Record a node's counts or size, on disk before their release, or return the reason why they may
        not be released.

        With other weights a sum of the same responses is another equation, and the difference of two sums
        of counts is what one node's data gained. The file holds a digest of the weights for each weighting.

        Args:
            weighting: ``"counts"`` or ``"size"``.
            digest: digest of the weights.
            may_differ: accept weights that differ from earlier ones.

        >>> history = SumHistory(Path("none.json"))
        >>> history.weight_digests = {"counts": "8a31"}
        >>> history.record_weights("counts", "07f2")
        'its counts differ from those of its earlier sums, and both could reveal its responses'
        """
        if self.weight_digests.get(weighting) == digest:
            return None
        if weighting in self.weight_digests and not may_differ:
            return (
                f"its {weighting} differ from those of its earlier sums, and both could reveal its responses"
            )
        self._save(weight_digests={**self.weight_digests, weighting: digest})
        return None

    def count_corrupted_sum(self) -> None:
        """Count one more corrupted sum, on disk before the release."""
        self._save(corrupted=self.corrupted + 1)

    def _save(
        self,
        member_sets: list[frozenset[str]] | None = None,
        weightings: dict[str, frozenset[str]] | None = None,
        corrupted: int | None = None,
        weight_digests: dict[str, str] | None = None,
    ) -> None:
        """Write the file with these values, and then take them over: a failed write leaves nothing that a
        repeated request would count as recorded.

        Raises:
            OSError: the file cannot be written.
        """
        member_sets = self.member_sets if member_sets is None else member_sets
        weightings = self.weightings if weightings is None else weightings
        corrupted = self.corrupted if corrupted is None else corrupted
        weight_digests = self.weight_digests if weight_digests is None else weight_digests
        table = {
            "sets": [sorted(names) for names in member_sets],
            "corrupted": corrupted,
            "weightings": {subject: sorted(names) for subject, names in weightings.items()},
            "weights": weight_digests,
        }
        private_files.replace_file(self._path, json.dumps(table).encode(), sync=True)
        self.member_sets, self.weightings = member_sets, weightings
        self.corrupted, self.weight_digests = corrupted, weight_digests


def _read_history(path: Path) -> tuple[list[list[str]], int, dict[str, list[str]], dict[str, str]]:
    """Read the file.

    Raises:
        RunFolderError: the file has another content, so that earlier sums are not known.
    """
    fault = RunFolderError(f"{path} is not a record of earlier sums")
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        sets, corrupted, weightings = table["sets"], table["corrupted"], table["weightings"]
        weights, lists = dict(table["weights"]), [*sets, *weightings.values()]
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise fault from error
    if not isinstance(sets, list) or not all(isinstance(names, list) for names in lists):
        raise fault
    if not all(isinstance(name, str) for names in (*lists, weights.values()) for name in names):
        raise fault
    if type(corrupted) is not int or corrupted < 0:
        raise fault
    return sets, corrupted, weightings, weights
