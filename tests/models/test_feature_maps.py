"""Scales of networks, found without knowing them, and their feature maps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedstill.core.errors import ArgumentError, ModelError
from fedstill.models.backbones import RawInputs
from fedstill.models.feature_maps import FeatureMaps, Scale, find_scales
from tests.support.models import TinyEncoder, save_tiny_weights

GRAY = RawInputs((1, 16, 16))
TINY = "tests.support.models:tiny_encoder"


def test_scales_are_the_last_outputs_before_each_halving() -> None:
    """The 1 x 1 convolution before a stage's pooling is an inner layer, and the pooled vector no map."""
    expected = [Scale("dropout", 2, 4), Scale("stages.0", 4, 6), Scale("stages.1", 8, 8)]
    assert find_scales(TinyEncoder(1).eval(), 1, (16, 16)) == expected
    assert find_scales(TinyEncoder(1).eval(), 1, (5, 300)) == expected  # on a larger image


def test_layer_that_is_called_twice_is_no_scale() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Conv2d(1, 1, 3, stride=2, padding=1) for _ in range(2))
            self.act = nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.act(self.second(self.act(self.first(x))))
            return output

    assert find_scales(Shared(), 1, (8, 8)) == [Scale("first", 2, 1), Scale("second", 4, 1)]


def test_first_layer_may_quarter_the_image() -> None:
    patches = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU(), nn.Conv2d(8, 9, 2, 2))
    assert find_scales(patches, 3, (32, 32)) == [Scale("1", 4, 8), Scale("2", 8, 9)]


def test_maps_are_those_of_the_layers() -> None:
    maps, x = FeatureMaps(TINY, GRAY), torch.randn(2, 1, 16, 24)
    network: Any = maps.network
    first = network.act(network.norm(network.stem(x)))
    second = network.stages[0](first)
    for found, expected in zip(maps(x), [first, second, network.stages[1](second)], strict=True):
        torch.testing.assert_close(found, expected)
    assert not any(module._forward_hooks for module in network.modules())


def test_images_are_padded_with_their_last_pixels() -> None:
    maps, x = FeatureMaps(TINY, GRAY), torch.arange(30.0).view(1, 1, 5, 6)
    padded = maps.convert(x)
    assert padded.shape == (1, 1, 8, 8)
    assert torch.equal(padded[..., :5, :6], x)
    assert padded[0, 0, 7].tolist() == [24, 25, 26, 27, 28, 29, 29, 29]
    assert torch.equal(maps.convert(torch.ones(1, 1, 8, 16)), torch.ones(1, 1, 8, 16))


def test_network_stays_in_evaluation_mode() -> None:
    maps = FeatureMaps(TINY, GRAY).train()
    before = {name: tensor.clone() for name, tensor in maps.network.state_dict().items()}
    x = torch.randn(4, 1, 16, 16)
    assert torch.equal(maps(x)[-1], maps(x)[-1])  # no dropout
    assert all(torch.equal(tensor, before[name]) for name, tensor in maps.network.state_dict().items())


def test_library_network_has_its_own_normalization(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Timm:
        @staticmethod
        def create_model(name: str, pretrained: bool, num_classes: int) -> Any:
            assert not pretrained
            network: Any = TinyEncoder(3)
            network.pretrained_cfg = {"input_size": (3, 9, 9), "mean": (0.1, 0.2, 0.3), "std": (0.5,) * 3}
            return network

    monkeypatch.setitem(sys.modules, "timm", Timm)  # type: ignore[arg-type]
    maps = FeatureMaps("timm:tiny", RawInputs((1, 8, 8), (0.25,), (0.5,)))
    converted = maps.convert(torch.zeros(1, 1, 8, 8))  # pixels of 0.25
    torch.testing.assert_close(converted[0, :, 0, 0], torch.tensor([0.3, 0.1, -0.1]))
    weights = save_tiny_weights(tmp_path / "w.safetensors", 3)
    maps.load(tmp_path / "w.safetensors", "model.encoder_weights")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in maps.network.state_dict().items())
    with pytest.raises(ModelError, match=r"timm:tiny for images of 2 channels .*1 or 3"):
        FeatureMaps("timm:tiny", RawInputs((2, 8, 8)))
    with pytest.raises(ArgumentError, match=r"model\.encoder_weights = '' .*timm:tiny"):
        maps.load("", "model.encoder_weights")


@pytest.mark.parametrize("backbone", ["tests.support.models:tiny_backbone", "tests.support.models:flat"])
def test_backbone_without_several_scales_is_refused_in_one_line(backbone: str) -> None:
    with pytest.raises(ModelError, match=r"feature maps at [01] scales?") as caught:
        FeatureMaps(backbone, GRAY)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("backbone", ["lite0.onnx", "hf:folder", "random-conv", "scattering:8", "tiny", ""])
def test_backbone_without_gradients_is_refused(backbone: str) -> None:
    with pytest.raises(
        ArgumentError, match=r"timm:NAME, torchvision:NAME or package\.module:factory"
    ) as caught:
        FeatureMaps(backbone, GRAY)
    assert ("gradient" in str(caught.value)) == backbone.endswith(".onnx")


def test_network_that_fails_is_refused_with_its_inputs() -> None:
    with pytest.raises(ModelError, match=r"cannot take inputs of 2 x 128 x 128"):
        find_scales(TinyEncoder(1), 2, (8, 8))
