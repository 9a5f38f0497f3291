"""What pays for a node's releases: budgets of a run and of its data, charged to a ledger that lasts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from fedstill.errors import QuestionRefused
from fedstill.node.account import Account, Entry, Spent
from fedstill.node.digests import chained
from fedstill.node.guard import Guard, unpriced
from fedstill.node.ledger import ANSWER
from fedstill.node.questions import Question
from fedstill.privacy.bill import total
from fedstill.privacy.budget import Budget, BudgetSpent
from fedstill.privacy.events import Price, as_text, from_text
from fedstill.privacy.pate import epsilon_data_dependent
from fedstill.privacy.votes import Votes

if TYPE_CHECKING:
    from fedstill.node.gate import Asked

Tensors = Mapping[str, torch.Tensor]
TRAINING = "training"  # what the first release of a run pays for beside itself


class Purse:
    """Budgets and ledger of one node in one run.

    Args:
        guard: rules and prices.
        account: the ledger of the node's data.
        run: names the run there.
        holder: who pays: whose totals count; None is the node under its name. Nodes with one holder share
            its budgets, and what each of them releases is charged, however alike they are.
    """

    def __init__(self, guard: Guard, account: Account, run: str, holder: str | None = None) -> None:
        self.guard, self.account, self.run = guard, account, run
        self.holder = guard.node if holder is None else holder
        config = guard.config
        self.budget = Budget(config.epsilon, config.delta, config.accountant)
        self.total_budget = Budget(*config.over_all, config.accountant)
        self.first = total(guard.first())
        self._objections: dict[str, str | None] = {}
        self._run_objection: str | None = None
        self._covered: tuple[Counter[str], Counter[str]] | None = None  # what is known to be affordable
        self._paid = guard.first() == {TRAINING: Price()}

    def objection(self, question: Question) -> str | None:
        """Why a question, or the run that its method declares, can never be paid for, or None."""
        if question.name not in self._objections:
            self._objections[question.name] = unpriced(self.guard, question)
        return self._objections[question.name] or self._too_dear()

    def _too_dear(self) -> str | None:
        """Why the run as declared cannot be paid for; computed once, since it takes a while."""
        if self._covered is None and self._run_objection is None:
            for question in self.guard.side.questions.values():
                found = unpriced(self.guard, question)
                if found is not None:
                    self._run_objection = f"{found}, in question {question.name}"
                    return self._run_objection
            spent = self.account.spent(self.holder, self.run)
            price, others = total(self.guard.schedule()), _others(spent)
            try:
                self._refuse_bare(spent)
                self.budget.check(Price(), price)
                self.total_budget.check(from_text(others), price)
            except BudgetSpent as error:
                self._run_objection = f"privacy budget: {error}"
            else:
                self._covered = Counter(as_text(price or Price())), others
        return self._run_objection

    def afford(self, asked: Asked, question: Question, sent: Tensors) -> None:
        """Refuse a question whose answer could not be paid for, before anything is computed.

        Raises:
            QuestionRefused: saying what is left, and what it would have cost.
        """
        shapes = self.guard.expected(question, sent)[ANSWER]
        price = total(self.guard.bill(question, ANSWER, shapes, sent))
        spent = self.account.spent(self.holder, self.run)
        first = Counter(as_text(self.first or Price()))
        if not self._paid and not first <= Counter(spent.run):  # a run that goes on has paid it before
            price = None if price is None or self.first is None else price + self.first
        learned = total(self.guard.learning(question, sent))
        if price is not None and learned and self.account.charged(self._learning(asked, question, sent)):
            price = price - learned  # the answer was lost, and is asked for again
        self._check(spent, price, question.name)

    def pay_learning(self, asked: Asked, question: Question, sent: Tensors) -> None:
        """Charge what networks learn from the records for a question, before they do: on disk, or not at all.

        Raises:
            QuestionRefused: it cannot be paid for.
            LedgerError: the ledger is not what it was, and its owner has not settled that.
        """
        price = total(self.guard.learning(question, sent))
        if price == Price():
            return
        self._pay_first(question.name)
        self._charge(self._learning(asked, question, sent), price, question.name)

    def _learning(self, asked: Asked, question: Question, sent: Tensors) -> Entry:
        """What networks learn for a question, as the ledger has it."""
        bill = self.guard.learning(question, sent)
        rule = f"DP-SGD of {' and '.join(bill)}, which the answer follows from"
        about = (asked.number, question.name, TRAINING, asked.content, asked.after)
        return self._entry(*about, {}, total(bill), rule)

    def pay(
        self, asked: Asked, part: str, up: Mapping[str, int], price: Price | None, rule: str, stamp: str
    ) -> bool:
        """Charge a release, and before the first one the training behind it: on disk, or not at all.

        Args:
            asked: what it answers.
            part: of the answer.
            up: bytes by kind.
            price: of the release itself; what was learned for it is paid already.
            rule: what is done to it, in words.
            stamp: of what it was before the noise: another one is another release, with noise of its own.

        Returns:
            Whether it had not been paid before.

        Raises:
            QuestionRefused: it cannot be paid for.
            LedgerError: the ledger is not what it was, and its owner has not settled that.
        """
        self._pay_first(asked.question)
        content = chained(asked.content, stamp)
        entry = self._entry(asked.number, asked.question, part, content, asked.after, up, price, rule)
        return self._charge(entry, price, asked.question)

    def _pay_first(self, question: str) -> None:
        """The training before the first question, which all that leaves follows from."""
        if self._paid:
            return
        noise = self.guard.levels.training
        rule = f"DP-SGD of the model (noise {noise:.4g}), which all releases follow from"
        self._charge(self._entry(-1, TRAINING, TRAINING, "", "", {}, self.first, rule), self.first, question)
        self._paid = True

    def _charge(self, entry: Entry, price: Price | None, question: str) -> bool:
        return self.account.charge(entry, lambda spent: self._check(spent, price, question))

    def _entry(
        self,
        number: int,
        question: str,
        part: str,
        content: str,
        after: str,
        up: Mapping[str, int],
        price: Price | None,
        rule: str,
    ) -> Entry:
        guard = self.guard
        # Another node has other noise, so that its release is another one.
        binding = guard.binding if self.holder == guard.node else chained(guard.binding, guard.node)
        return Entry(
            run=self.run,
            node=self.holder,
            number=number,
            question=question,
            part=part,
            content=chained(f"{binding} {guard.salt}", content),
            after=after,
            up=dict(up),
            rule=rule,
            price=as_text(price or Price()),
            guarantee=price is not None,
        )

    def _check(self, spent: Spent, price: Price | None, question: str) -> None:
        try:
            self._refuse_bare(spent)
            if self._is_covered(spent, price):
                return
            self.budget.check(from_text(spent.run), price)
            self.total_budget.check(from_text(spent.total), price)
        except BudgetSpent as error:
            raise QuestionRefused(self.guard.node, question, f"privacy budget: {error}") from error

    def votes(self, question: Question, tensors: Tensors, noised: Tensors) -> Sequence[Sequence[int]]:
        """The votes behind a release, as the node's own ledger keeps them for an owner who wants to know."""
        kept: list[Sequence[int]] = []
        for name in tensors if self.guard.config.pate.data_dependent else ():
            rule = self.guard.rule(question, name)
            if isinstance(rule, Votes):
                answered = (noised[name] != 0).any(1, keepdim=True)
                kept += torch.cat([answered, rule.votes(tensors[name])], 1).int().tolist()
        return kept

    def data_dependent(self, votes: Sequence[Sequence[int]]) -> float | None:
        """Epsilon of all labels released, by the votes (Papernot et al. 2018); not to be published.

        Args:
            votes: as :meth:`votes` gives them, of all releases.

        Returns:
            None where nobody has asked for it, or nothing has left.
        """
        config = self.guard.config
        if not votes or not self.guard.levels.pate:
            return None
        rows = torch.tensor(votes)
        thresholds = (config.pate.threshold, config.pate.threshold_noise, rows[:, 0] > 0)
        return epsilon_data_dependent(rows[:, 1:], self.guard.levels.pate, config.delta, *thresholds)

    def _is_covered(self, spent: Spent, price: Price | None) -> bool:
        """Whether a price is a part of what the run declared, all of which is known to be affordable."""
        if self._covered is None or price is None:
            return False
        schedule, others = self._covered
        return Counter(spent.run) + Counter(as_text(price)) <= schedule and _others(spent) <= others

    def _refuse_bare(self, spent: Spent) -> None:
        """What left without a guarantee has no price that a budget could have paid."""
        if spent.bare_run:
            self.budget.check(Price(), None)
        if spent.bare_total:
            self.total_budget.check(Price(), None)


def _others(spent: Spent) -> Counter[str]:
    """What other runs about the same data have spent."""
    others = Counter(spent.total)
    others.subtract(spent.run)
    return +others
