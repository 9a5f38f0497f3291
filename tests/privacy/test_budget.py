"""Epsilons and what is left of budgets as they are shown: numbers worked out by hand.

A budget refuses what does not fit, says why, and asks the accountant rarely.
"""

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
    remaining_epsilon,
    round_down,
    round_up,
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
def test_what_is_left_is_rounded_down_to_thousandths(value: float, shown: str) -> None:
    assert round_down(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0001, "0.001"), (2.0, "2"), (2.2541, "2.255"), (1234.5, "1234.5")]
)
def test_what_was_spent_is_rounded_up_to_thousandths(value: float, shown: str) -> None:
    assert round_up(value) == shown


def test_infinity_is_no_budget_and_none_is_no_guarantee() -> None:
    assert (round_down(math.inf), round_up(math.inf), round_up(None)) == ("no budget", "inf", "no guarantee")


def test_each_budget_is_held_against_its_own_epsilon_and_delta() -> None:
    assert remaining_epsilon(OWNER, ONE, 0, all_runs=False) == pytest.approx(3 - 0.499980, abs=1e-4)
    assert remaining_epsilon(OWNER, ONE, 0, all_runs=True) == pytest.approx(5 - 0.289279, abs=1e-4)
    assert describe_budgets(OWNER) == [
        "a run has epsilon 3 at delta 1e-05",
        "all runs on these data have epsilon 5 at delta 0.1",
    ]


def test_releases_without_guarantee_leave_nothing_of_a_budget_and_all_of_none() -> None:
    assert remaining_epsilon(OWNER, ONE, 1, all_runs=False) == 0.0
    assert remaining_epsilon(PrivacyConfig(), ONE, 1, all_runs=False) == math.inf


def test_what_all_runs_cost_is_shown_at_the_delta_of_their_budget() -> None:
    assert describe_total_cost(OWNER, ONE, 0) == "epsilon 0.29 at delta 0.1, in all runs on these data"
    assert describe_total_cost(OWNER, ONE, 1).startswith("no guarantee: in all 1 release ")


LAPLACE = PrivacyCost({Event("laplace", 20.0): 8})
GAUSSIAN = PrivacyCost({Event("gaussian", 30.0): 1})
SAMPLED = PrivacyCost({Event("gaussian", 2.0, rate=0.02): 5})


def spend(one: Budget, prices: Sequence[PrivacyCost], at_most: int = 100_000) -> tuple[PrivacyCost, int]:
    """Pay in turn until the budget says no: what was paid, and how often."""
    spent = PrivacyCost()
    for number in range(at_most):
        cost = prices[number % len(prices)]
        try:
            one.check(spent, cost)
        except BudgetExceeded:
            return spent, number
        spent.update(cost)
    return spent, at_most


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("prices", [[GAUSSIAN], [SAMPLED], [LAPLACE, GAUSSIAN, SAMPLED]])
def test_it_stops_at_exactly_the_price_that_does_not_fit(
    prices: list[PrivacyCost], accountant: Accountant
) -> None:
    limit = 4.0
    spent, number = spend(Budget(limit, 1e-5, accountant), prices)
    assert number > 30
    assert compute_epsilon(spent, 1e-5, accountant) <= limit
    assert compute_epsilon(spent + prices[number % len(prices)], 1e-5, accountant) > limit


def test_by_hand() -> None:
    """At delta of next to nothing, a Laplace event of scale 10 costs 0.1."""
    _, number = spend(Budget(1.05, 1e-9), [PrivacyCost({Event("laplace", 10.0): 1})])
    assert number == 10


steps = st.lists(st.sampled_from([LAPLACE, GAUSSIAN, SAMPLED, PrivacyCost(LAPLACE + GAUSSIAN)]), max_size=25)


@settings(max_examples=12, deadline=None)
@given(steps, st.sampled_from([0.7, 1.5]), st.lists(st.integers(0, 24), max_size=3))
def test_it_says_what_the_accountant_would_say(
    asked: list[PrivacyCost], limit: float, others: list[int]
) -> None:
    """Whatever is asked in whatever order, and what another process spends in between."""
    one = Budget(limit, 1e-5)
    spent = PrivacyCost()
    for number, cost in enumerate(asked):
        if number in others:
            spent.update({Event("gaussian", 12.0): 1})
        fits = compute_epsilon(spent + cost, 1e-5) <= limit
        if fits:
            one.check(spent, cost)
            spent.update(cost)
        else:
            with pytest.raises(BudgetExceeded):
                one.check(spent, cost)


def test_it_asks_the_accountant_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    composed = 0
    compose = accounting.pld_epsilon

    def counted(*words: object) -> float:
        nonlocal composed
        composed += 1
        return compose(*words)  # type: ignore[arg-type]

    looks = 0
    look = budget.is_within_epsilon

    def looked(*words: object) -> bool:
        nonlocal looks
        looks += 1
        return look(*words)  # type: ignore[arg-type]

    monkeypatch.setattr(accounting, "pld_epsilon", counted)
    monkeypatch.setattr(budget, "is_within_epsilon", looked)
    cost = PrivacyCost({Event("laplace", 300.0): 4})
    _, number = spend(Budget(6.0, 1e-5), [cost, PrivacyCost({Event("gaussian", 400.0): 1})])
    assert number > 5000
    assert looks < number / 100
    assert composed < number / 100


def test_without_a_guarantee_nothing_fits_a_finite_budget() -> None:
    with pytest.raises(BudgetExceeded, match=r"would leave without any guarantee") as caught:
        Budget(3.0, 1e-5).check(PrivacyCost({Event("laplace", 1.0): 1}), None)
    assert caught.value.cost == math.inf
    assert caught.value.remaining == pytest.approx(2.0, abs=0.01)


def test_without_a_budget_nothing_is_computed_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> float:
        raise AssertionError("it was computed")

    monkeypatch.setattr(budget, "compute_epsilon", never)
    monkeypatch.setattr(budget, "is_within_epsilon", never)
    one = Budget(math.inf, 1e-5)
    one.check(PrivacyCost({Event("laplace", 1e-6): 10**9}), None)
    one.check(PrivacyCost(), PrivacyCost({Event("gaussian", 1e-6): 10**9}))
    assert one.remaining(PrivacyCost({Event("laplace", 1.0): 1})) == math.inf


def test_a_refusal_says_what_is_left_and_what_it_would_have_cost() -> None:
    """Laplace of scale 1 at delta 1e-3: 1 - 0.002; two of them: 2 - 2 * ... by the accountant."""
    event = Event("laplace", 1.0)
    one = Budget(1.5, 1e-3)
    with pytest.raises(BudgetExceeded) as caught:
        one.check(PrivacyCost({event: 1}), PrivacyCost({event: 1}))
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


def test_a_refusal_that_is_asked_for_again_costs_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Budget(1.0, 1e-5)
    spent, cost = PrivacyCost({Event("laplace", 2.0): 1}), PrivacyCost({Event("laplace", 1.0): 1})
    with pytest.raises(BudgetExceeded) as first:
        one.check(spent, cost)

    def never(*_: object) -> float:
        raise AssertionError("it was computed")

    monkeypatch.setattr(budget, "compute_epsilon", never)
    monkeypatch.setattr(budget, "is_within_epsilon", never)
    with pytest.raises(BudgetExceeded) as second:
        one.check(spent, cost)
    assert str(second.value) == str(first.value)


def test_left_is_never_below_zero() -> None:
    one = Budget(1.0, 1e-5)
    assert one.remaining(PrivacyCost()) == 1.0
    assert one.remaining(PrivacyCost({Event("laplace", 0.1): 1})) == 0.0


def test_less_than_a_first_look_is_compared_too() -> None:
    """Another audit, or a second run that has spent less, gets the answer of its own amounts."""
    one = Budget(1.0, 1e-9)
    cost = PrivacyCost({Event("laplace", 10.0): 1})
    one.check(PrivacyCost({Event("laplace", 10.0): 8}), cost)
    one.check(PrivacyCost(), cost)
    with pytest.raises(BudgetExceeded):
        one.check(PrivacyCost({Event("laplace", 10.0): 10}), cost)


@pytest.mark.parametrize(
    ("words", "name"), [((0.0, 1e-5), "epsilon"), ((1.0, 0.0), "delta"), ((math.nan, 0.5), "epsilon")]
)
def test_a_budget_has_a_range(words: tuple[float, float], name: str) -> None:
    with pytest.raises(ArgumentError, match=name):
        Budget(*words)
