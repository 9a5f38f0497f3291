"""What pays for a node's releases: budgets of a run and of its data, charged to a ledger that lasts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from fedstill.core.errors import QuestionRefused
from fedstill.node.account import Account, Entry, Spent
from fedstill.node.asked import Asked
from fedstill.node.ledger import ANSWER
from fedstill.node.mechanism import Mechanism, unpriced
from fedstill.privacy.bill import total
from fedstill.privacy.budget import Budget, BudgetSpent, Unpriced
from fedstill.privacy.events import Price, as_text, from_text
from fedstill.protocol.digests import chained
from fedstill.protocol.questions import Question

Tensors = Mapping[str, torch.Tensor]
TRAINING = "training"  # what the first release of a run pays for beside itself
LEARNED = "learned"  # what came of it, for a question: nothing is paid, and nothing leaves


class Budgets:
    """Budgets and ledger of one node in one run.

    Args:
        mechanism: rules and prices.
        account: the ledger of the node's data.
        run: names the run there.
        holder: who pays: whose totals count; None is the node under its name. Nodes with one holder share
            its budgets, and what each of them releases is charged, however alike they are.
    """

    def __init__(self, mechanism: Mechanism, account: Account, run: str, holder: str | None = None) -> None:
        self.mechanism, self.account, self.run = mechanism, account, run
        self.holder = mechanism.node if holder is None else holder
        config = mechanism.config
        self.budget = Budget(config.epsilon, config.delta, config.accountant)
        self.total_budget = Budget(*config.over_all, config.accountant)
        self.first = total(mechanism.first())
        self._objections: dict[str, str | None] = {}
        self._run_objection: str | None = None
        self._covered: tuple[Counter[str], Counter[str]] | None = None  # what is known to be affordable
        self._paid: set[str] = set()  # what was learned before the first question, by fingerprint

    def spent(self) -> Spent:
        """What has been spent so far."""
        return self.account.spent(self.holder, self.run)

    def seal(self, text: str) -> str:
        """A fingerprint that differs from run to run, and that nobody can make without the node's secret."""
        return chained(f"{self.mechanism.binding} {self.mechanism.salt}", text)

    def objection(self, question: Question) -> str | None:
        """Why a question, or the run that its method declares, can never be paid for, or None."""
        if question.name not in self._objections:
            self._objections[question.name] = unpriced(self.mechanism, question)
        return self._objections[question.name] or self._too_dear()

    def _too_dear(self) -> str | None:
        """Why the run as declared cannot be paid for; computed once, since it takes a while."""
        if self._covered is None and self._run_objection is None:
            for question in self.mechanism.side.questions.values():
                found = unpriced(self.mechanism, question)
                if found is not None:
                    self._run_objection = f"{found}, in question {question.name}"
                    return self._run_objection
            spent = self.account.spent(self.holder, self.run)
            price, others = total(self.mechanism.schedule()), _others(spent)
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
        shapes = self.mechanism.expected(question, sent)[ANSWER]
        price = total(self.mechanism.bill(question, ANSWER, shapes, sent))
        if self._owes_first(asked):
            price = None if price is None or self.first is None else price + self.first
        learned = total(self.mechanism.learning(question, sent))
        if price is not None and learned and self.attempts(asked, question, sent):
            price = price - learned  # the answer was lost, and is asked for again
        self._check(self.spent(), price, question.name)

    def attempts(self, asked: Asked, question: Question, sent: Tensors) -> int:
        """How often learning for this question has been charged: once for each result that differs."""
        if total(self.mechanism.learning(question, sent)) == Price():
            return 0
        return self.account.siblings(self._learning(asked, question, sent, 0))

    def results(self, asked: Asked, question: Question) -> int:
        """Of how many of these attempts the result is written down."""
        return self.account.siblings(self._result(asked, question, 0))

    def came_out(self, asked: Asked, question: Question, attempt: int) -> bool:
        """Whether an attempt came out as it did before, to the last bit; the first time, write that down.

        Args:
            asked: the question, with a fingerprint of what was learned.
            question: as the method declares it.
            attempt: the last one that was charged.
        """
        result = self._result(asked, question, attempt)
        if self.results(asked, question) > attempt:
            return self.account.row(result) > 0
        self.account.charge(result, lambda spent: None)
        return True

    def pay_learning(self, asked: Asked, question: Question, sent: Tensors, attempt: int) -> None:
        """Charge what networks learn from the records for a question, before they do: on disk, or not at all.

        Args:
            asked: the question.
            question: as the method declares it.
            sent: the tensors that came with it.
            attempt: how often it was learned before with other results: each time is paid for.

        Raises:
            QuestionRefused: it cannot be paid for.
            LedgerError: the ledger is not what it was, and its owner has not settled that.
        """
        price = total(self.mechanism.learning(question, sent))
        if price == Price():
            return
        self._pay_first(asked)
        self._charge(self._learning(asked, question, sent, attempt), price, question.name)

    def _learning(self, asked: Asked, question: Question, sent: Tensors, attempt: int) -> Entry:
        """One attempt of what networks learn for a question, as the ledger has it."""
        bill = self.mechanism.learning(question, sent)
        rule = f"DP-SGD of {' and '.join(bill)}, which the answer follows from"
        about = asked.number, question.name, TRAINING, str(attempt), chained(asked.after, asked.content)
        return self._entry(*about, {}, total(bill), rule)

    def _result(self, asked: Asked, question: Question, attempt: int) -> Entry:
        """What came of it: a row that costs nothing."""
        what, after = f"{attempt} {asked.learned}", chained(asked.after, asked.content)
        rule = "what was learned, by its fingerprint"
        return self._entry(asked.number, question.name, LEARNED, what, after, {}, Price(), rule)

    def behind(
        self, asked: Asked, part: str, question: Question, sent: Tensors
    ) -> Iterator[tuple[str, str, Price | None]]:
        """What a release follows from that was charged by itself: what it is, its fingerprint, its price."""
        if self.first != Price():
            yield "before", asked.origin, self.first
        learned = total(self.mechanism.learning(question, sent)) if part == ANSWER else Price()
        if learned != Price():
            yield "for", asked.past, learned

    def pay(
        self,
        asked: Asked,
        part: str,
        up: Mapping[str, int],
        price: Price | None,
        rule: str,
        left: str,
        limit: Callable[[int, int, int], None] = lambda questions, bytes_left, counts: None,
    ) -> tuple[int, bool]:
        """Charge a release, and before the first one the training behind it: on disk, or not at all.

        Args:
            asked: what it answers.
            part: of the answer.
            up: bytes by kind.
            price: of the release itself; what was learned for it is paid already.
            rule: what is done to it, in words.
            left: fingerprint of what leaves, and of what that was before the noise: another one is another
                release, however alike.
            limit: is told questions and bytes that have left, and for how many questions this release
                counts; raises to refuse it.

        Returns:
            Its row, and whether it had not been paid before.

        Raises:
            QuestionRefused: it cannot be paid for.
            LedgerError: the ledger is not what it was, and its owner has not settled that.
        """
        self._pay_first(asked)
        content = chained(asked.content, left)
        entry = self._entry(asked.number, asked.question, part, content, asked.after, up, price, rule)
        # A gradient belongs to its answer, and each further one of that is a question by itself.
        counts = int(part == ANSWER or self.account.siblings(entry) > 0)

        def check(spent: Spent) -> None:
            limit(spent.questions, spent.bytes, counts)
            self._check(spent, price, asked.question)

        anew = self.account.charge(replace(entry, questions=counts), check)
        return self.account.row(entry), anew

    def trained(self) -> bool:
        """Whether the training before the first question has been paid for, whatever it has given."""
        return self.account.siblings(self._first("")) > 0

    def _first(self, origin: str) -> Entry:
        noise = self.mechanism.levels.get(self.mechanism.training, 0.0)
        rule = f"DP-SGD of the model (noise {noise:.4g}), which all releases follow from"
        return self._entry(-1, TRAINING, TRAINING, origin, "", {}, self.first, rule)

    def _owes_first(self, asked: Asked) -> bool:
        if self.first == Price() or asked.origin in self._paid:
            return False
        return not self.account.row(self._first(asked.origin))

    def _pay_first(self, asked: Asked) -> None:
        """The training before the first question, which all that leaves follows from."""
        if self.first != Price() and asked.origin not in self._paid:
            self._charge(self._first(asked.origin), self.first, asked.question)
            self._paid.add(asked.origin)

    def _charge(self, entry: Entry, price: Price | None, question: str) -> None:
        self.account.charge(entry, lambda spent: self._check(spent, price, question))

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
        mechanism = self.mechanism
        own = self.holder == mechanism.node
        # Another node has other noise, so that its release is another one.
        binding = mechanism.binding if own else chained(mechanism.binding, mechanism.node)
        return Entry(
            run=self.run,
            node=self.holder,
            number=number,
            question=question,
            part=part,
            content=chained(f"{binding} {mechanism.salt}", content),
            after=after if own else chained(after, mechanism.node),
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
            raise QuestionRefused(self.mechanism.node, question, f"privacy budget: {error}") from error

    def votes(self, question: Question, tensors: Tensors, noised: Tensors) -> Sequence[Sequence[int]]:
        """What the node's own ledger keeps of a release for an owner who wants to know its votes."""
        config, rule = self.mechanism.config, self.mechanism.rule
        found = [config.votes(rule(question, name), exact, noised[name]) for name, exact in tensors.items()]
        return [row for rows in found for row in rows]

    def data_dependent(self, votes: Sequence[Sequence[int]]) -> float | None:
        """Epsilon of all labels released, by the votes; not to be published.

        Args:
            votes: as :meth:`votes` gives them, of all releases.

        Returns:
            None where nobody has asked for it, or nothing has left.
        """
        return self.mechanism.config.data_dependent(votes, self.mechanism.levels)

    def _is_covered(self, spent: Spent, price: Price | None) -> bool:
        """Whether a price is a part of what the run declared, all of which is known to be affordable."""
        if self._covered is None or price is None:
            return False
        schedule, others = self._covered
        return Counter(spent.run) + Counter(as_text(price)) <= schedule and _others(spent) <= others

    def _refuse_bare(self, spent: Spent) -> None:
        """What left without a guarantee has no price that a budget could have paid.

        Raises:
            BudgetSpent: naming the runs in which it left.
        """
        if spent.bare_run and self.budget.epsilon < math.inf:
            way_out = "allowed is a new run, or privacy.epsilon = inf"
            raise Unpriced(self.budget.epsilon, self.budget.delta, {self.run: spent.bare_run}, way_out)
        total = self.total_budget
        if spent.bare_total and total.epsilon < math.inf:
            way_out = "its owner may set privacy.total_epsilon = inf, so that each run has its own budget"
            raise Unpriced(total.epsilon, total.delta, self._bare_runs(), way_out)

    def _bare_runs(self) -> Counter[str]:
        """How many releases without a guarantee each run about these data had, the latest run first."""
        rows = [row for row in self.account.entries() if row["node"] == self.holder and row["bare"]]
        runs: Counter[str] = Counter()
        for row in reversed(rows):
            runs[row["run"]] += row["bare"]
        return runs


def _others(spent: Spent) -> Counter[str]:
    """What other runs about the same data have spent."""
    others = Counter(spent.total)
    others.subtract(spent.run)
    return +others
