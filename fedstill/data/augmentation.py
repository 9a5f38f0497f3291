"""Images moved, mirrored and turned, by numbers that were drawn; targets that are pictures go along."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from fedstill.core.compute import onto
from fedstill.core.errors import ArgumentError

if TYPE_CHECKING:
    from fedstill.tasks import Task


NUMBERS_PER_IMAGE = 4  # numbers an image


def sample_augmentation(count: int, generator: torch.Generator) -> torch.Tensor:
    """The numbers that say how ``count`` images are changed: ``(4, count)`` int64 from 0, on the CPU."""
    return torch.randint(2**31, (NUMBERS_PER_IMAGE, count), generator=generator)


def augment_examples(
    task: Task, inputs: torch.Tensor, targets: torch.Tensor, draws: torch.Tensor, how: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Examples changed as numbers of :func:`sample_augmentation` say: shifted, mirrored too, turned by quarters too.

    Targets that are maps or images change as their inputs do. What an image was measured from is measured
    anew of the changed image, since a measurement's traces do not turn with it.

    Raises:
        ArgumentError: texts, rows of a table, or images that are not square, which cannot be turned.
    """
    if task.form != "images":
        raise ArgumentError("local.augment", how, f"none, as {task.form} have no direction to be moved in")
    if how == "turn" and inputs.shape[-1] != inputs.shape[-2]:
        raise ArgumentError("local.augment", how, "shift-flip or less, as images are not square")

    def change(images: torch.Tensor) -> torch.Tensor:
        images = apply_shift(images, draws, flip=how != "shift")
        return flip_and_rotate(images, 2 * (draws[3] % 4)) if how == "turn" else images

    if task.kind == "map":
        return change(inputs), change(targets.unsqueeze(1).float()).squeeze(1).to(targets.dtype)
    if task.kind == "image":
        whole = change(targets)
        return task.observe(whole), whole
    return change(inputs), targets


def random_shift(images: torch.Tensor, generator: torch.Generator, *, flip: bool) -> torch.Tensor:
    """Images ``(B, C, H, W)``, each moved by up to an eighth of its size, its border repeated, and with
    ``flip`` mirrored half the time.
    """
    return apply_shift(images, torch.randint(2**31, (3, len(images)), generator=generator), flip=flip)


def apply_shift(images: torch.Tensor, draws: torch.Tensor, *, flip: bool) -> torch.Tensor:
    """:func:`random_shift`, as numbers ``draws`` ``(3, B)`` say: int64 from 0, on the CPU."""
    count, channels, height, width = images.shape
    reach_y, reach_x = height // 8, width // 8
    padded = F.pad(images, (reach_x, reach_x, reach_y, reach_y), mode="replicate")
    top, left = draws[0] % (2 * reach_y + 1), draws[1] % (2 * reach_x + 1)
    rows = onto(top[:, None] + torch.arange(height), images.device)  # (B, H)
    columns = left[:, None] + torch.arange(width)  # (B, W)
    if flip:
        mirror = (draws[2] % 2).bool()[:, None]
        columns = torch.where(mirror, columns.flip(1), columns)
    columns = onto(columns, images.device)
    image = torch.arange(count, device=images.device)
    # One gather: index of image, row and column; channels come along.
    return (
        padded.permute(0, 2, 3, 1)[image[:, None, None], rows[:, :, None], columns[:, None, :]]
        .permute(0, 3, 1, 2)
        .reshape(count, channels, height, width)
    )


def flip_and_rotate(images: torch.Tensor, pose: torch.Tensor) -> torch.Tensor:
    """Images mirrored and turned by quarters.

    Args:
        images: ``(B, ..., H, W)``; to be turned, H must be W.
        pose: ``(B,)`` int64 of 0..7: odd ones are mirrored left and right, then pose // 2 quarter turns.

    >>> flip_and_rotate(torch.tensor([[[1, 2], [3, 4]]] * 2), torch.tensor([1, 2])).tolist()
    [[[2, 1], [4, 3]], [[2, 4], [1, 3]]]
    """
    if not pose.any():
        return images
    turned = torch.empty_like(images)
    for way in sorted(set(pose.tolist())):
        rows = torch.nonzero(pose == way).flatten().to(images.device)
        some = images[rows].flip(-1) if way % 2 else images[rows]
        turned[rows] = torch.rot90(some, way // 2, (-2, -1))
    return turned
