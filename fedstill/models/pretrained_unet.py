"""U-Nets whose encoder is a pretrained network.

Iglovikov, Shvets: "TernausNet: U-Net with VGG11 Encoder Pre-Trained on ImageNet for Image Segmentation",
arXiv:1801.05746, 2018; here with any convolutional network of timm, torchvision or a custom factory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedstill.core.errors import ArgumentError
from fedstill.models.backbones import RawInputs
from fedstill.models.extractor_head import Split
from fedstill.models.feature_maps import FeatureMaps
from fedstill.models.unet import Decoder, conv_block, identity_head, make_group_norm

WIDTH, MAX_WIDTH = 16, 256  # channels of the decoder at full resolution, and at most


class PretrainedEncoder(nn.Module):
    """Contracting path: feature maps of a backbone at several scales, and of the image at full resolution.

    Args:
        maps: the backbone.

    Attributes:
        factors: factor of each level, from 1.
        channels: channels of each level.
    """

    def __init__(self, maps: FeatureMaps) -> None:
        super().__init__()
        self.features = maps
        self.factors = [scale.factor for scale in maps.scales]
        self.channels = [scale.channels for scale in maps.scales]
        self.stem: nn.Module | None = None
        if self.factors[0] > 1:  # most backbones halve the image in their first layer
            self.stem = conv_block(maps.conversion.channels, WIDTH, make_group_norm)
            self.factors, self.channels = [1, *self.factors], [WIDTH, *self.channels]

    def levels(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the maps of images ``(B, C, H, W)``, from fine to coarse."""
        pixels = self.features.convert(x)
        maps = self.features.maps(pixels)
        return maps if self.stem is None else [self.stem(pixels), *maps]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the coarsest maps, the latent features of an image."""
        return self.levels(x)[-1]


class PretrainedBody(nn.Module):
    """U-Net without its last layer: ``(B, C, H, W)`` to features of each pixel, ``(B, width, H, W)``.

    Args:
        maps: the backbone.
        residual: append the image to the features.

    Attributes:
        width: channels of the features, without those of the image.
    """

    def __init__(self, maps: FeatureMaps, residual: bool) -> None:
        super().__init__()
        self.encoder, self.residual = PretrainedEncoder(maps), residual
        widths = [min(WIDTH * factor, MAX_WIDTH) for factor in self.encoder.factors[:-1]]
        self.decoder = Decoder(self.encoder.channels, widths, self.encoder.factors, make_group_norm)
        self.width = widths[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features of each pixel."""
        height, width = x.shape[2:]
        features: torch.Tensor = self.decoder(self.encoder.levels(x))[..., :height, :width]
        return torch.cat([features, x], 1) if self.residual else features


class PretrainedUNet(Split):
    """U-Net with a pretrained encoder: ``(B, C, H, W)`` to ``(B, classes, H, W)``.

    The encoder has its initial weights until :meth:`load_encoder`. All parameters are trained; the statistics
    of the encoder's batch normalization stay those of the pretraining
    (:class:`~fedstill.models.feature_maps.FeatureMaps`). The decoder has group norm, 16 channels at full
    resolution, and twice as many at each coarser level, up to 256. Images of any size are padded. The latent
    features are those of the submodule ``extractor.encoder``.

    Args:
        backbone: ``timm:NAME``, ``torchvision:NAME``, or ``package.module:factory`` for a custom factory
            that receives the shape of an image and returns a torch module. It is called with images as
            normalized in the run.
        shape: ``(C, H, W)`` of an image; gray images are repeated for networks of timm and torchvision.
        classes: number of output channels.
        mean, std: normalization of the images; default: 0.5 and 0.5.
        residual: be the identity at initialization, as :class:`~fedstill.models.unet.ResidualUNet` is.

    Attributes:
        name: name of the network in a run, such as ``"unet:timm:resnet18"``.

    Raises:
        ArgumentError: an unknown backbone, or one without gradients, such as an ONNX graph.
        ModelError: the backbone cannot be built, or has no feature maps at two scales or more.
    """

    def __init__(
        self,
        backbone: str,
        shape: tuple[int, ...],
        classes: int,
        mean: tuple[float, ...] = (),
        std: tuple[float, ...] = (),
        residual: bool = False,
    ) -> None:
        body = PretrainedBody(FeatureMaps(backbone, RawInputs(shape, mean, std)), residual)
        head = identity_head(body.width, shape[0], classes) if residual else nn.Conv2d(body.width, classes, 1)
        super().__init__(body, head)
        self.name = f"{'residual-' if residual else ''}unet:{backbone}"

    @property
    def encoder(self) -> FeatureMaps:
        """The backbone."""
        body: Any = self.extractor
        maps: FeatureMaps = body.encoder.features
        return maps

    def load_encoder(self, weights: str | Path, option: str = "weights") -> PretrainedUNet:
        """Load the backbone's pretrained weights from a local .safetensors file, and return the network.

        Args:
            weights: the file, with the names of parameters of the backbone. Empty: a custom factory has
                them itself.
            option: option that names the file, for errors.

        Raises:
            ArgumentError: there is no such file, or none is given for timm and torchvision.
            ModelError: the file is not a safetensors file, or does not fit.
        """
        self.encoder.load(weights, option)
        return self

    def require_normalization(self, mean: Sequence[float], std: Sequence[float], network: str) -> None:
        """Refuse images that are normalized in another way than the network expects.

        Args:
            mean, std: normalization of the images, per channel; empty: 0.5 and 0.5.
            network: name of the network, for the error.

        Raises:
            ArgumentError: the network was made for another mean or standard deviation.
        """
        conversion = self.encoder.conversion
        for name, values, own in (("mean", mean, conversion.data_mean), ("std", std, conversion.data_std)):
            given, known = torch.tensor(tuple(values) or (0.5,)), own.flatten().cpu()
            if not bool((given == known).all()):
                expected = f"{[round(value, 6) for value in given.tolist()]}, as of the run's images"
                raise ArgumentError(f"{name} of {network}", known.tolist(), expected)
