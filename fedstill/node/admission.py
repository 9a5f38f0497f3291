"""Admission at a node: the ordered rules that a run, a query and a release must pass.

A rule is a function with a name. It gets the facts of one stage, and returns the reason of a refusal or None.
Each stage is a list of rules; the first reason refuses. In the order of a message's way through a node:

1. :data:`SERVER_RULES`, then :data:`RUN_RULES`: a server asks to join. Data and model are not read yet. The
   owner's approval follows (:mod:`fedstill.node.approvals`), then the backbone
   (:mod:`fedstill.node.features`), :func:`min_records` and :func:`training_parts`, of data and method.
2. :func:`hours` and the approval again, at each message.
3. :data:`NODE_RULES`: a declared query, whatever comes with it. The server learns the result when it joins,
   and the rules hold for each query.
4. :data:`TENSOR_RULES` and :data:`SIZE_RULES`: the tensors that came with a query. Nodes of a simulation have
   no session; there the request handler applies :data:`SIMULATION_RULES` and :func:`json_size`. Faults of
   form are kept with the tensors (:mod:`fedstill.node.received_tensors`), so that no check is made twice.
5. :data:`GATE_RULES` in the gate, then :data:`CHARGE_RULES` in the ledger: the policy's rules for queries,
   limits and budgets, before anything is computed.
6. :data:`RESPONSE_RULES`: what a query's function returned, and again :data:`CHARGE_RULES`, in the
   transaction that writes the release into the audit log.

:func:`require` and :func:`refuse` raise the refusal; :mod:`fedstill.node.refusals` replies it to the server
and writes it into the audit log. Refusals that stop a computation arise where it runs: limits of time, memory
and parameters (:mod:`fedstill.node.limits`), training without a promised noise, and messages of secure
aggregation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, time
from functools import cached_property
from typing import Protocol, TypeVar

import torch
from torch import nn

from fedstill.core.errors import QueryRefused
from fedstill.core.hashing import parse_fingerprint
from fedstill.core.table_schema import NO_SCHEMA, TableSchema
from fedstill.data.data_spec import DataSpec, require_memory
from fedstill.data.public import PublicData
from fedstill.models import PREDICTION_ONLY
from fedstill.node import limits
from fedstill.node.audit_entries import RESPONSE
from fedstill.node.audit_log import Spending
from fedstill.node.node_file import NodeFile
from fedstill.node.policy import PolicyConfig
from fedstill.node.received_tensors import ReceivedTensors
from fedstill.privacy.events import PrivacyCost
from fedstill.protocol.payload_kinds import (
    GENERATOR_PARAMETERS,
    INDICES,
    INPUTS,
    LABEL_COUNTS,
    LABEL_MAPS,
    LOGITS,
    PRIVATE_DATA,
    SCHEDULE,
    PayloadKind,
)
from fedstill.protocol.queries import Query
from fedstill.protocol.run_plan import RunDescription
from fedstill.protocol.tensor_forms import score_shape_fault
from fedstill.protocol.wire_format import SCALE, Tensors, WireConfig, tensor_bytes, wire_kind

MAX_PARTS = 100_000  # parts of local training
COMPRESSED_WIRE = WireConfig(
    inputs="int8", gradients="int8"
)  # a form with scales for every kind that can have them

Facts = TypeVar("Facts")


class Budgets(Protocol):
    """Privacy budgets of a node in a run."""

    def refusal_reason(self, query: Query) -> str | None:
        """Return the reason why a query, or the declared run, can never be paid, or None."""

    def budget_fault(self, spending: Spending, cost: PrivacyCost | None) -> str | None:
        """Return the reason why a charge would exceed a budget, or None."""


def first_reason(rules: Sequence[Callable[[Facts], str | None]], facts: Facts) -> str | None:
    """Return the reason of the first rule that refuses, or None."""
    for rule in rules:
        if (reason := rule(facts)) is not None:
            return reason
    return None


def refuse(node: str, query: str, reason: str | None) -> None:
    """Raise :class:`QueryRefused` if there is a reason."""
    if reason is not None:
        raise QueryRefused(node, query, reason)


def require(node: str, query: str, rules: Sequence[Callable[[Facts], str | None]], facts: Facts) -> None:
    """Raise :class:`QueryRefused` with the reason of the first rule that refuses."""
    if (reason := first_reason(rules, facts)) is not None:
        raise QueryRefused(node, query, reason)


def approved_limit(approved: RunDescription | None, query: str, limit: str) -> int:
    """Return a limit of an approved query (``rows``, ``times`` or ``bytes``); 0: none."""
    return 0 if approved is None else int(approved.queries.get(query, {}).get(limit, 0))


# --- 1, 2. runs, messages -----------------------------------------------------------------------------


@dataclass(frozen=True)
class RunFacts:
    """A server's request to join, or to go on with a run.

    Args:
        policy: the owner's rules.
        server: fingerprint of the server's proof of identity; empty: no proof.
        owners_schema, owners_classes: schema and classes that the owner names; empty: any.
        schema, classes: those of the run.
        min_nodes: number of nodes with which the run may continue; 0: not stated.
        now: time; None: by the clock of the node.
    """

    policy: PolicyConfig
    server: str = ""
    owners_schema: TableSchema = NO_SCHEMA
    owners_classes: tuple[str, ...] = ()
    schema: TableSchema = NO_SCHEMA
    classes: tuple[str, ...] = ()
    min_nodes: int = 0
    now: datetime | time | None = None


def allowed_servers(facts: RunFacts) -> str | None:
    """Refuse servers that the policy does not list."""
    allowed = facts.policy.allowed_servers
    if not allowed or parse_fingerprint(facts.server) in map(parse_fingerprint, allowed):
        return None
    return f"allowed_servers: not {facts.server or 'an unproven server'}"


def hours(facts: RunFacts) -> str | None:
    """Refuse everything outside the policy's hours."""
    first, _, last = facts.policy.hours.partition("-")
    now = f"{datetime.now() if facts.now is None else facts.now:%H:%M}"
    is_inside = first <= now < last if first <= last else now >= first or now < last
    if not facts.policy.hours or is_inside:
        return None
    return f"hours: {facts.policy.hours}, by the clock of the node"


def owners_schema(facts: RunFacts) -> str | None:
    """Refuse all schemas but the owner's.

    The difference is not reported: ranges that an owner took from the data would be found column by column.
    """
    if not facts.owners_schema or facts.schema == facts.owners_schema:
        return None
    return "schema: the run's schema differs from the owner's"


def owners_classes(facts: RunFacts) -> str | None:
    """Refuse all lists of classes but the owner's. The difference is not reported: the classes of the data
    would be found list by list.
    """
    if not facts.owners_classes or facts.classes == facts.owners_classes:
        return None
    return "classes: the run's classes differ from the owner's"


def min_nodes(facts: RunFacts) -> str | None:
    """Refuse a run that may continue with too few nodes."""
    if facts.min_nodes >= facts.policy.min_nodes:
        return None
    stated = f"the run may continue with {facts.min_nodes}"
    reason = stated if facts.min_nodes else "the server does not state the number of nodes"
    return f"min_nodes: {facts.policy.min_nodes}, and {reason}"


SERVER_RULES = (allowed_servers, hours)  # before the plan is parsed
RUN_RULES = (*SERVER_RULES, owners_schema, owners_classes, min_nodes)


def min_records(policy: PolicyConfig, records: int) -> str | None:
    """Refuse a run while there are too few records; their number is not reported."""
    return (
        f"min_records: {policy.min_records}, and this node has fewer"
        if records < policy.min_records
        else None
    )


def training_parts(parts: int) -> str | None:
    """Refuse local training in too many parts, each of which takes at least one step."""
    if parts <= MAX_PARTS:
        return None
    return f"rounds: {MAX_PARTS} at most, and the plan's number of parts is {parts}"


# --- 3. declared queries ------------------------------------------------------------------------------


@dataclass(frozen=True)
class QueryFacts:
    """A declared query at a node.

    Args:
        query: the declaration.
        policy: the owner's rules.
        budgets: the node's privacy budgets; None: none.
        optimizer: optimizer of the local training.
        passes_gradients: whether gradients pass through the node's model.
        sum_conflicts: reasons against queries because of earlier sums, by name.
        earlier_queries: number of queries about the node's data in other runs.
    """

    query: Query
    policy: PolicyConfig
    budgets: Budgets | None = None
    optimizer: str = ""
    passes_gradients: bool = True
    sum_conflicts: Mapping[str, str] = field(default_factory=dict)
    earlier_queries: int = 0


def allowed_queries(facts: QueryFacts) -> str | None:
    """Refuse queries that the policy does not name."""
    allowed = facts.policy.queries
    if "*" in allowed or facts.query.name in allowed:
        return None
    return f"queries: {', '.join(allowed) or 'none'}"


def sums_only(facts: QueryFacts) -> str | None:
    """Refuse responses outside sums if the policy allows sums only."""
    if not facts.policy.sums_only or not facts.query.released_kinds() or facts.query.sums:
        return None
    remedy = "unless its owner sets it to false"
    return f"sums_only: secure aggregation only (link.secure_aggregation), {remedy}"


def released_kinds(facts: QueryFacts) -> str | None:
    """Refuse payload kinds that the policy does not release."""
    policy = facts.policy
    kinds = {kind for kind in facts.query.released_kinds().values() if policy.outputs_only}
    refused = sorted(kind for kind in kinds if not _is_releasable(policy, kind))
    if not refused:
        return None
    listed = " and ".join(refused)
    if all(kind.from_label_maps for kind in refused):
        remedies = "".join(f"; {kind.opt_out}" for kind in refused if kind.opt_out)
        return f"label_maps: {listed} may not leave, unless its owner sets it to true{remedies}"
    allowed_kinds = ", ".join(f"{kind!r}" for kind in policy.kinds) or "none"
    must_be_named = any(kind.must_be_named for kind in refused)
    remedy = f", unless its owner names it in policy.kinds (now {allowed_kinds})" if must_be_named else ""
    return f"outputs_only: {listed} may not leave{remedy}"


def _is_releasable(policy: PolicyConfig, kind: PayloadKind) -> bool:
    """Return whether ``outputs_only`` allows a payload kind: outputs, and kinds that the owner allows by
    name.
    """
    return kind in policy.kinds or kind.is_output or (kind.from_label_maps and policy.label_maps)


def private_data(facts: QueryFacts) -> str | None:
    """Refuse the private data themselves."""
    if PRIVATE_DATA not in facts.query.released_kinds().values():
        return None
    return "private data: they never leave a real node, whatever its policy"


def summable(facts: QueryFacts) -> str | None:
    """Refuse sums of responses that cannot be added."""
    return facts.query.sum_fault(facts.optimizer)


def declared_rows(facts: QueryFacts) -> str | None:
    """Refuse queries that always have too many inputs."""
    max_rows, rows = facts.policy.max_rows, facts.query.rows
    return f"max_rows: {max_rows}, and it has {rows}" if 0 < max_rows < rows else None


def gradients_pass(facts: QueryFacts) -> str | None:
    """Refuse queries for gradients through a model that has none."""
    return PREDICTION_ONLY if facts.query.differentiable and not facts.passes_gradients else None


def earlier_queries(facts: QueryFacts) -> str | None:
    """Refuse all queries once other runs have sent as many as the policy allows."""
    max_queries = facts.policy.max_queries
    if not max_queries or facts.earlier_queries < max_queries:
        return None
    return f"max_queries: {max_queries}, over all runs"


def sum_conflict(facts: QueryFacts) -> str | None:
    """Refuse sums that reveal responses together with earlier sums."""
    return facts.sum_conflicts.get(facts.query.name)


def guarantee(facts: QueryFacts) -> str | None:
    """Refuse queries without the guarantee that a budget needs, and all of a run that exceeds a budget."""
    return None if facts.budgets is None else facts.budgets.refusal_reason(facts.query)


POLICY_RULES = (allowed_queries, sums_only, released_kinds)
OWNER_RULES = (private_data, *POLICY_RULES, summable, declared_rows, gradients_pass)  # known without data
GATE_RULES = (*POLICY_RULES, declared_rows, guarantee)
NODE_RULES = (earlier_queries, *OWNER_RULES, sum_conflict, guarantee)


def owner_refusals(file: NodeFile, passes_gradients: bool, queries: Mapping[str, Query]) -> dict[str, str]:
    """Return the reason against each query that a node's owner never accepts, by name.

    Args:
        file: the node's configuration.
        passes_gradients: whether gradients pass through its model.
        queries: declared queries.
    """
    reasons = {
        name: first_reason(
            OWNER_RULES, QueryFacts(query, file.policy, None, file.local.optimizer, passes_gradients)
        )
        for name, query in queries.items()
    }
    return {name: reason for name, reason in reasons.items() if reason is not None}


# --- 4. tensors that came with a query ----------------------------------------------------------------


@dataclass(frozen=True)
class TensorFacts:
    """Tensors of a message.

    Args:
        policy: the owner's rules.
        received: the tensors, with their declared payload kinds.
        approved_rows: approved number of inputs; 0: no limit.
        output_shape: shape of the task's outputs for one input; None: unknown.
        input_shape: shape of one of the node's inputs.
        input_dtype: dtype of the node's inputs.
    """

    policy: PolicyConfig
    received: ReceivedTensors
    approved_rows: int
    output_shape: Sequence[int] | None
    input_shape: Sequence[int]
    input_dtype: torch.dtype

    @property
    def tensors(self) -> Tensors:
        """Tensors as they were sent."""
        return self.received.sent

    @property
    def sends(self) -> Mapping[str, str]:
        """Declared payload kind of each tensor."""
        return self.received.sends


def declared_tensors(facts: TensorFacts) -> str | None:
    """Refuse other tensors than the query declares."""
    names = {name.removesuffix(SCALE) for name in facts.tensors}
    if names != set(facts.sends):
        return f"tensors: expected {sorted(facts.sends)}, got {sorted(names)}"
    for name in facts.tensors:
        kind = wire_kind(name, facts.sends)
        if name.endswith(SCALE) and COMPRESSED_WIRE.wire_dtype(kind) == "float32":
            return f"tensors: {name} is not expected: {kind} have no scales"
    return None


def row_limits(facts: TensorFacts) -> str | None:
    """Refuse no inputs, and more than the policy or the approved description allows."""
    max_rows = facts.policy.max_rows or math.inf
    for name, tensor in facts.tensors.items():
        kind, row_count = wire_kind(name, facts.sends), tensor.shape[:1].numel()
        if kind == INDICES and tensor.numel() > max_rows:
            return f"max_rows: {max_rows}, and {name} names {tensor.numel()}"
        if kind not in (INPUTS, LABEL_MAPS) or name.endswith(SCALE):
            continue
        if not 1 <= row_count <= max_rows:
            return f"max_rows: {max_rows}, and {name} has {row_count}"
        if 0 < facts.approved_rows < row_count:
            return f"approved: {facts.approved_rows} inputs, and {name} has {row_count}"
    return None


def sent_networks(facts: TensorFacts) -> str | None:
    """Refuse networks that the server sends, if they have more parameters than the policy allows."""
    limit, tensors = facts.policy.max_parameters or math.inf, facts.tensors
    size = sum(tensors[of].numel() for of in tensors if wire_kind(of, facts.sends) == GENERATOR_PARAMETERS)
    return None if size <= limit else f"max_parameters: {limit}, and the sent networks have {size}"


def decompressed_size(facts: TensorFacts) -> str | None:
    """Refuse compressed tensors that grow beyond the limit of a message, at four bytes per number."""
    tensors, max_message = facts.tensors, facts.policy.max_message
    size = sum(4 * tensor.numel() for name, tensor in tensors.items() if f"{name}{SCALE}" in tensors)
    if size <= (max_message or math.inf):
        return None
    return f"max_message: {max_message}, and in float32 it has {size} bytes"


def sent_forms(facts: TensorFacts) -> str | None:
    """Refuse tensors of another dtype or shape than their payload kinds'."""
    fault = facts.received.form_fault(facts.input_shape, facts.output_shape, facts.input_dtype)
    return None if fault is None else f"tensors: {fault}"


def finite_numbers(facts: TensorFacts) -> str | None:
    """Refuse NaN and infinity."""
    for name, tensor in facts.received.decompressed.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            return f"finite numbers: the server sent {name} with NaN or infinity"
    return None


TENSOR_RULES = (
    declared_tensors, row_limits, sent_networks, decompressed_size, sent_forms, finite_numbers
)  # fmt: skip
SIMULATION_RULES = (row_limits, sent_networks, sent_forms)  # its server is this process


def json_size(policy: PolicyConfig, query: Query, tensors: Tensors) -> str | None:
    """Refuse JSON values with more bytes than a header may have; parsing takes fifty times as much memory."""
    for name in query.details.json_values:
        if policy.max_header and name in tensors and tensors[name].numel() > policy.max_header:
            return f"max_header: {policy.max_header}, and {name} has {tensors[name].numel()} bytes"
    return None


class RunSizes:
    """Sizes of one run at a deployed node.

    Args:
        modules: the node's networks by role.
        public: public data of the run, or None.
        spec: data spec of the run.
        max_memory: bytes that a query may take; 0 is no limit.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], public: PublicData | None, spec: DataSpec, max_memory: int
    ) -> None:
        self.modules, self.public, self.spec, self.max_memory = modules, public, spec, max_memory
        self.class_count = spec.make_task().classes

    @cached_property
    def bytes_per_input(self) -> int:
        """Bytes that the node's networks keep for one input of a query."""
        shape, modules = self.spec.shape, self.modules
        form = self.spec.form
        total = limits.bytes_per_input(modules["model"], shape, form)
        if "critic" in modules:  # it also trains on as many real inputs
            weight = next(modules["critic"].parameters())
            seen = (weight.shape[1], *shape[1:]) if weight.ndim == 4 else shape  # label maps add channels
            total += 2 * limits.bytes_per_input(modules["critic"], seen, form)
        return total


@dataclass(frozen=True)
class SizeFacts:
    """A query's tensors in a run: the run's sizes, the declaration and the tensors."""

    sizes: RunSizes
    query: Query
    tensors: Tensors

    def names(self, kind: str) -> list[str]:
        """Return the names of the tensors of a payload kind."""
        return [name for name, sent in self.query.sends.items() if sent == kind]


def shapes_of_run(facts: SizeFacts) -> str | None:
    """Refuse counts and logits that do not fit the run, using its plan only."""
    counts: tuple[int, ...] = (facts.sizes.class_count,)
    expected = dict.fromkeys(facts.names(LABEL_COUNTS), counts)
    for indices in facts.names(INDICES)[:1]:  # one row per index
        shape = (len(facts.tensors[indices]), *facts.sizes.spec.output_shape)
        expected |= dict.fromkeys(facts.names(LOGITS), shape)
    for name, shape in expected.items():
        tensor = facts.tensors[name]
        if tensor.dtype != torch.float32 or tuple(tensor.shape) != shape:
            received = f"{tensor.dtype} {tuple(tensor.shape)}"
            return f"tensors: the server sent {name}: {received} (expected float32 {shape})"
    return None


def token_ids(facts: SizeFacts) -> str | None:
    """Refuse token ids outside the vocabulary, which would fail in the networks after the charge."""
    vocabulary = facts.sizes.spec.vocabulary
    for name in facts.names(INPUTS):
        ids = facts.tensors[name]
        if not ids.is_floating_point() and ids.numel():
            low, high = int(ids.min()), int(ids.max())
            if not 0 <= low <= high < vocabulary:
                expected = f"expected 0 to {vocabulary - 1}"
                return f"tensors: the server sent {name} with ids {low} to {high} ({expected})"
    return None


def schedules(facts: SizeFacts) -> str | None:
    """Refuse negative numbers of a schedule."""
    for name in facts.names(SCHEDULE):
        number = int(facts.tensors[name])
        if number < 0:
            return f"schedule: the server sent {name} = {number} (expected a number from 0)"
    return None


def public_rows(facts: SizeFacts) -> str | None:
    """Refuse rows that the public data do not have."""
    count = 0 if facts.sizes.public is None else len(facts.sizes.public)
    for name in facts.names(INDICES):
        rows = facts.tensors[name]
        # Two numbers may be a range with an exclusive end, which may equal the number of rows.
        end = count if len(rows) == 2 and bool(rows[0] <= rows[1]) else count - 1
        if rows.numel() and not (count and 0 <= int(rows.min()) <= int(rows.max()) <= end):
            return f"rows: the server sent {name} with rows outside the {count} of the public data"
    return None


def query_memory(facts: SizeFacts) -> str | None:
    """Refuse more inputs at once than the memory limit allows.

    Raises:
        MemoryLimitExceeded: the same, as other limits (:func:`fedstill.node.limits.enforce_limits`).
    """
    sizes = facts.sizes
    input_count = max([0, *(len(facts.tensors[name]) for name in facts.names(INPUTS))])
    if input_count and sizes.max_memory:
        need = input_count * sizes.bytes_per_input
        require_memory(f"a query about {input_count} inputs at once", need, sizes.max_memory)
    row_total = sum(facts.tensors[name].numel() for name in facts.names(INDICES))
    if row_total and sizes.public is not None:  # a row may occur several times, and is copied each time
        per_row = tensor_bytes(sizes.public.inputs[0]) + 2 * 4 * math.prod(sizes.spec.output_shape)
        need = row_total * per_row
        require_memory(f"a query about {row_total} public inputs at once", need, sizes.max_memory)
    return None


SIZE_RULES = (shapes_of_run, token_ids, schedules, public_rows, query_memory)


# --- 5. limits and budgets ----------------------------------------------------------------------------


@dataclass(frozen=True)
class ChargeFacts:
    """A query before it is computed, or a release before it is charged.

    Args:
        query: name of the query.
        policy: the owner's rules.
        approved: the description that the owner approved; None: policy alone decides.
        budgets: the node's privacy budgets; None: none.
        spending: returns the payer's earlier spending; called only if a rule depends on it.
        responses: number of earlier responses to this query in the run.
        cost: upper bound of the privacy cost; None: no guarantee.
        queries: number of queries for which it counts.
        byte_count: released bytes.
        is_changed: whether another response to the same query was released before.
    """

    query: str
    policy: PolicyConfig
    approved: RunDescription | None
    budgets: Budgets | None
    spending: Callable[[], Spending]
    responses: int
    cost: PrivacyCost | None
    queries: int = 1
    byte_count: int = 1
    is_changed: bool = False


def approved_query(facts: ChargeFacts) -> str | None:
    """Refuse queries that the approved description does not have."""
    approved = facts.approved
    if approved is None or facts.query in approved.queries:
        return None
    return f"approved: {', '.join(approved.queries)}"


def approved_times(facts: ChargeFacts) -> str | None:
    """Refuse one query more than approved, also a repeated query with another response."""
    max_times = approved_limit(facts.approved, facts.query, "times")
    if not max_times or not facts.queries or facts.responses + facts.queries <= max_times:
        return None
    return f"approved: {max_times} times{', and an earlier response differed' if facts.is_changed else ''}"


def approved_bytes(facts: ChargeFacts) -> str | None:
    """Refuse responses with more bytes than approved."""
    max_bytes = approved_limit(facts.approved, facts.query, "bytes")
    return f"approved: {max_bytes} bytes per response" if 0 < max_bytes < facts.byte_count else None


def max_queries(facts: ChargeFacts) -> str | None:
    """Refuse queries after the policy's number, over all runs."""
    limit = facts.policy.max_queries
    if not limit or not facts.queries or facts.spending().total_queries + facts.queries <= limit:
        return None
    return f"max_queries: {limit}"


def max_bytes(facts: ChargeFacts) -> str | None:
    """Refuse releases beyond the policy's number of bytes, over all runs."""
    limit = facts.policy.max_bytes
    exceeds = limit and facts.spending().total_bytes + facts.byte_count > limit
    return f"max_bytes: {limit} bytes" if exceeds else None


def privacy_budget(facts: ChargeFacts) -> str | None:
    """Refuse a privacy cost beyond a budget of the run or of the data."""
    return None if facts.budgets is None else facts.budgets.budget_fault(facts.spending(), facts.cost)


CHARGE_RULES = (approved_query, approved_times, approved_bytes, max_queries, max_bytes, privacy_budget)


# --- 6. responses -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResponseFacts:
    """Tensors that a query's function returned.

    Args:
        part: ``"response"`` or ``"gradient"``.
        query: declaration of the query.
        tensors: tensors to release.
        sent: the tensors that came with the query.
        approved_rows: approved number of inputs; 0: no limit.
        output_shape: shape of the task's outputs for one input; None: unknown.
    """

    part: str
    query: Query
    tensors: Tensors
    sent: Tensors
    approved_rows: int
    output_shape: tuple[int, ...] | None

    @cached_property
    def kinds(self) -> Mapping[str, PayloadKind]:
        """Payload kinds of all tensors that the query may release."""
        return self.query.released_kinds()

    @cached_property
    def scores(self) -> Mapping[str, torch.Tensor]:
        """Tensors of scores, by name."""
        kinds = self.kinds
        return {name: tensor for name, tensor in self.tensors.items() if kinds[name].category == "scores"}


def undeclared(facts: ResponseFacts) -> str | None:
    """Refuse tensors that the query does not declare."""
    names = sorted(facts.tensors.keys() - facts.kinds.keys())
    return f"undeclared: {', '.join(names)}" if names else None


def approved_rows(facts: ResponseFacts) -> str | None:
    """Refuse scores of more inputs than approved. Received inputs were counted on arrival; public rows are
    named in other ways.
    """
    limit = facts.approved_rows
    if not limit:
        return None
    rows = max([0, *(tensor.shape[:1].numel() for tensor in facts.scores.values())])
    return f"approved: {limit} inputs, and the response has {rows}" if limit < rows else None


def score_shapes(facts: ResponseFacts) -> str | None:
    """Refuse scores that do not have the task's shape, with one row per received input."""
    if facts.part != RESPONSE:
        return None
    sends, sent = facts.query.sends, facts.sent
    inputs = [len(sent[name]) for name, kind in sends.items() if kind == INPUTS and name in sent]
    for name, tensor in facts.scores.items():
        rows = inputs[0] if inputs else None
        fault = score_shape_fault(name, tuple(tensor.shape), rows, facts.output_shape)
        if fault is not None:
            return f"outputs: {fault}"
    return None


RESPONSE_RULES = (undeclared, approved_rows, score_shapes)
