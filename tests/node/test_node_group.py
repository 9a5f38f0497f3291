"""Nodes in a group compute the same as nodes alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, QueryRefused
from fedstill.models import PatchCritic, build
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup
from fedstill.privacy.dpsgd import DPParameters
from tests.support.stacking import OPTIMIZERS, B, G, network, node, random, same_state


class Spare(nn.Module):
    """A module with a layer that its forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.spare = nn.Linear(64, 3), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x.flatten(1))
        return out


@pytest.mark.parametrize("size", [1, 3])
def test_unused_parameter_does_not_prevent_stacking(size: int) -> None:
    modules = [Spare() for _ in range(size)]
    nodes = [node(f"n{index}", module) for index, module in enumerate(modules)]
    before = copy.deepcopy([module.state_dict() for module in modules])
    for one in nodes:
        one.optimizers["model"] = OPTIMIZERS["sgd"](one.model)
    group = NodeGroup(nodes)
    group.module("model").train(True)
    group.step("model", group.module("model")(random(size, B, 1, 8, 8)).square().flatten(1).mean(1))
    for module, old in zip(modules, before, strict=True):
        assert module.spare.weight.grad is None
        assert torch.equal(module.spare.weight, old["spare.weight"])
        assert not torch.equal(module.linear.weight, old["linear.weight"])


def fused(module: nn.Module) -> torch.optim.Optimizer:
    """Return a fused Adam, like the library's, which pairs numbers by their position in memory."""
    return torch.optim.Adam(module.parameters(), 0.01, eps=1e-3, fused=True)


class Placed(nn.Module):
    """Adds a learned image to its input; the image's gradient is channels first for any network."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Parameter(torch.randn(1, 3, 8, 8))
        self.net = build("small-cnn:4", (3, 8, 8), 3, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x + self.image)
        return out


def made(name: str) -> list[nn.Module]:
    torch.manual_seed(0)
    if name == "placed":
        return [Placed() for _ in range(G)]
    if name == "critic":
        return [PatchCritic(3, 4) for _ in range(G)]
    return [build(name, (3, 8, 8), 3, 0, index) for index in range(G)]


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("name", ["small-cnn:4", "resnet8:4", "critic", "placed"])
def test_channels_last_networks_take_equal_steps(name: str, stacked: bool) -> None:
    plain = made(name)
    modules: list[Any] = [copy.deepcopy(m).to(memory_format=torch.channels_last) for m in plain]
    nodes = [node(f"n{index}", module) for index, module in enumerate(modules)]
    own = [torch.optim.Adam(module.parameters(), 0.01, eps=1e-3, fused=False) for module in plain]
    for one in nodes:
        one.optimizers["model"] = fused(one.model)
    groups = [NodeGroup(nodes)] if stacked else [NodeGroup([one]) for one in nodes]
    for step in range(3):
        x = random(G, B, 3, 8, 8, seed=step)
        for group in groups:
            rows = torch.stack([x[nodes.index(one)] for one in group.nodes])
            stacked = group.module("model")
            stacked.train(True)
            group.step("model", stacked(rows).square().flatten(1).mean(1))
        for row, module in enumerate(plain):
            own[row].zero_grad()
            module.train()(x[row]).square().mean().backward()
            own[row].step()
    same_state(modules, plain)


@pytest.mark.sample(3)
@pytest.mark.parametrize("before", [True, False], ids=["was stacked", "was alone"])
@pytest.mark.parametrize("after", [True, False], ids=["continues stacked", "continues alone"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_channels_last_node_resumes_from_state(optimizer: str, before: bool, after: bool) -> None:
    def nodes() -> list[Node]:
        made_nodes = []
        for index, module in enumerate(made("small-cnn:4")):
            one = node(f"n{index}", module.to(memory_format=torch.channels_last))  # type: ignore[call-overload]
            one.optimizers["model"] = (
                fused(one.model)
                if optimizer == "adam"
                else torch.optim.SGD(one.model.parameters(), 0.05, momentum=0.9, fused=True)
            )
            made_nodes.append(one)
        return made_nodes

    def go(nodes: list[Node], stacked: bool, steps: range) -> None:
        for group in [NodeGroup(nodes)] if stacked else [NodeGroup([one]) for one in nodes]:
            stacked = group.module("model")
            stacked.train(True)
            for step in steps:
                x = random(G, B, 3, 8, 8, seed=step)
                rows = torch.stack([x[nodes.index(one)] for one in group.nodes])
                group.step("model", stacked(rows).square().flatten(1).mean(1))

    whole, first, second = nodes(), nodes(), nodes()
    go(whole, before, range(4))
    go(first, before, range(2))
    for one, other in zip(first, second, strict=True):
        state = one.state_dict()
        moments = state["optimizers"]["model"]["state"].values()
        for entry in moments:  # tensors from a file are contiguous
            entry.update({key: value.contiguous() for key, value in entry.items() if value is not None})
        other.load_state_dict(copy.deepcopy(state))
    go(second, after, range(2, 4))
    same_state([one.model for one in second], [one.model for one in whole])


def test_copy_is_independent_of_training() -> None:
    nodes = [node(f"n{index}", network("resnet8:4", index)) for index in range(2)]
    for one in nodes:
        one.optimizers["model"] = OPTIMIZERS["adam"](one.model)
    before = copy.deepcopy([one.state_dict() for one in nodes])
    twins = NodeGroup([one.copy_without_gate() for one in nodes])
    twins.module("model").train(True)
    losses = twins.module("model")(random(2, B, 1, 8, 8)).square().flatten(1).mean(1)
    twins.step("model", losses)
    for one, twin, old in zip(nodes, twins.nodes, before, strict=True):
        for name, value in old["modules"]["model"].items():
            assert torch.equal(one.model.state_dict()[name], value)
        assert not one.optimizers["model"].state
        assert twin.optimizers["model"].state, (
            "the optimizer of the copy must contain the parameters of the copy"
        )
        changed = [
            p for p, q in zip(one.model.parameters(), twin.model.parameters(), strict=True) if (p != q).any()
        ]
        assert changed
        assert not hasattr(twin, "gate")
        assert hasattr(one, "gate")


@pytest.mark.parametrize(("private", "role"), [("model", "model"), ("critic", "critic"), ("model", "critic")])
def test_unnoised_step_is_refused_under_private_training(private: str, role: str) -> None:
    one = node("a", network("mlp", 0))
    one.add_module("critic", network("mlp", 1), lambda module: torch.optim.SGD(module.parameters(), 1.0))
    one.optimizers["model"] = torch.optim.SGD(one.model.parameters(), 1.0)
    group, before = NodeGroup([one]), copy.deepcopy(one.modules[role].state_dict())
    one.dp_sgd_parameters = {private: DPParameters(1.0, 1.0, sampler=lambda *names: None)}
    group.module(role).train(True)
    losses = group.module(role)(one.data.inputs.unsqueeze(0)).square().mean((1, 2))
    with pytest.raises(QueryRefused, match=f"its networks train with DP-SGD, and here its {role} would"):
        group.step(role, losses)
    assert all(torch.equal(value, before[name]) for name, value in one.modules[role].state_dict().items())


def test_step_without_optimizer_names_network() -> None:
    node = Node("clinic", TensorData(torch.zeros(2, 4), torch.zeros(2).long()), nn.Linear(4, 3), None, 0)  # type: ignore[arg-type]
    group = NodeGroup([node])
    losses = group.module("model")(torch.zeros(1, 2, 4)).sum((1, 2))
    with pytest.raises(ArgumentError, match=r"node.step.*model.*optimizer"):
        group.step("model", losses)
    with pytest.raises(ArgumentError, match="role = 'critic'"):
        group.step("critic", losses)
    node.optimizers["model"] = torch.optim.SGD(node.model.parameters(), 0.1)
    group.module("model").train(True)
    with pytest.raises(ArgumentError, match=r"losses of node\.step"):
        group.step("model", group.module("model")(torch.zeros(1, 2, 4)).sum())
