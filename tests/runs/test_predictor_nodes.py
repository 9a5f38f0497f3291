"""Pretrained models as nodes, named in ``distil``, ``nodes.models`` and ``node.toml``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from torch import nn

import fedstill
from fedstill import models
from fedstill.core.errors import (
    ArgumentError,
    DataError,
    MethodRefused,
    ModelError,
    NodeFault,
    QueryRefused,
    RunFolderError,
)
from fedstill.data import make_data_config
from fedstill.data.data_spec import DataSpec
from fedstill.data.loading import load
from fedstill.models.module_utils import to_vector
from fedstill.models.predictors import file_fingerprint
from fedstill.node import model_setup, owner_folder
from fedstill.node.node_service import NodeService
from fedstill.protocol.local_config import LocalConfig
from fedstill.runs.deployment import write_nodes
from fedstill.runs.simulation import build_simulation
from fedstill.runs.spec import RunSpec, from_dict
from fedstill.tasks import TASKS
from tests.support.errors import raises_invalid, raises_refused
from tests.support.links import RecordingLink, changed, hosts, live, run_of
from tests.support.models import serving, write_onnx

WINE = load(make_data_config("wine"), TASKS["tabular"]())
X, Y = WINE.train.inputs, WINE.train.targets
TEST = (WINE.test.inputs, WINE.test.targets)
# Each knows two of the three classes: no node's own model predicts the third.
SEEN = [(missing != Y).nonzero().flatten() for missing in range(3)]
PARTS = [(X[rows], Y[rows]) for rows in SEEN]


def student() -> nn.Module:
    return models.build("mlp:32", (13,), 3, 0)


def distil(own: list[Any], method: Any, **more: Any) -> fedstill.Outcome:
    about = {"task": "tabular", "schema": WINE.schema, "every": 0}
    return fedstill.distil(
        PARTS[: len(own)], own, student(), TEST, WINE.classes, method=method, **about, **more
    )


def forest() -> RandomForestClassifier:
    return RandomForestClassifier(20, random_state=0).fit(*PARTS[0])


def test_student_of_predictors_beats_each_predictor(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    linear = LogisticRegression(max_iter=5000, fit_intercept=False).fit(*PARTS[1])  # knows classes 0 and 2
    write_onnx(tmp_path / "linear.onnx", np.stack([0 * linear.coef_[0], linear.coef_[0]], 1))
    boosted = RandomForestClassifier(20, random_state=1).fit(*PARTS[2])

    def response(request: Any) -> Any:
        known = [WINE.classes[number] for number in boosted.classes_]
        return {"probabilities": boosted.predict_proba(request["inputs"]).tolist(), "classes": known}

    graph = fedstill.CustomModel(str(tmp_path / "linear.onnx"), classes=(WINE.classes[0], WINE.classes[2]))
    public = X[torch.randperm(len(X), generator=torch.Generator().manual_seed(0))]
    with serving(response) as url:
        method = fedstill.FedKD(
            student=fedstill.StudentTraining(epochs=60), ensemble="probs", levels=0, gamma=float("inf")
        )
        outcome = distil([forest(), graph, url], method, public=public)
    alone = outcome.result["local"]["accuracy"]["per_node"]
    assert max(alone) < 85  # each does not know a third of the classes
    assert outcome.result["accuracy"] > max(alone) + 5
    assert set(outcome.result["releases"]) <= {"label counts", "logits"}


def test_fediod_needs_no_gradients_of_predictors() -> None:
    quick = {"steps": 3, "batch": 8}
    with raises_refused("model", "gradient"):
        distil([forest()], fedstill.FedIOD(**quick))
    results = distil([forest()], fedstill.FedIOD(**quick, backpropagate=False)).result
    assert "gradients" not in results["bytes"]["by_kind"]
    with pytest.raises(MethodRefused, match="frozen"):
        distil([forest()], fedstill.FedAvg(), policies=[fedstill.PolicyConfig(outputs_only=False)])


@pytest.mark.parametrize(
    ("option", "options"),
    [("batch", {"batch": 1}), ("critic.batch", {"batch": 8, "critic": fedstill.Discriminators(batch=1)})],
)
def test_batch_norm_gets_two_rows(option: str, options: dict[str, Any]) -> None:
    line = rf"invalid method\.{option} = 1 \(expected 2 or more for rows of a table"
    with pytest.raises(ArgumentError, match=line):
        distil([models.build("mlp:8", (13,), 3, 0)], fedstill.FedIOD(steps=3, **options))


def test_detects_module_without_gradients_before_training() -> None:
    class Wrapped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(np.eye(3)[forest_of.predict(x.detach().numpy())]).float()

    forest_of = forest()
    with raises_refused("model", "gradient"):
        distil([Wrapped()], fedstill.FedIOD(steps=3, batch=8), local=LocalConfig(epochs=1))


def run(models_: list[str], **more: Any) -> RunSpec:
    table = {
        "task": {"name": "tabular"},
        "data": {"name": "wine"},
        "split": {"name": "iid", "nodes": 2},
        "public": {"name": "noise", "limit": 40},
        "nodes": {"models": models_},
        "student": {"model": "mlp:8"},
        "method": {"name": "fedkd", "student": {"epochs": 1}},
        "evaluation": {"every": 0, "centralized": False},
    }
    return from_dict({**table, **more})


def test_model_is_named_by_its_file(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    write_onnx(tmp_path / "graph.onnx", np.random.default_rng(0).normal(size=(13, 3)))
    names = ", ".join(f'"{name}"' for name in reversed(WINE.classes))
    sidecar = tmp_path / "graph.toml"
    sidecar.write_text(f'name = "graph.onnx"\nclasses = [{names}]', encoding="utf-8")
    config = run([str(sidecar), "mlp:8"])
    simulation, _ = build_simulation(config)
    plain, _ = build_simulation(run([str(tmp_path / "graph.onnx"), "mlp:8"]))
    mapped, own = (each.nodes[0].model(TEST[0]) for each in (simulation, plain))
    torch.testing.assert_close(mapped, own.flip(1))
    write_nodes(config, simulation, tmp_path / "nodes")
    spec = DataSpec.from_data(config.task, WINE)
    for node in simulation.nodes:
        folder = tmp_path / "nodes" / node.name
        made = model_setup.make_model(owner_folder.read_node_file(folder), folder, spec)
        assert torch.equal(made(TEST[0]), node.model(TEST[0]))


def test_deployed_predictor_nodes_equal_simulation(
    tmp_path: Path,
) -> None:
    pytest.importorskip("onnxruntime")
    write_onnx(tmp_path / "graph.onnx", np.random.default_rng(0).normal(size=(5, 2)))
    config = changed(run_of(tmp_path, "fediod"), nodes={"models": [str(tmp_path / "graph.onnx")]})
    responding = changed(config, method={"backpropagate": False})
    node_hosts = hosts(responding, tmp_path)
    link = RecordingLink(node_hosts)
    with pytest.raises(QueryRefused, match=r"'node-2' refuse .*gradient"):
        live(config, link, tmp_path).run()
    simulation, _ = build_simulation(responding)
    simulation.run()
    server = live(responding, link, tmp_path)
    server.run()
    assert torch.allclose(to_vector(server.student), to_vector(simulation.student), atol=1e-5)
    host = node_hosts["node-0"]
    write_onnx(host.folder / host.file.model.name, np.random.default_rng(1).normal(size=(5, 2)))
    with pytest.raises(NodeFault, match="another setup"):
        NodeService(host.folder).join(server.federation.plan)


def test_resume_detects_replaced_model_file(tmp_path: Path) -> None:
    """Only the file's content differs; the layers are equal."""
    pytest.importorskip("onnxruntime")
    path = tmp_path / "graph.onnx"
    draw = np.random.default_rng(0)
    write_onnx(path, draw.normal(size=(13, 3)))
    config = run([str(path), "mlp:8"])
    begun, _ = build_simulation(config)
    state = begun._node_state()
    here, _ = build_simulation(config)
    here._prepare_nodes(state)
    write_nodes(config, begun, tmp_path / "nodes")
    folder = tmp_path / "nodes" / begun.nodes[0].name
    owner = owner_folder.read_node_file(folder)
    spec = DataSpec.from_data(config.task, WINE)
    first = file_fingerprint(model_setup.make_model(owner, folder, spec))
    write_onnx(path, draw.normal(size=(13, 3)))
    replaced, _ = build_simulation(config)
    with pytest.raises(
        ModelError, match=f"{begun.nodes[0].name}: the model has changed since the run was started"
    ):
        replaced._prepare_nodes(state)
    write_onnx(Path(folder / owner.model.name), draw.normal(size=(13, 3)))
    assert "" != first != file_fingerprint(model_setup.make_model(owner, folder, spec))


def test_rejects_endpoints_of_other_machines() -> None:
    with raises_invalid("nodes.models", "http://192.0.2.1/", "an address"):
        build_simulation(run(["http://192.0.2.1/"]))


def test_rejects_state_of_earlier_version() -> None:
    begun, _ = build_simulation(run(["mlp:8"]))
    state = {key: value for key, value in begun._node_state().items() if key != "models"}
    with pytest.raises(RunFolderError, match="earlier fedstill"):
        begun._prepare_nodes(state)


@pytest.mark.parametrize("part", ["inputs", "targets", "layers"])
def test_resume_detects_changed_data_and_layers(part: str) -> None:
    """Custom data files and modules may have changed since, with equal shapes."""
    config = run(["mlp:8"])
    begun, _ = build_simulation(config)
    state = begun._node_state()
    build_simulation(config)[0]._prepare_nodes(state)
    replaced, _ = build_simulation(config)
    if part == "layers":
        model = replaced.nodes[1].model
        name, _ = next(
            (name, layer) for name, layer in model.named_modules() if isinstance(layer, torch.nn.ReLU)
        )
        model.set_submodule(name, torch.nn.Tanh())
        with pytest.raises(
            ModelError, match=f"^{replaced.nodes[1].name}: the model has changed since the run was started"
        ):
            replaced._prepare_nodes(state)
        return
    getattr(replaced.setting.nodes[1].data, part)[0] += 1
    with pytest.raises(DataError, match=r"^the data"):
        replaced._prepare_nodes(state)
