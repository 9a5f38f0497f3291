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
        self, query: str, tensors: Tensors, sends: Mapping[str, str], shape: Sequence[int]
    ) -> None:
        """Refuse a query that no sound server asks, before anything is computed.

        Args:
            sends: the kind of each tensor that comes with it.
            shape: of one of the node's own inputs.

        Raises:
            QueryRefused: other tensors than declared, inputs of another shape or type, too many of them,
                or numbers that are not finite.
        """
        for rule in self._faults(query, tensors, sends, shape):
            raise QueryRefused(self.node, query, rule)

    def _faults(
        self, query: str, tensors: Tensors, sends: Mapping[str, str], shape: Sequence[int]
    ) -> Iterator[str]:
        """The rules that a query breaks; each is looked at only where those before it hold."""
        names = {name.removesuffix(SCALE) for name in tensors}
        if names != set(sends):
            yield f"tensors: exactly {sorted(sends)}, not {sorted(names)}"
        for name, tensor in tensors.items():
            if (rule := self._tensor_fault(query, name, tensor, wire_kind(name, sends), shape)) is not None:
                yield rule
        # What came in a shorter form grows to four bytes a number.
        grown = sum(4 * tensor.numel() for name, tensor in tensors.items() if f"{name}{SCALE}" in tensors)
        if grown > (self.policy.max_message or math.inf):
            yield f"max_message: {self.policy.max_message}, and in float32 it has {grown} bytes"
        for name, tensor in decompress(tensors).items():
            measured = wire_kind(name, sends) == INPUTS or f"{name}{SCALE}" in tensors
            numbers = measured or tensor.is_floating_point() or tensor.is_complex()
            if numbers and tensor.dtype != torch.float32:
                yield f"float32: {name} is {tensor.dtype}, and numbers here are torch.float32"
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                yield f"finite numbers: {name} holds NaN or infinity"

    def _tensor_fault(
        self, query: str, name: str, tensor: torch.Tensor, kind: str, shape: Sequence[int]
    ) -> str | None:
        """The rule that one tensor breaks by its form or its number of rows."""
        most, rows = self.policy.max_rows or math.inf, tensor.shape[:1].numel()
        if name.endswith(SCALE):
            sound = COMPRESSED_WIRE.form(kind) != "float32"
            return None if sound else f"tensors: {name} came, and {kind} have no scales"
        found = f"{tensor.dtype} {tuple(tensor.shape)}"
        if kind == INDICES and tensor.numel() > most:
            return f"max_rows: {most}, and {name} names {tensor.numel()}"
        if kind == INDICES and (tensor.dtype not in INTEGER_DTYPES or tensor.ndim != 1):
            return f"rows: {name} is {found}, and rows are whole numbers (N,), int32 or int64"
        if kind == SOURCES and (tensor.dtype not in INTEGER_DTYPES or not tensor.ndim):
            return f"sources: {name} is {found}, and sources are whole numbers (B, ...), int32 or int64"
        if kind in PARAMETER_KINDS and (tensor.dtype != torch.float32 or tensor.ndim != 1):
            return f"parameters: {name} is {found}, and a network's are float32 (P,)"
        if kind not in (INPUTS, LABEL_MAPS):
            return None
        if kind == INPUTS and tuple(tensor.shape[1:]) != tuple(shape):
            here = f"(B, {', '.join(map(str, shape))})"
            return f"inputs: {name} is {tuple(tensor.shape)}, and inputs here are {here}"
        if kind == LABEL_MAPS and (tensor.dtype != torch.uint8 or tensor.shape[1:] != tuple(shape)[1:]):
            return f"label maps: {name} is {found}, and maps here are uint8, one number a pixel"
        if not 1 <= rows <= most:
            return f"max_rows: {most}, and {name} has {rows}"
        if 0 < (approved := self._approved_limit(query, "rows")) < rows:
            return f"approved: {approved} inputs, and {name} has {rows}"
        return None

    def read_values(self, query: Query, tensors: Tensors) -> None:
        """Refuse JSON values that are too large or are none, before anything is charged for the query.

        Raises:
            QueryRefused: a value of more bytes than a header may have: read, it takes fifty times as much.
            DataError: it is no JSON value.
        """
        most = self.policy.max_header
        for name in query.json_values:
            if most and name in tensors and tensors[name].numel() > most:
                rule = f"max_header: {most}, and {name} has {tensors[name].numel()} bytes"
                raise QueryRefused(self.node, query.name, rule)
        query.decode_inputs(tensors)

    def admit(self, asked: ReceivedQuery, query: Query, sent: Tensors) -> None:
        """Let a query in, or refuse it before anything is computed.

        Raises:
            QueryRefused: by the policy's list, its refusal of parameters, a limit reached, or a budget
                that the answer would pass.
        """
        rule = self.refusal_reason(query)
        if rule is not None:
            raise QueryRefused(self.node, asked.query, rule)
        # What was answered once may be again; other content under the same number is another query.
        if asked.content_hash not in self.audit.totals.sibling_contents(vars(self._entry(asked, RESPONSE))):
            self._require_approved(asked.query)
            self._limit(asked.query, self.audit.spending(self.payer, self.run), 1, 1)
            if self.budgets is not None:
                self.budgets.require_affordable(asked, query, sent)

    def charge_training(self, asked: ReceivedQuery, query: Query, sent: Tensors) -> None:
        """Charge what a query that is admitted follows from, before anything is computed for it.

        A failure, too, tells of what was learned; and learning is paid for whatever comes of it.
        """
        if self.budgets is None:
            return
        self.budgets.charge_initial_training(asked)
        if not self.budgets.charged_attempts(asked, query, sent):
            self.budgets.charge_training(asked, query, sent, 0)

    def _limit(self, query: str, spent: Spending, more_queries: int, more_bytes: int) -> None:
        """Refuse what would pass a limit of the policy, with what has left already, in all runs."""
        max_queries, max_bytes = self.policy.max_queries, self.policy.max_bytes
        if max_queries and more_queries and spent.total_queries + more_queries > max_queries:
            raise QueryRefused(self.node, query, f"max_queries: {max_queries}")
        if max_bytes and spent.total_bytes + more_bytes > max_bytes:
            raise QueryRefused(self.node, query, f"max_bytes: {max_bytes} bytes")

    def _require_approved(self, query: str, leaving: int = 0, more: int = 1, again: bool = False) -> None:
        """Refuse what goes beyond what the owner has approved: another query, one more (be it the same one
        again, with another answer), or more bytes."""
        if self.approved is None:
            return
        times, bytes = self._approved_limit(query, "times"), self._approved_limit(query, "bytes")
        rule = None
        if query not in self.approved.queries:
            rule = f"approved: {', '.join(self.approved.queries)}"
        elif times and more and self.audit.totals.response_counts[self.run, self.node, query] + more > times:
            rule = f"approved: {times} times{', and this came out otherwise before' if again else ''}"
        elif bytes and leaving > bytes:
            rule = f"approved: {bytes} bytes of an answer"
        if rule is not None:
            raise QueryRefused(self.node, query, rule)

    def _approved_limit(self, query: str, limit: str) -> int:
        """A limit of an approved query; 0: none."""
        asked = {} if self.approved is None else self.approved.queries.get(query, {})
        return int(asked.get(limit, 0))

    # --- what leaves ----------------------------------------------------------------------------------

    def release(
        self,
        asked: ReceivedQuery,
        part: str,
        tensors: Tensors,
        query: Query,
        sent: Tensors,
        wire: WireConfig | None = None,
        adding: SumContribution | None = None,
    ) -> Tensors:
        """Hand over tensors: bound, noise, charge and audit on disk, then release.

        Args:
            part: ``"response"`` or ``"gradient"``.
            sent: the tensors that came with the query.
            wire: the form in which they travel; None is float32.
            adding: how they become a part of a sum, where the server is to see sums only.

        Raises:
            QueryRefused: a tensor of undeclared kind, scores of another shape than the task's, numbers
                that cannot be added (without masks), more bytes than the policy allows, or more privacy than
                the budget.
            OwnDataError: rows of another width than the query declares, where their price follows from it.
            AuditError: the log is in trouble, or cannot be written; nothing is released then.
        """
        kinds = query.released_kinds()
        undeclared = sorted(set(tensors) - set(kinds))
        if undeclared:
            raise QueryRefused(self.node, asked.query, f"undeclared: {', '.join(undeclared)}")
        # Inputs that came were counted when they did; of public ones a query says which in its own way.
        scores = [tensor for name, tensor in tensors.items() if kinds[name].category == "scores"]
        rows = max([0, *(tensor.shape[:1].numel() for tensor in scores)])
        if 0 < (approved := self._approved_limit(asked.query, "rows")) < rows:
            rule = f"approved: {approved} inputs, and the answer is about {rows}"
            raise QueryRefused(self.node, asked.query, rule)
        if part == RESPONSE:
            self._check_scores(query, tensors, sent)
        noised, price, most, rule, stamp = self._protect(asked, part, tensors, query)
        finished = noised
        if part == RESPONSE and query.postprocess is not None:
            finished = query.postprocess(noised, sent)
        leaving = (wire or WireConfig()).compress(finished, kinds)
        # Without budgets nothing is paid for, and what is asked again after a stop counts once.
        left = ""
        if self.budgets is not None:
            # Named after its query, so that no two are seen to have had the same answer.
            about = f"{asked.number} {part} {asked.content_hash} {asked.history_hash} {digest(part, leaving)}"
            left = self.budgets.seal(chain_digest(about, stamp))
        let_out = leaving
        if adding is not None:
            leaving = adding.mask(self.node, query, let_out)
        entry = self._entry(
            asked,
            part,
            left=left,  # of what it is before masks, which are others each time
            down=asked.received_bytes,
            up=bytes_by_kind(leaving, kinds),
            mechanism="none" if self.budgets is None else self.budgets.mechanism.name,
            rule=rule,
            price=cost_to_dict(price or PrivacyCost()),
            bare=int(price is None),
            unit=self.budgets.mechanism.unit if self.budgets is not None and price else "",
        )
        self._entry_numbers[asked.number, part] = self._charge(asked, entry, most)
        if adding is not None:
            adding.record_counts(query, let_out)
        return {name: tensor.detach() for name, tensor in leaving.items()}

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

    def _charge(self, asked: ReceivedQuery, entry: Entry, most: PrivacyCost | None) -> int:
        """Write a release, after the training behind it; its entry's number.

        Args:
            most: its price at most, which follows from shapes. What it turned out to cost follows from what
                leaves, and so would a refusal of that: nothing would be paid for it.
        """
        if self.budgets is not None:
            self.budgets.charge_initial_training(asked)
        # A gradient belongs to its answer, and each further one of that is a query by itself.
        # And so is an answer to what was answered before, if a bit of it is another one: as of inputs that
        # lie otherwise in memory, or of another processor.
        again = bool(self.audit.totals.sibling_contents(vars(entry)))
        counts = int(entry.part == RESPONSE or again)

        def check(spent: Spending) -> None:
            left = sum(entry.up.values())
            self._require_approved(asked.query, left, counts, again)
            self._limit(asked.query, spent, counts, left)
            if self.budgets is not None:
                self.budgets.require_within_budget(spent, most, asked.query)

        learned = self.audit.totals.unreported(self.run, self.node)
        return self.audit.charge(replace(entry, queries=counts, training_cost=learned), check)

    def _entry(self, asked: ReceivedQuery, part: str, **told: Any) -> Entry:
        about = (self.run, self.payer, self.node, asked.number, asked.query, part)
        return Entry(*about, content_hash=asked.content_hash, history_hash=asked.history_hash, **told)

    def release_cost(self, number: int, part: str, masked: bool = False) -> ReleaseCost:
        """Under which mechanism, at which price and after what the last release under a number left, and by
        which sealed fingerprint it is known again where it is masked.

        The price is with what was learned for it, and before the first one, which was charged by itself.
        """
        entry = self.audit.entry(self._entry_numbers[number, part])
        price = Counter(entry["cost"]) + Counter(entry["training_cost"])
        bare = entry["no_guarantee"] or price.pop(NO_GUARANTEE, 0)
        return ReleaseCost(
            mechanism=entry["mechanism"],
            cost=None if bare else dict(price),
            history_hash=entry["history_hash"],
            release_hash=entry["release_hash"] if masked else "",
        )

    def _protect(
        self, asked: ReceivedQuery, part: str, tensors: Tensors, query: Query
    ) -> tuple[Tensors, PrivacyCost | None, PrivacyCost | None, str, str]:
        """Tensors as they may leave, what that costs and would cost at most, what was done, and a stamp of
        what they were."""
        if self.budgets is None:
            return tensors, None, None, "none", ""
        mechanism = self.budgets.mechanism
        rules = {name: mechanism.rule(query, name) for name in tensors}
        bounded = {name: rule.bound(tensors[name]) for name, rule in rules.items()}
        # Noise is named after all that it hides, to the last digit: equal noise on two answers would cancel.
        stamp = digest(part, bounded)
        about = ("gate", asked.number, part, asked.content_hash, asked.history_hash, stamp)
        noised = {
            name: rule.noise(bounded[name], mechanism.noise_sampler(*about, name))
            for name, rule in rules.items()
        }
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for name, shape in shapes.items():
            mechanism.require_width(query, name, shape)
        price, most = (total_cost(mechanism.release_costs(query, shapes, of)) for of in (noised, None))
        told = [f"{name}: {mechanism.describe_rule(query, name, shape)}" for name, shape in shapes.items()]
        return noised, price, most, "; ".join(told), stamp


def policy_refusal(policy: PolicyConfig, query: Query) -> str | None:
    """The rule of a policy by which a query is never answered, whatever is left of budgets, or None."""
    allowed, kinds = policy.queries, query.released_kinds()
    if "*" not in allowed and query.name not in allowed:
        return f"queries: {', '.join(allowed) or 'none'}"
    if policy.sums_only and kinds and not query.sums:
        cure = "unless its owner sets it to false"
        return f"sums_only: nothing that is not added to other nodes' (link.secure_aggregation), {cure}"
    told = sorted(
        {kind for kind in kinds.values() if policy.outputs_only and not _is_releasable(policy, kind)}
    )
    if told and all(kind.from_label_maps and not kind.package for kind in told):
        cures = "".join(f"; {kind.opt_out}" for kind in told if kind.opt_out)
        return f"label_maps: no {' and '.join(told)}, unless its owner sets it to true{cures}"
    if told:
        named = ", ".join(f"{kind!r}" for kind in policy.kinds) or "none"
        cure = (
            f", unless its owner names it in policy.kinds (now {named})"
            if any(kind.must_be_named for kind in told)
            else ""
        )
        return f"outputs_only: no {' and '.join(told)}{cure}"
    return None


def _is_releasable(policy: PolicyConfig, kind: PayloadKind) -> bool:
    """Whether "outputs only" lets a kind out: an output, or what the owner allows by name."""
    if kind in policy.kinds:
        return True
    return not kind.package and (kind.is_output or (kind.from_label_maps and policy.label_maps))
