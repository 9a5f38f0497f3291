"""Nodes of equal architecture form a group; others do not."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedstill.core.dataset import TensorData
from fedstill.models import PatchCritic
from fedstill.node.architectures import group_by_architecture
from fedstill.node.node import Node
from tests.support.stacking import OPTIMIZERS, network, node


def parts(*models: nn.Module) -> list[list[str]]:
    nodes = [node(f"n{index}", model) for index, model in enumerate(models)]
    return [[one.name for one in part] for part in group_by_architecture(nodes)]


def flat(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), *layers, nn.Linear(6, 3))


def test_equal_architectures_are_grouped_in_order() -> None:
    order = ("mlp:8", "small-cnn:4", "mlp:8", "mlp:16", "small-cnn:4", "mlp:8")
    assert parts(*(network(name, 0) for name in order)) == [["n0", "n2", "n5"], ["n1", "n4"], ["n3"]]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (nn.ReLU(), nn.Tanh()),  # equal parameters, different layers
        (nn.LeakyReLU(0.1), nn.LeakyReLU(0.2)),
        (nn.GroupNorm(2, 6), nn.GroupNorm(3, 6)),
        (nn.BatchNorm1d(6), nn.BatchNorm1d(6, momentum=0.5)),
        (nn.BatchNorm1d(6), nn.BatchNorm1d(6, track_running_stats=False)),
        (nn.Linear(6, 6), nn.Linear(6, 6).double()),
    ],
)
def test_different_layers_are_not_stacked(one: nn.Module, other: nn.Module) -> None:
    assert parts(flat(one), flat(other)) == [["n0"], ["n1"]]
    assert parts(flat(one), flat(copy.deepcopy(one))) == [["n0", "n1"]]


class Activated(nn.Module):
    """A module whose forward calls a given function."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x.flatten(1)))


def test_different_functions_are_not_stacked() -> None:
    relu, tanh = Activated(torch.relu), Activated(torch.tanh)
    assert parts(relu, tanh, copy.deepcopy(relu)) == [["n0", "n2"], ["n1"]]
    doubled, halved = (Activated(lambda x, by=by: by * x) for by in (2.0, 0.5))
    assert parts(doubled, halved) == [["n0"], ["n1"]]


class Buffered(nn.Module):
    """A module with a long constant as a plain attribute, whose middle its repr omits."""

    def __init__(self, middle: float) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 3)
        self.constant = torch.zeros(2000)
        self.constant[1000] = middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.flatten(1)) + self.constant.sum()


def test_different_constants_are_not_stacked() -> None:
    assert parts(Buffered(0.0), Buffered(1.0)) == [["n0"], ["n1"]]


class Forwarding(nn.Module):
    """A linear model with an operation that vmap does not support."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(64, 3)
        self.norm = nn.BatchNorm1d(3, momentum=None) if how == "average" else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.linear(x.flatten(1)))
        if self.how == "dropout":
            y = F.dropout(y, 0.5, self.training)
        if self.how == "branch" and y.mean() > 0:
            y = 2 * y
        if self.how == "branch when asked" and not self.training and y.mean() > 0:
            y = 2 * y
        if self.how == "number":
            y = y * y.abs().max().item()
        return y


UNMAPPED = ["dropout", "average", "branch", "branch when asked", "number"]


@pytest.mark.parametrize("how", UNMAPPED)
def test_modules_without_vmap_support_are_not_stacked(how: str) -> None:
    modules = [Forwarding(how) for _ in range(3)]
    before = copy.deepcopy([module.state_dict() for module in modules])
    others = flat(), flat()
    generator = torch.get_rng_state()
    assert parts(*modules, *others) == [["n0"], ["n1"], ["n2"], ["n3", "n4"]]
    for module, old in zip(modules, before, strict=True):  # the check uses copies
        assert all(torch.equal(module.state_dict()[name], value) for name, value in old.items())
        assert module.training
    assert torch.equal(torch.get_rng_state(), generator)


def frozen(module: nn.Module, *layers: int) -> nn.Module:
    for index in layers:
        module[index].requires_grad_(False)  # type: ignore[index]
    return module


def test_different_frozen_parameters_are_not_stacked() -> None:
    assert parts(frozen(flat(), 1), flat(), frozen(flat(), 1)) == [["n0", "n2"], ["n1"]]


def test_training_mode_does_not_prevent_stacking() -> None:
    assert parts(flat().eval(), flat().train()) == [["n0", "n1"]]


@pytest.mark.parametrize("layer", [nn.Dropout(0.1), nn.RReLU(), nn.AlphaDropout(0.1)])
def test_random_modules_are_not_stacked(layer: nn.Module) -> None:
    assert parts(flat(layer), flat(layer), flat()) == [["n0"], ["n1"], ["n2"]]


def test_all_roles_must_be_stackable() -> None:
    nodes = [node(f"n{index}", network("mlp:8", index)) for index in range(3)]
    for one, width in zip(nodes, (4, 8, 4), strict=True):
        one.add_module("critic", PatchCritic(1, width), OPTIMIZERS["adam"])
    assert [[one.name for one in part] for part in group_by_architecture(nodes)] == [["n0", "n2"], ["n1"]]


def test_networks_with_hooks_are_not_stacked() -> None:
    """A stacked call runs the hooks of the first network for all of them."""
    data = TensorData(torch.zeros(2, 4), torch.zeros(2).long())

    def nodes(hooked: int) -> list[Node]:
        made = [Node(name, data, nn.Linear(4, 3), None, 0) for name in "abc"]  # type: ignore[arg-type]
        for each in made[:hooked]:
            each.model.register_forward_hook(lambda module, given, out: out * 0)
        return made

    def groups(hooked: int) -> list[list[str]]:
        return sorted([node.name for node in group] for group in group_by_architecture(nodes(hooked)))

    assert groups(1) == [["a"], ["b", "c"]]
    assert groups(0) == [["a", "b", "c"]]
