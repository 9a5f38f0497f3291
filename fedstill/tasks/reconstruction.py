"""Reconstruction of undersampled MRI: the whole image from a few lines of its k-space.

Images are ``(1, H, W)``, normalized with mean and standard deviation 0.5: black is -1, white 1. The input of
a model is the zero-filled image on the same scale. Metrics are SSIM, PSNR and NMSE of each image; pixels are
in 0..1, and predictions outside this range are clipped.

Masks of k-space follow the fastMRI convention (Zbontar et al., arXiv:1811.08839, section 4.9): a band in the
center is always measured (0.08 of the lines at 4x, 0.04 at 8x), and random other lines are added until one
line in ``acceleration`` is measured. Unlike there, the number of lines is fixed, and one mask serves the
whole federation, as for scans with one protocol: nodes, server and test set measure alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import torch
from annotated_types import Ge, Interval

from fedstill.core.dataset import CaseIndex, TensorData, check_inputs
from fedstill.core.errors import ArgumentError, DataError
from fedstill.core.seeds import torch_generator
from fedstill.tasks.classification import Floats
from fedstill.tasks.label_maps import body_mask, sample_body_regions
from fedstill.tasks.regression import NumericTask
from fedstill.tasks.task import Metric, TaskConfig, case_indices, mean_by_group

MEAN, STD = 0.5, 0.5  # normalization of all images
ACCELERATION, CENTER_SHARE = 4, 0.08  # defaults of the options
RANGE_TOLERANCE = 1e-3  # allowed distance of a pixel from its range; resampled images exceed it slightly
MASK_SEED = 0  # the same mask in every run, at every node and at the server
IMAGES_PER_BATCH = 256  # images whose SSIM is computed at once
MIN_SQUARED_ERROR = 1e-10  # lower bound of the mean squared error in PSNR: at most 100 dB, never infinity


# --- metrics ---------------------------------------------------------------------------------------------


def ssim(predicted: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Return the structural similarity in percent: ``(N, 1, H, W)`` twice to ``(N,)`` float64, at most 100.

    Wang et al. 2004, as in torchmetrics: an 11 x 11 Gaussian window of sigma 1.5 around each pixel, with
    reflected borders. (scikit-image leaves out pixels near the border. fastMRI's code uses a uniform 7 x 7
    window and the range of each volume.) H and W must be 6 or more.
    """
    from torchmetrics.functional.image import structural_similarity_index_measure as similarity

    def batch_ssim(predicted: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
        values = similarity(predicted, true, data_range=1.0, reduction="none")
        # torchmetrics returns a tuple only if it is asked for more than the values.
        return (values if isinstance(values, torch.Tensor) else values[0]).reshape(len(predicted))

    batches = (torch.split(images.clamp(0, 1), IMAGES_PER_BATCH) for images in (predicted, true))
    return 100 * torch.cat([batch_ssim(*batch) for batch in zip(*batches, strict=True)]).double()


def psnr(predicted: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Return the peak signal-to-noise ratio, ``10 log10(1 / MSE)`` in dB: ``(N, C, H, W)`` twice to ``(N,)``.

    The MSE is over all pixels of all channels. Equal images have 100 dB.

    >>> round(psnr(torch.full((1, 1, 8, 8), 0.5), torch.full((1, 1, 8, 8), 0.4)).item(), 2)
    20.0
    """
    error = _squared_error(predicted, true) / true[0].numel()
    return -10 * error.clamp_min(MIN_SQUARED_ERROR).log10()


def nmse(predicted: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Return the normalized mean squared error, ``|x - y|^2 / |y|^2``: ``(N, 1, H, W)`` twice to ``(N,)``.

    It is computed for each image (fastMRI computes it for each volume). NaN if the true image is black.
    """
    energy = true.double().square().flatten(1).sum(1)
    return torch.where(energy > 0, _squared_error(predicted, true) / energy, torch.nan)


def _squared_error(predicted: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Return the sum of squared differences of each image, ``(N,)`` float64."""
    return (predicted.double().clamp(0, 1) - true.double()).square().flatten(1).sum(1)


# --- k-space ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=32)  # callers must not modify the mask
def kspace_mask(width: int, acceleration: int, center: float, seed: int = MASK_SEED) -> torch.Tensor:
    """Return the measured lines of k-space, ``(width,)`` bool, with the zero frequency in the middle.

    A share ``center`` of all lines, in the middle, is always measured. ``seed`` determines the others.

    Args:
        width: number of lines.
        acceleration: one line in ``acceleration`` is measured.
        center: share of lines in the middle, 0 or more and below 1.
        seed: seed of the random lines.

    Raises:
        ArgumentError: the center alone has more lines than ``acceleration`` allows.

    >>> mask = kspace_mask(64, 4, 0.08)
    >>> int(mask.sum()), mask[30:35].tolist()
    (16, [True, True, True, True, True])
    """
    measured, middle = max(round(width / acceleration), 1), round(width * center)
    if middle > measured:
        expected = f"up to {measured / width:.3g}, as one line of {acceleration} is measured"
        raise ArgumentError("task.center", center, expected)
    mask = torch.zeros(width, dtype=torch.bool)
    first = (width - middle + 1) // 2
    mask[first : first + middle] = True
    others = torch.nonzero(~mask).flatten()
    order = torch.randperm(len(others), generator=torch_generator(seed, "k-space", width, acceleration))
    mask[others[order[: measured - middle]]] = True
    return mask


@lru_cache(maxsize=32)  # moved once: a CUDA graph cannot capture copies from the CPU
def _kspace_mask_on(device: torch.device, width: int, acceleration: int, center: float) -> torch.Tensor:
    return kspace_mask(width, acceleration, center).to(device)


def undersample(images: torch.Tensor, measured: torch.Tensor) -> torch.Tensor:
    """Return the zero-filled image, ``|F^-1(mask F(x))|``, differentiably.

    F is orthonormal and so adds no energy.

    Args:
        images: pixels from 0 to 1, ``(..., H, W)``.
        measured: measured lines, ``(W,)`` bool.
    """
    keep = torch.fft.ifftshift(measured).to(images.device)  # zero frequency first, as in torch.fft
    image: torch.Tensor = torch.fft.ifft2(torch.fft.fft2(images, norm="ortho") * keep, norm="ortho").abs()
    return image


# --- task ------------------------------------------------------------------------------------------------


class Reconstruction(NumericTask):
    """Reconstruction of undersampled images. Outputs and targets are images ``(B, 1, H, W)``.

    The loss is L1, as in FL-MRCM and FedAD.

    Args:
        classes: channels of an output, 1.
        acceleration: one line of k-space in ``acceleration`` is measured, 2 or more.
        center: share of lines in the middle that is always measured, 0 or more and below 1.

    Raises:
        ArgumentError: ``classes`` is not 1.

    Example:
        >>> task = Reconstruction(acceleration=8, center=0.04)
        >>> task.observe(torch.zeros(2, 1, 16, 16)).shape
        torch.Size([2, 1, 16, 16])
    """

    name = "reconstruction"
    metrics = (
        Metric("ssim", "SSIM"),
        Metric("psnr", "PSNR", "dB", 2),
        Metric("nmse", "NMSE", "", 4, "lower"),
    )
    kind = "image"
    min_classes = 1
    condition_channels = 2  # outside and inside the head

    def __init__(
        self, classes: int = 1, acceleration: int = ACCELERATION, center: float = CENTER_SHARE
    ) -> None:
        if classes != 1:
            raise ArgumentError("classes", classes, "1 for task reconstruction: a model returns one image")
        super().__init__(classes)
        self.acceleration, self.center = acceleration, center

    def check(self, data: TensorData, description: str) -> None:
        """Refuse anything but images ``(N, 1, H, W)`` in -1..1 with their undersampled versions; H and W are
        8 or more.

        Raises:
            DataError: the data are invalid; the message names the first fault.
        """
        check_inputs(data, description)
        check_inputs(TensorData(data.targets, data.inputs), f"{description}: targets as inputs")
        if data.inputs.shape != data.targets.shape or data.inputs.shape[1] != 1:
            pair = f"{tuple(data.inputs.shape)} and {tuple(data.targets.shape)}"
            raise DataError(
                f"{description}: inputs and targets are {pair} (expected equal ones, (N, 1, H, W))"
            )
        height, width = data.inputs.shape[2:]
        if min(height, width) < 8:
            raise DataError(f"{description}: images are {height} x {width} (expected 8 x 8 or more)")
        low, high = data.targets.aminmax()
        if low < -1 - RANGE_TOLERANCE or high > 1 + RANGE_TOLERANCE:
            raise DataError(
                f"{description}: targets lie in {low:.3g}..{high:.3g} (expected -1 (black) to 1 (white))"
            )

    # --- local training ---

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        """Return the mean absolute error (L1) of G models: ``(G, B, 1, H, W)`` twice to ``(G,)``.
        ``smoothing`` is ignored.
        """
        losses: torch.Tensor = (outputs - targets).abs().flatten(1).mean(1)
        return losses

    # --- FedIOD: responses of K nodes ---

    def distillation_loss(self, student: torch.Tensor, target: torch.Tensor, tau: float) -> torch.Tensor:
        """Return the mean absolute error ``(B,)``; for infinite ``tau`` half the mean squared error, the
        limit for logits.
        """
        difference = (student - target).flatten(1)
        return 0.5 * difference.square().mean(1) if math.isinf(tau) else difference.abs().mean(1)

    # --- evaluation ---

    def compute_metrics(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None = None
    ) -> Mapping[str, float]:
        """Return SSIM (percent), PSNR (dB) and NMSE, averaged over images; pixels are clipped to 0..1.

        NMSE leaves out black images, and is NaN if all images are black.
        """
        predicted, true = to_pixels(outputs), to_pixels(targets)
        return {
            "ssim": ssim(predicted, true).mean().item(),
            "psnr": psnr(predicted, true).mean().item(),
            "nmse": nmse(predicted, true).nanmean().item(),
        }

    def case_scores(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None = None
    ) -> torch.Tensor | None:
        """Return the mean SSIM of each present case, in the order of the cases: ``(cases,)``."""
        values = ssim(to_pixels(outputs), to_pixels(targets)).cpu()
        return mean_by_group(values, *case_indices(len(values), cases))

    def bootstrap_metric(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None, weights: Floats
    ) -> Floats | None:
        """See :meth:`Task.bootstrap_metric`. Every image counts by itself, as in the mean SSIM."""
        return super().bootstrap_metric(outputs, targets, None, weights)

    # --- inputs generated from label maps ---

    def observe(self, x: torch.Tensor) -> torch.Tensor:
        """Return the zero-filled version of images ``(..., 1, H, W)``, on the same scale, differentiably."""
        measured = _kspace_mask_on(x.device, x.shape[-1], self.acceleration, self.center)
        return (undersample(to_pixels(x), measured) - MEAN) / STD

    def real_images(self, data: TensorData) -> torch.Tensor:
        """Return the whole images."""
        return data.targets

    def label_maps(self, data: TensorData) -> torch.Tensor:
        """Return the outline of each head: ``(N, H, W)`` uint8, 1 inside. Private: sending them is a
        release.
        """
        return body_mask(data.targets)

    def encode_maps(self, maps: torch.Tensor) -> torch.Tensor:
        """Return outlines ``(..., H, W)`` as ``(..., 2, H, W)``: channels outside and inside, 1 if true, else
        -1.
        """
        inside = maps.ne(0).float()
        return torch.stack([1 - 2 * inside, 2 * inside - 1], -3)

    def targets_from_maps(self, maps: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the images themselves, which a model should reconstruct from their undersampled versions."""
        return x

    def sample_maps(self, count: int, height: int, width: int, generator: torch.Generator) -> torch.Tensor:
        """Return random outlines, roughly of heads from above: ``(count, H, W)`` uint8."""
        return sample_body_regions(count, height, width, 0, generator)


def to_pixels(images: torch.Tensor) -> torch.Tensor:
    """Return normalized images as pixels, 0 black and 1 white."""
    return images * STD + MEAN


@dataclass(frozen=True, kw_only=True)
class ReconstructionConfig(TaskConfig):
    """Reconstruction of images from undersampled k-space.

    Example:
        >>> ReconstructionConfig(acceleration=8, center=0.04).make(["image"]).classes
        1
    """

    task_class = Reconstruction

    acceleration: Annotated[int, Ge(2)] = ACCELERATION
    """Acceleration factor: one in this many lines of k-space is measured."""

    center: Annotated[float, Interval(ge=0, lt=1)] = CENTER_SHARE
    """Share of lines in the center of k-space that are always measured."""
