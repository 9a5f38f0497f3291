"""Budgets of a node: of one run and of its data, compared with the audit log's totals.

Nothing is charged here; the ledger does (:mod:`fedstill.node.release_ledger`).
"""

from __future__ import annotations

import math
from collections import Counter
from functools import cached_property

from fedstill.node.audit_entries import RESPONSE
from fedstill.node.audit_log import AuditLog, Spending
from fedstill.node.run_mechanism import PrivacyMechanism, no_guarantee_reason
from fedstill.privacy.budget import Budget, BudgetExceeded, ProtectedUnitChanged, UnprotectedReleasesError
from fedstill.privacy.events import PrivacyCost, cost_from_dict, total_cost
from fedstill.protocol.digests import digest
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

    def response_cost(self, query: Query, sent: Tensors) -> PrivacyCost | None:
        """Return the largest cost of a response, with that of private training for it; None: no guarantee."""
        shapes = self.mechanism.expected_shapes(query, sent)[RESPONSE]
        return total_cost(self.mechanism.query_costs(query, RESPONSE, shapes, sent))

    def training_cost(self, query: Query, sent: Tensors) -> PrivacyCost | None:
        """Return the cost of private training for a response; zero: none, None: no guarantee."""
        return total_cost(self.mechanism.training_costs(query, sent))

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
