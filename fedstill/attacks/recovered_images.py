"""Images that an attack got, and how like the true ones they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedstill.tasks import reconstruction_metrics


@dataclass(frozen=True)
class Pixels:
    """The range of pixels: numbers, or one a channel ``(C, 1, 1)``."""

    low: float | torch.Tensor = -1.0
    high: float | torch.Tensor = 1.0

    @classmethod
    def of(cls, mean: torch.Tensor, std: torch.Tensor) -> Pixels:
        """Of images that were normalised by these."""
        return cls((0 - mean) / std, (1 - mean) / std)

    def unit(self, images: torch.Tensor) -> torch.Tensor:
        """Images from 0 to 1, as they are looked at and measured."""
        return (images - self.low) / (self.high - self.low)

    def kept(self, images: torch.Tensor) -> torch.Tensor:
        """Images without what lies out of range."""
        low, high = (torch.as_tensor(end).to(images) for end in (self.low, self.high))
        return images.maximum(low).minimum(high)

    def shown(self, images: torch.Tensor) -> torch.Tensor:
        """Images as bytes, uint8."""
        return self.unit(images.detach().cpu()).clamp(0, 1).mul(255).round().to(torch.uint8).contiguous()


PIXELS = Pixels()  # inputs as they are normalised by default


@dataclass(frozen=True)
class Recovered:
    """What an attack got.

    Args:
        images: ``(B, C, H, W)`` in the pixels' range.
        labels: ``(B,)`` int64.
        loss: of the search, by which restarts are compared.
        psnr: dB of each image against the true one; empty before :meth:`against`.
    """

    images: torch.Tensor
    labels: torch.Tensor
    loss: float
    psnr: tuple[float, ...] = ()

    def against(self, true: torch.Tensor, pixels: Pixels = PIXELS) -> Recovered:
        """The same in the order of the true images ``(B, C, H, W)`` that each is most like, and how like."""
        from scipy.optimize import linear_sum_assignment  # heavy

        errors = (true.flatten(1)[:, None].double() - self.images.flatten(1).double()).square().sum(2)
        order = torch.from_numpy(linear_sum_assignment(errors.cpu().numpy())[1])
        images = self.images[order]
        return Recovered(images, self.labels[order], self.loss, tuple(psnr(images, true, pixels).tolist()))


def psnr(recovered: torch.Tensor, true: torch.Tensor, pixels: Pixels = PIXELS) -> torch.Tensor:
    """Peak signal-to-noise ratio of each image, ``(B,)`` dB, at most 100: of images brought to [0, 1].

    >>> grey, darker = torch.full((1, 3, 2, 2), 0.5), torch.full((1, 3, 2, 2), 0.4)
    >>> [round(value, 4) for value in psnr(darker, grey, Pixels(0.0, 1.0)).tolist()]
    [20.0]
    """
    return reconstruction_metrics.psnr(pixels.unit(recovered.double()), pixels.unit(true.double()))
