"""What pays for a node's releases: budgets of a run and of its data, by what the audit log says was spent."""

from __future__ import annotations

import math
from collections import Counter
from functools import cached_property

from fedstill.core.errors import QueryRefused
from fedstill.node.audit_entries import RESPONSE, TRAINING, TRAINING_RESULT, Entry, ReceivedQuery
from fedstill.node.audit_log import AuditLog, Spending
from fedstill.node.run_mechanism import PrivacyMechanism, no_guarantee_reason
from fedstill.privacy.budget import Budget, BudgetExceeded, ProtectedUnitChanged, UnprotectedReleases
from fedstill.privacy.events import PrivacyCost, cost_from_dict, cost_to_dict, total_cost
from fedstill.protocol.digests import chain_digest, digest
from fedstill.protocol.queries import Query
from fedstill.protocol.wire_format import Tensors


class RunBudgets:
    """Budgets of one node in one run, held against what the audit log says of its payer.

    Nodes with one payer share its budgets, and what each of them releases is charged, however alike they are.
    """

    def __init__(self, mechanism: PrivacyMechanism, audit: AuditLog, run: str, payer: str) -> None:
        self.mechanism, self.audit, self.run, self.payer = mechanism, audit, run, payer
        config = mechanism.config
        self.run_budget = Budget(config.epsilon, config.delta, config.accountant)
        self.total_budget = Budget(*config.total_budget, config.accountant)
        self.initial_training_cost = total_cost(mechanism.initial_training_costs())
        self._refusal_reasons: dict[str, str | None] = {}
        self._charged_hashes: set[str] = set()  # what was learned before the first query, by fingerprint

    def seal(self, text: str) -> str:
        """A fingerprint that differs from run to run, and that nobody can make without the node's secret."""
        return self.mechanism.seal(text)

    def fingerprint(self, of: str, tensors: Tensors) -> str:
        """A fingerprint of what a node has learned, sealed."""
        return self.seal(digest(of, dict(tensors)))

    # --- before anything is computed --------------------------------------------------------------------

    def refusal_reason(self, query: Query) -> str | None:
        """Why a query, or the run that its method declares, can never be paid for, or None."""
        if query.name not in self._refusal_reasons:
            self._refusal_reasons[query.name] = no_guarantee_reason(self.mechanism, query)
        return self._refusal_reasons[query.name] or self.over_budget

    @cached_property
    def over_budget(self) -> str | None:
        """Why the run as declared cannot be paid for; what can be, its budgets know from then on."""
        for query in self.mechanism.side.queries.values():
            if (found := no_guarantee_reason(self.mechanism, query)) is not None:
                return f"{found}, in query {query.name}"
        spent, price = self.audit.spending(self.payer, self.run), total_cost(self.mechanism.run_costs())
        others = Counter(spent.total_events)
        others.subtract(spent.run_events)
        try:
            self._require_same_unit(spent)
            self.run_budget.check(PrivacyCost(), price)
            self.total_budget.check(cost_from_dict(+others), price)
        except BudgetExceeded as error:
            return f"privacy budget: {error}"
        return None

    def require_affordable(self, asked: ReceivedQuery, query: Query, sent: Tensors) -> None:
        """Refuse a query whose answer could not be paid for, before anything is computed.

        Raises:
            QueryRefused: saying what is left, and what it would have cost.
        """
        shapes = self.mechanism.expected_shapes(query, sent)[RESPONSE]
        price = total_cost(self.mechanism.query_costs(query, RESPONSE, shapes, sent))
        first_paid = asked.pretraining_hash in self._charged_hashes or self._is_written(
            self._initial_training_entry(asked.pretraining_hash)
        )
        if self.initial_training_cost != PrivacyCost() and not first_paid:
            price = (
                None
                if price is None or self.initial_training_cost is None
                else price + self.initial_training_cost
            )
        learned = total_cost(self.mechanism.training_costs(query, sent))
        if price is not None and learned and self.charged_attempts(asked, query, sent):
            price = price - learned  # the answer was lost, and is asked for again
        self.require_within_budget(self.audit.spending(self.payer, self.run), price, query.name)

    # --- what networks learn for a release --------------------------------------------------------------

    def charged_attempts(self, asked: ReceivedQuery, query: Query, sent: Tensors) -> int:
        """How often learning for this query has been charged: once for each result that differs."""
        if total_cost(self.mechanism.training_costs(query, sent)) == PrivacyCost():
            return 0
        return self._siblings(self._training_entry(asked, query, sent, 0))

    def last_attempt(self, asked: ReceivedQuery, query: Query, sent: Tensors) -> tuple[int, bool]:
        """The last attempt at learning for a query that is charged, and whether its result is known."""
        attempt = max(self.charged_attempts(asked, query, sent) - 1, 0)
        return attempt, self._siblings(self._result_entry(asked, query, 0)) > attempt

    def is_reproduced(self, asked: ReceivedQuery, query: Query, attempt: int) -> bool:
        """Whether an attempt came out as it did before, to the last bit; the first time, write that down."""
        result = self._result_entry(asked, query, attempt)
        if self._siblings(result) > attempt:
            return self._is_written(result)
        self.audit.charge(result)
        return True

    def charge_training(self, asked: ReceivedQuery, query: Query, sent: Tensors, attempt: int) -> None:
        """Charge what networks learn from the records for a query, before they do: on disk, or not at all.

        Each ``attempt``, after others with other results, is paid for.

        Raises:
            QueryRefused: it cannot be paid for.
            AuditError: the log is not what it was, and its owner has not settled that.
        """
        if total_cost(self.mechanism.training_costs(query, sent)) != PrivacyCost():
            self.charge_initial_training(asked)
            self._charge(self._training_entry(asked, query, sent, attempt), query.name)

    def charge_initial_training(self, asked: ReceivedQuery) -> None:
        """Charge the training before the first query, from which all that leaves follows."""
        if self.initial_training_cost != PrivacyCost() and asked.pretraining_hash not in self._charged_hashes:
            self._charge(self._initial_training_entry(asked.pretraining_hash), asked.query)
            self._charged_hashes.add(asked.pretraining_hash)

    def has_trained(self) -> bool:
        """Whether the training before the first query has been paid for, whatever it has given."""
        return self._siblings(self._initial_training_entry("")) > 0

    def _training_entry(self, asked: ReceivedQuery, query: Query, sent: Tensors, attempt: int) -> Entry:
        bill = self.mechanism.training_costs(query, sent)
        rule = f"DP-SGD of {' and '.join(bill)}, which the answer follows from"
        after = chain_digest(asked.history_hash, asked.content_hash)
        return self._entry(asked.number, query.name, TRAINING, str(attempt), after, total_cost(bill), rule)

    def _result_entry(self, asked: ReceivedQuery, query: Query, attempt: int) -> Entry:
        what, after = f"{attempt} {asked.training_hash}", chain_digest(asked.history_hash, asked.content_hash)
        rule = "what was learned, by its fingerprint"
        return self._entry(asked.number, query.name, TRAINING_RESULT, what, after, PrivacyCost(), rule)

    def _initial_training_entry(self, origin: str) -> Entry:
        noise = self.mechanism.noise_levels.get(self.mechanism.training, 0.0)
        rule = f"DP-SGD of the model (noise {noise:.4g}), which all releases follow from"
        return self._entry(-1, TRAINING, TRAINING, origin, "", self.initial_training_cost, rule)

    def _entry(
        self, number: int, query: str, part: str, what: str, after: str, price: PrivacyCost | None, rule: str
    ) -> Entry:
        return Entry(
            run=self.run,
            payer=self.payer,
            node=self.mechanism.node,
            number=number,
            query=query,
            part=part,
            content_hash=self.seal(what),
            history_hash=after,
            mechanism=self.mechanism.name,
            rule=rule,
            cost=cost_to_dict(price or PrivacyCost()),
            no_guarantee=int(price is None),
            unit=self.mechanism.unit if price else "",
        )

    def _siblings(self, entry: Entry) -> int:
        return len(self.audit.totals.sibling_contents(vars(entry)))

    def _is_written(self, entry: Entry) -> bool:
        return self.audit.totals.entry_number(vars(entry)) > 0

    def _charge(self, entry: Entry, query: str) -> None:
        price = None if entry.no_guarantee else cost_from_dict(entry.cost)
        self.audit.charge(entry, lambda spent: self.require_within_budget(spent, price, query))

    # --- whether it can be paid -------------------------------------------------------------------------

    def require_within_budget(self, spent: Spending, price: PrivacyCost | None, query: str) -> None:
        """Refuse what would pass a budget, with :class:`QueryRefused`."""
        try:
            self._require_same_unit(spent)
            self.run_budget.check(cost_from_dict(spent.run_events), price)
            self.total_budget.check(cost_from_dict(spent.total_events), price)
        except BudgetExceeded as error:
            raise QueryRefused(self.mechanism.node, query, f"privacy budget: {error}") from error

    def _require_same_unit(self, spent: Spending) -> None:
        """What left without a guarantee has no price that a budget could have paid, and what was paid for
        another unit, a record in the place of a patient, adds up with nothing."""
        if spent.run_no_guarantee and self.run_budget.epsilon < math.inf:
            way_out = "allowed is a new run, or privacy.epsilon = inf"
            raise UnprotectedReleases(
                self.run_budget.epsilon, self.run_budget.delta, spent.run_no_guarantee, way_out
            )
        units, mine = self.audit.totals.units, {self.mechanism.unit}
        if units(self.payer, self.run) - mine and self.run_budget.epsilon < math.inf:
            raise ProtectedUnitChanged(self.run_budget.epsilon, self.run_budget.delta, "a new run")
        total = self.total_budget
        if spent.total_no_guarantee and total.epsilon < math.inf:
            way_out = (
                "its owner sees in which runs by fedstill audit show, and may set "
                "privacy.total_epsilon = inf, so that each run has its own budget"
            )
            raise UnprotectedReleases(total.epsilon, total.delta, None, way_out)
        if units(self.payer) - mine and total.epsilon < math.inf:
            raise ProtectedUnitChanged(total.epsilon, total.delta)
