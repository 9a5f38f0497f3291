"""The state of every release of one node in one run, and all of its charges.

A release is the response to a query, or the input gradients that follow it. It passes four states, in order::

    ADMITTED --complete--> TRAINED --confirm_charge--> CHARGED --hand_over--> RELEASED

- *Admitted*: rules, limits and budgets allow it. Private training on which it depends is charged before it
  begins, whatever comes of it.
- *Trained*: its tensors are computed. The hash of privately trained weights is in the audit log.
- *Charged*: its entry is in the audit log, with the cost of exactly these tensors.
- *Released*: it was handed over. A repeated query gets the same tensors, as long as they are kept.

The states of recent releases are in memory, the charges in the audit log, on disk. After a stop at any point
a query is admitted again, computed again, and finds the entries of the first time: the same release is the
same entry, at no further cost. So nothing leaves before its charge, and no charge is counted twice.

"The same" is decided by hashes. Content: the tensors that came with the query. History: the queries before
it, and all weights that were trained privately. Release: the tensors that leave, before and after noise. If
one bit differs, for example after training on another processor, it is another release, with other noise and
a charge of its own. Private training that gave another result than before is another attempt, likewise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fedstill.core.errors import NodeFault, QueryMismatch
from fedstill.node.admission import CHARGE_RULES, ChargeFacts, refuse, require
from fedstill.node.audit_entries import (
    GRADIENT,
    NO_GUARANTEE,
    RESPONSE,
    TRAINING,
    TRAINING_RESULT,
    Entry,
    ReceivedQuery,
)
from fedstill.node.audit_log import AuditLog, Charge, Spending
from fedstill.node.policy import PolicyConfig
from fedstill.node.replies import ReleaseCost
from fedstill.node.run_budgets import RunBudgets
from fedstill.privacy.events import PrivacyCost, cost_from_dict, cost_to_dict, total_cost
from fedstill.protocol.digests import chain_digest
from fedstill.protocol.queries import Query
from fedstill.protocol.run_plan import RunDescription
from fedstill.protocol.wire_format import Tensors

ADMITTED, TRAINED, CHARGED, RELEASED = "admitted", "trained", "charged", "released"
TRANSITIONS = {  # a hand-over that failed is repeated from CHARGED: its charge finds its own entry
    ADMITTED: (TRAINED,),
    TRAINED: (CHARGED,),
    CHARGED: (CHARGED, RELEASED),
    RELEASED: (),
}


@dataclass
class Release:
    """One release of a node, on its way out.

    Args:
        query: declaration of the query.
        part: ``"response"`` or ``"gradient"``.
        received: the query, or the output gradients, as received.
        state: its state.

    Attributes:
        attempt: index of the charged attempt at private training that it depends on.
        tensors: tensors that have left, once it is released.
    """

    query: Query
    part: str
    received: ReceivedQuery
    state: str = ADMITTED
    attempt: int = field(default=0, init=False)
    tensors: Tensors = field(default_factory=dict, init=False)

    @property
    def is_released(self) -> bool:
        """True once it was handed over."""
        return self.state == RELEASED

    def require_before(self, state: str) -> None:
        """Raise RuntimeError if a state may not follow the present one."""
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"a release that is {self.state} cannot become {state}")

    def move_to(self, state: str) -> None:
        """Enter another state."""
        self.require_before(state)
        self.state = state


class ReleaseLedger:
    """Admits, charges and hands over the releases of one node in one run.

    Args:
        node: name of the node.
        policy: the owner's rules.
        audit: the log in which releases are charged before they are handed over.
        run: name of the run.
        payer: whose budgets and limits count.

    Attributes:
        approved: description that the owner approved; None: policy alone decides.
        budgets: privacy mechanism and budgets; None: no privacy accounting.
        last_number: number of the last query whose response was computed; -1 before the first.
    """

    def __init__(self, node: str, policy: PolicyConfig, audit: AuditLog, run: str, payer: str) -> None:
        self.node, self.policy, self.audit, self.run, self.payer = node, policy, audit, run, payer
        self.approved: RunDescription | None = None
        self.budgets: RunBudgets | None = None
        self.last_number = -1
        self._half_trained = ""  # query at which private training may have stopped half-way
        self._charged_initial: set[str] = set()  # known to be in the log, by hash
        self._entry_numbers: dict[tuple[int, str], int] = {}  # last entry, by query number and part

    def restart(self, query_number: int = 0) -> None:
        """Expect query ``query_number`` next, with the node in its state before it. Charges stay."""
        self.last_number, self._half_trained = query_number - 1, ""

    def require_complete_training(self, operation: str) -> None:
        """Refuse to continue from networks that may have been trained half-way.

        Nor may such a state be saved: training for the failed query is charged once, and would be repeated
        on top of it.

        Raises:
            NodeFault: an earlier query failed during private training.
        """
        if self._half_trained:
            reason = f"it failed at query {self._half_trained}: resume the run from an earlier checkpoint"
            raise NodeFault(self.node, operation, reason)

    def require_unused(self, query: str, number: int) -> None:
        """Refuse a number that is not above that of the last computed query, with QueryMismatch."""
        if number <= self.last_number:
            raise QueryMismatch(self.node, query, number)

    # --- admitted -----------------------------------------------------------------------------------------

    def admit(self, query: Query, received: ReceivedQuery, sent: Tensors) -> Release:
        """Admit a response before it is computed; nothing is charged yet.

        Raises:
            QueryRefused: a limit is reached, or the response would exceed a budget.
        """
        release = Release(query, RESPONSE, received)
        # A repeated query is admitted; other content under the same number is another query.
        known = self.audit.totals.sibling_content_hashes(self._release_keys(release))
        if received.content_hash not in known:
            cost = None if self.budgets is None else self._expected_cost(self.budgets, release, sent)
            spending = partial(self.audit.spending, self.payer, self.run)
            require(self.node, query.name, CHARGE_RULES, self._charge_facts(release, spending, cost))
        return release

    def admit_gradients(
        self, response: Release, content_hash: str, byte_counts: Mapping[str, int]
    ) -> Release:
        """Admit input gradients of a released response. They need no training beyond that of the response.

        Raises:
            QueryMismatch: the response was not released.
            NodeFault: a later query may have trained the networks half-way.
        """
        self.require_complete_training("gradient")
        answered = response.received
        if not response.is_released:
            raise QueryMismatch(self.node, response.query.name, answered.number)
        history_hash = answered.history_after(answered.history_hash)
        hashes = answered.pretraining_hash, answered.training_hash
        received = ReceivedQuery(
            answered.number, answered.query, content_hash, history_hash, byte_counts, *hashes
        )
        return Release(response.query, GRADIENT, received, TRAINED)

    def charge_training(self, release: Release, sent: Tensors) -> None:
        """Charge the private training on which an admitted response depends, before it begins.

        A failure depends on the training, too; so training is charged whatever its outcome.

        Raises:
            QueryRefused: it exceeds a budget.
            AuditError: the log has a fault or cannot be written.
        """
        if self.budgets is not None:
            self._charge_initial_training(self.budgets, release)
            if not self._charged_attempts(self.budgets, release, sent):
                self._charge_attempt(self.budgets, release, sent)

    def _expected_cost(self, budgets: RunBudgets, release: Release, sent: Tensors) -> PrivacyCost | None:
        """Return the largest cost that an admitted query may add, with that of training on which it
        depends; None: no guarantee.
        """
        cost = budgets.response_cost(release.query, sent)
        initial = budgets.initial_training_cost
        if initial != PrivacyCost() and not self._is_initial_training_charged(budgets, release):
            cost = None if cost is None or initial is None else cost + initial
        training = budgets.training_cost(release.query, sent)
        if cost is not None and training and self._charged_attempts(budgets, release, sent):
            cost = cost - training
        return cost

    # --- trained ------------------------------------------------------------------------------------------

    def begin_training(self, release: Release, sent: Tensors) -> bool:
        """Begin private training for an admitted response, with the last charged attempt.

        Until :meth:`complete` the networks may be trained half-way.

        Returns:
            True if the attempt was completed before, so that its result is known.
        """
        budgets = self._require_budgets()
        release.attempt = max(self._charged_attempts(budgets, release, sent) - 1, 0)
        self._half_trained = f"{release.received.number} ({release.query.name})"
        return self._count_siblings(self._result_entry(budgets, release)) > release.attempt

    def end_training(self, release: Release, weights: Tensors, sent: Tensors) -> bool:
        """Write the result of an attempt into the log, or compare it with the one that is there.

        Training that was stopped is repeated with the same random numbers, and costs nothing if the result is
        equal to the last bit. If it differs (other threads, another machine), no random number may be used
        twice: another attempt is charged, with other records and other noise.

        Args:
            release: the response.
            weights: privately trained weights.
            sent: the tensors that came with the query.

        Returns:
            False if another attempt must be made, which is charged by now.

        Raises:
            QueryRefused: another attempt exceeds a budget.
        """
        budgets = self._require_budgets()
        training_hash = budgets.fingerprint("learned", weights)
        release.received = replace(release.received, training_hash=training_hash)
        result = self._result_entry(budgets, release)
        if self._count_siblings(result) <= release.attempt:  # the first result
            self.audit.charge(result)
            return True
        if self._is_written(result):
            return True
        release.attempt += 1
        self._charge_attempt(budgets, release, sent)
        return False

    def complete(self, release: Release) -> None:
        """Take note that a response is computed, on completely trained networks."""
        release.move_to(TRAINED)
        self.last_number, self._half_trained = release.received.number, ""

    def has_trained(self) -> bool:
        """Return whether training before the first query was charged in this run, with any result."""
        budgets = self.budgets
        return budgets is not None and self._count_siblings(self._initial_training_entry(budgets, "")) > 0

    # --- charged ------------------------------------------------------------------------------------------

    def prepare_charge(
        self,
        release: Release,
        *,
        release_hash: str,
        byte_counts: Mapping[str, int],
        cost: PrivacyCost | None,
        max_cost: PrivacyCost | None,
        rule: str,
    ) -> Charge:
        """Return the charge of a release, after charging the training on which it depends.

        Its check raises :class:`QueryRefused` if a limit or a budget is exceeded.

        Args:
            release: the release.
            release_hash: sealed hash of the tensors, with and without noise.
            byte_counts: bytes to hand over, by payload kind.
            cost: actual cost; None: no guarantee.
            max_cost: upper bound of the cost, which depends on shapes only. The actual cost depends on the
                released values, and so would a refusal because of it, which would be an uncharged release.
            rule: protection of the release, in words.

        Raises:
            QueryRefused: initial training exceeds a budget.
            AuditError: the log has a fault or cannot be written.
        """
        release.require_before(CHARGED)
        received, budgets = release.received, self.budgets
        if budgets is not None:
            self._charge_initial_training(budgets, release)
        # A gradient belongs to its response, and each further gradient is a query by itself.
        # So is another response to the same query if a bit differs, for example because inputs
        # have another memory layout, or the processor changed.
        keys = self._release_keys(release)
        is_changed = bool(self.audit.totals.sibling_content_hashes(keys))
        query_count = int(release.part == RESPONSE or is_changed)
        entry = Entry(
            **keys,
            content_hash=received.content_hash,
            release_hash=release_hash,
            down=received.received_bytes,
            up=byte_counts,
            mechanism="none" if budgets is None else budgets.mechanism.name,
            rule=rule,
            cost=cost_to_dict(cost) if cost else {},
            no_guarantee=int(cost is None),
            unit=budgets.mechanism.unit if budgets is not None and cost else "",
            queries=query_count,
            training_cost=self.audit.totals.unreported_training_charges(self.run, self.node),
        )
        byte_count = sum(byte_counts.values())

        def check(spending: Callable[[], Spending]) -> None:
            facts = self._charge_facts(release, spending, max_cost, query_count, byte_count, is_changed)
            require(self.node, received.query, CHARGE_RULES, facts)

        return Charge(entry, check)

    def confirm_charge(self, release: Release, entry_number: int) -> None:
        """Take note that a release is charged, by the number of its entry in the audit log."""
        release.move_to(CHARGED)
        self._entry_numbers[release.received.number, release.part] = entry_number

    # --- released -----------------------------------------------------------------------------------------

    def hand_over(self, release: Release, tensors: Tensors) -> Tensors:
        """Return the tensors of a charged release, without graph."""
        release.move_to(RELEASED)
        release.tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        return release.tensors

    def release_cost(self, number: int, part: str) -> ReleaseCost:
        """Return mechanism, cost and hashes of the last release of a query's part.

        The cost includes training for this release, and training before the first release, which was charged
        by itself.

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
            release_hash=entry["release_hash"],
        )

    # --- entries ------------------------------------------------------------------------------------------

    def _charge_facts(
        self, release: Release, spending: Callable[[], Spending], cost: PrivacyCost | None, *counts: Any
    ) -> ChargeFacts:
        query = release.received.query
        responses = self.audit.totals.response_counts[self.run, self.node, query]
        return ChargeFacts(
            query, self.policy, self.approved, self.budgets, spending, responses, cost, *counts
        )

    def _release_keys(self, release: Release) -> dict[str, Any]:
        """Return the fields of a release's entry that are known before it is computed, without content."""
        received = release.received
        return {
            "run": self.run,
            "payer": self.payer,
            "node": self.node,
            "number": received.number,
            "query": received.query,
            "part": release.part,
            "history_hash": received.history_hash,
        }

    def _charged_attempts(self, budgets: RunBudgets, release: Release, sent: Tensors) -> int:
        """Return how many times training for this query was charged: once for each different result."""
        if budgets.training_cost(release.query, sent) == PrivacyCost():
            return 0
        return self._count_siblings(self._attempt_entry(budgets, release, sent))

    def _charge_attempt(self, budgets: RunBudgets, release: Release, sent: Tensors) -> None:
        if budgets.training_cost(release.query, sent) != PrivacyCost():
            self._charge_initial_training(budgets, release)
            self._charge_before_use(budgets, self._attempt_entry(budgets, release, sent), release.query.name)

    def _charge_initial_training(self, budgets: RunBudgets, release: Release) -> None:
        """Charge training before the first query, on which all releases depend."""
        pretraining_hash = release.received.pretraining_hash
        if budgets.initial_training_cost != PrivacyCost() and pretraining_hash not in self._charged_initial:
            entry = self._initial_training_entry(budgets, pretraining_hash)
            self._charge_before_use(budgets, entry, release.query.name)
            self._charged_initial.add(pretraining_hash)

    def _is_initial_training_charged(self, budgets: RunBudgets, release: Release) -> bool:
        pretraining_hash = release.received.pretraining_hash
        return pretraining_hash in self._charged_initial or self._is_written(
            self._initial_training_entry(budgets, pretraining_hash)
        )

    def _charge_before_use(self, budgets: RunBudgets, entry: Entry, query: str) -> None:
        cost = None if entry.no_guarantee else cost_from_dict(entry.cost)
        self.audit.charge(
            entry, lambda spending: refuse(self.node, query, budgets.budget_fault(spending(), cost))
        )

    def _attempt_entry(self, budgets: RunBudgets, release: Release, sent: Tensors) -> Entry:
        costs = budgets.mechanism.training_costs(release.query, sent)
        rule = f"DP-SGD of {' and '.join(costs)}, on which the response depends"
        return self._training_entry(budgets, release, TRAINING, str(release.attempt), total_cost(costs), rule)

    def _result_entry(self, budgets: RunBudgets, release: Release) -> Entry:
        result = f"{release.attempt} {release.received.training_hash}"
        rule = "hash of the trained weights"
        return self._training_entry(budgets, release, TRAINING_RESULT, result, PrivacyCost(), rule)

    def _training_entry(
        self,
        budgets: RunBudgets,
        release: Release,
        part: str,
        content: str,
        cost: PrivacyCost | None,
        rule: str,
    ) -> Entry:
        received = release.received
        history_hash = chain_digest(received.history_hash, received.content_hash)
        keys = (self.run, self.payer, self.node, received.number, release.query.name, part)
        cost_fields = _cost_fields(budgets, cost)
        return Entry(
            *keys,
            content_hash=budgets.keyed_hash(content),
            history_hash=history_hash,
            rule=rule,
            **cost_fields,
        )

    def _initial_training_entry(self, budgets: RunBudgets, pretraining_hash: str) -> Entry:
        noise = budgets.mechanism.noise_levels.get(budgets.mechanism.training, 0.0)
        rule = f"DP-SGD of the model (noise {noise:.4g}), on which all releases depend"
        keys = (self.run, self.payer, self.node, -1, TRAINING, TRAINING)
        cost_fields = _cost_fields(budgets, budgets.initial_training_cost)
        return Entry(*keys, content_hash=budgets.keyed_hash(pretraining_hash), **cost_fields, rule=rule)

    def _count_siblings(self, entry: Entry) -> int:
        """Return the number of entries that differ from this one at most in content and release."""
        return len(self.audit.totals.sibling_content_hashes(vars(entry)))

    def _is_written(self, entry: Entry) -> bool:
        return self.audit.totals.entry_number(vars(entry)) > 0

    def _require_budgets(self) -> RunBudgets:
        if self.budgets is None:
            raise RuntimeError(f"{self.node} trains privately without a privacy mechanism")
        return self.budgets


def _cost_fields(budgets: RunBudgets, cost: PrivacyCost | None) -> dict[str, Any]:
    return {
        "mechanism": budgets.mechanism.name,
        "cost": cost_to_dict(cost or PrivacyCost()),
        "no_guarantee": int(cost is None),
        "unit": budgets.mechanism.unit if cost else "",
    }
