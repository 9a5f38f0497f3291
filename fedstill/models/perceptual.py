"""Perceptual loss: the distance of images in the features of a pretrained network.

Johnson, Alahi, Fei-Fei: "Perceptual Losses for Real-Time Style Transfer and Super-Resolution", ECCV 2016. The
features are those of a VGG (:mod:`fedstill.models.vgg`), as in the paper, or the maps of any backbone at its
scales (:mod:`fedstill.models.feature_maps`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from fedstill.core.errors import ArgumentError
from fedstill.models.backbones import BACKBONE_KINDS, RawInputs, is_trainable_kind
from fedstill.models.feature_maps import FeatureMaps
from fedstill.models.vgg import load_vgg


def perceptual_loss(
    features: Callable[[torch.Tensor], Sequence[torch.Tensor]], x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """Return the perceptual loss of each pair of images ``(B, channels, H, W)``: ``(B,)``, with gradients to
    both.

    Johnson et al., Eq. 2: the mean squared difference of an activation, here averaged over activations. For a
    VGG these are relu1_2, relu2_2, relu3_3 and relu4_3; for another backbone the last map at each of its
    scales.
    """
    pairs = zip(features(x), features(y), strict=True)
    return torch.stack([(first - second).square().flatten(1).mean(1) for first, second in pairs]).mean(0)


def is_backbone(name: str) -> bool:
    """Return whether a name is that of a backbone, and not the path of a file of VGG weights.

    >>> is_backbone("timm:resnet18"), is_backbone("weights/vgg16.safetensors")
    (True, False)
    """
    return name.partition(":")[0] in BACKBONE_KINDS or name.endswith(".onnx") or is_trainable_kind(name)


def load_perceptual(name: str, weights: str, raw: RawInputs, option: str) -> nn.Module | None:
    """Return the frozen network whose features a perceptual loss compares; None without a name.

    Args:
        name: a safetensors file of VGG-16 or VGG-19 weights, or a backbone: ``timm:NAME``,
            ``torchvision:NAME`` or ``package.module:factory``.
        weights: a safetensors file of the backbone's weights; empty for a VGG.
        raw: shape and normalization of the images.
        option: option that has the name, for errors; with ``_weights``, the option of the weights.

    Raises:
        ArgumentError: a backbone without gradients, a missing file, or images of other channels.
        FedstillError: the weights do not fit, or the backbone has no maps at several scales.
    """
    if is_backbone(name):
        try:
            maps = FeatureMaps(name, raw)
        except ArgumentError as error:
            expected = f"a .safetensors file of VGG weights, or a backbone: {error.expected}"
            raise ArgumentError(option, name, expected) from error
        maps.load(weights, f"{option}_weights")
        return maps.requires_grad_(False)
    if weights:
        raise ArgumentError(f"{option}_weights", weights, f"none, as {option} = {name!r} is no backbone")
    return load_vgg(name, raw.mean, raw.std) if name else None
