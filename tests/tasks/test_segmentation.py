"""Segmentation: metrics by hand and against MONAI, means over cases, loss, counts, maps for generators."""

from __future__ import annotations

import math
from unittest.mock import ANY

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core.dataset import CaseIndex, TensorData
from fedstill.tasks.instances import Instances
from fedstill.tasks.segmentation import (
    MapTask,
    Segmentation,
    SegmentationConfig,
    count_overlap,
    dice,
    hd95,
    sensitivity,
    soft_dice_loss,
    specificity,
)
from tests.support.errors import raises_invalid

Mask = npt.NDArray[np.bool_]


def box(top: int, bottom: int, left: int, right: int) -> Mask:
    """Return a mask of 8 x 12 pixels that covers rows top..bottom and columns left..right, ends excluded."""
    mask = np.zeros((8, 12), dtype=bool)
    mask[top:bottom, left:right] = True
    return mask


def blobs(seed: int, share: float = 0.5) -> Mask:
    """Return blocks of 3 x 3 pixels, some of them filled."""
    filled = np.random.default_rng(seed).random((6, 6)) < share
    return np.kron(filled, np.ones((3, 3), dtype=bool)).astype(bool)


NO_PIXELS, ALL_PIXELS = box(0, 0, 0, 0), box(0, 8, 0, 12)


def overlap_metrics(prediction: Mask, truth: Mask) -> list[float]:
    pixels = count_overlap(torch.from_numpy(prediction)[None], torch.from_numpy(truth)[None])
    return [metric(pixels).item() for metric in (dice, sensitivity, specificity)]


@pytest.mark.parametrize(
    ("prediction", "truth", "expected"),
    [
        (NO_PIXELS, NO_PIXELS, [1, math.nan, 1]),
        (NO_PIXELS, box(0, 2, 0, 2), [0, 0, 1]),
        (box(0, 2, 0, 2), NO_PIXELS, [0, math.nan, 92 / 96]),
        (ALL_PIXELS, ALL_PIXELS, [1, 1, math.nan]),
        (NO_PIXELS, ALL_PIXELS, [0, 0, math.nan]),
    ],
)
def test_overlap_metrics_of_empty_and_full_masks(
    prediction: Mask, truth: Mask, expected: list[float]
) -> None:
    assert overlap_metrics(prediction, truth) == pytest.approx(expected, nan_ok=True)


def test_sum_by_case_adds_pixels_before_division() -> None:
    prediction = torch.tensor([[True, True], [True, False], [False, False]])
    truth = torch.tensor([[True, False], [True, True], [True, True]])
    pooled = count_overlap(prediction, truth).sum_by_case(torch.tensor([0, 0, 1]), 3)
    # case 0: 2 in common, 3 true, 3 predicted; case 1: 2 predicted, none in common; case 2 has no image
    torch.testing.assert_close(dice(pooled), torch.tensor([4 / 6, 0.0, 1.0]).double())
    torch.testing.assert_close(
        sensitivity(pooled), torch.tensor([2 / 3, 0.0, math.nan]).double(), equal_nan=True
    )


@pytest.mark.parametrize("seed", range(4))
def test_dice_equals_monai(seed: int) -> None:
    metrics = pytest.importorskip("monai.metrics")
    prediction, truth = (torch.from_numpy(blobs(seed + k))[None, None].float() for k in (0, 50))
    theirs = metrics.DiceMetric(include_background=True)(prediction, truth)
    torch.testing.assert_close(dice(count_overlap(prediction > 0, truth > 0)).float(), theirs.flatten())


# --- HD95 ------------------------------------------------------------------------------------------


def slow_hd95(prediction: Mask, truth: Mask) -> float:
    def edge(mask: Mask) -> list[tuple[int, int]]:
        def inside(row: int, column: int) -> bool:
            return 0 <= row < mask.shape[0] and 0 <= column < mask.shape[1] and bool(mask[row, column])

        around = ((0, 1), (1, 0), (0, -1), (-1, 0))
        return [(r, c) for r, c in np.argwhere(mask) if not all(inside(r + a, c + b) for a, b in around)]

    a, b = edge(prediction), edge(truth)
    forward = np.quantile([min(math.dist(p, q) for q in b) for p in a], 0.95)
    back = np.quantile([min(math.dist(p, q) for q in a) for p in b], 0.95)
    return float(max(forward, back))


def test_hd95_of_a_box_and_one_grown_by_two_columns() -> None:
    # Outlines of 5 x 4 and 5 x 6 pixels with a common left side. The right side of the larger one (5 of 18
    # pixels) is at distance 2, so the 95% quantile is 2; the quantile of few pixels is interpolated.
    assert hd95(box(1, 6, 0, 6), box(1, 6, 0, 4)) == 2


def test_hd95_ignores_one_far_pixel_but_uses_both_directions() -> None:
    large = np.zeros((64, 64), dtype=bool)
    large[4:40, 4:40] = True  # an outline of 140 pixels
    spot = large.copy()
    spot[60, 60] = True
    assert hd95(spot, large) == 0  # 1 of 141 is far away
    only = np.zeros_like(large)
    only[4, 4] = True
    assert hd95(only, large) == hd95(large, only) > 30  # close to the spot, far from most of the outline


def test_hd95_of_empty_masks() -> None:
    some = box(0, 2, 0, 2)
    assert math.isnan(hd95(NO_PIXELS, NO_PIXELS))
    assert hd95(NO_PIXELS, some) == hd95(some, NO_PIXELS) == math.inf
    assert hd95(some, some) == 0


@given(st.integers(0, 10_000))
def test_hd95_equals_slow_definition_and_is_symmetric(seed: int) -> None:
    prediction, truth = blobs(seed, 0.2), blobs(seed + 1, 0.3)
    if prediction.any() and truth.any():
        assert hd95(prediction, truth) == pytest.approx(slow_hd95(prediction, truth))
        assert hd95(truth, prediction) == hd95(prediction, truth)


TASK = Segmentation(2)


def mask(*pixels: tuple[int, int], size: tuple[int, int] = (4, 8)) -> torch.Tensor:
    """Return a slice whose given pixels have class 1."""
    classes = torch.zeros(size, dtype=torch.int64)
    for row, column in pixels:
        classes[row, column] = 1
    return classes


def logits(classes: torch.Tensor, of: int = 2) -> torch.Tensor:
    """Return logits ``(N, C, H, W)`` that predict classes ``(N, H, W)``."""
    return torch.nn.functional.one_hot(classes, of).movedim(-1, 1).float()


EMPTY = mask()
DIAGONAL = math.hypot(4, 8)


def patients(*of: int) -> CaseIndex:
    return CaseIndex(torch.tensor(of), ("p", "q", "r"), ("", "", ""))


def test_pixels_are_pooled_per_patient_and_patients_averaged() -> None:
    truth = torch.stack([mask((0, 0), (0, 1)), mask((1, 1)), mask((2, 2))])
    predicted = torch.stack([mask((0, 0), (0, 1)), mask((1, 4)), mask((2, 2))])
    metrics = TASK.compute_metrics(logits(predicted), truth, patients(2, 2, 0))
    # patient r: 2 of 3 found, 3 predicted; 60 of 61 negatives correct. Patient p: perfect
    assert metrics["dice"] == pytest.approx(100 * (2 * 2 / 6 + 1) / 2)
    assert metrics["sensitivity"] == pytest.approx(100 * (2 / 3 + 1) / 2)
    assert metrics["specificity"] == pytest.approx(100 * (60 / 61 + 1) / 2)
    # slices of r: distances 0 and 3; of p: 0
    assert metrics["hd95"] == pytest.approx(((0 + 3) / 2 + 0) / 2)
    # averaging over slices gives other metrics
    assert TASK.compute_metrics(logits(predicted), truth)["dice"] == pytest.approx(100 * 2 / 3)


def test_hd95_uses_slices_with_truth_and_diagonal_for_misses() -> None:
    spot = mask((1, 1))
    truth = torch.stack([EMPTY, EMPTY, spot, spot])
    predicted = torch.stack([EMPTY, spot, EMPTY, spot])
    assert TASK.compute_metrics(logits(predicted), truth)["hd95"] == pytest.approx(DIAGONAL / 2)
    together = TASK.compute_metrics(
        logits(predicted), truth, patients(0, 0, 0, 2)
    )  # only the slice of p with a true region counts
    assert together["hd95"] == pytest.approx((DIAGONAL + 0) / 2)


def test_metrics_of_patients_without_true_pixels() -> None:
    nothing = torch.stack([EMPTY, EMPTY])
    metrics = TASK.compute_metrics(logits(nothing), nothing, patients(0, 0))
    assert metrics["dice"] == metrics["specificity"] == 100
    assert math.isnan(metrics["sensitivity"])
    assert math.isnan(metrics["hd95"])
    # sensitivity is defined only for the patient with a true region
    truth, predicted = torch.stack([EMPTY, mask((0, 0), (0, 1))]), torch.stack([EMPTY, mask((0, 0))])
    assert TASK.compute_metrics(logits(predicted), truth, patients(0, 1))["sensitivity"] == 50


def test_metrics_are_means_over_classes() -> None:
    task = Segmentation(3)
    truth = torch.tensor([[[1, 1, 2, 2], [0, 0, 0, 0]]])
    predicted = torch.tensor([[[1, 0, 2, 2], [0, 0, 0, 0]]])
    metrics = task.compute_metrics(logits(predicted, 3), truth)
    assert metrics["dice"] == pytest.approx(100 * (2 / 3 + 1) / 2)
    assert metrics["sensitivity"] == pytest.approx(100 * (1 / 2 + 1) / 2)


def test_case_scores_are_dice_of_present_cases() -> None:
    truth = torch.stack([mask((0, 0), (0, 1)), mask((1, 1)), mask((2, 2))])
    predicted = torch.stack([mask((0, 0), (0, 1)), mask((1, 4)), mask((2, 2))])
    scores = TASK.case_scores(logits(predicted), truth, patients(2, 2, 0))
    torch.testing.assert_close(scores, torch.tensor([100.0, 200 / 3]).double())
    torch.testing.assert_close(
        TASK.case_scores(logits(predicted), truth), torch.tensor([100.0, 0, 100]).double()
    )
    mean = TASK.compute_metrics(logits(predicted), truth, patients(2, 2, 0))["dice"]
    assert mean == pytest.approx(scores.mean().item())


# --- maps ------------------------------------------------------------------------------------------


def head(targets: torch.Tensor) -> TensorData:
    """Return one image of 16 x 16 pixels with a bright body in rows and columns 2..11."""
    image = torch.full((1, 1, 16, 16), -1.0)
    image[:, :, 2:12, 2:12] = 0.5
    return TensorData(image, targets)


def test_label_maps_separate_outside_body_and_classes() -> None:
    targets = torch.zeros(1, 16, 16, dtype=torch.int64)
    targets[0, 4, 4], targets[0, 14, 14] = 1, 1  # one of them outside the body
    maps = TASK.label_maps(head(targets))
    assert maps.dtype == torch.uint8
    assert [int(maps[(0, *pixel)]) for pixel in ((0, 0), (3, 3), (4, 4), (14, 14))] == [0, 1, 2, 2]
    assert (maps == 1).sum() == 10 * 10 - 4 - 1  # without the four corners and the pixel of class 1
    assert torch.equal(TASK.targets_from_maps(maps, torch.zeros(1, 1, 16, 16)), targets)
    assert TASK.condition_channels == 3
    assert TASK.encode_maps(maps).shape == (1, 3, 16, 16)


def test_label_maps_without_outline_are_classes() -> None:
    task = Segmentation(3, outline=False)
    targets = torch.randint(0, 3, (1, 16, 16), generator=torch.Generator().manual_seed(0))
    maps = task.label_maps(head(targets))
    assert maps.dtype == torch.uint8
    assert torch.equal(maps.long(), targets)
    assert torch.equal(task.targets_from_maps(maps, torch.zeros(1, 1, 16, 16)), targets)
    assert task.condition_channels == 3


@pytest.mark.parametrize("outline", [True, False])
@pytest.mark.parametrize("classes", [2, 4])
def test_sampled_maps_have_all_codes_and_classes(outline: bool, classes: int) -> None:
    task = Segmentation(classes, outline=outline)
    maps = task.sample_maps(40, 32, 32, torch.Generator().manual_seed(0))
    assert set(maps.unique().tolist()) == set(range(task.condition_channels))
    labels = task.targets_from_maps(maps, torch.zeros(40, 1, 32, 32))
    assert set(labels.unique().tolist()) == set(range(classes))
    assert labels.dtype == torch.int64


# --- configuration ---------------------------------------------------------------------------------


def test_segmentation_options_reach_the_task() -> None:
    plain = SegmentationConfig().make(["background", "tumor"])
    assert isinstance(plain, Segmentation)
    assert (plain.dice, plain.outline, plain.class_weights) == (1.0, True, None)
    task = SegmentationConfig(class_weights=(1.0, 4.0), dice=0.0, outline=False).make(2)
    assert isinstance(task, Segmentation)
    assert (task.dice, task.outline, task.condition_channels) == (0.0, False, 2)
    assert task.class_weights is not None
    assert task.class_weights.tolist() == [1.0, 4.0]


def test_rejects_single_class() -> None:
    with raises_invalid("classes", 1, "2"):
        Segmentation(1)


G, B, C, H, W = 2, 3, 3, 4, 8


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    outputs = torch.randn(G, B, C, H, W, generator=draw, dtype=torch.float64)
    return outputs, torch.randint(0, C, (G, B, H, W), generator=draw)


TASKS: list[MapTask] = [
    Segmentation(C),
    Segmentation(C, (1.0, 2.0, 0.5), dice=0.0),
    Segmentation(C, (1.0, 2.0, 0.5), dice=0.3),
    Instances(),
]


# --- the loss --------------------------------------------------------------------------------------


def test_weighted_cross_entropy_by_hand() -> None:
    # One image of two pixels: p(true) is 1/2 for the pixel of class 0, 1/4 for that of class 1 (weight 3).
    outputs = torch.tensor([[0.0, math.log(3)], [0.0, 0.0]]).view(1, 1, 2, 1, 2)
    targets = torch.tensor([[[[0, 1]]]])
    task = Segmentation(2, (1.0, 3.0), dice=0.0)
    torch.testing.assert_close(
        task.loss(outputs, targets), torch.tensor([(math.log(2) + 3 * math.log(4)) / 2])
    )


def test_soft_dice_by_hand() -> None:
    # Four pixels: one of class 1 with p = 0.8; three of class 0 with p = 0.5, 0.5, 0 for class 1.
    p = torch.tensor([0.8, 0.5, 0.5, 1e-9])
    outputs = torch.stack([(1 - p).log(), p.log()]).view(1, 2, 2, 2)
    loss = soft_dice_loss(outputs, torch.tensor([[[1, 0], [0, 0]]]))
    torch.testing.assert_close(loss, torch.tensor([1 - (2 * 0.8 + 1) / (1.8 + 1 + 1)]))


@pytest.mark.parametrize("seed", range(3))
def test_soft_dice_equals_monai(seed: int) -> None:
    losses = pytest.importorskip("monai.losses")
    outputs, targets = batch(seed)
    theirs = losses.DiceLoss(
        include_background=False,
        to_onehot_y=True,
        softmax=True,
        smooth_nr=1.0,
        smooth_dr=1.0,
        reduction="none",
    )(outputs[0], targets[0].unsqueeze(1))
    torch.testing.assert_close(soft_dice_loss(outputs[0], targets[0]), theirs.flatten(1).mean(1))


@pytest.mark.parametrize("task", TASKS)
def test_loss_is_mean_over_examples(task: MapTask) -> None:
    outputs, targets = batch()
    # one loss per example, as DP-SGD requires
    alone = task.loss(outputs[0].unsqueeze(1), targets[0].unsqueeze(1))
    assert alone.shape == (B,)
    torch.testing.assert_close(alone.mean(), task.loss(outputs, targets)[0])


@pytest.mark.parametrize("task", TASKS)
def test_minimizing_loss_fits_targets(task: MapTask) -> None:
    _, targets = batch()
    outputs = torch.zeros(G, B, C, H, W, requires_grad=True)
    optimizer = torch.optim.SGD([outputs], 50.0)
    for _ in range(30):
        optimizer.zero_grad()
        task.loss(outputs, targets).sum().backward()
        optimizer.step()
    assert torch.equal(outputs.argmax(2), targets)


# --- data ------------------------------------------------------------------------------------------


def data(targets: torch.Tensor) -> TensorData:
    return TensorData(torch.zeros(len(targets), 1, 4, 8), targets)


def test_counts_are_pixel_shares_summing_to_examples() -> None:
    targets = torch.zeros(3, 4, 8, dtype=torch.int64)
    targets[0, :, :2] = 2  # a quarter
    targets[1] = 1
    counts = TASKS[0].counts(data(targets))
    assert counts.tolist() == [1.75, 1.0, 0.25]
    # sums rounded to float32 could change by more than one example's share
    assert counts.dtype == torch.float64


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 1.0, 1.0, 1.0)])
def test_rejects_wrong_number_of_class_weights(weights: tuple[float, ...]) -> None:
    with raises_invalid("task.class_weights", ANY, "3 classes"):
        Segmentation(3, weights)


# --- conditions ------------------------------------------------------------------------------------


def test_encoded_map_has_one_channel_per_code() -> None:
    condition = Instances().encode_maps(torch.tensor([[[0, 1], [2, 1]]], dtype=torch.uint8))
    assert condition.dtype == torch.float32
    assert condition.tolist() == [[[[1, -1], [-1, -1]], [[-1, 1], [-1, 1]], [[-1, -1], [1, -1]]]]


def test_balance_loss_is_zero_with_label_maps() -> None:
    assert Instances().balance_loss(torch.randn(2, 3, 4, 4)) == 0
