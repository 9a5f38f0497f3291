"""Votes: read from logits, noised and told; thresholds; what is charged for them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedstill.privacy.events import Event, PrivacyCost
from fedstill.privacy.noise import seeded
from fedstill.privacy.pate import NoisyVotes, PateConfig
from tests.privacy.test_release_rules import only


def test_votes_are_read_from_logits_and_told_as_logits() -> None:
    """4 teachers, sharpness 8: two logits a vote. What lies between is a whole vote."""
    x = torch.tensor([[8.0, 0.0, 0.0], [2.0, 2.0, 4.0], [2.4, 1.7, 3.6], [-5.0, 99.0, 0.0]])
    exact = [[8, 0, 0], [2, 2, 4], [2, 2, 4], [0, 8, 0]]
    rule = NoisyVotes(PateConfig(teachers=4, sharpness=8.0), 0.0)
    assert rule.noise(rule.bound(x), seeded(0)).tolist() == exact
    for m in (1, 3, 7, 10, 100, 250):  # float32 shares of any number of teachers
        votes = torch.arange(m + 1.0)
        read = NoisyVotes(PateConfig(teachers=m), 1.0).bound((10 * (votes / m)).unsqueeze(1))
        assert torch.allclose(read.flatten() * m / 10, votes, rtol=1e-6)


def test_the_label_of_the_most_votes_is_told_with_the_right_chance() -> None:
    """P(a + N > b + N') = Phi((a - b) / (sigma sqrt 2)); it is told as if all had voted for it."""
    rule = NoisyVotes(PateConfig(teachers=10, release="label", sharpness=6.0), 3.0)
    x = torch.tensor([[6.0 * 0.6, 6.0 * 0.4]]).repeat(20_000, 1)
    out = rule.noise(rule.bound(x), seeded(0, "label"))
    assert ((out == 6.0).sum(1) == 1).all()
    assert ((out == 0.0).sum(1) == 1).all()
    expected = stats.norm.cdf(2 / (3 * math.sqrt(2)))
    assert (out[:, 0] == 6.0).double().mean().item() == pytest.approx(expected, abs=0.012)


@pytest.mark.parametrize("release", ["votes", "label"])
def test_rows_below_the_threshold_are_zeros_and_cost_no_votes(release) -> None:
    rule = NoisyVotes(PateConfig(teachers=100, release=release, threshold=70.0, threshold_noise=10.0), 5.0)
    x = torch.tensor([[8.0, 2.0, 0.0]]).repeat(5_000, 1)  # 80 votes: 70 is one sigma below
    out = rule.noise(rule.bound(x), seeded(0, "threshold"))
    answered = (out != 0).any(1)
    assert answered.double().mean().item() == pytest.approx(stats.norm.cdf(1), abs=0.02)
    passed = int(answered.sum())
    assert rule.actual_cost(out.shape, out) == {
        Event("gaussian", 10 / math.sqrt(5_000)): 1,
        Event("gaussian", 5 / math.sqrt(2 * passed)): 1,
    }
    nothing = torch.zeros(2, 3)
    assert rule.actual_cost((2, 3), nothing) == {Event("gaussian", 10 / math.sqrt(2)): 1}
    # Where nothing was hidden, zeros are an answer like any other.
    everywhere = NoisyVotes(PateConfig(teachers=100, release=release), 5.0)
    assert everywhere.actual_cost((2, 3), nothing) == everywhere.cost((2, 3))


def test_the_threshold_does_not_choose_by_the_noise_of_the_votes() -> None:
    """Noise of answered rows is that of all rows: the threshold has noise of its own."""
    rule = NoisyVotes(PateConfig(teachers=10, threshold=5.0, threshold_noise=5.0), 5.0)
    x = torch.tensor([[5.0, 5.0]]).repeat(20_000, 1)
    out = rule.noise(rule.bound(x), seeded(0, "own noise"))
    added = (out[(out != 0).any(1)] - 5).flatten().numpy()
    assert len(added) == pytest.approx(20_000, rel=0.05)  # half of the rows, two values each
    assert stats.kstest(added, stats.norm(scale=5).cdf).pvalue > 0.01


def test_an_answered_row_never_looks_as_if_it_were_not() -> None:
    class Zeros:
        """Noise that takes away just what there is, and lets every row pass."""

        def normal(self, shape):
            return torch.zeros(tuple(shape), dtype=torch.float64)

    rule = NoisyVotes(PateConfig(teachers=10, threshold=0.0), 5.0)
    out = rule.noise(torch.zeros(3, 2), Zeros())  # type: ignore[arg-type]
    assert (out != 0).all()
    assert (out.abs() < 1e-4).all()


@given(st.integers(1, 60), st.integers(0, 2**31))
def test_what_is_paid_is_never_more_than_the_price(B: int, seed: int) -> None:
    rule = NoisyVotes(PateConfig(teachers=10, threshold=5.0, threshold_noise=3.0), 5.0)
    out = rule.noise(rule.bound(torch.rand(B, 4) * 10), seeded(seed))
    cost, actual_cost = rule.cost((B, 4)), rule.actual_cost((B, 4), out)
    assert cost is not None
    assert actual_cost is not None
    square = [sum(times / event.noise**2 for event, times in p.items()) for p in (cost, actual_cost)]
    assert square[1] <= square[0] * (1 + 1e-12)
    assert (square[1] < square[0] * (1 - 1e-9)) == bool((out == 0).all(1).any())


@given(st.integers(0, 2**31), st.integers(1, 20), st.integers(2, 12), st.integers(1, 60))
def test_votes_move_by_one_teacher(seed: int, B: int, C: int, m: int) -> None:
    """One record: one teacher votes for any other class on each input."""
    rng = np.random.default_rng(seed)
    votes = rng.integers(C, size=(m, B))
    changed = votes.copy()
    changed[rng.integers(m)] = rng.integers(C, size=B)
    rule = NoisyVotes(PateConfig(teachers=m, threshold=2.0, threshold_noise=3.0, sharpness=7.0), 4.0)
    (most, _), (all_, _) = sorted(
        (only(PrivacyCost({event: 1})) for event in rule.cost((B, C)) or {}),
        key=lambda item: item[0].noise != 3.0 / math.sqrt(B),
    )
    logits = [7.0 * torch.from_numpy(np.eye(C)[v].mean(0)).float() for v in (votes, changed)]
    counts = [rule.bound(z).double() * m / 7 for z in logits]
    exact = [torch.from_numpy(np.eye(C)[v].sum(0)) for v in (votes, changed)]
    for got, want in zip(counts, exact, strict=True):
        assert torch.allclose(got, want, rtol=1e-5)
    slack = 1 + 1e-5  # logits are float32
    assert all_.noise * (counts[0] - counts[1]).norm() <= 4.0 * slack
    assert most.noise * (counts[0].amax(1) - counts[1].amax(1)).norm() <= 3.0 * slack
