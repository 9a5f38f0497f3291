"""Base of tasks with one class per pixel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Interval

from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.tasks.classification import SoftmaxTask

DICE_SMOOTHING = 1.0  # pixels; keeps the soft Dice and its gradient finite for images without a class


def soft_dice_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return one minus the soft Dice of each image, averaged over all classes except the first: ``(B,)``.

    ``1 - (2 sum p y + 1) / (sum p + sum y + 1)``, where the sums run over the pixels of one class. The added
    pixel keeps it defined for images without that class.

    Args:
        outputs: logits, ``(B, C, H, W)``.
        targets: classes, ``(B, H, W)``.
    """
    p = outputs.softmax(1)[:, 1:].flatten(2)  # (B, C - 1, H * W)
    classes = torch.arange(1, outputs.shape[1], device=outputs.device).view(1, -1, 1)
    y = targets.flatten(1).unsqueeze(1).eq(classes).to(p.dtype)
    shares = (2 * (p * y).sum(2) + DICE_SMOOTHING) / (p.sum(2) + y.sum(2) + DICE_SMOOTHING)
    return 1 - shares.mean(1)


ClassWeights = tuple[Annotated[float, Interval(gt=0, lt=1e6), "above 0"], ...]


class MapTask(SoftmaxTask):
    """Base of tasks with one class per pixel: outputs are logits ``(B, C, H, W)``, targets ``(B, H, W)``
    int64.

    Class 0 is the background.

    Args:
        classes: C, 2 or more.
        class_weights: weight of each class in the cross-entropy. None: all 1.
        dice: weight of the soft Dice loss, added to the cross-entropy.

    Raises:
        ArgumentError: fewer than 2 classes, or another number of class weights than classes.
    """

    kind = "map"

    def __init__(self, classes: int, class_weights: Sequence[float] | None = None, dice: float = 0.0) -> None:
        super().__init__(classes)
        if classes < 2:
            raise ArgumentError("classes", classes, "2 or more: the background and at least one class")
        if class_weights is not None and len(class_weights) != classes:
            raise ArgumentError(
                "task.class_weights", list(class_weights), f"one for each of {classes} classes"
            )
        self.class_weights = None if class_weights is None else torch.tensor(class_weights)
        self.dice = dice

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        """Return cross-entropy per pixel plus :attr:`dice` times :func:`soft_dice_loss`, for each of G
        models: ``(G,)``.

        The weight of a pixel depends on its class only, not on the rest of the image or batch.

        Args:
            outputs: logits, ``(G, B, C, H, W)``.
            targets: classes, ``(G, B, H, W)``.
            smoothing: label smoothing, from 0 to 1.
        """
        logits, truth = outputs.flatten(0, 1), targets.flatten(0, 1)
        if self.class_weights is not None:  # moved once: a CUDA graph cannot capture copies from the CPU
            self.class_weights = self.class_weights.to(logits.device, logits.dtype)
        pixel_losses = F.cross_entropy(
            logits, truth, self.class_weights, reduction="none", label_smoothing=smoothing
        )
        losses = pixel_losses.flatten(1).mean(1)  # (G * B,)
        if self.dice:
            losses = losses + self.dice * soft_dice_loss(logits, truth)
        return losses.view(len(outputs), -1).mean(1)

    def counts(self, data: TensorData) -> torch.Tensor:
        """Return the number of examples of each class, ``(C,)`` float64: each image adds its shares of
        pixels.

        With float32 a single image could change a large sum by more than its share.
        """
        return torch.stack(
            [data.targets.eq(c).flatten(1).double().mean(1).sum() for c in range(self.classes)]
        )

    def encode_maps(self, maps: torch.Tensor) -> torch.Tensor:
        """Return maps ``(..., H, W)`` with one channel per code, ``(..., condition_channels, H, W)``: 1 or
        -1.
        """
        codes = torch.arange(self.condition_channels, device=maps.device).view(-1, 1, 1)
        return maps.unsqueeze(-3).eq(codes).float().mul(2).sub(1)
