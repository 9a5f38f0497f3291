"""A federation's server as it is now: whether it runs, who is there, what became of its runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstill.core.errors import DeployError
from fedstill.federation import flare_kit, flare_site, provision
from fedstill.federation.admin import Admin
from fedstill.federation.run_status import at_work, outcome


@dataclass(frozen=True)
class ServerView:
    """What is known of a server.

    Args:
        address: host and port.
        process: the number of its process; None: it does not run on this machine.
        nodes: names of those that are there, and how many seconds ago each gave a sign of life.
        runs: their folders, the newest first, and what became of each.
        trouble: why nodes are not known, or nothing.
    """

    name: str
    address: str
    process: int | None
    nodes: Mapping[str, float]
    runs: Mapping[Path, str]
    trouble: str = ""


class ServerWatch:
    """Looks at the server of a federation's folder, with one session for all looks.

    Raises:
        DeployError: the folder holds no federation.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._about = folder, provision.read_federation(folder)
        self._admin: Admin | None = None

    def look(self) -> ServerView:
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
        latest = {str(job["name"]): job for job in reversed(jobs)}
        folders = [path for path in (self._folder / "runs").glob("*") if path.is_dir()]
        runs = {}
        for path in sorted(folders, key=lambda path: -path.stat().st_mtime):
            job = latest.get(path.name, {})
            status = str(job.get("status", "RUNNING" if at_work(path) else ""))
            runs[path] = outcome(path, status, float(job.get("submit_time", 0.0)))
        address = f"{self._about['host']}:{self._about['port']}"
        return ServerView(str(self._about["name"]), address, process, nodes, runs, trouble)
