"""Networks: shapes, published sizes, seeded initial weights, and rejected names."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn

from fedstill.core.errors import ArgumentError, ModelError
from fedstill.models import MODELS, TEXT_MODELS, Generator, build, check_module

IMAGE = (1, 8, 8)
CLASSIFIERS = [
    name for name in MODELS.builtin if "unet" not in name and name not in TEXT_MODELS
]  # see test_unet.py


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


# --- classifiers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("side", [8, 12, 28, 32])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_networks_return_one_logit_per_class(name: str, side: int, channels: int) -> None:
    width = {"lenet5": ":6", "linear": "", "unit-linear": ""}.get(name, ":8")
    network = build(f"{name}{width}", (channels, side, side), 7, 0)
    assert network(torch.randn(2, channels, side, side)).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "layer"), [("small-cnn", 0), ("lenet5", 0), ("bn-lenet", 0), ("resnet8", 0)]
)
@pytest.mark.parametrize("width", [4, 12])
def test_width_sets_channels_of_first_convolution(name: str, layer: int, width: int) -> None:
    network = build(f"{name}:{width}", IMAGE, 3, 0)
    assert isinstance(network, nn.Sequential)
    assert network[layer].out_channels == width


def test_default_resnet8_has_published_size() -> None:
    network = build("resnet8", (3, 32, 32), 10, 0)
    assert isinstance(network, nn.Sequential)
    assert network[0].weight.shape == (128, 3, 3, 3)
    assert network[-1].in_features == 2048
    blocks = [
        128 * 3 * 9 + 2 * 128,  # first convolution and batch norm
        2 * (128 * 128 * 9 + 2 * 128),  # 128 -> 128, identity shortcut
        256 * 128 * 9 + 256 * 256 * 9 + 256 * 128 + 3 * 2 * 256,  # 128 -> 256, 1x1 shortcut
        512 * 256 * 9 + 512 * 512 * 9 + 512 * 256 + 3 * 2 * 512,  # 256 -> 512
        2048 * 10 + 10,
    ]
    assert count_parameters(network) == sum(blocks)


def test_batch_norm_lenet_matches_published_code() -> None:
    network = build("bn-lenet", (1, 28, 28), 10, 0)
    assert isinstance(network, nn.Sequential)
    assert network[4].weight.shape == (32, 16, 3, 3)
    assert [(layer.in_features, layer.out_features) for layer in list(network)[-2:]] == [(128, 64), (64, 10)]
    convolutions = 16 * 9 + 16 + 2 * 16 + 32 * 16 * 9 + 32 + 2 * 32
    assert count_parameters(network) == convolutions + 128 * 64 + 64 + 64 * 10 + 10


def test_sigmoid_lenet_matches_paper() -> None:
    network = build("sigmoid-lenet", (3, 32, 32), 100, 0)
    assert isinstance(network, nn.Sequential)
    convolutions = [layer for layer in network if isinstance(layer, nn.Conv2d)]
    assert [layer.stride for layer in convolutions] == [(2, 2), (2, 2), (1, 1), (1, 1)]
    assert [tuple(layer.weight.shape) for layer in convolutions] == [(12, 3, 5, 5), *[(12, 12, 5, 5)] * 3]
    assert network[-1].in_features == 768
    weights = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
    assert 0.49 < weights.abs().max() <= 0.5
    assert weights.std().item() == pytest.approx(12**-0.5, rel=0.01)  # uniform distribution


def test_resnet8_block_adds_its_input() -> None:
    block = build("resnet8:4", IMAGE, 3, 0)[3].eval()  # type: ignore[index]
    with torch.no_grad():
        block.norm2.weight.zero_()  # the residual branch returns 0
    x = torch.rand(2, 4, 8, 8)
    torch.testing.assert_close(block(x), x)


@pytest.mark.parametrize("name", ["unit-linear", "random-conv:6", "scattering:4"])
def test_networks_on_unit_norm_features_ignore_contrast(name: str) -> None:
    network = build(name, IMAGE, 3, 0)
    x = torch.randn(5, *IMAGE)
    assert not network(x).any(), "initial weights are 0"
    with torch.no_grad():
        list(network.parameters())[-1].normal_()
    features = nn.Sequential(*list(network.children())[:-1])(x)
    torch.testing.assert_close(features.mean(1), torch.zeros(5), atol=1e-6, rtol=0)
    torch.testing.assert_close(features.norm(dim=1), torch.ones(5), atol=1e-3, rtol=0)
    other = (
        0.5 * x + 3 if name == "unit-linear" else 0.5 * x
    )  # the other networks depend on brightness, at the border or in means
    torch.testing.assert_close(network(other), network(x), atol=1e-4, rtol=1e-3)
    assert (network(x.flip(-1)) - network(x)).abs().max() > 0.1


def test_random_filters_are_frozen_centered_and_seeded() -> None:
    filters = [next(build("random-conv:6", IMAGE, 3, seed).parameters()) for seed in (0, 0, 1)]
    assert torch.equal(filters[0], filters[1])
    assert not torch.equal(filters[0], filters[2])
    assert not any(own.requires_grad for own in filters)
    torch.testing.assert_close(filters[0].flatten(1).sum(1), torch.zeros(6), atol=1e-6, rtol=0)
    torch.testing.assert_close(filters[0].flatten(1).norm(dim=1), torch.ones(6))


# --- generator and critic ------------------------------------------------------------------------


@pytest.mark.parametrize(("channels", "height", "width"), [(1, 8, 8), (3, 12, 20), (1, 28, 28), (3, 4, 4)])
def test_generator_supports_sizes_divisible_by_4(channels: int, height: int, width: int) -> None:
    stats = (0.5,) * channels
    generator = Generator((channels, height, width), 100, 4, stats, stats)
    assert generator(torch.randn(3, 100)).shape == (3, channels, height, width)


def test_default_generator_has_published_layers() -> None:
    generator = Generator((3, 32, 32), 100, 128, (0.5,) * 3, (0.5,) * 3)
    assert generator.linear.weight.shape == (256 * 8 * 8, 100)
    convolutions = [layer for layer in generator.body if isinstance(layer, nn.Conv2d)]
    widths = [(layer.in_channels, layer.out_channels, layer.kernel_size) for layer in convolutions]
    assert widths == [(256, 128, (3, 3)), (128, 64, (3, 3)), (64, 3, (3, 3))]
    norms = [layer.num_features for layer in generator.body if isinstance(layer, nn.BatchNorm2d)]
    assert norms == [256, 128, 64]


def test_generated_images_stay_within_normalized_range() -> None:
    mean, std = (0.25, 0.5, 0.75), (0.5, 0.25, 0.125)
    generator = Generator((3, 8, 8), 10, 4, mean, std)
    last = [layer for layer in generator.body if isinstance(layer, nn.Conv2d)][-1]
    with torch.no_grad():
        last.weight.mul_(1e4)  # saturates the sigmoid at both ends
        x = generator(torch.randn(16, 10))
    for channel in range(3):
        low, high = -mean[channel] / std[channel], (1 - mean[channel]) / std[channel]
        assert x[:, channel].min().item() == pytest.approx(low)
        assert x[:, channel].max().item() == pytest.approx(high)


# --- build ---------------------------------------------------------------------------------------


def test_initial_weights_follow_from_seed_and_names() -> None:
    first = build("mlp:8", IMAGE, 3, 0, "model", 1)
    assert same_weights(first, build("mlp:8", IMAGE, 3, 0, "model", 1))
    assert not same_weights(first, build("mlp:8", IMAGE, 3, 1, "model", 1))
    assert not same_weights(first, build("mlp:8", IMAGE, 3, 0, "model", 2))


@pytest.fixture
def custom_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("my_networks")
    module.linear = lambda shape, classes: nn.Sequential(  # type: ignore[attr-defined]
        nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes)
    )
    module.number = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_networks", module)


@pytest.mark.usefixtures("custom_module")
def test_custom_factory_is_imported_and_seeded() -> None:
    network = build("my_networks:linear", IMAGE, 3, 0, "model", 1)
    assert network(torch.zeros(2, *IMAGE)).shape == (2, 3)
    assert same_weights(network, build("my_networks:linear", IMAGE, 3, 0, "model", 1))
    assert not same_weights(network, build("my_networks:linear", IMAGE, 3, 0, "model", 2))


@pytest.mark.usefixtures("custom_module")
@pytest.mark.parametrize("spec", ["resnet9", ""])
def test_rejects_unknown_model_names(spec: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        build(spec, IMAGE, 3, 0)
    line = str(caught.value)
    assert (repr(spec) if spec else "invalid model = ''") in line
    assert "one of small-cnn, lenet5, bn-lenet, sigmoid-lenet, resnet8" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("resnet8:0", "resnet8:WIDTH, an integer >= 1"),
        ("resnet8:wide", "resnet8:WIDTH, an integer >= 1"),
        ("resnet8:-1", "resnet8:WIDTH, an integer >= 1"),
        ("linear:8", "linear, which has no width"),
        ("resnet", "one of small-cnn, .*; did you mean 'resnet8'"),
    ],
)
def test_rejects_invalid_width_and_suggests_close_name(spec: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^invalid model = '{spec}' \(expected {words}"):
        build(spec, IMAGE, 3, 0)


@pytest.mark.usefixtures("custom_module")
@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("no_such_module:thing", "a module in .* or an installed one"),
        ("my_networks:absent", "a name in .*, which has no 'absent'"),
        ("my_networks:number", "a function or class; 'number' of .* is neither"),
    ],
)
def test_rejects_missing_factory_in_one_line(spec: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^invalid model = '{spec}' \(expected {words}"):
        build(spec, IMAGE, 3, 0)


# --- check ---------------------------------------------------------------------------------------


def test_check_keeps_mode_and_statistics() -> None:
    model = build("resnet8:4", IMAGE, 3, 0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for mode in (True, False):
        check_module(model.train(mode), IMAGE, (3,), "model of a")
        assert model.training is mode
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), r"model of a .*\(4,\).*\(3,\)"),
        (nn.Flatten(0), r"model of a .*\(3,\)"),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(65, 3)),
            r"model of a cannot take inputs of shape \(1, 8, 8\)",
        ),
        (nn.Conv2d(3, 3, 1), r"model of a cannot take inputs"),
    ],
)
def test_rejects_model_with_wrong_shapes_in_one_line(model: nn.Module, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        check_module(model, IMAGE, (3,), "model of a")
    assert "\n" not in str(caught.value)


class Spectrum(nn.Module):
    """Network with complex weights on the spectrum of an image; returns magnitudes or complex numbers."""

    def __init__(self, complex_weights: bool) -> None:
        super().__init__()
        kind = torch.complex64 if complex_weights else torch.float32
        self.weight = nn.Parameter(torch.ones(64, 3, dtype=kind))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.fft2(x).flatten(1)
        given: torch.Tensor = spectrum @ self.weight.to(torch.complex64)
        return given.abs() if self.weight.is_complex() else given


def test_refuses_complex_weights_and_complex_outputs() -> None:
    with pytest.raises(ModelError, match=r"mine .*complex .*'weight'"):
        check_module(Spectrum(True), IMAGE, (3,), "mine")
    with pytest.raises(ModelError, match=r"mine .*complex64"):
        check_module(Spectrum(False), IMAGE, (3,), "mine")
