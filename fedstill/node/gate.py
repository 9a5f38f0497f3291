"""The gate of a node: every release passes it, under the policy of the node's owner."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from fedstill.core.errors import QueryRefused
from fedstill.node.audit_entries import GRADIENT, NO_GUARANTEE, RESPONSE, Entry, ReceivedQuery
from fedstill.node.audit_log import AuditLog, Spending
from fedstill.node.policy import PolicyConfig
from fedstill.node.replies import ReleaseCost
from fedstill.node.run_budgets import RunBudgets
from fedstill.privacy.events import PrivacyCost, cost_to_dict, total_cost
from fedstill.protocol.digests import chain_digest, digest
from fedstill.protocol.payload_kinds import INDICES, INPUTS, LABEL_MAPS, PayloadKind
from fedstill.protocol.queries import Query
from fedstill.protocol.run_plan import RunDescription
from fedstill.protocol.tensor_forms import score_shape_fault, sent_tensor_fault
from fedstill.protocol.wire_format import SCALE, Tensors, WireConfig, bytes_by_kind, decompress, wire_kind

COMPRESSED_WIRE = WireConfig(
    inputs="int8", gradients="int8"
)  # a form with scales for every kind that can have them
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
        rule = policy_refusal(self.policy, query)
        return rule if rule is not None or self.budgets is None else self.budgets.refusal_reason(query)

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
        for rule in self._faults(query, tensors, sends, input_shape, input_dtype):
            raise QueryRefused(self.node, query, rule)

    def _faults(
        self,
        query: str,
        tensors: Tensors,
        sends: Mapping[str, str],
        input_shape: Sequence[int],
        input_dtype: torch.dtype,
    ) -> Iterator[str]:
        """Yield the rules that a query breaks; each is checked only if those before it hold."""
        names = {name.removesuffix(SCALE) for name in tensors}
        if names != set(sends):
            yield f"tensors: expected {sorted(sends)}, got {sorted(names)}"
        for name, tensor in tensors.items():
            rule = self._row_fault(query, name, tensor, wire_kind(name, sends))
            if rule is not None:
                yield rule
        # Compressed tensors grow to four bytes per number.
        float32_bytes = sum(
            4 * tensor.numel() for name, tensor in tensors.items() if f"{name}{SCALE}" in tensors
        )
        if float32_bytes > (self.policy.max_message or math.inf):
            yield f"max_message: {self.policy.max_message}, and in float32 it has {float32_bytes} bytes"
        for name, tensor in decompress(tensors).items():
            kind = wire_kind(name, sends)
            fault = sent_tensor_fault(name, tensor, kind, input_shape, self.output_shape, input_dtype)
            if fault is not None:
                yield f"tensors: {fault}"
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                yield f"finite numbers: the server sent {name} with NaN or infinity"

    def _row_fault(self, query: str, name: str, tensor: torch.Tensor, kind: str) -> str | None:
        """Return the rule that one tensor breaks by its number of rows, before it is decompressed."""
        max_rows, row_count = self.policy.max_rows or math.inf, tensor.shape[:1].numel()
        if name.endswith(SCALE):
            has_scale = COMPRESSED_WIRE.wire_dtype(kind) != "float32"
            return None if has_scale else f"tensors: {name} is not expected: {kind} have no scales"
        if kind == INDICES and tensor.numel() > max_rows:
            return f"max_rows: {max_rows}, and {name} names {tensor.numel()}"
        if kind not in (INPUTS, LABEL_MAPS):
            return None
        if not 1 <= row_count <= max_rows:
            return f"max_rows: {max_rows}, and {name} has {row_count}"
        if 0 < (approved_rows := self._approved_limit(query, "rows")) < row_count:
            return f"approved: {approved_rows} inputs, and {name} has {row_count}"
        return None

    def check_json_values(self, query: Query, tensors: Tensors) -> None:
        """Refuse invalid or too large JSON values, before anything is charged for the query.

        Raises:
            QueryRefused: a value has more bytes than a header may have; parsing takes fifty times as much
                memory.
            DataError: a value is not JSON.
        """
        max_bytes = self.policy.max_header
        for name in query.details.json_values:
            if max_bytes and name in tensors and tensors[name].numel() > max_bytes:
                rule = f"max_header: {max_bytes}, and {name} has {tensors[name].numel()} bytes"
                raise QueryRefused(self.node, query.name, rule)
        query.decode_inputs(tensors)

    def admit(self, received: ReceivedQuery, query: Query, sent: Tensors) -> None:
        """Admit a query, or refuse it before anything is computed.

        Raises:
            QueryRefused: the policy forbids it, a limit is reached, or the response would exceed a budget.
        """
        rule = self.refusal_reason(query)
        if rule is not None:
            raise QueryRefused(self.node, received.query, rule)
        # A repeated query is admitted; other content under the same number is another query.
        if received.content_hash not in self.audit.totals.sibling_content_hashes(
            vars(self._make_entry(received, RESPONSE))
        ):
            self._require_approved(received.query)
            self._require_within_limits(received.query, self.audit.spending(self.payer, self.run), 1, 1)
            if self.budgets is not None:
                self.budgets.require_affordable(received, query, sent)
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

    def _require_within_limits(
        self, query: str, spending: Spending, extra_queries: int, extra_bytes: int
    ) -> None:
        """Refuse a release that would exceed a limit of the policy, over all runs."""
        max_queries, max_bytes = self.policy.max_queries, self.policy.max_bytes
        if max_queries and extra_queries and spending.total_queries + extra_queries > max_queries:
            raise QueryRefused(self.node, query, f"max_queries: {max_queries}")
        if max_bytes and spending.total_bytes + extra_bytes > max_bytes:
            raise QueryRefused(self.node, query, f"max_bytes: {max_bytes} bytes")

    def _require_approved(
        self, query: str, byte_count: int = 0, extra_queries: int = 1, is_changed: bool = False
    ) -> None:
        """Refuse a query beyond the approved description: another query, one more (also a repeated query
        with another response), or more bytes.
        """
        if self.approved is None:
            return
        max_times, max_bytes = self._approved_limit(query, "times"), self._approved_limit(query, "bytes")
        rule = None
        if query not in self.approved.queries:
            rule = f"approved: {', '.join(self.approved.queries)}"
        elif (
            max_times
            and extra_queries
            and self.audit.totals.response_counts[self.run, self.node, query] + extra_queries > max_times
        ):
            rule = f"approved: {max_times} times{', and an earlier response differed' if is_changed else ''}"
        elif max_bytes and byte_count > max_bytes:
            rule = f"approved: {max_bytes} bytes per response"
        if rule is not None:
            raise QueryRefused(self.node, query, rule)

    def _approved_limit(self, query: str, limit: str) -> int:
        """Return a limit of an approved query; 0: none."""
        approved = {} if self.approved is None else self.approved.queries.get(query, {})
        return int(approved.get(limit, 0))

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
        kinds = query.released_kinds()
        undeclared = sorted(set(tensors) - set(kinds))
        if undeclared:
            raise QueryRefused(self.node, received.query, f"undeclared: {', '.join(undeclared)}")
        # Received inputs were counted on arrival; public rows are named in other ways.
        scores = [tensor for name, tensor in tensors.items() if kinds[name].category == "scores"]
        rows = max([0, *(tensor.shape[:1].numel() for tensor in scores)])
        if 0 < (approved_rows := self._approved_limit(received.query, "rows")) < rows:
            rule = f"approved: {approved_rows} inputs, and the response has {rows}"
            raise QueryRefused(self.node, received.query, rule)
        if part == RESPONSE:
            self._require_score_shapes(query, tensors, sent)
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

    def _require_score_shapes(self, query: Query, tensors: Tensors, sent: Tensors) -> None:
        """Refuse scores that do not have the task's shape, with one row per received input."""
        kinds = query.released_kinds()
        inputs = [len(sent[name]) for name, kind in query.sends.items() if kind == INPUTS and name in sent]
        rows = inputs[0] if inputs else None
        for name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            fault = (
                score_shape_fault(name, shape, rows, self.output_shape)
                if kinds[name].category == "scores"
                else None
            )
            if fault is not None:
                raise QueryRefused(self.node, query.name, f"outputs: {fault}")

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
            byte_count = sum(entry.up.values())
            self._require_approved(received.query, byte_count, query_count, is_changed)
            self._require_within_limits(received.query, spending, query_count, byte_count)
            if self.budgets is not None:
                self.budgets.require_within_budget(spending, max_cost, received.query)

        training_cost = self.audit.totals.unreported_training_charges(self.run, self.node)
        return self.audit.charge(replace(entry, queries=query_count, training_cost=training_cost), check)

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


def policy_refusal(policy: PolicyConfig, query: Query) -> str | None:
    """Return the rule of a policy that forbids a query whatever remains of budgets, or None."""
    allowed, kinds = policy.queries, query.released_kinds()
    if "*" not in allowed and query.name not in allowed:
        return f"queries: {', '.join(allowed) or 'none'}"
    if policy.sums_only and kinds and not query.sums:
        remedy = "unless its owner sets it to false"
        return f"sums_only: secure aggregation only (link.secure_aggregation), {remedy}"
    refused_kinds = sorted(
        {kind for kind in kinds.values() if policy.outputs_only and not _is_releasable(policy, kind)}
    )
    if refused_kinds and all(kind.from_label_maps for kind in refused_kinds):
        remedies = "".join(f"; {kind.opt_out}" for kind in refused_kinds if kind.opt_out)
        listed = " and ".join(refused_kinds)
        return f"label_maps: {listed} may not leave, unless its owner sets it to true{remedies}"
    if refused_kinds:
        allowed_kinds = ", ".join(f"{kind!r}" for kind in policy.kinds) or "none"
        remedy = (
            f", unless its owner names it in policy.kinds (now {allowed_kinds})"
            if any(kind.must_be_named for kind in refused_kinds)
            else ""
        )
        return f"outputs_only: {' and '.join(refused_kinds)} may not leave{remedy}"
    return None


def _is_releasable(policy: PolicyConfig, kind: PayloadKind) -> bool:
    """Return whether ``outputs_only`` allows a payload kind: outputs, and kinds that the owner allows by
    name.
    """
    return kind in policy.kinds or kind.is_output or (kind.from_label_maps and policy.label_maps)
