"""The gate of a node: nothing leaves except through it, under the policy of the node's owner."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fedstill.core.errors import QueryRefused
from fedstill.node.audit_entries import NO_GUARANTEE, RESPONSE, Entry, ReceivedQuery
from fedstill.node.audit_log import AuditLog, Spending
from fedstill.node.policy import PolicyConfig
from fedstill.node.replies import ReleaseCost
from fedstill.node.run_budgets import RunBudgets
from fedstill.node.sum_contribution import SumContribution
from fedstill.privacy.events import PrivacyCost, cost_to_dict, total_cost
from fedstill.protocol.digests import chain_digest, digest
from fedstill.protocol.payload_kinds import INDICES, INPUTS, KNOWN_KINDS, LABEL_MAPS, SOURCES, PayloadKind
from fedstill.protocol.queries import Query, score_shape_fault
from fedstill.protocol.run_plan import RunDescription
from fedstill.protocol.wire_format import SCALE, Tensors, WireConfig, bytes_by_kind, decompress, wire_kind

INTEGER_DTYPES = (torch.int32, torch.int64)
PARAMETER_KINDS = frozenset(
    kind for kind in KNOWN_KINDS.values() if kind.category == "model"
)  # networks as they travel
COMPRESSED_WIRE = WireConfig(
    inputs="int8", gradients="int8"
)  # a form with scales for every kind that can have them


class Gate:
    """Checks the policy, then bounds, noises, charges and audits each release, in this order.

    What leaves is written in the audit log under the run's name, and counts in the budgets and limits of the
    payer; None: of the node itself.
    """

    def __init__(
        self, node: str, policy: PolicyConfig, audit: AuditLog, run: str = "run", payer: str | None = None
    ) -> None:
        self.node, self.policy, self.audit, self.run = node, policy, audit, run
        self.payer = node if payer is None else payer
        # All that the owner wants asked; None: whatever policy allows.
        self.approved: RunDescription | None = None
        self.output_shape: tuple[int, ...] | None = None  # of one input, by the task; None: any
        self.budgets: RunBudgets | None = None  # privacy: what protects its releases, and pays for them
        self._entry_numbers: dict[
            tuple[int, str], int
        ] = {}  # the entry of what left last under a number and part

    def refusal_reason(self, query: Query) -> str | None:
        """The rule by which this query could never be answered, or None. Asks nothing, counts nothing."""
        rule = policy_refusal(self.policy, query)
        return rule if rule is not None or self.budgets is None else self.budgets.refusal_reason(query)

    def check_tensors(
        self, query: str, tensors: Tensors, sends: Mapping[str, str], input_shape: Sequence[int]
    ) -> None:
        """Refuse a query that no sound server asks, before anything is computed.

        Args:
            sends: the kind of each tensor that comes with it.
            input_shape: of one of the node's own inputs.

        Raises:
            QueryRefused: other tensors than declared, inputs of another shape or type, too many of them,
                or numbers that are not finite.
        """
        for rule in self._faults(query, tensors, sends, input_shape):
            raise QueryRefused(self.node, query, rule)

    def _faults(
        self, query: str, tensors: Tensors, sends: Mapping[str, str], input_shape: Sequence[int]
    ) -> Iterator[str]:
        """The rules that a query breaks; each is looked at only where those before it hold."""
        names = {name.removesuffix(SCALE) for name in tensors}
        if names != set(sends):
            yield f"tensors: exactly {sorted(sends)}, not {sorted(names)}"
        for name, tensor in tensors.items():
            if (
                rule := self._tensor_fault(query, name, tensor, wire_kind(name, sends), input_shape)
            ) is not None:
                yield rule
        # What came in a shorter form grows to four bytes a number.
        float32_bytes = sum(
            4 * tensor.numel() for name, tensor in tensors.items() if f"{name}{SCALE}" in tensors
        )
        if float32_bytes > (self.policy.max_message or math.inf):
            yield f"max_message: {self.policy.max_message}, and in float32 it has {float32_bytes} bytes"
        for name, tensor in decompress(tensors).items():
            is_measured = wire_kind(name, sends) == INPUTS or f"{name}{SCALE}" in tensors
            is_numeric = is_measured or tensor.is_floating_point() or tensor.is_complex()
            if is_numeric and tensor.dtype != torch.float32:
                yield f"float32: {name} is {tensor.dtype}, and numbers here are torch.float32"
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                yield f"finite numbers: {name} holds NaN or infinity"

    def _tensor_fault(
        self, query: str, name: str, tensor: torch.Tensor, kind: str, input_shape: Sequence[int]
    ) -> str | None:
        """The rule that one tensor breaks by its form or its number of rows."""
        max_rows, row_count = self.policy.max_rows or math.inf, tensor.shape[:1].numel()
        if name.endswith(SCALE):
            has_scale = COMPRESSED_WIRE.wire_dtype(kind) != "float32"
            return None if has_scale else f"tensors: {name} came, and {kind} have no scales"
        description = f"{tensor.dtype} {tuple(tensor.shape)}"
        if kind == INDICES and tensor.numel() > max_rows:
            return f"max_rows: {max_rows}, and {name} names {tensor.numel()}"
        if kind == INDICES and (tensor.dtype not in INTEGER_DTYPES or tensor.ndim != 1):
            return f"rows: {name} is {description}, and rows are whole numbers (N,), int32 or int64"
        if kind == SOURCES and (tensor.dtype not in INTEGER_DTYPES or not tensor.ndim):
            return f"sources: {name} is {description}, and sources are whole numbers (B, ...), int32 or int64"
        if kind in PARAMETER_KINDS and (tensor.dtype != torch.float32 or tensor.ndim != 1):
            return f"parameters: {name} is {description}, and a network's are float32 (P,)"
        if kind not in (INPUTS, LABEL_MAPS):
            return None
        if kind == INPUTS and tuple(tensor.shape[1:]) != tuple(input_shape):
            expected = f"(B, {', '.join(map(str, input_shape))})"
            return f"inputs: {name} is {tuple(tensor.shape)}, and inputs here are {expected}"
        if kind == LABEL_MAPS and (tensor.dtype != torch.uint8 or tensor.shape[1:] != tuple(input_shape)[1:]):
            return f"label maps: {name} is {description}, and maps here are uint8, one number a pixel"
        if not 1 <= row_count <= max_rows:
            return f"max_rows: {max_rows}, and {name} has {row_count}"
        if 0 < (approved_rows := self._approved_limit(query, "rows")) < row_count:
            return f"approved: {approved_rows} inputs, and {name} has {row_count}"
        return None

    def read_values(self, query: Query, tensors: Tensors) -> None:
        """Refuse JSON values that are too large or are none, before anything is charged for the query.

        Raises:
            QueryRefused: a value of more bytes than a header may have: read, it takes fifty times as much.
            DataError: it is no JSON value.
        """
        max_bytes = self.policy.max_header
        for name in query.json_values:
            if max_bytes and name in tensors and tensors[name].numel() > max_bytes:
                rule = f"max_header: {max_bytes}, and {name} has {tensors[name].numel()} bytes"
                raise QueryRefused(self.node, query.name, rule)
        query.decode_inputs(tensors)

    def admit(self, received: ReceivedQuery, query: Query, sent: Tensors) -> None:
        """Let a query in, or refuse it before anything is computed.

        Raises:
            QueryRefused: by the policy's list, its refusal of parameters, a limit reached, or a budget
                that the answer would pass.
        """
        rule = self.refusal_reason(query)
        if rule is not None:
            raise QueryRefused(self.node, received.query, rule)
        # What was answered once may be again; other content under the same number is another query.
        if received.content_hash not in self.audit.totals.sibling_contents(
            vars(self._entry(received, RESPONSE))
        ):
            self._require_approved(received.query)
            self._require_within_limits(received.query, self.audit.spending(self.payer, self.run), 1, 1)
            if self.budgets is not None:
                self.budgets.require_affordable(received, query, sent)

    def charge_training(self, received: ReceivedQuery, query: Query, sent: Tensors) -> None:
        """Charge what a query that is admitted follows from, before anything is computed for it.

        A failure, too, tells of what was learned; and learning is paid for whatever comes of it.
        """
        if self.budgets is None:
            return
        self.budgets.charge_initial_training(received)
        if not self.budgets.charged_attempts(received, query, sent):
            self.budgets.charge_training(received, query, sent, 0)

    def _require_within_limits(
        self, query: str, spending: Spending, extra_queries: int, extra_bytes: int
    ) -> None:
        """Refuse what would pass a limit of the policy, with what has left already, in all runs."""
        max_queries, max_bytes = self.policy.max_queries, self.policy.max_bytes
        if max_queries and extra_queries and spending.total_queries + extra_queries > max_queries:
            raise QueryRefused(self.node, query, f"max_queries: {max_queries}")
        if max_bytes and spending.total_bytes + extra_bytes > max_bytes:
            raise QueryRefused(self.node, query, f"max_bytes: {max_bytes} bytes")

    def _require_approved(
        self, query: str, byte_count: int = 0, extra_queries: int = 1, is_changed: bool = False
    ) -> None:
        """Refuse what goes beyond what the owner has approved: another query, one more (be it the same one
        again, with another answer), or more bytes."""
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
            rule = (
                f"approved: {max_times} times{', and this came out otherwise before' if is_changed else ''}"
            )
        elif max_bytes and byte_count > max_bytes:
            rule = f"approved: {max_bytes} bytes of an answer"
        if rule is not None:
            raise QueryRefused(self.node, query, rule)

    def _approved_limit(self, query: str, limit: str) -> int:
        """A limit of an approved query; 0: none."""
        approved = {} if self.approved is None else self.approved.queries.get(query, {})
        return int(approved.get(limit, 0))

    # --- what leaves ----------------------------------------------------------------------------------

    def release(
        self,
        received: ReceivedQuery,
        part: str,
        tensors: Tensors,
        query: Query,
        sent: Tensors,
        wire: WireConfig | None = None,
        contribution: SumContribution | None = None,
    ) -> Tensors:
        """Hand over tensors: bound, noise, charge and audit on disk, then release.

        Args:
            part: ``"response"`` or ``"gradient"``.
            sent: the tensors that came with the query.
            wire: the form in which they travel; None is float32.
            contribution: how they become a part of a sum, where the server is to see sums only.

        Raises:
            QueryRefused: a tensor of undeclared kind, scores of another shape than the task's, numbers
                that cannot be added (without masks), more bytes than the policy allows, or more privacy than
                the budget.
            NodeDataError: rows of another width than the query declares, where their price follows from it.
            AuditError: the log is in trouble, or cannot be written; nothing is released then.
        """
        kinds = query.released_kinds()
        undeclared = sorted(set(tensors) - set(kinds))
        if undeclared:
            raise QueryRefused(self.node, received.query, f"undeclared: {', '.join(undeclared)}")
        # Inputs that came were counted when they did; of public ones a query says which in its own way.
        scores = [tensor for name, tensor in tensors.items() if kinds[name].category == "scores"]
        rows = max([0, *(tensor.shape[:1].numel() for tensor in scores)])
        if 0 < (approved_rows := self._approved_limit(received.query, "rows")) < rows:
            rule = f"approved: {approved_rows} inputs, and the answer is about {rows}"
            raise QueryRefused(self.node, received.query, rule)
        if part == RESPONSE:
            self._check_scores(query, tensors, sent)
        noised, cost, max_cost, rule, bounded_digest = self._protect(received, part, tensors, query)
        postprocessed = noised
        if part == RESPONSE and query.postprocess is not None:
            postprocessed = query.postprocess(noised, sent)
        outgoing = (wire or WireConfig()).compress(postprocessed, kinds)
        # Without budgets nothing is paid for, and what is asked again after a stop counts once.
        release_hash = ""
        if self.budgets is not None:
            # Named after its query, so that no two are seen to have had the same answer.
            context = f"{received.number} {part} {received.content_hash} {received.history_hash} {digest(part, outgoing)}"
            release_hash = self.budgets.seal(chain_digest(context, bounded_digest))
        unmasked = outgoing
        if contribution is not None:
            outgoing = contribution.mask(self.node, query, unmasked)
        entry = self._entry(
            received,
            part,
            left=release_hash,  # of what it is before masks, which are others each time
            down=received.received_bytes,
            up=bytes_by_kind(outgoing, kinds),
            mechanism="none" if self.budgets is None else self.budgets.mechanism.name,
            rule=rule,
            price=cost_to_dict(cost or PrivacyCost()),
            bare=int(cost is None),
            unit=self.budgets.mechanism.unit if self.budgets is not None and cost else "",
        )
        self._entry_numbers[received.number, part] = self._charge(received, entry, max_cost)
        if contribution is not None:
            contribution.record_counts(query, unmasked)
        return {name: tensor.detach() for name, tensor in outgoing.items()}

    def _check_scores(self, query: Query, tensors: Tensors, sent: Tensors) -> None:
        """Refuse scores that are not those of the task, one row for each input that was sent."""
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
        """Write a release, after the training behind it; its entry's number.

        Args:
            max_cost: its price at most, which follows from shapes. What it turned out to cost follows from what
                leaves, and so would a refusal of that: nothing would be paid for it.
        """
        if self.budgets is not None:
            self.budgets.charge_initial_training(received)
        # A gradient belongs to its answer, and each further one of that is a query by itself.
        # And so is an answer to what was answered before, if a bit of it is another one: as of inputs that
        # lie otherwise in memory, or of another processor.
        is_changed = bool(self.audit.totals.sibling_contents(vars(entry)))
        query_count = int(entry.part == RESPONSE or is_changed)

        def check(spending: Spending) -> None:
            byte_count = sum(entry.up.values())
            self._require_approved(received.query, byte_count, query_count, is_changed)
            self._require_within_limits(received.query, spending, query_count, byte_count)
            if self.budgets is not None:
                self.budgets.require_within_budget(spending, max_cost, received.query)

        learned = self.audit.totals.unreported(self.run, self.node)
        return self.audit.charge(replace(entry, queries=query_count, training_cost=learned), check)

    def _entry(self, received: ReceivedQuery, part: str, **fields: Any) -> Entry:
        keys = (self.run, self.payer, self.node, received.number, received.query, part)
        return Entry(*keys, content_hash=received.content_hash, history_hash=received.history_hash, **fields)

    def release_cost(self, number: int, part: str, is_masked: bool = False) -> ReleaseCost:
        """Under which mechanism, at which price and after what the last release under a number left, and by
        which sealed fingerprint it is known again where it is masked.

        The price is with what was learned for it, and before the first one, which was charged by itself.
        """
        entry = self.audit.entry(self._entry_numbers[number, part])
        cost = Counter(entry["cost"]) + Counter(entry["training_cost"])
        no_guarantee = entry["no_guarantee"] or cost.pop(NO_GUARANTEE, 0)
        return ReleaseCost(
            mechanism=entry["mechanism"],
            cost=None if no_guarantee else dict(cost),
            history_hash=entry["history_hash"],
            release_hash=entry["release_hash"] if is_masked else "",
        )

    def _protect(
        self, received: ReceivedQuery, part: str, tensors: Tensors, query: Query
    ) -> tuple[Tensors, PrivacyCost | None, PrivacyCost | None, str, str]:
        """Tensors as they may leave, what that costs and would cost at most, what was done, and a stamp of
        what they were."""
        if self.budgets is None:
            return tensors, None, None, "none", ""
        mechanism = self.budgets.mechanism
        rules = {name: mechanism.rule(query, name) for name in tensors}
        bounded = {name: rule.bound(tensors[name]) for name, rule in rules.items()}
        # Noise is named after all that it hides, to the last digit: equal noise on two answers would cancel.
        bounded_digest = digest(part, bounded)
        noise_names = (
            "gate",
            received.number,
            part,
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
            mechanism.require_width(query, name, shape)
        cost, max_cost = (
            total_cost(mechanism.release_costs(query, shapes, released)) for released in (noised, None)
        )
        texts = [f"{name}: {mechanism.describe_rule(query, name, shape)}" for name, shape in shapes.items()]
        return noised, cost, max_cost, "; ".join(texts), bounded_digest


def policy_refusal(policy: PolicyConfig, query: Query) -> str | None:
    """The rule of a policy by which a query is never answered, whatever is left of budgets, or None."""
    allowed, kinds = policy.queries, query.released_kinds()
    if "*" not in allowed and query.name not in allowed:
        return f"queries: {', '.join(allowed) or 'none'}"
    if policy.sums_only and kinds and not query.sums:
        remedy = "unless its owner sets it to false"
        return f"sums_only: nothing that is not added to other nodes' (link.secure_aggregation), {remedy}"
    refused_kinds = sorted(
        {kind for kind in kinds.values() if policy.outputs_only and not _is_releasable(policy, kind)}
    )
    if refused_kinds and all(kind.from_label_maps and not kind.package for kind in refused_kinds):
        remedies = "".join(f"; {kind.opt_out}" for kind in refused_kinds if kind.opt_out)
        return f"label_maps: no {' and '.join(refused_kinds)}, unless its owner sets it to true{remedies}"
    if refused_kinds:
        allowed_kinds = ", ".join(f"{kind!r}" for kind in policy.kinds) or "none"
        remedy = (
            f", unless its owner names it in policy.kinds (now {allowed_kinds})"
            if any(kind.must_be_named for kind in refused_kinds)
            else ""
        )
        return f"outputs_only: no {' and '.join(refused_kinds)}{remedy}"
    return None


def _is_releasable(policy: PolicyConfig, kind: PayloadKind) -> bool:
    """Whether "outputs only" lets a kind out: an output, or what the owner allows by name."""
    if kind in policy.kinds:
        return True
    return not kind.package and (kind.is_output or (kind.from_label_maps and policy.label_maps))
