"""Networks split into extractor and head: position of the split, equal outputs, and rejected networks."""

from __future__ import annotations

import re
from collections import OrderedDict

import pytest
import torch
from torch import nn

from fedstill.core.errors import ModelError
from fedstill.models import MODELS, TEXT_MODELS, build, example_inputs
from fedstill.models.extractor_head import Split, count_features, split_model

SHAPE = (1, 8, 8)


def layer_types(module: nn.Module) -> list[str]:
    return [type(layer).__name__ for layer in module.children()]


def same_function(model: nn.Module, parts: Split, shape: tuple[int, int, int] = SHAPE) -> None:
    """Check that both have equal outputs, parameters and buffers."""
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    model.eval(), parts.eval()
    with torch.no_grad():
        assert torch.equal(parts(x), model(x))
        assert torch.equal(parts.head(parts.extractor(x)), model(x))
    whole = [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]
    mine = [tensor.data_ptr() for tensor in (*parts.parameters(), *parts.buffers())]
    assert sorted(mine) == sorted(whole)


class CustomSequential(nn.Sequential):
    """Custom Sequential whose constructor arguments a slice does not have."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        channels, height, width = shape
        super().__init__(
            nn.Conv2d(channels, 4, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(4 * height * width, 6),
            nn.ReLU(),
            nn.Linear(6, classes),
        )


class SplitNetwork(nn.Module):
    """Custom network with modules ``extractor`` and ``head``."""

    def __init__(self) -> None:
        super().__init__()
        self.extractor = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU())
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.extractor(x))
        return out


# --- position of the split ---------------------------------------------------------------------------


HEADS = {
    "small-cnn": ["Linear"],
    "lenet5": ["Linear", "ReLU", "Linear", "ReLU", "Linear"],
    "resnet8": ["Linear"],
    "bn-lenet": ["Linear", "Linear"],
    "sigmoid-lenet": ["Linear"],
    "mlp": ["Linear"],  # no parameters before its Flatten
    "residual-mlp": ["Linear"],
    "random-conv": ["UnitNorm", "Linear"],
}


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 12, 16)])
@pytest.mark.parametrize("name", HEADS)
def test_split_of_built_in_network_keeps_outputs(name: str, shape: tuple[int, int, int]) -> None:
    model = build(f"{name}:6", shape, 7, 0)
    parts = split_model(model, "model")
    assert layer_types(parts.head) == HEADS[name]
    same_function(model, parts, shape)
    first = next(iter(parts.head.parameters()))
    assert count_features(parts, example_inputs(shape), "model") == first.shape[1]


def test_all_built_in_networks_are_covered() -> None:
    assert {
        *HEADS,
        "linear",
        "unit-linear",
        "scattering",
        "unet",
        "bn-unet",
        "residual-unet",
        *TEXT_MODELS,
    } == set(MODELS.builtin)  # U-Nets: see test_unet.py


def test_custom_sequential_is_split_after_its_flatten() -> None:
    model = CustomSequential(SHAPE, 3)
    parts = split_model(model, "model")
    assert (layer_types(parts.extractor), layer_types(parts.head)) == (
        ["Conv2d", "ReLU", "Flatten"],
        ["Linear", "ReLU", "Linear"],
    )
    same_function(model, parts)


def test_split_is_after_last_flatten_with_parameters_on_both_sides() -> None:
    two = nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.Flatten(),
        nn.Linear(72, 8),
        nn.Unflatten(1, (2, 2, 2)),
        nn.Conv2d(2, 2, 1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    assert layer_types(split_model(two, "model").head) == ["Linear"]
    last = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 3, 6), nn.Flatten())
    # no parameters after the flatten: split before the last layer with parameters
    parts = split_model(last, "model")
    assert layer_types(parts.head) == ["Conv2d", "Flatten"]
    same_function(last, parts)


def test_split_keeps_layer_names() -> None:
    layers = OrderedDict(flat=nn.Flatten(), first=nn.Linear(64, 4), act=nn.ReLU(), last=nn.Linear(4, 3))
    parts = split_model(nn.Sequential(layers), "model")
    assert [name for name, _ in parts.extractor.named_children()] == ["flat", "first", "act"]
    assert [name for name, _ in parts.head.named_children()] == ["last"]


def test_split_keeps_reused_layers() -> None:
    act = nn.ReLU()
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), act, nn.Flatten(), nn.Linear(144, 8), act, nn.Linear(8, 8), act, nn.Linear(8, 3)
    )
    parts = split_model(model, "model")
    assert len(list(parts.extractor.children())) == 3
    assert layer_types(parts.head)[0] == "Linear"
    same_function(model, parts)


def test_network_with_extractor_and_head_is_split_there() -> None:
    model = SplitNetwork()
    parts = split_model(model, "model")
    assert parts.extractor is model.extractor
    assert parts.head is model.head
    same_function(model, parts)


# --- rejected networks -----------------------------------------------------------------------------


class NoParts(nn.Module):
    """Network that is not a Sequential and has no modules of these names."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.two(self.one(x.flatten(1)))
        return out


class OnlyNames(NoParts):
    """Network whose attributes of these names are not modules."""

    def __init__(self) -> None:
        super().__init__()
        self.extractor, self.head = "conv", 3


@pytest.mark.parametrize("model", [NoParts(), OnlyNames()])
def test_rejects_networks_that_cannot_be_split(model: nn.Module) -> None:
    message = r"model of north cannot be split (expected a network with modules 'extractor' and 'head'"
    with pytest.raises(ModelError, match=re.escape(message)):
        split_model(model, "model of north")


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(64, 3)),
        nn.Sequential(nn.Flatten(), nn.ReLU()),
        nn.Sequential(),
    ],
    ids=["one layer", "nothing learned", "empty"],
)
def test_rejects_split_with_a_part_without_parameters(model: nn.Module) -> None:
    with pytest.raises(ModelError, match=r"student .*two layers"):
        split_model(model, "student")


def test_count_features_requires_one_vector_per_input() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 3, 6), nn.Flatten())
    with pytest.raises(
        ModelError, match=re.escape("extractor of student returns (2, 2, 6, 6) for two inputs")
    ):
        count_features(split_model(model, "student"), example_inputs(SHAPE), "student")
    assert count_features(split_model(model, "student"), example_inputs(SHAPE), "student", maps=True) == 2
