"""Segmentation: figures of patients by hand, and maps for generators."""

from __future__ import annotations

import math

import pytest
import torch

from fedstill.core.dataset import Cases, TensorData
from fedstill.core.errors import ArgumentError
from fedstill.tasks.segmentation import Segmentation, SegmentationConfig

TASK = Segmentation(2)


def mask(*pixels: tuple[int, int], size: tuple[int, int] = (4, 8)) -> torch.Tensor:
    """A slice with class 1 at these pixels."""
    classes = torch.zeros(size, dtype=torch.int64)
    for row, column in pixels:
        classes[row, column] = 1
    return classes


def logits(classes: torch.Tensor, of: int = 2) -> torch.Tensor:
    """What says ``(N, H, W)``: ``(N, C, H, W)``."""
    return torch.nn.functional.one_hot(classes, of).movedim(-1, 1).float()


NONE = mask()
DIAGONAL = math.hypot(4, 8)


def patients(*of: int) -> Cases:
    return Cases(torch.tensor(of), ("p", "q", "r"), ("", "", ""))


def test_a_patients_pixels_are_taken_together_and_patients_averaged() -> None:
    truth = torch.stack([mask((0, 0), (0, 1)), mask((1, 1)), mask((2, 2))])
    told = torch.stack([mask((0, 0), (0, 1)), mask((1, 4)), mask((2, 2))])
    metrics = TASK.compute_metrics(logits(told), truth, patients(2, 2, 0))
    # patient r: 2 of 3 found, 3 predicted; 61 pixels not true, 60 left out. Patient p: perfect
    assert metrics["dice"] == pytest.approx(100 * (2 * 2 / 6 + 1) / 2)
    assert metrics["sensitivity"] == pytest.approx(100 * (2 / 3 + 1) / 2)
    assert metrics["specificity"] == pytest.approx(100 * (60 / 61 + 1) / 2)
    # slices of r: 0 and 3 pixels; p: 0
    assert metrics["hd95"] == pytest.approx(((0 + 3) / 2 + 0) / 2)
    # slice by slice it would be other figures
    assert TASK.compute_metrics(logits(told), truth)["dice"] == pytest.approx(100 * 2 / 3)


def test_distances_are_of_slices_that_truly_show_something_and_a_miss_is_their_diagonal() -> None:
    spot = mask((1, 1))
    truth = torch.stack([NONE, NONE, spot, spot])
    told = torch.stack([NONE, spot, NONE, spot])
    assert TASK.compute_metrics(logits(told), truth)["hd95"] == pytest.approx(DIAGONAL / 2)
    together = TASK.compute_metrics(logits(told), truth, patients(0, 0, 0, 2))  # p: one of its three counts
    assert together["hd95"] == pytest.approx((DIAGONAL + 0) / 2)


def test_patients_without_anything_true() -> None:
    nothing = torch.stack([NONE, NONE])
    metrics = TASK.compute_metrics(logits(nothing), nothing, patients(0, 0))
    assert metrics["dice"] == metrics["specificity"] == 100
    assert math.isnan(metrics["sensitivity"])
    assert math.isnan(metrics["hd95"])
    # beside a patient who has something, only that one has a sensitivity
    truth, told = torch.stack([NONE, mask((0, 0), (0, 1))]), torch.stack([NONE, mask((0, 0))])
    assert TASK.compute_metrics(logits(told), truth, patients(0, 1))["sensitivity"] == 50


def test_of_more_classes_figures_are_means_over_them() -> None:
    task = Segmentation(3)
    truth = torch.tensor([[[1, 1, 2, 2], [0, 0, 0, 0]]])
    told = torch.tensor([[[1, 0, 2, 2], [0, 0, 0, 0]]])
    metrics = task.compute_metrics(logits(told, 3), truth)
    assert metrics["dice"] == pytest.approx(100 * (2 / 3 + 1) / 2)
    assert metrics["sensitivity"] == pytest.approx(100 * (1 / 2 + 1) / 2)


def test_scores_are_the_dice_of_the_cases_that_are_there() -> None:
    truth = torch.stack([mask((0, 0), (0, 1)), mask((1, 1)), mask((2, 2))])
    told = torch.stack([mask((0, 0), (0, 1)), mask((1, 4)), mask((2, 2))])
    scores = TASK.case_scores(logits(told), truth, patients(2, 2, 0))
    torch.testing.assert_close(scores, torch.tensor([100.0, 200 / 3]).double())
    torch.testing.assert_close(TASK.case_scores(logits(told), truth), torch.tensor([100.0, 0, 100]).double())
    mean = TASK.compute_metrics(logits(told), truth, patients(2, 2, 0))["dice"]
    assert mean == pytest.approx(scores.mean().item())


# --- maps ------------------------------------------------------------------------------------------


def head(targets: torch.Tensor) -> TensorData:
    """One image 16 x 16 with a bright body in rows and columns 2..11."""
    image = torch.full((1, 1, 16, 16), -1.0)
    image[:, :, 2:12, 2:12] = 0.5
    return TensorData(image, targets)


def test_maps_tell_outside_body_and_classes_apart_and_labels_undo_it() -> None:
    targets = torch.zeros(1, 16, 16, dtype=torch.int64)
    targets[0, 4, 4], targets[0, 14, 14] = 1, 1  # one out of the body
    maps = TASK.label_maps(head(targets))
    assert maps.dtype == torch.uint8
    assert [int(maps[(0, *place)]) for place in ((0, 0), (3, 3), (4, 4), (14, 14))] == [0, 1, 2, 2]
    assert (maps == 1).sum() == 10 * 10 - 4 - 1  # without four corners and the pixel of class 1
    assert torch.equal(TASK.targets_from_maps(maps, torch.zeros(1, 1, 16, 16)), targets)
    assert TASK.condition_channels == 3
    assert TASK.encode_maps(maps).shape == (1, 3, 16, 16)


def test_without_outline_maps_are_the_classes() -> None:
    task = Segmentation(3, outline=False)
    targets = torch.randint(0, 3, (1, 16, 16), generator=torch.Generator().manual_seed(0))
    maps = task.label_maps(head(targets))
    assert maps.dtype == torch.uint8
    assert torch.equal(maps.long(), targets)
    assert torch.equal(task.targets_from_maps(maps, torch.zeros(1, 1, 16, 16)), targets)
    assert task.condition_channels == 3


@pytest.mark.parametrize("outline", [True, False])
@pytest.mark.parametrize("classes", [2, 4])
def test_drawn_maps_have_every_code_and_give_every_class(outline: bool, classes: int) -> None:
    task = Segmentation(classes, outline=outline)
    maps = task.sample_maps(40, 32, 32, torch.Generator().manual_seed(0))
    assert set(maps.unique().tolist()) == set(range(task.condition_channels))
    labels = task.targets_from_maps(maps, torch.zeros(40, 1, 32, 32))
    assert set(labels.unique().tolist()) == set(range(classes))
    assert labels.dtype == torch.int64


# --- configuration ---------------------------------------------------------------------------------


def test_options_come_from_the_configuration() -> None:
    plain = SegmentationConfig().make(["background", "tumor"])
    assert isinstance(plain, Segmentation)
    assert (plain.dice, plain.outline, plain.class_weights) == (1.0, True, None)
    told = SegmentationConfig(class_weights=(1.0, 4.0), dice=0.0, outline=False).make(2)
    assert isinstance(told, Segmentation)
    assert (told.dice, told.outline, told.conditions) == (0.0, False, 2)
    assert told.class_weights is not None
    assert told.class_weights.tolist() == [1.0, 4.0]


def test_one_class_is_nothing_to_segment() -> None:
    with pytest.raises(ArgumentError, match="2 or more"):
        Segmentation(1)
