"""A federation's server as it is now: whether it runs, who is there, what became of its runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fedstill.core.errors import DeployError
from fedstill.core.names import is_run_name
from fedstill.federation import flare_kit, flare_site, provision
from fedstill.federation.admin import Admin
from fedstill.federation.run_status import at_work, outcome


@dataclass(frozen=True)
class ServerRun:
    """A run of a server: its folder, which a run that waits has not yet, when it began, what became of it,
    and its latest job."""

    folder: Path
    begun: datetime
    outcome: str
    job: str | None = None


@dataclass(frozen=True)
class ServerStatus:
    """What is known of a server.

    Args:
        address: host and port.
        process: the number of its process; None: it does not run on this machine.
        nodes: names of those that are there, and how many seconds ago each gave a sign of life.
        runs: the newest first.
        trouble: why nodes are not known, or nothing.
    """

    name: str
    address: str
    process: int | None
    nodes: Mapping[str, float]
    runs: Sequence[ServerRun]
    trouble: str = ""


class ServerMonitor:
    """Looks at the server of a federation's folder, with one session for all looks, which keeps a process
    alive until it is closed.

    Raises:
        DeployError: the folder holds no federation.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._about = folder, provision.read_federation(folder)
        self._admin: Admin | None = None

    def look(self) -> ServerStatus:
        """The server as it is now."""
        process, trouble = flare_site.running(flare_kit.server(self._folder)), ""
        nodes: Mapping[str, float] = {}
        jobs: list[dict[str, Any]] = []
        if process is not None:
            try:
                self._admin = self._admin or Admin(self._folder / "admin")
                nodes, jobs = self._admin.nodes(), self._admin.jobs()
            except DeployError as error:
                trouble, self._admin = str(error), None
        address = f"{self._about['host']}:{self._about['port']}"
        runs = _runs(self._folder / "runs", jobs)
        return ServerStatus(str(self._about["name"]), address, process, nodes, runs, trouble)

    def close(self) -> None:
        """End the session, if one has begun."""
        if self._admin is not None:
            self._admin.close()
            self._admin = None


def _runs(folder: Path, jobs: Sequence[Mapping[str, Any]]) -> list[ServerRun]:
    """All runs; of the jobs the newest comes first, and a resumed run has several."""
    latest = {str(job["name"]): job for job in reversed(jobs) if is_run_name(str(job["name"]))}
    runs = []
    for name in {*(path.name for path in folder.glob("*") if path.is_dir()), *latest}:
        path, job = folder / name, latest.get(name)
        if job is None:  # the server tells of none, as it is down or was made anew
            told = outcome(path, "RUNNING" if at_work(path) else "")
            runs.append(ServerRun(path, _at(path.stat().st_mtime), told))
        else:
            since = float(job["submit_time"])
            told = outcome(path, str(job["status"]), since)
            runs.append(ServerRun(path, _at(since), told, str(job["job_id"])))
    return sorted(runs, key=lambda run: run.begun, reverse=True)


def _at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)
