"""Budgets of a node: of one run and of its data, checked against the audit log's totals."""

from __future__ import annotations

import math
from collections import Counter
from functools import cached_property

from fedstill.node.admission import refuse
from fedstill.node.audit_entries import RESPONSE, TRAINING, TRAINING_RESULT, Entry, ReceivedQuery
from fedstill.node.audit_log import AuditLog, Spending
from fedstill.node.run_mechanism import PrivacyMechanism, no_guarantee_reason
from fedstill.privacy.budget import Budget, BudgetExceeded, ProtectedUnitChanged, UnprotectedReleasesError
from fedstill.privacy.events import PrivacyCost, cost_from_dict, cost_to_dict, total_cost
from fedstill.protocol.digests import chain_digest, digest
from fedstill.protocol.queries import Query
from fedstill.protocol.wire_format import Tensors


class RunBudgets:
    """Privacy budgets of one node in one run, checked against the spending of its payer.

    Nodes with one payer share its budgets. Each of their releases is charged, however equal they are.

    Args:
        mechanism: the node's privacy mechanism.
        audit: the audit log.
        run: name of the run.
        payer: whose budgets are charged.

    Attributes:
        run_budget, total_budget: budgets of the run and of all runs.
        initial_training_cost: cost of local training before the first query; None: no guarantee.
    """

    def __init__(self, mechanism: PrivacyMechanism, audit: AuditLog, run: str, payer: str) -> None:
        self.mechanism, self.audit, self.run, self.payer = mechanism, audit, run, payer
        config = mechanism.config
        self.run_budget = Budget(config.epsilon, config.delta, config.accountant)
        self.total_budget = Budget(*config.total_budget, config.accountant)
        self.initial_training_cost = total_cost(mechanism.initial_training_costs())
        self._refusal_reasons: dict[str, str | None] = {}
        self._charged_hashes: set[str] = set()  # charged training before the first query, by hash

    def keyed_hash(self, text: str) -> str:
        """Return a hash that differs from run to run and that requires the node's secret."""
        return self.mechanism.keyed_hash(text)

    def fingerprint(self, label: str, tensors: Tensors) -> str:
        """Return a sealed hash of trained weights."""
        return self.keyed_hash(digest(label, dict(tensors)))

    # --- before anything is computed --------------------------------------------------------------------

    def refusal_reason(self, query: Query) -> str | None:
        """Return the reason why a query, or the declared run, can never be paid, or None."""
        if query.name not in self._refusal_reasons:
            self._refusal_reasons[query.name] = no_guarantee_reason(self.mechanism, query)
        return self._refusal_reasons[query.name] or self.over_budget_reason

    @cached_property
    def over_budget_reason(self) -> str | None:
        """Reason why the declared run exceeds a budget, or None; computed once."""
        for query in self.mechanism.side.queries.values():
            if (reason := no_guarantee_reason(self.mechanism, query)) is not None:
                return f"{reason}, in query {query.name}"
        spending, run_cost = self.audit.spending(self.payer, self.run), total_cost(self.mechanism.run_costs())
        other_runs = Counter(spending.total_events)
        other_runs.subtract(spending.run_events)
        try:
            self._require_same_unit(spending)
            self.run_budget.check(PrivacyCost(), run_cost)
            self.total_budget.check(cost_from_dict(+other_runs), run_cost)
        except BudgetExceeded as error:
            return f"privacy budget: {error}"
        return None

    def expected_cost(self, received: ReceivedQuery, query: Query, inputs: Tensors) -> PrivacyCost | None:
        """Return the cost of a query that is not charged yet, before anything is computed, with that of
        training on which its response depends; None: no guarantee.
        """
        shapes = self.mechanism.expected_shapes(query, inputs)[RESPONSE]
        cost = total_cost(self.mechanism.query_costs(query, RESPONSE, shapes, inputs))
        is_initial_charged = received.pretraining_hash in self._charged_hashes or self._is_written(
            self._initial_training_entry(received.pretraining_hash)
        )
        if self.initial_training_cost != PrivacyCost() and not is_initial_charged:
            cost = (
                None
                if cost is None or self.initial_training_cost is None
                else cost + self.initial_training_cost
            )
        training_cost = total_cost(self.mechanism.training_costs(query, inputs))
        if cost is not None and training_cost and self.charged_attempts(received, query, inputs):
            cost = cost - training_cost  # repeated query: its training is charged already
        return cost

    # --- private training -------------------------------------------------------------------------------

    def charged_attempts(self, received: ReceivedQuery, query: Query, inputs: Tensors) -> int:
        """Return how many times training for this query was charged: once for each different result."""
        if total_cost(self.mechanism.training_costs(query, inputs)) == PrivacyCost():
            return 0
        return self._count_siblings(self._training_entry(received, query, inputs, 0))

    def last_attempt(self, received: ReceivedQuery, query: Query, inputs: Tensors) -> tuple[int, bool]:
        """Return the index of the last charged attempt at training for a query, and whether its result is
        known.
        """
        attempt = max(self.charged_attempts(received, query, inputs) - 1, 0)
        return attempt, self._count_siblings(self._result_entry(received, query, 0)) > attempt

    def is_reproduced(self, received: ReceivedQuery, query: Query, attempt: int) -> bool:
        """Return whether an attempt gave the same result as before, to the last bit; the first result is
        entered in the log.
        """
        result = self._result_entry(received, query, attempt)
        if self._count_siblings(result) > attempt:
            return self._is_written(result)
        self.audit.charge(result)
        return True

    def charge_training(self, received: ReceivedQuery, query: Query, inputs: Tensors, attempt: int) -> None:
        """Charge private training for a query before it begins: on disk, or not at all.

        Each ``attempt`` after others with other results is charged.

        Raises:
            QueryRefused: it exceeds a budget.
            AuditError: the log has a fault that its owner has not accepted.
        """
        if total_cost(self.mechanism.training_costs(query, inputs)) != PrivacyCost():
            self.charge_initial_training(received)
            self._charge(self._training_entry(received, query, inputs, attempt), query.name)

    def charge_initial_training(self, received: ReceivedQuery) -> None:
        """Charge training before the first query, on which all releases depend."""
        if (
            self.initial_training_cost != PrivacyCost()
            and received.pretraining_hash not in self._charged_hashes
        ):
            self._charge(self._initial_training_entry(received.pretraining_hash), received.query)
            self._charged_hashes.add(received.pretraining_hash)

    def has_trained(self) -> bool:
        """Return whether training before the first query was charged, with any result."""
        return self._count_siblings(self._initial_training_entry("")) > 0

    def _training_entry(self, received: ReceivedQuery, query: Query, inputs: Tensors, attempt: int) -> Entry:
        costs = self.mechanism.training_costs(query, inputs)
        rule = f"DP-SGD of {' and '.join(costs)}, on which the response depends"
        history_hash = chain_digest(received.history_hash, received.content_hash)
        return self._make_entry(
            received.number, query.name, TRAINING, str(attempt), history_hash, total_cost(costs), rule
        )

    def _result_entry(self, received: ReceivedQuery, query: Query, attempt: int) -> Entry:
        result, history_hash = (
            f"{attempt} {received.training_hash}",
            chain_digest(received.history_hash, received.content_hash),
        )
        rule = "hash of the trained weights"
        return self._make_entry(
            received.number, query.name, TRAINING_RESULT, result, history_hash, PrivacyCost(), rule
        )

    def _initial_training_entry(self, pretraining_hash: str) -> Entry:
        noise = self.mechanism.noise_levels.get(self.mechanism.training, 0.0)
        rule = f"DP-SGD of the model (noise {noise:.4g}), on which all releases depend"
        return self._make_entry(
            -1, TRAINING, TRAINING, pretraining_hash, "", self.initial_training_cost, rule
        )

    def _make_entry(
        self,
        number: int,
        query: str,
        part: str,
        content: str,
        history_hash: str,
        cost: PrivacyCost | None,
        rule: str,
    ) -> Entry:
        return Entry(
            run=self.run,
            payer=self.payer,
            node=self.mechanism.node,
            number=number,
            query=query,
            part=part,
            content_hash=self.keyed_hash(content),
            history_hash=history_hash,
            mechanism=self.mechanism.name,
            rule=rule,
            cost=cost_to_dict(cost or PrivacyCost()),
            no_guarantee=int(cost is None),
            unit=self.mechanism.unit if cost else "",
        )

    def _count_siblings(self, entry: Entry) -> int:
        return len(self.audit.totals.sibling_content_hashes(vars(entry)))

    def _is_written(self, entry: Entry) -> bool:
        return self.audit.totals.entry_number(vars(entry)) > 0

    def _charge(self, entry: Entry, query: str) -> None:
        cost = None if entry.no_guarantee else cost_from_dict(entry.cost)
        node = self.mechanism.node
        self.audit.charge(entry, lambda spending: refuse(node, query, self.budget_fault(spending, cost)))

    # --- budget checks ----------------------------------------------------------------------------------

    def budget_fault(self, spending: Spending, cost: PrivacyCost | None) -> str | None:
        """Return the reason why a charge would exceed a budget, or None."""
        try:
            self._require_same_unit(spending)
            self.run_budget.check(cost_from_dict(spending.run_events), cost)
            self.total_budget.check(cost_from_dict(spending.total_events), cost)
        except BudgetExceeded as error:
            return f"privacy budget: {error}"
        return None

    def _require_same_unit(self, spending: Spending) -> None:
        """Refuse further charges after releases without a guarantee, or after charges in another privacy
        unit (records instead of patients): neither can be added to a budget.
        """
        if spending.run_no_guarantee and self.run_budget.epsilon < math.inf:
            advice = "start a new run, or set privacy.epsilon = inf"
            raise UnprotectedReleasesError(
                self.run_budget.epsilon, self.run_budget.delta, spending.run_no_guarantee, advice
            )
        units, own_unit = self.audit.totals.units, {self.mechanism.unit}
        if units(self.payer, self.run) - own_unit and self.run_budget.epsilon < math.inf:
            raise ProtectedUnitChanged(self.run_budget.epsilon, self.run_budget.delta, "a new run")
        total = self.total_budget
        if spending.total_no_guarantee and total.epsilon < math.inf:
            advice = (
                "fedstill audit show lists the runs; its owner may set "
                "privacy.total_epsilon = inf, so that each run has its own budget"
            )
            raise UnprotectedReleasesError(total.epsilon, total.delta, None, advice)
        if units(self.payer) - own_unit and total.epsilon < math.inf:
            raise ProtectedUnitChanged(total.epsilon, total.delta)
