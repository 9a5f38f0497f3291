"""Release rules: bounds for any row, claimed noise distributions, and charged sensitivities."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from fedstill.core.errors import ArgumentError
from fedstill.privacy.clipping import CLIP_MARGIN, clip_factors, clip_rows, row_norms
from fedstill.privacy.events import Event
from fedstill.privacy.noise import secure_sampler, seeded_sampler
from fedstill.privacy.pate import NoisyVotes, PateConfig
from fedstill.privacy.release_rules import (
    BoundedNoisyRows,
    Derived,
    Exact,
    NoisyCounts,
    ReleaseRule,
    SanitizedGradients,
)
from tests.support.privacy import single_event

PROTECTING: list[ReleaseRule] = [
    NoisyCounts(10.0),
    BoundedNoisyRows("laplace", 2.0, 3.0),
    BoundedNoisyRows("gaussian", 2.0, 3.0),
    NoisyVotes(PateConfig(teachers=10), 4.0),
    NoisyVotes(PateConfig(teachers=10, release="label", threshold=5.0), 4.0),
    SanitizedGradients(1.0, 2.0),
    SanitizedGradients(1.0, 2.0, 10),
]
BARE: list[ReleaseRule] = [
    Exact(),
    NoisyCounts(0.0),
    BoundedNoisyRows("laplace", 2.0, 0.0),
    BoundedNoisyRows("gaussian", 0.0, 3.0),
    NoisyVotes(PateConfig(teachers=10), 0.0),
    NoisyVotes(PateConfig(teachers=10, release="label", threshold=5.0), 0.0),
    SanitizedGradients(1.0, 0.0, 10),
]
SAMPLERS = pytest.mark.parametrize("make_sampler", [seeded_sampler, secure_sampler])


def rows(dtype: type, most: float) -> st.SearchStrategy[np.ndarray]:
    """Draw tensors (B, ...) with huge, tiny, equal and zero values."""
    width = 8 * np.dtype(dtype).itemsize
    values = st.floats(-most, most, width=width) | st.sampled_from([0.0, most, -most])
    shapes = hnp.array_shapes(min_dims=1, max_dims=4, max_side=5)
    return shapes.flatmap(lambda shape: hnp.arrays(dtype, shape, elements=values))


ANY_ROWS = rows(np.float32, float(np.finfo(np.float32).max)) | rows(np.float16, 60_000.0)
ANY_ROWS = ANY_ROWS | rows(np.float64, 1e308)


def row_lengths(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double().reshape(len(tensor), math.prod(tensor.shape[1:])).norm(dim=1)


# --- bounds --------------------------------------------------------------------------------------


@settings(deadline=None)
@given(ANY_ROWS, st.floats(1e-4, 1e4))
def test_clipped_rows_stay_within_clip(array: np.ndarray, clip: float) -> None:
    x = torch.from_numpy(array)
    for out in (
        clip_rows(x, clip),
        SanitizedGradients(clip, 1.0).bound(x),
        BoundedNoisyRows("gaussian", 1.0, clip).bound(x),
    ):
        assert out.dtype is torch.float32
        assert out.shape == x.shape
        assert (row_lengths(out) <= clip).all()  # exact in float64
        short = row_lengths(x) < 0.999 * clip
        assert torch.equal(out[short], x[short].float())
        # Clipped rows keep their direction and at least 99.999 % of the clipping bound.
        cut = row_lengths(x.float()) > clip
        assert (row_lengths(out[cut]) > 0.99999 * clip).all()
        assert torch.equal(out.sign() * x.sign().float(), out.sign().abs())


@settings(deadline=None)
@given(st.integers(0, 600), st.sampled_from([1e-14, 1e-3, 1.0, 1e12, 1e18, 1e20, 1e37]), st.integers(0, 99))
def test_row_norms_match_float64(values: int, scale: float, seed: int) -> None:
    x = scale * torch.randn(3, values, generator=torch.Generator().manual_seed(seed))
    norms = row_norms(x)
    assert norms.dtype is torch.float64
    torch.testing.assert_close(norms, x.double().norm(dim=1), rtol=(1 - CLIP_MARGIN) / 2, atol=1e-15)
    if values:
        x[0, seed % values], x[1, -1] = math.inf, math.nan
        assert row_norms(x).isfinite().tolist() == [False, False, True]


def test_tiny_rows_stay_within_clip() -> None:
    x = torch.full((1, 4), 1e-25)
    for clip in (1e-26, 1e-30):
        assert (x.double() * clip_factors(row_norms(x), clip)).norm() <= clip
        assert clip_rows(x, clip).double().norm() <= clip


@settings(deadline=None)
@given(ANY_ROWS, st.floats(1e-4, 1e4))
def test_clamped_values_stay_within_bound(array: np.ndarray, bound: float) -> None:
    x = torch.from_numpy(array)
    out = BoundedNoisyRows("laplace", 1.0, bound).bound(x)
    assert out.shape == x.shape
    assert (out.double().abs() <= bound).all()
    within = x.double().abs() < 0.999 * bound
    assert torch.equal(out[within], x[within].float())
    assert (out[~within].double().abs() > 0.99899 * bound).all()


@pytest.mark.parametrize("rule", PROTECTING, ids=lambda rule: rule.text)
def test_nan_is_never_released(rule: ReleaseRule) -> None:
    """A NaN would reveal a record, and no bound would hold."""
    x = torch.tensor([[math.nan, 1.0, 0.0], [math.inf, -math.inf, 0.0], [math.inf, math.inf, math.inf]])
    out = rule.noise(rule.bound(x), seeded_sampler(0))
    assert torch.isfinite(out).all()
    most = torch.finfo(torch.float32).max
    like = torch.tensor([[0.0, 1.0, 0.0], [most, -most, 0.0], [most, most, most]])
    assert torch.allclose(out, rule.noise(rule.bound(like), seeded_sampler(0)))


@pytest.mark.parametrize("rule", PROTECTING + BARE, ids=lambda rule: rule.text)
def test_releases_are_detached_float32_of_equal_shape(rule: ReleaseRule) -> None:
    x = torch.rand(4, 3).requires_grad_()
    out = rule.noise(rule.bound(x), seeded_sampler(0))
    assert out.shape == x.shape
    assert out.dtype is torch.float32
    assert isinstance(rule, (Exact, Derived)) or not out.requires_grad
    assert "\n" not in rule.text


@pytest.mark.parametrize("rule", PROTECTING[:3] + PROTECTING[5:], ids=lambda rule: rule.text)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (2,), (2, 3, 4, 5)])
def test_rules_handle_any_shape(rule: ReleaseRule, shape: tuple[int, ...]) -> None:
    out = rule.noise(rule.bound(torch.zeros(shape)), seeded_sampler(0))
    assert out.shape == shape
    cost = rule.cost(shape)
    assert cost is not None
    assert isinstance(rule, NoisyCounts) or bool(cost) == (0 not in shape)


# --- noise ---------------------------------------------------------------------------------------


@SAMPLERS
@pytest.mark.parametrize(
    ("rule", "x", "law"),
    [
        (BoundedNoisyRows("laplace", 0.7, 3.0), torch.linspace(-5, 5, 30_000), stats.laplace(scale=0.7)),
        (BoundedNoisyRows("gaussian", 0.7, 3.0), torch.linspace(-5, 5, 30_000), stats.norm(scale=0.7)),
        (BoundedNoisyRows("laplace", 2.0, 0.0), torch.linspace(-5, 5, 30_000), stats.laplace(scale=2)),
        (SanitizedGradients(0.5, 3.0), torch.linspace(-5, 5, 30_000), stats.norm(scale=1.5)),
        (SanitizedGradients(0.5, 3.0, 10), torch.linspace(-5, 5, 30_000), stats.norm(scale=1.5)),
        (NoisyCounts(3000.0), torch.full((30_000,), 1e6), stats.laplace(scale=3000)),
        # 4 votes of standard deviation, as logits with sharpness 5 and 20 teachers: 4 * 5 / 20
        (
            NoisyVotes(PateConfig(teachers=20, sharpness=5.0), 4.0),
            torch.arange(30_000) % 21 / 4,
            stats.norm(scale=1),
        ),
    ],
    ids=lambda value: getattr(value, "text", ""),
)
def test_added_noise_has_claimed_distribution(make_sampler, rule: ReleaseRule, x, law) -> None:
    x = x.view(300, 100)
    bounded = rule.bound(x)
    added = (
        (rule.noise(bounded, make_sampler(0, "ks", rule.text)).double() - bounded.double()).flatten().numpy()
    )
    assert stats.kstest(added, law.cdf).pvalue > 0.01
    worse = type(law.dist)()(scale=law.std() / type(law.dist)().std() * 1.1)
    assert stats.kstest(added, worse.cdf).pvalue < 0.01
    # The noise does not depend on the value it is added to.
    low, high = (added[bounded.flatten().numpy() == end] for end in (bounded.min(), bounded.max()))
    if len(low) < len(added):
        assert stats.ks_2samp(low, high).pvalue > 0.01


def test_noisy_counts_are_whole_and_not_negative() -> None:
    """Servers accept only such counts; Lap(5) is negative with probability 1/2."""
    rule = NoisyCounts(5.0)
    out = rule.noise(rule.bound(torch.zeros(10_000)), seeded_sampler(0, "counts"))
    assert torch.equal(out, out.round())
    assert (out >= 0).all()
    # P(x < 1/2) = 1 - exp(-0.1) / 2
    assert (out == 0).double().mean().item() == pytest.approx(1 - math.exp(-0.1) / 2, abs=0.015)
    assert rule.noise(rule.bound(torch.tensor(7.0)), seeded_sampler(1)).shape == ()


def test_without_noise_releases_bounded_values() -> None:
    x = torch.tensor([[0.1, 7.0], [20.0, -3.0]])
    assert torch.equal(Exact().noise(Exact().bound(x), seeded_sampler(0)), x)
    assert torch.equal(Derived("a").noise(Derived("a").bound(x), seeded_sampler(0)), x)
    assert torch.equal(NoisyCounts(0.0).noise(NoisyCounts(0.0).bound(x), seeded_sampler(0)), x.clamp(min=0))
    outputs = BoundedNoisyRows("laplace", 0.0, 5.0)
    clamped = torch.tensor([[0.1, 5.0], [5.0, -3.0]])
    assert torch.allclose(outputs.noise(outputs.bound(x), seeded_sampler(0)), clamped)


# --- costs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "shape", "cost"),
    [
        (Derived("a model"), (64, 10), {}),
        (NoisyCounts(10.0), (10,), {Event("laplace", 10.0): 1}),
        (NoisyCounts(10.0), (), {Event("laplace", 10.0): 1}),
        (NoisyCounts(10.0, group=4), (10,), {Event("laplace", 2.5): 1}),
        (NoisyCounts(10.0, sensitivity=14), (14,), {Event("laplace", 10 / 14): 1}),
        (NoisyCounts(10.0, 4, sensitivity=5), (14,), {Event("laplace", 0.5): 1}),
        # Each of 10 values of 64 rows may change by 2 * 5: 100 per row in L1.
        (BoundedNoisyRows("laplace", 50.0, 5.0), (64, 10), {Event("laplace", 0.5): 64}),
        (BoundedNoisyRows("laplace", 50.0, 5.0), (64,), {Event("laplace", 5.0): 64}),
        # Each of 16 rows may change by 2 * 5 in L2: 40 in total.
        (BoundedNoisyRows("gaussian", 100.0, 5.0), (16, 10), {Event("gaussian", 2.5): 1}),
        # Each of 8 rows may change by sqrt(2) votes: 4 in L2. The maxima of 4 rows by 1 each: 2.
        (NoisyVotes(PateConfig(teachers=10), 40.0), (8, 10), {Event("gaussian", 10.0): 1}),
        (NoisyVotes(PateConfig(teachers=10, release="label"), 40.0), (8, 10), {Event("gaussian", 10.0): 1}),
        (NoisyVotes(PateConfig(teachers=10, threshold=6.0, threshold_noise=30.0), 40.0), (8, 10), "both"),
        # The gradients of 16 inputs may change by 2 clip each: 8 clip.
        (SanitizedGradients(0.3, 16.0), (16, 1, 8, 8), {Event("gaussian", 2.0): 1}),
        (SanitizedGradients(0.3, 16.0, 10), (16, 1, 8, 8), {Event("gaussian", 20.0): 1}),
    ],
)
def test_costs_by_hand(rule: ReleaseRule, shape: tuple[int, ...], cost) -> None:
    if cost == "both":
        cost = {Event("gaussian", 10.0): 1, Event("gaussian", 30 / math.sqrt(8)): 1}
    got = rule.cost(shape)
    assert got is not None
    want = Counter(cost)
    assert sorted(got.values()) == sorted(want.values())
    by_noise = [sorted(p, key=lambda event: event.noise) for p in (got, want)]
    for one, other in zip(*by_noise, strict=True):
        assert (one.kind, one.rate, one.group) == (other.kind, 1, 1)
        assert one.noise == pytest.approx(other.noise, rel=1e-12)
        assert got[one] == want[other]
    assert rule.actual_cost(shape, torch.ones(shape)) == got


@pytest.mark.parametrize("rule", BARE, ids=lambda rule: rule.text)
def test_without_noise_or_bound_cost_is_none(rule: ReleaseRule) -> None:
    assert rule.cost((8, 10)) is None
    assert rule.actual_cost((8, 10), torch.ones(8, 10)) is None
    assert "no guarantee" in rule.text


# --- sensitivity ---------------------------------------------------------------------------------


def networks(seed: int, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs of two unrelated networks of any scale, or opposite outputs."""
    generator = torch.Generator().manual_seed(seed)
    size = 10 ** (6 * torch.rand(2, generator=generator) - 3)
    one, other = size.view(2, *[1] * len(shape)) * torch.randn(2, *shape, generator=generator)
    return (one, -one) if seed % 3 == 0 else (one, other)


@given(st.integers(0, 2**31), st.integers(1, 20), st.integers(1, 12), st.floats(0.01, 100))
def test_outputs_stay_within_sensitivity(seed: int, B: int, C: int, bound: float) -> None:
    one, other = networks(seed, (B, C))
    rule: ReleaseRule = BoundedNoisyRows("laplace", 3.0, bound)
    event, times = single_event(rule.cost((B, C)))
    moved = (rule.bound(one).double() - rule.bound(other).double()).abs().sum(1)  # L1 of each row
    assert times == B
    assert (event.noise * moved <= 3.0).all()
    rule = BoundedNoisyRows("gaussian", 3.0, bound)
    event, times = single_event(rule.cost((B, C)))
    assert times == 1
    assert event.noise * (rule.bound(one).double() - rule.bound(other).double()).norm() <= 3.0


@given(st.integers(0, 2**31), st.integers(1, 20), st.floats(0.01, 100))
def test_gradients_stay_within_sensitivity(seed: int, B: int, clip: float) -> None:
    one, other = networks(seed, (B, 2, 3))
    rule = SanitizedGradients(clip, 3.0)
    event, _ = single_event(rule.cost((B, 2, 3)))
    assert event.noise * (rule.bound(one).double() - rule.bound(other).double()).norm() <= 3.0 * clip


@given(st.integers(0, 2**31), st.integers(1, 8), st.integers(2, 20), st.floats(0.01, 100))
def test_teacher_means_stay_within_sensitivity(seed: int, B: int, m: int, clip: float) -> None:
    """One record may replace the gradients of one teacher by any others."""
    generator = torch.Generator().manual_seed(seed)
    each = torch.stack([clip_rows(torch.randn(B, 6, generator=generator) * 3 * clip, clip) for _ in range(m)])
    changed = each.clone()
    one, other = networks(seed, (B, 6))
    if seed % 2:  # the worst case: all teachers agree, and one reverses
        each[:], changed[:] = clip_rows(one * 1e6, clip), clip_rows(one * 1e6, clip)
        other = -one * 1e6
    changed[seed % m] = clip_rows(other, clip)
    rule = SanitizedGradients(clip, 3.0, m)
    event, _ = single_event(rule.cost((B, 6)))
    moved = (rule.bound(each.mean(0)).double() - rule.bound(changed.mean(0)).double()).norm()
    assert event.noise * moved <= 3.0 * clip * (1 + 1e-5)  # means are computed in float32


@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(1, 5))
def test_counts_stay_within_sensitivity(seed: int, C: int, group: int) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(C, size=50)
    rule = NoisyCounts(10.0, group)
    event, _ = single_event(rule.cost((C,)))
    whole, less = (
        rule.bound(torch.from_numpy(np.bincount(some, minlength=C)).float()).double()
        for some in (labels, labels[group:])
    )
    assert event.noise * (whole - less).abs().sum() <= 10.0
    assert event.noise * (whole - less).abs().sum() == pytest.approx(10.0)  # the bound is attained


@given(st.integers(0, 2**31), st.integers(2, 12))
def test_pixel_shares_stay_within_sensitivity(seed: int, C: int) -> None:
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(C, 0.3), 50)  # class shares of the pixels of each image, with sum 1
    rule = NoisyCounts(10.0)
    event, _ = single_event(rule.cost((C,)))
    whole, less = (
        rule.bound(torch.from_numpy(some.sum(0)).float()).double() for some in (shares, shares[1:])
    )
    assert event.noise * (whole - less).abs().sum() <= 10.0 * (1 + 1e-5)


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: NoisyCounts(-1.0), "invalid counts.scale = -1.0"),
        (lambda: NoisyCounts(1.0, 0), "invalid counts.group = 0"),
        (lambda: NoisyCounts(1.0, sensitivity=0.0), "invalid counts.sensitivity = 0.0"),
        (lambda: BoundedNoisyRows("cauchy", 1.0, 1.0), "invalid outputs.distribution = 'cauchy'"),  # type: ignore[arg-type]
        (lambda: BoundedNoisyRows("laplace", math.nan, 1.0), "invalid outputs.scale = nan"),
        (lambda: BoundedNoisyRows("laplace", 1.0, math.inf), "invalid outputs.limit = inf"),
        (lambda: NoisyVotes(PateConfig(teachers=0), 1.0), "invalid pate.teachers = 0"),
        (lambda: NoisyVotes(PateConfig(teachers=2), -1.0), "invalid pate.sigma = -1.0"),
        (lambda: NoisyVotes(PateConfig(teachers=2, release="all"), 1.0), "invalid pate.release = 'all'"),  # type: ignore[arg-type]
        (lambda: NoisyVotes(PateConfig(teachers=2, threshold=-1.0), 1.0), "invalid pate.threshold = -1.0"),
        (
            lambda: NoisyVotes(PateConfig(teachers=2, threshold_noise=0.0), 1.0),
            "invalid pate.threshold_noise = 0.0",
        ),
        (lambda: NoisyVotes(PateConfig(teachers=2, sharpness=0.0), 1.0), "invalid pate.sharpness = 0.0"),
        (lambda: SanitizedGradients(0.0, 1.0), "invalid gradients.clip = 0.0"),
        (lambda: SanitizedGradients(1.0, math.inf), "invalid gradients.sigma = inf"),
        (lambda: SanitizedGradients(1.0, 1.0, 0), "invalid gradients.teachers = 0"),
    ],
)
def test_rejects_invalid_options(make, line: str) -> None:
    with pytest.raises(ArgumentError, match=line):
        make()
