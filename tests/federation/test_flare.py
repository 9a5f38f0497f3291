"""Runs on NVIDIA FLARE: equal metrics, also after its processes were killed.

Real processes and, except in the simulator, mutual TLS over loopback. Fault handling is tested without FLARE
in test_faults.py and test_remote.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
import torch

pytest.importorskip("nvflare")

from nvflare.apis.event_type import EventType
from nvflare.collab.api.decorators import get_object_final_funcs

from fedstill.core.checkpoint import load_state
from fedstill.core.config_tables import read_toml
from fedstill.core.errors import FedstillError
from fedstill.core.run_writer import write_text
from fedstill.federation import flare, flare_component, flare_site
from fedstill.federation.admin import Admin
from fedstill.federation.flare import NODE, NodeProgram
from fedstill.node.audit_log import FILE
from fedstill.node.folder_check import readable_files_warning
from fedstill.node.folder_log import SecurityEvents
from fedstill.node.owner_folder import init_folder
from fedstill.protocol.wire_format import unpack
from fedstill.runs.deployment import write_nodes
from fedstill.runs.flare_server import ServerProgram
from fedstill.runs.simulation import build_simulation
from fedstill.runs.spec import RunSpec, to_toml
from tests.support.audit_logs import edit, releases, security_events
from tests.support.links import changed, tiny
from tests.support.models import save_tiny_backbone
from tests.support.processes import (
    PATIENCE,
    STEPS,
    Command,
    Unbroken,
    audit_fields,
    load_student,
    report_time,
    small,
    until,
)

pytestmark = pytest.mark.waits
SAME = (
    "accuracy",
    "bytes",
    "queries",
    "queries_by_name",
    "releases",
    "local",
    "ensemble",
    "iterations",
    "needs",
)


class Started:
    """A run of the command line in its own process, whose nodes are FLARE processes."""

    def __init__(self, out: Path, config: Any, engine: str) -> None:
        self.out = out
        self.file = out.with_suffix(".toml")
        self.file.write_text(to_toml(config))
        self.engine = engine
        self.process: Command | None = None

    def begin(self, *words: str) -> None:
        self.process = Command(["run", *words], self.out.parent, [Path(__file__).parents[2]])

    def start(self) -> None:
        self.begin(str(self.file), "--engine.backend", self.engine, "--out", str(self.out))

    def resume(self) -> None:
        self.begin("--resume", str(self.out))

    def end(self) -> tuple[int, str]:
        """Wait for the end; return the exit code and the output."""
        assert self.process is not None
        return self.process.end()

    def node(self, name: str) -> Path:
        """Return a node's folder of the run."""
        return next(iter((self.out / "federation/nodes" / name).glob("runs/*")), self.out / "none")

    def charged_releases(self, name: str) -> list[dict[str, Any]]:
        """Return the releases in a node's audit log."""
        return releases(self.out / "federation/nodes" / name)

    @property
    def served(self) -> Path:
        return next(iter((self.out / "federation/runs").glob("*")), self.out / "none")

    def same(self, unbroken: Unbroken) -> None:
        """Assert that all metrics equal the uninterrupted run's, and each node logs each release once."""
        result = json.loads((self.out / "result.json").read_text())
        for name in SAME:
            assert result[name] == json.loads(json.dumps(unbroken.metrics[name])), name
        checkpoint = load_state(self.served / "state.safetensors")["checkpoint"]
        for node in unbroken.experiment.nodes:
            state = load_state(self.node(node.name) / f"checkpoint-{checkpoint}.safetensors")["node"]
            for role, module in node.modules.items():
                for key, value in module.state_dict().items():
                    assert torch.equal(state["modules"][role][key], value), (node.name, role, key)
            mine = [audit_fields(line) for line in self.charged_releases(node.name)]
            assert Counter(map(repr, mine)) == Counter(map(repr, unbroken.audit(node.name)))
        if (self.out / "student.safetensors").exists():
            tensors = load_student(self.out)
            for key, value in unbroken.experiment.student.state_dict().items():
                assert torch.equal(tensors[key], value), key

    def close(self) -> None:
        """Stop all remaining processes."""
        if self.process is not None:
            self.process.kill()
        deployed = self.out / "federation/flare"
        if deployed.exists():
            for folder in (self.out / "federation/nodes").iterdir():
                flare_site.stop(flare_site.node(folder))
            flare_site.stop(flare_site.server(deployed))


@contextlib.contextmanager
def started(folder: Path, config: Any, engine: str) -> Iterator[Started]:
    made = Started(folder / "run", config, engine)
    try:
        made.start()
        yield made
    finally:
        made.close()


def kill(here: flare_site.Site) -> None:
    """Send SIGKILL to a site and the processes of its jobs."""
    number = flare_site.process_id(here)
    assert number is not None
    jobs = list(flare_site.job_processes(here))
    assert jobs
    os.kill(number, 9)
    for job in jobs:
        job.kill()


def restart(here: flare_site.Site) -> None:
    """Start a site again. FLARE does not admit it to running jobs, so no run waits for it."""
    until(lambda: flare_site.process_id(here) is None, pause=0.1)
    flare_site.start(here, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    """The uninterrupted run of two nodes, in one process, that tests below compare with."""
    return Unbroken(small(nodes=2), tmp_path_factory.mktemp("unbroken"))


# --- equal metrics ------------------------------------------------------------------------------------


def test_flare_simulator_equals_simulation(tmp_path: Path) -> None:
    config = tiny("fediod")
    with started(tmp_path, config, "flare") as run:
        unbroken = Unbroken(config, tmp_path)
        code, printed = run.end()
        assert code == 0, printed
        run.same(unbroken)


# --- features -----------------------------------------------------------------------------------------


def on_features(folder: Path) -> RunSpec:
    """Return a short run of two nodes with linear heads on a tiny network, whose weights are in a file."""
    features = {
        "backbone": "tests.support.models:tiny_backbone",
        "weights": str(save_tiny_backbone(folder / "backbone.safetensors")),
        "normalize": "public",
        "cache": str(folder / "cache"),
    }
    tables = {"split": {"nodes": 2}, "nodes": {"models": ["linear"]}, "student": {"model": "linear"}}
    return changed(tiny("fedkd"), features=features, **tables)


@pytest.mark.slow
def test_flare_simulator_on_features_equals_simulation(tmp_path: Path) -> None:
    config = on_features(tmp_path)
    with started(tmp_path, config, "flare") as run:
        unbroken = Unbroken(config, tmp_path)
        code, printed = run.end()
        assert code == 0, printed
        run.same(unbroken)


@pytest.mark.slow
def test_node_with_another_backbone_file_is_refused_before_any_release(tmp_path: Path) -> None:
    config = changed(on_features(tmp_path), engine={"backend": "flare"})
    run = Started(tmp_path / "run", config, "flare")
    nodes = run.out / "federation/nodes"
    nodes.mkdir(parents=True)
    write_nodes(config, build_simulation(config)[0], nodes)
    write_text(run.out / "config.toml", f"# Made by: fedstill run\n\n{to_toml(config)}")
    file = nodes / "node-1/node.toml"
    node_table = read_toml(file)
    save_tiny_backbone(file.with_name("other.safetensors"), 1.0)
    node_table["features"]["weights"] = "other.safetensors"
    file.write_text(tomli_w.dumps(node_table))
    with contextlib.closing(run):
        run.resume()
        code, printed = run.end()
    assert code == 2, printed
    (line,) = [line for line in printed.splitlines() if line.startswith("fedstill: ")]
    assert "node-1" in line
    assert "features.weights" in line
    assert line.endswith(f"fedstill run --resume {run.out} resumes it")
    for name in ("node-0", "node-1"):
        assert run.charged_releases(name) == []
        assert not list((nodes / name).glob("runs/*/*.safetensors"))
    assert not (run.out / "student.safetensors").exists()


# --- killed processes ---------------------------------------------------------------------------------


@pytest.mark.timeout(2400)
def test_run_with_killed_node_and_server_equals_unbroken_run(tmp_path: Path, unbroken: Unbroken) -> None:
    with started(tmp_path, small(nodes=2, wait=PATIENCE), "flare-poc") as run:
        until(lambda: len(run.charged_releases("node-1")) > 20, pause=0.02)
        since = time.monotonic()
        killed = flare_site.node(run.out / "federation/nodes/node-1")
        kill(killed)  # immediately, so that most of the run is left
        with Admin(run.out / "federation/flare/admin", 60) as admin:
            (job,) = [job["job_id"] for job in admin.jobs()]
            waits = rf"distillation \d+ of {STEPS}, (accuracy .* %, )?waits for node-1 for [\d.]+ s"
            until(
                lambda: (
                    (noted := admin.progress_and_metrics(job)[0]) and re.fullmatch(waits, noted.describe())
                ),
                pause=0.1,
            )
            _, lines = admin.progress_and_metrics(job)  # no new metrics while it waits
            assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
            assert admin.progress_and_metrics(job, 2)[1] == lines[2:] != []
        restart(killed)
        code, printed = run.end()
        report_time("FLARE, node killed in distillation, until the run has stopped", since)
        assert code == 2, printed
        (line,) = [line for line in printed.splitlines() if line.startswith("fedstill: ")]
        assert "the run stopped: " in line
        assert line.endswith(f". To resume it: fedstill run --resume {run.out}")
        assert "node-1" in line
        before = len(run.charged_releases("node-1"))
        run.resume()
        until(lambda: len(run.charged_releases("node-1")) > before + 10, pause=0.02)
        since = time.monotonic()
        kill(flare_site.server(run.out / "federation/flare"))
        code, printed = run.end()
        report_time("FLARE, server killed in distillation, until the command says so", since)
        assert code == 2, printed
        run.resume()
        code, printed = run.end()
        assert code == 0, printed
        run.same(unbroken)
        report_time("FLARE, server killed in distillation, to the end", since)
        folder = run.out / "federation/nodes/node-1"
        assert {"node.log", "node.pid", "audit.sqlite"} <= {path.name for path in folder.iterdir()}
        assert (
            readable_files_warning(folder, folder / "audit.sqlite") is None
        )  # FLARE's processes write there, too


@pytest.mark.slow
def test_flare_run_continues_without_node_above_quorum(tmp_path: Path, unbroken: Unbroken) -> None:
    config = small(nodes=2, wait=PATIENCE, quorum=0.5)
    with started(tmp_path, config, "flare-poc") as run:
        until(lambda: len(run.charged_releases("node-1")) > 20, pause=0.02)
        since = time.monotonic()
        killed = flare_site.node(run.out / "federation/nodes/node-1")
        kill(killed)
        restart(killed)
        before = len(run.charged_releases("node-0"))
        until(lambda: len(run.charged_releases("node-0")) > before + 4, pause=0.1)
        report_time("FLARE, node killed, quorum 0.5, until the other continues", since)
        code, printed = run.end()
        assert code == 0, printed
        result = json.loads((run.out / "result.json").read_text())
        (event,) = result["events"]
        # FedIOD does not change the nodes' models, so that of the lost node is evaluated, too.
        assert result["local"] == unbroken.metrics["local"]
        assert (event["node"], event["event"]) == ("node-1", "excluded")
        assert "its process for this run has ended" in event["reason"]
        answered = [line["number"] for line in run.charged_releases("node-1") if line["part"] == "response"]
        assert event["number"] in (answered[-1], answered[-1] + 1)
        assert (
            len([line for line in run.charged_releases("node-0") if line["part"] == "response"]) == 1 + STEPS
        )


# --- the server's program alone -----------------------------------------------------------------------


def test_node_with_invalid_folder_replies_with_generic_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Previously, FLARE ended the whole job with its own error."""
    init_folder(tmp_path / "clinic")
    with contextlib.closing(SecurityEvents(tmp_path / "clinic")) as events:
        events.write("approved", "other", "why")
    edit(tmp_path / "clinic" / FILE, "DELETE FROM entries")
    monkeypatch.setenv(NODE, str(tmp_path / "clinic"))
    guarded: list[Any] = []
    monkeypatch.setattr(flare_component, "install_job_request_filter", lambda *about: guarded.append(about))
    monkeypatch.setattr(flare, "collab", SimpleNamespace(site_name="clinic"))  # FLARE sets this in jobs only
    program = NodeProgram()
    program.begin()
    assert guarded == [("clinic", tmp_path / "clinic")]  # before the folder is read
    header, _ = unpack(program._error_reply, 0)
    assert header["error"]["kind"] == "NodeDataError"
    assert header["error"]["text"] == "its data or model failed: see its log"
    assert "it ends at entry 0, and its head at 1" in caplog.text


class Scripted(ServerProgram):
    """Calls a function in place of a run."""

    def __init__(self, does: Callable[[Path], None]) -> None:
        super().__init__("", "one")
        self._does = does

    def _run(self, folder: Path) -> None:
        self._does(folder)


def test_refusals_are_in_the_log_when_a_job_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that probes a node does not end the run, but FLARE calls methods marked as final."""
    folder = tmp_path / "clinic"
    init_folder(folder)
    site = flare_component.SiteComponent(flare_site.CLIENT, str(folder))
    flare_component._security_events.cache_clear()
    for _ in range(6):
        flare_component.refusal_reply("a look", site._site.kit, folder)
    host = SimpleNamespace(folder=folder, record_repeats=lambda: written.append("of the run"))
    written: list[str] = []
    program = NodeProgram()
    program._host = host
    ((_, end),) = get_object_final_funcs(program)
    end()
    assert written == ["of the run"]
    assert [event.get("refusals") for event in security_events(folder)] == [None, "5"]
    flare_component.refusal_reply("a look", site._site.kit, folder)
    monkeypatch.setattr(flare_component.os, "truncate", lambda *about: None)
    monkeypatch.setattr(flare_component.os, "_exit", lambda code: None)
    monkeypatch.setattr(flare_component, "end_jobs", lambda site: None)
    site._end(0)
    assert [event.get("refusals") for event in security_events(folder)] == [None, "5", "1"]
    flare_component._security_events.cache_clear()


def test_files_of_a_finished_job_are_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    site = flare_component.SiteComponent(flare_site.CLIENT, str(tmp_path))
    kit = site._site.kit.folder

    def completed(job: str, text: str) -> Path:
        config = kit / job / "app_clinic" / "config" / "config_fed_server.json"
        config.parent.mkdir(parents=True)
        config.write_text(text)
        site.handle_event(EventType.JOB_COMPLETED, SimpleNamespace(get_prop=lambda name: job))
        return kit / job

    other = completed("startup", "{")  # no name of a job
    job = "01234567-89ab-cdef-0123-456789abcdef"
    with caplog.at_level("INFO", "fedstill.site"):
        assert not completed(job, json.dumps({"components": [{"args": {"run": "spring"}}]})).exists()
    assert "spring" in caplog.text
    with pytest.raises(json.JSONDecodeError):
        completed(job, "{")
    assert not (kit / job).exists()
    assert other.exists()


def test_finished_run_stores_results(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "stopped.json").write_text("{}")  # from an earlier job
    for name in ("state.safetensors", "progress.json"):
        (folder / name).write_text("")
    Scripted(lambda here: write_text(here / "result.json", "{}"))._run_in_folder(folder, tmp_path / "kept")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["result.json"]
    assert not (folder / "stopped.json").exists()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (FedstillError("node a\nis gone"), "node a is gone"),
        (OSError(28, "No space left"), "[Errno 28] No space left"),
        (KeyError("x"), "unexpected error: see the server's log"),
        (KeyboardInterrupt(), "unexpected error: see the server's log"),
    ],
)
def test_stopped_run_stores_reason(error: BaseException, text: str, tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise error

    expected = isinstance(error, FedstillError | OSError)
    with contextlib.nullcontext() if expected else pytest.raises(type(error)):
        Scripted(fail)._run_in_folder(tmp_path / "one", tmp_path / "kept")
    for folder in ("one", "kept"):
        assert json.loads((tmp_path / folder / "stopped.json").read_text())["text"] == text


def test_second_job_of_run_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "one"

    def other(_: Path) -> None:
        raise AssertionError("two jobs execute one run")

    def first(_: Path) -> None:
        (folder / "audit.sqlite").write_text("")
        Scripted(other)._run_in_folder(folder, tmp_path / "second")
        assert sorted(path.name for path in folder.iterdir()) == ["audit.sqlite", "job.lock"]

    Scripted(first)._run_in_folder(folder, tmp_path / "first")
    assert [path.name for path in (tmp_path / "first").iterdir()] == ["audit.sqlite"]
    assert [path.name for path in (tmp_path / "second").iterdir()] == ["stopped.json"]
    assert "is in use by another job" in json.loads((tmp_path / "second/stopped.json").read_text())["text"]
