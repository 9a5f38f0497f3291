"""What the tasks share whose answer is one class a pixel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Interval

from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.tasks.classification import SoftmaxTask

DICE_SMOOTHING = 1.0  # pixels: keeps the soft Dice of an image without a class defined, and its slope finite


def soft_dice_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """One minus the Dice of probabilities, each image by itself, the mean over all classes but the first:
    ``(B,)``.

    ``1 - (2 sum p y + 1) / (sum p + sum y + 1)`` over the pixels of logits ``(B, C, H, W)`` and ``(B, H,
    W)``: the pixel more keeps it defined where an image has nothing of a class.
    """
    p = outputs.softmax(1)[:, 1:].flatten(2)  # (B, C - 1, H * W)
    classes = torch.arange(1, outputs.shape[1], device=outputs.device).view(1, -1, 1)
    y = targets.flatten(1).unsqueeze(1).eq(classes).to(p.dtype)
    shares = (2 * (p * y).sum(2) + DICE_SMOOTHING) / (p.sum(2) + y.sum(2) + DICE_SMOOTHING)
    return 1 - shares.mean(1)


ClassWeights = tuple[Annotated[float, Interval(gt=0, lt=1e6), "above 0"], ...]


class MapTask(SoftmaxTask):
    """A class a pixel: outputs are logits ``(B, C, H, W)``, targets ``(B, H, W)`` int64, class 0 background.

    Args:
        classes: C, from 2 up.
        class_weights: of each class in the cross-entropy; None: all 1.
        dice: weight of the soft Dice loss beside the cross-entropy.
    """

    kind = "map"

    def __init__(self, classes: int, class_weights: Sequence[float] | None = None, dice: float = 0.0) -> None:
        super().__init__(classes)
        if classes < 2:
            raise ArgumentError("classes", classes, "2 or more: background and what is looked for")
        if class_weights is not None and len(class_weights) != classes:
            raise ArgumentError(
                "task.class_weights", list(class_weights), f"one for each of {classes} classes"
            )
        self.class_weights = None if class_weights is None else torch.tensor(class_weights)
        self.dice = dice

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        """Cross-entropy, a mean over pixels, plus :attr:`dice` times :func:`soft_dice_loss`.

        Of G models on G batches, ``(G, B, C, H, W)`` and ``(G, B, H, W)`` to ``(G,)``. A pixel weighs as much
        as its class does, whatever else is in its image or batch.
        """
        logits, truth = outputs.flatten(0, 1), targets.flatten(0, 1)
        if self.class_weights is not None:  # moved once: a GPU records no copies from the CPU
            self.class_weights = self.class_weights.to(logits.device, logits.dtype)
        each = F.cross_entropy(logits, truth, self.class_weights, reduction="none", label_smoothing=smoothing)
        losses = each.flatten(1).mean(1)  # (G * B,)
        if self.dice:
            losses = losses + self.dice * soft_dice_loss(logits, truth)
        return losses.view(len(outputs), -1).mean(1)

    def counts(self, data: TensorData) -> torch.Tensor:
        """How many examples of each class, ``(C,)`` float64: each image adds its shares of pixels.

        In float32 one image could move the sum of many by more than its shares.
        """
        return torch.stack(
            [data.targets.eq(c).flatten(1).double().mean(1).sum() for c in range(self.classes)]
        )

    def encode_maps(self, maps: torch.Tensor) -> torch.Tensor:
        """Maps ``(..., H, W)`` as a channel a code, ``(..., conditions, H, W)``: 1 where it is, -1 else."""
        codes = torch.arange(self.condition_channels, device=maps.device).view(-1, 1, 1)
        return maps.unsqueeze(-3).eq(codes).float().mul(2).sub(1)
