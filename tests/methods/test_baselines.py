"""The baseline and the two upper bounds of a comparison: standalone, ensemble, centralized."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedstill.core.compute import Compute, EngineConfig
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.data.data_spec import DataSpec
from fedstill.methods.centralized import Centralized
from fedstill.methods.ensemble import NodeEnsemble
from fedstill.methods.standalone import Standalone
from fedstill.models import build
from fedstill.node import local_training
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.node import Node
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.run_plan import RunPlan
from fedstill.runs.build import Setting
from fedstill.runs.simulation import Simulation
from fedstill.tasks.classification import Classification, ClassificationConfig
from tests.support.audit_logs import entries
from tests.support.runs import make_setting, node_data, node_models
from tests.support.small_world import same

pytestmark = pytest.mark.usefixtures("steady_adam")

SHAPE, CLASSES, SIZES = (1, 8, 8), 3, (14, 30, 22)
ENGINES = ["stacked", "one-by-one"]
LOCAL = LocalConfig(epochs=6, batch=10)  # 40 steps on all 66 examples


def ensemble_outputs(experiment: Simulation, x: torch.Tensor) -> torch.Tensor | None:
    """Evaluate the ensemble on inputs."""
    server = experiment.server
    outputs: torch.Tensor | None = server.ensemble_responses(server.query("predict", x=x))
    return outputs


def blobs(count: int, seed: int, classes: int = CLASSES) -> TensorData:
    """Return images with one bright row whose position gives one of three classes."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=draw)
    pixels = -0.8 + 0.1 * torch.rand(count, *SHAPE, generator=draw)
    pixels[torch.arange(count), 0, 2 * labels] = 0.8
    return TensorData(pixels, labels)


def setting(method: Any, specs: tuple[str, ...] = ("mlp:8",) * 3, **changes: Any) -> Setting:
    given: dict[str, Any] = {
        "task": Classification(CLASSES),
        # node k has k + 1 classes
        "parts": [blobs(size, index, index + 1) for index, size in enumerate(SIZES)],
        "models": [build(spec, SHAPE, CLASSES, 0, index) for index, spec in enumerate(specs)],
        "student": build("mlp:8", SHAPE, CLASSES, 0, "student"),
        "test": blobs(50, 9),
        "method": method,
        "policies": [PolicyConfig(outputs_only=False)] * 3,
        "local": LOCAL,
        "engine": EngineConfig(batching="one-by-one"),
        **changes,
    }
    return make_setting(**given)


def trained_alone(name: str, data: TensorData, model: nn.Module) -> nn.Module:
    """Train one node's model locally, without a federation."""
    node = Node(name, data, copy.deepcopy(model), Gate(name, PolicyConfig(), AuditLog()), 0)
    local_training.attach_optimizers([node], LOCAL)
    local_training.train([node], Classification(CLASSES), LOCAL, Compute())
    return node.model


# --- standalone ------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_standalone_trains_each_node_without_queries(engine: Any, tmp_path: Path) -> None:
    policies = [PolicyConfig(queries=())] * 3  # a node that refuses all queries can take part
    one = setting(Standalone(), engine=EngineConfig(batching=engine), policies=policies)
    alone = [
        trained_alone(f"node-{index}", node_data(one)[index], model)
        for index, model in enumerate(node_models(one))
    ]
    experiment = Simulation(one)
    metrics = experiment.run(tmp_path)
    assert (metrics["queries"], metrics["queries_by_name"], metrics["releases"]) == (0, {}, [])
    assert metrics["bytes"] == {"up": 0, "down": 0, "by_kind": {}}
    assert entries(tmp_path) == []
    for model, expected in zip(node_models(one), alone, strict=True):
        same(model, expected, rtol=1e-4, atol=1e-6)
    assert metrics["iterations"] == 0
    assert metrics["evaluated_model"] == "nodes"
    assert metrics["accuracy"] == pytest.approx(metrics["standalone"]["accuracy"]["mean"])


# --- the ensemble ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["logits", "log_probs", "probs", "consensus"])
@pytest.mark.parametrize("engine", ENGINES)
def test_ensemble_is_weighted_by_class_counts(how: Any, engine: Any) -> None:
    specs = ("mlp:8", "small-cnn:4", "mlp:8")
    one = setting(NodeEnsemble(ensemble=how), specs, engine=EngineConfig(batching=engine))
    experiment = Simulation(one)
    metrics = experiment.run()
    x, y = one.test.inputs, one.test.targets
    with torch.no_grad():
        z = torch.stack([model.eval()(x) for model in node_models(one)])
        counts = torch.stack(
            [torch.bincount(part.targets, minlength=CLASSES) for part in node_data(one)]
        ).float()
        expected = one.task.ensemble(z, one.task.importance_weights(counts), how)
        torch.testing.assert_close(ensemble_outputs(experiment, x), expected, rtol=1e-4, atol=1e-5)
    accuracy = 100 * (expected.argmax(1) == y).double().mean().item()
    assert metrics["accuracy"] == metrics["ensemble"]["accuracy"] == pytest.approx(accuracy)
    assert metrics["evaluated_model"] == "ensemble"
    assert metrics["student"] is None


@pytest.mark.parametrize(
    ("how", "line"),
    [
        (
            "concensus",
            "invalid method.ensemble = 'concensus' (expected logits, sum, log_probs, probs",
        ),
        ("math:pi", "invalid method.ensemble = 'math:pi' (expected a function or class; 'pi' of"),
        ("no_such_lab:mean", "invalid method.ensemble = 'no_such_lab:mean' (expected a module in"),
    ],
)
def test_rejects_unknown_ensemble_before_training(how: str, line: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        Simulation(setting(NodeEnsemble(ensemble=how)))
    assert str(caught.value).startswith(line)


def test_node_does_not_import_ensemble_named_by_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    spec = DataSpec(ClassificationConfig(), ("0", "1"), (1, 8, 8), (0.5,), (0.5,))
    plan = RunPlan("run", {"name": "ensemble", "ensemble": "trap:door"}, spec)
    assert RunPlan.from_dict(plan.to_dict()).make_method().ensemble == "trap:door"
    assert "trap" not in sys.modules


def test_evaluation_is_free_and_each_use_of_the_ensemble_is_counted() -> None:
    experiment = Simulation(setting(NodeEnsemble(), policies=[PolicyConfig()] * 3))
    metrics = experiment.run()
    size = 3 * (CLASSES + 1) * 4
    assert metrics["bytes"] == {
        "up": size,
        "down": 0,
        "by_kind": {"label counts": {"up": size, "down": 0}},
    }
    assert metrics["queries_by_name"] == {"count_labels": 1}
    x = torch.zeros(5, *SHAPE)
    ensemble_outputs(experiment, x)
    kinds = experiment.audit.traffic_totals()["by_kind"]
    assert kinds["logits"] == {"up": 3 * 5 * CLASSES * 4, "down": 0}
    assert kinds["inputs"] == {"up": 0, "down": 3 * 5 * math.prod(SHAPE) * 4}


# --- centralized -----------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_centralized_equals_training_on_pooled_data(engine: Any) -> None:
    one = setting(Centralized(), engine=EngineConfig(batching=engine))
    union = TensorData(
        torch.cat([part.inputs for part in node_data(one)]),
        torch.cat([part.targets for part in node_data(one)]),
    )
    assert LOCAL.steps(len(union)) == 40
    expected = trained_alone("centralised", union, one.student)  # the name of its random streams
    before = copy.deepcopy([model.state_dict() for model in node_models(one)])
    metrics = Simulation(one).run()
    same(one.student, expected, rtol=1e-4, atol=1e-6)
    for model, old in zip(node_models(one), before, strict=True):  # the nodes train nothing
        assert all(torch.equal(value, old[name]) for name, value in model.state_dict().items())
    assert metrics["standalone"] is None
    assert metrics["accuracy"] == metrics["student"]["accuracy"]


def test_centralized_is_the_upper_bound_of_other_runs() -> None:
    one = setting(Centralized())
    other = setting(Standalone(), centralized_model=copy.deepcopy(one.student))
    assert Simulation(one).run()["accuracy"] == Simulation(other).run()["centralized"]["accuracy"]


def test_centralized_uploads_exactly_the_data(tmp_path: Path) -> None:
    one = setting(Centralized())
    metrics = Simulation(one).run(tmp_path)
    each = [size * (math.prod(SHAPE) * 4 + 8) for size in SIZES]  # float32 inputs and int64 labels
    assert metrics["releases"] == ["private data"]
    assert metrics["bytes"] == {
        "up": sum(each),
        "down": 0,
        "by_kind": {"private data": {"up": sum(each), "down": 0}},
    }
    assert [node["bytes"] for node in metrics["nodes"]] == [{"up": size, "down": 0} for size in each]
    lines = entries(tmp_path)
    assert [(line["node"], line["query"]) for line in lines] == [
        (f"node-{index}", "upload_data") for index in range(3)
    ]
