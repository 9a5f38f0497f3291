"""Local training: equal results stacked and one by one, uninterrupted and resumed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedstill.core.checkpoint import load_state, save_state
from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.models import build
from fedstill.models.module_utils import to_vector
from fedstill.node import local_training
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup
from fedstill.node.node_view import NodeView
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.local_config import LocalConfig, Span
from fedstill.protocol.node_side import NodeSetting
from fedstill.runs.simulation import group_nodes
from fedstill.tasks.classification import Classification

pytestmark = pytest.mark.usefixtures("steady_adam")

TASK, COMPUTE = Classification(3), Compute()
SIZES = (5, 13, 9)


def made(models: Sequence[nn.Module], sizes: Sequence[int] = SIZES) -> list[Node]:
    nodes = []
    for index, (model, size) in enumerate(zip(models, sizes, strict=True)):
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(size, 1, 8, 8, generator=generator)
        targets = torch.randint(3, (size,), generator=generator)
        name = f"n{index}"
        nodes.append(
            Node(name, TensorData(inputs, targets), model, Gate(name, PolicyConfig(), AuditLog()), 0)
        )
    return nodes


def built(spec: str, sizes: Sequence[int] = SIZES) -> list[Node]:
    return made([build(spec, (1, 8, 8), 3, 0, index) for index in range(len(sizes))], sizes)


def trained(nodes: list[Node], config: LocalConfig, stacked: bool, **how: Any) -> list[Node]:
    local_training.attach_optimizers(nodes, config)
    for group in group_nodes(nodes, stacked):
        local_training.train(group, TASK, config, COMPUTE, **how)
    return nodes


def same(some: Sequence[Node], others: Sequence[Node], tolerance: float = 1e-4) -> None:
    for one, other in zip(some, others, strict=True):
        for name, value in other.model.state_dict().items():
            mine = one.model.state_dict()[name]
            torch.testing.assert_close(mine, value, rtol=tolerance, atol=tolerance)


# --- stacked and one by one ----------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("spec", ["small-cnn:4", "resnet8:4", "mlp:8", "lenet5"])
def test_stacked_training_equals_one_by_one(spec: str, optimizer: str) -> None:
    config = LocalConfig(
        epochs=2, batch=4, optimizer=optimizer, lr=2e-3, weight_decay=1e-3, augment="shift-flip"
    )
    first = [p.clone() for p in built(spec)[0].model.parameters()]
    stacked = trained(built(spec), config, stacked=True)
    alone = trained(built(spec), config, stacked=False)
    assert len(group_nodes(stacked, stacked=True)) == 1
    same(stacked, alone)
    assert any((p != q).any() for p, q in zip(first, alone[0].model.parameters(), strict=True))


def test_each_node_has_own_steps_and_schedule() -> None:
    config = LocalConfig(epochs=2, batch=4, lr=0.1, lr_end=0.001)
    nodes = trained(built("mlp:8"), config, stacked=True)
    for node, steps in zip(nodes, (3, 7, 5), strict=True):
        (group,) = node.optimizers["model"].param_groups
        assert group["lr"] == pytest.approx(0.001), "the schedule of each node ends at its final value"
        assert all(entry["step"] == steps for entry in node.optimizers["model"].state.values())


def test_report_gets_active_nodes_and_losses() -> None:
    reports: list[tuple[int, list[str]]] = []

    def report(nodes: Sequence[Node], step: int, losses: torch.Tensor) -> None:
        assert losses.shape == (len(nodes),)
        assert not losses.requires_grad
        reports.append((step, [node.name for node in nodes]))

    trained(built("mlp:8"), LocalConfig(epochs=1, batch=4), stacked=True, report=report)
    assert reports == [  # 2, 4 and 3 steps; nodes with most steps first
        (1, ["n1", "n2", "n0"]),
        (2, ["n1", "n2", "n0"]),
        (3, ["n1", "n2"]),
        (4, ["n1"]),
    ]


class Listening(nn.Module):
    """A linear model that records its training inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(64, 3)
        self.inputs: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.inputs.append(x.detach().clone())
        output: torch.Tensor = self.linear(x.flatten(1))
        return output


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_training_matches_plain_loop(optimizer: str) -> None:
    config = LocalConfig(
        epochs=2, batch=4, optimizer=optimizer, lr=0.05, lr_end=0.01, weight_decay=0.01, smoothing=0.2
    )
    (node,) = trained(made([Listening()], [10]), config, stacked=False)
    model = Listening()
    own: torch.optim.Optimizer = (
        torch.optim.Adam(model.parameters(), weight_decay=0.01)
        if optimizer == "adam"
        else torch.optim.SGD(model.parameters(), 1.0, momentum=0.9, weight_decay=0.01)
    )
    batches = node.model.inputs
    assert len(batches) == 5
    for step, inputs in enumerate(batches):
        own.param_groups[0]["lr"] = 0.01 + 0.04 * (1 + math.cos(math.pi * step / 4)) / 2
        rows = [(node.data.inputs == image).flatten(1).all(1).nonzero().item() for image in inputs]
        own.zero_grad()
        F.cross_entropy(model(inputs), node.data.targets[rows], label_smoothing=0.2).backward()
        own.step()
    torch.testing.assert_close(node.model.linear.weight, model.linear.weight)
    torch.testing.assert_close(node.model.linear.bias, model.linear.bias)


@pytest.mark.parametrize(("size", "batch"), [(10, 4), (3, 8), (6, 6)])
def test_each_example_is_used_once_per_epoch(size: int, batch: int) -> None:
    nodes = made([Listening()], [size])
    nodes[0].data.inputs[:] = torch.arange(size).view(-1, 1, 1, 1)
    trained(nodes, LocalConfig(epochs=6, batch=batch), stacked=False)
    met = torch.cat(nodes[0].model.inputs)[:, 0, 0, 0].long().tolist()
    passes = [met[start : start + size] for start in range(0, 6 * size, size)]
    assert len(met) >= 6 * size
    assert all(sorted(each) == list(range(size)) for each in passes)
    assert len({tuple(each) for each in passes}) > 1, "each epoch is shuffled differently"
    assert {len(inputs) for inputs in nodes[0].model.inputs} == {batch}


@pytest.mark.parametrize("augment", ["shift", "shift-flip"])
def test_augmentation_reaches_the_batches(augment: Any) -> None:
    (node,) = made([Listening()], [6])
    trained([node], LocalConfig(epochs=2, batch=6, augment=augment), stacked=False)
    met = torch.cat(node.model.inputs)
    as_they_are = sum(any(torch.equal(image, own) for own in node.data.inputs) for image in met)
    assert len(met) == 12
    assert as_they_are < 6


# --- dropout, interrupted training --------------------------------------------------------------


def dropping(sizes: Sequence[int] = SIZES) -> list[Node]:
    models = []
    for index in range(len(sizes)):
        torch.manual_seed(index)
        models.append(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 3)))
    return made(models, sizes)


@pytest.mark.sample(5)
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("spec", ["resnet8:4", "dropout"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_resumed_training_equals_uninterrupted(
    spec: str, optimizer: str, stacked: bool, tmp_path: Path
) -> None:
    def nodes() -> list[Node]:
        return dropping() if spec == "dropout" else built(spec)

    config = LocalConfig(epochs=3, batch=4, optimizer=optimizer, lr=0.01, augment="shift")
    whole = trained(nodes(), config, stacked)

    first = nodes()
    local_training.attach_optimizers(first, config)
    for group in group_nodes(first, stacked):
        assert local_training.train(group, TASK, config, COMPUTE, steps=3) == 3
    save_state(tmp_path / "state", [node.state_dict() for node in first])

    second = nodes()
    local_training.attach_optimizers(second, config)
    for node, state in zip(second, load_state(tmp_path / "state"), strict=True):
        node.load_state_dict(state)
    for group in group_nodes(second, stacked):
        longest = max(config.steps(len(node.data)) for node in group)
        assert local_training.train(group, TASK, config, COMPUTE, start=3) == longest
    same(second, whole, 0.0)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_frozen_parameters_do_not_change(optimizer: str, stacked: bool) -> None:
    nodes = built("small-cnn:4")
    for node in nodes:
        node.model[0].requires_grad_(False)  # type: ignore[index]
    nodes = made([node.model for node in nodes])  # frozen before it became a node's model
    before = [{name: value.clone() for name, value in node.model.state_dict().items()} for node in nodes]
    config = LocalConfig(epochs=2, batch=4, optimizer=optimizer, lr=0.01, weight_decay=0.1)
    trained(nodes, config, stacked, steps=2)
    for node, old in zip(nodes, before, strict=True):
        now = node.model.state_dict()
        assert torch.equal(now["0.weight"], old["0.weight"]), "no weight decay either"
        assert not torch.equal(now["4.weight"], old["4.weight"])


def test_wholly_frozen_model_gets_no_optimizer() -> None:
    nodes = built("mlp:8")
    nodes[1].model.requires_grad_(False)
    nodes = made([node.model for node in nodes])
    local_training.attach_optimizers(nodes, LocalConfig())
    assert ["model" in node.optimizers for node in nodes] == [True, False, True]


def test_training_does_not_use_global_generator() -> None:
    nodes = dropping()
    before = torch.get_rng_state()
    trained(nodes, LocalConfig(epochs=1, batch=4), stacked=True)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("steps", [1, None])
def test_model_is_in_evaluation_mode_after_full_and_partial_training(steps: int | None) -> None:
    nodes = trained(built("mlp:8"), LocalConfig(epochs=1, batch=4), True, steps=steps)
    assert not any(node.model.training for node in nodes)
    assert not any(parameter.requires_grad for node in nodes for parameter in node.model.parameters())


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("rounds", [1, 3, 4])
def test_rounds_together_take_the_steps_of_one_call(rounds: int, stacked: bool) -> None:
    config = LocalConfig(epochs=3, batch=4, optimizer="sgd", lr=0.05)
    whole, parts = trained(built("mlp:8"), config, stacked), built("mlp:8")
    for round in range(rounds):
        span = Span(round, round + 1, rounds)
        if round == 0:
            trained(parts, config, stacked, span=span)
        else:  # the optimizers keep their state
            for group in group_nodes(parts, stacked):
                local_training.train(group, TASK, config, COMPUTE, span=span)
    for one, other in zip(whole, parts, strict=True):
        for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
            torch.testing.assert_close(a, b)


def test_optimizer_state_is_dropped_after_round() -> None:
    """The weights are replaced before the next round."""
    nodes = built("mlp:8")
    setting = NodeSetting(TASK, LocalConfig(epochs=1, batch=4), COMPUTE)
    before = to_vector(nodes[0].model)
    NodeView(NodeGroup(nodes[:1]), setting).train(Span.part(0, 2))
    assert not torch.equal(to_vector(nodes[0].model), before)
    assert nodes[0].state_dict()["optimizers"] == {}


def test_every_round_has_at_least_one_step() -> None:
    lengths = [len(Span(round, round + 1, 5).steps(3)) for round in range(5)]
    assert lengths == [1] * 5
    assert sum(len(Span(round, round + 1, 5).steps(17)) for round in range(5)) == 17


# --- schedule and options ------------------------------------------------------------------------


def test_number_of_steps_matches_hand_computation() -> None:
    assert LocalConfig(epochs=1.5, batch=4).steps(8) == 3
    assert LocalConfig(epochs=1, batch=4).steps(9) == 3
    assert LocalConfig(epochs=1, batch=4, min_steps=7).steps(9) == 7
    assert LocalConfig(epochs=0.001, batch=4).steps(1) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", math.nan),
        ("epochs", math.inf),
        ("epochs", 0),
        ("batch", 0),
        ("lr", -0.1),
        ("momentum", math.nan),
        ("weight_decay", -1),
        ("smoothing", 1),
    ],
)
def test_rejects_invalid_options(name: str, value: float) -> None:
    with pytest.raises(ArgumentError, match=rf"local\.{name} = {value}"):
        LocalConfig(**{name: value})  # type: ignore[arg-type]
