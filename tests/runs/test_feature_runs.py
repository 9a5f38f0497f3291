"""Runs on features: heads on a backbone, the student's file, evaluation, export and refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import fedstill
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, DataError, ModelError, RunFolderError
from fedstill.data.loading import load
from fedstill.models import MLP
from fedstill.models.backbones import Backbone, BackboneWithHead
from fedstill.runs import feature_space, run
from fedstill.runs.feature_space import public_moments
from fedstill.runs.simulation import Simulation, build_simulation
from fedstill.runs.spec import RunSpec
from fedstill.student.evaluate import evaluate
from tests.support.errors import raises_invalid
from tests.support.models import onnx_backbone, save_tiny_backbone
from tests.support.runs import FEDIOD, FEDKD, SGD, config

BACKBONE = "tests.support.models:tiny_backbone"


def features_config(folder: Path, backbone: str = "random-conv:8", **changes: Any) -> RunSpec:
    """Return a run on features of digits with linear heads, of FedKD by default."""
    features = {"backbone": backbone, "cache": str(folder / "cache"), **changes.pop("features", {})}
    tables: dict[str, Any] = {
        "public": {"name": "held-out"},
        "nodes": {"models": ["linear"], "local": SGD},
        "student": {"model": "linear"},
        "features": features,
    }
    return config(changes.pop("method", FEDKD), **{**tables, **changes})


def start(spec: RunSpec, out: Path) -> dict[str, Any]:
    return run.run(spec, out, command="", progress=False)


def digits() -> TensorData:
    return load(config(FEDKD).data).test


@pytest.mark.parametrize(
    ("normalize", "components"), [("none", 0), ("example", 0), ("public", 0), ("public", 10)]
)
def test_loaded_student_takes_pixels_and_reaches_the_metric_of_its_run(
    tmp_path: Path, normalize: str, components: int
) -> None:
    features = {"normalize": normalize, "components": components}
    result = start(features_config(tmp_path, features=features), tmp_path / "run")
    test = digits()
    student = fedstill.load(tmp_path / "run")
    predicted = student((test.inputs + 1) / 2).argmax(1)  # pixels from 0 to 1
    assert 100 * (predicted == test.targets).float().mean().item() == pytest.approx(result["accuracy"])
    evaluated = evaluate(tmp_path / "run", "digits")
    assert evaluated["metrics"]["accuracy"] == result["accuracy"]
    assert evaluated["seen"]["examples"] == 0
    assert result["features"]["features"] == result["data"]["shape"][0] == (components or 128)


def test_received_student_does_not_set_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    start(features_config(tmp_path), tmp_path / "run")
    path = tmp_path / "run" / "student.safetensors"
    with safe_open(str(path), "pt") as file:
        about = json.loads(file.metadata()["fedstill"])
    assert not {"batch", "cache", "cache_gib"} & about["features"].keys()
    name = "0123456789abcdef" * 2
    file_of_user = tmp_path / "user" / f"{name}-float32" / f"{name}.safetensors"
    file_of_user.parent.mkdir(parents=True)
    file_of_user.write_bytes(b"x")
    about["features"] |= {"batch": 10**9, "cache": str(tmp_path / "user"), "cache_gib": 1e-9}
    save_file(load_file(path), tmp_path / "sent.safetensors", {"fedstill": json.dumps(about)})
    evaluate(tmp_path / "sent.safetensors", "digits")
    assert [each for each in (tmp_path / "user").rglob("*") if each.is_file()] == [file_of_user]
    assert list((tmp_path / "own" / "fedstill" / "features").glob("*/*.safetensors"))


def test_evaluation_of_a_run_uses_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "default"))
    start(features_config(tmp_path, features={"cache_gib": 0.0}), tmp_path / "run")
    evaluate(tmp_path / "run", "digits")
    assert not (tmp_path / "default").exists()


def test_custom_backbone_of_a_run_is_loaded_for_its_folder_only(tmp_path: Path) -> None:
    start(features_config(tmp_path, BACKBONE, features={"normalize": "backbone"}), tmp_path / "run")
    network = fedstill.load(tmp_path / "run").network
    assert isinstance(network, BackboneWithHead)
    assert network.backbone.width == 3
    with raises_invalid("the student's backbone"):
        fedstill.load(tmp_path / "run" / "student.safetensors")


def test_other_splits_and_seeds_compute_no_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(features_config(tmp_path), tmp_path / "one")
    monkeypatch.setattr(Backbone, "forward", None)  # not called, except to measure the number of features
    monkeypatch.setattr(Backbone, "_measured_width", lambda self: 128)
    start(features_config(tmp_path, seed=1, split={"nodes": 5, "alpha": 0.5}), tmp_path / "two")


def test_changed_weights_are_refused_when_the_student_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    state = fedstill.models.backbones.load_backbone(
        fedstill.Features(BACKBONE), fedstill.models.backbones.RawInputs((1, 8, 8))
    ).network.state_dict()
    save_file(state, path)
    start(features_config(tmp_path, BACKBONE, features={"weights": str(path)}), tmp_path / "run")
    save_file({name: tensor + 1 for name, tensor in state.items()}, path)
    with pytest.raises(ModelError, match="differs"):
        fedstill.load(tmp_path / "run")


def test_student_is_loaded_with_the_new_path_of_its_backbone(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    weights, moved = save_tiny_backbone(tmp_path / "w.safetensors"), tmp_path / "moved.safetensors"
    result = start(features_config(tmp_path, BACKBONE, features={"weights": str(weights)}), tmp_path / "run")
    weights.rename(moved)
    evaluation: tuple[Any, ...] = ("evaluate", tmp_path / "run", "--data", "digits", "--json")
    code, _, err = command(*evaluation)
    assert code == 2
    assert str(weights) in err
    assert "--backbone-weights" in err
    code, out, _ = command(*evaluation, "--backbone-weights", moved)
    assert (code, json.loads(out)["metrics"]["accuracy"]) == (0, result["accuracy"])
    np.savez(tmp_path / "new.npz", images=np.zeros((3, 8, 8), np.uint8))
    out_file, exported = tmp_path / "p.csv", tmp_path / "student.pt"
    words = (
        "predict",
        tmp_path / "run",
        tmp_path / "new.npz",
        "--out",
        out_file,
        "--backbone-weights",
        moved,
    )
    assert command(*words)[0] == 0
    assert len(out_file.read_text().splitlines()) == 4
    words = (
        "export",
        tmp_path / "run",
        "--format",
        "torchscript",
        "--out",
        exported,
        "--backbone-weights",
        moved,
    )
    assert command(*words)[0] == 0
    save_tiny_backbone(moved, 1.0)
    with pytest.raises(ModelError, match="differs"):
        fedstill.load(tmp_path / "run", backbone_weights=moved)
    with raises_invalid("--backbone-weights", str(weights), "existing"):
        fedstill.load(tmp_path / "run", backbone_weights=weights)


def test_onnx_backbone_is_found_at_its_new_path(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    first, moved, other = (tmp_path / name for name in ("a.onnx", "b.onnx", "graph"))
    first.write_bytes(onnx_backbone().SerializeToString())
    start(features_config(tmp_path, str(first)), tmp_path / "run")
    pixels = torch.rand(3, 1, 8, 8)
    outputs = fedstill.load(tmp_path / "run")(pixels)
    other.write_bytes(first.read_bytes())
    first.rename(moved)
    assert torch.equal(fedstill.load(tmp_path / "run", backbone=moved)(pixels), outputs)
    with raises_invalid("the student's backbone", str(first), "--backbone"):
        fedstill.load(tmp_path / "run")
    with raises_invalid("--backbone", str(other), ".onnx"):
        fedstill.load(tmp_path / "run", backbone=other)


def test_hugging_face_folder_and_weights_are_found_at_their_new_paths(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    library = pytest.importorskip("transformers")
    body = library.ViTConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        image_size=8,
        patch_size=4,
        num_channels=1,
    )
    with torch.random.fork_rng():
        model = library.ViTModel(body)
    model.save_pretrained(tmp_path / "vit")
    weights = tmp_path / "w.safetensors"
    state = {f"model.{name}": tensor + 0.5 for name, tensor in model.state_dict().items()}
    save_file(state, weights)
    features = {"weights": str(weights), "mean": (0.5,), "std": (0.5,)}
    result = start(features_config(tmp_path, f"hf:{tmp_path / 'vit'}", features=features), tmp_path / "run")
    (tmp_path / "vit").rename(tmp_path / "moved")
    weights.rename(tmp_path / "moved.safetensors")
    moved = ("--backbone", f"hf:{tmp_path / 'moved'}", "--backbone-weights", tmp_path / "moved.safetensors")
    evaluation = ("evaluate", tmp_path / "run", "--data", "digits", "--json")
    code, out, _ = command(*evaluation, *moved)
    assert (code, json.loads(out)["metrics"]["accuracy"]) == (0, result["accuracy"])
    for part in (moved[:2], moved[2:]):  # one of them is still missing
        code, _, err = command(*evaluation, *part)
        assert code == 2
        assert moved[2 if part == moved[:2] else 0] in err
    with raises_invalid("--backbone", str(tmp_path / "moved"), "hf:FOLDER"):
        fedstill.load(tmp_path / "run", backbone=tmp_path / "moved")


def test_backbone_without_a_file_takes_no_path(tmp_path: Path) -> None:
    start(features_config(tmp_path), tmp_path / "run")
    weights = save_tiny_backbone(tmp_path / "w.safetensors")
    with raises_invalid("--backbone", "hf:folder", "none", "random-conv:8"):
        fedstill.load(tmp_path / "run", backbone="hf:folder")
    with raises_invalid("--backbone-weights", str(weights), "none", "random-conv:8"):
        fedstill.load(tmp_path / "run", backbone_weights=weights)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("backbone", "features"),
    [
        (BACKBONE, {"normalize": "example"}),
        (BACKBONE, {"normalize": "public", "components": 2}),
        ("graph.onnx", {"normalize": "example"}),
    ],
)
def test_student_with_backbone_is_exported_to_onnx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backbone: str, features: dict[str, Any]
) -> None:
    """Also with a backbone graph of an earlier opset, which becomes a part of the exported graph."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    from fedstill.student.export import export

    monkeypatch.chdir(tmp_path)
    Path("graph.onnx").write_bytes(onnx_backbone().SerializeToString())
    precision = "bfloat16" if backbone == BACKBONE else "float32"
    spec = features_config(tmp_path, backbone, features={**features, "precision": precision})
    start(spec, tmp_path / "run")
    student = fedstill.load(tmp_path / "run")
    assert export(student, "onnx", tmp_path / "student.onnx") < 1e-4
    pixels = torch.rand(3, 1, 8, 8)
    (outputs,) = runtime.InferenceSession(str(tmp_path / "student.onnx")).run(
        None, {"images": pixels.numpy()}
    )
    torch.testing.assert_close(torch.from_numpy(outputs), student(pixels).detach(), atol=0.05, rtol=0.05)
    if backbone != BACKBONE:
        with raises_invalid("--format", "torchscript", "onnx"):
            export(student, "torchscript", tmp_path / "student.pt")


def test_gaussian_queries_need_no_public_data(tmp_path: Path) -> None:
    spec = features_config(
        tmp_path, public={"name": "gaussian", "limit": 500}, features={"normalize": "example"}
    )
    result = start(spec, tmp_path / "run")
    assert result["public"]["examples"] == 500
    assert result["queries_by_name"]["predict"] == 1
    assert result["bytes"]["by_kind"].keys() == {
        "logits",
        "label counts",
        "logit range",
        "indices",
        "schedule",
    }


def test_fediod_generates_features_with_the_normalization_of_real_ones(tmp_path: Path) -> None:
    spec = features_config(
        tmp_path, method=FEDIOD, features={"normalize": "example"}, evaluation={"samples": 4, "every": 0}
    )
    result = start(spec, tmp_path / "run")
    assert result["queries_by_name"]["predict_logits"] == FEDIOD["steps"]
    samples = list(load_file(tmp_path / "run" / "samples.safetensors").values())[-1]
    assert samples.shape == (4, 128)
    torch.testing.assert_close(samples.mean(1), torch.zeros(4), atol=1e-4, rtol=0)
    torch.testing.assert_close(samples.var(1, correction=0), torch.ones(4), atol=1e-2, rtol=0)


def test_gaussian_queries_without_features_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"features\.backbone"):
        config(FEDKD, public={"name": "gaussian"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": {"normalize": "public"}, "public": {"name": "gaussian"}}, "features.normalize"),
        ({"features": {"weights": "absent.pt"}}, "features.weights"),
        ({"features": {"normalize": "public", "components": 129}}, "features.components = 129"),
        ({"nodes": {"models": ["small-cnn"]}}, "nodes.models = 'small-cnn'"),
        ({"student": {"model": "small-cnn"}}, "student.model = 'small-cnn'"),
    ],
)
def test_inapplicable_features_are_refused_before_the_run(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError) as caught:
        start(features_config(tmp_path, **changes), tmp_path / "run")
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("backbone", "options", "message"),
    [
        (BACKBONE, ("--features.weights", "nan.safetensors"), "NaN"),
        (BACKBONE, ("--features.weights", "absent.safetensors"), "features.weights"),
        ("raises:net", (), "importing it fails"),
        ("random.onnx", (), "random.onnx cannot be loaded"),
        ("random-conv:4", ("--features.size", "-1"), "features.size"),
        ("random-conv:4", ("--features.components", "9"), "features.components"),
        ("random-conv:4", ("--data.name", "images"), "one size"),
    ],
)
def test_command_refuses_features_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[..., tuple[int, str, str]],
    backbone: str,
    options: tuple[str, ...],
    message: str,
) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    save_tiny_backbone(tmp_path / "nan.safetensors", float("nan"))
    (tmp_path / "raises.py").write_text("raise RuntimeError('no\\nnetwork')")
    (tmp_path / "random.onnx").write_bytes(bytes(range(256)))
    for name, side in (("a/1.png", 8), ("a/2.png", 12), ("b/1.png", 8)):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (side, side)).save(path)
    words = ("--features.backbone", backbone, "--features.cache", "cache", "--out", "run", *options)
    models = ("--nodes.models", "linear", "--student.model", "linear")
    code, _, err = command("run", "digits-fedkd", *models, *words, "--engine.threads", "1", "--quiet")
    assert code == 2
    (line,) = err.splitlines()
    assert line.startswith("fedstill: ")
    assert message in line
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "cache").exists()


def test_maps_have_no_features(tmp_path: Path) -> None:
    with raises_invalid("task.name", "segmentation", "one output"):
        fedstill.tasks.TASKS["segmentation"]().make(2).on_features()


def test_resumed_run_keeps_its_backbone(tmp_path: Path) -> None:
    start(features_config(tmp_path), tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["options"]["features.backbone"] == "random-conv:8"
    with pytest.raises(RunFolderError, match="other options"):
        run.run_or_resume(
            features_config(tmp_path, "random-conv:4"), tmp_path / "run", command="", progress=False
        )


def test_resume_compares_the_data_before_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another batch size or device changes the last digits of features, although the data are equal."""
    spec = features_config(tmp_path, features={"cache_gib": 0.0})
    begun, forward = build_simulation(spec)[0], Backbone.forward
    state = begun._node_state()
    monkeypatch.setattr(Backbone, "forward", lambda self, x: forward(self, x) * (1 + 1e-6))
    again, _ = build_simulation(spec)
    assert not torch.equal(again.setting.test.inputs, begun.setting.test.inputs)
    again._prepare_nodes(state)
    changed, _ = build_simulation(features_config(tmp_path, seed=1))
    with pytest.raises(DataError, match=r"^the data"):
        changed._prepare_nodes(state)


def test_resume_detects_another_backbone(tmp_path: Path) -> None:
    """The weights in a file may have changed, with equal shapes."""
    state = build_simulation(features_config(tmp_path, BACKBONE))[0]._node_state()
    path = save_tiny_backbone(tmp_path / "w.safetensors", 1.0)
    changed, _ = build_simulation(features_config(tmp_path, BACKBONE, features={"weights": str(path)}))
    with pytest.raises(ModelError, match=r"^the backbone"):
        changed._prepare_nodes(state)


def test_run_that_is_stopped_before_its_first_checkpoint_keeps_its_backbone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = save_tiny_backbone(tmp_path / "w.safetensors"), tmp_path / "run"
    spec = features_config(tmp_path, BACKBONE, features={"weights": str(path)})
    with monkeypatch.context() as stopping:
        stopping.setattr(Simulation, "_train_locally", stop)
        with pytest.raises(KeyboardInterrupt):
            start(spec, out)
    save_tiny_backbone(path, 1.0)
    with pytest.raises(ModelError, match=r"^the backbone"):
        run.resume(out, progress=False)
    save_tiny_backbone(path)
    resumed = run.resume(out, progress=False)
    assert resumed["accuracy"] == start(spec, tmp_path / "whole")["accuracy"]


def stop(simulation: Simulation) -> None:
    raise KeyboardInterrupt


def test_missing_moments_are_refused_before_features_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        feature_space, "compute_features_of_parts", lambda *given: pytest.fail("features were computed")
    )
    with raises_invalid("features.normalize", "public"):
        changes = {"features": {"normalize": "public"}, "public": {"name": "gaussian"}}
        build_simulation(features_config(tmp_path, **changes))


def test_features_that_are_not_finite_are_refused() -> None:
    features = torch.rand(20, 4, generator=torch.Generator().manual_seed(0))
    features[3, 1] = float("nan")
    for components in (0, 2):
        with pytest.raises(ModelError, match="finite"):
            public_moments(features, components)


def test_moments_of_one_public_example_are_refused(tmp_path: Path) -> None:
    public = {"name": "noise", "limit": 1}
    spec = features_config(tmp_path, features={"normalize": "public"}, public=public)
    with raises_invalid("features.normalize", "public", "2 public examples"):
        build_simulation(spec)


def test_components_of_too_few_public_examples_are_refused_before_features_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_space, "compute_features_of_parts", lambda *given: pytest.fail("computes"))
    public = {"name": "noise", "limit": 9}
    features = {"normalize": "public", "components": 9}
    with raises_invalid("features.components", 9, "below 9"):
        build_simulation(features_config(tmp_path, features=features, public=public))


def test_components_without_public_data_are_refused(tmp_path: Path) -> None:
    changes = {"features": {"normalize": "public", "components": 4}, "public": {"name": "gaussian"}}
    with raises_invalid("features.normalize", "public"):
        build_simulation(features_config(tmp_path, **changes))


def test_components_of_public_data_are_whitened_and_those_of_nodes_projected_equally(tmp_path: Path) -> None:
    every, few = (
        build_simulation(features_config(tmp_path, features=features))[0].setting
        for features in ({}, {"normalize": "public", "components": 10})
    )
    assert few.public is not None
    assert every.public is not None
    assert few.public.moments is not None
    torch.testing.assert_close(torch.cov(few.public.inputs.T), torch.eye(10), atol=1e-4, rtol=0)
    m, projection = every.public.inputs.mean(0), few.public.moments["projection"]
    for components, features in ((few.test, every.test), (few.nodes[0].data, every.nodes[0].data)):
        expected = (features.inputs - m) @ projection
        torch.testing.assert_close(components.inputs, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("normalize", "noted"), [("none", True), ("example", False)])
def test_noise_on_features_of_another_scale_is_noted(tmp_path: Path, normalize: str, noted: bool) -> None:
    changes = {"features": {"normalize": normalize}, "public": {"name": "gaussian", "limit": 10}}
    simulation, _ = build_simulation(features_config(tmp_path, **changes))
    assert any("features.normalize" in note for note in simulation.notes) is noted


def test_python_student_learns_from_gaussian_queries(tmp_path: Path) -> None:
    nodes, test = [digits().subset(torch.arange(start, 300, 3)) for start in range(3)], digits()
    features = fedstill.Features("random-conv:8", normalize="example", cache=str(tmp_path))

    def run_with(public: Any, features: fedstill.Features | None = features) -> Mapping[str, Any]:
        heads = [nn.Linear(128, 10) for _ in nodes]
        method = fedstill.FedKD(gamma=math.inf, student=fedstill.StudentTraining(epochs=10))
        return fedstill.distil(
            nodes,
            heads,
            nn.Linear(128, 10),
            test,
            10,
            public=public,
            features=features,
            method=method,
            every=0,
        ).result

    torch.manual_seed(0)
    assert run_with("gaussian")["accuracy"] > 60
    with raises_invalid("public", "gaussian"):
        run_with("gaussian", None)
    with raises_invalid("public", "noise"):
        run_with("noise")
    with raises_invalid("shape of public data", (128,), "(1, 8, 8)"):
        run_with(torch.randn(20, 128))


@pytest.mark.parametrize("components", [0, 10])
def test_python_student_takes_images(tmp_path: Path, components: int) -> None:
    test = digits()
    nodes = [test.subset(torch.arange(start, 300, 3)) for start in range(3)]
    width = components or 128
    outcome = fedstill.distil(
        nodes,
        [MLP((width,), 10, width=16) for _ in nodes],
        MLP((width,), 10, width=16),
        test.subset(torch.arange(300, 359)),
        10,
        method=fedstill.FedKD(student=fedstill.StudentTraining(epochs=2)),
        public=test.inputs[:50],
        local=fedstill.LocalConfig(epochs=2),
        features=fedstill.Features(
            "random-conv:8", normalize="public", components=components, cache=str(tmp_path / "cache")
        ),
        out=tmp_path / "run",
    )
    student = outcome.student
    assert student is not None
    logits = student(test.inputs[300:])
    accuracy = 100 * (logits.argmax(1) == test.targets[300:]).float().mean().item()
    assert accuracy == pytest.approx(outcome.result["accuracy"])
    loaded = fedstill.load(tmp_path / "run")
    torch.testing.assert_close(loaded((test.inputs[300:] + 1) / 2), logits)


def test_nearly_constant_feature_is_not_scaled_up() -> None:
    """Four features with deviations of 2, 2, 0 and 1e-9; the root mean square of all is sqrt(2)."""
    varied = torch.tensor([1.0, -1.0]) * 2**0.5
    features = torch.stack([varied, varied + 5, torch.ones(2), 1e-9 * varied], dim=1)
    moments = public_moments(features, 0)
    torch.testing.assert_close(moments["mean"], torch.tensor([0.0, 5.0, 1.0, 0.0]).double())
    torch.testing.assert_close(moments["std"], torch.tensor([2.0, 2.0, 2**0.5 / 10, 2**0.5 / 10]).double())
