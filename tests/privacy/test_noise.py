"""Noise samplers: distributions, names, tails, and the grid on which noisy values are rounded."""

from __future__ import annotations

import hashlib
import json
import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedstill.core.errors import ArgumentError
from fedstill.privacy import noise
from fedstill.privacy.noise import NoiseSampler, add_noise, grid_step, secure_sampler, seeded_sampler

SAMPLERS = pytest.mark.parametrize("make_sampler", [seeded_sampler, secure_sampler])
UNIFORM, NORMAL, LAPLACE = stats.uniform(), stats.norm(), stats.laplace()


def from_bits(*bits: int) -> NoiseSampler:
    """Return a sampler of the given integers."""
    return noise._BitSampler(lambda count: torch.tensor(bits))


# --- distributions -------------------------------------------------------------------------------


@SAMPLERS
@pytest.mark.parametrize(("what", "law"), [("uniform", UNIFORM), ("normal", NORMAL), ("laplace", LAPLACE)])
def test_samples_have_named_distribution(make_sampler, what, law) -> None:
    x = getattr(make_sampler(0, "distribution", what), what)((200, 250))
    assert x.dtype is torch.float64
    assert x.shape == (200, 250)
    x = x.flatten().numpy()
    assert stats.kstest(x, law.cdf).pvalue > 0.01
    assert stats.kstest(x[:25_000], x[25_000:]).pvalue > 0.01
    assert abs(stats.pearsonr(x[1:], x[:-1])[0]) < 0.015  # 3 sigma
    for other in (stats.uniform(scale=1.05), stats.norm(scale=1.05), stats.laplace(scale=1.05)):
        assert stats.kstest(x, other.cdf).pvalue < 0.01


@pytest.mark.parametrize("what", ["uniform", "normal", "laplace"])
def test_secure_sampler_matches_reference(what: str) -> None:
    """The reference uses SHAKE-256, 53 bits per number, and scalar functions of another library."""
    purpose = json.dumps(["fedstill noise", 2**100 + 7, "clinic", 3]).encode()
    key = hashlib.blake2b(purpose, digest_size=64).digest()

    def numbers(call: int, count: int) -> list[int]:
        stream = hashlib.shake_256(key + call.to_bytes(8, "big")).digest(8 * count)
        return [int.from_bytes(stream[8 * i : 8 * i + 8], "little") >> 11 for i in range(count)]

    def reference(call: int) -> list[float]:
        if what == "uniform":
            return [((k >> 1) + 0.5) / 2**52 for k in numbers(call, 5)]
        integers = numbers(call, 10)
        signs = [-1.0 if low & 1 else 1.0 for low in integers[5:]]
        v = [
            (high + ((low >> 1) + 0.5) / 2**52) / 2**53
            for high, low in zip(integers[:5], integers[5:], strict=True)
        ]
        size = [-math.log(u) if what == "laplace" else -NormalDist().inv_cdf(u / 2) for u in v]
        return [s * x for s, x in zip(signs, size, strict=True)]

    sampler = secure_sampler(2**100 + 7, "clinic", 3)
    for call in (0, 1):  # each call returns new numbers
        assert getattr(sampler, what)((5,)).tolist() == pytest.approx(reference(call), rel=1e-12)


# --- names ---------------------------------------------------------------------------------------


@SAMPLERS
def test_samples_depend_on_secret_and_names_only(make_sampler) -> None:
    first = make_sampler(1, "clinic", 2).normal((4,))
    assert torch.equal(first, make_sampler(1, "clinic", 2).normal((4,)))
    for other in (
        make_sampler(2, "clinic", 2),
        make_sampler(1, "clinic", 3),
        make_sampler(1, "clinic"),
        make_sampler(1, "ward", 2),
    ):
        assert not (first == other.normal((4,))).any()
    same = make_sampler(1, "clinic", 2)
    assert not (same.normal((4,)) == same.normal((4,))).any()


def test_secure_sampler_separates_names_and_secrets() -> None:
    purposes = [("a", "b"), ("a,b",), ("a", "b", ""), ("a\x1fb",), ('a", "b',), (1,), ("1",)]
    secrets = [1, 2**64 + 1, 2**127 + 1, 2**200 + 1]
    samples = {tuple(secure_sampler(0, *names).uniform((2,)).tolist()) for names in purposes}
    samples |= {tuple(secure_sampler(secret, "a").uniform((2,)).tolist()) for secret in secrets}
    assert len(samples) == len(purposes) + len(secrets)


def test_make_sampler_by_option() -> None:
    assert noise.make_sampler("seeded") is seeded_sampler
    assert noise.make_sampler("secure") is secure_sampler


# --- ends and tails ------------------------------------------------------------------------------


def test_uniform_samples_exclude_endpoints() -> None:
    least, most = from_bits(0, 2**53 - 1).uniform((2,)).tolist()
    assert least == 2.0**-53
    assert most == 1 - 2.0**-53


def test_extreme_samples() -> None:
    """v is at least 2^-106, and at most 1."""
    ends = (0, 2**53 - 1, 1, 2**53 - 2)  # high, high, low, low: signs - and +
    laplace, normal = (getattr(from_bits(*ends), what)((2,)).tolist() for what in ("laplace", "normal"))
    assert laplace == [pytest.approx(-106 * math.log(2)), 0]
    assert normal == [pytest.approx(-11.85, abs=0.1), 0]
    assert normal[0] == pytest.approx(NORMAL.ppf(2.0**-107))


@given(st.integers(0, 2**20), st.integers(0, 2**52 - 1))
def test_tails_have_fine_resolution(high: int, low: int) -> None:
    """Adjacent small values of v differ by at most a millionth; 53 bits would not suffice."""
    v = [(high * 2**52 + k + 0.5) / 2**105 for k in (low, low + 1)]
    got = from_bits(high, high, low << 1, (low + 1 if low + 1 < 2**52 else low) << 1).laplace((2,))
    assert got[0].item() == pytest.approx(-math.log(v[0]), rel=1e-12)
    if high:
        assert got[0] - got[1] <= 2.0**-50
    assert (got > 20).all()  # P < 2e-9: both values are in the tails


# --- addition of noise ---------------------------------------------------------------------------


@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=20),
    st.floats(1e-3, 1e4),
    st.integers(0, 2**31),
)
def test_noisy_values_lie_on_grid(values: list[float], scale: float, seed: int) -> None:
    v, n = torch.tensor(values), seeded_sampler(seed).normal((len(values),))
    out = add_noise(v, n, scale)
    assert out.dtype is torch.float32
    steps = out.double() / grid_step(scale)
    assert torch.equal(steps, steps.round())
    exact = v.double() + scale * n
    assert ((out.double() - exact).abs() <= grid_step(scale) / 2 + 2.0**-24 * exact.abs() + 1e-12).all()


def test_zero_scale_adds_no_noise_and_rejects_invalid_scale() -> None:
    values = torch.tensor([1 / 3, 2.0])
    assert torch.equal(add_noise(values, torch.ones(2), 0.0), values)
    for scale in (-1.0, math.inf, math.nan):
        with pytest.raises(ArgumentError, match="invalid scale"):
            add_noise(values, torch.ones(2), scale)
