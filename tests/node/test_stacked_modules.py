"""Stacked networks compute the same as each network alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fedstill.node.node_group import NodeGroup
from fedstill.node.stacked_modules import StackedModules
from tests.support.stacking import (
    NETWORKS,
    OPTIMIZERS,
    B,
    G,
    close,
    network,
    networks,
    node,
    random,
    same_state,
)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_stacked_outputs_gradients_and_buffers_match_modules(name: str, training: bool) -> None:
    modules = networks(name)
    alone = copy.deepcopy(modules)
    stacked = StackedModules(modules)
    stacked.train(training)
    for step in range(2):
        x = random(G, B, 1, 8, 8, seed=step).requires_grad_()
        outputs = stacked(x)
        (grad,) = torch.autograd.grad(outputs.square().sum(), x)
        for row, module in enumerate(alone):
            mine = x[row].detach().requires_grad_()
            expected = module.train(training)(mine)
            close(outputs[row], expected)
            close(grad[row], torch.autograd.grad(expected.square().sum(), mine)[0])
    same_state(modules, alone)  # including running statistics of batch norm


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", [*NETWORKS, "batch norm first"])
def test_inputs_that_all_modules_share_match_copies(name: str, training: bool) -> None:
    if name == "batch norm first":
        modules = [nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 3)) for _ in range(G)]
        for index, module in enumerate(modules):
            module[0].running_mean += index  # type: ignore[operator]
    else:
        modules = networks(name)
    alone = copy.deepcopy(modules)
    stacked = StackedModules(modules)
    stacked.train(training)
    shared = random(B, 1, 8, 8).expand(G, B, 1, 8, 8)
    outputs = stacked(shared)
    close(outputs, torch.stack([module.train(training)(shared[0]) for module in alone]))
    same_state(modules, alone)
    leaf = shared.detach().requires_grad_()  # each row has a gradient of its own
    (grad,) = torch.autograd.grad(stacked(leaf).square().sum(), leaf)
    copies = shared.clone().requires_grad_()
    (expected,) = torch.autograd.grad(stacked(copies).square().sum(), copies)
    close(grad, expected)


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
    for step, active in enumerate((G, G, 2, 2, 1, 1)):  # nodes that have finished are removed from the end
        x = random(active, B, 1, 8, 8, seed=step)
        losses = group.module("model")(x).square().flatten(1).mean(1)
        group.step("model", losses)
        for row in range(active):
            own[row].zero_grad()
            loss = alone[row].train()(x[row]).square().mean()
            close(losses[row], loss)
            loss.backward()
            own[row].step()
    same_state(modules, alone)


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
