"""Lower bounds of epsilon: by hand, against slow references, and on mechanisms with known epsilon."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedstill.core.errors import ArgumentError
from fedstill.privacy.accounting import compute_epsilon
from fedstill.privacy.epsilon_lower_bounds import (
    EpsilonLowerBound,
    ErrorRates,
    clopper_pearson_upper,
    fisher_discriminant,
    lower_bound_from_runs,
    one_run_lower_bound,
)
from fedstill.privacy.events import Event
from tests.support.errors import raises_invalid


def normals(n: int, seed: int, d: int = 1) -> torch.Tensor:
    samples = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return samples.squeeze(1) if d == 1 else samples


# --- rates ----------------------------------------------------------------------------------------


@given(n=st.integers(1, 500), share=st.floats(0, 1), error=st.floats(1e-4, 0.5))
def test_clopper_pearson_bound_has_stated_error(n: int, share: float, error: float) -> None:
    k = round(share * n)
    if k == n:
        assert clopper_pearson_upper(k, n, error) == 1
    else:
        assert stats.binom.cdf(k, n, clopper_pearson_upper(k, n, error)) == pytest.approx(error, rel=1e-6)


def test_epsilon_of_error_rates_by_hand() -> None:
    rates = ErrorRates(0.2, 0.3)
    assert rates.epsilon(0.0) == pytest.approx(math.log(0.7 / 0.2))  # exceeds log(0.8 / 0.3)
    assert rates.epsilon(0.1) == pytest.approx(math.log(0.6 / 0.2))
    assert rates.epsilon(0.5) == 0, "delta 0.5 allows these rates"
    assert ErrorRates(1.0, 1.0).epsilon(0.0) == 0


@settings(deadline=None)
@given(mu=st.floats(0.2, 4), threshold=st.floats(-2, 4))
def test_gaussian_error_rates_stay_below_epsilon(mu: float, threshold: float) -> None:
    rates = ErrorRates(float(stats.norm.sf(threshold)), float(stats.norm.cdf(threshold - mu)))
    spent = {Event("gaussian", 1 / mu): 1}
    assert not EpsilonLowerBound((rates,)).refutes(spent)
    for delta in (1e-5, 1e-2, 0.3):
        assert rates.epsilon(delta) <= compute_epsilon(spent, delta) + 1e-6


def test_laplace_error_rates_reach_epsilon() -> None:
    fp, fn = math.exp(-3.0) / 2, 1 - math.exp(-1.5) / 2  # threshold 3, epsilon 1.5
    assert ErrorRates(fp, fn).epsilon(0.0) == pytest.approx(1.5)


# --- many runs ------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("mu", [0.5, 1.0, 2.0])
def test_bound_has_stated_confidence_and_is_tight(mu: float) -> None:
    spent = {Event("gaussian", 1 / mu): 1}
    claimed, count = compute_epsilon(spent, 1e-5), 100
    audits = [
        lower_bound_from_runs(normals(3000, 2 * k), normals(3000, 2 * k + 1) + mu, 1e-5) for k in range(count)
    ]
    wrong = sum(evidence.refutes(spent) for evidence in audits)
    assert wrong <= 10, "at most 5 % of 100, up to chance"
    assert sum(evidence.epsilon(1e-5) > claimed for evidence in audits) <= wrong
    same_noise_bounds = [evidence.epsilon_assuming_noise_kind(spent, 1e-5) for evidence in audits[:5]]
    assert sum(same_noise_bounds) / 5 > 0.6 * claimed
    assert max(evidence.epsilon(1e-5) for evidence in audits) > 0.2 * claimed


def test_detects_half_the_noise() -> None:
    spent = {Event("gaussian", 1.0): 1}
    evidence = lower_bound_from_runs(normals(600, 0), normals(600, 1) + 2, 1e-5)
    assert evidence.refutes(spent)
    assert (
        compute_epsilon(spent, 1e-5)
        < evidence.epsilon_assuming_noise_kind(spent, 1e-5)
        < compute_epsilon({Event("gaussian", 0.5): 1}, 1e-5)
    )


def test_constant_scores_prove_nothing() -> None:
    same = torch.zeros(100)
    evidence = lower_bound_from_runs(same, same, 1e-5)
    assert evidence.epsilon(1e-5) == 0
    assert evidence.epsilon_assuming_noise_kind({Event("gaussian", 1.0): 1}, 1e-5) == 0


def test_thresholds_come_from_separate_runs() -> None:
    """If only the first third of the runs differs, nothing is proven."""
    without, with_ = normals(3000, 0), normals(3000, 1)
    without[:1000], with_[:1000] = 0.0, 5.0
    assert lower_bound_from_runs(without, with_, 1e-5).epsilon(1e-5) < 0.3


def test_discriminant_subtracts_repeated_noise() -> None:
    noise, own = normals(400, 0, 3), 0.01 * normals(400, 1, 3)
    samples = torch.cat([noise, noise[:, :1] + own[:, :1]], 1)
    moved = samples + torch.tensor([0.5, 0.0, 0.0, -0.5])
    scores = fisher_discriminant(samples[:200], moved[200:])
    evidence = lower_bound_from_runs(*scores, 1e-5)
    assert evidence.epsilon(1e-5) > 3
    alone = fisher_discriminant(samples[:200, :3], moved[200:, :3])
    assert lower_bound_from_runs(*alone, 1e-5).epsilon(1e-5) < 1, (
        "the bound without the discriminant is small"
    )


def test_discriminant_works_without_noise() -> None:
    without, with_ = fisher_discriminant(torch.zeros(30, 2), torch.tensor([[0.0, 1.0]]).expand(30, 2))
    assert (with_ > without).all()


# --- one run --------------------------------------------------------------------------------------


def reference_p_value(m: int, r: int, v: int, eps: float, delta: float) -> float:
    """Return the p-value as defined in appendix D of the paper."""
    q = 1 / (1 + math.exp(-eps))
    beta, alpha, total = stats.binom.sf(v - 1, r, q), 0.0, 0.0
    for i in range(1, v + 1):
        total += stats.binom.pmf(v - i, r, q)
        alpha = max(alpha, total / i)
    return float(beta + alpha * delta * 2 * m)


@settings(deadline=None, max_examples=60)
@given(
    r=st.integers(1, 80),
    right=st.floats(0, 1),
    more=st.integers(0, 50),
    delta=st.sampled_from([0.0, 1e-5, 1e-3]),
)
def test_one_run_bound_matches_reference_p_value(r: int, right: float, more: int, delta: float) -> None:
    m, v = r + more, round(right * r)
    bound = one_run_lower_bound(m, r, v, delta)
    if bound:
        assert reference_p_value(m, r, v, bound, delta) == pytest.approx(0.05, rel=1e-3)
    else:
        assert reference_p_value(m, r, v, 0.0, delta) > 0.05


def test_one_run_bound_by_hand() -> None:
    q = 0.05 ** (1 / 50)  # 50 correct of 50 has probability 0.05
    assert one_run_lower_bound(100, 50, 50, 0.0) == pytest.approx(math.log(q / (1 - q)), abs=1e-5)
    assert one_run_lower_bound(100, 0, 0, 0.0) == one_run_lower_bound(100, 50, 25, 0.0) == 0
    assert one_run_lower_bound(100, 50, 50, 1e-3) < one_run_lower_bound(100, 50, 50, 0.0)
    assert one_run_lower_bound(100, 50, 50, 0.5) == 0


# --- errors --------------------------------------------------------------------------------------


def test_rejects_too_few_runs() -> None:
    with raises_invalid("runs of an audit", 5):
        lower_bound_from_runs(torch.zeros(5), torch.zeros(10), 1e-5)


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95.0])
def test_rejects_invalid_confidence(confidence: float) -> None:
    """A confidence of 95 instead of 0.95 would refute nothing."""
    scores = torch.arange(10.0)
    with pytest.raises(ArgumentError, match=r"^invalid confidence"):
        lower_bound_from_runs(scores, scores, 1e-5, confidence)
    with pytest.raises(ArgumentError, match=r"^invalid confidence"):
        one_run_lower_bound(10, 5, 5, 0.0, confidence)
