"""Current status of a federation's server: its process, connected nodes and runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fedstill.core.errors import DeployError
from fedstill.core.name_normalization import is_run_name
from fedstill.federation import flare_kit, flare_site, provision
from fedstill.federation.admin import Admin
from fedstill.federation.run_status import has_running_job, run_status_line


@dataclass(frozen=True)
class ServerRun:
    """A run at a server.

    Args:
        folder: of the run; a waiting run has none yet.
        begun: time at which it began.
        status_line: its status in one line.
        job: id of its latest job.
    """

    folder: Path
    begun: datetime
    status_line: str
    job: str | None = None


@dataclass(frozen=True)
class ServerStatus:
    """Status of a server.

    Args:
        name: of the federation.
        address: host and port.
        process: id of its process; None if it does not run on this machine.
        nodes: names of the connected nodes, with the seconds since the last heartbeat of each.
        runs: newest first.
        error: why the nodes are unknown, or empty.
    """

    name: str
    address: str
    process: int | None
    nodes: Mapping[str, float]
    runs: Sequence[ServerRun]
    error: str = ""


class ServerMonitor:
    """Reads the status of the server of a federation's folder, in one admin session until it is closed.

    Raises:
        DeployError: the folder contains no federation.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._about = folder, provision.read_federation(folder)
        self._admin: Admin | None = None

    def read_status(self) -> ServerStatus:
        """Return the server's current status."""
        process, error = flare_site.process_id(flare_kit.server(self._folder)), ""
        nodes: Mapping[str, float] = {}
        jobs: list[dict[str, Any]] = []
        if process is not None:
            try:
                self._admin = self._admin or Admin(self._folder / "admin")
                nodes, jobs = self._admin.nodes(), self._admin.jobs()
            except DeployError as failure:
                error, self._admin = str(failure), None
        address = f"{self._about['host']}:{self._about['port']}"
        runs = _runs(self._folder / "runs", jobs)
        return ServerStatus(str(self._about["name"]), address, process, nodes, runs, error)

    def close(self) -> None:
        """Close the session, if there is one."""
        if self._admin is not None:
            self._admin.close()
            self._admin = None


def _runs(folder: Path, jobs: Sequence[Mapping[str, Any]]) -> list[ServerRun]:
    """Return all runs, newest first; a resumed run has several jobs."""
    latest = {str(job["name"]): job for job in reversed(jobs) if is_run_name(str(job["name"]))}
    runs = []
    for name in {*(path.name for path in folder.glob("*") if path.is_dir()), *latest}:
        path, job = folder / name, latest.get(name)
        if job is None:  # the server does not run, or was provisioned again
            status_line = run_status_line(path, "RUNNING" if has_running_job(path) else "")
            runs.append(ServerRun(path, _utc_time(path.stat().st_mtime), status_line))
        else:
            submitted = float(job["submit_time"])
            status_line = run_status_line(path, str(job["status"]), submitted)
            runs.append(ServerRun(path, _utc_time(submitted), status_line, str(job["job_id"])))
    return sorted(runs, key=lambda run: run.begun, reverse=True)


def _utc_time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)
