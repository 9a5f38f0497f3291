"""Gradient matching: search for images whose gradient, or update, is the one that a node released.

Three attacks are three configurations of one search (:data:`SEARCHES`):

- DLG: Zhu, Liu, Han, "Deep Leakage from Gradients", NeurIPS 2019: squared distance of gradients, L-BFGS,
  labels searched together with the images.
- iDLG: Zhao, Mopuri, Bilen, "iDLG: Improved Deep Leakage from Gradients", arXiv:2001.02610: the label is
  read from the last layer's gradient. In batches, the frequency of each class is read from the bias, as in
  Geng et al., "Towards General Deep Leakage in Federated Learning", arXiv:2110.09074.
- Inverting gradients: Geiping, Bauermeister, Droege, Moeller, "Inverting Gradients", NeurIPS 2020: one
  minus the cosine, total variation, Adam on the sign of the input gradient, pixels clamped to their range.

The result is the restart with the smallest loss, as an adversary does not know the truth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import torch
from torch import nn

from fedstill.attacks.simulated_updates import ObservedUpdate
from fedstill.core.errors import ArgumentError
from fedstill.core.seeds import torch_generator
from fedstill.models.module_utils import deep_copy
from fedstill.protocol.wire_format import Tensors
from fedstill.tasks import reconstruction

LBFGS_ITERATIONS = 20  # in one step, as in DLG's published code
ADAM_LR = 0.1  # divided by 10 after 3, 5 and 7 eighths of the steps
CONVERGED_LOSS = 1e-9  # relative squared distance at which images are exact to far more than 8 bits
LossFunction = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class PixelRange:
    """Range of normalized pixels: numbers, or one per channel ``(C, 1, 1)``."""

    low: float | torch.Tensor = -1.0
    high: float | torch.Tensor = 1.0

    @classmethod
    def from_normalization(cls, mean: torch.Tensor, std: torch.Tensor) -> PixelRange:
        """Return the range of images normalized by mean and std."""
        return cls((0 - mean) / std, (1 - mean) / std)

    def to_unit(self, images: torch.Tensor) -> torch.Tensor:
        """Scale images to 0 .. 1, for display and metrics."""
        return (images - self.low) / (self.high - self.low)

    def clamp(self, images: torch.Tensor) -> torch.Tensor:
        """Clamp images to the range."""
        low, high = (torch.as_tensor(end).to(images) for end in (self.low, self.high))
        return images.maximum(low).minimum(high)

    def to_bytes(self, images: torch.Tensor) -> torch.Tensor:
        """Convert images to bytes, uint8."""
        return self.to_unit(images.detach().cpu()).clamp(0, 1).mul(255).round().to(torch.uint8).contiguous()


DEFAULT_PIXELS = PixelRange()  # of inputs with the default normalization


@dataclass(frozen=True)
class RecoveredImages:
    """Result of an attack.

    Args:
        images: ``(B, C, H, W)`` in the pixels' range.
        labels: ``(B,)`` int64.
        loss: final loss of the search, which compares restarts.
        psnr: dB of each image against the true one; empty before :meth:`against`.
    """

    images: torch.Tensor
    labels: torch.Tensor
    loss: float
    psnr: tuple[float, ...] = ()

    def against(self, true: torch.Tensor, pixels: PixelRange = DEFAULT_PIXELS) -> RecoveredImages:
        """Match the images to the true ones ``(B, C, H, W)``, and add their PSNR."""
        from scipy.optimize import linear_sum_assignment  # heavy

        errors = (true.flatten(1)[:, None].double() - self.images.flatten(1).double()).square().sum(2)
        order = torch.from_numpy(linear_sum_assignment(errors.cpu().numpy())[1])
        images = self.images[order]
        return RecoveredImages(
            images, self.labels[order], self.loss, tuple(psnr(images, true, pixels).tolist())
        )


@dataclass(frozen=True)
class ImageSearchConfig:
    """Options of the search for images."""

    cosine: bool = False
    """True: one minus the cosine, by Adam on gradient signs with pixels clamped to their range. False:
    squared distance divided by the squared length of the release, by L-BFGS without bounds. In float64.
    """
    labels: Literal["sought", "read"] = "sought"
    """sought: labels are unknowns of the search. read: labels are read from the last layer's gradient."""
    steps: int = 25
    """Number of L-BFGS steps of 20 iterations each, or of Adam steps."""
    tv: float = 0.0
    """Weight of the total variation: mean absolute difference of neighbors, pixels from 0 to 1."""
    restarts: int = 1
    """Number of starts from different noise; the one with the smallest loss is used."""


DLG = ImageSearchConfig(restarts=4)
IDLG = ImageSearchConfig(labels="read", restarts=4)
INVERTING = ImageSearchConfig(True, "read", steps=1000, tv=1e-2)
SEARCHES: Mapping[str, ImageSearchConfig] = MappingProxyType(
    {"dlg": DLG, "idlg": IDLG, "inverting": INVERTING}
)


def invert(
    release: ObservedUpdate,
    shape: tuple[int, int, int],
    count: int,
    config: ImageSearchConfig = DLG,
    *,
    pixels: PixelRange = DEFAULT_PIXELS,
    seed: int = 0,
    labels: torch.Tensor | None = None,
) -> RecoveredImages:
    """Search for the images behind a release.

    Args:
        release: gradient or update, and the network.
        shape: ``(C, H, W)`` of an image.
        count: number of images, B.
        config: options of the search.
        pixels: range of the images.
        seed: of the initial noise.
        labels: ``(B,)``, if they are known; else they are read or searched, by the config.

    Raises:
        ArgumentError: labels are to be read, but the last layer was not released.
    """
    if labels is None and config.labels == "read":
        labels = read_labels(release, shape, count, pixels=pixels, seed=seed)
    target = {name: value.double() for name, value in release.target.items()}
    double_release = replace(release, model=deep_copy(release.model).double(), target=target)
    candidates: list[RecoveredImages] = []
    for restart in range(config.restarts):
        generator = torch_generator(seed, "inversion", restart)
        candidates.append(_search(double_release, (count, *shape), labels, config, pixels, generator))
        if candidates[-1].loss < CONVERGED_LOSS:
            break
    # A diverged search has the loss NaN, and counts as the worst.
    best = min(candidates, key=lambda candidate: math.inf if math.isnan(candidate.loss) else candidate.loss)
    return replace(best, images=best.images.to(next(iter(release.target.values())).dtype))


def _search(
    release: ObservedUpdate,
    shape: tuple[int, int, int, int],
    labels: torch.Tensor | None,
    config: ImageSearchConfig,
    pixels: PixelRange,
    generator: torch.Generator,
) -> RecoveredImages:
    initial = torch.randn(shape, generator=generator, dtype=torch.float64)
    x = (pixels.clamp(initial) if config.cosine else initial).requires_grad_()
    unknowns = [x]
    if labels is None:
        classes = _last_linear(release.model)[1].out_features
        guesses = torch.randn(shape[0], classes, generator=generator, dtype=torch.float64)
        unknowns.append(guesses.requires_grad_())

    def loss() -> torch.Tensor:
        gradients = release.compute_target(x, unknowns[1].softmax(1) if labels is None else labels)
        value = gradient_distance(gradients, release.target, cosine=config.cosine)
        return value + config.tv * total_variation(pixels.to_unit(x)) if config.tv else value

    if config.cosine:
        _run_signed_adam(unknowns, loss, config.steps, pixels)
    else:
        _run_lbfgs(unknowns, loss, config.steps)
    found_labels = unknowns[1].detach().argmax(1) if labels is None else labels
    return RecoveredImages(pixels.clamp(x.detach()), found_labels, float(loss().detach()))


def _run_lbfgs(unknowns: list[torch.Tensor], loss: LossFunction, steps: int) -> None:
    optimizer = torch.optim.LBFGS(
        unknowns,
        max_iter=LBFGS_ITERATIONS,
        history_size=100,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> torch.Tensor:
        value = loss()
        for tensor, gradient in zip(unknowns, torch.autograd.grad(value, unknowns), strict=True):
            tensor.grad = gradient
        return value

    previous = math.inf
    for _ in range(steps):
        value = float(optimizer.step(closure).detach())  # type: ignore[no-untyped-call]
        if not value < previous or value < CONVERGED_LOSS:  # no progress, divergence, or convergence
            break
        previous = value


def _run_signed_adam(
    unknowns: list[torch.Tensor], loss: LossFunction, steps: int, pixels: PixelRange
) -> None:
    x, *guesses = unknowns
    optimizer = torch.optim.Adam(unknowns, ADAM_LR)
    milestones = [steps * eighths // 8 for eighths in (3, 5, 7)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones)
    for _ in range(steps):
        input_gradient, *label_gradients = torch.autograd.grad(loss(), unknowns)
        x.grad = input_gradient.sign()
        for tensor, gradient in zip(guesses, label_gradients, strict=True):
            tensor.grad = gradient
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            x.copy_(pixels.clamp(x))


def read_labels(
    release: ObservedUpdate,
    shape: tuple[int, int, int],
    count: int,
    *,
    pixels: PixelRange = DEFAULT_PIXELS,
    seed: int = 0,
) -> torch.Tensor:
    """Read labels from the last layer's gradient: ``(B,)`` int64, ascending.

    With cross-entropy, the gradient of a class's bias is the mean of ``p_c - y_c``, and that of its row of
    weights the mean of ``(p_c - y_c) f``. For one image, only the true class has a negative one (iDLG). In
    a batch, each class occurs ``B (p_c - gradient)`` times, with p from the network's outputs for noise in
    the pixels' range.

    Raises:
        ArgumentError: the release does not hold the last layer, or, for more than one image, no bias.
    """
    layer, gradients, schedule = _last_linear(release.model)[0], release.mean_gradient(), release.schedule
    weight, bias = (f"{layer}.{kind}" for kind in ("weight", "bias"))
    if bias in gradients:
        gradient = gradients[bias]  # (classes,)
    elif weight in gradients and count == 1:
        gradient = gradients[weight].sum(1)
    else:
        needed = f"one with {bias}" + (f" or {weight}" if count == 1 else "")
        raise ArgumentError("release", sorted(gradients), needed)
    if count == 1:
        return gradient.argmin().view(1)
    noise = torch.rand(64, *shape, generator=torch_generator(seed, "inversion", "labels")).to(gradient)
    model = deep_copy(release.model).train()
    with torch.no_grad():
        p = model(pixels.low + noise * (pixels.high - pixels.low)).softmax(1).mean(0)
    shares = count * (p - gradient - schedule.smoothing / len(p)) / (1 - schedule.smoothing)
    return torch.repeat_interleave(torch.arange(len(p)), _round_counts(shares, count))


def _last_linear(model: nn.Module) -> tuple[str, nn.Linear]:
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise ArgumentError("release.model", type(model).__name__, "a network with a linear layer")
    return linear[-1]


def _round_counts(shares: torch.Tensor, total: int) -> torch.Tensor:
    """Round shares to integers with a given sum: the class with the largest deficit is incremented next.

    >>> _round_counts(torch.tensor([1.4, 0.8, -0.2]), 2).tolist()
    [1, 1, 0]
    """
    counts = torch.zeros(len(shares), dtype=torch.int64)
    for _ in range(total):
        counts[(shares - counts).argmax()] += 1
    return counts


def psnr(recovered: torch.Tensor, true: torch.Tensor, pixels: PixelRange = DEFAULT_PIXELS) -> torch.Tensor:
    """Peak signal-to-noise ratio of each image, ``(B,)`` dB, at most 100, after scaling to [0, 1].

    >>> gray, darker = torch.full((1, 3, 2, 2), 0.5), torch.full((1, 3, 2, 2), 0.4)
    >>> [round(value, 4) for value in psnr(darker, gray, PixelRange(0.0, 1.0)).tolist()]
    [20.0]
    """
    return reconstruction.psnr(pixels.to_unit(recovered.double()), pixels.to_unit(true.double()))


def gradient_distance(gradients: Tensors, target: Tensors, *, cosine: bool) -> torch.Tensor:
    """Relative distance between gradients and the released ones, all parameters as one vector.

    >>> a, b = {"w": torch.tensor([3.0, 0.0])}, {"w": torch.tensor([0.0, 1.0])}
    >>> gradient_distance(a, b, cosine=False).item(), gradient_distance(a, b, cosine=True).item()
    (10.0, 1.0)
    """
    length = sum_squares(target)
    if not cosine:
        return sum_squares({name: gradients[name] - target[name] for name in target}) / length
    dot = torch.stack([(gradients[name] * target[name]).sum() for name in target]).sum()
    return 1 - dot / (length * sum_squares(gradients)).clamp(min=1e-60).sqrt()


def sum_squares(tensors: Tensors) -> torch.Tensor:
    return torch.stack([value.square().sum() for value in tensors.values()]).sum()


def total_variation(images: torch.Tensor) -> torch.Tensor:
    """Mean absolute difference of neighboring pixels, vertical plus horizontal.

    >>> total_variation(torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]])).item()
    1.0
    """
    down, across = images.diff(dim=-2).abs().mean(), images.diff(dim=-1).abs().mean()
    return down + across
