"""FedKD's quantizer compared with Eq. 4 by hand, and the distribution of Laplace noise."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedstill.core.errors import ArgumentError, NodeFault
from fedstill.core.seeds import torch_generator
from fedstill.methods._logit_perturbation import (
    check_no_nan,
    dequantize,
    index_dtype,
    quantize,
    sample_laplace,
)

# --- the quantizer -------------------------------------------------------------------------------


def test_quantize_clips_to_bound() -> None:
    z = torch.tensor([-100.0, -2.0001, 2.0001, 100.0, math.inf, -math.inf])
    assert quantize(z, 200, 2.0).tolist() == [-100, -100, 100, 100, 100, -100]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_levels_of_the_paper_round_trip_in_one_byte(dtype: torch.dtype) -> None:
    """S = 200, z_max = 12.5: steps of 1/8."""
    grid = list(range(-100, 101))
    z = (torch.tensor(grid) / 8).to(dtype)
    index = quantize(z, 200, 12.5)
    assert index.dtype is torch.int8
    assert index.tolist() == grid
    assert torch.equal(dequantize(index, 200, 12.5), z.float())


@pytest.mark.parametrize(
    ("levels", "kind"),
    [
        (1, torch.int8),
        (200, torch.int8),
        (254, torch.int8),
        (255, torch.int16),
        (65534, torch.int16),
        (65535, torch.int32),
        (2**31, torch.int32),
    ],
)
def test_wire_type_is_smallest_for_all_indices(levels: int, kind: torch.dtype) -> None:
    assert index_dtype(levels) is kind
    ends = quantize(torch.tensor([-1.0, 1.0], dtype=torch.float64), levels, 1.0)
    assert ends.dtype is kind
    assert ends.tolist() == [-(levels // 2), math.ceil(levels / 2)]


@given(st.integers(1, 70_000), st.floats(0.01, 1e3), st.lists(st.floats(-2e3, 2e3), min_size=1, max_size=20))
def test_values_increase_by_less_than_one_step(levels: int, z_max: float, values: list[float]) -> None:
    z = torch.tensor(values, dtype=torch.float64)
    index = quantize(z, levels, z_max)
    moved = index.double() * 2 * z_max / levels - z.clamp(-z_max, z_max)
    step = 2 * z_max / levels
    assert (moved >= -1e-9 * z_max).all()
    assert (moved < step * (1 + 1e-9)).all()


def test_rejects_invalid_bound() -> None:
    for z_max in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ArgumentError, match="invalid z_max ="):
            quantize(torch.zeros(1), 2, z_max)


@pytest.mark.parametrize("levels", [1, 2, 200, 254, 255, 65534, 65535])
def test_nan_is_sent_and_reported_by_the_server(levels: int) -> None:
    """A refusal by the node would be a release that is neither charged nor counted."""
    z = torch.tensor([[0.5, -1.0], [math.nan, 1.0]])
    back = dequantize(quantize(z, levels, 1.0), levels, 1.0)
    assert back.isnan().tolist() == [[False, False], [True, False]]
    check_no_nan(["a"], back[:1])
    with pytest.raises(NodeFault, match=r"'b'.* NaN") as caught:
        check_no_nan(["a", "b"], back)
    assert caught.value.node == "b"


# --- Laplace noise -------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.1, 1.0, 7.0])
def test_noise_is_laplace(scale: float) -> None:
    x = sample_laplace((20_000,), scale, torch_generator(0, "test", str(scale))).double().numpy()
    assert stats.kstest(x, stats.laplace(scale=scale).cdf).pvalue > 0.01
    assert abs(x).mean() == pytest.approx(scale, rel=0.03)  # E|x| = b
    assert (x > 0).mean() == pytest.approx(0.5, abs=0.02)


def test_noise_is_finite_at_the_ends_of_the_uniform_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(high: int, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        return torch.tensor([0, high - 1])

    monkeypatch.setattr(torch, "randint", ends)
    x = sample_laplace((2,), 1.0, torch.Generator())
    assert x.tolist() == [pytest.approx(-52 * math.log(2)), pytest.approx(52 * math.log(2))]
