"""What all runs about some data may cost together: as much as one, unless their owner says more."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fedstill.core.errors import ArgumentError
from fedstill.node import owner
from fedstill.node.audit import AuditLog
from fedstill.node.faults import privacy_faults
from fedstill.node.mechanism import Mechanism
from fedstill.privacy.accounting import epsilon
from fedstill.privacy.config import NoPrivacy
from fedstill.privacy.events import total
from fedstill.privacy.pate import PATE
from fedstill.protocol.questions import NodeSide, Question
from fedstill.protocol.schedule import LocalConfig
from fedstill.tasks.classification import Classification
from tests.node.test_budgets import PREDICT, Node
from tests.node.test_budgets import VOTES as ONE_QUESTION

# --- what is meant ------------------------------------------------------------------------------------


def test_all_runs_have_the_budget_of_one_where_nothing_else_is_said() -> None:
    assert NoPrivacy(epsilon=3.0, delta=1e-6).over_all == (3.0, 1e-6)
    assert NoPrivacy(epsilon=3.0, total_epsilon=8.0).over_all == (8.0, 1e-5)
    assert NoPrivacy(epsilon=3.0, total_delta=1e-7).over_all == (3.0, 1e-7)
    assert NoPrivacy(epsilon=3.0, total_epsilon=math.inf).over_all == (math.inf, 1e-5)
    assert NoPrivacy().over_all == (math.inf, 1e-5)


@pytest.mark.parametrize(
    ("name", "value"), [("total_epsilon", 0.0), ("total_epsilon", math.nan), ("total_delta", 1.0)]
)
def test_what_is_said_is_checked(name: str, value: float) -> None:
    with pytest.raises(ArgumentError, match=f"privacy.{name}"):
        NoPrivacy(**{"epsilon": 3.0, name: value})  # type: ignore[arg-type]


# --- what it does -------------------------------------------------------------------------------------


def test_another_name_of_a_run_wins_nothing_and_more_for_all_is_said_by_the_owner() -> None:
    """The server names runs: what one has spent is gone for all."""
    one, audit = replace(ONE_QUESTION, epsilon=1.5), AuditLog()
    first = Node(one, audit, "one").asks()
    assert first > 0
    assert [Node(one, audit, run).asks() for run in ("two", "three")] == [0, 0]
    for most in (3.0, math.inf):
        audit, config = AuditLog(), replace(one, total_epsilon=most)
        assert Node(config, audit, "one").asks() == first
        second = Node(config, audit, "two").asks()
        assert second > 0
    assert second == first, "inf: each run costs epsilon anew"


# --- noise --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "all_runs"),
    [
        ((math.inf, 1e-5), (2.0, 1e-6)),
        ((2.0, 1e-6), (math.inf, 1e-5)),
        ((4.0, 1e-5), (2.0, 1e-5)),
        ((2.0, 1e-5), (4.0, 1e-5)),
        ((2.0, 1e-4), (2.2, 1e-9)),  # the larger epsilon asks for more, as its delta is so small
    ],
)
def test_noise_is_found_that_both_budgets_can_pay(
    run: tuple[float, float], all_runs: tuple[float, float]
) -> None:
    """And hardly more: one of them is nearly used up."""
    config = PATE(epsilon=run[0], delta=run[1], total_epsilon=all_runs[0], total_delta=all_runs[1])
    price = total(Node(config, times=5).mechanism.schedule())
    assert price
    used = [epsilon(price, delta) / most for most, delta in (run, all_runs)]
    assert 0.97 < max(used) <= 1


def test_where_no_noise_is_enough_the_smaller_budget_is_named() -> None:
    count = Question(
        "count", PREDICT.handler, releases={"counts": "label counts"}, times=1, reads=("counts",)
    )
    sides = NodeSide({"count": count, "predict": replace(PREDICT, times=5)})
    for name, change in (("epsilon", {"epsilon": 0.01}), ("total_epsilon", {"total_epsilon": 0.01})):
        config = PATE(**{"epsilon": 8.0, **change})
        with pytest.raises(ArgumentError, match=rf"privacy\.{name} is 0\.01"):
            Mechanism(
                "clinic", config, sides, LocalConfig(), 100, Classification(4)
            )  # the counts alone cost 0.1


# --- what the owner is told ---------------------------------------------------------------------------


def test_a_total_delta_of_one_record_is_a_fault() -> None:
    images = torch.zeros(60, 1, 4, 4)
    data = owner.TensorData(images, torch.zeros(60, dtype=torch.long))
    one, other = PATE(epsilon=3.0, total_delta=0.02), PATE(epsilon=3.0)
    (fault,) = privacy_faults(one, data, None)
    assert fault.startswith("privacy.total_delta is 0.02: allowed is well below 1 / 60")
    assert privacy_faults(other, data, None) == []
    (fault,) = privacy_faults(replace(other, delta=0.02), data, None)  # said once
    assert fault.startswith("privacy.delta")


def test_noise_can_be_found_from_the_total_alone() -> None:
    assert privacy_faults(PATE(total_epsilon=3.0), None, None) == []
    (fault,) = privacy_faults(PATE(), None, None)
    assert "privacy.epsilon is inf" in fault
