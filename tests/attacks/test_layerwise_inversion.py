"""Layer-by-layer inversion of networks with max pooling, for which gradient matching fails."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedstill.attacks import layerwise_inversion
from fedstill.attacks.gradient_matching import IDLG, invert
from fedstill.attacks.layerwise_inversion import factor_gradient, invert_layers
from fedstill.attacks.simulated_updates import ModelPart, ObservedUpdate, shared_parameter_names
from fedstill.core.errors import ArgumentError
from fedstill.data import load, make_data_config
from fedstill.models import build
from fedstill.models.extractor_head import split_model
from tests.support.runs import PACKS, make_release, needs_fashion


def fashion(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    data = load(make_data_config("fashion-mnist", root=str(PACKS))).train
    return data.inputs[first : first + count], data.targets[first : first + count]


def with_other_extractor(release: ObservedUpdate, extractor: nn.Module) -> ObservedUpdate:
    """Replace the extractor of the release, as if the adversary did not know that of the node."""
    model = copy.deepcopy(release.model)
    split_model(model, "model").extractor.load_state_dict(
        split_model(extractor, "other").extractor.state_dict()
    )
    return replace(release, model=model)


def images_(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 1, 28, 28, generator=generator) * 2 - 1, torch.arange(count) % 10


def max_row_error(estimate: torch.Tensor, true: torch.Tensor) -> float:
    """Return the largest relative distance of a true row from the nearest recovered row."""
    return float(((estimate[:, None] - true).norm(dim=2) / true.norm(dim=1)).amin(0).max())


# --- exact results without optimization -----------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_factorizes_gradient_exactly(count: int, precision: torch.dtype) -> None:
    inputs, targets = images_(count)
    model = build("lenet5", (1, 28, 28), 10, 0).to(precision)
    release = make_release(model, inputs.to(precision), targets)
    factors, deltas = factor_gradient(release.target["7.weight"], release.target["7.bias"], count)
    true = split_model(model, "model").extractor(inputs.to(precision)).detach().double()
    assert max_row_error(factors, true) < 1e-4
    assert int((factors > 0).sum()) == int((true > 0).sum()), "rounding must not activate units"
    torch.testing.assert_close(deltas.sum(0), release.target["7.bias"].double(), rtol=0, atol=1e-6)


def test_factors_by_hand() -> None:
    inputs = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 1.0]])
    slopes = torch.tensor([[1.0, 2.0, 0.0, 0.0, -1.0], [0.0, 0.0, 4.0, -2.0, 1.0]])
    factors, deltas = factor_gradient(slopes.T @ inputs, slopes.sum(0), 2)
    assert max_row_error(factors, inputs.double()) < 1e-6
    assert max_row_error(deltas, slopes.double()) < 1e-6


def test_rejects_more_images_than_gradient_rank() -> None:
    with pytest.raises(ArgumentError, match="invalid count = 2"):
        factor_gradient(torch.ones(4, 3), torch.ones(4), 2)


def test_rejects_gradients_without_zeros() -> None:
    draw = torch.Generator().manual_seed(0)
    slopes, inputs = torch.randn(2, 30, generator=draw), torch.rand(2, 40, generator=draw)
    with pytest.raises(ArgumentError, match=r"invalid count = 2.*zeros"):
        factor_gradient(slopes.T @ inputs, slopes.sum(0), 2)


@pytest.mark.parametrize("part", ["all", "head"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_recovers_label_of_each_image(part: ModelPart, smoothing: float) -> None:
    inputs, _ = images_(5)
    targets = torch.tensor([3, 0, 9, 3, 1])
    model = build("lenet5", (1, 28, 28), 10, 0)
    release = make_release(model, inputs, targets, part, smoothing)
    factors, deltas = factor_gradient(release.target["7.weight"], release.target["7.bias"], 5)
    true = split_model(model, "model").extractor(inputs).detach().double()
    order = (factors[:, None] - true).norm(dim=2).argmin(0)
    assert layerwise_inversion._infer_labels(release, factors, deltas)[order].equal(targets)


# --- smoothed network -----------------------------------------------------------------------------


def test_sharp_network_matches_original() -> None:
    inputs, targets = images_(3)
    model = build("lenet5", (1, 28, 28), 10, 0).double()
    x = inputs.double()
    release = make_release(model, x, targets)
    blocks, linear = layerwise_inversion._find_blocks(model, x)
    assert linear == "7"
    outputs = layerwise_inversion._outputs(blocks, x)
    torch.testing.assert_close(outputs.flatten(1), split_model(model, "model").extractor(x).detach())
    features = outputs.flatten(1).requires_grad_()
    loss = nn.functional.cross_entropy(split_model(model, "model").head(features), targets)
    (pulls,) = torch.autograd.grad(loss, features)
    slopes = tuple(release.target[name] for name in shared_parameter_names(model, "extractor"))
    known = layerwise_inversion._KnownBlockTensors(outputs, pulls.view_as(outputs), slopes)
    assert float(layerwise_inversion._mismatch(blocks, x, known, 1e7)) < 1e-8
    assert float(layerwise_inversion._mismatch(blocks, x, known, 1.0)) > 0.1
    assert float(layerwise_inversion._mismatch(blocks, x.flip(0), known, 1e7)) > 0.1


# --- strength -------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_fashion
def test_recovers_more_than_gradient_matching() -> None:
    model = build("lenet5", (1, 28, 28), 10, 0)
    image, label = fashion(6, 1)
    release = make_release(model, image, label)
    strong = invert_layers(release, (1, 28, 28), 1, steps=300).against(image)
    weak = invert_layers(release, (1, 28, 28), 1, steps=40).against(image)
    plain = invert(release, (1, 28, 28), 1, replace(IDLG, restarts=1, steps=10)).against(image)
    assert strong.labels.equal(label)
    assert strong.psnr[0] > 30
    assert weak.psnr[0] < 17
    assert plain.psnr[0] < 13


@pytest.mark.slow
@needs_fashion
def test_recovers_batch() -> None:
    images, targets = fashion(20, 2)
    release = make_release(build("lenet5", (1, 28, 28), 10, 0), images, targets)
    recovery = invert_layers(release, (1, 28, 28), 2, steps=400).against(images)
    assert sum(recovery.psnr) / 2 > 17, recovery.psnr
    assert recovery.labels.equal(targets)


@pytest.mark.slow
@needs_fashion
def test_head_alone_leaks_more_with_wider_extractor() -> None:
    images, targets = fashion(0, 3)
    got: dict[str, float] = {}
    for width in (6, 24):
        model, other = (build(f"lenet5:{width}", (1, 28, 28), 10, seed) for seed in (0, 1))
        release = make_release(model, images, targets, "head")
        for known, view in {"known": release, "another": with_other_extractor(release, other)}.items():
            if (width, known) != (6, "another"):
                recovery = invert_layers(view, (1, 28, 28), 3, steps=120).against(images)
                got[f"{known} {width}"] = sum(recovery.psnr) / 3
    assert got["known 24"] > 17
    assert got["another 24"] + 1.5 < got["known 6"] < got["known 24"] - 5
    assert got["another 24"] < 9


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sigmoid-lenet", "small-cnn:4", "mlp:8", "resnet8:4"])
def test_rejects_unsupported_networks(name: str) -> None:
    inputs, targets = images_(1)
    release = make_release(build(name, (1, 28, 28), 10, 0), inputs, targets)
    with pytest.raises(ArgumentError, match=r"invalid release.model = .*Conv2d, ReLU, MaxPool2d"):
        invert_layers(release, (1, 28, 28), 1)
