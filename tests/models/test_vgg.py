"""VGG features from a file: activations, rejected files, and the perceptual loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from fedstill.core.errors import ArgumentError, DataError, ModelError
from fedstill.models.perceptual import perceptual_loss
from fedstill.models.vgg import IMAGENET_MEAN, IMAGENET_STD, load_vgg
from tests.support.models import VGG16, weights

VGG19 = (0, 2, 5, 7, 10, 12, 14, 16, 19, 21, 23, 25, 28, 30, 32, 34)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(weights(VGG16), tmp_path / "vgg.safetensors")
    return tmp_path / "vgg.safetensors"


def layer_outputs(
    tensors: dict[str, torch.Tensor], indices: Sequence[int], x: torch.Tensor
) -> dict[int, torch.Tensor]:
    """Return the output of each layer at torchvision's indices."""
    given = {}
    for index in range(indices[-1] + 2):
        if index in indices:
            x = F.conv2d(x, tensors[f"features.{index}.weight"], tensors[f"features.{index}.bias"], padding=1)
        elif index - 1 in indices:
            x = x.relu()
        else:
            x = F.max_pool2d(x, 2)
        given[index] = x
    return given


@pytest.mark.parametrize(("indices", "output_indices"), [(VGG16, (3, 8, 15, 22)), (VGG19, (3, 8, 15, 24))])
def test_activations_match_torchvision_layers(
    indices: Sequence[int], output_indices: Sequence[int], tmp_path: Path
) -> None:
    """In VGG-19, relu3_3 is not the last activation of its block."""
    tensors = weights(indices)
    save_file(tensors, tmp_path / "w.safetensors")
    features = load_vgg(tmp_path / "w.safetensors", (0.5,) * 3, (0.25,) * 3)
    x = torch.randn(2, 3, 16, 16)
    pixels = x * 0.25 + 0.5
    imagenet = (pixels - torch.tensor(IMAGENET_MEAN).view(-1, 1, 1)) / torch.tensor(IMAGENET_STD).view(
        -1, 1, 1
    )
    given = layer_outputs(tensors, indices, imagenet)
    activations = features(x)
    assert len(activations) == 4
    for activation, index in zip(activations, output_indices, strict=True):
        torch.testing.assert_close(activation, given[index], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["vgg16", "vgg19"])
def test_features_equal_torchvision_network(name: str, tmp_path: Path) -> None:
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    theirs = getattr(models, name)(weights=None).features.eval()
    save_file({f"features.{key}": value for key, value in theirs.state_dict().items()}, tmp_path / "w")
    x = torch.rand(1, 3, 32, 32)
    scaled = (x - torch.tensor(IMAGENET_MEAN).view(-1, 1, 1)) / torch.tensor(IMAGENET_STD).view(-1, 1, 1)
    torch.testing.assert_close(load_vgg(tmp_path / "w")(x)[1], theirs[:9](scaled), rtol=1e-4, atol=1e-5)


def test_gray_images_are_repeated_three_times(path: Path) -> None:
    features, gray = load_vgg(path), torch.rand(2, 1, 16, 16)
    for mine, theirs in zip(features(gray), features(gray.expand(-1, 3, -1, -1)), strict=True):
        assert torch.equal(mine, theirs)


def test_features_are_frozen_and_use_no_randomness(path: Path) -> None:
    torch.manual_seed(3)
    expected = torch.randn(2)
    torch.manual_seed(3)
    features = load_vgg(path)
    assert torch.equal(torch.randn(2), expected)
    assert not features.training
    assert not any(p.requires_grad for p in features.parameters())


def test_half_precision_weights_are_read_as_float32(tmp_path: Path) -> None:
    save_file({name: tensor.half() for name, tensor in weights(VGG16).items()}, tmp_path / "w")
    assert all(p.dtype == torch.float32 for p in load_vgg(tmp_path / "w").parameters())


def test_perceptual_loss_by_hand(path: Path) -> None:
    features = load_vgg(path)
    x, y = torch.rand(3, 1, 16, 16, requires_grad=True), torch.rand(3, 1, 16, 16)
    losses = perceptual_loss(features, x, y)
    expected = [
        sum(
            (a[row] - b[row]).square().sum() / a[row].numel()
            for a, b in zip(features(x), features(y), strict=True)
        )
        / 4
        for row in range(3)
    ]
    torch.testing.assert_close(losses, torch.stack(expected))
    assert torch.autograd.grad(losses.sum(), x)[0].abs().sum() > 0
    assert perceptual_loss(features, y, y).tolist() == [0, 0, 0]


# --- rejected files and images ---------------------------------------------------------------------


def test_rejects_missing_file_and_other_formats(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not found"):
        load_vgg(tmp_path / "none")
    (tmp_path / "text").write_text("weights")
    with pytest.raises(DataError, match="safetensors"):
        load_vgg(tmp_path / "text")


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("features.28.weight", None, "have convolutions at"),
        ("features.30.weight", torch.zeros(1, 1, 3, 3), "have convolutions at"),
        ("features.5.weight", torch.zeros(4, 9, 3, 3), r"features.5 has shapes \[\(4, 9, 3, 3\)"),
        ("features.0.weight", torch.zeros(2, 3, 5, 5), r"features.0 has shapes \[\(2, 3, 5, 5\)"),
        ("features.7.bias", torch.zeros(1), r"features.7 has shapes .* \(1,\)\]"),
        ("features.7.bias", None, r"features.7 has shapes .* \(0,\)\]"),
        ("features.7.bias", torch.full((5,), torch.nan), "features.7 holds NaN"),
    ],
)
def test_error_names_weights_that_do_not_fit(
    name: str, value: torch.Tensor | None, line: str, tmp_path: Path
) -> None:
    tensors = {key: tensor for key, tensor in weights(VGG16).items() if key != name}
    save_file(tensors if value is None else {**tensors, name: value}, tmp_path / "w")
    with pytest.raises(ModelError, match=line):
        load_vgg(tmp_path / "w")


@pytest.mark.parametrize("channels", [0, 2, 4])
def test_rejects_images_with_other_channel_counts(path: Path, channels: int) -> None:
    with pytest.raises(ArgumentError, match=f"inputs of {channels} channels .* .expected none: .* 1 or 3"):
        load_vgg(path, (0.5,) * channels, (0.5,) * channels)
