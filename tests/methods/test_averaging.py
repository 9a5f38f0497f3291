"""FedAvg and similar methods, compared with plain implementations of their formulas."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.methods.fedavg import FedAvg, sample_nodes
from fedstill.methods.fedavgm import FedAvgM
from fedstill.methods.fedper import FedPer
from fedstill.methods.fedprox import FedProx
from fedstill.methods.lg_fedavg import LGFedAvg
from fedstill.models.extractor_head import EXTRACTOR, HEAD, split_model
from fedstill.models.module_utils import to_vector
from fedstill.node import local_training
from fedstill.node.node import Node
from fedstill.protocol.local_config import LocalConfig
from tests.support import small_world
from tests.support.small_world import CLASSES, SEED, TASK, World, change_responses, made, make_nodes, run

pytestmark = pytest.mark.usefixtures("steady_adam")

EQUAL, UNEQUAL = (8, 8, 8), (6, 24, 12)
ALL = 24  # this batch holds each example of a node equally often, so every step is a full-batch step
ENGINES = ["stacked", "one-by-one"]
LR = 0.2


def descent(steps: int) -> LocalConfig:
    """Return options of full-batch gradient descent with a constant learning rate."""
    return LocalConfig(
        epochs=0,
        min_steps=steps,
        batch=ALL,
        optimizer="sgd",
        lr=LR,
        lr_end=LR,
        momentum=0.0,
        smoothing=0.0,
    )


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def resnet() -> nn.Module:
    return made("resnet8:4")


def world(
    config: Any,
    local: LocalConfig,
    *,
    make: Any = two_layers,
    sizes: Sequence[int] = UNEQUAL,
    engine: str = "stacked",
) -> World:
    def network(number: int) -> nn.Module:
        torch.manual_seed(number)
        return split_model(make(), "model") if config.needs().split_models else make()

    nodes = make_nodes([network(index) for index in range(len(sizes))], sizes=sizes)
    return small_world.world(config, nodes, network(99), local=local, stacked=engine == "stacked")


def vectors(one: World, part: str = "") -> torch.Tensor:
    return torch.stack([to_vector(node.model.get_submodule(part)) for node in one.nodes])


def gradients(model: nn.Module, data: TensorData) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Return the gradients of the mean loss over all data, by plain autograd."""
    parameters = list(model.parameters())
    loss = F.cross_entropy(model(data.inputs), data.targets)
    return zip(parameters, torch.autograd.grad(loss, parameters), strict=True)


def descend(model: nn.Module, data: TensorData, steps: int, mu: float = 0.0) -> nn.Module:
    """Return a copy after steps of full-batch descent on F(w) + mu/2 ||w - w_0||^2."""
    model = copy.deepcopy(model)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(steps):
        pairs = list(gradients(model, data))
        with torch.no_grad():
            for (parameter, gradient), first in zip(pairs, start, strict=True):
                parameter.sub_(LR * (gradient + mu * (parameter - first)))
    return model


def mean_of(models: Sequence[nn.Module], sizes: Sequence[int]) -> torch.Tensor:
    total = torch.zeros_like(to_vector(models[0]), dtype=torch.float64)
    for model, size in zip(models, sizes, strict=True):
        total += size / sum(sizes) * to_vector(model).double()
    return total.float()


def near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-6)


# --- FedAvg ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sizes", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
def test_rounds_of_one_full_batch_step_equal_centralized_gradient_descent(
    sizes: Sequence[int], engine: str
) -> None:
    one = world(FedAvg(rounds=3), descent(3), sizes=sizes, engine=engine)
    union = TensorData(
        torch.cat([node.data.inputs for node in one.nodes]),
        torch.cat([node.data.targets for node in one.nodes]),
    )
    central = copy.deepcopy(one.server.student)
    for _ in range(3):
        central = descend(central, union, 1)
        one.server.step()
        near(to_vector(one.server.student), to_vector(central))


@pytest.mark.parametrize("engine", ENGINES)
def test_batch_norm_buffers_are_averaged_with_parameters(engine: str) -> None:
    local = LocalConfig(epochs=2, batch=5)
    one = world(FedAvg(rounds=2), local, make=resnet, engine=engine)
    run(one)
    states = [node.model.state_dict() for node in one.nodes]
    assert not torch.equal(states[0]["1.running_mean"], states[1]["1.running_mean"])
    for name, value in one.server.student.state_dict().items():
        mean = sum(size / 42 * state[name].double() for size, state in zip(UNEQUAL, states, strict=True))
        expected = mean if value.is_floating_point() else mean.round()
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6, msg=name)
    # Batches by hand: 2 epochs of 6, 24, 12 examples by 5 are 3, 10, 5 steps. The first round has 1, 5, 2 of
    # these; their weighted mean, 3.57, is rounded to 4. The second round adds 2, 5, 3.
    first = round((6 * 1 + 24 * 5 + 12 * 2) / 42)
    assert [int(state["1.num_batches_tracked"]) for state in states] == [first + 2, first + 5, first + 3]


@pytest.mark.parametrize("rounds", [1, 3, 4, 7])
def test_rounds_with_one_node_equal_uninterrupted_training(rounds: int) -> None:
    """Rounds use the same batches and the same schedule, and lose no state."""
    local = LocalConfig(epochs=3, batch=5, optimizer="sgd", momentum=0.0, lr=0.2, lr_end=0.01)
    one = world(FedAvg(rounds=rounds), local, sizes=(17,))
    node = one.nodes[0]
    twin = Node(node.name, node.data, copy.deepcopy(node.model), node.gate, SEED)
    twin.modules["model"].load_state_dict(one.server.student.state_dict())
    local_training.attach_optimizers([twin], local)
    local_training.train([twin], TASK, local, Compute())
    run(one)
    near(to_vector(one.server.student), to_vector(twin.model))


# --- FedProx ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_fedprox_minimizes_eq_2_from_start_of_each_round(engine: str) -> None:
    """Nodes have 2, 8 and 4 steps per round; nodes that have finished leave the stack."""
    local = replace(descent(1), epochs=16.0)
    one = world(FedProx(rounds=2, mu=2.0), local, engine=engine)
    w = copy.deepcopy(one.server.student)
    for _ in range(2):
        here = [
            descend(w, node.data, steps, mu=2.0) for node, steps in zip(one.nodes, (2, 8, 4), strict=True)
        ]
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(mean_of(here, UNEQUAL), w.parameters())
        one.server.step()
        near(vectors(one), torch.stack([to_vector(model) for model in here]))
        near(to_vector(one.server.student), to_vector(w))


# --- FedAvgM ---------------------------------------------------------------------------------------


def test_two_rounds_of_fedavgm_by_hand() -> None:
    beta, rate = 0.9, 0.5
    one = world(FedAvgM(rounds=2, beta=beta, server_lr=rate), descent(6))
    w0 = to_vector(one.server.student)
    one.server.step()
    v1 = w0 - mean_of([node.model for node in one.nodes], UNEQUAL)
    w1 = to_vector(one.server.student)
    near(w1, w0 - rate * v1)
    one.server.step()
    v2 = beta * v1 + (w1 - mean_of([node.model for node in one.nodes], UNEQUAL))
    near(to_vector(one.server.student), w1 - rate * v2)
    assert (v2 - v1).norm() > 0.01


def test_momentum_carries_parameters_but_no_buffers() -> None:
    one = world(FedAvgM(rounds=3, beta=0.9), LocalConfig(epochs=6, batch=5), make=resnet)
    run(one)
    mean = copy.deepcopy(one.server.student)
    training_places = {name for name, _ in mean.named_parameters()}
    states = [node.model.state_dict() for node in one.nodes]
    for name, value in one.server.student.state_dict().items():
        average = sum(size / 42 * state[name].double() for size, state in zip(UNEQUAL, states, strict=True))
        if name in training_places:
            assert not torch.allclose(value.double(), average, rtol=1e-5, atol=1e-6), name
        else:
            expected = average if value.is_floating_point() else average.round()
            torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6, msg=name)


# --- personal parts of the network ----------------------------------------------------------------

PERSONAL = [
    pytest.param(FedPer, HEAD, EXTRACTOR, id="fedper"),
    pytest.param(LGFedAvg, EXTRACTOR, HEAD, id="lg-fedavg"),
]


def occurs(needle: torch.Tensor, hay: torch.Tensor) -> bool:
    """Return whether three neighboring values of one vector occur in another one."""
    if hay.numel() < 3 or not hay.is_floating_point():
        return False
    here, windows = needle.flatten().unfold(0, 3, 1), hay.flatten().unfold(0, 3, 1)
    return bool((here[:, None] == windows[None]).all(2).any())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("config", "personal", "shared"), PERSONAL)
def test_messages_never_contain_personal_part(config: Any, personal: str, shared: str, engine: str) -> None:
    one = world(config(rounds=3), descent(6), engine=engine)
    crossed: list[torch.Tensor] = []

    def record(query: str, nodes: Any, sent: Any, response: Any) -> Any:
        up = response()
        crossed.extend(
            [*sent.values(), *(tensor for response in up.values() for tensor in response.values())]
        )
        return up

    change_responses(one, record)
    secrets: list[torch.Tensor] = []  # each state of a node's personal part between rounds
    for _ in range(3):
        one.server.step()
        secrets += list(vectors(one, personal))
        # the search works
        assert any(occurs(vectors(one, shared)[0], tensor) for tensor in crossed)
    assert not any(occurs(secret, tensor) for secret in secrets for tensor in crossed)
    values = to_vector(one.nodes[0].model.get_submodule(shared)).numel()
    whole = to_vector(one.nodes[0].model).numel()
    kind = f"{shared} parameters"
    assert one.audit.traffic_totals()["by_kind"] == {
        "data sizes": {"up": 3 * 4, "down": 0},
        kind: {"up": 3 * 3 * 4 * values, "down": 3 * 3 * 4 * values},
        "parameters": {"up": 0, "down": 3 * 4 * whole},  # equal initial weights for all
        "schedule": {"up": 0, "down": 3 * 3 * 8},
    }


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("config", "personal", "shared"), PERSONAL)
def test_shared_parts_are_averaged_and_personal_parts_persist(
    config: Any, personal: str, shared: str, engine: str
) -> None:
    one = world(config(rounds=3), descent(6), engine=engine)
    here = [copy.deepcopy(one.server.student) for _ in one.nodes]  # equal initial weights
    first = to_vector(one.server.student.get_submodule(personal))
    for _ in range(3):
        here = [descend(model, node.data, 2) for model, node in zip(here, one.nodes, strict=True)]
        one.server.step()
        near(vectors(one), torch.stack([to_vector(model) for model in here]))
        mean = mean_of([model.get_submodule(shared) for model in here], UNEQUAL)
        near(to_vector(one.server.student.get_submodule(shared)), mean)
        for model in here:
            torch.nn.utils.vector_to_parameters(mean, model.get_submodule(shared).parameters())
    parts = vectors(one, personal)
    for one_part, other in ((0, 1), (1, 2), (0, 2)):
        assert (parts[one_part] - parts[other]).norm() > 0.01
    assert torch.equal(to_vector(one.server.student.get_submodule(personal)), first)


# --- partial participation -------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("config", [FedAvg, FedProx, FedPer])
def test_only_participants_are_queried_and_train(config: Any, engine: str) -> None:
    sizes = (6, 24, 12, 8)
    one = world(config(rounds=5, participation=0.5), descent(10), sizes=sizes, engine=engine)
    queried: list[tuple[str, ...]] = []

    def record_nodes(query: str, nodes: tuple[str, ...], sent: Any, response: Any) -> Any:
        queried.append(nodes)
        return response()

    change_responses(one, record_nodes)
    part = config.shared_part
    names = [node.name for node in one.nodes]
    teams = []
    for round in range(5):
        before = vectors(one)
        if round == 0:  # the initial weights
            before = to_vector(one.server.student).expand(4, -1)
        one.server.step()
        participants = queried[-1]
        assert list(participants) == sample_nodes(names, 0.5, SEED, round)
        assert len(participants) == 2
        moved = [
            name for name, old, new in zip(names, before, vectors(one), strict=True) if (old != new).any()
        ]
        assert moved == list(participants)
        rows = [names.index(name) for name in participants]
        mean = mean_of(
            [one.nodes[row].model.get_submodule(part) for row in rows], [sizes[row] for row in rows]
        )
        near(to_vector(one.server.student.get_submodule(part)), mean)
        teams.append(participants)
    assert len(set(teams)) > 1


@pytest.mark.parametrize(
    ("nodes", "share", "expected"),
    [(10, 1.0, 10), (10, 0.7, 7), (100, 0.29, 29), (10, 0.25, 2), (10, 0.01, 1), (1, 0.5, 1), (3, 0.999, 2)],
)
def test_samples_a_share_of_the_nodes_and_at_least_one(nodes: int, share: float, expected: int) -> None:
    names = [str(index) for index in range(nodes)]
    assert len(sample_nodes(names, share, 0, 0)) == expected
    assert sample_nodes(names, 1.0, 0, 0) == names
