"""Nodes on NVIDIA FLARE, through its Collab API: what runs in FLARE's processes at the server and at a node.

A job names these two programs and carries the server's configuration; it carries no code, and nothing about
a node. The server's program asks; a node's program is its owner's folder with a way in for messages.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvflare.collab import collab
from nvflare.collab.api.exceptions import CollabCallError, RunAborted

from fedstill.core.errors import DeployError, FedstillError, RunFolderError
from fedstill.core.progress import Noted
from fedstill.core.records import write_text
from fedstill.federation.order import natural
from fedstill.federation.remote import LinkError, Silent, Unreachable
from fedstill.federation.runs import JOB, PROGRESS, STOPPED

logger = logging.getLogger("fedstill.server")

RUNS, NODE, NODES = "FEDSTILL_RUNS", "FEDSTILL_NODE", "FEDSTILL_NODES"  # environment variables

UNFORESEEN = "it failed where it should not: the server's log says how"


class ServerProgram:
    """The server's half of one run, as FLARE's job runs it.

    Args:
        config: the run's configuration, as TOML.
        run: its name; a run of this name that was stopped goes on.
        nodes: with which the run began, also those that are not in this job; none is those that are.
    """

    def __init__(self, config: str, run: str, nodes: Sequence[str] = ()) -> None:
        self.config, self.run_name, self.nodes = config, run, list(nodes)

    @collab.main  # type: ignore[untyped-decorator,unused-ignore]
    def main(self) -> None:
        """Run, and leave the results in the job's workspace, from where they are fetched."""
        folder = Path(_environment(RUNS)) / self.run_name
        kept = Path(collab.workspace.get_run_dir(collab.fl_ctx.get_job_id())) / "fedstill"
        self._work(folder, kept)

    def _work(self, folder: Path, kept: Path) -> None:
        """Run in a folder that is this job's alone meanwhile.

        Args:
            folder: of the run, shared by all jobs of its name.
            kept: where this job's results are to be.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / JOB).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                kept.mkdir(parents=True)
                self._stopped(kept, RunFolderError(f"{folder} is in use: another job is at work on this run"))
                return
            (folder / STOPPED).unlink(missing_ok=True)
            # Any other error goes on to FLARE, which logs it; who waits for the run is told this much.
            wrong: Exception | None = FedstillError(UNFORESEEN)
            try:
                self._run(folder)
                wrong = None
            except (FedstillError, OSError) as error:
                wrong = error
            finally:
                if wrong is not None:
                    self._stopped(folder, wrong)
                left = shutil.ignore_patterns("state.safetensors*", f"{PROGRESS}*", JOB)
                shutil.copytree(folder, kept, ignore=left)

    def _stopped(self, folder: Path, error: Exception) -> None:
        """Leave word of why a run stopped."""
        logger.error("run %s stopped: %s", self.run_name, error)
        told = {"error": type(error).__name__, "text": " ".join(str(error).split())}
        write_text(folder / STOPPED, json.dumps(told) + "\n")

    def _run(self, folder: Path) -> None:
        from fedstill.runs.config import read_toml
        from fedstill.runs.live import Live

        config = read_toml(self.config)
        link, bars = FlareLink(collab.clients, self.nodes), Noted(folder / PROGRESS)
        live = Live(config, link, self.run_name, folder, bars)
        logger.info("run %s begins", self.run_name)
        figures = live.run()
        result = {**live.about(), **figures}
        live.records.finish(result, live.trained(), keep_state=True)
        logger.info("run %s is done", self.run_name)


class NodeProgram:
    """One node, as FLARE's job runs it: its folder is where its owner started it, whatever a job says."""

    def __init__(self) -> None:
        self._host: Any = None

    @collab.init  # type: ignore[untyped-decorator,unused-ignore]
    def begin(self) -> None:
        """Read the owner's folder."""
        from fedstill.node.host import Host

        folder = os.environ.get(NODE)
        if folder is None:  # all nodes of a simulation have the same environment
            folder = str(Path(_environment(NODES)) / str(collab.site_name))
        self._host = Host(Path(folder))
        self._host.limit_process()
        if self._host.name != collab.site_name:
            raise DeployError(f"{folder} is node {self._host.name!r}, and the kit is {collab.site_name!r}'s")

    @collab.publish  # type: ignore[untyped-decorator,unused-ignore]
    def serve(self, message: bytes) -> bytes:
        """Answer one message of the server; nodes do not talk to each other."""
        if collab.caller != "server":
            raise DeployError(f"a message from {collab.caller!r}: allowed is the server")
        reply: bytes = self._host.serve(message)
        return reply


class FlareLink:
    """Carries messages through FLARE.

    Args:
        clients: FLARE's proxies of the nodes of a job.
        nodes: of the run, if there are more.
    """

    def __init__(self, clients: Sequence[Any], nodes: Sequence[str] = ()) -> None:
        self._clients = {str(client.name): client for client in clients}
        self.nodes: Sequence[str] = sorted({*self._clients, *nodes}, key=natural)

    def call(self, node: str, message: bytes, seconds: float) -> bytes:
        """See :class:`fedstill.federation.remote.Link`."""
        if node not in self._clients:
            raise Unreachable("it was not connected when this part of the run began")
        try:
            reply: bytes = self._clients[node](timeout=seconds).serve(message)
        except CollabCallError as error:
            if isinstance(error.cause, TimeoutError):
                raise Silent("no answer in time") from error
            raise LinkError(" ".join(str(error.cause).split())) from error
        except RunAborted as error:
            raise DeployError("FLARE ended the job") from error
        return reply


def _environment(name: str) -> str:
    if name not in os.environ:
        raise DeployError(f"{name} is not set: `fedstill server start` and `fedstill node start` set it")
    return os.environ[name]
