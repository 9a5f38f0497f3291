"""Epsilons and what is left of budgets as they are shown: numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from fedstill.privacy.budget_text import budgets, cost, down, left, up
from fedstill.privacy.config import PrivacyConfig

# One number with Laplace noise of scale 2 costs epsilon = 1/2 + 2 log(1 - delta) exactly: 0.499980 at 1e-5,
# and 0.289279 at delta = 0.1.
ONE = {"laplace(2.0)": 1}
OWNER = PrivacyConfig(epsilon=3.0, total_epsilon=5.0, total_delta=0.1)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (0.0001, "0"), (0.29, "0.29"), (0.7449, "0.744"), (2.9996, "2.999"), (1234.5, "1234.5")],
)
def test_what_is_left_is_rounded_down_to_thousandths(value: float, shown: str) -> None:
    assert down(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0001, "0.001"), (2.0, "2"), (2.2541, "2.255"), (1234.5, "1234.5")]
)
def test_what_was_spent_is_rounded_up_to_thousandths(value: float, shown: str) -> None:
    assert up(value) == shown


def test_infinity_is_no_budget_and_none_is_no_guarantee() -> None:
    assert (down(math.inf), up(math.inf), up(None)) == ("no budget", "inf", "no guarantee")


def test_each_budget_is_held_against_its_own_epsilon_and_delta() -> None:
    assert left(OWNER, ONE, 0, over_all=False) == pytest.approx(3 - 0.499980, abs=1e-4)
    assert left(OWNER, ONE, 0, over_all=True) == pytest.approx(5 - 0.289279, abs=1e-4)
    assert budgets(OWNER) == [
        "a run has epsilon 3 at delta 1e-05",
        "all runs on these data have epsilon 5 at delta 0.1",
    ]


def test_releases_without_guarantee_leave_nothing_of_a_budget_and_all_of_none() -> None:
    assert left(OWNER, ONE, 1, over_all=False) == 0.0
    assert left(PrivacyConfig(), ONE, 1, over_all=False) == math.inf


def test_what_all_runs_cost_is_shown_at_the_delta_of_their_budget() -> None:
    assert cost(OWNER, ONE, 0) == "epsilon 0.29 at delta 0.1, in all runs on these data"
    assert cost(OWNER, ONE, 1).startswith("no guarantee: in all 1 release ")
