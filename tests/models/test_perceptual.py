"""Perceptual loss with the features of any backbone; tests of VGG features are in test_vgg."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fedstill.core.errors import ArgumentError, FedstillError
from fedstill.models.backbones import RawInputs
from fedstill.models.perceptual import load_perceptual, perceptual_loss
from tests.support.errors import raises_invalid
from tests.support.models import VGG16, save_tiny_weights, weights

GRAY = RawInputs((1, 4, 4), (0.5,), (0.5,))
TINY = "tests.support.models:tiny_encoder"
MEANS = "tests.support.models:means"


def loaded(name: str, weights: str = "", raw: RawInputs = GRAY) -> Any:
    return load_perceptual(name, weights, raw, "nodes.perceptual")


def test_loss_is_mean_of_mean_squared_differences_of_scales() -> None:
    """The features are twice the image's 2 x 2 averages, and three times its 4 x 4 average."""
    features = loaded(MEANS)
    x = torch.zeros(2, 1, 4, 4)
    x[0, 0, 0, 0] = 4.0  # averages of 1, 0, 0, 0, and of 1/4
    x[1] = -1.0
    first = ((2 * 1.0) ** 2 / 4 + (3 * 0.25) ** 2) / 2
    second = ((2 * 1.0) ** 2 + (3 * 1.0) ** 2) / 2
    losses = perceptual_loss(features, x, torch.zeros(2, 1, 4, 4))
    torch.testing.assert_close(losses, torch.tensor([first, second]))


def test_images_get_gradients_and_the_network_none(tmp_path: Path) -> None:
    save_tiny_weights(tmp_path / "w.safetensors")
    features = loaded(TINY, str(tmp_path / "w.safetensors"))
    x, y = torch.rand(3, 1, 5, 6, requires_grad=True), torch.rand(3, 1, 5, 6)
    losses = perceptual_loss(features.train(), x, y)
    assert torch.autograd.grad(losses.sum(), x)[0].flatten(1).abs().sum(1).min() > 0
    assert not any(parameter.requires_grad for parameter in features.parameters())
    assert perceptual_loss(features, y, y).tolist() == [0, 0, 0]


def test_backbone_has_the_weights_of_the_file(tmp_path: Path) -> None:
    state = save_tiny_weights(tmp_path / "w.safetensors")
    network = loaded(TINY, str(tmp_path / "w.safetensors")).network
    assert all(torch.equal(tensor, state[name]) for name, tensor in network.state_dict().items())


def test_file_of_a_vgg_is_no_backbone(tmp_path: Path) -> None:
    save_file(weights(VGG16), tmp_path / "vgg.safetensors")
    assert len(loaded(str(tmp_path / "vgg.safetensors"))(torch.zeros(1, 1, 16, 16))) == 4
    assert loaded("") is None


@pytest.mark.parametrize(
    ("name", "given", "option", "rule"),
    [
        ("lite0.onnx", "", "nodes.perceptual", "no gradient passes through an ONNX graph"),
        ("hf:folder", "", "nodes.perceptual", "timm:NAME"),
        ("timm:hf-hub:evil/x", "w", "nodes.perceptual", "letters"),
        (TINY, "absent", "nodes.perceptual_weights", "existing file"),
        ("vgg.safetensors", "w", "nodes.perceptual_weights", "no backbone"),
        ("", "w", "nodes.perceptual_weights", "no backbone"),
    ],
)
def test_unsuitable_features_are_refused_in_one_line(name: str, given: str, option: str, rule: str) -> None:
    value = given if option.endswith("weights") else name
    with raises_invalid(option, value, rule):
        loaded(name, given)


def test_backbone_without_several_scales_is_refused() -> None:
    with pytest.raises(FedstillError, match="1 scale") as caught:
        loaded("tests.support.models:tiny_backbone")
    assert not isinstance(caught.value, ArgumentError)
