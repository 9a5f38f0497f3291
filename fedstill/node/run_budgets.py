"""What pays for a node's releases: budgets of a run and of its data, by what the audit log says was spent."""

from __future__ import annotations

import math
from collections import Counter
from functools import cached_property

from fedstill.core.errors import QueryRefused
from fedstill.node.audit_entries import RESPONSE, TRAINING, TRAINING_RESULT, Entry, ReceivedQuery
from fedstill.node.audit_log import AuditLog, Spent
from fedstill.node.run_mechanism import Mechanism, unpriced
from fedstill.privacy.budget import Budget, BudgetExceeded, ProtectedUnitChanged, UnprotectedReleases
from fedstill.privacy.events import PrivacyCost, cost_from_dict, cost_to_dict, total_cost
from fedstill.protocol.digests import chain_digest, digest
from fedstill.protocol.queries import Query
from fedstill.protocol.wire_format import Tensors


class Budgets:
    """Budgets of one node in one run, held against what the audit log says of its payer.

    Nodes with one payer share its budgets, and what each of them releases is charged, however alike they are.
    """

    def __init__(self, mechanism: Mechanism, audit: AuditLog, run: str, payer: str) -> None:
        self.mechanism, self.audit, self.run, self.payer = mechanism, audit, run, payer
        config = mechanism.config
        self.budget = Budget(config.epsilon, config.delta, config.accountant)
        self.total_budget = Budget(*config.over_all, config.accountant)
        self.first = total_cost(mechanism.first())
        self._objections: dict[str, str | None] = {}
        self._paid: set[str] = set()  # what was learned before the first query, by fingerprint

    def seal(self, text: str) -> str:
        """A fingerprint that differs from run to run, and that nobody can make without the node's secret."""
        return self.mechanism.seal(text)

    def fingerprint(self, of: str, tensors: Tensors) -> str:
        """A fingerprint of what a node has learned, sealed."""
        return self.seal(digest(of, dict(tensors)))

    # --- before anything is computed --------------------------------------------------------------------

    def objection(self, query: Query) -> str | None:
        """Why a query, or the run that its method declares, can never be paid for, or None."""
        if query.name not in self._objections:
            self._objections[query.name] = unpriced(self.mechanism, query)
        return self._objections[query.name] or self._too_dear

    @cached_property
    def _too_dear(self) -> str | None:
        """Why the run as declared cannot be paid for; what can be, its budgets know from then on."""
        for query in self.mechanism.side.queries.values():
            if (found := unpriced(self.mechanism, query)) is not None:
                return f"{found}, in query {query.name}"
        spent, price = self.audit.spending(self.payer, self.run), total_cost(self.mechanism.schedule())
        others = Counter(spent.total)
        others.subtract(spent.run)
        try:
            self._refuse_unlike(spent)
            self.budget.check(PrivacyCost(), price)
            self.total_budget.check(cost_from_dict(+others), price)
        except BudgetExceeded as error:
            return f"privacy budget: {error}"
        return None

    def afford(self, asked: Asked, query: Query, sent: Tensors) -> None:
        """Refuse a query whose answer could not be paid for, before anything is computed.

        Raises:
            QueryRefused: saying what is left, and what it would have cost.
        """
        shapes = self.mechanism.expected(query, sent)[ANSWER]
        price = total_cost(self.mechanism.bill(query, ANSWER, shapes, sent))
        first_paid = asked.origin in self._paid or self._is_written(self._first(asked.origin))
        if self.first != PrivacyCost() and not first_paid:
            price = None if price is None or self.first is None else price + self.first
        learned = total_cost(self.mechanism.learning(query, sent))
        if price is not None and learned and self.attempts(asked, query, sent):
            price = price - learned  # the answer was lost, and is asked for again
        self.check(self.audit.spending(self.payer, self.run), price, query.name)

    # --- what networks learn for a release --------------------------------------------------------------

    def attempts(self, asked: Asked, query: Query, sent: Tensors) -> int:
        """How often learning for this query has been charged: once for each result that differs."""
        if total_cost(self.mechanism.learning(query, sent)) == PrivacyCost():
            return 0
        return self._siblings(self._learning(asked, query, sent, 0))

    def attempt(self, asked: Asked, query: Query, sent: Tensors) -> tuple[int, bool]:
        """The last attempt at learning for a query that is charged, and whether its result is known."""
        attempt = max(self.attempts(asked, query, sent) - 1, 0)
        return attempt, self._siblings(self._result(asked, query, 0)) > attempt

    def came_out(self, asked: Asked, query: Query, attempt: int) -> bool:
        """Whether an attempt came out as it did before, to the last bit; the first time, write that down."""
        result = self._result(asked, query, attempt)
        if self._siblings(result) > attempt:
            return self._is_written(result)
        self.audit.charge(result)
        return True

    def pay_learning(self, asked: Asked, query: Query, sent: Tensors, attempt: int) -> None:
        """Charge what networks learn from the records for a query, before they do: on disk, or not at all.

        Each ``attempt``, after others with other results, is paid for.

        Raises:
            QueryRefused: it cannot be paid for.
            AuditError: the log is not what it was, and its owner has not settled that.
        """
        if total_cost(self.mechanism.learning(query, sent)) != PrivacyCost():
            self.pay_first(asked)
            self._charge(self._learning(asked, query, sent, attempt), query.name)

    def pay_first(self, asked: Asked) -> None:
        """Charge the training before the first query, from which all that leaves follows."""
        if self.first != PrivacyCost() and asked.origin not in self._paid:
            self._charge(self._first(asked.origin), asked.query)
            self._paid.add(asked.origin)

    def trained(self) -> bool:
        """Whether the training before the first query has been paid for, whatever it has given."""
        return self._siblings(self._first("")) > 0

    def _learning(self, asked: Asked, query: Query, sent: Tensors, attempt: int) -> Entry:
        bill = self.mechanism.learning(query, sent)
        rule = f"DP-SGD of {' and '.join(bill)}, which the answer follows from"
        after = chain_digest(asked.after, asked.content)
        return self._entry(asked.number, query.name, TRAINING, str(attempt), after, total_cost(bill), rule)

    def _result(self, asked: Asked, query: Query, attempt: int) -> Entry:
        what, after = f"{attempt} {asked.learned}", chain_digest(asked.after, asked.content)
        rule = "what was learned, by its fingerprint"
        return self._entry(asked.number, query.name, LEARNED, what, after, PrivacyCost(), rule)

    def _first(self, origin: str) -> Entry:
        noise = self.mechanism.levels.get(self.mechanism.training, 0.0)
        rule = f"DP-SGD of the model (noise {noise:.4g}), which all releases follow from"
        return self._entry(-1, TRAINING, TRAINING, origin, "", self.first, rule)

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
        return len(self.audit.totals.siblings(vars(entry)))

    def _is_written(self, entry: Entry) -> bool:
        return self.audit.totals.number(vars(entry)) > 0

    def _charge(self, entry: Entry, query: str) -> None:
        price = None if entry.no_guarantee else cost_from_dict(entry.cost)
        self.audit.charge(entry, lambda spent: self.check(spent, price, query))

    # --- whether it can be paid -------------------------------------------------------------------------

    def check(self, spent: Spent, price: PrivacyCost | None, query: str) -> None:
        """Refuse what would pass a budget, with :class:`QueryRefused`."""
        try:
            self._refuse_unlike(spent)
            self.budget.check(cost_from_dict(spent.run), price)
            self.total_budget.check(cost_from_dict(spent.total), price)
        except BudgetExceeded as error:
            raise QueryRefused(self.mechanism.node, query, f"privacy budget: {error}") from error

    def _refuse_unlike(self, spent: Spent) -> None:
        """What left without a guarantee has no price that a budget could have paid, and what was paid for
        another unit, a record in the place of a patient, adds up with nothing."""
        if spent.bare_run and self.budget.epsilon < math.inf:
            way_out = "allowed is a new run, or privacy.epsilon = inf"
            raise UnprotectedReleases(self.budget.epsilon, self.budget.delta, spent.bare_run, way_out)
        units, mine = self.audit.totals.units, {self.mechanism.unit}
        if units(self.payer, self.run) - mine and self.budget.epsilon < math.inf:
            raise ProtectedUnitChanged(self.budget.epsilon, self.budget.delta, "a new run")
        total = self.total_budget
        if spent.bare_total and total.epsilon < math.inf:
            way_out = (
                "its owner sees in which runs by fedstill audit show, and may set "
                "privacy.total_epsilon = inf, so that each run has its own budget"
            )
            raise UnprotectedReleases(total.epsilon, total.delta, None, way_out)
        if units(self.payer) - mine and total.epsilon < math.inf:
            raise ProtectedUnitChanged(total.epsilon, total.delta)
