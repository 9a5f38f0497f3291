"""FENS: rounds compared with a reference, held-out examples, resumed nodes, mixed networks, and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedstill
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, FedstillError
from fedstill.core.run_writer import RunWriter
from fedstill.core.seeds import torch_generator
from fedstill.federation.link_config import LinkConfig
from fedstill.methods import NodeView
from fedstill.methods.fens import FENS, HELD_OUT
from fedstill.models import build
from fedstill.models.ensemble import Ensemble
from fedstill.models.module_utils import parameter_count, to_vector
from fedstill.node.node_group import NodeGroup
from fedstill.node.node_service import NodeService
from fedstill.node.policy import PolicyConfig
from fedstill.privacy.config import NoPrivacy, PrivacyConfig
from fedstill.privacy.dpsgd import DPSGD
from fedstill.privacy.noisy_outputs import NoisyOutputs
from fedstill.privacy.pate import PATE
from fedstill.protocol.local_config import LocalConfig
from fedstill.runs.simulation import Simulation
from fedstill.student.evaluate import evaluate
from fedstill.tasks.multi_label import MultiLabel
from tests.support.errors import raises_invalid, raises_refused
from tests.support.links import NAMES, Away, Loopback, RecordingLink, here, tiny
from tests.support.runs import make_run, result_of
from tests.support.vectors_world import CLASSES, FEATURES, OPEN, by_class, setting, vectors

LOCAL = LocalConfig(epochs=3, batch=8)


def finished(method: FENS, parts: Sequence[TensorData] | None = None, **changes: Any) -> Simulation:
    simulation = Simulation(setting(method, parts, **{"local": LOCAL, **changes}))
    simulation.run()
    return simulation


def student(simulation: Simulation) -> Ensemble:
    assert isinstance(simulation.student, Ensemble)
    return simulation.student


def held_out(simulation: Simulation) -> list[TensorData]:
    """Return each node's examples for the aggregator."""
    parts = []
    for node in simulation.nodes:
        data = node.modules[HELD_OUT].data
        assert isinstance(data, TensorData)
        parts.append(data)
    return parts


# --- the aggregator -------------------------------------------------------------------------------------


def softmax_gradient(z: torch.Tensor, y: torch.Tensor, w: torch.Tensor, b: float) -> tuple[Any, float]:
    """Return the gradients of the mean cross-entropy of ``sum_k w_k z_k + b``, by its formula.

    Args:
        z: outputs ``(n, K, C)``.
        y: classes ``(n,)``.
        w: weights ``(K,)``.
    """
    p = (torch.einsum("k,nkc->nc", w, z) + b).softmax(1)
    difference = (p - F.one_hot(y, z.shape[2])) / len(z)
    return torch.einsum("nc,nkc->k", difference, z), float(difference.sum())


@pytest.mark.parametrize("server", ["fedavg", "fedadam"])
def test_rounds_equal_the_formulas_of_two_nodes(server: Any) -> None:
    """Weights of a linear aggregator, with all held-out examples in a step: no random numbers are left."""
    data = vectors(60)
    parts = [data.subset(torch.arange(40)), data.subset(torch.arange(40, 60))]
    options = {"rounds": 3, "local_steps": 2, "lr": 0.2, "held_out": 0.5, "server_lr": 0.01, "batch": 100}
    simulation = finished(FENS(aggregator="linear", server=server, **options), parts)
    models = [node.model.eval() for node in simulation.nodes]
    w, m, v = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64), 0.0, 0.0
    for _ in range(3):
        changes = []
        for part in held_out(simulation):
            with torch.no_grad():
                z = torch.stack([model(part.inputs) for model in models], 1).double()  # (n, 2, C)
            own = w.clone()
            for _ in range(2):
                gradient, of_bias = softmax_gradient(z, part.targets, own[:2], float(own[2]))
                own -= 0.2 * torch.tensor([*gradient.tolist(), of_bias])
            changes.append(own - w)
        mean = (20 * changes[0] + 10 * changes[1]) / 30
        if server == "fedadam":
            m, v = 0.9 * m + 0.1 * mean, 0.99 * v + 0.01 * mean**2
            mean = 0.01 * m / (v**0.5 + 1e-3)
        w = w + mean
    assert [len(part) for part in held_out(simulation)] == [20, 10]
    torch.testing.assert_close(to_vector(student(simulation).aggregator).double(), w, rtol=0, atol=1e-5)


def test_small_batches_are_samples_of_the_held_out_examples() -> None:
    """One node, one step, and the first two of its examples in the order of its generator."""
    data = vectors(12)
    options = {"rounds": 1, "batch": 2, "lr": 0.3, "server": "fedavg", "held_out": 0.5}
    simulation = finished(FENS(aggregator="weights", **options), [data])
    (node,), (part,) = simulation.nodes, held_out(simulation)
    rows = torch.randperm(6, generator=torch_generator(0, node.name, "aggregator", 0, 0))[:2]
    with torch.no_grad():
        z = node.model.eval()(part.inputs[rows])
    aggregator = student(simulation).aggregator
    w = torch.ones(CLASSES, requires_grad=True)
    F.cross_entropy(w * z, part.targets[rows]).backward()
    assert w.grad is not None
    torch.testing.assert_close(aggregator.weight[0], (w - 0.3 * w.grad).detach())


@pytest.mark.parametrize("aggregator", ["linear", "weights"])
def test_weighted_sum_without_training_is_the_mean(aggregator: Any) -> None:
    simulation = finished(FENS(aggregator=aggregator, rounds=1, lr=0.0))
    x = vectors(60, seed=1).inputs
    with torch.no_grad():
        mean = torch.stack([node.model.eval()(x) for node in simulation.nodes]).mean(0)
        torch.testing.assert_close(simulation.student.eval()(x), mean)


@pytest.mark.slow
def test_aggregator_corrects_the_mean_of_skewed_nodes() -> None:
    """Nodes with almost one class each: the mean of their heads is as good as chance for some classes."""
    result = Simulation(setting(FENS(rounds=200, held_out=0.3, server_lr=0.01), local=LOCAL)).run()
    assert result["accuracy"] > result["ensemble"]["accuracy"] + 10


# --- the student ----------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("aggregator", ["nn", "linear", "weights"])
def test_loaded_student_reaches_the_metric_of_the_run(tmp_path: Path, aggregator: str) -> None:
    method = {"name": "fens", "rounds": 5, "aggregator": aggregator, "width": 2}
    make_run(
        tmp_path / "run", method, nodes={"models": ["mlp:32", "mlp:8"], "policy": {"outputs_only": False}}
    )
    result = evaluate(tmp_path / "run" / "student.safetensors", "digits")
    form = "nn6" if aggregator == "nn" else aggregator
    assert result["student"] == f"ensemble:{form}:mlp:32,mlp:8,mlp:32"
    assert result["metrics"]["accuracy"] == result_of(tmp_path)["student"]["accuracy"]


def test_members_are_the_nodes_models_and_given_student_stays() -> None:
    simulation = finished(FENS(rounds=2))
    for node, member in zip(simulation.nodes, student(simulation).members, strict=True):
        assert torch.equal(to_vector(node.model), to_vector(member))
    given = build("linear", (FEATURES,), CLASSES, 0, "student")
    models = [build("linear", (FEATURES,), CLASSES, 0, index) for index in range(3)]
    before = to_vector(given)
    outcome = fedstill.distil(
        by_class(vectors()),
        models,
        given,
        vectors(60, seed=1),
        CLASSES,
        task="tabular",
        method=FENS(rounds=2),
        policies=[OPEN] * 3,
    )
    assert isinstance(outcome.student, Ensemble)
    assert str(outcome.student.name) == "ensemble:nn12:3*linear"
    assert torch.equal(to_vector(given), before)


# --- held-out examples ----------------------------------------------------------------------------------


def rows_of(data: TensorData) -> set[tuple[float, ...]]:
    return {tuple(row.tolist()) for row in data.inputs}


def test_models_do_not_learn_from_held_out_examples() -> None:
    simulation = Simulation(setting(FENS(held_out=0.2)))
    for node, part, whole in zip(simulation.nodes, held_out(simulation), by_class(vectors()), strict=True):
        assert len(part) == round(0.2 * len(whole))
        assert rows_of(node.data) | rows_of(part) == rows_of(whole)
        assert not rows_of(node.data) & rows_of(part)
    other = Simulation(setting(FENS(held_out=0.2), seed=1))
    assert rows_of(held_out(other)[0]) != rows_of(held_out(simulation)[0])


@pytest.mark.parametrize(("share", "count"), [(0.0, 12), (0.01, 1), (0.99, 11)])
def test_held_out_examples_are_one_to_all_but_one(share: float, count: int) -> None:
    simulation = Simulation(setting(FENS(held_out=share), [vectors(12), vectors(1)]))
    assert [len(part) for part in held_out(simulation)] == [count, 1]
    assert [len(node.data) for node in simulation.nodes] == [12 if share == 0 else 12 - count, 1]


# --- bytes ----------------------------------------------------------------------------------------------


def test_bytes_are_those_of_models_and_aggregators() -> None:
    simulation = Simulation(setting(FENS(rounds=7), local=LOCAL))
    result = simulation.run()
    model, aggregator = FEATURES * CLASSES + CLASSES, parameter_count(student(simulation).aggregator)
    assert aggregator == 3 * CLASSES * 12 + 12 + 12 * CLASSES + CLASSES
    kinds = result["bytes"]["by_kind"]
    assert kinds["parameters"] == {"up": 3 * 4 * model, "down": 3 * 3 * 4 * model}
    assert kinds["aggregator parameters"] == dict.fromkeys(("up", "down"), 3 * 4 * 7 * aggregator)
    assert kinds["data sizes"] == {"up": 3 * 4, "down": 0}
    assert result["queries_by_name"] == {"upload_model": 1, "evaluate_models": 1, "train_aggregator": 7}


# --- networks of the nodes ------------------------------------------------------------------------------


def test_nodes_evaluate_networks_of_other_architectures() -> None:
    models = [build(name, (FEATURES,), CLASSES, 0, name) for name in ("linear", "mlp:5", "residual-mlp:4")]
    simulation = finished(FENS(rounds=2), models=models)
    assert student(simulation).name.members == ("linear", "mlp:5", "residual-mlp:4")
    for node, part in zip(simulation.nodes, held_out(simulation), strict=True):
        with torch.no_grad():
            expected = torch.stack([each.model.eval()(part.inputs) for each in simulation.nodes], 1)
        torch.testing.assert_close(node.modules[HELD_OUT].get_extra_state(), expected)


class Own(nn.Sequential):
    """Custom network."""

    def __init__(self, width: int = 4) -> None:
        super().__init__(nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, CLASSES))


def test_custom_networks_must_be_alike() -> None:
    finished(FENS(rounds=1), models=[Own() for _ in range(3)], student=Own())
    with raises_invalid("nodes.models", f"{Own.__module__}:Own", "one architecture"):
        Simulation(setting(FENS(), models=[Own(), Own(), Own(5)], student=Own()))


class Fixed(nn.Module):
    """Model without parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the first features."""
        return x[:, :CLASSES]


def test_rejects_model_without_parameters() -> None:
    models = [build("linear", (FEATURES,), CLASSES, 0), Fixed(), Fixed()]
    with raises_invalid("model of node-1", "Fixed", "parameters"):
        Simulation(setting(FENS(), models=models))


def test_several_labels() -> None:
    data = vectors()
    labels = TensorData(data.inputs, F.one_hot(data.targets, CLASSES))
    simulation = Simulation(
        setting(
            FENS(rounds=60, server_lr=0.05), [labels] * 2, task=MultiLabel(CLASSES).on_features(), test=labels
        )
    )
    assert simulation.run()["auc"] > 90


# --- what a node refuses --------------------------------------------------------------------------------


@pytest.mark.parametrize("private", [DPSGD(), PATE(), NoisyOutputs()])
def test_mechanisms_refuse_training_without_noise(private: PrivacyConfig) -> None:
    rule = f"privacy: mechanism {private.registered_name} cannot protect it"
    with raises_refused(rule, "trains aggregator", query="train_aggregator"):
        Simulation(setting(FENS(), privacies=[private] * 3))


def test_budget_refuses_parameters() -> None:
    with raises_refused("privacy: a budget is set", query="upload_model"):
        Simulation(setting(FENS(), privacies=[NoPrivacy(epsilon=3.0)] * 3))


def test_outputs_only_and_secure_aggregation_refuse_models() -> None:
    with raises_refused("outputs_only: parameters"):
        Simulation(setting(FENS(), policies=[PolicyConfig()] * 3))
    with raises_refused("outputs_only: aggregator parameters", query="train_aggregator"):
        Simulation(setting(FENS(), policies=[PolicyConfig(kinds=("parameters",))] * 3))
    with pytest.raises(ArgumentError, match="secure_aggregation"):
        Simulation(
            setting(FENS(), link=LinkConfig(secure_aggregation=True), local=LocalConfig(optimizer="sgd"))
        )


@pytest.mark.parametrize(
    ("length", "names", "fault"),
    [
        (14, [], "multiple of 15"),
        (0, [], "multiple of 15"),
        (15, ["linear", "linear"], "more numbers"),
        (31, ["linear", "linear"], "1 numbers less"),
        (15, ["tests.methods.test_fens:Own"], "fedstill's own networks"),
        (15, ["unet:tests.methods.test_fens:Own"], "fedstill's own networks"),
        (15, 15, "fedstill's own networks"),
        (15, ["mlp:10000000"], "more numbers"),
        (15, ["mlp:1000000000000"], "fit into memory"),
    ],
)
def test_node_refuses_other_models(length: int, names: Any, fault: str) -> None:
    """A server makes no node import code, or allocate more than the server has sent."""
    simulation = Simulation(setting(FENS()))
    node = NodeView(NodeGroup(simulation.nodes[:1]), simulation.at_nodes)
    with pytest.raises(ArgumentError, match=fault):
        FENS().evaluate_models(node, torch.zeros(length), names)
    assert not len(simulation.nodes[0].modules[HELD_OUT].get_extra_state())


def test_node_trains_no_aggregator_before_the_models() -> None:
    simulation = Simulation(setting(FENS()))
    node = NodeView(NodeGroup(simulation.nodes[:1]), simulation.at_nodes)
    with raises_invalid("query", "train_aggregator", "evaluate_models"):
        FENS().train_aggregator(node, torch.zeros(3), 0)


# --- interrupted runs of deployed nodes -----------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("calls", [16, 22, 34])
def test_restarted_nodes_resume_with_their_outputs(
    calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop while models are uploaded or evaluated, or in the rounds, and restart all processes."""
    config = tiny("fens", {"rounds": 5})
    simulation, metrics = here(config)
    away = Away(config, tmp_path)
    monkeypatch.setattr(RunWriter, "is_save_due", lambda self: True)
    count = iter(range(calls))

    class Breaks(Loopback):
        def call(self, node: str, message: bytes, seconds: float) -> bytes:
            if next(count, None) is None:
                raise FedstillError("the power is off")
            return super().call(node, message, seconds)

    with pytest.raises(FedstillError, match="the power is off"):
        away.live(Breaks(away.serve)).run()
    again = {name: NodeService(tmp_path / "nodes" / name) for name in NAMES}
    for host in away.hosts.values():
        host.close()
    server = away.live(RecordingLink(again))
    result = server.run()
    assert (result["accuracy"], result["bytes"]) == (metrics["accuracy"], metrics["bytes"])
    assert torch.equal(to_vector(server.student), to_vector(simulation.student))
    away.same_nodes(simulation)
