"""Layer by layer: what a network with max pooling gives away although matching its gradient fails."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fedstill.attacks import layers
from fedstill.attacks.inversion import IDLG, invert
from fedstill.attacks.layers import LayersConfig, factors, invert_layers
from fedstill.attacks.updates import Gradient, Part, gradients, shared
from fedstill.data import DataConfig, load
from fedstill.errors import ArgumentError
from fedstill.models import build
from fedstill.models.split import split

PACKS = Path(os.environ.get("FEDSTILL_DATA") or Path(__file__).parents[2].parent / "shared" / "data")
needs_fashion = pytest.mark.skipif(
    not (PACKS / "fashion_mnist.npz").is_file(), reason="needs fashion_mnist.npz in FEDSTILL_DATA"
)


def released(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, part: Part = "all") -> Gradient:
    own = {name: value.detach() for name, value in model.named_parameters()}
    found = gradients(model, own, inputs, targets, differentiable=False)
    return Gradient(model, {name: found[name] for name in shared(model, part)})


def pictures(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 1, 28, 28, generator=generator) * 2 - 1, torch.arange(count) % 10


def furthest(found: torch.Tensor, true: torch.Tensor) -> float:
    """How far, relatively, the true row is that none of the found ones is near."""
    return float(((found[:, None] - true).norm(dim=2) / true.norm(dim=1)).amin(0).max())


# --- what follows without any search --------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_features_and_slopes_of_each_image_follow_exactly(count: int, precision: torch.dtype) -> None:
    inputs, targets = pictures(count)
    model = build("lenet5", (1, 28, 28), 10, 0).to(precision)
    release = released(model, inputs.to(precision), targets)
    found, deltas = factors(release.target["7.weight"], release.target["7.bias"], count)
    true = split(model, "model").extractor(inputs.to(precision)).detach().double()
    assert furthest(found, true) < 1e-4
    torch.testing.assert_close(deltas.sum(0), release.target["7.bias"].double(), rtol=0, atol=1e-6)


def test_factors_by_hand() -> None:
    inputs = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 1.0]])
    slopes = torch.tensor([[1.0, 2.0, 0.0, 0.0, -1.0], [0.0, 0.0, 4.0, -2.0, 1.0]])
    found, deltas = factors(slopes.T @ inputs, slopes.sum(0), 2)
    assert furthest(found, inputs.double()) < 1e-6
    assert furthest(deltas, slopes.double()) < 1e-6


def test_more_images_than_the_gradient_has_directions_are_refused() -> None:
    with pytest.raises(ArgumentError, match="count is 2"):
        factors(torch.ones(4, 3), torch.ones(4), 2)


# --- the softened network -------------------------------------------------------------------------


def test_sharpened_it_is_the_network_and_its_gradient() -> None:
    inputs, targets = pictures(3)
    model = build("lenet5", (1, 28, 28), 10, 0).double()
    x = inputs.double()
    release = released(model, x, targets)
    blocks, linear = layers._parts(model, x)
    assert linear == "7"
    outputs = layers._outputs(blocks, x)
    torch.testing.assert_close(outputs.flatten(1), split(model, "model").extractor(x).detach())
    features = outputs.flatten(1).requires_grad_()
    loss = nn.functional.cross_entropy(split(model, "model").head(features), targets)
    (pulls,) = torch.autograd.grad(loss, features)
    slopes = tuple(release.target[name] for name in shared(model, "extractor"))
    known = layers._Known(outputs, pulls.view_as(outputs), slopes)
    assert float(layers._misfit(blocks, x, known, 1e7)) < 1e-8
    assert float(layers._misfit(blocks, x, known, 1.0)) > 0.1
    assert float(layers._misfit(blocks, x.flip(0), known, 1e7)) > 0.1


# --- strength -------------------------------------------------------------------------------------


@needs_fashion
def test_it_gets_what_matching_gradients_does_not_and_less_when_weakened() -> None:
    data = load(DataConfig(name="fashion-mnist", root=str(PACKS))).train
    model = build("lenet5", (1, 28, 28), 10, 0)
    image, label = data.inputs[6:7], data.targets[6:7]
    release = released(model, image, label)
    strong = invert_layers(release, (1, 28, 28), 1).against(image)
    weak = invert_layers(release, (1, 28, 28), 1, LayersConfig(steps=40)).against(image)
    plain = invert(release, (1, 28, 28), 1, replace(IDLG, restarts=1, steps=10)).against(image)
    assert strong.labels.equal(label)
    assert strong.psnr[0] > 20
    assert weak.psnr[0] < 17
    assert plain.psnr[0] < 13


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sigmoid-lenet", "small-cnn:4", "mlp:8", "resnet8:4"])
def test_other_networks_are_refused(name: str) -> None:
    inputs, targets = pictures(1)
    release = released(build(name, (1, 28, 28), 10, 0), inputs, targets)
    with pytest.raises(ArgumentError, match=r"release.model is .*Conv2d, ReLU, MaxPool2d"):
        invert_layers(release, (1, 28, 28), 1)


@pytest.mark.parametrize("part", ["extractor", "head"])
def test_a_part_of_the_gradient_is_refused(part: Part) -> None:
    inputs, targets = pictures(1)
    release = released(build("lenet5", (1, 28, 28), 10, 0), inputs, targets, part)
    with pytest.raises(ArgumentError, match="a gradient of all parameters"):
        invert_layers(release, (1, 28, 28), 1)


@pytest.mark.parametrize("values", [{"steps": 0}, {"lr": -1.0}, {"tv": float("nan")}])
def test_settings_that_mean_nothing_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ArgumentError, match=r"layers\."):
        LayersConfig(**values)  # type: ignore[arg-type]
