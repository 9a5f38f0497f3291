"""The server's part of a run: its information, refusals before training, and results."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstill.core.errors import FedstillError, MethodRefused, NodeFault, QueryRefused
from fedstill.core.progress import ProgressFile, ProgressSnapshot
from fedstill.federation import transport
from fedstill.models.module_utils import to_vector
from fedstill.node.node_service import NodeService
from fedstill.protocol.run_plan import RunPlan
from fedstill.protocol.wire_format import unpack
from fedstill.runs import remote_run
from fedstill.runs.simulation import build_simulation
from tests.support.errors import raises_refused
from tests.support.links import NAMES, RecordingLink, changed, live, nodes, tiny

# --- information of the server ------------------------------------------------------------------------


def test_server_ignores_node_options(tmp_path: Path) -> None:
    config = tiny("fediod")
    experiment, _ = build_simulation(config)
    experiment.run()
    other = changed(config, nodes={"models": ["resnet8:4"], "local": {"epochs": 9}}, split={"nodes": 50})
    server = live(other, RecordingLink(nodes(config, tmp_path)), tmp_path)
    server.run()
    assert torch.equal(to_vector(server.student), to_vector(experiment.student))


def test_result_has_node_notes_only(tmp_path: Path) -> None:
    hosts = nodes(tiny("fediod"), tmp_path)
    server = live(tiny("fediod"), RecordingLink(hosts), tmp_path)
    results = server.run()
    sizes = [len(node.data) for node in build_simulation(tiny("fediod"))[0].setting.nodes]
    assert [node["examples"] for node in results["nodes"]] == sizes
    assert [sum(node["label_counts"]) for node in results["nodes"]] == sizes
    assert [node["name"] for node in results["nodes"]] == list(NAMES)
    assert results["local"] is results["standalone"] is results["ensemble"] is None
    assert results["events"] == []
    assert json.dumps(results)
    assert results["bytes"]["up"] == sum(node["bytes"]["up"] for node in results["nodes"])
    link = results["link"]
    parts = sum(link[name] for name in ("nodes", "waiting", "link", "training", "server"))
    assert parts == pytest.approx(results["seconds"]["total"], abs=0.2)
    assert all(host.session is None for host in hosts.values())  # the run has ended at all nodes


def test_no_label_counts_without_query(tmp_path: Path) -> None:
    config = tiny("fedavg")
    results = live(config, RecordingLink(nodes(config, tmp_path)), tmp_path).run()
    assert [node["label_counts"] for node in results["nodes"]] == [None] * 3


def test_method_without_student_saves_none(tmp_path: Path) -> None:
    config = tiny("standalone")
    server = live(config, RecordingLink(nodes(config, tmp_path)), tmp_path)
    assert server.run()["student"] is None
    assert not server.has_student


# --- refused before anything is trained -----------------------------------------------------------------


def refused(link: RecordingLink) -> bool:
    """Return whether no node was queried or has trained."""
    return not link.times("train_locally") and not link.times("answer_query")


def test_averaging_rejects_other_architectures(tmp_path: Path) -> None:
    config = tiny("fedavg")
    link = RecordingLink(nodes(config, tmp_path))
    other = changed(config, student={"model": "small-cnn:4"})
    with pytest.raises(MethodRefused, match=r"node-1, node-2: .*architecture"):
        live(other, link, tmp_path).run()
    assert refused(link)


def test_training_methods_reject_frozen_models(tmp_path: Path) -> None:
    config = tiny("fedavg")
    link = RecordingLink(nodes(config, tmp_path, train="false"))
    with pytest.raises(MethodRefused, match="frozen"):
        live(config, link, tmp_path).run()
    assert refused(link)


def test_frozen_models_respond(tmp_path: Path) -> None:
    config = tiny("fediod")
    hosts = nodes(config, tmp_path, train="false")
    before = {name: (tmp_path / "nodes" / name / "model.safetensors").read_bytes() for name in hosts}
    link = RecordingLink(hosts)
    results = live(config, link, tmp_path).run()
    assert link.times("train_locally") == 0
    assert results["queries"] == 4
    assert before == {name: (tmp_path / "nodes" / name / "model.safetensors").read_bytes() for name in hosts}


def test_rejects_missing_public_data(tmp_path: Path) -> None:
    config = tiny("fedkd")
    link = RecordingLink(nodes(config, tmp_path))
    with pytest.raises(MethodRefused, match=r"--public\.name"):
        live(changed(config, public={"name": "none"}), link, tmp_path)
    assert link.calls == []


def test_rejects_low_query_limit_at_start(tmp_path: Path) -> None:
    config = tiny("fediod")  # plans more queries than allowed
    link = RecordingLink(nodes(config, tmp_path, max_queries="3"))
    with raises_refused("max_queries: 3", "asks 4"):
        live(config, link, tmp_path).run()
    assert refused(link)
    again = RecordingLink({name: NodeService(tmp_path / "nodes" / name) for name in NAMES})
    with pytest.raises(QueryRefused, match="max_queries: 3"):
        live(config, again, tmp_path).run()


def test_rejects_forbidden_query_at_start(tmp_path: Path) -> None:
    config = tiny("fediod")
    link = RecordingLink(nodes(config, tmp_path, queries='["count_labels"]'))
    with pytest.raises(QueryRefused, match=r"'node-1', 'node-2' .*'predict_logits'"):
        live(config, link, tmp_path).run()
    assert refused(link)


def test_nodes_refuse_other_input_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = remote_run.make_run_plan

    def other(*about: Any) -> RunPlan:
        plan = sound(*about)
        return dataclasses.replace(plan, spec=dataclasses.replace(plan.spec, classes=("zero", "one")))

    config = tiny("fediod")
    link = RecordingLink(nodes(config, tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(remote_run, "make_run_plan", other)
        server = live(config, link, tmp_path)
    with pytest.raises(NodeFault, match="its log"):
        server.run()
    assert refused(link)


# --- absent nodes ---------------------------------------------------------------------------------------


def test_full_quorum_needs_all_nodes(tmp_path: Path) -> None:
    config = tiny("fediod", wait=0.2)
    link = RecordingLink(nodes(config, tmp_path), away=("node-1",))
    with pytest.raises(NodeFault, match=r"'node-1', query 'join'.*link\.quorum wants 3"):
        live(config, link, tmp_path).run()
    assert refused(link)
    # With it, the same folder resumes, to the metrics of an uninterrupted run.
    experiment, _ = build_simulation(config)
    experiment.run()
    link.away = ()
    server = live(config, link, tmp_path)
    server.run()
    assert torch.equal(to_vector(server.student), to_vector(experiment.student))


@pytest.mark.parametrize("method", ["fediod", "fedavg", "fedkd", "fedmd"])
def test_run_above_quorum_finishes_without_node(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "PAUSE", 0.02)
    config = tiny(method, quorum=0.6, wait=0.1)
    link = RecordingLink(nodes(config, tmp_path), away=("node-1",))
    server = live(config, link, tmp_path)
    with ProgressFile(tmp_path / "progress.json") as bars:
        results = server.run(bars=bars)
    noted = ProgressSnapshot.read(tmp_path / "progress.json")
    assert noted is not None
    assert noted.excluded == ("node-1",)
    (event,) = results["events"]
    assert (event["node"], event["number"], event["event"]) == ("node-1", 0, "excluded")
    assert results["nodes"][1]["bytes"] == {"up": 0, "down": 0}
    assert torch.isfinite(to_vector(server.student)).all()


def test_stopped_run_releases_nodes(tmp_path: Path) -> None:
    config = tiny("fediod", {"steps": 6})
    hosts = nodes(config, tmp_path)

    class Stops(RecordingLink):
        def call(self, node: str, message: bytes, seconds: float) -> bytes:
            header, _ = unpack(message)
            if node == "node-1" and header["operation"] == "answer_query" and header["number"] == 3:
                raise FedstillError("the power is off")
            return super().call(node, message, seconds)

    link = Stops(hosts)
    with pytest.raises(FedstillError, match="the power is off"):
        live(config, link, tmp_path).run()
    assert not (tmp_path / "server/result.json").exists()
    assert hosts["node-0"].session is hosts["node-2"].session is None  # the failed node gets no message
