"""Updates simulated by an adversary equal those of the training at a node."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fedstill.attacks.simulated_updates import (
    ModelPart,
    ObservedUpdate,
    Schedule,
    loss_gradients,
    shared_parameter_names,
    simulate_training,
)
from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.models import build
from fedstill.node import local_training
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.node import Node
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.local_config import LocalConfig, Span
from fedstill.tasks.classification import Classification
from tests.support.errors import raises_invalid

SHAPE, CLASSES = (1, 8, 8), 4


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def examples(count: int) -> TensorData:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(count, *SHAPE, generator=generator) * 2 - 1
    return TensorData(inputs, torch.randint(CLASSES, (count,), generator=generator))


def train_at_node(
    model: nn.Module, data: TensorData, local: LocalConfig
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Train with the code of the node; return the parameters and the examples of each step."""
    node = Node("clinic", data, copy.deepcopy(model), Gate("clinic", PolicyConfig(), AuditLog()), 3)
    local_training.attach_optimizers([node], local)
    local_training.train([node], Classification(CLASSES), local, Compute())
    steps, total = local.steps(len(data)), len(data)
    passes = range(steps * local.batch // total + 1)
    passes = torch.cat(
        [torch.randperm(total, generator=node.random_generator("pass", number)) for number in passes]
    )
    return parameters(node.model), list(passes[: steps * local.batch].split(local.batch))


# --- simulation and training ----------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp:8", "lenet5", "resnet8:4"])  # resnet8 has batch norm
@pytest.mark.parametrize(
    "local",
    [
        LocalConfig(epochs=1, batch=2, optimizer="sgd", lr=0.1, lr_end=0.02, momentum=0.0, smoothing=0.0),
        LocalConfig(epochs=2, batch=2, optimizer="sgd", lr=0.1, lr_end=0.02, weight_decay=0.01),
        LocalConfig(epochs=2, batch=2, lr=1e-2, weight_decay=0.01),
        LocalConfig(epochs=3, batch=8, lr=1e-3),  # the batch size exceeds the number of examples
    ],
    ids=["sgd", "momentum", "adam", "large batch"],
)
def test_simulated_update_matches_local_training(model: str, local: LocalConfig) -> None:
    network, data = build(model, SHAPE, CLASSES, 0), examples(5)
    after, order = train_at_node(network, data, local)
    before = parameters(network)
    simulated = simulate_training(
        network, before, data.inputs, data.targets, Schedule.from_config(local, 5), order
    )
    for name, value in after.items():
        torch.testing.assert_close(simulated[name], value, rtol=0, atol=1e-5)
    moved = max(float((after[name] - before[name]).abs().max()) for name in after)
    assert moved > 1e-3, "training changed the parameters"


def test_simulation_leaves_batch_norm_unchanged() -> None:
    network, data = build("resnet8:4", SHAPE, CLASSES, 0).eval(), examples(4)
    state = copy.deepcopy(network.state_dict())
    loss_gradients(network, parameters(network), data.inputs, data.targets)
    assert not network.training
    assert all(torch.equal(state[name], value) for name, value in network.state_dict().items())


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_update_gradient_matches_finite_differences(optimizer: str) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 2)).double()
    for parameter in network.parameters():
        nn.init.uniform_(parameter, -1, 1, generator=torch.Generator().manual_seed(parameter.numel()))
    schedule = Schedule((0.3, 0.2), 1, optimizer, momentum=0.5, smoothing=0.1)  # type: ignore[arg-type]
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.tensor([0, 1])
    release = ObservedUpdate(network, {"1.weight": torch.zeros(3, 4), "3.bias": torch.zeros(2)}, schedule)
    assert torch.autograd.gradcheck(
        lambda x: tuple(release.compute_target(x, y).values()), x.requires_grad_(), eps=1e-6, atol=1e-5
    )


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["all", "head"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])  # momentum has no effect in the first step
def test_one_sgd_step_gives_gradient(part: ModelPart, momentum: float) -> None:
    network, data = build("lenet5", SHAPE, CLASSES, 0), examples(2)
    schedule = Schedule((0.1,), 2, momentum=momentum, weight_decay=0.5, smoothing=0.1)
    own = parameters(network)
    after = simulate_training(network, own, data.inputs, data.targets, schedule)
    moved = {name: own[name] - after[name] for name in shared_parameter_names(network, part)}
    gradient = ObservedUpdate(network, moved, schedule).as_gradient()
    assert gradient.is_gradient
    assert (gradient.model, gradient.schedule.smoothing) == (network, 0.1)
    again = gradient.compute_target(data.inputs, data.targets)
    assert list(gradient.target) == list(again) == list(moved)
    for name, true in again.items():
        torch.testing.assert_close(gradient.target[name], true, rtol=0, atol=1e-5)


def test_mean_gradient_accounts_for_momentum() -> None:
    # Two steps with gradient 1, rates 0.5 and 0.25, momentum 0.5: 0.5 * 1 + 0.25 * 1.5.
    release = ObservedUpdate(
        nn.Linear(1, 1), {"w": torch.tensor(0.875)}, Schedule((0.5, 0.25), 1, momentum=0.5)
    )
    assert release.mean_gradient()["w"].item() == pytest.approx(1.0)


# --- released parameters --------------------------------------------------------------------------


def test_span_has_rates_of_its_steps() -> None:
    local = LocalConfig(epochs=2, batch=2, lr=1.0, lr_end=0.0)
    whole = Schedule.from_config(local, 6).rates
    assert len(whole) == 6
    assert (
        sum((Schedule.from_config(local, 6, Span(part, part + 1, 3)).rates for part in range(3)), ()) == whole
    )


def test_rejects_augmentation() -> None:
    with raises_invalid("local.augment", "shift"):
        Schedule.from_config(LocalConfig(augment="shift"), 4)
