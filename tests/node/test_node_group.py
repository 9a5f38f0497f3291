"""Nodes computed together give the figures of nodes computed alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, QueryRefused
from fedstill.models import PatchCritic, build
from fedstill.node.architectures import group_by_architecture
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup
from fedstill.node.policy import PolicyConfig
from fedstill.node.stacked_modules import StackedModules
from fedstill.privacy.dpsgd import DPParameters

NETWORKS = ("small-cnn:4", "resnet8:4", "mlp:8", "lenet5", "critic")
G, B = 3, 4


def network(name: str, index: int) -> nn.Module:
    if name == "critic":
        torch.manual_seed(index)
        return PatchCritic(1, 4)
    return build(name, (1, 8, 8), 3, 0, index)


def networks(name: str) -> list[nn.Module]:
    return [network(name, index) for index in range(G)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def node(name: str, model: nn.Module, size: int = 6) -> Node:
    data = TensorData(random(size, 1, 8, 8, seed=len(name)), torch.arange(size) % 3)
    return Node(name, data, model, Gate(name, PolicyConfig(), AuditLog()), 0)


def close(a: torch.Tensor | None, b: torch.Tensor | None) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def same_state(stacked: Sequence[nn.Module], alone: Sequence[nn.Module]) -> None:
    for one, other in zip(stacked, alone, strict=True):
        for name, value in other.state_dict().items():
            close(one.state_dict()[name], value)


# --- what a stacked computes -----------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_stacked_outputs_gradients_and_buffers_match_modules(name: str, training: bool) -> None:
    modules = networks(name)
    alone = copy.deepcopy(modules)
    stacked = StackedModules(modules)
    stacked.train(training)
    for turn in range(2):
        x = random(G, B, 1, 8, 8, seed=turn).requires_grad_()
        outputs = stacked(x)
        (grad,) = torch.autograd.grad(outputs.square().sum(), x)
        for row, module in enumerate(alone):
            mine = x[row].detach().requires_grad_()
            expected = module.train(training)(mine)
            close(outputs[row], expected)
            close(grad[row], torch.autograd.grad(expected.square().sum(), mine)[0])
    same_state(modules, alone)  # batch norm's running statistics moved, or did not


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adam": lambda module: torch.optim.Adam(module.parameters(), 0.01, eps=1e-3, weight_decay=0.01),
    "sgd": lambda module: torch.optim.SGD(module.parameters(), 0.05, momentum=0.9, weight_decay=0.01),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NETWORKS)
def test_stacked_steps_equal_single_steps(name: str, optimizer: str) -> None:
    modules = networks(name)
    alone = copy.deepcopy(modules)
    nodes = [node(f"n{index}", module) for index, module in enumerate(modules)]
    for one in nodes:
        one.optimizers["model"] = OPTIMIZERS[optimizer](one.model)
    own = [OPTIMIZERS[optimizer](module) for module in alone]
    group = NodeGroup(nodes)
    group.module("model").train(True)
    for turn, active in enumerate((G, G, 2, 2, 1, 1)):  # nodes that are done fall off the end
        x = random(active, B, 1, 8, 8, seed=turn)
        losses = group.module("model")(x).square().flatten(1).mean(1)
        group.step("model", losses)
        for row in range(active):
            own[row].zero_grad()
            loss = alone[row].train()(x[row]).square().mean()
            close(losses[row], loss)
            loss.backward()
            own[row].step()
    same_state(modules, alone)


# --- whose parameters they are -------------------------------------------------------------------


def test_stacking_keeps_parameter_objects_and_values() -> None:
    modules = networks("resnet8:4")
    objects = [list(module.parameters()) for module in modules]
    values = copy.deepcopy([module.state_dict() for module in modules])
    StackedModules(modules)
    for module, parameters, old in zip(modules, objects, values, strict=True):
        assert all(p is q for p, q in zip(module.parameters(), parameters, strict=True))
        assert all(torch.equal(module.state_dict()[name], value) for name, value in old.items())


@pytest.mark.parametrize("name", ["mlp:8", "resnet8:4"])
def test_loaded_state_is_used_by_stack(name: str) -> None:
    modules = networks(name)
    stacked = StackedModules(modules)
    stacked.train(False)
    other = network(name, 99).eval()
    with torch.no_grad():
        other(random(B, 1, 8, 8))
    modules[1].load_state_dict(other.state_dict())
    x = random(G, B, 1, 8, 8)
    close(stacked(x)[1], other(x[1]))


def test_second_stack_replaces_first() -> None:
    modules = networks("mlp:8")
    StackedModules(modules[::-1])
    stacked = StackedModules(modules[:2])
    with torch.no_grad():
        for module in modules:
            for parameter in module.parameters():
                parameter.mul_(2)
    x = random(2, B, 1, 8, 8)
    for row in range(2):
        close(stacked(x)[row], modules[row](x[row]))


def test_evaluation_mode_has_no_parameter_gradients() -> None:
    modules = networks("mlp:8")
    stacked = StackedModules(modules)
    for mode in (True, False):
        stacked.train(mode)
        assert stacked(random(G, B, 1, 8, 8)).requires_grad is mode
        assert all(module.training is mode for module in modules)


# --- who is alike --------------------------------------------------------------------------------


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
        (nn.ReLU(), nn.Tanh()),  # same parameters, another layer
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
    """Its forward calls a function that it was given."""

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
    """Keeps a long constant as a plain attribute; its printed form leaves the middle out."""

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
    """A linear model and something that vmap cannot take."""

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
    for module, old in zip(modules, before, strict=True):  # finding out was done on copies
        assert all(torch.equal(module.state_dict()[name], value) for name, value in old.items())
        assert module.training
    assert torch.equal(torch.get_rng_state(), generator)


def frozen(module: nn.Module, *layers: int) -> nn.Module:
    for index in layers:
        module[index].requires_grad_(False)  # type: ignore[index]
    return module


def test_different_frozen_parameters_are_not_stacked() -> None:
    assert parts(frozen(flat(), 1), flat(), frozen(flat(), 1)) == [["n0", "n2"], ["n1"]]


class Spare(nn.Module):
    """Has a layer that its forward does not use."""

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


# --- memory layouts ------------------------------------------------------------------------------


def fused(module: nn.Module) -> torch.optim.Optimizer:
    """As the library's own: fused, so that it pairs numbers by their place in memory."""
    return torch.optim.Adam(module.parameters(), 0.01, eps=1e-3, fused=True)


class Placed(nn.Module):
    """Adds a learned image to its input: that gradient comes with channels first, whatever the network."""

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
    for turn in range(3):
        x = random(G, B, 3, 8, 8, seed=turn)
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

    def go(nodes: list[Node], stacked: bool, turns: range) -> None:
        for group in [NodeGroup(nodes)] if stacked else [NodeGroup([one]) for one in nodes]:
            stacked = group.module("model")
            stacked.train(True)
            for turn in turns:
                x = random(G, B, 3, 8, 8, seed=turn)
                rows = torch.stack([x[nodes.index(one)] for one in group.nodes])
                group.step("model", stacked(rows).square().flatten(1).mean(1))

    whole, first, second = nodes(), nodes(), nodes()
    go(whole, before, range(4))
    go(first, before, range(2))
    for one, other in zip(first, second, strict=True):
        state = one.state_dict()
        moments = state["optimizers"]["model"]["state"].values()
        for entry in moments:  # as a file gives them back
            entry.update({key: value.contiguous() for key, value in entry.items() if value is not None})
        other.load_state_dict(copy.deepcopy(state))
    go(second, after, range(2, 4))
    same_state([one.model for one in second], [one.model for one in whole])


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


# --- nodes ---------------------------------------------------------------------------------------


def test_group_sample_equals_node_samples() -> None:
    nodes = [node(name, network("mlp:8", 0), size) for name, size in (("a", 6), ("bb", 9))]
    inputs, targets = NodeGroup(nodes).sample_batch(5, "critic", 3)
    for row, one in enumerate(nodes):
        mine = one.sample_batch(5, "critic", 3)
        assert torch.equal(inputs[row], mine.inputs)
        assert torch.equal(targets[row], mine.targets)
        for image, target in zip(mine.inputs, mine.targets, strict=True):
            index = (one.data.inputs == image).flatten(1).all(1).nonzero()
            assert one.data.targets[index.item()] == target
    assert not torch.equal(inputs, NodeGroup(nodes).sample_batch(5, "critic", 4)[0])


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
        assert twin.optimizers["model"].state, "the copy's optimizer must hold the copy's parameters"
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


def test_networks_with_hooks_are_not_stacked() -> None:
    """A stacked call runs the hooks of the first network for all of them."""
    data = TensorData(torch.zeros(2, 4), torch.zeros(2).long())

    def nodes(hooked: int) -> list[Node]:
        made = [Node(name, data, nn.Linear(4, 3), None, 0) for name in "abc"]  # type: ignore[arg-type]
        for node in made[:hooked]:
            node.model.register_forward_hook(lambda module, given, out: out * 0)
        return made

    def groups(hooked: int) -> list[list[str]]:
        return sorted([node.name for node in group] for group in group_by_architecture(nodes(hooked)))

    assert groups(1) == [["a"], ["b", "c"]]
    assert groups(0) == [["a", "b", "c"]]
