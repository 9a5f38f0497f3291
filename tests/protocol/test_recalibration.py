"""Statistics of batch norm: numbers by hand, independence of batches, and the bound of one example."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedstill.models import build
from fedstill.protocol import recalibration
from fedstill.protocol.recalibration import (
    MIN_VARIANCE_RATIO,
    Recalibration,
    batch_norm_layers,
    example_statistics,
    forward_order,
    set_statistics,
    sum_statistics,
)
from tests.support.errors import raises_invalid

LARGE = 1e6  # a clip that shortens nothing here


def images(count: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed)) + 1


def network(name: str = "resnet8:2") -> nn.Module:
    """Return a network whose running statistics are those of other inputs."""
    model = build(name, (1, 8, 8), 3, 0)
    model.train()(images(20, seed=9))
    return model.eval()


def test_statistics_by_hand() -> None:
    """Two channels of two examples with two positions each."""
    norm = nn.BatchNorm2d(2, eps=0.0)
    norm.running_mean.copy_(torch.tensor([1.0, 0.0]))
    norm.running_var.copy_(torch.tensor([4.0, 1.0]))
    x = torch.tensor([[[[1.0, 3.0]], [[0.0, 2.0]]], [[[5.0, 9.0]], [[-1.0, 1.0]]]])
    # z of channel 0: (0, 1), (2, 4); of channel 1: (0, 2), (-1, 1).
    expected = torch.tensor([[0.5, 1.0, 0.5, 2.0], [3.0, 0.0, 10.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(example_statistics(norm, x, 0), expected)
    sums = sum_statistics(norm, x, 0, LARGE)
    torch.testing.assert_close(sums[1:] * LARGE, expected.sum(0))
    assert sums[0] == 2
    set_statistics(norm, sums, LARGE)
    assert norm.running_mean.tolist() == [4.5, 0.5]  # of 1, 3, 5, 9 and of 0, 2, -1, 1
    assert norm.running_var.tolist() == [8.75, 1.25]


@pytest.mark.parametrize("name", ["bn-lenet:4", "resnet8:2"])
def test_layer_by_layer_gives_statistics_of_one_large_batch(name: str) -> None:
    """In training mode, torch normalizes each layer of a batch by the statistics of that batch."""
    model, x = network(name), images(40)
    reference = copy.deepcopy(model)
    for layer in batch_norm_layers(reference):
        layer.momentum = 1.0
    reference.train()(x)
    for number in forward_order(model, x):
        layer = batch_norm_layers(model)[number]
        set_statistics(layer, sum_statistics(model, x, number, LARGE), LARGE)
    for layer, like in zip(batch_norm_layers(model), batch_norm_layers(reference), strict=True):
        torch.testing.assert_close(layer.running_mean, like.running_mean, rtol=1e-3, atol=1e-4)
        # torch's running variance is unbiased: 40 examples with at least one position.
        torch.testing.assert_close(layer.running_var, like.running_var, rtol=1 / 39 + 1e-3, atol=1e-4)


def test_sums_of_two_nodes_are_those_of_all_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the batches are."""
    model, x = network(), images(30)
    whole = sum_statistics(model, x, 3, 1.0)
    monkeypatch.setattr(recalibration, "inference_batch_size", lambda x: 7)
    parts = sum_statistics(model, x[:9], 3, 1.0) + sum_statistics(model, x[9:], 3, 1.0)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)


@given(
    st.lists(st.sampled_from([0.0, 1.0, -30.0, 1e20, math.inf, math.nan]), min_size=4, max_size=4),
    st.sampled_from([0.5, 3.0]),
)
def test_one_example_moves_sums_within_the_charged_sensitivity(values: list[float], clip: float) -> None:
    norm = nn.BatchNorm1d(4).eval()
    others = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    with_one = sum_statistics(norm, torch.cat([others, torch.tensor([values])]), 0, clip)
    moved = (with_one - sum_statistics(norm, others, 0, clip)).norm().item()
    assert moved <= math.sqrt(1 + 2 * 4) * (1 + 1e-9)


def test_clip_shortens_long_vectors_only() -> None:
    norm = nn.BatchNorm1d(1, eps=0.0).eval()
    # v is (1, 1) with a root mean square of 1, and (7, 49) with one of 35.
    sums = sum_statistics(norm, torch.tensor([[1.0], [7.0]]), 0, clip=5.0)
    torch.testing.assert_close(sums.float(), torch.tensor([2.0, 1 / 5 + 7 / 35, 1 / 5 + 49 / 35]))


def test_noisy_variance_has_a_lower_limit() -> None:
    norm = nn.BatchNorm1d(1, eps=0.0)
    set_statistics(norm, torch.tensor([10.0, 5.0, -3.0]), clip=1.0)  # a negative mean square
    assert norm.running_var.item() == pytest.approx(MIN_VARIANCE_RATIO)
    set_statistics(norm, torch.tensor([-2.0, 0.1, 0.2]), clip=1.0)  # a negative number of examples
    assert torch.isfinite(norm.running_mean).all()


def test_statistics_leave_the_network_as_it_is() -> None:
    model = network().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sum_statistics(model, images(5), 1, 1.0)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model(images(5))  # without hooks, whose results nobody reads


@pytest.mark.parametrize("clip", [0.0, -1.0, math.inf, math.nan])
def test_rejects_clip_without_a_bound(clip: float) -> None:
    with raises_invalid("clip"):
        sum_statistics(nn.BatchNorm1d(1), torch.zeros(2, 1), 0, clip)


class Twice(nn.Module):
    """Applies one batch norm layer twice, or to each position of an input as an example of its own."""

    def __init__(self, rows: bool) -> None:
        super().__init__()
        self.norm, self.rows = nn.BatchNorm1d(1), rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.view(-1, 1)) if self.rows else self.norm(self.norm(x))


@pytest.mark.parametrize(("rows", "width"), [(True, 2), (False, 1)])
def test_rejects_layers_that_do_not_see_each_example_once(rows: bool, width: int) -> None:
    with raises_invalid("student.recalibrate", "Twice"):
        forward_order(Twice(rows), torch.zeros(3, width))


def test_plans_layers_with_running_statistics() -> None:
    layers = nn.Sequential(
        nn.BatchNorm1d(3), nn.BatchNorm1d(5, track_running_stats=False), nn.GroupNorm(1, 2)
    )
    assert Recalibration.of(layers) == Recalibration(layers=1, channels=3)


class Reversed(nn.Module):
    """Registers its second layer first."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.first = nn.BatchNorm1d(1), nn.BatchNorm1d(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_layers_are_in_the_order_of_the_forward_pass() -> None:
    assert forward_order(Reversed(), torch.zeros(2, 1)) == [1, 0]


@pytest.mark.parametrize("number", [-1, 1, 0.0])
def test_rejects_numbers_of_no_layer(number: int) -> None:
    with raises_invalid("layer", number):
        sum_statistics(nn.BatchNorm1d(1), torch.zeros(2, 1), number, 1.0)
