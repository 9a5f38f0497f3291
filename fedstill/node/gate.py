"""The gate of a node: every release passes it, under the policy of the node's owner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from fedstill.node.admission import (
    CHARGE_RULES,
    GATE_RULES,
    RESPONSE_RULES,
    TENSOR_RULES,
    ChargeFacts,
    QueryFacts,
    ResponseFacts,
    TensorFacts,
    approved_limit,
    first_reason,
    require,
)
from fedstill.node.audit_entries import GRADIENT, NO_GUARANTEE, RESPONSE, Entry, ReceivedQuery
from fedstill.node.audit_log import AuditLog, Spending
from fedstill.node.policy import PolicyConfig
from fedstill.node.replies import ReleaseCost
from fedstill.node.run_budgets import RunBudgets
from fedstill.privacy.events import PrivacyCost, cost_to_dict, total_cost
from fedstill.protocol.digests import chain_digest, digest
from fedstill.protocol.queries import Query
from fedstill.protocol.run_plan import RunDescription
from fedstill.protocol.wire_format import Tensors, WireConfig, bytes_by_kind

# Names of noise streams by part: another name gives other noise.
NOISE_PARTS = {RESPONSE: "answer", GRADIENT: "gradient"}


class ReleaseEncoder(Protocol):
    """Linear conversion of a node's releases, after noise and before the entry in the audit log."""

    def admit(self, query: Query) -> None:
        """Refuse a query whose response could not be encoded, after all other rules and before any charge."""

    def weight_gradients(self, query: Query, gradients: Tensors) -> dict[str, torch.Tensor]:
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
    """Checks the policy, then bounds, noises, charges and audits each release, in this order.

    Args:
        node: name of the node.
        policy: the owner's rules.
        audit: the log in which releases are entered and charged before they are handed over.
        run: name of the run.
        payer: whose budgets and limits count; None: the node itself.

    Attributes:
        approved: description that the owner approved; None: policy alone decides.
        output_shape: shape of the outputs for one input; None: any.
        budgets: privacy mechanism and budgets; None: no privacy accounting.
        encoder: conversion of the releases; None: none.
    """

    def __init__(
        self, node: str, policy: PolicyConfig, audit: AuditLog, run: str = "run", payer: str | None = None
    ) -> None:
        self.node, self.policy, self.audit, self.run = node, policy, audit, run
        self.payer = node if payer is None else payer
        self.approved: RunDescription | None = None
        self.output_shape: tuple[int, ...] | None = None
        self.budgets: RunBudgets | None = None
        self.encoder: ReleaseEncoder | None = None
        self._entry_numbers: dict[tuple[int, str], int] = {}  # last entry, by query number and part

    def refusal_reason(self, query: Query) -> str | None:
        """Return the rule that forbids this query in general, or None. Nothing is computed or charged."""
        return first_reason(GATE_RULES, QueryFacts(query, self.policy, self.budgets))

    def check_tensors(
        self,
        query: str,
        tensors: Tensors,
        sends: Mapping[str, str],
        input_shape: Sequence[int],
        input_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Refuse a malformed query before anything is computed.

        Args:
            query: name of the query.
            tensors: tensors that came with the query.
            sends: declared payload kind of each tensor.
            input_shape: shape of one of the node's inputs.
            input_dtype: dtype of the node's inputs.

        Raises:
            QueryRefused: undeclared tensors, tensors of another shape or type than their kind's, too many
                rows, or numbers that are not finite.
        """
        rows = approved_limit(self.approved, query, "rows")
        shapes = (self.output_shape, input_shape, input_dtype)
        facts = TensorFacts(self.policy, tensors, sends, rows, *shapes)
        require(self.node, query, TENSOR_RULES, facts)

    def admit(self, received: ReceivedQuery, query: Query, sent: Tensors) -> None:
        """Admit a query, or refuse it before anything is computed.

        Raises:
            QueryRefused: the policy forbids it, a limit is reached, or the response would exceed a budget.
        """
        require(self.node, query.name, GATE_RULES, QueryFacts(query, self.policy, self.budgets))
        # A repeated query is admitted; other content under the same number is another query.
        if received.content_hash not in self.audit.totals.sibling_content_hashes(
            vars(self._make_entry(received, RESPONSE))
        ):
            cost = None if self.budgets is None else self.budgets.expected_cost(received, query, sent)
            spending = self.audit.spending(self.payer, self.run)
            require(self.node, query.name, CHARGE_RULES, self._charge_facts(query.name, spending, cost))
        if self.encoder is not None:
            self.encoder.admit(query)

    def charge_training(self, received: ReceivedQuery, query: Query, sent: Tensors) -> None:
        """Charge the private training on which the response of an admitted query depends, before it is
        computed.

        A failure depends on the training, too; so training is charged whatever its outcome.
        """
        if self.budgets is None:
            return
        self.budgets.charge_initial_training(received)
        if not self.budgets.charged_attempts(received, query, sent):
            self.budgets.charge_training(received, query, sent, 0)

    # --- releases -------------------------------------------------------------------------------------

    def release(
        self,
        received: ReceivedQuery,
        part: str,
        tensors: Tensors,
        query: Query,
        sent: Tensors,
        wire: WireConfig | None = None,
    ) -> Tensors:
        """Release tensors: bound, add noise, charge and audit on disk, then hand over.

        Args:
            received: the query as received.
            part: ``"response"`` or ``"gradient"``.
            tensors: tensors to release.
            query: declaration of the query.
            sent: the tensors that came with the query.
            wire: number formats of the message; None is float32.

        Raises:
            QueryRefused: a tensor of undeclared kind, scores of another shape than the task's, numbers that
                cannot be encoded, more bytes than the policy allows, or more privacy than the
                budget.
            OwnDataError: rows of another width than the query declares, if their cost depends on it.
            AuditError: the log has a fault or cannot be written; nothing is released then.
        """
        rows = approved_limit(self.approved, query.name, "rows")
        facts = ResponseFacts(part, query, tensors, sent, rows, self.output_shape)
        require(self.node, query.name, RESPONSE_RULES, facts)
        kinds = query.released_kinds()
        noised, cost, max_cost, rule, bounded_digest = self._protect(received, part, tensors, query)
        postprocessed = noised
        if part == RESPONSE and query.details.postprocess is not None:
            postprocessed = query.details.postprocess(noised, sent)
        outgoing = (wire or WireConfig()).compress(postprocessed, kinds)
        # Without budgets nothing is charged, and a query repeated after a stop counts once.
        release_hash = ""
        if self.budgets is not None:
            # The hash includes the query, so that equal responses to two queries are not recognizable.
            past = f"{received.content_hash} {received.history_hash}"
            context = f"{received.number} {part} {past} {digest(part, outgoing)}"
            release_hash = self.budgets.keyed_hash(chain_digest(context, bounded_digest))
        encoded: Tensors = outgoing
        if self.encoder is not None:
            encoded = self.encoder.encode(received, part, query, outgoing)
        entry = self._make_entry(
            received,
            part,
            release_hash=release_hash,  # before the encoder, whose results may differ each time
            down=received.received_bytes,
            up=bytes_by_kind(encoded, kinds),
            mechanism="none" if self.budgets is None else self.budgets.mechanism.name,
            rule=rule,
            cost=cost_to_dict(cost or PrivacyCost()),
            no_guarantee=int(cost is None),
            unit=self.budgets.mechanism.unit if self.budgets is not None and cost else "",
        )
        self._entry_numbers[received.number, part] = self._charge(received, entry, max_cost)
        if self.encoder is not None:
            self.encoder.record(query, outgoing)
        return {name: tensor.detach() for name, tensor in encoded.items()}

    def _charge(self, received: ReceivedQuery, entry: Entry, max_cost: PrivacyCost | None) -> int:
        """Enter a release in the audit log, after the training on which it depends; return the entry's
        number.

        Args:
            max_cost: upper bound of the cost, which depends on shapes only. The actual cost depends on the
                released values, and so would a refusal because of it, which would be an uncharged release.
        """
        if self.budgets is not None:
            self.budgets.charge_initial_training(received)
        # A gradient belongs to its response, and each further gradient is a query by itself.
        # So is another response to the same query if a bit differs, for example because inputs
        # have another memory layout, or the processor changed.
        is_changed = bool(self.audit.totals.sibling_content_hashes(vars(entry)))
        query_count = int(entry.part == RESPONSE or is_changed)

        def check(spending: Spending) -> None:
            facts = replace(
                self._charge_facts(received.query, spending, max_cost),
                queries=query_count,
                byte_count=sum(entry.up.values()),
                is_changed=is_changed,
            )
            require(self.node, received.query, CHARGE_RULES, facts)

        training_cost = self.audit.totals.unreported_training_charges(self.run, self.node)
        return self.audit.charge(replace(entry, queries=query_count, training_cost=training_cost), check)

    def _charge_facts(self, query: str, spending: Spending, cost: PrivacyCost | None) -> ChargeFacts:
        responses = self.audit.totals.response_counts[self.run, self.node, query]
        rules = (self.policy, self.approved, self.budgets)
        return ChargeFacts(query, *rules, spending, responses, cost)

    def _make_entry(self, received: ReceivedQuery, part: str, **fields: Any) -> Entry:
        keys = (self.run, self.payer, self.node, received.number, received.query, part)
        return Entry(*keys, content_hash=received.content_hash, history_hash=received.history_hash, **fields)

    def release_cost(self, number: int, part: str) -> ReleaseCost:
        """Return mechanism, cost and history hash of the last release of a query's part.

        The cost includes training for this release, and training before the first release, which was
        charged by itself. With an encoder it includes the sealed hash of the release, by which repeated
        releases are recognized.

        Args:
            number: number of the query.
            part: ``"response"`` or ``"gradient"``.
        """
        entry = self.audit.entry(self._entry_numbers[number, part])
        cost = Counter(entry["cost"]) + Counter(entry["training_cost"])
        no_guarantee = entry["no_guarantee"] or cost.pop(NO_GUARANTEE, 0)
        return ReleaseCost(
            mechanism=entry["mechanism"],
            cost=None if no_guarantee else dict(cost),
            history_hash=entry["history_hash"],
            release_hash=entry["release_hash"] if self.encoder is not None else "",
        )

    def _protect(
        self, received: ReceivedQuery, part: str, tensors: Tensors, query: Query
    ) -> tuple[Tensors, PrivacyCost | None, PrivacyCost | None, str, str]:
        """Return the protected tensors, their actual and maximum cost, a description, and a digest of the
        bounded tensors.
        """
        if self.budgets is None:
            return tensors, None, None, "none", ""
        mechanism = self.budgets.mechanism
        rules = {name: mechanism.rule(query, name) for name in tensors}
        bounded = {name: rule.bound(tensors[name]) for name, rule in rules.items()}
        # The noise stream depends on all bits that it hides: equal noise on two responses would cancel.
        noise_part = NOISE_PARTS[part]
        bounded_digest = digest(noise_part, bounded)
        noise_names = (
            "gate",
            received.number,
            noise_part,
            received.content_hash,
            received.history_hash,
            bounded_digest,
        )
        noised = {
            name: rule.noise(bounded[name], mechanism.noise_sampler(*noise_names, name))
            for name, rule in rules.items()
        }
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for name, shape in shapes.items():
            mechanism.require_declared_width(query, name, shape)
        cost, max_cost = (
            total_cost(mechanism.release_costs(query, shapes, released)) for released in (noised, None)
        )
        texts = [f"{name}: {mechanism.describe_rule(query, name, shape)}" for name, shape in shapes.items()]
        return noised, cost, max_cost, "; ".join(texts), bounded_digest
