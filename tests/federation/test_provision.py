"""Provisioned federations: authentication, rights of jobs at a site, and stopping processes.

All processes are real and use TLS over loopback. The server of the shared federation is malicious: it allows
jobs to bring any code and name any class. So all refusals are by the nodes.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import json
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("nvflare")

from fedstill.cli.main import dispatch
from fedstill.core.errors import ArgumentError, DeployError, FedstillError, QueryRefused
from fedstill.core.progress import ProgressBar
from fedstill.core.startup_kit import StartupKit
from fedstill.data.data_spec import DataSpec
from fedstill.data.loading import load
from fedstill.data.public import load_public
from fedstill.federation import flare as jobs
from fedstill.federation import flare_site, provision
from fedstill.federation.admin import Admin
from fedstill.node import owner_folder
from fedstill.node.approvals import ApprovalRequests
from fedstill.node.audit_log import FILE, AuditLog
from fedstill.protocol.run_plan import describe
from fedstill.runs.deployment import submit
from fedstill.runs.remote_run import make_run_plan
from fedstill.runs.spec import from_dict
from fedstill.track.trackers import TrackerGroup
from tests.support.audit_logs import edit, security_events
from tests.support.processes import PATIENCE, until

pytestmark = pytest.mark.waits
NODES = ("east", "north")

PROGRAMS = '''
"""Stands for fedstill.federation.flare: what a job names."""
import os
import time
from pathlib import Path
from nvflare.collab import collab

class ServerProgram:
    def __init__(self, run):
        self.run = run
    @collab.main
    def main(self):
        time.sleep(60 if self.run == "slow" else 0)
        answers = sorted(collab.clients.hello(20))
        Path(os.environ["FEDSTILL_SERVER"], "runs", self.run).write_text(repr(answers))

class NodeProgram:
    @collab.publish
    def hello(self, x):
        return [os.environ["FEDSTILL_NODE"], x + 1]

class Stranger:
    def __init__(self):
        Path(os.environ["FEDSTILL_NODE"], "stranger").write_text("was here")
    @collab.publish
    def hello(self, x):
        return x
'''


@dataclass
class Federation:
    folder: Path
    programs: Path
    port: int

    def node(self, name: str) -> Path:
        return self.folder / "owners" / name

    def job(self, name: str, run: str = "run") -> Path:
        """Write a job like those of fedstill, but with the programs above."""
        job = jobs.write_job(self.folder / "jobs" / name, NODES, {"run": run}, name=run)
        for path in (job / "app" / "config").iterdir():
            path.write_text(
                path.read_text()
                .replace("fedstill.federation.flare.", "programs.")
                .replace("fedstill.runs.flare_server.", "programs.")
            )
        return job

    def admin(self) -> Admin:
        return Admin(self.folder / "admin", 60)


# Kits cannot allow the programs of these tests at a node; the node's own list can.
ALLOWED = """
from fedstill.federation import provision

provision.NODE_CLASSES = (*provision.NODE_CLASSES, "programs.NodeProgram")
"""


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("federation")
    port = provision.provision(folder, "localhost", NODES, heartbeat=2, dead_after=20)
    here = Federation(folder, folder / "programs", port)
    here.programs.mkdir()
    (here.programs / "programs.py").write_text(PROGRAMS)
    (here.programs / "sitecustomize.py").write_text(ALLOWED)
    for name in NODES:
        here.node(name).mkdir(parents=True)
        shutil.move(folder / "nodes" / name, here.node(name) / "kit")
    for right in ("byoc", "shell_commands"):
        _edit(folder / "server/local/authorization.json", f'"{right}": "none"', f'"{right}": "any"')
    resources = folder / "server/local/resources.json"
    resources.write_text(json.dumps(json.loads(resources.read_text()) | {"class_allow_list": ["*"]}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(here.programs))
        processes = [flare_site.start(flare_site.server(folder), stdout=subprocess.DEVNULL)]
        processes += [
            flare_site.start(flare_site.node(here.node(name)), stdout=subprocess.DEVNULL) for name in NODES
        ]
    try:
        with here.admin() as admin:
            admin.wait_for(NODES, PATIENCE)
        yield here
    finally:
        for name in NODES:
            flare_site.stop(flare_site.node(here.node(name)))
        flare_site.stop(flare_site.server(folder))
        for process in processes:
            process.wait(10)


def server_command(*words: str) -> None:
    """Run ``fedstill server`` in this process."""
    dispatch(["server", *words])


def _edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def _processes(folder: Path) -> list[list[str]]:
    """Return the command lines of processes that mention this folder."""
    import psutil

    processes = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(str(folder) in word for word in words):
            processes.append(words)
    return processes


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation that no test starts."""
    folder = tmp_path_factory.mktemp("kits") / "federation"
    provision.provision(folder, "localhost", NODES)
    return folder


def test_site_allows_two_classes_and_no_code(kits: Path) -> None:
    assert provision.SERVER_CLASSES == (
        "nvflare.collab.runtime.controller.CollabController",
        "fedstill.runs.flare_server.ServerProgram",
    )
    assert provision.NODE_CLASSES == (
        "nvflare.collab.runtime.executor.CollabExecutor",
        "fedstill.federation.flare.NodeProgram",
    )
    for kit in (kits / "server", *(kits / "nodes" / name for name in NODES)):
        resources = json.loads((kit / "local/resources.json").read_text())
        classes = provision.SERVER_CLASSES if kit.name == "server" else provision.NODE_CLASSES
        assert resources["class_allow_list"] == list(classes)
        assert resources["class_list_enforcement_mode"] == "enforce"
        rights = json.loads((kit / "local/authorization.json").read_text())["permissions"]
        assert list(rights) == ["project_admin"]  # no other role may do anything
        assert rights["project_admin"]["byoc"] == rights["project_admin"]["shell_commands"] == "none"
        assert not list((kit / "startup").glob("*.sh"))
    server = json.loads((kits / "server/local/resources.json").read_text())
    assert not [part for part in server["components"] if "log_receiver" in part["path"]], (
        "the server does not receive logs of nodes"
    )
    node = json.loads((kits / "nodes/east/local/resources.json").read_text())
    assert node["allow_log_streaming"] is False
    rights = json.loads((kits / "nodes/east/local/authorization.json").read_text())["permissions"]
    assert rights["project_admin"]["operate"] == "none"  # only its owner can shut a node down


@pytest.mark.parametrize("made", [{}, {"current_prod_dir": "half", "__build_error__": True}])
def test_reports_flare_provisioning_errors(
    made: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: object, project: object) -> dict[str, object]:
        print("Unable to sign\n")
        return made

    monkeypatch.setattr("nvflare.lighter.provisioner.Provisioner.provision", failing)
    with pytest.raises(DeployError, match=r"Unable to sign$"):
        provision.provision(tmp_path / "federation", "localhost", NODES)


def test_private_keys_are_in_kits_only(kits: Path) -> None:
    assert stat.S_IMODE(kits.stat().st_mode) == 0o700
    for key in kits.rglob("*.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600, key
    state = kits / "provision/fedstill/state/cert.json"
    assert stat.S_IMODE(state.stat().st_mode) == 0o600
    assert not set(NODES) & set(json.loads(state.read_text()))  # nodes' keys are in their kits only


def test_renews_certificates(kits: Path) -> None:
    from cryptography import x509

    def certificate(kit: Path) -> x509.Certificate:
        name = "server.crt" if kit.name == "server" else "client.crt"
        return x509.load_pem_x509_certificate((kit / "startup" / name).read_bytes())

    authority = x509.load_pem_x509_certificate((kits / "server/startup/rootCA.pem").read_bytes())
    assert (authority.not_valid_after_utc - authority.not_valid_before_utc).days == 3650
    first = [certificate(kits / kit) for kit in ("server", "admin", "nodes/east")]
    assert {(item.not_valid_after_utc - item.not_valid_before_utc).days for item in first} == {360}

    provision.add_nodes(kits, ["west"])
    with pytest.raises(DeployError, match="nodes/east exists"):
        provision.add_nodes(kits, ["east"])
    shutil.rmtree(kits / "nodes/east")
    provision.add_nodes(kits, ["east"])
    provision.renew_certificates(kits)
    second = [certificate(kits / kit) for kit in ("server", "admin", "nodes/east")]
    for old, new in zip(first, second, strict=True):
        assert new.serial_number != old.serial_number
        assert new.subject == old.subject
        new.verify_directly_issued_by(authority)
    for kit in ("server", "admin", "nodes/east", "nodes/west"):
        StartupKit(kits / kit).require_valid()
    assert kits.stat().st_mode & 0o777 == 0o700  # it contains keys


def test_rejects_kit_with_foreign_certificate(kits: Path, tmp_path: Path) -> None:
    provision.provision(tmp_path / "other", "localhost", ["north"])
    kit = tmp_path / "owner/kit"
    shutil.copytree(tmp_path / "other/nodes/north", kit)
    shutil.copy(kits / "nodes/north/startup/rootCA.pem", kit / "startup")
    with pytest.raises(DeployError, match=r"rootCA\.pem"):
        flare_site.start(flare_site.node(kit.parent))


@pytest.mark.parametrize(
    ("host", "nodes", "changes", "message"),
    [
        ("a:1", ["x"], {}, "invalid host = 'a:1'"),
        (
            "10.0.0.300",
            ["x"],
            {},
            r"invalid host = '10\.0\.0\.300' \(expected a host name or an IPv4 address",
        ),
        ("10.1", ["x"], {}, r"invalid host = '10\.1'"),
        ("localhost", [], {}, "invalid nodes = ''"),
        ("localhost", ["North", "north"], {}, "each name once, ignoring case"),
        ("localhost", ["../x"], {}, r"invalid node = '\.\./x'"),
        ("localhost", ["-x"], {}, "invalid node = '-x'"),
        ("localhost", ["Server"], {}, "not 'server'"),
        ("localhost", ["localhost"], {}, "another name than the server's host"),
        ("localhost", ["x"], {"port": 0}, "invalid port = 0"),
        ("localhost", ["x"], {"name": "a-b"}, "invalid name = 'a-b'"),
        ("localhost", ["x"], {"heartbeat": 1}, "invalid heartbeat = 1"),
    ],
)
def test_rejects_invalid_names(
    tmp_path: Path, host: str, nodes: list[str], changes: dict[str, int], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        provision.provision(tmp_path / "new", host, nodes, **changes)  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["init", "DIR", "--host", "x", "--nodes", "a", "--port", "no"], ArgumentError, "--port = 'no'"),
        (["start", "DIR"], DeployError, "holds no federation"),
        (["stop", "DIR"], DeployError, "make one with `fedstill server init`"),
    ],
)
def test_command_refuses_in_one_line(
    tmp_path: Path, words: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        server_command(*(str(tmp_path / "nothing") if word == "DIR" else word for word in words))
    assert "\n" not in str(caught.value)


def test_command_prints_kit_instructions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, port = tmp_path / "new", provision.free_port()
    server_command("init", str(folder), "--host", "localhost", "--nodes", *NODES, "--port", str(port))
    stdout = capsys.readouterr().out
    for expected in (
        f"port {port} of localhost",
        "nodes/east  to the owner of east",
        f"{folder}/admin",
        "secret",
    ):
        assert expected in stdout
    with pytest.raises(SystemExit) as exit_info:
        server_command("status", str(folder))
    assert exit_info.value.code == 1
    assert "does not run" in capsys.readouterr().out
    server_command("stop", str(folder))
    assert "did not run" in capsys.readouterr().out
    with pytest.raises(DeployError, match="this machine"):
        server_command("revoke", str(folder), "east")
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(DeployError, match=f"port {port} of this machine cannot be opened"):
            server_command("start", str(folder))
        with pytest.raises(DeployError, match=f"port {port} of this machine cannot be opened"):
            flare_site.start(flare_site.server(folder))


def test_concurrent_status_checks_do_not_count_as_site(tmp_path: Path) -> None:
    here = flare_site.Site("client", tmp_path)
    assert flare_site.process_id(here) is None
    here.pid_file.write_text("1")  # of a killed site; the number now belongs to another process
    with here.pid_file.open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)  # a concurrent status check
        assert flare_site.process_id(here) is None
        assert flare_site.stop(here) is False
    with here.pid_file.open("r+") as own:
        fcntl.flock(own, fcntl.LOCK_EX)
        assert flare_site.process_id(here) == 1


def test_site_process_does_not_import_torch() -> None:
    """Only job processes compute; torch takes seconds to load."""
    message = "import sys, fedstill.federation.flare_component; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", message], check=False).returncode == 0


def test_stop_spares_other_processes(tmp_path: Path) -> None:
    here = flare_site.Site("client", tmp_path)
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        here.pid_file.write_text(str(stranger.pid))
        with here.pid_file.open("r+") as own:
            fcntl.flock(own, fcntl.LOCK_EX)
            with pytest.raises(DeployError, match=rf"process {stranger.pid}, which .* names, is no site"):
                flare_site.stop(here)
        assert stranger.poll() is None
        assert here.pid_file.exists()
    finally:
        stranger.kill()
        stranger.wait()


def test_missing_flare_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvflare", None)
    with pytest.raises(DeployError, match=r"'fedstill\[flare\]'"):
        provision.provision(tmp_path / "new", "localhost", NODES)


def test_unreachable_server_is_reported(kits: Path, tmp_path: Path) -> None:
    with pytest.raises(DeployError, match="server at localhost"):
        Admin(kits / "admin", 0.2)
    with pytest.raises(DeployError, match="no admin's"):
        Admin(tmp_path)
    kit = tmp_path / "kit"
    shutil.copytree(kits / "admin", kit)
    _edit(kit / "startup/fed_admin.json", '"host": "localhost"', '"host": "nowhere.invalid"')
    with pytest.raises(DeployError, match=r"'nowhere\.invalid'"):
        Admin(kit, 0.2)


def test_job_without_code_runs(federation: Federation) -> None:
    with federation.admin() as admin:
        job = admin.submit(federation.job("sound", run="sound"))
        assert admin.wait(job, PATIENCE) == "FINISHED:COMPLETED"
    responses = ast.literal_eval((federation.folder / "runs/sound").read_text())
    # each node was called, in its own folder
    assert responses == [(name, [str(federation.node(name)), 21]) for name in sorted(NODES)]
    for name in NODES:
        until(lambda name=name: "the job of run sound is over" in log(federation, name))  # type: ignore[misc]
        kit = [path.name for path in (federation.node(name) / "kit").iterdir() if path.is_dir()]
        assert sorted(kit) == ["local", "startup", "transfer"]


def log(federation: Federation, name: str) -> str:
    return (federation.node(name) / "node.log").read_text()


def test_status_lists_runs_and_outcomes(federation: Federation, capsys: pytest.CaptureFixture[str]) -> None:
    refused = federation.folder / "runs/trial-0-1f"  # FLARE has forgotten its job
    refused.mkdir()
    (refused / "stopped.json").write_text('{"error": "QueryRefused", "text": "node \'east\' refuses"}')
    server_command("status", str(federation.folder))
    stdout = capsys.readouterr().out
    assert "2 nodes are there:" in stdout
    (line,) = [line for line in stdout.splitlines() if line.startswith("  sound  ")]
    with federation.admin() as admin:
        (job,) = [job["job_id"] for job in admin.jobs() if job["name"] == "sound"]
    assert line.endswith(f"job {job}")
    assert "FINISHED" not in stdout
    runs = stdout[stdout.index("Runs, the newest first:") :].splitlines()
    assert runs[1].startswith("  trial-0-1f  ")
    assert runs[2] == "    refused: node 'east' refuses"


@pytest.mark.parametrize("word", ["revoke", "readmit"])
def test_rejects_revoking_unknown_node(federation: Federation, word: str) -> None:
    with pytest.raises(ArgumentError, match="one of east, north; did you mean 'north'"):
        server_command(word, str(federation.folder), "nort")
    assert provision.revoked_nodes(federation.folder) == []


def test_revokes_disconnected_node(federation: Federation, capsys: pytest.CaptureFixture[str]) -> None:
    path = federation.folder / provision.FEDERATION
    original = path.read_text()
    path.write_text(json.dumps({**json.loads(original), "nodes": [*NODES, "lost"]}))
    for word, outcome in (("revoke", "is excluded"), ("revoke", "was revoked already"),
                       ("readmit", "is admitted again"), ("readmit", "was not revoked")):  # fmt: skip
        server_command(word, str(federation.folder), "lost")
        assert capsys.readouterr().out == f"lost {outcome}.\n"
    path.write_text(original)


def test_nodes_refuse_custom_code(federation: Federation) -> None:
    job = federation.job("code")
    marker = federation.folder / "custom-code-ran"
    (job / "app/custom").mkdir()
    code = f"from pathlib import Path\nPath({str(marker)!r}).touch()\n{PROGRAMS}"
    (job / "app/custom/programs.py").write_text(code)
    with federation.admin() as admin:
        number = admin.submit(job)
        assert admin.wait(number, PATIENCE) == "FINISHED:FAILED_TO_RUN"
        why = next(item["job_deploy_detail"] for item in admin.jobs() if item["job_id"] == number)
    for name in NODES:
        assert f"{name}: NVFLARE_ERROR: BYOC not permitted" in why
    assert not marker.exists()
    for name in NODES:
        assert not list(federation.node(name).rglob("custom"))


def test_nodes_refuse_unlisted_class(federation: Federation) -> None:
    job = federation.job("stranger")
    _edit(job / "app/config/config_fed_client.json", "programs.NodeProgram", "programs.Stranger")
    with federation.admin() as admin:
        assert admin.wait(admin.submit(job), PATIENCE) != "FINISHED:COMPLETED"
    for name in NODES:
        assert not (federation.node(name) / "stranger").exists()
        assert "'programs.Stranger'" in (federation.node(name) / "node.log").read_text()


def test_rejects_certificate_of_other_authority(federation: Federation, tmp_path: Path) -> None:
    # A kit with the name of a node, but signed by another authority.
    provision.provision(tmp_path / "other", "localhost", ["west"], port=federation.port)
    foreign, ours = tmp_path / "other/nodes/west", federation.node("east") / "kit"
    root = ours / "startup/rootCA.pem"
    assert _handshake(federation.port, root, ours) == "let in"
    assert _handshake(federation.port, root, foreign) == "refused"
    assert _handshake(federation.port, root, None) == "refused"

    owner = tmp_path / "west"
    owner.mkdir()
    shutil.move(foreign, owner / "kit")
    process = flare_site.start(flare_site.node(owner), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        log = owner / "node.log"
        until(lambda: log.exists() and "is the kit from this federation?" in log.read_text())
        with federation.admin() as admin:
            assert set(admin.nodes()) == set(NODES)
        assert f"no answer from localhost:{federation.port}; retrying every 10 s" in log.read_text()
    finally:
        assert flare_site.stop(flare_site.node(owner))
        process.wait(10)


def _handshake(port: int, root: Path, kit: Path | None) -> str:
    """Return whether the server accepts this kit's certificate: "let in" or "refused"."""
    context = ssl.create_default_context(cafile=root)
    context.set_alpn_protocols(["h2"])
    if kit is not None:
        context.load_cert_chain(kit / "startup/client.crt", kit / "startup/client.key")
    try:
        with (
            socket.create_connection(("localhost", port), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as secure,
        ):
            secure.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            return "let in" if secure.recv(1) else "refused"
    except (ssl.SSLError, ConnectionError):
        return "refused"


def test_rejects_second_start(federation: Federation) -> None:
    number = flare_site.process_id(flare_site.node(federation.node("east")))
    assert number is not None
    with pytest.raises(DeployError, match=f"runs already, as process {number}"):
        flare_site.start(flare_site.node(federation.node("east")))
    # Also with concurrent starts, where only the lock decides.
    words = [sys.executable, "-m", "fedstill.federation.flare_site", "client", str(federation.node("east"))]
    second = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    assert second.returncode == 1
    assert f"runs already, as process {number}" in second.stderr
    assert len(second.stderr.splitlines()) == 1


def test_node_refuses_unneeded_requests(federation: Federation) -> None:
    """Also from a server whose own rules allow everything."""
    from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey
    from nvflare.fuel.f3.message import Message as CellMessage
    from nvflare.private.admin_defs import Message
    from nvflare.private.defs import RequestHeader, SysCommandTopic, TrainingTopic

    from fedstill.federation.flare_component import ALLOWED_TOPICS
    from fedstill.federation.flare_component import refusal_reason as result

    def refused(topic: str, job: object = None, channel: str = CellChannel.CLIENT_MAIN) -> bool:
        request = Message(topic, b"")
        request.set_header(RequestHeader.JOB_ID, job)
        return result(CellMessage({MessageHeaderKey.CHANNEL: channel}, request)) is not None

    assert not any(map(refused, ALLOWED_TOPICS))
    for topic in (SysCommandTopic.SHELL, TrainingTopic.SHUTDOWN, TrainingTopic.RESTART):
        assert refused(topic)
    assert refused("process_info", channel="_net_manager")  # FLARE's inspection of a process
    # FLARE would remove and write the folder of this name in the kit.
    for job in ("startup", "local", "../x", ["startup"]):
        assert refused(TrainingTopic.DELETE_RUN, job)
    assert not refused(TrainingTopic.DELETE_RUN, "0f8fad5b-d9cb-469f-a165-70867728950e")


def test_job_process_refuses_inspection(tmp_path: Path) -> None:
    """The process holds data and model, and a server can bypass the filter of the node's own process."""
    from nvflare.fuel.f3.cellnet.cell import Cell
    from nvflare.fuel.f3.cellnet.core_cell import CoreCell
    from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, ReturnCode
    from nvflare.fuel.f3.cellnet.net_agent import NetAgent
    from nvflare.fuel.f3.message import Message

    from fedstill.federation.flare_component import install_job_request_filter

    with socket.create_server(("localhost", 0)) as free:
        url = f"tcp://localhost:{free.getsockname()[1]}"
    server = Cell("server", url, False, {})
    job = Cell("north.5f0c7a2e", url, False, {})
    try:
        for cell in (server, job):
            cell.start()
        NetAgent(job)
        topics: list[str] = []

        def obey(request: Message) -> Message:
            topics.append(request.get_header(MessageHeaderKey.TOPIC))
            return Message({MessageHeaderKey.RETURN_CODE: ReturnCode.OK}, {})

        job.register_request_cb(channel=CellChannel.CLIENT_COMMAND, topic="*", cb=obey)

        def call(channel: str, topic: str) -> str:
            result = {"channel": channel, "topic": topic, "request": Message({}, {}), "timeout": 5.0}
            reply = server.core_cell.send_request(target="north.5f0c7a2e", **result)
            return str(reply.get_header(MessageHeaderKey.RETURN_CODE))

        owner_folder.init_folder(tmp_path / "north")
        assert call("_net_manager", "process_info") == ReturnCode.OK  # FLARE without the filter
        install_job_request_filter("north", tmp_path / "north")
        assert call("_net_manager", "process_info") == ReturnCode.INVALID_REQUEST
        assert call(CellChannel.CLIENT_COMMAND, "configure_job_log") == ReturnCode.INVALID_REQUEST
        assert call(CellChannel.CLIENT_COMMAND, "abort") == ReturnCode.OK
        assert topics == ["abort"]
        assert any("configure_job_log" in event["reason"] for event in security_events(tmp_path / "north"))
        with pytest.raises(DeployError, match="guarded"):
            install_job_request_filter("south", tmp_path / "north")
    finally:
        for cell in (job, server):
            cell.stop()
            CoreCell.ALL_CELLS.pop(cell.core_cell.my_info.fqcn, None)


def test_admin_cannot_read_or_stop_node(federation: Federation) -> None:
    """This federation's server would allow both."""
    from nvflare.fuel.flare_api.api_spec import AuthorizationError, InternalError

    number = flare_site.process_id(flare_site.node(federation.node("east")))
    with federation.admin() as admin:
        try:
            result = admin._session.ls_target("east")
        except (AuthorizationError, InternalError) as error:
            result = str(error)
        assert "startup" not in result
        until(lambda: "refused the server" in log(federation, "east"))
        with contextlib.suppress(AuthorizationError, InternalError):
            admin._session.do_command("shutdown client east")
        time.sleep(3)
        assert "east" in admin.nodes()
    assert flare_site.process_id(flare_site.node(federation.node("east"))) == number


def _init_once(folder: Path) -> None:
    """Initialize a node's folder with a kit, unless an earlier test has done so."""
    if not (folder / owner_folder.FILE).exists():
        owner_folder.init_folder(folder)


@pytest.mark.slow
def test_revoked_node_is_refused_and_readmitted(
    federation: Federation, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = federation.node("north")
    _init_once(owner)
    with federation.admin() as admin:
        job = admin.submit(federation.job("slow", run="slow"))
        until(lambda: admin.status(job) == "RUNNING")
        server_command("revoke", str(federation.folder), "north")
        assert "north is excluded.\nEnded run slow, in which it took part" in capsys.readouterr().out
        assert set(admin.nodes()) == {"east"}
        until(lambda: "refuses this node: it has revoked this node" in log(federation, "north"))
        assert admin.wait(job, PATIENCE) == "FINISHED:ABORTED"  # its running jobs end
        assert set(admin.nodes()) == {"east"}  # although it keeps sending heartbeats
        # It is also refused after a restart, and logs this in one line.
        assert flare_site.stop(flare_site.node(owner))
        words = [sys.executable, "-m", "fedstill.federation.flare_site", "client", str(owner)]
        again = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
        assert again.returncode == 1
        lines = [line.split(" ", 2)[2] for line in (again.stdout + again.stderr).splitlines()]
        assert lines[1:] == [
            f"WARNING fedstill.site: the server at localhost:{federation.port} refuses this node: "
            "it has revoked this node",
            "INFO fedstill.site: ended",
        ]
        server_command("readmit", str(federation.folder), "north")
        process = flare_site.start(flare_site.node(owner), stdout=subprocess.DEVNULL)
        admin.wait_for(NODES, PATIENCE)
        assert process.poll() is None
    until(
        lambda: "INFO fedstill.site: connected to the server at" in log(federation, "north").splitlines()[-1]
    )


def test_node_rules_replace_kit_rules(kits: Path, tmp_path: Path) -> None:
    """FLARE keeps a site's rules in its kit, so a provisioner could allow code at the nodes."""
    shutil.copytree(kits / "nodes/east", tmp_path / "kit")
    here, local = flare_site.Site("client", tmp_path), tmp_path / "kit" / "local"
    written = {name: (local / name).read_text() for name in ("authorization.json", "comm_config.json")}
    (local / "authorization.json").write_text(written["authorization.json"].replace('"none"', '"any"'))
    (local / "comm_config.json").write_text('{"comm_driver_path": "/tmp/drivers"}')
    resources = json.loads((local / "resources.json").read_text())
    evil = {"id": "evil", "path": "evil.Evil", "args": {}}
    changed = {**resources, "class_allow_list": ["*"], "components": [*resources["components"], evil]}
    (local / "resources.json").write_text(json.dumps(changed))
    begins = "import sys, pathlib; from fedstill.federation import flare_site; "
    # It also writes a log.
    writes = "flare_site._write_location_settings(flare_site.Site('client', pathlib.Path(sys.argv[1])))"
    subprocess.run([sys.executable, "-c", begins + writes, str(tmp_path)], check=True, timeout=PATIENCE)
    assert {name: (local / name).read_text() for name in written} == written
    merged = json.loads((local / "resources.json").read_text())
    assert merged["class_allow_list"] == list(provision.NODE_CLASSES)
    assert [part["path"].split(".")[0] for part in merged["components"]] == ["nvflare"] * 3 + ["fedstill"]
    assert {name: merged[name] for name in resources if name != "components"} == {
        name: value for name, value in resources.items() if name != "components"
    }

    provision.require_minimal_kit(StartupKit(tmp_path / "kit"))
    (local / "custom").mkdir()
    with pytest.raises(DeployError, match=r"custom: .*no code"):
        flare_site.run(here)
    (local / "custom").rmdir()
    config = tmp_path / "kit" / "startup" / "fed_client.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "components": [evil]}))
    with pytest.raises(DeployError, match=r"fed_client\.json has components"):
        flare_site.start(flare_site.node(tmp_path))


@pytest.mark.parametrize("says", ["Job 7 is not running.", "out of order"])
def test_abort_of_dead_job_returns_false(says: str) -> None:
    """FLARE lists the job of a killed server as running; aborting it is no error."""
    from nvflare.fuel.flare_api.api_spec import InternalError

    class Session:
        def abort_job(self, job: str) -> None:
            raise InternalError(f"server internal error: {says}")

    admin = Admin.__new__(Admin)
    admin.server, admin._session = "localhost:1", Session()
    if "not running" in says:
        assert not admin.abort("7")
    else:
        with pytest.raises(DeployError, match=says):
            admin.abort("7")


@pytest.mark.slow
def test_killed_node_disconnects_and_reconnects(federation: Federation) -> None:
    import psutil

    owner = federation.node("north")
    number = flare_site.process_id(flare_site.node(owner))
    assert number is not None
    psutil.Process(number).kill()
    with federation.admin() as admin:
        until(lambda: "north" not in admin.nodes())
        assert flare_site.process_id(flare_site.node(owner)) is None  # although its process ID file exists
        process = flare_site.start(flare_site.node(owner), stdout=subprocess.DEVNULL)
        admin.wait_for(NODES, PATIENCE)
    assert process.poll() is None


def test_run_begins_after_owner_approval(
    federation: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real job of fedstill is refused if it differs from the approved one or a node has few records.

    Modifications of the node's log are found afterwards.
    """
    images = {"images": np.zeros((4, 8, 8), np.uint8), "labels": np.arange(4) % 2}
    rules = {"north": 'approve = "each run"', "east": "min_records = 5"}
    for name, rule in rules.items():
        _init_once(federation.node(name))
        np.savez(federation.node(name) / "data.npz", **images)
        (federation.node(name) / "node.toml").write_text(f'name = "{name}"\n[policy]\n{rule}\n')
    config = from_dict(
        {
            "data": {"name": "digits"},
            "method": {"name": "fedkd", "student": {"epochs": 1}},
            "public": {"name": "held-out", "limit": 4},
            "engine": {"backend": "flare", "startup_kit": str(federation.folder / "admin")},
        }
    )
    north, east = federation.node("north"), federation.node("east")
    requests = ApprovalRequests(north, owner_folder.read_node_file(north))
    server = StartupKit(north / "kit").authority_fingerprint
    data = load(config.data, config.task, train_needed=False)
    public = load_public(config.public, data, config.task)[1]
    spec = DataSpec.from_data(config.task, data)
    described = describe(make_run_plan(config, spec, public, "run", 2), public)
    with pytest.raises(QueryRefused):
        requests.require_approved("run", described, server)
    requests.decide(described.sha256, True)

    out = tmp_path / "run"
    out.mkdir()
    other = replace(config.method, student=replace(config.method.student, epochs=2))
    with pytest.raises(FedstillError) as refused:
        submit(replace(config, method=other), out, ProgressBar(False), TrackerGroup())
    result = str(refused.value)
    assert "east' refuses query 'join' by rule min_records: 5, and this node has fewer" in result
    assert "north' refuses query 'join' by rule approve: run" in result
    states = {each.sha256: (each.state, each.server) for each in requests.list_all()}
    assert states.pop(described.sha256) == ("approved", server)
    ((other, state),) = states.items()
    assert state == ("waits", server)
    assert other in capsys.readouterr().err.replace(" ", ""), "owner and server compare the same code"
    assert [path for owner in (north, east) for path in owner.glob("runs/*/*")] == []
    events = security_events(east)  # earlier events are from other tests
    assert [event["event"] for event in events[-2:]] == ["policy", "refused"]
    last = events[-1]["entry"]
    for statement, fault in (
        (
            "UPDATE entries SET line = replace(line, 'min_records: 5', 'min_records: 0')",
            f"entry {last} is not as it was written",
        ),
        (f"DELETE FROM entries WHERE entry = {last}", f"it ends at entry {last - 1}, and its head at {last}"),
    ):
        edit(east / FILE, statement)
        with contextlib.closing(AuditLog(east / FILE, read_only=True)) as audit:
            assert fault in str(audit.fault)


def test_stop_ends_all_processes(federation: Federation) -> None:
    """Runs last in this federation, in the middle of a job, so that job processes exist, too."""
    _edit(federation.programs / "programs.py", "return [os", "import time; time.sleep(600); return [os")
    with federation.admin() as admin:
        admin.submit(federation.job("long"))
        # Server and nodes, each with a process for the job.
        until(lambda: len(_processes(federation.folder)) >= 6)
        begin = time.monotonic()
        assert flare_site.stop(flare_site.node(federation.node("north")))
        server_command("stop", str(federation.folder))
        until(lambda: "retrying every 10 s" in log(federation, "east"))
        assert flare_site.stop(flare_site.node(federation.node("east")))
        assert time.monotonic() - begin < 300
        with pytest.raises(DeployError, match="be reached"):
            admin.nodes()
    assert _processes(federation.folder) == []
    assert flare_site.process_id(flare_site.server(federation.folder)) is None
    assert [path.read_text() for path in federation.folder.rglob("*.pid")] == [""] * 3
    assert "ended" in log(federation, "east")
