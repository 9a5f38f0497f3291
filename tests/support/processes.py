"""A federation of processes that connect over loopback, which tests kill and restart.

A message is eight bytes of length followed by its content, so nothing is pickled. Processes are forked from
one that has already loaded torch: a node starts in a tenth of a second.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from fedstill.core import run_writer
from fedstill.core.checkpoint import load_state
from fedstill.core.errors import FedstillError
from fedstill.data import features
from fedstill.federation import remote, transport
from fedstill.federation.transport import LinkError
from fedstill.node import initial_training, node_service, session
from fedstill.runs import deployment
from fedstill.runs.remote_run import RemoteRun
from fedstill.runs.results import write_results
from fedstill.runs.simulation import Simulation, build_simulation
from fedstill.runs.spec import RunSpec, read_toml, to_toml
from tests.support.audit_logs import releases

PORT, LOG, STOPPED = "port", "log", "stopped"
SMALL = """
name = "small"
[data]
name = "digits"
[split]
nodes = 3
[nodes]
models = ["mlp:8"]
[nodes.local]
epochs = 10
[student]
model = "mlp:8"
[evaluation]
centralized = false
samples = 2
[engine]
batching = "one-by-one"
"""
STEPS = 40
FEDIOD = f"""
[method]
name = "fediod"
steps = {STEPS}
batch = 16
student.memory = 256
critic.width = 4
generator.width = 8
"""


FEDKD = """
[method]
name = "fedkd"
student.epochs = 1
z_max = 10.0
[public]
name = "held-out"
"""


def small(method: str = FEDIOD, nodes: int = 3, **link: Any) -> RunSpec:
    """Return a run of a few small nodes on the digits, which takes seconds."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in link.items()]
    return read_toml("\n".join([SMALL.replace("nodes = 3", f"nodes = {nodes}"), method, "[link]", *lines]))


# --- processes ----------------------------------------------------------------------------------------


def be_node(folder: Path, delay: float) -> None:
    """Serve a node's folder; each reply is delayed by ``delay`` seconds."""
    session.SECONDS_BETWEEN_SAVES = 0.05
    initial_training.STEPS_PER_CHUNK = 5
    features.CHUNK = 2
    _log(folder / LOG)
    node = node_service.NodeService(folder)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        part = folder / f"{PORT}.part"
        part.write_text(str(listening.getsockname()[1]))
        part.rename(folder / PORT)
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=_reply, args=(connection, node, delay), daemon=True).start()


def _reply(connection: socket.socket, node: node_service.Host, delay: float) -> None:
    with connection, contextlib.suppress(OSError, LinkError):
        message = _receive(connection)
        time.sleep(delay)
        _send(connection, node.serve(message))


def be_server(config: str, nodes: Path, run_name: str, folder: Path, die_at_save: int, every: float) -> None:
    """Run to the end, or write the reason to the file ``stopped``; for n > 0, kill itself before save n."""
    run_writer.SECONDS_BETWEEN = every
    remote.TRAINING_SECONDS, remote.PROBE_INTERVAL, transport.PAUSE = 0.1, 0.2, 0.1
    _log(folder / LOG)
    (folder / STOPPED).unlink(missing_ok=True)
    if die_at_save:
        saves = iter(range(die_at_save - 1))
        save = run_writer.RunWriter.save

        def die(self: run_writer.RunWriter, *given: Any, **named: Any) -> None:
            if next(saves, None) is None:  # all nodes have saved; the server has not
                os.kill(os.getpid(), signal.SIGKILL)
            save(self, *given, **named)

        run_writer.RunWriter.save = die  # type: ignore[method-assign]
    try:
        served = RemoteRun(read_toml(config), Sockets(nodes), run_name)
        metrics = served.run(folder)
        write_results(served, {**served.describe_run(), **metrics}, keep_state=True)
    except FedstillError as error:
        (folder / STOPPED).write_text(f"{type(error).__name__}: {error}")


def _log(path: Path) -> None:
    logging.basicConfig(filename=path, level=logging.INFO, format="%(message)s", force=True)


# --- messages -----------------------------------------------------------------------------------------


class Sockets:
    """Link that reaches each node at the port written in its folder."""

    def __init__(self, nodes: Path) -> None:
        self.folder = nodes
        self.nodes: Sequence[str] = sorted(path.name for path in nodes.iterdir())

    def call(self, node: str, message: bytes, seconds: float) -> bytes:
        try:
            port = int((self.folder / node / PORT).read_text())
            with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
                connection.settimeout(seconds)
                _send(connection, message)
                return _receive(connection)
        except (OSError, ValueError) as error:
            raise LinkError(f"{node}: {error}") from error


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(len(message).to_bytes(8, "big") + message)


def _receive(connection: socket.socket) -> bytes:
    return _exactly(connection, int.from_bytes(_exactly(connection, 8), "big"))


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 2**20))
        if not part:
            raise LinkError("the connection broke off")
        parts += part
    return bytes(parts)


# --- start and kill -----------------------------------------------------------------------------------


class Sites:
    """Three nodes and a server, which tests start and kill.

    Args:
        folder: folder of all parties.
        config: configuration of the run.
        delay: additional seconds of a node for each message.
    """

    def __init__(self, folder: Path, config: RunSpec, delay: float = 0.0) -> None:

        self.folder, self.config, self.delay = folder, config, delay
        experiment, _ = build_simulation(config)
        self.names = [node.name for node in experiment.nodes]
        deployment.write_nodes(config, experiment, folder / "nodes")
        self.served = folder / "server"
        self.served.mkdir()
        self.nodes: dict[str, ForkServerProcess] = {}
        self.server: ForkServerProcess | None = None

    def start(self, *names: str) -> None:
        for name in names or self.names:
            (self.folder / "nodes" / name / PORT).unlink(missing_ok=True)
            process = FORKING.Process(target=be_node, args=(self.folder / "nodes" / name, self.delay))
            process.start()
            self.nodes[name] = process
        until(lambda: all((self.folder / "nodes" / name / PORT).exists() for name in names or self.names))

    def begin(self, *, die_at_save: int = 0, every: float = 0.3) -> None:
        """Start the server, on a new run or to resume a stopped one.

        Args:
            die_at_save: number of the save at which it kills itself; 0 for never.
            every: seconds between two saves.
        """
        result = (to_toml(self.config), self.folder / "nodes", "one", self.served, die_at_save, every)
        self.server = FORKING.Process(target=be_server, args=result)
        self.server.start()

    def end(self) -> dict[str, Any] | str:
        """Wait for the server; return its result, or the reason that it stopped."""
        assert self.server is not None
        self.server.join(PATIENCE)
        assert not self.server.is_alive(), (self.served / LOG).read_text()
        if (self.served / STOPPED).exists():
            return (self.served / STOPPED).read_text()
        result: dict[str, Any] = json.loads((self.served / "result.json").read_text())
        return result

    def kill(self, name: str) -> None:
        """Send SIGKILL to a process and wait for it."""
        process = self.server if name == "server" else self.nodes[name]
        assert process is not None
        process.kill()
        process.join(10)
        assert process.exitcode == -signal.SIGKILL

    def signal(self, name: str, number: int) -> None:
        pid = self.nodes[name].pid
        assert pid is not None
        os.kill(pid, number)

    def close(self) -> None:
        for process in [*self.nodes.values(), *([self.server] if self.server else [])]:
            process.kill()
            process.join(10)

    # files on disk

    def run_folder(self, name: str) -> Path:
        """Return a node's folder of the run."""
        return self.folder / "nodes" / name / "runs" / "one"

    def audit(self, name: str) -> list[dict[str, Any]]:
        """Return the releases of a node, by its audit log or by the server's."""
        return releases(self.served if name == "server" else self.folder / "nodes" / name)

    def log(self, name: str) -> str:
        return (self.folder / "nodes" / name / LOG).read_text()

    def steps(self) -> int:
        """Return the number of queries to which the first node has responded."""
        return sum(line["part"] == "response" for line in self.audit(self.names[0]))

    def state(self, name: str) -> dict[str, Any]:
        """Return a node's state at the end."""
        checkpoint = load_state(self.served / "state.safetensors")["checkpoint"]
        state: dict[str, Any] = load_state(self.run_folder(name) / f"checkpoint-{checkpoint}.safetensors")[
            "node"
        ]
        return state

    def feature_files(self, name: str) -> list[Path]:
        """Return the files of a node's cache of features."""
        return list((self.folder / "nodes" / name / "features").glob("*/*.safetensors"))

    def student(self) -> dict[str, torch.Tensor]:
        return load_student(self.served)


@contextlib.contextmanager
def sites(folder: Path, config: RunSpec, delay: float = 0.0) -> Iterator[Sites]:
    """Yield sites, and stop all processes at the end, even on errors."""
    made = Sites(folder, config, delay)
    try:
        yield made
    finally:
        made.close()


class Unbroken:
    """The same run in this process: the expected result."""

    def __init__(self, config: RunSpec, out: Path) -> None:
        self.experiment: Simulation = build_simulation(config)[0]
        self.metrics = self.experiment.run(out)
        self.lines = releases(out)

    def audit(self, name: str) -> list[tuple[Any, ...]]:
        return [audit_fields(line) for line in self.lines if line["node"] == name]


def audit_fields(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the fields of an audit entry without its time."""
    return tuple(
        sorted(line[part].items()) if isinstance(line[part], dict) else line[part]
        for part in ("number", "part", "query", "content_hash", "down", "up")
    )


def load_student(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a run's student, of a head on features with the names of the head alone."""
    tensors = load_file(folder / "student.safetensors")
    return {name.removeprefix("head."): tensor for name, tensor in tensors.items()}


def assert_same_metrics(
    sites: Sites, result: dict[str, Any] | str, unbroken: Unbroken, *, audits: bool = True
) -> None:
    """Assert that a resumed run equals the uninterrupted one: student, nodes, logs and counts."""
    assert isinstance(result, dict), result
    metrics = unbroken.metrics
    assert result["accuracy"] == metrics["accuracy"]
    for key, value in unbroken.experiment.student.state_dict().items():
        assert torch.equal(sites.student()[key], value), key
    for node in unbroken.experiment.nodes:
        state = sites.state(node.name)
        for role, module in node.modules.items():
            for key, value in module.state_dict().items():
                assert torch.equal(state["modules"][role][key], value), (node.name, role, key)
        if not audits:
            continue
        mine = [audit_fields(line) for line in sites.audit(node.name)]
        assert Counter(map(repr, mine)) == Counter(map(repr, unbroken.audit(node.name)))  # each line once
        server_lines = [audit_fields(line) for line in sites.audit("server") if line["node"] == node.name]
        assert Counter(map(repr, server_lines)) == Counter(map(repr, unbroken.audit(node.name)))
    if audits:
        for key in ("bytes", "queries", "queries_by_name"):
            assert result[key] == metrics[key]


def until(happened: Callable[[], object], pause: float = 0.005) -> None:
    """Wait until a condition holds, checked every ``pause`` seconds."""
    end = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < end, "timed out"
        time.sleep(pause)


def report_time(what: str, since: float) -> None:
    """Print the duration of a recovery; ``pytest -s`` shows it."""
    print(f"\nRECOVERY {what}: {time.monotonic() - since:.1f} s")


PATIENCE = 600.0
"""Seconds that a test waits for a process, which takes up to 250 on a slow and busy machine."""

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(
    [
        "fedstill.cli.main",
        "fedstill.report",
        "fedstill.runs.run",
        "matplotlib.backends.backend_svg",
        "sklearn.datasets",
        "tests.support.processes",  # imported by these processes
        "torch._dynamo",  # otherwise the first optimizer loads it, which takes seconds
    ]
)


class Command:
    """``fedstill`` with arguments, in its own process.

    Args:
        words: arguments after ``fedstill``.
        here: working folder.
        search: folders at the front of Python's module path, also in processes that the command starts.
        begin: Python code that the process runs first.
    """

    def __init__(self, words: Sequence[object], here: Path, search: Sequence[Path], begin: str = "") -> None:
        self._printed = here / ".printed"
        path = os.pathsep.join([*map(str, search), os.environ.get("PYTHONPATH", "")])
        given = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        output = ([*map(str, words)], here, given, search, self._printed, begin)
        self._process = FORKING.Process(target=_command, args=output)
        self._process.start()

    @property
    def runs(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> int | None:
        """Send SIGKILL unless the process has ended; return its exit code."""
        self._process.kill()
        self._process.join(10)
        return self._process.exitcode

    def end(self) -> tuple[int, str]:
        """Return exit code and output; kill the process after ``PATIENCE``.

        Raises:
            TimeoutError: the process had to be killed.
        """
        self._process.join(PATIENCE)
        if self._process.exitcode is None:
            self.kill()
            raise TimeoutError(f"it took over {PATIENCE} s: {self._printed.read_text()}")
        return self._process.exitcode, self._printed.read_text()


def _command(
    words: list[str], here: Path, given: Mapping[str, str], search: Sequence[Path], printed: Path, begin: str
) -> None:
    os.chdir(here)
    os.environ.clear()
    os.environ.update(given)
    sys.path[:0] = map(str, [here, *search])
    file = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    import torch

    from fedstill.cli.main import main

    torch.set_num_threads(1)
    exec(begin, {})
    sys.argv = ["fedstill", *words]
    main(words)
