"""Budgets: refusals and their messages, number of accountant calls, and formatted epsilons by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.core.errors import ArgumentError, FedstillError
from fedstill.privacy import accounting, budget
from fedstill.privacy.accounting import Accountant, compute_epsilon
from fedstill.privacy.budget import (
    Budget,
    BudgetExceeded,
    describe_budgets,
    describe_total_cost,
    epsilon_text_rounded_down,
    epsilon_text_rounded_up,
    remaining_epsilon,
)
from fedstill.privacy.config import PrivacyConfig
from fedstill.privacy.events import Event, PrivacyCost

# One number with Laplace noise of scale 2 costs epsilon = 1/2 + 2 log(1 - delta) exactly: 0.499980 at 1e-5,
# and 0.289279 at delta = 0.1.
ONE = {"laplace(2.0)": 1}
OWNER = PrivacyConfig(epsilon=3.0, total_epsilon=5.0, total_delta=0.1)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (0.0001, "0"), (0.29, "0.29"), (0.7449, "0.744"), (2.9996, "2.999"), (1234.5, "1234.5")],
)
def test_remaining_epsilon_is_rounded_down(value: float, shown: str) -> None:
    assert epsilon_text_rounded_down(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0001, "0.001"), (2.0, "2"), (2.2541, "2.255"), (1234.5, "1234.5")]
)
def test_spent_epsilon_is_rounded_up(value: float, shown: str) -> None:
    assert epsilon_text_rounded_up(value) == shown


def test_formats_missing_budget_and_guarantee() -> None:
    assert (
        epsilon_text_rounded_down(math.inf),
        epsilon_text_rounded_up(math.inf),
        epsilon_text_rounded_up(None),
    ) == ("no budget", "inf", "no guarantee")


def test_remaining_epsilon_uses_delta_of_each_budget() -> None:
    assert remaining_epsilon(OWNER, ONE, 0, all_runs=False) == pytest.approx(3 - 0.499980, abs=1e-4)
    assert remaining_epsilon(OWNER, ONE, 0, all_runs=True) == pytest.approx(5 - 0.289279, abs=1e-4)
    assert describe_budgets(OWNER) == [
        "a run has epsilon 3 at delta 1e-05",
        "all runs on these data have epsilon 5 at delta 0.1",
    ]


def test_unprotected_releases_exhaust_budget() -> None:
    assert remaining_epsilon(OWNER, ONE, 1, all_runs=False) == 0.0
    assert remaining_epsilon(PrivacyConfig(), ONE, 1, all_runs=False) == math.inf


def test_total_cost_uses_total_delta() -> None:
    assert describe_total_cost(OWNER, ONE, 0) == "epsilon 0.29 at delta 0.1, in all runs on these data"
    assert describe_total_cost(OWNER, ONE, 1).startswith("no guarantee: in all 1 release ")


LAPLACE = PrivacyCost({Event("laplace", 20.0): 8})
GAUSSIAN = PrivacyCost({Event("gaussian", 30.0): 1})
SAMPLED = PrivacyCost({Event("gaussian", 2.0, rate=0.02): 5})


def spend(limit: Budget, costs: Sequence[PrivacyCost], at_most: int = 100_000) -> tuple[PrivacyCost, int]:
    """Charge the costs cyclically until the budget refuses; return the total and the number of charges."""
    spent = PrivacyCost()
    for number in range(at_most):
        cost = costs[number % len(costs)]
        try:
            limit.check(spent, cost)
        except BudgetExceeded:
            return spent, number
        spent.update(cost)
    return spent, at_most


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("costs", [[GAUSSIAN], [SAMPLED], [LAPLACE, GAUSSIAN, SAMPLED]])
def test_refuses_first_cost_over_budget(costs: list[PrivacyCost], accountant: Accountant) -> None:
    limit = 4.0
    spent, number = spend(Budget(limit, 1e-5, accountant), costs)
    assert number > 30
    assert compute_epsilon(spent, 1e-5, accountant) <= limit
    assert compute_epsilon(spent + costs[number % len(costs)], 1e-5, accountant) > limit


def test_budget_for_laplace_events_by_hand() -> None:
    """At a tiny delta, a Laplace event of scale 10 costs 0.1."""
    _, number = spend(Budget(1.05, 1e-9), [PrivacyCost({Event("laplace", 10.0): 1})])
    assert number == 10


steps = st.lists(st.sampled_from([LAPLACE, GAUSSIAN, SAMPLED, PrivacyCost(LAPLACE + GAUSSIAN)]), max_size=25)


@settings(max_examples=12, deadline=None)
@given(steps, st.sampled_from([0.7, 1.5]), st.lists(st.integers(0, 24), max_size=3))
def test_budget_agrees_with_accountant(costs: list[PrivacyCost], limit: float, others: list[int]) -> None:
    """Costs come in any order, with charges of another process in between."""
    budget_ = Budget(limit, 1e-5)
    spent = PrivacyCost()
    for number, cost in enumerate(costs):
        if number in others:
            spent.update({Event("gaussian", 12.0): 1})
        fits = compute_epsilon(spent + cost, 1e-5) <= limit
        if fits:
            budget_.check(spent, cost)
            spent.update(cost)
        else:
            with pytest.raises(BudgetExceeded):
                budget_.check(spent, cost)


def test_budget_rarely_calls_accountant(monkeypatch: pytest.MonkeyPatch) -> None:
    composed = 0
    compose = accounting.pld_epsilon

    def counted(*words: object) -> float:
        nonlocal composed
        composed += 1
        return compose(*words)  # type: ignore[arg-type]

    calls = 0
    check = budget.is_within_epsilon

    def counted_check(*words: object) -> bool:
        nonlocal calls
        calls += 1
        assert calls < 50, "one for each doubling of the spending, and some at its end"
        return check(*words)  # type: ignore[arg-type]

    monkeypatch.setattr(accounting, "pld_epsilon", counted)
    monkeypatch.setattr(budget, "is_within_epsilon", counted_check)
    cost = PrivacyCost({Event("laplace", 300.0): 4})
    _, number = spend(Budget(6.0, 1e-5), [cost, PrivacyCost({Event("gaussian", 400.0): 1})])
    assert number > 5000
    assert composed < 50


def test_unprotected_cost_never_fits() -> None:
    with pytest.raises(BudgetExceeded, match="any guarantee") as caught:
        Budget(3.0, 1e-5).check(PrivacyCost({Event("laplace", 1.0): 1}), None)
    assert caught.value.cost == math.inf
    assert caught.value.remaining == pytest.approx(2.0, abs=0.01)


def test_infinite_budget_computes_and_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> float:
        raise AssertionError("epsilon was computed")

    monkeypatch.setattr(budget, "compute_epsilon", never)
    monkeypatch.setattr(budget, "is_within_epsilon", never)
    budget_ = Budget(math.inf, 1e-5)
    budget_.check(PrivacyCost({Event("laplace", 1e-6): 10**9}), None)
    budget_.check(PrivacyCost(), PrivacyCost({Event("gaussian", 1e-6): 10**9}))
    assert budget_.remaining(PrivacyCost({Event("laplace", 1.0): 1})) == math.inf


def test_refusal_names_remaining_and_total_epsilon() -> None:
    """Laplace noise of scale 1 at delta 1e-3 costs 1 - 0.002; the accountant computes the cost of two."""
    event = Event("laplace", 1.0)
    budget_ = Budget(1.5, 1e-3)
    with pytest.raises(BudgetExceeded) as caught:
        budget_.check(PrivacyCost({event: 1}), PrivacyCost({event: 1}))
    error = caught.value
    assert isinstance(error, FedstillError)
    assert error.spent == pytest.approx(0.998, abs=1e-3)
    assert error.remaining == pytest.approx(0.502, abs=1e-3)
    assert error.cost == pytest.approx(compute_epsilon({event: 2}, 1e-3))
    line = str(error)
    assert "epsilon 1.5 at delta 0.001" in line
    assert "0.502" in line
    assert f"{error.cost:.5g}" in line
    assert "\n" not in line


def test_repeated_refusal_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    budget_ = Budget(1.0, 1e-5)
    spent, cost = PrivacyCost({Event("laplace", 2.0): 1}), PrivacyCost({Event("laplace", 1.0): 1})
    with pytest.raises(BudgetExceeded) as first:
        budget_.check(spent, cost)

    def never(*_: object) -> float:
        raise AssertionError("epsilon was computed")

    monkeypatch.setattr(budget, "compute_epsilon", never)
    monkeypatch.setattr(budget, "is_within_epsilon", never)
    with pytest.raises(BudgetExceeded) as second:
        budget_.check(spent, cost)
    assert str(second.value) == str(first.value)


def test_remaining_is_never_negative() -> None:
    budget_ = Budget(1.0, 1e-5)
    assert budget_.remaining(PrivacyCost()) == 1.0
    assert budget_.remaining(PrivacyCost({Event("laplace", 0.1): 1})) == 0.0


def test_smaller_spending_after_first_check() -> None:
    """Costs are checked against the spending that is passed, even if it is less than in the call before."""
    budget_ = Budget(1.0, 1e-9)
    cost = PrivacyCost({Event("laplace", 10.0): 1})
    budget_.check(PrivacyCost({Event("laplace", 10.0): 8}), cost)
    budget_.check(PrivacyCost(), cost)
    with pytest.raises(BudgetExceeded):
        budget_.check(PrivacyCost({Event("laplace", 10.0): 10}), cost)


@pytest.mark.parametrize(
    ("words", "name"), [((0.0, 1e-5), "epsilon"), ((1.0, 0.0), "delta"), ((math.nan, 0.5), "epsilon")]
)
def test_rejects_invalid_budget(words: tuple[float, float], name: str) -> None:
    with pytest.raises(ArgumentError, match=name):
        Budget(*words)
