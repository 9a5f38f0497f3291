"""Runs whose nodes and student are U-Nets with a pretrained encoder."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstill
from fedstill.core.errors import ArgumentError, ModelError, NodeFault
from fedstill.models.module_utils import to_vector
from fedstill.models.pretrained_unet import PretrainedUNet
from fedstill.node import owner_folder
from fedstill.runs import run
from fedstill.runs.simulation import build_simulation
from fedstill.runs.spec import RunSpec, from_dict
from fedstill.runs.student_file import network_name
from fedstill.student.export import export
from tests.support.errors import raises_invalid
from tests.support.links import Away, here
from tests.support.map_world import TASK, blobs
from tests.support.models import TinyEncoder, save_tiny_weights

TINY = "tests.support.models:tiny_encoder"
NAME = f"unet:{TINY}"
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"rounds": 2},
    "fediod-maps": {
        "steps": 2,
        "pretrain": 1,
        "batch": 4,
        "generator": {"width": 2},
        "critic": {"width": 4},
        "student": {"memory": 16, "steps": 1, "batch": 8},
    },
}


def config_of(method: str, folder: Path, model: str = NAME, **nodes: Any) -> RunSpec:
    data, weights = blobs(40, 0), folder / "encoder.safetensors"
    images = ((data.inputs + 1) * 127.5).round().byte().numpy()
    np.savez(folder / "shapes.npz", images=images[:, 0], masks=data.targets.numpy().astype(np.uint8))
    save_tiny_weights(weights)
    policy = {"label_maps": True, "outputs_only": method != "fedavg"}
    local = {"epochs": 1, "batch": 8, "lr": 5e-3}
    return from_dict(
        {
            "data": {"name": str(folder / "shapes.npz")},
            "task": {"name": "segmentation"},
            "split": {"name": "iid", "nodes": 3},
            "nodes": {
                "models": [model],
                "encoder_weights": str(weights),
                "local": local,
                "policy": policy,
                **nodes,
            },
            "student": {"model": model, "encoder_weights": str(weights)},
            "evaluation": {"centralized": False, "samples": 2},
            "engine": {"threads": 1},
            "method": {"name": method, **METHODS[method]},
        }
    )


def encoder_state(model: Any) -> dict[str, torch.Tensor]:
    network: torch.nn.Module = model.encoder.network
    return network.state_dict()


def test_nodes_and_student_start_from_the_pretrained_encoder(tmp_path: Path) -> None:
    simulation, _ = build_simulation(config_of("fedavg", tmp_path))
    weights = save_tiny_weights(tmp_path / "encoder.safetensors")
    for model in (simulation.student, *(node.model for node in simulation.nodes)):
        state = encoder_state(model)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in state.items())


@pytest.mark.sample(1)
@pytest.mark.parametrize("option", ["student", "nodes.encoder", "nodes.perceptual"])
def test_resumed_run_has_the_same_pretrained_weights(option: str, tmp_path: Path) -> None:
    config = config_of("fediod-maps", tmp_path, perceptual=TINY)
    files = {
        name: tmp_path / f"{name}.safetensors" for name in ("student", "nodes.encoder", "nodes.perceptual")
    }
    for file in files.values():
        save_tiny_weights(file)
    config = replace(
        config,
        student=replace(config.student, encoder_weights=str(files["student"])),
        nodes=replace(
            config.nodes,
            encoder_weights=str(files["nodes.encoder"]),
            perceptual_weights=str(files["nodes.perceptual"]),
        ),
    )
    state = build_simulation(config)[0]._node_state()
    build_simulation(config)[0]._prepare_nodes(state)
    save_tiny_weights(files[option], seed=4)
    with pytest.raises(ModelError, match="student" if option == "student" else "node"):
        build_simulation(config)[0]._prepare_nodes(state)


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ["fedavg", "fediod-maps"])
def test_student_is_loaded_without_the_file_of_its_encoder(method: str, tmp_path: Path) -> None:
    config, out = config_of(method, tmp_path), tmp_path / "run"
    run.run(config, out, command="", progress=False)
    weights = save_tiny_weights(tmp_path / "encoder.safetensors")
    (tmp_path / "encoder.safetensors").unlink()
    student: Any = fedstill.load(out)
    named = fedstill.load(out / "student.safetensors", model=NAME)
    assert torch.equal(to_vector(named.network), to_vector(student.network))
    state, statistics = encoder_state(student.network), ("running_mean", "running_var")
    for name, tensor in state.items():
        if name.endswith(statistics):
            torch.testing.assert_close(tensor, weights[name])
    trained = [name for name in weights if not torch.equal(state[name], weights[name])]
    assert "stem.weight" in trained
    assert "stages.1.4.weight" in trained
    images = torch.randint(0, 256, (3, 1, 16, 16), dtype=torch.uint8)
    probabilities = student.probabilities(images)
    assert probabilities.shape == (3, 2, 16, 16)


def test_file_of_a_student_alone_imports_no_encoder(tmp_path: Path) -> None:
    config, out = config_of("fedavg", tmp_path), tmp_path / "run"
    run.run(config, out, command="", progress=False)
    with pytest.raises(ArgumentError, match=f"student's model = '{NAME}'"):
        fedstill.load(out / "student.safetensors")


@pytest.mark.slow
def test_student_is_exported_to_onnx(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    out = tmp_path / "run"
    run.run(config_of("fedavg", tmp_path), out, command="", progress=False)
    student, file = fedstill.load(out), tmp_path / "student.onnx"
    export(student, "onnx", file)
    images = torch.rand(3, 1, 16, 16)
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (outputs,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(outputs), student(images), rtol=1e-3, atol=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ["fedavg", "fediod-maps"])
def test_remote_run_equals_simulation(method: str, tmp_path: Path) -> None:
    config = config_of(method, tmp_path)
    config = replace(config, engine=replace(config.engine, batching="one-by-one"))
    experiment, metrics = here(config)
    live = Away(config, tmp_path).live()
    result = live.run()
    assert torch.equal(to_vector(live.student), to_vector(experiment.student))
    assert result["dice"] == metrics["dice"]


def test_server_and_nodes_resume_with_the_same_pretrained_weights(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.safetensors" for name in ("student", "perceptual")}
    for file in files.values():
        save_tiny_weights(file)
    config = config_of("fediod-maps", tmp_path, perceptual=TINY, perceptual_weights=str(files["perceptual"]))
    config = replace(config, student=replace(config.student, encoder_weights=str(files["student"])))
    away = Away(config, tmp_path)
    away.live().run()
    away.live().run()
    save_tiny_weights(files["student"], seed=4)
    with pytest.raises(ModelError, match=r"^student"):
        away.live().run()
    save_tiny_weights(files["student"])
    for node in away.hosts:
        perceptual = owner_folder.read_node_file(tmp_path / "nodes" / node).model.perceptual_weights
        save_tiny_weights(tmp_path / "nodes" / node / perceptual, seed=4)
    with pytest.raises(NodeFault, match="another setup"):
        away.live().run()


def test_stacked_nodes_are_computed_as_single_ones(tmp_path: Path) -> None:
    config = config_of("fedavg", tmp_path)
    students = []
    for batching in ("one-by-one", "stacked"):
        engine = replace(config.engine, batching=batching)
        experiment, _ = here(replace(config, engine=engine))
        students.append(to_vector(experiment.student))
    torch.testing.assert_close(*students, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("timm")
def test_module_from_python_is_a_student_that_the_command_line_can_name(tmp_path: Path) -> None:
    save_tiny_weights(tmp_path / "w.safetensors")
    normalization = ((0.5,), (0.25,))
    models = [
        PretrainedUNet("timm:tiny", (1, 16, 16), 2, *normalization).load_encoder(tmp_path / "w.safetensors")
        for _ in range(3)
    ]
    student, before = models.pop(), to_vector(models[0])
    parts = [(blobs(8, seed).inputs, blobs(8, seed).targets) for seed in (0, 1, 2)]
    outcome = fedstill.distil(
        parts[:2],
        models,
        student,
        parts[2],
        2,
        task="segmentation",
        mean=(0.5,),
        std=(0.25,),
        method=fedstill.FedAvg(rounds=1),
        local=fedstill.LocalConfig(epochs=1, batch=4),
        policies=[fedstill.PolicyConfig(outputs_only=False)] * 2,
        out=tmp_path / "run",
    )
    assert not torch.equal(to_vector(outcome.student), before)
    assert network_name(student, TASK, (1, 16, 16)) == "unet:timm:tiny"
    loaded = fedstill.load(tmp_path / "run")
    assert torch.equal(to_vector(loaded.network), to_vector(outcome.student))
    x = torch.randn(2, 1, 16, 16)  # the same normalization of images, which is not among the weights
    torch.testing.assert_close(loaded.network(x), outcome.student.eval()(x))


# --- refusals ---------------------------------------------------------------------------------------------


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> None:
    class Timm:
        @staticmethod
        def create_model(name: str, pretrained: bool, num_classes: int) -> Any:
            network: Any = TinyEncoder(1)
            network.pretrained_cfg = {"input_size": (1, 9, 9), "mean": (0.5,), "std": (0.5,)}
            return network

    monkeypatch.setitem(sys.modules, "timm", Timm)  # type: ignore[arg-type]


@pytest.mark.usefixtures("timm")
@pytest.mark.parametrize("table", ["nodes", "student"])
def test_library_encoder_without_weights_is_refused(table: str, tmp_path: Path) -> None:
    config = config_of("fedavg", tmp_path, "unet:timm:tiny")
    config = replace(config, **{table: replace(getattr(config, table), encoder_weights="")})
    with raises_invalid(f"{table}.encoder_weights", "", "timm:tiny"):
        build_simulation(config)


@pytest.mark.usefixtures("timm")
def test_file_of_a_student_with_a_library_encoder_is_sufficient(tmp_path: Path) -> None:
    config, out = config_of("fedavg", tmp_path, "unet:timm:tiny"), tmp_path / "run"
    run.run(config, out, command="", progress=False)
    student: Any = fedstill.load(out / "student.safetensors")
    assert student.network.name == "unet:timm:tiny"


def test_weights_that_no_network_takes_are_refused(tmp_path: Path) -> None:
    config = config_of("fedavg", tmp_path)
    weights = config.nodes.encoder_weights
    plain = replace(config, nodes=replace(config.nodes, models=("unet:2",)))
    with raises_invalid("nodes.encoder_weights", weights, "no model"):
        build_simulation(plain)
    plain = replace(config, student=replace(config.student, model="unet:2"))
    with raises_invalid("student.encoder_weights", weights, "no pretrained encoder"):
        build_simulation(plain)
