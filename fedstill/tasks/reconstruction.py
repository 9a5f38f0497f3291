"""How near reconstructed images are to the true ones: SSIM, PSNR and NMSE, each of an image by itself.

Pixels lie in 0..1 throughout, so that the data range is 1 for every image; what a network gives outside is
cut off, as a picture is.

Reconstruction: the whole image from what was measured of it, a few lines of its k-space.

Images are ``(1, H, W)``, normalized with mean and standard deviation 0.5: black is -1, white 1. What a
network sees is the zero-filled image in the same scale.

Masks of k-space follow the fastMRI convention (Zbontar et al., arXiv:1811.08839, section 4.9): a band in the
middle is always measured (0.08 of the lines at 4x, 0.04 at 8x), and of the others so many, drawn at random,
that one line in ``acceleration`` is. Unlike there, their number is fixed, and one mask serves the whole
federation: scans of one protocol, so that nodes, server and test set measure alike.
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
from fedstill.tasks.body_mask import body_mask
from fedstill.tasks.classification import Floats
from fedstill.tasks.config import TaskConfig
from fedstill.tasks.numeric_task import NumericTask
from fedstill.tasks.synthetic_maps import sample_body_regions
from fedstill.tasks.task import Metric, case_indices, mean_by_group

MEAN, STD = 0.5, 0.5  # the declared normalization of all images
ACCELERATION, CENTER_SHARE = 4, 0.08  # unless a configuration has others
RANGE_TOLERANCE = 1e-3  # how far a pixel may be outside its range: resampled images are, a little
MASK_SEED = 0  # of the mask: the same in every run, at every node and at the server
IMAGES_PER_BATCH = 256  # images compared at once
MIN_SQUARED_ERROR = (
    1e-10  # mean squared error that PSNR is reckoned with at least: 100 dB at most, never infinity
)


# --- metrics ---


def ssim(found: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Structural similarity in percent: ``(N, 1, H, W)`` twice to ``(N,)`` float64, at most 100.

    Wang et al. 2004, as torchmetrics has it: an 11 x 11 Gaussian window of sigma 1.5 around every pixel,
    borders reflected. (scikit-image leaves out pixels near the border; fastMRI's code takes a uniform window
    of 7 x 7 and each volume's own range.) H and W must be 6 or more.
    """
    from torchmetrics.functional.image import structural_similarity_index_measure as similarity

    def each(found: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
        told = similarity(found, true, data_range=1.0, reduction="none")
        # A pair only where more than that is asked for.
        return (told if isinstance(told, torch.Tensor) else told[0]).reshape(len(found))

    both = (torch.split(images.clamp(0, 1), IMAGES_PER_BATCH) for images in (found, true))
    parts = zip(*both, strict=True)
    return 100 * torch.cat([each(*part) for part in parts]).double()


def psnr(found: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Peak signal-to-noise ratio, ``10 log10(1 / MSE)`` in dB: ``(N, C, H, W)`` twice to ``(N,)``.

    The mean is over all pixels of all channels. 100 dB where images are equal, or as good as.

    >>> round(psnr(torch.full((1, 1, 8, 8), 0.5), torch.full((1, 1, 8, 8), 0.4)).item(), 2)
    20.0
    """
    error = _squared_error(found, true) / true[0].numel()
    return -10 * error.clamp_min(MIN_SQUARED_ERROR).log10()


def nmse(found: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Normalized mean squared error, ``|x - y|^2 / |y|^2``: ``(N, 1, H, W)`` twice to ``(N,)``.

    Of each image (fastMRI's is of each volume). NaN where the true image is black.
    """
    energy = true.double().square().flatten(1).sum(1)
    return torch.where(energy > 0, _squared_error(found, true) / energy, torch.nan)


def _squared_error(found: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Summed squared differences of each image, ``(N,)`` float64."""
    return (found.double().clamp(0, 1) - true.double()).square().flatten(1).sum(1)


# --- k-space ---


@lru_cache(maxsize=32)  # nobody changes what it gives
def kspace_mask(width: int, acceleration: int, center: float, seed: int = MASK_SEED) -> torch.Tensor:
    """Which of ``width`` lines of k-space are measured: ``(width,)`` bool, the zero frequency in the middle.

    One line in ``acceleration`` is; a share ``center`` of all, in the middle, always, the others by ``seed``.

    Raises:
        ArgumentError: the center alone has more lines than may be measured.

    >>> mask = kspace_mask(64, 4, 0.08)
    >>> int(mask.sum()), mask[30:35].tolist()
    (16, [True, True, True, True, True])
    """
    measured, middle = max(round(width / acceleration), 1), round(width * center)
    if middle > measured:
        allowed = f"up to {measured / width:.3g}, as one line of {acceleration} is measured"
        raise ArgumentError("task.center", center, allowed)
    mask = torch.zeros(width, dtype=torch.bool)
    first = (width - middle + 1) // 2
    mask[first : first + middle] = True
    others = torch.nonzero(~mask).flatten()
    order = torch.randperm(len(others), generator=torch_generator(seed, "k-space", width, acceleration))
    mask[others[order[: measured - middle]]] = True
    return mask


@lru_cache(maxsize=32)  # moved once: a GPU records no copies from the CPU
def _kspace_mask_on(device: torch.device, width: int, acceleration: int, center: float) -> torch.Tensor:
    return kspace_mask(width, acceleration, center).to(device)


def undersample(images: torch.Tensor, measured: torch.Tensor) -> torch.Tensor:
    """The zero-filled image, ``|F^-1(mask F(x))|``, of pixels ``(..., H, W)`` from 0 and lines ``(W,)``.

    Differentiable; F is orthonormal, so that nothing gets more energy than it had.
    """
    keep = torch.fft.ifftshift(measured).to(images.device)  # zero frequency first, as torch has it
    found: torch.Tensor = torch.fft.ifft2(torch.fft.fft2(images, norm="ortho") * keep, norm="ortho").abs()
    return found


# --- the task ---


class Reconstruction(NumericTask):
    """Outputs are images ``(B, 1, H, W)``, and so are targets; the loss is L1, as in FL-MRCM and FedAD.

    Args:
        classes: channels of an output, 1.
        acceleration: one line of k-space of so many is measured.
        center: the share of lines in the middle that always is.

    Raises:
        ArgumentError: other classes than 1.
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
            raise ArgumentError("classes", classes, "1 for task reconstruction: a model gives one image")
        super().__init__(classes)
        self.acceleration, self.center = acceleration, center

    def check(self, data: TensorData, what: str) -> None:
        """Refuse anything but images ``(N, 1, H, W)`` in -1..1, H and W 8 or more, with their undersampled
        twins.

        Raises:
            DataError: naming the first fault; begins with ``what``.
        """
        check_inputs(data, what)
        check_inputs(TensorData(data.targets, data.inputs), f"{what}: targets as inputs")
        if data.inputs.shape != data.targets.shape or data.inputs.shape[1] != 1:
            pair = f"{tuple(data.inputs.shape)} and {tuple(data.targets.shape)}"
            raise DataError(f"{what}: inputs and targets are {pair} (expected equal ones, (N, 1, H, W))")
        height, width = data.inputs.shape[2:]
        if min(height, width) < 8:
            raise DataError(f"{what}: images are {height} x {width} (expected 8 x 8 or more)")
        least, most = data.targets.aminmax()
        if least < -1 - RANGE_TOLERANCE or most > 1 + RANGE_TOLERANCE:
            raise DataError(
                f"{what}: targets lie in {least:.3g}..{most:.3g} (expected -1 (black) to 1 (white))"
            )

    # --- local training ---

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        """Mean absolute difference (L1) of G models: ``(G, B, 1, H, W)`` twice to ``(G,)``.

        There are no labels to smooth.
        """
        each: torch.Tensor = (outputs - targets).abs().flatten(1).mean(1)
        return each

    # --- FedIOD: answers of K nodes ---

    def distillation_loss(self, student: torch.Tensor, target: torch.Tensor, tau: float) -> torch.Tensor:
        """Mean absolute difference ``(B,)``, the loss of local training; for infinite ``tau`` half the mean
        squared one, the l2 limit that a distance of logits has there."""
        difference = (student - target).flatten(1)
        return 0.5 * difference.square().mean(1) if math.isinf(tau) else difference.abs().mean(1)

    # --- evaluation ---

    def compute_metrics(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None = None
    ) -> Mapping[str, float]:
        """SSIM (percent), PSNR (dB) and NMSE of each image, averaged over images; pixels are cut to 0..1.

        NMSE leaves black images out, and is NaN where all are.
        """
        found, true = to_pixels(outputs), to_pixels(targets)
        return {
            "ssim": ssim(found, true).mean().item(),
            "psnr": psnr(found, true).mean().item(),
            "nmse": nmse(found, true).nanmean().item(),
        }

    def case_scores(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None = None
    ) -> torch.Tensor | None:
        """Mean SSIM of each case that there is an example of, by number: ``(cases,)``."""
        each = ssim(to_pixels(outputs), to_pixels(targets)).cpu()
        return mean_by_group(each, *case_indices(len(each), cases))

    def bootstrap_metric(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None, weights: Floats
    ) -> Floats | None:
        """See :meth:`Task.bootstrap_metric`; every image counts by itself, as in SSIM's mean."""
        return super().bootstrap_metric(outputs, targets, None, weights)

    # --- inputs made to order ---

    def observe(self, x: torch.Tensor) -> torch.Tensor:
        """The zero-filled twin of images ``(..., 1, H, W)``, in their scale, differentiably."""
        measured = _kspace_mask_on(x.device, x.shape[-1], self.acceleration, self.center)
        return (undersample(to_pixels(x), measured) - MEAN) / STD

    def real_images(self, data: TensorData) -> torch.Tensor:
        """The whole images."""
        return data.targets

    def label_maps(self, data: TensorData) -> torch.Tensor:
        """The outline of each head: ``(N, H, W)`` uint8, 1 inside. Private: a release."""
        return body_mask(data.targets)

    def encode_maps(self, maps: torch.Tensor) -> torch.Tensor:
        """Outlines ``(..., H, W)`` to ``(..., 2, H, W)``: outside, inside; 1 where that holds and -1 else."""
        inside = maps.ne(0).float()
        return torch.stack([1 - 2 * inside, 2 * inside - 1], -3)

    def targets_from_maps(self, maps: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The images themselves: what a network should give where it sees them undersampled."""
        return x

    def sample_maps(self, count: int, height: int, width: int, generator: torch.Generator) -> torch.Tensor:
        """Heads from above, roughly: ``(count, H, W)`` uint8."""
        return sample_body_regions(count, height, width, 0, generator)


def to_pixels(images: torch.Tensor) -> torch.Tensor:
    """Normalized images as pixels, 0 black and 1 white."""
    return images * STD + MEAN


@dataclass(frozen=True, kw_only=True)
class ReconstructionConfig(TaskConfig):
    """Images from too few measurements."""

    task_class = Reconstruction

    acceleration: Annotated[int, Ge(2)] = ACCELERATION
    """One of so many lines of k-space is measured."""

    center: Annotated[float, Interval(ge=0, lt=1)] = CENTER_SHARE
    """The share of lines in the middle of k-space that are always measured."""
