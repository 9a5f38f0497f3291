"""Figures of an attack: against hands, against pairs counted one by one, against scikit-learn and scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from sklearn.metrics import roc_auc_score, roc_curve

from fedstill.attacks.membership_scores import auc_with_interval, tpr_at_fpr

# Few values, so that many scores are equal.
SCORES = st.lists(st.integers(0, 12), min_size=1, max_size=40).map(lambda s: torch.tensor(s).float())


# --- AUC ------------------------------------------------------------------------------------------


@given(SCORES, SCORES)
def test_auc_is_that_of_all_pairs_and_of_scikit_learn(members: torch.Tensor, others: torch.Tensor) -> None:
    pairs = [float(a > b) + float(a == b) / 2 for a in members for b in others]
    found = auc_with_interval(members, others)
    assert found["value"] == pytest.approx(sum(pairs) / len(pairs))
    labels = [1] * len(members) + [0] * len(others)
    assert found["value"] == pytest.approx(roc_auc_score(labels, torch.cat([members, others]).numpy()))
    assert 0 <= found["low"] <= found["value"] <= found["high"] <= 1
    assert found["low"] < found["high"], "no finite number of records settles it"


@given(SCORES, SCORES)
def test_variance_is_that_of_pairs_counted_one_by_one(members: torch.Tensor, others: torch.Tensor) -> None:
    psi = np.array([[float(a > b) + float(a == b) / 2 for b in others] for a in members])
    found = auc_with_interval(members, others)
    if min(psi.shape) < 2 or not 0 < psi.mean() < 1:
        return
    variance = psi.mean(1).var(ddof=1) / len(members) + psi.mean(0).var(ddof=1) / len(others)
    if variance < 1e-12:
        return
    width = 2 * 1.959964 * math.sqrt(variance) / (psi.mean() * (1 - psi.mean()))
    ends = [math.log(end / (1 - end)) for end in (found["low"], found["high"])]
    assert ends[1] - ends[0] == pytest.approx(width, rel=1e-4)


def test_members_and_others_apart_altogether_leave_an_interval() -> None:
    found = auc_with_interval(torch.arange(10.0) + 10, torch.arange(5.0))
    assert (found["value"], found["high"]) == (1.0, 1.0)
    assert found["low"] == pytest.approx(0.025 ** (1 / 5)), "five pairs without a record in common"
    below = auc_with_interval(torch.arange(5.0), torch.arange(10.0) + 10)
    assert (below["low"], below["value"]) == (0.0, 0.0)
    assert below["high"] == pytest.approx(1 - 0.025 ** (1 / 5))


# --- true positives at few false ones ---------------------------------------------------------------


@given(SCORES, SCORES, st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.25, 0.5, 1.0]))
def test_found_is_the_best_point_of_the_curve_and_nothing_between(
    members: torch.Tensor, others: torch.Tensor, rate: float
) -> None:
    at = tpr_at_fpr(members, others, rate)
    labels = [1] * len(members) + [0] * len(others)
    fpr, tpr, _ = roc_curve(labels, torch.cat([members, others]).numpy(), drop_intermediate=False)
    best = tpr[fpr <= rate + 1e-9].max()
    assert at["true_positives"]["value"] == pytest.approx(best)
    assert at["accused"] <= at["allowed"] <= rate * len(others) + 1e-6


def test_a_share_that_floating_point_makes_smaller() -> None:
    assert 0.29 * 100 < 29
    assert tpr_at_fpr(torch.ones(1), torch.arange(100.0), 0.29)["allowed"] == 29


def test_equal_scores_are_accused_together_or_not_at_all() -> None:
    at = tpr_at_fpr(torch.tensor([1.0, 1.0, 2.0]), torch.tensor([1.0, 1.0, 0.0, 0.0]), 0.25)
    assert (at["accused"], at["found"]) == (0, 1)


@pytest.mark.parametrize(("found", "n"), [(0, 20), (3, 20), (20, 20), (7, 300)])
def test_intervals_are_those_of_clopper_and_pearson(found: int, n: int) -> None:
    members = torch.cat([torch.ones(found), -torch.ones(n - found)])
    share = tpr_at_fpr(members, torch.zeros(10), 0.0, 0.95)["true_positives"]
    exact = binomtest(found, n).proportion_ci(0.95, "exact")
    assert (share["value"], share["low"], share["high"]) == pytest.approx((found / n, exact.low, exact.high))
