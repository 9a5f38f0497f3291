"""Runs on features with remote nodes: each computes its own, with the backbone that its owner names."""

from __future__ import annotations

import errno
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import load_file, save_file

from fedstill.core.config_tables import read_toml
from fedstill.core.errors import FedstillError, QueryRefused
from fedstill.core.run_writer import RunWriter
from fedstill.federation import signed_files
from fedstill.federation.offline_files import answer_queries, write_queries
from fedstill.models.backbones import Backbone
from fedstill.models.module_utils import to_vector
from fedstill.node.node_service import NodeService
from fedstill.runs.offline import build_offline_queries, train_from_files
from fedstill.runs.results import write_results
from fedstill.runs.spec import RunSpec
from fedstill.student.evaluate import evaluate
from tests.support.links import NAMES, Away, Live, Loopback, RecordingLink, changed, here, live, nodes, tiny
from tests.support.models import save_tiny_backbone

BACKBONE = "tests.support.models:tiny_backbone"


def on_features(folder: Path, method: str = "fedkd", **features: Any) -> RunSpec:
    """Return a run of three nodes with linear heads on features."""
    options = {"backbone": "random-conv:4", "cache": str(folder / "cache"), **features}
    models = {"nodes": {"models": ["linear"]}, "student": {"model": "linear"}}
    return changed(tiny(method), features=options, **models)


def edit_features(folder: Path, **features: Any) -> dict[str, NodeService]:
    """Change the features of one node's owner; return all nodes."""
    file = folder / "nodes" / "node-1" / "node.toml"
    table = read_toml(file)
    table["features"] |= features
    file.write_text(tomli_w.dumps(table))
    return {name: NodeService(folder / "nodes" / name) for name in NAMES}


class CountedForwards:
    """Number of examples that backbones compute, without those for finding the number of features."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.examples, forward = 0, Backbone.forward

        def counted(backbone: Backbone, x: torch.Tensor) -> torch.Tensor:
            self.examples += len(x) if hasattr(backbone, "width") else 0
            return forward(backbone, x)

        monkeypatch.setattr(Backbone, "forward", counted)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("method", "features", "public"),
    [
        ("fedkd", {"normalize": "public"}, {}),
        ("fedkd", {"normalize": "public", "components": 6}, {}),
        ("fedkd", {"normalize": "example"}, {"name": "gaussian", "limit": 100}),
        ("fedkd", {"normalize": "backbone", "backbone": BACKBONE}, {}),
        ("fedavg", {}, {}),
    ],
)
def test_remote_run_on_features_equals_simulation(
    tmp_path: Path, method: str, features: dict[str, Any], public: dict[str, Any]
) -> None:
    config = changed(on_features(tmp_path, method, **features), public=public)
    simulation, metrics = here(config)
    away = Away(config, tmp_path)
    server = away.live()
    result = server.run()
    assert torch.equal(to_vector(server.student), to_vector(simulation.student))
    assert (result["accuracy"], result["bytes"]) == (metrics["accuracy"], metrics["bytes"])
    away.same_nodes(simulation)


def test_remote_run_with_private_heads_equals_simulation(tmp_path: Path) -> None:
    privacy = {"mechanism": "dp-sgd", "training": {"noise": 0.5}}
    config = changed(
        on_features(tmp_path, normalize="example"), method={"z_max": 20.0}, nodes={"privacy": privacy}
    )
    simulation, metrics = here(config)
    server = Away(config, tmp_path).live()
    result = server.run()
    assert result["privacy"] == metrics["privacy"]
    assert result["privacy"]["guarantee"]
    assert torch.equal(to_vector(server.student), to_vector(simulation.student))


def test_student_of_remote_run_takes_pixels_and_reaches_its_metric(tmp_path: Path) -> None:
    server = Away(on_features(tmp_path, normalize="public"), tmp_path).live()
    result = server.run()
    about = server.describe_run()
    write_results(server, {**about, **result})
    evaluated = evaluate(tmp_path / "server" / "student.safetensors", "digits")
    assert evaluated["metrics"]["accuracy"] == result["accuracy"]
    assert about["features"]["features"] == about["data"]["shape"][0]


def test_resumed_run_on_features_equals_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = on_features(tmp_path, "fedavg")
    simulation, metrics = here(config)
    away = Away(config, tmp_path)
    monkeypatch.setattr(RunWriter, "is_save_due", lambda self: True)
    count = iter(range(20))

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
    assert server.run()["accuracy"] == metrics["accuracy"]
    assert torch.equal(to_vector(server.student), to_vector(simulation.student))


# --- which backbone a node loads ------------------------------------------------------------------------


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("features", "named"),
    [
        ({"backbone": "random-conv:4"}, "features.backbone"),
        ({"size": 6}, "features.size"),
        ({"layer": "conv"}, "features.layer"),
        ({"mean": [0.25]}, "features.mean"),
        ({"std": [0.25]}, "features.std"),
        ({"normalize": "example"}, "features.normalize"),
        ({"normalize": "public", "components": 2}, "features.normalize"),
        ({"precision": "bfloat16"}, "features.precision"),
        ({"weights": "other.safetensors"}, "features.weights"),
    ],
)
def test_node_with_other_features_is_refused(tmp_path: Path, features: dict[str, Any], named: str) -> None:
    config = on_features(
        tmp_path,
        backbone=BACKBONE,
        weights=str(save_tiny_backbone(tmp_path / "w.safetensors")),
        precision="float32",
    )
    nodes(config, tmp_path)
    save_tiny_backbone(tmp_path / "nodes" / "node-1" / "other.safetensors", 1.0)
    if "backbone" in features:
        features = {**features, "weights": ""}
    link = RecordingLink(edit_features(tmp_path, **features))
    with pytest.raises(QueryRefused) as refused:
        live(config, link, tmp_path).run()
    text = str(refused.value)
    assert "node-1" in text
    assert named in text
    assert "\n" not in text
    assert not link.times("train_locally")


def test_node_with_another_number_of_components_is_refused(tmp_path: Path) -> None:
    config = on_features(tmp_path, normalize="public", components=6)
    nodes(config, tmp_path)
    link = RecordingLink(edit_features(tmp_path, components=5))
    with pytest.raises(
        QueryRefused, match=r"^[^\n]*node-1[^\n]*features\.components \(in the run 6\)[^\n]*$"
    ):
        live(config, link, tmp_path).run()
    assert not link.times("train_locally")


def test_student_of_remote_run_on_components_takes_pixels(tmp_path: Path) -> None:
    server = Away(on_features(tmp_path, normalize="public", components=6), tmp_path).live()
    result = server.run()
    about = server.describe_run()
    write_results(server, {**about, **result})
    evaluated = evaluate(tmp_path / "server" / "student.safetensors", "digits")
    assert evaluated["metrics"]["accuracy"] == result["accuracy"]
    assert (about["features"]["features"], about["features"]["components"]) == (6, 6)


def test_node_without_backbone_refuses_features(tmp_path: Path) -> None:
    config = on_features(tmp_path, backbone=BACKBONE)
    nodes(config, tmp_path)
    hosts = edit_features(tmp_path, backbone="")
    with pytest.raises(QueryRefused, match=r"node-1.*names no backbone"):
        live(config, RecordingLink(hosts), tmp_path).run()


def test_node_with_backbone_refuses_pixels(tmp_path: Path) -> None:
    config = changed(tiny("fedkd"), nodes={"models": ["linear"]}, student={"model": "linear"})
    nodes(config, tmp_path)
    hosts = edit_features(tmp_path, backbone="random-conv:4")
    with pytest.raises(QueryRefused, match=r"node-1.*the run has none"):
        live(config, RecordingLink(hosts), tmp_path).run()


def test_node_does_not_import_backbone_of_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the code is in the node's own folder."""
    monkeypatch.syspath_prepend(str(tmp_path))
    code = "from tests.support.models import tiny_backbone\n"
    (tmp_path / "servers_code.py").write_text(code)
    config = on_features(tmp_path, backbone="servers_code:tiny_backbone")
    nodes(config, tmp_path)
    hosts = edit_features(tmp_path, backbone="random-conv:4")
    server = live(config, RecordingLink({"node-1": hosts["node-1"]}), tmp_path)
    del sys.modules["servers_code"]
    with pytest.raises(QueryRefused, match=r"features\.backbone"):
        server.run()
    assert "servers_code" not in sys.modules


def test_missing_weights_are_reported_to_the_owner_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = on_features(
        tmp_path, backbone=BACKBONE, weights=str(save_tiny_backbone(tmp_path / "w.safetensors"))
    )
    nodes(config, tmp_path)
    hosts = edit_features(tmp_path, weights="absent.safetensors")
    with pytest.raises(FedstillError, match="node-1") as failed, caplog.at_level(logging.WARNING):
        live(config, RecordingLink(hosts), tmp_path).run()
    assert "absent" not in str(failed.value)
    lines = [record.getMessage() for record in caplog.records if record.name == "fedstill.node"]
    assert any("features.weights" in line and "absent.safetensors" in line for line in lines)


# --- the cache ------------------------------------------------------------------------------------------


def test_features_are_computed_once_for_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = on_features(tmp_path)
    live(config, RecordingLink(nodes(config, tmp_path)), tmp_path).run()
    for name in NAMES:
        folder = tmp_path / "nodes" / name / "features"
        assert list(folder.glob("*/*.safetensors"))
        for path in (folder, *folder.rglob("*")):
            assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)
    counted = CountedForwards(monkeypatch)
    (tmp_path / "again").mkdir()
    again = {name: NodeService(tmp_path / "nodes" / name) for name in NAMES}
    other = changed(config, method={"z_max": 5.0})
    Live(other, RecordingLink(again), "two", tmp_path / "again").run()
    assert counted.examples == 0


def test_only_changed_records_are_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = on_features(tmp_path)
    live(config, RecordingLink(nodes(config, tmp_path)), tmp_path).run()
    path = tmp_path / "nodes" / "node-1" / "data.safetensors"
    tensors = load_file(path)
    tensors["inputs"][:2] = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    save_file(tensors, path)
    counted = CountedForwards(monkeypatch)
    (tmp_path / "again").mkdir()
    again = {name: NodeService(tmp_path / "nodes" / name) for name in NAMES}
    server = Live(config, RecordingLink(again), "two", tmp_path / "again")
    server.run()
    assert counted.examples == 2


def test_full_disk_only_disables_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = on_features(tmp_path)
    _, metrics = here(config)
    hosts, replace_file = nodes(config, tmp_path), os.replace

    def full(part: Path, path: Path) -> None:
        if "features" in Path(path).parts:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace_file(part, path)

    monkeypatch.setattr(os, "replace", full)
    with caplog.at_level(logging.WARNING, "fedstill.node"):
        result = live(config, RecordingLink(hosts), tmp_path).run()
    assert result["accuracy"] == metrics["accuracy"]
    assert sum("not cached" in record.getMessage() for record in caplog.records) == len(NAMES)
    # the server does not need this information
    assert not any("not cached" in note for note in result["notes"])


# --- offline files --------------------------------------------------------------------------------------


def answered_files(config: RunSpec, folder: Path) -> tuple[Path, list[Path]]:
    """Return the queries of a run, and each node's responses."""
    queries = folder / "queries.safetensors"
    key = signed_files.load_or_create_key(folder / "server.key")
    write_queries(queries, build_offline_queries(config), key)
    responses = [folder / f"{name}.safetensors" for name in NAMES]
    for name, path in zip(NAMES, responses, strict=True):
        answer_queries(folder / "nodes" / name, queries, path)
    return queries, responses


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("features", "public"),
    [
        ({"normalize": "public"}, {}),
        ({"normalize": "public", "components": 6}, {}),
        ({"normalize": "example"}, {"name": "gaussian", "limit": 100}),
    ],
)
def test_offline_run_on_features_equals_simulation(
    tmp_path: Path, features: dict[str, Any], public: dict[str, Any]
) -> None:
    config = changed(on_features(tmp_path, **features), method={"z_max": 20.0}, public=public)
    _, metrics = here(config)
    for host in nodes(config, tmp_path).values():
        host.close()
    queries, responses = answered_files(config, tmp_path)
    later = changed(config, features={"cache_gib": 1.0})
    result = train_from_files(later, queries, responses, tmp_path / "run")
    assert result["accuracy"] == metrics["accuracy"]
    assert result["features"]["backbone"] == "random-conv:4"
    assert evaluate(tmp_path / "run", "digits")["metrics"]["accuracy"] == result["accuracy"]


def test_node_with_other_features_refuses_files(tmp_path: Path) -> None:
    config = changed(on_features(tmp_path), method={"z_max": 20.0})
    nodes(config, tmp_path)
    for host in edit_features(tmp_path, normalize="example").values():
        host.close()
    with pytest.raises(QueryRefused, match=r"features\.normalize"):
        answered_files(config, tmp_path)
    assert not (tmp_path / "node-1.safetensors").exists()
