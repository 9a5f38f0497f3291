"""Augmentation of images, and of targets that are images or maps."""

from __future__ import annotations

import itertools

import pytest
import torch

from fedstill.core.seeds import torch_generator
from fedstill.data.augmentation import (
    apply_shift,
    augment_examples,
    flip_and_rotate,
    random_shift,
    require_augmentable,
    sample_augmentation,
)
from fedstill.tasks.classification import ClassificationConfig, TextConfig
from fedstill.tasks.reconstruction import ReconstructionConfig
from fedstill.tasks.segmentation import SegmentationConfig
from tests.support.errors import raises_invalid

MODES = ("shift", "shift-flip", "turn")


def random_numbers(count: int) -> torch.Tensor:
    return sample_augmentation(count, torch_generator(0, "draws"))


@pytest.mark.parametrize("mode", MODES)
def test_class_maps_are_transformed_like_images(mode: str) -> None:
    classes = torch.randint(0, 3, (32, 16, 16), generator=torch_generator(1))
    images = classes.unsqueeze(1).float()
    x, y = augment_examples(SegmentationConfig().make(3), images, classes, random_numbers(32), mode)
    assert torch.equal(x.squeeze(1).long(), y)
    assert y.dtype == torch.int64
    assert not torch.equal(y, classes)


def test_turn_mode_samples_all_eight_poses() -> None:
    corner = torch.zeros(400, 1, 16, 16)
    corner[:, :, 4, 5] = 1  # far from the border, on no symmetry axis
    result = augment_examples(
        ClassificationConfig().make(2), corner, torch.zeros(400).long(), random_numbers(400), "turn"
    )[0]
    centered = {(2 * y - 15, 2 * x - 15) for y, x in result.squeeze(1).nonzero()[:, 1:].tolist()}
    assert {(y > 0, x > 0, abs(y) > abs(x)) for y, x in centered} == {
        (up, left, steep) for up in (False, True) for left in (False, True) for steep in (False, True)
    }


def test_measurement_is_simulated_again_after_augmentation() -> None:
    task = ReconstructionConfig().make(1)
    whole = torch.rand(4, 1, 16, 16, generator=torch_generator(2)) * 2 - 1
    x, y = augment_examples(task, task.observe(whole), whole, random_numbers(4), "turn")
    torch.testing.assert_close(x, task.observe(y))


def test_class_labels_are_unchanged() -> None:
    y = torch.arange(3)
    assert (
        augment_examples(
            ClassificationConfig().make(3), torch.rand(3, 1, 8, 8), y, random_numbers(3), "turn"
        )[1]
        is y
    )


def test_rejects_texts_and_rotation_of_oblong_images() -> None:
    with raises_invalid("local.augment", "shift", "texts"):
        require_augmentable(TextConfig().make(2), (8,), "shift", "local.augment")
    with raises_invalid("local.augment", "turn", "shift-flip or less", "8 x 12"):
        require_augmentable(ClassificationConfig().make(2), (1, 8, 12), "turn", "local.augment")
    require_augmentable(ClassificationConfig().make(2), (1, 8, 12), "shift-flip", "local.augment")
    require_augmentable(TextConfig().make(2), (8,), "none", "local.augment")


def test_random_shift_equals_apply_shift_with_the_same_numbers() -> None:
    images = torch.rand(5, 2, 16, 16, generator=torch_generator(3))
    ours = apply_shift(images, random_numbers(5), flip=True)
    assert torch.equal(ours, random_shift(images, torch_generator(0, "draws"), flip=True))


def test_flip_and_rotate_by_pose() -> None:
    image = torch.arange(4).view(1, 2, 2)
    assert flip_and_rotate(image, torch.tensor([0])).tolist() == image.tolist()
    assert flip_and_rotate(image, torch.tensor([4])).tolist() == [[[3, 2], [1, 0]]]  # rotated by 180 degrees
    assert flip_and_rotate(image, torch.tensor([5])).tolist() == [
        [[2, 3], [0, 1]]
    ]  # mirrored, then rotated by 180 degrees


def reference_shift(image: torch.Tensor, down: int, right: int, mirrored: bool) -> torch.Tensor:
    """Shift one image (C, H, W) pixel by pixel, with its border repeated."""
    _, height, width = image.shape
    out = torch.empty_like(image)
    for row, column in itertools.product(range(height), range(width)):
        y = min(max(row + down, 0), height - 1)
        x = min(max((width - 1 - column if mirrored else column) + right, 0), width - 1)
        out[:, row, column] = image[:, y, x]
    return out


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(("height", "width"), [(8, 8), (8, 16)])
def test_shifts_cover_all_offsets_up_to_an_eighth(height: int, width: int, flip: bool) -> None:
    image = torch.arange(2.0 * height * width).view(2, height, width)
    reach_y, reach_x = height // 8, width // 8
    moves = itertools.product(
        range(-reach_y, reach_y + 1), range(-reach_x, reach_x + 1), (False, True) if flip else (False,)
    )
    allowed = {tuple(reference_shift(image, *move).flatten().tolist()): move for move in moves}
    images = image.expand(400, 2, height, width)
    out = random_shift(images, torch.Generator().manual_seed(0), flip=flip)
    assert out.shape == images.shape
    shifts = [allowed[tuple(moved.flatten().tolist())] for moved in out]
    assert set(shifts) == set(allowed.values()), "every shift is sampled"
    if flip:
        assert 150 < sum(mirrored for _, _, mirrored in shifts) < 250
