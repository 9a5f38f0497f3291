"""Nodes in Ray actors: the metrics of nodes in one process, with killed actors and stopped runs, too."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedstill.core import run_writer
from fedstill.core.errors import ArgumentError, DeployError
from fedstill.federation.federation import SentQuery
from fedstill.federation.ray_actors import RayActors, RayFederation, require_ray
from fedstill.methods._server import Server
from fedstill.node.audit_log import FILE, AuditLog
from fedstill.runs.ray_simulation import RaySimulation
from fedstill.runs.run import resume, run
from fedstill.runs.simulation import build_simulation
from fedstill.runs.spec import RunSpec, from_dict
from tests.support.runs import FEDAVG, FEDIOD, FEDKD, config

PUBLIC = {"name": "held-out", "share": 0.3}
METHODS = {
    "fedavg": {"method": FEDAVG},
    "fediod": {"method": FEDIOD},
    "fedkd": {"method": FEDKD, "public": PUBLIC},
    "fedmd": {"method": {"name": "fedmd", "rounds": 2}, "public": PUBLIC},
}
UNEQUAL = {"command", "date", "engine", "options", "peak_memory_mb", "seconds"}


def spec_of(method: str, backend: str, **engine: Any) -> RunSpec:
    """Return a small run; two actors get one node and two nodes."""
    ray = {"ray": {"actors": 2}} if backend == "ray" else {}
    engine = {"batching": "one-by-one", "threads": 1, "backend": backend, **ray, **engine}
    evaluation = {"centralized": False, "samples": 2, "every": 2}
    return config(**METHODS[method], evaluation=evaluation, engine=engine)


def run_in(spec: RunSpec, out: Path) -> Mapping[str, Any]:
    return run(spec, out, command="a test", progress=False)


def metrics(result: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key not in UNEQUAL}


def entries(out: Path) -> list[dict[str, Any]]:
    """Return the entries of a run's audit log, without their times and hashes."""
    log = AuditLog(out / FILE, read_only=True)
    found = [{**entry, "at": "", "hash": ""} for entry in log.entries()]
    log.close()
    return found


@pytest.fixture
def local(tmp_path: Path) -> Callable[[str], Mapping[str, Any]]:
    """Return a function that runs a method in this process."""
    return lambda method: run_in(spec_of(method, "local"), tmp_path / "local")


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", METHODS)
def test_metrics_and_audit_log_equal_those_in_process(
    method: str,
    ray_cluster: Any,
    local: Callable[[str], Mapping[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collect, charged = RayFederation.collect_responses, list[int]()

    def collect_and_count(self: RayFederation, queried: tuple[str, ...], sent: SentQuery) -> Any:
        responses = collect(self, queried, sent)
        with sqlite3.connect(tmp_path / "ray" / FILE) as log:
            lines = [json.loads(line) for (line,) in log.execute("SELECT line FROM entries")]
        charged.append(sum((line["number"], line["part"]) == (sent.number, "response") for line in lines))
        return responses

    monkeypatch.setattr(RayFederation, "collect_responses", collect_and_count)
    result = run_in(spec_of(method, "ray"), tmp_path / "ray")
    assert metrics(result) == metrics(local(method))
    assert entries(tmp_path / "ray") == entries(tmp_path / "local")
    assert charged
    assert set(charged) == {3}, "every node's release is on the disk before the server gets it"
    assert result["engine"]["actors"] == 2


def kill_at(monkeypatch: pytest.MonkeyPatch, number: int, actor: int, delay: float) -> None:
    """Have the process of an actor killed some seconds after a call to the actors begins."""
    import ray

    call, count = RayActors.call, 0

    def call_and_kill(self: RayActors, *given: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            process = ray.get(self._actors[actor].handle.process.remote())
            threading.Timer(delay, os.kill, (process, signal.SIGKILL)).start()
        return call(self, *given, **options)

    monkeypatch.setattr(RayActors, "call", call_and_kill)


def test_killed_actor_is_restarted_with_equal_metrics(
    ray_cluster: Any,
    local: Callable[[str], Mapping[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_writer, "SECONDS_BETWEEN", 0.1)
    draw = random.Random(7)
    kill_at(monkeypatch, draw.randint(5, 20), draw.randint(0, 1), draw.random() / 20)
    result = run_in(spec_of("fediod", "ray"), tmp_path / "ray")
    assert result["notes"][-1] == "1 Ray actor died and restarted during the run"
    expected = metrics(local("fediod"))
    assert metrics({**result, "notes": result["notes"][:-1]}) == expected
    assert entries(tmp_path / "ray") == entries(tmp_path / "local")


@pytest.mark.slow
def test_stopped_run_resumes_to_equal_metrics(
    ray_cluster: Any,
    local: Callable[[str], Mapping[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_writer, "SECONDS_BETWEEN", 0.0)
    step = Server.step

    def step_or_stop(server: Server) -> Mapping[str, float]:
        if server.completed_steps == 4:
            raise KeyboardInterrupt
        return step(server)

    with monkeypatch.context() as stopping:
        stopping.setattr(Server, "step", step_or_stop)
        with pytest.raises(KeyboardInterrupt):
            run_in(spec_of("fediod", "ray"), tmp_path / "ray")
    assert (tmp_path / "ray" / run_writer.STATE_FILE).exists()
    assert metrics(resume(tmp_path / "ray", progress=False)) == metrics(local("fediod"))
    assert entries(tmp_path / "ray") == entries(tmp_path / "local")


def test_names_extra_if_ray_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DeployError, match=r"pip install 'fedstill\[ray\]'"):
        require_ray()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"link": {"secure_aggregation": True}}, "link.secure_aggregation"),
        ({"adversary": {"name": "label-flipping", "nodes": 1}}, "adversary"),
        ({"nodes": {"models": ["mlp:8"], "privacy": {"mechanism": "dp-sgd"}}}, "nodes.privacy"),
    ],
)
def test_refuses_secure_aggregation_and_privacy_before_the_run(changes: dict[str, Any], text: str) -> None:
    spec = config(FEDAVG, **{"engine": {"backend": "ray"}, **changes})
    with pytest.raises(ArgumentError, match=rf"engine.backend = 'ray' .*{text}"):
        build_simulation(spec, RaySimulation)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("engine", "name"),
    [
        ({"ray": {"actors": 2}}, "engine.ray.actors"),
        ({"backend": "ray", "ray": {"gpus_per_actor": 0.5}}, "engine.ray.gpus_per_actor"),
        ({"backend": "ray", "device": "cuda"}, "engine.ray.gpus_per_actor"),
    ],
)
def test_refuses_options_of_ray_without_effect(engine: dict[str, Any], name: str) -> None:
    with pytest.raises(ArgumentError, match=f"invalid {name}"):
        from_dict({"method": FEDAVG, "engine": engine})
