"""Privacy mechanism of one node in one run: a rule for each released tensor, noise, and costs.

It follows from the owner's :class:`~fedstill.privacy.config.PrivacyConfig` and the method's declared
queries. It releases and writes nothing; the gate does.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from fedstill.core.errors import ArgumentError, NodeDataError, QueryRefused
from fedstill.node.audit_entries import GRADIENT, RESPONSE
from fedstill.node.noise_calibration import NoiseLevels, calibrate_noise_levels, placeholder_noise
from fedstill.privacy import dpsgd
from fedstill.privacy.config import DeclaredRelease, DPTrainingConfig, PrivacyConfig
from fedstill.privacy.dpsgd import DPParameters
from fedstill.privacy.events import CostBreakdown, PrivacyCost, add_cost, total_cost
from fedstill.privacy.noise import NoiseSampler, make_sampler
from fedstill.privacy.release_rules import Derived, Exact, NoisyCounts, NoisySums, ReleaseRule
from fedstill.privacy.statement import NO_GUARANTEE, PrivacyStatement, make_statement
from fedstill.protocol.digests import keyed_digest
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.node_side import NodeSide
from fedstill.protocol.payload_kinds import INPUTS, PayloadKind
from fedstill.protocol.queries import Query
from fedstill.protocol.wire_format import Tensors
from fedstill.tasks import Task

Shape = tuple[int, ...]

MAP_COUNT_SENSITIVITY = 1.01  # L1 sensitivity of class shares of an image: 1, plus float64 rounding


class PrivacyMechanism:
    """Rules and costs of one node with a number of examples.

    Args:
        node: name of the node.
        config: the owner's privacy options.
        side: the method's queries.
        local: options of local training.
        examples: number of the node's examples (groups count as configured).
        task: the task.
        secret: key of the noise.
        salt: random text of the run, so that no two runs have equal noise.
        group: column of the records' group (a patient, for example) if several records are protected
            together.

    Attributes:
        noise_levels: noise multipliers or scales, by option.
        setup_hash: hash of all that the responses depend on (data, model, method, options), so that equal
            noise is never used for two different responses. Set it before any noise is drawn.
        unit: privacy unit of the costs, for the audit log (:meth:`.PrivacyConfig.unit`).
        has_groups: whether groups are declared though each record is protected by itself, which the
            statement then says.

    Raises:
        ArgumentError: no noise level reaches the requested epsilon.
        QueryRefused: the mechanism cannot protect a query of the method.
    """

    def __init__(
        self,
        node: str,
        config: PrivacyConfig,
        side: NodeSide,
        local: LocalConfig,
        examples: int,
        task: Task,
        *,
        secret: int = 0,
        salt: str = "",
        group: str = "",
    ) -> None:
        self.node, self.config, self.side, self.local = node, config, side, local
        self.examples, self.task, self._secret = examples, task, secret
        self._all_steps = local.steps(examples)  # of local training
        self.setup_hash, self.salt = "", salt
        self.unit = config.unit(group)
        self.has_groups = False
        self._make_sampler = make_sampler(config.randomness)
        self.training = config.dp_trained.get("model", "training")  # option that local training is charged to
        self.name, self.protects = config.registered_name, config.protects
        for query in side.queries.values():
            self._check_query(query)
        self.noise_levels = calibrate_noise_levels(
            config, lambda levels: self._with_noise(levels).run_costs()
        )

    def _with_noise(self, noise_levels: NoiseLevels) -> PrivacyMechanism:
        """Return a copy with other noise levels."""
        copied = copy.copy(self)
        copied.noise_levels = noise_levels
        return copied

    def with_placeholder_noise(self) -> PrivacyMechanism:
        """Return a copy with placeholder noise for uncalibrated levels; releases without a guarantee here
        never have one.
        """
        return self._with_noise(placeholder_noise(self.config))

    def _check_query(self, query: Query) -> None:
        """Refuse a query that the mechanism cannot protect at any noise level."""
        rule, unprotected = None, sorted(set(query.trains) - (set(self.config.dp_trained) - {"model"}))
        if self.protects and query.releases and query.depends_on_records is None:
            rule = f"mechanism {self.name} cannot protect it: it does not declare depends_on_records"
        elif self.protects and unprotected:
            detail = f"it trains {', '.join(unprotected)} without noise"
            rule = f"mechanism {self.name} cannot protect it: {detail}"
        elif (
            "model" in self.config.dp_trained
            and query.span is not None
            and (extra := query.details.extra_loss)
            and query.details.extra_loss_reads_records
        ):
            kinds = ", ".join(sorted(set(query.releases.values()))) or "it"
            detail = f"its model is also trained on {extra}, and noise covers the task's loss only"
            rule = f"mechanism {self.name} cannot protect {kinds}: {detail}"
        else:
            rule = self.config.refusal(query, self.task)
        if rule is not None:
            raise QueryRefused(self.node, query.name, f"privacy: {rule}")

    # --- rules for releases -----------------------------------------------------------------------------

    def rule(self, query: Query, name: str) -> ReleaseRule:
        """Return the rule for one tensor of a response, or of the gradients that follow it."""
        config, kind = self.config, query.released_kinds()[name]
        is_input_gradient = name not in query.releases  # an input gradient
        if not self.protects or query.depends_on_records is None:
            return Exact()
        # Gradients of values computed from the records reveal these, whatever the networks were trained with.
        depends_on_records = name in query.depends_on_records or kind.category == "records"
        if is_input_gradient:
            depends_on_records = any(
                payload_kind.category == "records"
                or (part in query.depends_on_records and payload_kind.category != "counts")
                for part, payload_kind in query.releases.items()
            )
        is_unstacked = name in query.unstacked  # its size reveals the records, which no noise hides
        if kind.category == "counts" and not is_unstacked:
            if not depends_on_records:
                return Derived("counts already released with noise")
            # A responding node has a record: with sizes of 0 everywhere there would be no weights.
            minimum = int(not kind.by_class)
            return NoisyCounts(config.counts_noise, config.group_size, self._count_sensitivity(kind), minimum)
        if kind.category == "moments" and depends_on_records and not is_unstacked:
            return NoisySums(self.noise_levels["sums"], config.group_size)
        if not depends_on_records and (
            "model" in config.dp_trained
            or (kind.category == "critic" and not is_input_gradient and self._has_critics)
        ):
            # Their training is charged by itself.
            return Derived("networks trained with DP-SGD")
        if is_unstacked:
            return Exact()
        release = DeclaredRelease(kind, is_input_gradient, depends_on_records, bool(self.side.plugin))
        rule = config.rule(release, self.noise_levels)
        # Only this function knows what is derived from charged releases.
        return Exact() if isinstance(rule, Derived) else rule

    def describe_rule(self, query: Query, name: str, shape: Sequence[int]) -> str:
        """Return the rule of one tensor as text, which never claims more than its cost covers."""
        rule = self.rule(query, name)
        is_unprotected = self._rule_cost(rule, shape, None) is None and NO_GUARANTEE not in rule.text
        return f"{rule.text}: {NO_GUARANTEE}" if is_unprotected else rule.text

    @staticmethod
    def _rule_cost(
        rule: ReleaseRule, shape: Sequence[int], released: torch.Tensor | None
    ) -> PrivacyCost | None:
        """Return the cost of a rule. A cost of zero is no guarantee, except for values derived from charged
        releases.
        """
        cost = rule.cost(shape) if released is None else rule.actual_cost(shape, released)
        is_free = cost is not None and not cost and math.prod(shape) > 0
        return None if is_free and not isinstance(rule, Derived) else cost

    @property
    def _has_critics(self) -> bool:
        """True if there are critics; they train privately under every mechanism."""
        return any("critic" in query.trains for query in self.side.queries.values())

    def _count_sensitivity(self, kind: PayloadKind) -> float:
        """Return the L1 sensitivity of counts of a payload kind to one record."""
        if not kind.by_class:
            return 1.0
        return MAP_COUNT_SENSITIVITY if self.task.kind == "map" else float(self.task.count_sensitivity)

    def noise_sampler(self, *names: str | int) -> NoiseSampler:
        """Return the noise sampler for one purpose; equal purposes give equal noise.

        Raises:
            ArgumentError: ``setup_hash`` is not set.
        """
        if not self.setup_hash:
            raise ArgumentError("setup_hash", self.setup_hash, "a hash, set before any noise is drawn")
        return self._make_sampler(self._secret, self.node, self.setup_hash, self.salt, *names)

    def keyed_hash(self, text: str) -> str:
        """Return a hash of a text in this run, keyed by the secret.

        ``setup_hash`` and salt are stored next to the audit log; with these alone, values without noise
        could be guessed and checked.
        """
        return keyed_digest(self._secret, f"seal {self.setup_hash} {self.salt} {text}")

    def dp_sgd_parameters(self) -> Mapping[str, DPParameters]:
        """Return the DP-SGD parameters of each network that trains privately, by role."""
        return {role: self._dp_sgd_parameters_of_role(role) for role in self.config.dp_trained}

    def _dp_sgd_parameters_of_role(self, role: str) -> DPParameters:
        def noise_sampler(*names: str | int) -> NoiseSampler:
            return self.noise_sampler("dp-sgd", role, *names)

        option = self.config.dp_trained[role]
        table: DPTrainingConfig = getattr(self.config, option)
        return DPParameters(
            self.noise_levels[option],
            table.clip,
            noise_sampler,
            self.config.group_size,
            self.config.isolate_rounding,
        )

    def statement(self) -> PrivacyStatement:
        """Return the statement of rules, noise levels and budgets."""
        rules = {
            f"{name} of {query.name}: {self.describe_rule(query, name, shape)}"
            for query in self.side.queries.values()
            for shapes in self.expected_shapes(query).values()
            for name, shape in shapes.items()
        }
        schedule = self.run_costs()
        levels = {part: level for part, level in self.noise_levels.items() if schedule.get(part)}
        return make_statement(
            self.config, levels, sorted(rules), has_groups=self.has_groups, plugin=self.side.plugin
        )

    # --- costs ------------------------------------------------------------------------------------------

    def query_costs(
        self, query: Query, part: str, shapes: Mapping[str, Sequence[int]], inputs: Tensors
    ) -> CostBreakdown:
        """Return the maximum costs of one release of a part, with its training; ``shapes`` by name."""
        costs = self.release_costs(query, shapes)
        for name, cost in (self.training_costs(query, inputs) if part == RESPONSE else {}).items():
            add_cost(costs, name, cost)
        return costs

    def release_costs(
        self, query: Query, shapes: Mapping[str, Sequence[int]], released: Tensors | None = None
    ) -> CostBreakdown:
        """Return the costs of one release without training: the maximum, or with ``released`` the actual
        costs, which may be lower.
        """
        costs = CostBreakdown()
        for name, shape in shapes.items():
            rule = self.rule(query, name)
            add_cost(
                costs,
                rule.noise_table,
                self._rule_cost(rule, shape, None if released is None else released[name]),
            )
        return costs

    def require_declared_width(self, query: Query, name: str, shape: Sequence[int]) -> None:
        """Refuse rows whose cost differs from the declared one, which the plan assumes.

        Raises:
            NodeDataError: the server does not learn the shape, which nobody has paid for.
        """
        width = query.details.width or self.task.classes
        if name not in query.releases or query.releases[name].category != "rows" or not shape:
            return
        rule = self.rule(query, name)
        if self._rule_cost(rule, shape, None) != self._rule_cost(rule, (shape[0], width), None):
            description = f"{name} of query {query.name} is {tuple(shape)}"
            expected = f"{width} numbers per row, as its cost assumes; width = ... declares others"
            raise NodeDataError(f"{description} (expected {expected})")

    def training_costs(self, query: Query, inputs: Tensors) -> CostBreakdown:
        """Return the costs of private training before the response to a query."""
        steps = self.charged_steps_by_role(query, inputs).items()
        return {self.config.dp_trained[role]: self._dp_sgd_cost(role, *step) for role, step in steps}

    def charged_steps_by_role(self, query: Query, inputs: Tensors) -> dict[str, tuple[int, int]]:
        """Return mean sample size and number of the steps that a query declares, by role. No more are
        charged, and so no more may be taken.
        """
        steps = {}
        if self.protects and "critic" in query.trains:
            steps["critic"] = query.details.step_records or max(query.rows, 1), 1
        if self.protects and "model" in self.config.dp_trained and query.span is not None:
            steps["model"] = self.local.batch, len(query.span(inputs).steps(self._all_steps))
        return steps

    def initial_training_costs(self) -> CostBreakdown:
        """Return the costs of local training before the first query."""
        span = self.side.initial_training
        steps = 0 if span is None else len(span.steps(self._all_steps))
        return {self.training: self._local_training_cost(steps)}

    def run_costs(self) -> CostBreakdown:
        """Return the maximum costs of the whole run, as its method declares it."""
        queries = self.side.queries.values()
        rounds = sum(query.times for query in queries if query.span is not None)
        # Rounds divide local training, and each part has at least one step.
        costs = self.initial_training_costs()
        if rounds:
            first_inputs: Tensors = defaultdict(lambda: torch.tensor(0))  # zero for any name: round 0
            query_spans = (query.span(first_inputs) for query in queries if query.span is not None)
            spans = [span for span in (self.side.initial_training, *query_spans) if span is not None]
            parts = max(rounds, *(span.parts for span in spans))
            costs = {self.training: self._local_training_cost(max(self._all_steps, parts))}
        for query in queries:
            for _, name, cost in self.single_query_costs(query):
                add_cost(costs, name, None if cost is None else _multiply_cost(cost, query.times))
        return costs

    def single_query_costs(self, query: Query) -> Iterator[tuple[str, str, PrivacyCost | None]]:
        """Yield part, option and cost of one query, without its share of local training."""
        without_span = replace(query, span=None)
        for part, shapes in self.expected_shapes(query).items():
            for option, cost in self.query_costs(without_span, part, shapes, {}).items():
                yield part, option, cost

    def expected_shapes(self, query: Query, tensors: Tensors | None = None) -> dict[str, dict[str, Shape]]:
        """Return the shapes of a query's released tensors by part: as declared, or for received tensors.

        For images only their number counts, since no cost depends on their size.
        """
        counts = [len(tensor) for name, tensor in (tensors or {}).items() if query.sends.get(name) == INPUTS]
        rows = max([query.rows, 1, *counts])
        classes = self.task.classes
        response: dict[str, Shape] = {}
        for name, kind in query.releases.items():
            width = query.details.width or classes if kind.category == "rows" else classes
            response[name] = (rows, width) if kind.category in ("scores", "rows") else (rows,)
            if kind.by_class:
                response[name] = (classes,)
        gradient: dict[str, Shape] = {f"d/d{name}": (rows,) for name in query.differentiable}
        return {RESPONSE: response, GRADIENT: gradient} if gradient else {RESPONSE: response}

    def _local_training_cost(self, steps: int) -> PrivacyCost | None:
        """Return the cost of local training steps; zero if the model trains without noise, since releases
        are charged instead.
        """
        if "model" not in self.config.dp_trained or not steps:
            return PrivacyCost()
        return self._dp_sgd_cost("model", self.local.batch, steps)

    def _dp_sgd_cost(self, role: str, batch: int, steps: int) -> PrivacyCost | None:
        return dpsgd.training_cost(self._dp_sgd_parameters_of_role(role), self.examples, batch, steps)


def no_guarantee_reason(mechanism: PrivacyMechanism, query: Query) -> str | None:
    """Return the reason why a query has no finite cost under a budget, or None."""
    if math.isinf(mechanism.config.tightest_epsilon_budget):
        return None
    without_span, supposed = replace(query, span=None), mechanism.with_placeholder_noise()
    unprotected = sorted(
        {
            query.released_kinds()[name]
            for part, shapes in mechanism.expected_shapes(query).items()
            for name in shapes
            if total_cost(supposed.query_costs(without_span, part, {name: shapes[name]}, {})) is None
        }
    )
    if unprotected and not mechanism.config.protects:
        return (
            "privacy: a budget is set without a mechanism (privacy.mechanism: dp-sgd, pate or noisy-outputs)"
        )
    if unprotected:
        remedies = "".join(f"; {kind.opt_out}" for kind in unprotected if kind.opt_out)
        message = f"mechanism {mechanism.name} gives no guarantee for {', '.join(unprotected)}"
        return f"privacy: a budget is set, and {message}{remedies}"
    return None


def _multiply_cost(cost: PrivacyCost, times: int) -> PrivacyCost:
    return PrivacyCost({event: count * times for event, count in cost.items()} if times else {})
