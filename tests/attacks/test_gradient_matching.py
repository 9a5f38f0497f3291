"""Gradient matching succeeds where theory predicts it and fails when it is weakened."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedstill.attacks.gradient_matching import (
    DLG,
    IDLG,
    INVERTING,
    ImageSearchConfig,
    PixelRange,
    RecoveredImages,
    gradient_distance,
    invert,
    psnr,
    read_labels,
)
from fedstill.attacks.simulated_updates import ModelPart, ObservedUpdate, Schedule, simulate_training
from fedstill.core.errors import ArgumentError
from fedstill.data import Digits, load, make_data_config
from fedstill.models import build
from tests.support.runs import PACKS, make_release, needs_fashion

DIGIT = (1, 8, 8)


def digits(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    data = load(Digits()).train
    return data.inputs[:count].clone(), data.targets[:count].clone()


# --- strength -------------------------------------------------------------------------------------


STRONG = replace(IDLG, restarts=1, steps=12)


def count_recovered(
    config: ImageSearchConfig, first: int, last: int, believed: float = 0.0
) -> tuple[int, int]:
    """Attack single Fashion-MNIST images; return how many are above 30 dB, and how many labels are correct.

    ``believed`` is the label smoothing assumed by the attack; the gradients use none.
    """
    data = load(make_data_config("fashion-mnist", root=str(PACKS))).train
    model, good, right = build("sigmoid-lenet", (1, 28, 28), 10, 0), 0, 0
    for at in range(first, last):
        image, label = data.inputs[at : at + 1], data.targets[at : at + 1]
        release = replace(make_release(model, image, label), schedule=Schedule(smoothing=believed))
        recovery = invert(release, (1, 28, 28), 1, config).against(image)
        good, right = good + (recovery.psnr[0] > 30), right + int(recovery.labels.equal(label))
    return good, right


@pytest.mark.slow
@needs_fashion
def test_recovers_image_from_full_gradient() -> None:
    assert count_recovered(STRONG, 0, 2) == (2, 2)  # 47 and 50 dB


@pytest.mark.sample(1)
@needs_fashion
@pytest.mark.parametrize(
    ("config", "believed"),
    [(replace(STRONG, steps=2), 0.0), (STRONG, 0.5)],
    ids=["fewer steps", "wrong loss"],
)
def test_weakened_attack_misses_threshold(config: ImageSearchConfig, believed: float) -> None:
    good, _ = count_recovered(config, 0, 1, believed)
    assert good == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("attack", "count"), [(IDLG, 1), (IDLG, 2), (IDLG, 4), (IDLG, 8), (DLG, 1), (DLG, 2)]
)
def test_recovers_batches_and_labels(attack: ImageSearchConfig, count: int) -> None:
    inputs, targets = digits(count)
    release = make_release(build("sigmoid-lenet", DIGIT, 10, 0), inputs, targets)
    recovery = invert(release, DIGIT, count, attack).against(inputs)
    assert min(recovery.psnr) > 30
    assert recovery.labels.equal(targets)


def test_signed_adam_improves_and_stays_in_range() -> None:
    inputs, targets = digits(1)
    release = make_release(build("sigmoid-lenet", DIGIT, 10, 0), inputs, targets)
    few, many = (
        invert(release, DIGIT, 1, replace(INVERTING, steps=steps, tv=0.0)).against(inputs)
        for steps in (5, 500)
    )
    assert many.loss < few.loss / 10
    assert many.psnr[0] > few.psnr[0] + 3
    assert many.images.abs().max() <= 1


# --- several steps --------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(("count", "momentum"), [(2, 0.0), (2, 0.9)])
def test_simulating_all_steps_recovers_more(count: int, momentum: float) -> None:
    inputs, targets = digits(count)
    model = build("sigmoid-lenet", DIGIT, 10, 0)
    before = {name: value.detach() for name, value in model.named_parameters()}
    schedule = Schedule((0.05,) * 2, count // 2, momentum=momentum)  # one epoch
    after = simulate_training(model, before, inputs, targets, schedule)
    update = ObservedUpdate(model, {name: (before[name] - after[name]).detach() for name in after}, schedule)
    config = replace(IDLG, restarts=1, steps=15)
    simulated = invert(update, DIGIT, count, config, labels=targets).against(inputs)
    as_one = ObservedUpdate(model, update.mean_gradient())
    mistaken = invert(as_one, DIGIT, count, config, labels=targets).against(inputs)
    assert sum(simulated.psnr) / count > 25, simulated.psnr
    assert sum(mistaken.psnr) / count < 20, mistaken.psnr


# --- batch norm -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 4])
def test_recovers_images_with_batch_norm(count: int) -> None:
    torch.manual_seed(0)
    first, second = (
        (nn.Conv2d(1, 12, 3, 1, 1), nn.Sigmoid()),
        (nn.Conv2d(12, 12, 3, 2, 1), nn.BatchNorm2d(12)),
    )
    model = nn.Sequential(*first, *second, nn.Sigmoid(), nn.Flatten(), nn.Linear(12 * 16, 10))
    inputs, targets = digits(count)
    release = make_release(model, inputs, targets)
    recovery = invert(release, DIGIT, count, replace(IDLG, restarts=1, steps=8)).against(inputs)
    assert recovery.labels.equal(targets)
    assert min(recovery.psnr) > 40, recovery.psnr


# --- labels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lenet5", "sigmoid-lenet", "mlp"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("part", ["all", "head"])
def test_reads_label_of_one_image(name: str, smoothing: float, part: ModelPart) -> None:
    model, (inputs, targets) = build(name, DIGIT, 10, 0), digits(10)
    for at in range(10):
        release = make_release(model, inputs[at : at + 1], targets[at : at + 1], part, smoothing)
        assert read_labels(release, DIGIT, 1).equal(targets[at : at + 1])


def test_reads_label_from_weights_without_bias() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10, bias=False))
    inputs, targets = digits(3)
    assert read_labels(make_release(model, inputs[2:], targets[2:]), DIGIT, 1).equal(targets[2:])
    with pytest.raises(ArgumentError, match=r"one with 3.bias"):
        read_labels(make_release(model, inputs, targets), DIGIT, 3)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_counts_labels_of_batch(smoothing: float) -> None:
    inputs, _ = digits(8)
    targets = torch.tensor([2, 7, 2, 2, 0, 9, 7, 2])
    release = make_release(build("lenet5", DIGIT, 10, 0), inputs, targets, smoothing=smoothing)
    assert read_labels(release, DIGIT, 8).tolist() == [0, 2, 2, 2, 2, 7, 7, 9]


# --- metrics --------------------------------------------------------------------------------------


def test_psnr_uses_all_channels() -> None:
    true = torch.zeros(2, 3, 4, 4)
    recovered = true.clone()
    recovered[0] += 0.2  # for a range of 2, an error of 0.1 in each value
    recovered[1, 0] += 0.2  # in one channel of three
    values = psnr(recovered, true).tolist()
    assert values[0] == pytest.approx(20.0, abs=1e-4)  # not 24.77, which divides by the channels twice
    assert values[1] == pytest.approx(20 + 10 * math.log10(3), abs=1e-4)
    # the maximum, as for reconstruction tasks
    assert psnr(true, true).tolist() == pytest.approx([100.0, 100.0])


def test_pixel_range_per_channel() -> None:
    pixels = PixelRange(torch.tensor([0.0, -2.0]).view(2, 1, 1), torch.tensor([1.0, 2.0]).view(2, 1, 1))
    true = torch.zeros(1, 2, 1, 1)
    # Errors of 0.1 and 0.4 are both 10 % of the range.
    assert psnr(torch.tensor([0.1, 0.4]).view(1, 2, 1, 1), true, pixels).item() == pytest.approx(
        20.0, abs=1e-4
    )
    assert pixels.clamp(torch.full((1, 2, 1, 1), -3.0)).flatten().tolist() == [0.0, -2.0]


def test_labels_follow_matched_images() -> None:
    true = torch.tensor([-1.0, 0.0, 1.0]).view(3, 1, 1, 1)
    recovery = RecoveredImages(true[[2, 0, 1]] * 0.9, torch.tensor([7, 3, 5]), 0.0).against(true)
    assert recovery.labels.tolist() == [3, 5, 7]
    assert recovery.psnr == pytest.approx((-20 * math.log10(0.05), 100.0, -20 * math.log10(0.05)), abs=1e-4)


@given(st.floats(0.1, 10), st.floats(0.1, 10))
def test_gradient_distances_are_scale_free(a: float, b: float) -> None:
    one = {"v": torch.tensor([1.0, 2.0]), "w": torch.tensor([[3.0]])}
    other = {"v": torch.tensor([2.0, -1.0]), "w": torch.tensor([[4.0]])}
    scaled = [{name: value * by for name, value in of.items()} for of, by in ((one, a), (other, b))]
    cosine = 1 - 12 / math.sqrt(14 * 21)
    assert gradient_distance(scaled[0], scaled[1], cosine=True).item() == pytest.approx(cosine, abs=1e-5)
    both = [{name: value * a for name, value in of.items()} for of in (one, other)]
    assert gradient_distance(both[0], both[1], cosine=False).item() == pytest.approx(
        (1 + 9 + 1) / 21, rel=1e-4
    )
