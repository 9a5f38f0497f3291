"""Gradient inversion: images whose gradient, or whose update, is the one that a node released.

Three attacks, which are three settings of one search (:data:`DLG`, :data:`IDLG`, :data:`INVERTING`):

- DLG: Zhu, Liu, Han, "Deep Leakage from Gradients", NeurIPS 2019: squared distance of gradients, L-BFGS,
  labels sought together with the images.
- iDLG: Zhao, Mopuri, Bilen, "iDLG: Improved Deep Leakage from Gradients", arXiv:2001.02610: the label is read
  off the last layer's gradient. For batches how often each class occurs, from the bias, as in Geng et al.,
  "Towards General Deep Leakage in Federated Learning", arXiv:2110.09074.
- Inverting gradients: Geiping, Bauermeister, Droege, Moeller, "Inverting Gradients", NeurIPS 2020: one minus
  the cosine, total variation, Adam on the sign of the slope, pixels kept in their range.

The search ends with the restart of least loss: an adversary has no truth to choose by.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import torch
from torch import nn

from fedstill.attacks.recovered import PIXELS, Pixels, Recovered
from fedstill.attacks.updates import Observed, Tensors
from fedstill.core.errors import ArgumentError
from fedstill.core.seeds import torch_generator

INNER = 20  # iterations of one L-BFGS step, as DLG's published code has it
DONE = 1e-9  # relative squared distance at which images are known to far more than 8 bits


@dataclass(frozen=True)
class InversionConfig:
    """How images are sought."""

    distance: Literal["l2", "cosine"] = "l2"
    """Squared distance over the squared length of what was released, or one minus the cosine."""
    optimiser: Literal["lbfgs", "signed-adam"] = "lbfgs"
    """L-BFGS without bounds in float64, or Adam on signs of slopes with pixels kept in range."""
    labels: Literal["sought", "read"] = "sought"
    """Labels are unknowns, or are read off the last layer's gradient beforehand."""
    steps: int = 25
    """Of L-BFGS steps of 20 iterations each; of Adam plain ones."""
    lr: float = 1.0
    """Of Adam; a tenth after 3, 5 and 7 eighths of the steps. L-BFGS searches along its lines."""
    tv: float = 0.0
    """Weight of the total variation: mean absolute difference of neighbours, pixels from 0 to 1."""
    restarts: int = 1
    """Starts from other noise; the one with the least loss counts."""


DLG = InversionConfig(restarts=4)
IDLG = InversionConfig(labels="read", restarts=4)
INVERTING = InversionConfig("cosine", "signed-adam", "read", steps=1000, lr=0.1, tv=1e-2)
SEARCHES: Mapping[str, InversionConfig] = MappingProxyType({"dlg": DLG, "idlg": IDLG, "inverting": INVERTING})


def invert(
    release: Observed,
    shape: tuple[int, int, int],
    count: int,
    config: InversionConfig = DLG,
    *,
    pixels: Pixels = PIXELS,
    seed: int = 0,
    labels: torch.Tensor | None = None,
) -> Recovered:
    """Seek the images behind a release.

    Args:
        release: what left the node, and how it follows from images.
        shape: ``(C, H, W)`` of an image.
        count: how many images, B.
        config: of the search.
        pixels: range of the images.
        seed: of the first images.
        labels: ``(B,)``, where they are known; else they are read or sought as the config says.

    Raises:
        ArgumentError: labels are to be read, and the last layer was not shared.
    """
    if labels is None and config.labels == "read":
        labels = read_labels(release, shape, count, pixels=pixels, seed=seed)
    precise = _double(release)
    kept: list[Recovered] = []
    for restart in range(config.restarts):
        draw = torch_generator(seed, "inversion", restart)
        first = torch.randn(count, *shape, generator=draw, dtype=torch.float64)
        by_lines = config.optimiser == "lbfgs"
        sought = _sought(precise, first if by_lines else pixels.kept(first), labels, config, pixels, draw)
        found = (_lbfgs if by_lines else _signed_adam)(sought, config, pixels)
        kept.append(found)
        if found.loss < DONE:
            break
    # A search that has left all bounds ends without a loss, and counts as the worst.
    best = min(kept, key=lambda found: math.inf if math.isnan(found.loss) else found.loss)
    return replace(best, images=best.images.to(next(iter(release.target.values())).dtype))


def read_labels(
    release: Observed, shape: tuple[int, int, int], count: int, *, pixels: Pixels = PIXELS, seed: int = 0
) -> torch.Tensor:
    """Labels, ascending, from the last layer's gradient: ``(B,)`` int64.

    With cross-entropy, the slope of a class's bias is the mean of ``p_c - y_c``, and that of its row of
    weights the mean of ``(p_c - y_c) f``. One image: its class alone has a negative one (iDLG). More: each
    class occurs ``B (p_c - slope)`` times, with p from the network's answer to noise in the pixels' range.

    Raises:
        ArgumentError: no last layer in what was released, or, for more than one image, no bias.
    """
    linear = [name for name, module in release.model.named_modules() if isinstance(module, nn.Linear)]
    slopes = release.mean_gradient()
    last = linear[-1] if linear else ""
    weight, bias = (f"{last}.{kind}" if last else kind for kind in ("weight", "bias"))
    if bias in slopes:
        slope = slopes[bias]  # (classes,)
    elif weight in slopes and count == 1:
        slope = slopes[weight].sum(1)
    else:
        needed = f"one with {bias}" + (f" or {weight}" if count == 1 else "")
        raise ArgumentError("release", sorted(slopes), needed)
    if count == 1:
        return slope.argmin().view(1)
    noise = torch.rand(64, *shape, generator=torch_generator(seed, "inversion", "labels")).to(slope)
    images = pixels.low + noise * (pixels.high - pixels.low)
    model = copy.deepcopy(release.model).train(release.training)
    with torch.no_grad():
        p = model(images).softmax(1).mean(0)
    spread = release.smoothing / len(p)
    return torch.repeat_interleave(
        torch.arange(len(p)), _whole(count * (p - slope - spread) / (1 - release.smoothing), count)
    )


def _whole(shares: torch.Tensor, total: int) -> torch.Tensor:
    """Whole numbers with a given sum, close to shares: the class that lacks most gets the next.

    >>> _whole(torch.tensor([1.4, 0.8, -0.2]), 2).tolist()
    [1, 1, 0]
    """
    counts = torch.zeros(len(shares), dtype=torch.int64)
    for _ in range(total):
        counts[(shares - counts).argmax()] += 1
    return counts


def _double(release: Observed) -> Observed:
    model = copy.deepcopy(release.model).double()
    return replace(
        release, model=model, target={name: value.double() for name, value in release.target.items()}
    )


def distance(found: Tensors, target: Tensors, how: str) -> torch.Tensor:
    """How far gradients are from those released, all as one vector each, whatever its length.

    >>> a, b = {"w": torch.tensor([3.0, 0.0])}, {"w": torch.tensor([0.0, 1.0])}
    >>> distance(a, b, "l2").item(), distance(a, b, "cosine").item()
    (10.0, 1.0)
    """
    length = sum_squares(target)
    if how == "l2":
        return sum_squares({name: found[name] - target[name] for name in target}) / length
    inner = torch.stack([(found[name] * target[name]).sum() for name in target]).sum()
    return 1 - inner / (length * sum_squares(found)).clamp(min=1e-60).sqrt()


def sum_squares(tensors: Tensors) -> torch.Tensor:
    """Squared length of all tensors as one vector."""
    return torch.stack([value.square().sum() for value in tensors.values()]).sum()


def total_variation(images: torch.Tensor) -> torch.Tensor:
    """Mean absolute difference of neighbours, down and across, summed.

    >>> total_variation(torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]])).item()
    1.0
    """
    down, across = images.diff(dim=-2).abs().mean(), images.diff(dim=-1).abs().mean()
    return down + across


@dataclass(frozen=True)
class _Sought:
    """What a search moves, and what it makes small."""

    x: torch.Tensor  # (B, C, H, W)
    guesses: torch.Tensor  # logits of labels (B, classes); empty where labels are known
    labels: torch.Tensor | None
    loss: Callable[[], torch.Tensor]

    @property
    def unknown(self) -> list[torch.Tensor]:
        return [self.x] if self.labels is not None else [self.x, self.guesses]

    def ended(self, images: torch.Tensor) -> Recovered:
        classes = self.guesses.detach().argmax(1) if self.labels is None else self.labels
        return Recovered(images, classes, float(self.loss().detach()))


def _sought(
    release: Observed,
    first: torch.Tensor,
    labels: torch.Tensor | None,
    config: InversionConfig,
    pixels: Pixels,
    draw: torch.Generator,
) -> _Sought:
    x = first.requires_grad_()
    guesses = _guesses(release, len(first), labels, draw)

    def loss() -> torch.Tensor:
        found = release.of(x, guesses.softmax(1) if labels is None else labels)
        value = distance(found, release.target, config.distance)
        return value + config.tv * total_variation(pixels.unit(x)) if config.tv else value

    return _Sought(x, guesses, labels, loss)


def _lbfgs(sought: _Sought, config: InversionConfig, pixels: Pixels) -> Recovered:
    optimiser = torch.optim.LBFGS(
        sought.unknown,
        max_iter=INNER,
        history_size=100,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> torch.Tensor:
        value = sought.loss()
        slopes = torch.autograd.grad(value, sought.unknown)
        for own, slope in zip(sought.unknown, slopes, strict=True):
            own.grad = slope
        return value

    last = math.inf
    for _ in range(config.steps):
        value = float(optimiser.step(closure).detach())  # type: ignore[no-untyped-call]
        if not value < last or value < DONE:  # it stands still, or is lost
            break
        last = value
    return sought.ended(pixels.kept(sought.x.detach()))


def _signed_adam(sought: _Sought, config: InversionConfig, pixels: Pixels) -> Recovered:
    optimiser = torch.optim.Adam(sought.unknown, config.lr)
    falls = [config.steps * eighths // 8 for eighths in (3, 5, 7)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, falls)
    for _ in range(config.steps):
        slope, *others = torch.autograd.grad(sought.loss(), sought.unknown)
        sought.x.grad = slope.sign()
        if others:
            sought.guesses.grad = others[0]
        optimiser.step()
        schedule.step()
        with torch.no_grad():
            sought.x.copy_(pixels.kept(sought.x))
    return sought.ended(sought.x.detach())


def _guesses(
    release: Observed, count: int, labels: torch.Tensor | None, draw: torch.Generator
) -> torch.Tensor:
    """Logits of labels that are sought: ``(B, classes)``; empty where labels are known."""
    if labels is not None:
        return torch.empty(count, 0)
    linear = [module for module in release.model.modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise ArgumentError("release.model", type(release.model).__name__, "a network with a linear layer")
    guesses = torch.randn(count, linear[-1].out_features, generator=draw, dtype=torch.float64)
    return guesses.requires_grad_()
