"""Runs at deployed federations and rehearsals: nodes of a run, resuming, results."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("nvflare")

from fedstill.cli import main as cli
from fedstill.cli.arguments import Call
from fedstill.cli.run import configured
from fedstill.core import run_writer
from fedstill.core.errors import DeployError, FedstillError, RunFolderError
from fedstill.core.progress import ProgressBar, ProgressSnapshot
from fedstill.data.partitioners import Dirichlet
from fedstill.federation.transport import Link, LinkError
from fedstill.protocol.wire_format import unpack
from fedstill.report import write_report
from fedstill.report.records import MetricsLog
from fedstill.runs import deployment, run
from fedstill.runs.results import write_results
from fedstill.runs.simulation import build_simulation
from fedstill.runs.spec import NodesConfig, from_dict, load_toml, read_toml
from fedstill.track import Tracker
from fedstill.track.trackers import TrackerGroup
from tests.support.errors import raises_invalid
from tests.support.links import Away, Loopback, tiny

METRICS = [{"phase": "distillation", "step": step, "accuracy": 10.0 * step} for step in range(1, 6)]
RESULT = {"title": "FedAvg", "method": "fedavg", "accuracy": 80.0, "engine": {"backend": "flare"}}


class Server:
    """Replaces a federation's server and its admin session: no process, no network."""

    def __init__(self) -> None:
        self.connected = ["node-0", "node-1", "node-10", "node-2"]
        self.known: list[dict[str, Any]] = []
        self.handed_in: list[dict[str, Any]] = []
        self.outputs: dict[str, dict[str, Any]] = {"result.json": RESULT}
        self.kits: list[Path] = []
        self.waited_for: list[str] = []
        self.ended: list[str] = []
        self.interrupted = False
        self.at_work: list[str] = []  # statuses before the end
        self.measured = 0  # measured rounds of the run

    def admin(self, kit: Path, patience: float = 0.0) -> Server:
        if kit.name != "admin":
            raise DeployError(f"{kit} is no admin's startup kit")
        self.kits.append(kit)
        return self

    server = "localhost:8002"

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *given: object) -> None:
        pass

    def nodes(self) -> dict[str, float]:
        return dict.fromkeys(self.connected, 0.0)

    def jobs(self) -> list[dict[str, Any]]:
        return self.known

    def submit(self, job: Path) -> str:
        result = json.loads((job / "meta.json").read_text())
        self.handed_in.append(result)
        number = f"job-{len(self.known)}"
        self.known.insert(0, {"job_id": number, "name": result["name"], "status": "FINISHED:COMPLETED"})
        return number

    def status(self, job: str) -> str:
        self.waited_for.append(job)
        if self.interrupted:
            raise KeyboardInterrupt
        if self.at_work:
            return self.at_work.pop(0)
        return "FINISHED:COMPLETED"

    def progress_and_metrics(self, job: str, known: int = 0) -> tuple[ProgressSnapshot, list[dict[str, Any]]]:
        note = ProgressSnapshot("distillation", 3, 60, updated_at=time.time() - 12, waiting_for=("node-2",))
        self.measured += 2
        return note, METRICS[known : self.measured]

    def abort(self, job: str) -> None:
        self.ended.append(job)

    def wait(self, job: str, patience: float, every: float = 0.0) -> str:
        return "FINISHED:ABORTED"

    def download(self, job: str, to: Path) -> Path:
        target = to / job / "workspace" / "fedstill"
        target.mkdir(parents=True)
        for name, result in self.outputs.items():
            (target / name).write_text(json.dumps(result))
        (target / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in METRICS))
        return to / job


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Server:
    made = Server()
    monkeypatch.setattr(deployment, "Admin", made.admin)
    monkeypatch.chdir(tmp_path)
    return made


def begin(*words: str, progress: bool = False) -> None:
    options = ["--engine", "flare", "--startup-kit", "admin", "--split.nodes", "10", *words]
    config = configured("digits-fedavg", Call("fedstill run", overrides=options), "run")
    run.run(config, Path("out"), command="fedstill run", progress=progress)


def result() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(Path("out/live.json").read_text())
    return record


# --- at a deployed federation -------------------------------------------------------------------------


def test_resumes_with_initial_nodes(server: Server) -> None:
    server.outputs = {"stopped.json": {"error": "NodeFault", "text": "node-2 is gone"}}
    with pytest.raises(FedstillError, match="node-2 is gone"):
        begin("--link.quorum", "0.5")
    names = ["node-0", "node-1", "node-2", "node-10"]
    assert result()["nodes"] == names
    server.connected.append("node-3")  # another node has joined since
    server.outputs = {"result.json": RESULT}
    assert run.resume(Path("out"), progress=False)["accuracy"] == 80.0
    assert [job["deploy_map"]["app"] for job in server.handed_in] == [["server", *names]] * 2
    assert [job["mandatory_clients"] for job in server.handed_in] == [names] * 2  # also with a quorum
    assert {job["name"] for job in server.handed_in} == {result()["run"]}


def test_shows_progress_of_waiting_run(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(deployment.time, "sleep", lambda seconds: None)
    server.at_work = ["SUBMITTED", "RUNNING", "RUNNING"]
    begin(progress=True)
    message = "  submitted\n  running\ndistillation 3 of 60, waits for node-2 for 12.0 s\n"
    assert capsys.readouterr().err.endswith(message)
    assert not Path("out/progress.json").exists()  # files of unfinished runs


def test_run_waits_for_missing_node(server: Server) -> None:
    server.outputs = {"stopped.json": {"error": "NodeFault", "text": "x"}}
    with pytest.raises(FedstillError):
        begin()
    server.connected.remove("node-2")
    away = (
        r"not connected to the server at localhost:8002: node-2\. "
        r"The run .*fedstill run --resume out resumes it"
    )
    with pytest.raises(DeployError, match=away):
        run.resume(Path("out"), progress=False)
    assert len(server.handed_in) == 1


def test_run_above_quorum_begins_without_missing_node(server: Server) -> None:
    server.outputs = {"stopped.json": {"error": "NodeFault", "text": "x"}}
    with pytest.raises(FedstillError):
        begin("--link.quorum", "0.5")
    server.connected.remove("node-2")
    server.outputs = {"result.json": RESULT}
    run.resume(Path("out"), progress=False)
    connected = ["node-0", "node-1", "node-10"]
    assert server.handed_in[-1]["deploy_map"]["app"] == ["server", *connected]
    # the missing node still belongs to the run
    assert result()["nodes"] == ["node-0", "node-1", "node-2", "node-10"]


def test_aborts_earlier_job_before_resuming(server: Server) -> None:
    server.outputs = {"stopped.json": {"error": "NodeFault", "text": "x"}}
    with pytest.raises(FedstillError):
        begin()
    other = {"job_id": "theirs", "name": "another", "status": "RUNNING"}
    mine = {"job_id": "mine", "name": result()["run"], "status": "RUNNING"}
    server.known, server.outputs = [other, mine], {"result.json": RESULT}
    run.resume(Path("out"), progress=False)
    assert server.ended == ["mine"]  # not the other run's job
    assert len(server.handed_in) == 2


def test_interrupting_aborts_job(server: Server) -> None:
    server.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        begin()
    assert server.ended == ["job-0"]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("QueryRefused", r"refused: x\. Once that is changed there, fedstill run --resume out resumes it"),
        ("DataError", "cannot be resumed as it is: x$"),
        ("NodeFault", r"stopped: x\. To resume it: fedstill run --resume out"),
    ],
)
def test_refused_run_has_no_resume_hint(server: Server, kind: str, message: str) -> None:
    server.outputs = {"stopped.json": {"error": kind, "text": "x"}}
    with pytest.raises(FedstillError, match=message):
        begin()


def test_lost_server_has_resume_hint(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_error(job: str) -> str:
        raise DeployError("the server is gone")

    monkeypatch.setattr(server, "status", raise_error)
    with pytest.raises(DeployError, match="fedstill run --resume out"):
        begin()


def test_timeout_has_no_reason() -> None:
    from nvflare.collab.api.exceptions import CollabCallError

    from fedstill.federation.flare import FlareLink
    from fedstill.federation.transport import ReplyTimeout

    class Client:
        name = "north"

        def __call__(self, timeout: float) -> Client:
            return self

        def serve(self, message: bytes) -> bytes:
            late = TimeoutError("function serve timed out after 1.9565732450000723 seconds")
            raise CollabCallError("north", "serve", late)

    with pytest.raises(ReplyTimeout, match=r"^no answer in time$"):
        FlareLink([Client()]).call("north", b"", 1.9565732450000723)


def test_run_with_result_did_not_stop(server: Server) -> None:
    stopped = {"error": "NodeFault", "text": "in use"}
    server.outputs = {"result.json": RESULT, "stopped.json": stopped, "audit.sqlite": {}}
    begin()
    assert json.loads(Path("out/result.json").read_text())["accuracy"] == 80.0
    assert Path("out/audit.sqlite").exists()
    assert not Path("out/stopped.json").exists()
    server.outputs = {}
    Path("out/result.json").unlink()
    with pytest.raises(DeployError, match=r"job-1 .*FINISHED:COMPLETED .*no result"):
        run.resume(Path("out"), progress=False)


def test_failed_start_creates_no_folder(server: Server) -> None:
    with pytest.raises(DeployError, match="no admin's"):
        begin("--startup-kit", "amdin")
    server.connected = []
    with pytest.raises(DeployError, match="no node"):
        begin()
    assert not Path("out").exists()


def test_resolves_and_replaces_kit(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    out = Path("out").resolve()
    server.outputs = {"stopped.json": {"error": "NodeFault", "text": "x"}}
    with pytest.raises(FedstillError):
        begin()
    assert load_toml(out / "config.toml").engine.startup_kit == str(out.parent / "admin")
    monkeypatch.chdir("/")
    with pytest.raises(FedstillError):
        run.resume(out, progress=False)
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["run", "--resume", str(out), "--startup-kit", str(out.parent / "new/admin")])
    assert exit_info.value.code == 2  # stopped again
    assert server.kits[-1] == out.parent / "new/admin"
    text = (out / "config.toml").read_text()
    assert text.startswith("# Made by: fedstill run\n")
    assert f'startup_kit = "{out.parent / "new/admin"}"' in text
    with pytest.raises(DeployError, match="no admin's"):
        run.resume(out, progress=False, startup_kit=Path("amdin"))
    assert (out / "config.toml").read_text() == text


def test_rejects_kit_for_local_run(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('# Made by: x\n\n[method]\nname = "fedavg"\n')
    with raises_invalid("--startup-kit", "admin", "none"):
        run.resume(tmp_path, progress=False, startup_kit=Path("admin"))


def test_rejects_second_process_on_run(server: Server) -> None:
    Path("out").mkdir()
    held = os.open("out", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    config = tiny("fedavg")
    experiment, _ = build_simulation(config)
    for start in (
        lambda: deployment.rehearse(config, experiment, Path("out"), ProgressBar(False)),
        lambda: deployment.submit(config, Path("out"), ProgressBar(False), TrackerGroup()),
    ):
        with pytest.raises(RunFolderError, match=r"out .*another process"):
            start()
    os.close(held)
    assert not list(Path("out").iterdir())


# --- rehearsals ---------------------------------------------------------------------------------------


def test_rehearsal_is_provisioned_each_time(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port may be in use by now, and an interrupted provisioning leaves no valid federation."""
    made: list[str] = []

    def provision(folder: Path, host: str, nodes: list[str], **given: Any) -> int:
        assert not folder.exists()
        made.append(f"kit {len(made)}")
        for part, file in (
            ("admin", "admin"),
            ("server", "server"),
            *((f"nodes/{name}", "client") for name in nodes),
        ):
            (folder / part / "startup").mkdir(parents=True)
            (folder / part / "startup" / f"fed_{file}.json").write_text(made[-1])
        return 1

    events: list[str] = []
    monkeypatch.setattr(deployment, "provision", provision)
    monkeypatch.setattr(
        deployment.flare_site, "start", lambda here, **given: events.append(f"start {here.folder.name}")
    )
    stop = lambda here: events.append(f"stop {here.folder.name}")  # noqa: E731
    monkeypatch.setattr(deployment.flare_site, "stop", stop)
    monkeypatch.setattr(Server, "wait_for", lambda *given: None, raising=False)
    home, names = tmp_path / "federation", ["node-0", "node-1"]
    for name in names:
        (home / "nodes" / name).mkdir(parents=True)
    (home / "runs/run").mkdir(parents=True)
    (home / "runs/run/result.json").write_text("{}")
    for again in ("whole", "half", "whole"):
        events.clear()
        deployment._run_deployed(tiny("fedavg"), "run", names, home)
        kits = [home / "nodes" / name / "kit/startup/fed_client.json" for name in names]
        assert [kit.read_text() for kit in kits] == [made[-1]] * 2
        assert sorted(events[-6:]) == sorted(f"{what} {name}" for what in ("start", "stop") for name in
                                             ("flare", *names))  # fmt: skip
        assert (home / "flare/runs/run/result.json").exists()
        if again == "half":  # killed while kits were moved
            (home / "nodes/node-1/kit/startup/fed_client.json").unlink()
            (home / "nodes/node-1/kit/startup").rmdir()
            (home / "nodes/node-1/kit").rmdir()
    assert made == ["kit 0", "kit 1", "kit 2"]
    assert (home / "runs/run/result.json").exists()  # behind a link, so not deleted with the federation

    def missing(*given: object) -> None:
        raise DeployError("after 60 s not there: node-1")

    monkeypatch.setattr(Server, "wait_for", missing)
    message = r"not there: node-1: 2 nodes and a server with .*use fewer nodes \(--nodes N\) or no --engine"
    with pytest.raises(DeployError, match=message):
        deployment._run_deployed(tiny("fedavg"), "run", names, home)


def test_rehearsal_report_shows_server_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, out, shown = tiny("fedavg"), tmp_path / "out", []
    config = replace(config, engine=replace(config.engine, backend="flare"))
    out.mkdir()

    def stop(config: object, run: str, names: object, home: Path) -> None:
        (home / "runs" / run).mkdir(parents=True, exist_ok=True)
        with (home / "runs" / run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(METRICS[len(shown)]) + "\n")
        shown.append(MetricsLog.read(out / "metrics.jsonl").main_model)
        raise DeployError("stopped")

    monkeypatch.setattr(deployment, "_run_simulator", stop)
    for _ in range(2):
        with pytest.raises(DeployError, match="stopped"):
            deployment.rehearse(config, build_simulation(config)[0], out, ProgressBar(False))
    assert shown == [{1.0: 10.0}, {1.0: 10.0, 2.0: 20.0}]


def rehearsed(folder: Path, method: str, absent: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the results of a rehearsal in which node-2 does not respond to some messages."""
    config = tiny(method, quorum=0.6, wait=0.2)
    away = Away(config, folder)

    class Gone(Loopback):
        def call(self, node: str, message: bytes, seconds: float) -> bytes:
            if node == "node-2" and absent(unpack(message)[0]):
                raise LinkError("gone")
            return super().call(node, message, seconds)

    link: Link = Gone(away.serve)
    live = away.live(link)
    results = live.run()
    write_results(live, {**live.describe_run(), **results}, keep_state=True)
    (folder / "out").mkdir()
    experiment, about = build_simulation(config)
    metrics = deployment._evaluate_checkpoints(
        experiment, folder / "out", folder / "server", folder / "nodes", "one", 1.0, ProgressBar(False)
    )
    return run.write_simulation_result(experiment, about, metrics, folder / "out")


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ["fediod", "fedkd"])
def test_node_that_never_joined_has_no_metrics(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_writer, "SECONDS_BETWEEN", 0.0)
    all_there = rehearsed(tmp_path / "all", method, lambda header: False)
    assert "nodes" not in all_there["standalone"]["accuracy"]
    assert "nodes" not in all_there["ensemble"]
    result = rehearsed(tmp_path / "two", method, lambda header: True)
    alone, whole = result["standalone"]["accuracy"], all_there["standalone"]["accuracy"]["per_node"]
    assert alone["nodes"] == result["ensemble"]["nodes"] == ["node-0", "node-1"]
    assert alone["per_node"] == [*whole[:2], None]
    assert alone["mean"] == pytest.approx(np.mean(whole[:2]))
    page = write_report(tmp_path / "two/out").read_text()
    assert "on its own data (only node-0, node-1)" in page
    assert "models (only node-0, node-1)" in page


def test_excluded_node_is_evaluated_at_last_checkpoint(
    tmp_path: Path,
) -> None:
    all_there = rehearsed(tmp_path / "all", "fediod", lambda header: False)
    result = rehearsed(
        tmp_path / "two",
        "fediod",
        lambda header: header["operation"] == "answer_query" and header["number"] >= 2,
    )
    # Its own model is the one trained before the first query, not the initial one.
    assert result["standalone"] == all_there["standalone"]
    assert result["ensemble"]["nodes"] == ["node-0", "node-1"]
    assert [event["node"] for event in result["events"]] == ["node-2"]


def test_node_outside_job_is_unreachable() -> None:
    pytest.importorskip("nvflare")
    from fedstill.federation.flare import FlareLink
    from fedstill.federation.transport import Unreachable

    class Client:
        name = "north"

    link = FlareLink([Client()], ["south", "north"])
    assert link.nodes == ["north", "south"]
    with pytest.raises(Unreachable, match="not connected"):
        link.call("south", b"", 60.0)


def test_server_config_has_no_node_options() -> None:
    config = from_dict(
        {
            "method": {"name": "fediod", "steps": 7},
            "split": {"nodes": 9},
            "nodes": {"models": ["mine:make"], "policy": {"outputs_only": False}},
            "engine": {"backend": "flare", "startup_kit": "federation/admin"},
        }
    )
    result = read_toml(deployment.server_config_toml(config))
    assert result.method.steps == 7
    assert (result.nodes, result.split) == (NodesConfig(), Dirichlet())
    assert result.engine.startup_kit == ""
    assert not any(
        word in deployment.server_config_toml(config) for word in ("mine:make", "policy", "models")
    )


def test_server_gets_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It works in another folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("encoder.safetensors", "backbone.onnx"):
        (tmp_path / name).write_bytes(b"")
    config = from_dict(
        {
            "method": {"name": "fediod"},
            "student": {"encoder_weights": "encoder.safetensors"},
            "features": {"backbone": "backbone.onnx"},
        }
    )
    sent = read_toml(deployment.server_config_toml(config))
    assert sent.student.encoder_weights == str(tmp_path / "encoder.safetensors")
    assert sent.features.backbone == str(tmp_path / "backbone.onnx")


class RecordingTracker(Tracker):
    """Records what it logs, and the number of lines in the run's file at that time."""

    events: ClassVar[list[Any]] = []
    fails: ClassVar[str] = ""

    def start(self, folder: Path, about: Mapping[str, Any]) -> None:
        if self.fails == "start":
            raise OSError("the server of trackers is gone")
        self.file = folder / "metrics.jsonl"
        self.events[:] = [about["method"]]

    def log(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self.events.append((len(self.file.read_text().splitlines()), list(lines)))

    def close(self, result: Mapping[str, Any] | None) -> None:
        if self.fails == "close":
            raise OSError("the server of trackers is gone")
        self.events.append(result and result["accuracy"])


@pytest.fixture
def tracker_name(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(deployment, "PROGRESS_INTERVAL", 0.0)
    monkeypatch.setattr(deployment.time, "sleep", lambda seconds: None)
    return f"{__name__}:RecordingTracker"


def test_downloads_metrics_during_run(server: Server, tracker_name: str) -> None:
    """A resumed run sends all metrics again, in place of those that may be invalid."""
    server.at_work = ["RUNNING", "RUNNING"]
    server.outputs = {"stopped.json": {"error": "NodeFault", "text": "x"}}
    with pytest.raises(FedstillError):
        begin("--track", tracker_name)
    parts = [(2, METRICS[:2]), (4, METRICS[2:4])]
    assert RecordingTracker.events == ["FedAvg", *parts, None]
    server.at_work, server.measured, server.outputs = ["RUNNING", "RUNNING"], 0, {"result.json": RESULT}
    run.resume(Path("out"), progress=False)
    assert RecordingTracker.events == ["FedAvg", *parts, (5, METRICS[4:]), 80.0]
    assert [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()] == METRICS


def test_failing_tracker_start_submits_no_job(
    server: Server, tracker_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecordingTracker, "fails", "start")
    with pytest.raises(FedstillError, match="cannot start"):
        begin("--track", tracker_name)
    assert server.handed_in == []


def test_result_notes_tracker_that_fails_at_end(
    server: Server, tracker_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecordingTracker, "fails", "close")
    begin("--track", tracker_name)
    result = json.loads(Path("out/result.json").read_text())
    assert result["accuracy"] == 80.0
    assert result["notes"] == [
        f"tracker {tracker_name!r} failed and was disabled: the server of trackers is gone"
    ]
