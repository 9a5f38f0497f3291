"""Copies of private images are found, and what is no copy is not; distances and the spaces they are in."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedstill.attacks import memorization as module
from fedstill.attacks.generative_metrics import Extractor, penultimate_extractor, pixel_extractor
from fedstill.attacks.memorization import (
    Neighbors,
    data_copying_test,
    memorization_test,
    nearest_neighbors,
    wilson_interval,
)
from fedstill.core.errors import ArgumentError, DataError, ModelError
from fedstill.data import Digits, load
from fedstill.models.image_classifiers import LeNet5

PLAIN = Extractor("vectors", lambda x: x)


def gauss(count: int, seed: int, size: int = 8) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def three(seed: int, *counts: int) -> tuple[torch.Tensor, ...]:
    """Vectors of one distribution, in parts."""
    return torch.split(gauss(sum(counts), seed), list(counts))


def slowly(
    generated: torch.Tensor, private: torch.Tensor, held_out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distances to the nearest private and the nearest held-out vector, one by one."""
    return tuple(  # type: ignore[return-value]
        torch.stack([min(((x - y) ** 2).sum().sqrt() for y in part) for x in generated])
        for part in (private, held_out)
    )


# --- neighbors -------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 999), st.integers(1, 30), st.integers(1, 40), st.integers(1, 5), st.booleans())
def test_nearest_is_what_a_slow_search_finds(seed: int, n: int, m: int, d: int, whole: bool) -> None:
    x, y = gauss(n, seed, d), gauss(m, seed + 1, d)
    if whole:  # so that many are equally near
        x, y = x.round(), y.round()
    distances, places = nearest_neighbors(x, y)
    every = (x.unsqueeze(1) - y).square().sum(2).sqrt()
    torch.testing.assert_close(distances, every.min(1).values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(distances, (x - y[places]).norm(dim=1), rtol=1e-12, atol=1e-12)


def test_small_distances_far_from_zero_keep_their_digits() -> None:
    y = gauss(50, 0) + 1e5
    x = y[:10] + 1e-6 * gauss(10, 1)
    distances, places = nearest_neighbors(x, y)
    assert places.tolist() == list(range(10))
    torch.testing.assert_close(distances, (x - y[:10]).norm(dim=1), rtol=1e-12, atol=0)


def test_in_pieces_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = gauss(37, 0), gauss(91, 1)
    at_once = nearest_neighbors(x, y)
    sizes: list[int] = []
    split = torch.split
    monkeypatch.setattr(module, "MAX_NUMBERS", 300)
    monkeypatch.setattr(torch, "split", lambda a, n: sizes.append(n) or split(a, n))
    in_pieces = nearest_neighbors(x, y)
    # 3 rows of 91 products of vectors; of the nearest 4, of 8 numbers each, 9 rows.
    assert set(sizes) == {300 // 91, 300 // 32}
    assert all(torch.equal(*pair) for pair in zip(at_once, in_pieces, strict=True))


@pytest.mark.parametrize("few", [1, 3, 150])
def test_first_of_a_part_however_rare(few: int) -> None:
    x, y = gauss(20, 0), gauss(300, 1)
    among = torch.zeros(300, dtype=torch.bool)
    among[torch.randperm(300, generator=torch.Generator().manual_seed(2))[:few]] = True
    pool = Neighbors(x, y)
    distances, places = pool.first(among)
    slow, _ = slowly(x, y[among], y)
    torch.testing.assert_close(distances, slow)
    assert among[places].all()
    others = (x.unsqueeze(1) - y[~among]).norm(dim=2)
    assert torch.equal(pool.count(~among, distances, include_ties=False), (others < slow.unsqueeze(1)).sum(1))


# --- by hand and by slow references -----------------------------------------------------------------


def test_by_hand() -> None:
    """p = 1, h = 3; of two private images one is nearer than 3 and one as near."""
    found = memorization_test(
        torch.tensor([[0.0]]), torch.tensor([[-3.0], [1.0]]), torch.tensor([[3.0]]), PLAIN, seed=0
    )
    assert found["statistic"] == pytest.approx(0.5)
    # One private image is kept of two: nearer with 1/2, not farther for sure.
    assert found["share"] == pytest.approx(0.75)
    assert (found["low"], found["high"]) == wilson_interval(0.75, 1)
    assert found["held_out_ratio"] is None
    (pair,) = found["pairs"]
    assert (pair["generated"], pair["private"], pair["held_out"]) == (0, 1, 0)
    assert (pair["distance"], pair["other"], pair["ratio"]) == (1.0, 3.0, pytest.approx(1 / 3))
    # Any of the three places may be the held-out one: (h - p) / (h + p) is 1/2, 1/2 or (1 - 3) / (1 + 3).
    assert found["expected"] == pytest.approx((0.5 + 0.5 - 0.5) / 3, abs=0.05)
    assert found["p_value"] == pytest.approx(2 / 3, abs=0.06)


def test_fewer_private_than_held_out_by_hand() -> None:
    """The nearest private image is at 2; of three held-out ones one is nearer, and one of them is kept."""
    found = memorization_test(
        torch.tensor([[0.0]]), torch.tensor([[2.0]]), torch.tensor([[1.0], [4.0], [5.0]]), PLAIN, seed=0
    )
    assert found["share"] == pytest.approx(2 / 3)
    # Of the held-out ones: 1 to 2 by 1 to 4; 4 to 2 by 4 to 5; 5 to 2 by 5 to 4.
    assert found["held_out_ratio"] == pytest.approx(min(1 / 3, 2 / 1, 3 / 1))


def test_p_value_counts_drawings_as_a_slow_loop_does() -> None:
    generated, private, held_out = three(0, 12, 9, 5)
    found = memorization_test(generated, private, held_out, PLAIN, seed=3, permutations=60)
    everyone = torch.cat([private, held_out])

    def statistic(mine: torch.Tensor) -> float:
        p, h = slowly(generated, everyone[mine], everyone[~mine])
        return float(((h - p) / (h + p)).mean())

    truth = torch.arange(14) < 9
    drawn = [statistic(mine) for mine in module._permutations(truth, None, 3, 60)]
    assert found["statistic"] == pytest.approx(statistic(truth))
    assert found["expected"] == pytest.approx(sum(drawn) / 60)
    assert found["p_value"] == (1 + sum(value >= found["statistic"] for value in drawn)) / 61


def test_share_is_that_of_subsets_of_equal_size() -> None:
    generated, private, held_out = three(1, 40, 60, 15)
    slow = []
    for seed in range(1500):
        kept = torch.randperm(60, generator=torch.Generator().manual_seed(seed))[:15]
        p, _ = nearest_neighbors(generated, private[kept])
        h, _ = nearest_neighbors(generated, held_out)
        slow.append(float((p < h).double().mean()))
    found = memorization_test(generated, private, held_out, PLAIN, seed=0, permutations=1)
    assert found["share"] == pytest.approx(sum(slow) / len(slow), abs=0.01)


def test_data_copying_as_scipy_has_it() -> None:
    from scipy.stats import mannwhitneyu

    for seed in range(5):
        x, y = (gauss(count, seed + shift, 1).flatten().abs() for count, shift in ((30, 0), (20, 50)))
        if seed > 2:  # ties
            x, y = (4 * x).round(), (4 * y).round()
        expected = mannwhitneyu(
            x.numpy(), y.numpy(), alternative="less", method="asymptotic", use_continuity=False
        )
        assert data_copying_test(x, y)[1] == pytest.approx(expected.pvalue, rel=1e-9)
    assert data_copying_test(torch.zeros(3), torch.zeros(4)) == (0.0, 0.5)


# --- what is a copy, and what is not ----------------------------------------------------------------


def digits(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Private, held-out and fresh digits, drawn anew with each seed."""
    data = load(Digits())
    images = torch.cat([data.train.inputs, data.test.inputs])
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    private, held_out, fresh = torch.split(images[order[:1200]], [800, 200, 200])
    return private, held_out, fresh


def noisy(images: torch.Tensor, noise: float, seed: int = 0) -> torch.Tensor:
    return images + noise * torch.randn(images.shape, generator=torch.Generator().manual_seed(seed))


SPACE = pixel_extractor((0.5,), (0.5,))


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.4])
def test_a_generator_that_memorizes_is_caught(noise: float) -> None:
    private, held_out, _ = digits(0)
    found = memorization_test(noisy(private[:200], noise), private, held_out, SPACE, seed=0, permutations=199)
    assert found["p_value"] < 0.01
    if noise < 0.4:  # more noise, and the other test sees images that are poorer than held-out ones
        assert found["z_p_value"] < 0.01
        assert found["held_out_ratio"] is not None
        assert found["pairs"][9]["ratio"] < found["held_out_ratio"] / 2
    # 200 of 800 private images are kept: a copy's own is among them with 1/4, and half of the others win.
    assert found["share"] == pytest.approx(0.625, abs=0.07)
    assert found["low"] > 0.5
    assert found["extractor"] == "pixels"


def test_fresh_images_are_no_copies() -> None:
    """P-values are uniform: no more are small than should be, and no fewer."""
    values = []
    for seed in range(150):
        generated, private, held_out = three(seed, 60, 80, 40)
        found = memorization_test(generated, private, held_out, PLAIN, seed=seed, permutations=79)
        values.append(found["p_value"])
    small = sum(value <= 0.05 for value in values)
    assert 2 <= small <= 15, "7.5 of 150 are expected; chance alone is outside once in a hundred times"
    from scipy.stats import kstest

    assert kstest(values, "uniform").pvalue > 0.01


def test_patients_are_drawn_and_not_their_slices() -> None:
    """Slices of a patient are near each other: drawing slices would find copies where there are none."""

    def measure(seed: int) -> tuple[dict[str, Any], ...]:
        centers = gauss(18, seed, 3)
        of = torch.arange(18).repeat_interleave(10)
        slices = centers[of] + 0.05 * gauss(180, seed + 1000, 3)
        private, held_out, generated = torch.split(slices, [80, 40, 60])
        parts = (generated, private, held_out, PLAIN)
        groups = (of[:80], of[80:120])
        return (
            memorization_test(*parts, seed=seed, permutations=99),
            memorization_test(*parts, seed=seed, permutations=99, groups=groups),
        )

    found = [measure(seed) for seed in range(40)]
    by_slice, by_patient = (sum(each[which]["p_value"] <= 0.05 for each in found) for which in (0, 1))
    assert by_slice > 8
    assert by_patient <= 6, "2 of 40 are expected"


def test_a_patient_on_both_sides_is_refused() -> None:
    x, of = torch.zeros(2, 1), torch.tensor([3, 4])
    with pytest.raises(
        ArgumentError, match=r"invalid groups = 3 \(expected of private images or of held-out ones"
    ):
        memorization_test(x, x, x, PLAIN, seed=0, groups=(of, torch.tensor([3, 5])))


def test_copies_and_equal_images_need_no_division_by_zero() -> None:
    x = torch.tensor([[0.0], [1.0]])
    found = memorization_test(x, x, x, PLAIN, seed=0, permutations=9)
    assert (found["statistic"], found["share"], found["z"]) == (0.0, 0.5, 0.0)
    assert [pair["ratio"] for pair in found["pairs"]] == [1.0, 1.0]
    assert (
        len(memorization_test(x[:1].repeat(2, 1), x, x + 9, PLAIN, seed=0, permutations=9)["pairs"]) == 1
    )  # once each
    of_held_out = memorization_test(x[:1], x[1:], x[:1], PLAIN, seed=0, permutations=9)
    assert of_held_out["statistic"] == -1
    assert of_held_out["pairs"][0]["ratio"] == math.inf


# --- spaces -----------------------------------------------------------------------------------------


def test_pixels_are_those_of_the_picture() -> None:
    x = torch.tensor([[[[-1.0, 0.0, 3.0]]]])
    assert pixel_extractor((0.5,), (0.5,))(x).tolist() == [[0.0, 0.5, 1.0]]
    colors = torch.stack([torch.zeros(2, 2), torch.ones(2, 2)]).unsqueeze(0)
    assert pixel_extractor((0.25, 0.0), (1.0, 0.5))(colors).tolist() == [[0.25] * 4 + [0.5] * 4]


def test_penultimate_is_what_goes_into_the_last_layer() -> None:
    torch.manual_seed(0)
    net, x = LeNet5((1, 28, 28), 10), torch.randn(5, 1, 28, 28)
    net.train()
    space = penultimate_extractor(net, x[:1], "student")
    assert space.name == "features before the last layer of student"
    with torch.no_grad():
        expected = nn.Sequential(*list(net)[:-1])(x)
    assert expected.shape == (5, 84)
    torch.testing.assert_close(space(x), expected.double())
    assert net.training
    assert all(own.requires_grad for own in net.parameters())
    before = space(x)
    with torch.no_grad():
        net[-3].weight.zero_()
    torch.testing.assert_close(space(x), before, msg="the network as it was")


class Branched(nn.Module):
    """Layers in another order than they are used in, batch norm, and a convolution at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Conv2d(4, 2, 1)
        self.norm = nn.BatchNorm2d(4)
        self.first = nn.Conv2d(1, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.norm(self.first(x)).relu())
        return y


def test_any_architecture_has_a_last_layer() -> None:
    net, x = Branched(), torch.randn(6, 1, 8, 8)
    net.norm.running_mean.fill_(0.5)  # type: ignore[union-attr]
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with torch.no_grad():
        found = penultimate_extractor(net, x[:2], "student")(x)
        net.eval()
        expected = net.norm(net.first(x)).relu().mean((2, 3))
    assert found.shape == (6, 4)
    torch.testing.assert_close(found, expected.double())
    assert all(torch.equal(tensor, state[name]) for name, tensor in net.state_dict().items())
    with pytest.raises(ModelError, match="no tensor for 2 inputs"):
        penultimate_extractor(nn.Flatten(), x[:2], "student")
    with pytest.raises(ModelError, match=r"takes \(2, 1, 8, 8\)|takes \(2, 1, 64\)"):
        penultimate_extractor(nn.Sequential(nn.Flatten(2), nn.Linear(64, 3)), x[:2], "student")


def test_vectors_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(DataError, match="pixels: NaN"):
        pixel_extractor()(torch.full((2, 1, 4, 4), math.nan))
    with pytest.raises(ArgumentError, match="images"):
        pixel_extractor()(torch.zeros(0, 1, 4, 4))
