"""Methods with public data on tasks other than single-label classification: by hand, and end to end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedstill import tasks
from fedstill.core.compute import EngineConfig
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, QueryRefused
from fedstill.data.public import PublicData
from fedstill.methods import fedkd
from fedstill.methods._public_data import StudentTraining
from fedstill.methods.centralized import Centralized
from fedstill.methods.ensemble import NodeEnsemble
from fedstill.methods.feddf import FedDF
from fedstill.methods.fedkd import FedKD
from fedstill.methods.fedmd import FedMD
from fedstill.methods.public_only import PublicOnly
from fedstill.methods.standalone import Standalone
from fedstill.models import build
from fedstill.node.policy import PolicyConfig
from fedstill.privacy.config import DPTrainingConfig
from fedstill.privacy.dpsgd import DPSGD
from fedstill.privacy.noisy_outputs import NoisyOutputs, OutputsConfig
from fedstill.privacy.pate import PATE, PateConfig
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import method_name
from fedstill.runs.build import Setting
from fedstill.runs.simulation import Simulation
from fedstill.tasks import Task
from tests.support.errors import raises_refused
from tests.support.runs import make_setting, node_data, node_models

SIDE, LENGTH, WORDS, SEED = 8, 6, 9, 3
LOCAL = LocalConfig(epochs=2, batch=8)
TASKS: dict[str, tuple[int, str]] = {  # classes, model
    "multi-label": (3, "small-cnn:4"),
    "text": (2, "bag:8"),
    "segmentation": (2, "unet:4"),
    "reconstruction": (1, "unet:4"),
    "regression": (1, "mlp:8"),
}


def task_of(name: str) -> Task:
    return tasks.TASKS[name]().make(TASKS[name][0])


def shape_of(task: Task) -> tuple[int, ...]:
    return (1, SIDE, SIDE) if task.form == "images" else (LENGTH,)


def model_of(name: str, *names: Any) -> torch.nn.Module:
    task = task_of(name)
    words = WORDS * (task.form == "texts")
    return build(TASKS[name][1], shape_of(task), task.classes, 0, *names, vocabulary=words)


def data_of(name: str, count: int, seed: int) -> TensorData:
    task, draw = task_of(name), torch.Generator().manual_seed(seed)
    shape = {"class": (), "labels": (task.classes,), "map": (SIDE, SIDE)}.get(task.kind, (1, SIDE, SIDE))
    x = torch.rand(count, *shape_of(task), generator=draw) * 2 - 1
    if task.kind == "labels":
        return TensorData(x, (x.flatten(1)[:, : task.classes] > 0).long())
    if task.kind == "map":
        return TensorData(x, (x[:, 0] > 0).long())
    if task.kind == "image":
        return TensorData(x, x.clone())
    if task.kind == "number":
        return TensorData(x, x.mean(1, keepdim=True))
    ids = torch.randint(1, WORDS, (count, LENGTH), generator=draw)
    return TensorData(ids, torch.randint(task.classes, (count, *shape), generator=draw))


def setting(name: str, method: Any, **changes: Any) -> Setting:
    public = data_of(name, 21, 77)
    given: dict[str, Any] = {
        "task": task_of(name),
        "parts": [data_of(name, size, index) for index, size in enumerate((14, 19))],
        "models": [model_of(name, "node", index) for index in range(2)],
        "student": model_of(name, "student"),
        "test": data_of(name, 16, 9),
        "method": method,
        "public": PublicData("held-out", public.inputs, public.targets),
        "policies": [PolicyConfig(outputs_only=False)] * 2,
        "local": LOCAL,
        "engine": EngineConfig(batching="one-by-one"),
        "vocabulary": WORDS * (task_of(name).form == "texts"),
        **changes,
    }
    return make_setting(**given)


BRIEF = StudentTraining(epochs=1, batch=32)
METHODS = (
    FedKD(student=StudentTraining(epochs=2, batch=8)),
    FedKD(student=StudentTraining(epochs=1, batch=8), labeled=True, levels=0),
    FedDF(rounds=2, steps=2, batch=8, weights="counts"),
    FedMD(
        initial_rounds=1,
        rounds=2,
        subset=10,
        public_epochs=1,
        weights="counts",
        student=StudentTraining(epochs=1, batch=32),
    ),
    FedMD(initial_rounds=1, rounds=1, subset=10, distance="l1", student=StudentTraining(epochs=1, batch=32)),
    NodeEnsemble(),
    PublicOnly(),
    Centralized(),
    Standalone(),
)


@pytest.mark.sample(2)
@pytest.mark.usefixtures("steady_adam")
@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("method", METHODS, ids=method_name)
def test_methods_run_tasks_equally_on_both_engines(name: str, method: Any) -> None:
    key = task_of(name).metric
    metrics = [
        Simulation(setting(name, method, engine=EngineConfig(batching=engine))).run()
        for engine in ("one-by-one", "stacked")
    ]
    assert metrics[0][key] is not None
    assert math.isfinite(metrics[0][key])
    assert metrics[0]["bytes"] == metrics[1]["bytes"]
    assert metrics[0][key] == pytest.approx(metrics[1][key], abs=2.0)


# --- FedKD by hand -----------------------------------------------------------------------------------


CLEAR = FedKD(student=StudentTraining(epochs=1, batch=4), levels=0, gamma=math.inf)


def taught(name: str, config: FedKD, parts: Sequence[TensorData]) -> tuple[Simulation, torch.Tensor]:
    """Return a run, and the trained nodes' outputs on the public data: (K, N, ...)."""
    one = setting(name, config, parts=parts)
    experiment = Simulation(one)
    experiment.run()
    assert one.public is not None
    with torch.no_grad():
        return experiment, torch.stack([model.eval()(one.public.inputs) for model in node_models(one)])


def test_node_without_a_label_has_no_weight_for_it() -> None:
    first, second = data_of("multi-label", 12, 0), data_of("multi-label", 9, 1)
    first.targets[:, 2] = -1  # each node knows two of three labels
    second.targets[:, 0] = -1
    experiment, z = taught("multi-label", CLEAR, [first, second])
    n = torch.stack([(part.targets == 1).sum(0) for part in (first, second)]).float()
    expected = torch.stack([z[0, :, 0], (n[:, 1, None] * z[:, :, 1]).sum(0) / n[:, 1].sum(), z[1, :, 2]], 1)
    state = experiment.server.state
    torch.testing.assert_close(state.z_hat[0], expected, rtol=1e-4, atol=1e-5)
    assert state.histogram.sizes.tolist() == [12, 9], "numbers of examples, not of labels"


@pytest.mark.parametrize(
    ("name", "predictions"), [("segmentation", 1), ("segmentation", 2), ("reconstruction", 1)]
)
def test_maps_and_images_are_ensembled_per_pixel(name: str, predictions: int) -> None:
    parts = [data_of(name, 6, 0), data_of(name, 4, 1)]
    experiment, z = taught(name, replace(CLEAR, predictions=predictions), parts)  # (2, 21, C, 8, 8)
    counts = torch.stack([task_of(name).counts(part) for part in parts]).float()
    z_hat = experiment.server.state.z_hat
    assert z_hat.shape == (predictions, *z.shape[1:])
    expected = torch.einsum("kc,kbchw->bchw", counts / counts.sum(0), z)
    torch.testing.assert_close(z_hat[0], expected, rtol=1e-4, atol=1e-5)


def test_large_images_use_smaller_queries() -> None:
    pictures = PublicData("made", torch.zeros(1, 3, 256, 256).expand(100, -1, -1, -1))
    assert fedkd.query_size(pictures) == 2**24 // (3 * 256 * 256) == 85
    assert fedkd.query_size(PublicData("made", torch.zeros(5, 3, 32, 32))) == 2000
    calls = FedKD(weights="equal", z_max=1.0).planned_queries(pictures, 0)
    assert [call.tensors["rows"].tolist() for call in calls] == [[0, 85], [85, 100]]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "text",
            {"predictions": 2},
            r"invalid method.predictions = 2 \(expected 1 for task text: texts are never",
        ),
        (
            "reconstruction",
            {"predictions": 2},
            r"invalid method.predictions = 2 \(expected 1 for task reconstruction: a shifted image",
        ),
    ],
)
def test_rejects_shifts_of_unshiftable_inputs(name: str, options: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Simulation(setting(name, FedKD(student=StudentTraining(epochs=1, batch=8), **options)))


# --- training on public data only -----------------------------------------------------------------------


def test_public_only_trains_without_queries() -> None:
    one = setting("multi-label", PublicOnly(), policies=[PolicyConfig(queries=())] * 2)
    experiment = Simulation(one)
    metrics = experiment.run()
    assert metrics["bytes"]["up"] == metrics["queries"] == 0
    other = setting("multi-label", PublicOnly(), parts=[data_of("multi-label", 5, 50 + k) for k in range(2)])
    Simulation(other).run()
    for mine, theirs in zip(one.student.parameters(), other.student.parameters(), strict=True):
        assert torch.equal(mine, theirs), "independent of the data of nodes"
    fresh = model_of("multi-label", "student")
    assert not torch.equal(next(one.student.parameters()), next(fresh.parameters()))


# --- centralized, with public data ------------------------------------------------------------------------


def test_centralized_may_train_on_public_data_too() -> None:
    """FedKD, Table 4: the student trains on all nodes' examples followed by the public ones."""
    for public, count in ((False, 0), (True, 21)):
        one = setting("multi-label", Centralized(public=public))
        experiment = Simulation(one)
        experiment.run()
        parts = [*node_data(one), *([TensorData(one.public.inputs, one.public.labels)] if public else [])]
        assert len(experiment.server.state.trainer._node.data) == sum(map(len, node_data(one))) + count
        for name in ("inputs", "targets"):
            mine = getattr(experiment.server.state.trainer._node.data, name)
            assert torch.equal(mine, torch.cat([getattr(part, name) for part in parts])), name


# --- under a budget ---------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", TASKS)
def test_fedkd_runs_each_task_under_a_budget_with_dp_sgd(name: str) -> None:
    # With noise of scale 4, sampled again in each run, the count of a node with a dozen records could be 0.
    privacy = DPSGD(epsilon=30.0, counts_noise=1.0, training=DPTrainingConfig(clip=0.5))
    metrics = Simulation(
        setting(name, FedKD(student=StudentTraining(epochs=1, batch=8)), privacies=[privacy] * 2)
    ).run()
    for node in metrics["privacy"]["nodes"]:
        assert node["guarantee"]
        assert 1.0 < node["epsilon"] <= 30.0
        laplace = sorted(event for event in node["events"] if event.startswith("laplace"))
        # A record's three labels and its count, each at scale 1; shares include their rounding.
        expected = {
            "multi-label": [f"laplace({1 / 3})", "laplace(1.0)"],
            "segmentation": [f"laplace({1 / 1.01})"],
        }.get(name, ["laplace(1.0)"])
        assert laplace == expected


@pytest.mark.parametrize("name", ["multi-label", "segmentation", "reconstruction"])
def test_rejects_pate_and_noise_for_images_before_training(name: str) -> None:
    method = FedKD(student=StudentTraining(epochs=1, batch=8), z_max=10.0)
    pate = PATE(epsilon=30.0, pate=PateConfig(teachers=3))
    with raises_refused("privacy", "class an input", "dp-sgd"):
        Simulation(setting(name, method, privacies=[pate] * 2))
    noisy = NoisyOutputs(epsilon=1e4, outputs=OutputsConfig(bound=5.0))
    if name == "multi-label":
        assert Simulation(setting(name, method, privacies=[noisy] * 2)).run()["privacy"]["guarantee"]
        return
    with pytest.raises(QueryRefused, match=r"are images.*use dp-sgd"):
        Simulation(setting(name, method, privacies=[noisy] * 2))
