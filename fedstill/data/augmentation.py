"""Data augmentation of images: shifts, flips and quarter turns, given random numbers.

Targets that are images or maps are transformed alike.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fedstill.core.compute import copy_to_device
from fedstill.core.errors import ArgumentError
from fedstill.tasks import Task

NUMBERS_PER_IMAGE = 4  # row shift, column shift, flip, rotation


def sample_augmentation(count: int, generator: torch.Generator) -> torch.Tensor:
    """Sample random numbers for augmenting ``count`` images: ``(4, count)`` int64 >= 0, on the CPU."""
    return torch.randint(2**31, (NUMBERS_PER_IMAGE, count), generator=generator)


def require_augmentable(task: Task, shape: tuple[int, ...], mode: str, name: str) -> None:
    """Refuse an augmentation that does not suit the inputs.

    Args:
        shape: shape of an input.
        mode: see :func:`augment_examples`; none is always allowed.
        name: the option, for the error.

    Raises:
        ArgumentError: inputs are texts or table rows, or images that are not square are to be rotated.
    """
    if mode != "none" and task.form != "images":
        raise ArgumentError(name, mode, f"none, as {task.form} cannot be augmented")
    if mode == "turn" and shape[-2] != shape[-1]:
        raise ArgumentError(name, mode, f"shift-flip or less, as images are {shape[-2]} x {shape[-1]}")


def augment_examples(
    task: Task, inputs: torch.Tensor, targets: torch.Tensor, numbers: torch.Tensor, mode: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Augment examples, given numbers from :func:`sample_augmentation`.

    Targets that are maps or images are transformed like their inputs. For reconstruction, the measurement is
    simulated again from the transformed image, as its artifacts do not rotate with it.

    Args:
        mode: shift; shift-flip: mirrored too; turn: rotated by quarters too.

    """

    def transform(images: torch.Tensor) -> torch.Tensor:
        images = apply_shift(images, numbers, flip=mode != "shift")
        return flip_and_rotate(images, 2 * (numbers[3] % 4)) if mode == "turn" else images

    if task.kind == "map":
        return transform(inputs), transform(targets.unsqueeze(1).float()).squeeze(1).to(targets.dtype)
    if task.kind == "image":
        transformed = transform(targets)
        return task.observe(transformed), transformed
    return transform(inputs), targets


def random_shift(images: torch.Tensor, generator: torch.Generator, *, flip: bool) -> torch.Tensor:
    """Shift each image of ``(B, C, H, W)`` by up to an eighth of its size, repeating the border.

    With ``flip``, mirror half of the images.
    """
    return apply_shift(images, torch.randint(2**31, (3, len(images)), generator=generator), flip=flip)


def apply_shift(images: torch.Tensor, numbers: torch.Tensor, *, flip: bool) -> torch.Tensor:
    """Shift images like :func:`random_shift`, given random numbers ``(3, B)``: int64 >= 0, on the CPU."""
    count, channels, height, width = images.shape
    max_dy, max_dx = height // 8, width // 8
    padded = F.pad(images, (max_dx, max_dx, max_dy, max_dy), mode="replicate")
    top, left = numbers[0] % (2 * max_dy + 1), numbers[1] % (2 * max_dx + 1)
    rows = copy_to_device(top[:, None] + torch.arange(height), images.device)  # (B, H)
    columns = left[:, None] + torch.arange(width)  # (B, W)
    if flip:
        is_mirrored = (numbers[2] % 2).bool()[:, None]
        columns = torch.where(is_mirrored, columns.flip(1), columns)
    columns = copy_to_device(columns, images.device)
    index = torch.arange(count, device=images.device)
    # One gather by image, row and column.
    return (
        padded.permute(0, 2, 3, 1)[index[:, None, None], rows[:, :, None], columns[:, None, :]]
        .permute(0, 3, 1, 2)
        .reshape(count, channels, height, width)
    )


def flip_and_rotate(images: torch.Tensor, pose: torch.Tensor) -> torch.Tensor:
    """Mirror images and rotate them by quarter turns.

    Args:
        images: ``(B, ..., H, W)``; rotation needs H = W.
        pose: ``(B,)`` int64 of 0..7: odd ones are mirrored left to right, then rotated by pose // 2 quarter
            turns.

    >>> flip_and_rotate(torch.tensor([[[1, 2], [3, 4]]] * 2), torch.tensor([1, 2])).tolist()
    [[[2, 1], [4, 3]], [[2, 4], [1, 3]]]
    """
    if not pose.any():
        return images
    result = torch.empty_like(images)
    for code in sorted(set(pose.tolist())):
        rows = torch.nonzero(pose == code).flatten().to(images.device)
        selected = images[rows].flip(-1) if code % 2 else images[rows]
        result[rows] = torch.rot90(selected, code // 2, (-2, -1))
    return result
