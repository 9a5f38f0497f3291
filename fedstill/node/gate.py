"""The gate of a node: every release passes it, under the policy of the node's owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from fedstill.node.admission import (
    GATE_RULES,
    RESPONSE_RULES,
    TENSOR_RULES,
    QueryFacts,
    ResponseFacts,
    TensorFacts,
    approved_limit,
    first_reason,
    refuse,
    require,
)
from fedstill.node.audit_entries import RESPONSE, ReceivedQuery
from fedstill.node.audit_log import AuditLog, Charge
from fedstill.node.policy import PolicyConfig
from fedstill.node.protected_tensors import protect
from fedstill.node.received_tensors import ReceivedTensors
from fedstill.node.release_ledger import Release, ReleaseLedger
from fedstill.node.replies import ReleaseCost
from fedstill.node.run_budgets import RunBudgets
from fedstill.protocol.digests import chain_digest, digest
from fedstill.protocol.queries import Query
from fedstill.protocol.wire_format import Tensors, WireConfig, bytes_by_kind


class ReleaseEncoder(Protocol):
    """Linear conversion of a node's releases, after noise and before the entry in the audit log."""

    def admit(self, query: Query) -> None:
        """Refuse a query whose response could not be encoded, after all other rules and before any charge."""

    def weight_gradients(self, query: Query, gradients: ReceivedTensors) -> Tensors:
        """Apply the transposed conversion to output gradients, or refuse them; float32 tensors by name."""

    def encode(self, received: ReceivedQuery, part: str, query: Query, released: Tensors) -> Tensors:
        """Return what is sent in place of a release."""

    def record(self, query: Query, released: Tensors) -> None:
        """Record a charged release, before it is handed over."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""


class Gate:
    """Checks the policy, then bounds and noises each release, which its ledger charges and hands over.

    Args:
        node: name of the node.
        policy: the owner's rules.
        audit: the log in which releases are entered and charged before they are handed over.
        run: name of the run.
        payer: whose budgets and limits count; None: the node itself.

    Attributes:
        ledger: states and charges of the releases.
        output_shape: shape of the outputs for one input; None: any.
        encoder: conversion of the releases; None: none.
    """

    def __init__(
        self, node: str, policy: PolicyConfig, audit: AuditLog, run: str = "run", payer: str | None = None
    ) -> None:
        self.node = node
        self.ledger = ReleaseLedger(node, policy, audit, run, node if payer is None else payer)
        self.output_shape: tuple[int, ...] | None = None
        self.encoder: ReleaseEncoder | None = None
        self._reasons: dict[tuple[int, ...], tuple[QueryFacts, str | None]] = {}  # by the facts' identity

    @property
    def policy(self) -> PolicyConfig:
        """The owner's rules."""
        return self.ledger.policy

    @property
    def budgets(self) -> RunBudgets | None:
        """Privacy mechanism and budgets; None: no privacy accounting."""
        return self.ledger.budgets

    def refusal_reason(self, query: Query) -> str | None:
        """Return the rule that forbids this query in general, or None. Nothing is computed or charged."""
        # Once for each declaration, policy and budgets, on which alone it depends.
        key = id(query), id(self.policy), id(self.budgets)
        if key not in self._reasons:
            facts = QueryFacts(query, self.policy, self.budgets)
            self._reasons[key] = facts, first_reason(GATE_RULES, facts)
        return self._reasons[key][1]

    def check_tensors(
        self, received: ReceivedTensors, input_shape: Sequence[int], input_dtype: torch.dtype = torch.float32
    ) -> None:
        """Refuse a malformed message before anything is computed.

        Args:
            received: tensors that came with a query, or output gradients.
            input_shape: shape of one of the node's inputs.
            input_dtype: dtype of the node's inputs.

        Raises:
            QueryRefused: undeclared tensors, tensors of another shape or type than their kind's, too many
                rows, or numbers that are not finite.
        """
        rows = approved_limit(self.ledger.approved, received.query, "rows")
        facts = TensorFacts(self.policy, received, rows, self.output_shape, input_shape, input_dtype)
        require(self.node, received.query, TENSOR_RULES, facts)

    def admit(self, query: Query, received: ReceivedQuery, sent: Tensors) -> Release:
        """Admit a query, or refuse it before anything is computed or charged.

        Args:
            query: its declaration.
            received: the query as received.
            sent: the tensors that came with it, decompressed.

        Raises:
            QueryRefused: the policy forbids it, a limit is reached, or the response would exceed a budget.
        """
        refuse(self.node, query.name, self.refusal_reason(query))
        release = self.ledger.admit(query, received, sent)
        if self.encoder is not None:
            self.encoder.admit(query)
        return release

    def prepare(
        self, release: Release, tensors: Tensors, sent: Tensors, wire: WireConfig | None = None
    ) -> PreparedRelease:
        """Bound tensors and add noise; :func:`hand_over` then charges and releases them.

        Args:
            release: an admitted release whose tensors are computed.
            tensors: tensors to release.
            sent: the tensors that came with the query, decompressed.
            wire: number formats of the message; None is float32.

        Raises:
            QueryRefused: a tensor of undeclared kind, scores of another shape than the task's, numbers that
                cannot be encoded.
            NodeDataError: rows of another width than the query declares, if their cost depends on it.
        """
        query, part, received = release.query, release.part, release.received
        rows = approved_limit(self.ledger.approved, query.name, "rows")
        facts = ResponseFacts(part, query, tensors, sent, rows, self.output_shape)
        require(self.node, query.name, RESPONSE_RULES, facts)
        kinds = facts.kinds
        protected = protect(self.ledger.budgets, release, tensors)
        outgoing = protected.tensors
        if part == RESPONSE and query.details.postprocess is not None:
            outgoing = query.details.postprocess(outgoing, sent)
        if wire is not None:
            outgoing = wire.compress(outgoing, kinds)
        # Without budgets, as in simulations without privacy, a query repeated after a stop counts once.
        release_hash, budgets = "", self.ledger.budgets
        if budgets is not None:
            # The hash includes the query, so that equal responses to two queries are not recognizable.
            past = f"{received.content_hash} {received.history_hash}"
            context = f"{received.number} {part} {past} {digest(part, outgoing)}"
            release_hash = budgets.keyed_hash(chain_digest(context, protected.bounded_digest))
        encoded = outgoing
        if self.encoder is not None:
            encoded = self.encoder.encode(received, part, query, outgoing)
        charge = self.ledger.prepare_charge(
            release,
            release_hash=release_hash,  # before the encoder, whose results may differ each time
            byte_counts=bytes_by_kind(encoded, kinds),
            cost=protected.cost,
            max_cost=protected.max_cost,
            rule=protected.rule,
        )
        return PreparedRelease(self, release, charge, outgoing, encoded)

    def release_cost(self, number: int, part: str) -> ReleaseCost:
        """Return mechanism, cost and history hash of the last release of a query's part.

        With an encoder it includes the sealed hash of the release, by which repeated releases are recognized.
        """
        cost = self.ledger.release_cost(number, part)
        return cost if self.encoder is not None else replace(cost, release_hash="")


@dataclass(frozen=True)
class PreparedRelease:
    """Tensors that are ready to leave through a gate, once they are charged.

    Args:
        gate: the gate.
        release: the release.
        charge: its charge.
        outgoing: tensors to send.
        encoded: what the gate's encoder sends in their place.
    """

    gate: Gate
    release: Release
    charge: Charge
    outgoing: Tensors
    encoded: Tensors


def hand_over(prepared: Sequence[PreparedRelease]) -> None:
    """Charge releases of one node or several on disk, then hand all of them over.

    Releases with the same audit log are charged in one transaction: all of them, or none.

    Raises:
        QueryRefused: more bytes or queries than a policy allows, or more privacy cost than a budget.
        AuditError: a log has a fault or cannot be written; nothing is released then.
    """
    by_log: dict[AuditLog, list[PreparedRelease]] = {}
    for each in prepared:
        by_log.setdefault(each.gate.ledger.audit, []).append(each)
    for audit, charged in by_log.items():
        numbers = audit.charge_all([each.charge for each in charged])
        for each, number in zip(charged, numbers, strict=True):
            each.gate.ledger.confirm_charge(each.release, number)
    for each in prepared:
        if each.gate.encoder is not None:
            each.gate.encoder.record(each.release.query, each.outgoing)
        each.gate.ledger.hand_over(each.release, each.encoded)
