"""Administration of a running server with the admin's startup kit: list nodes, submit jobs, fetch results.

It uses FLARE's own API (:class:`nvflare.fuel.flare_api.flare_api.Session`).
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from fedstill.core.errors import DeployError, RunFolderError
from fedstill.core.progress import ProgressSnapshot
from fedstill.federation.provision import require_flare
from fedstill.federation.run_status import METRICS, PROGRESS_TOPIC

PATIENCE = 10.0  # seconds to reach the server


class Admin:
    """A session with the server of a federation.

    Args:
        patience: seconds to reach the server.

    Raises:
        DeployError: the folder is no admin's kit, or the server cannot be reached or refuses the kit. All
            methods raise it if the server refuses the request.
    """

    def __init__(self, kit: Path, patience: float = PATIENCE) -> None:
        require_flare()
        try:
            admin = json.loads((kit / "startup" / "fed_admin.json").read_text())["admin"]
            user, self.server = admin["username"], f"{admin['host']}:{admin['port']}"
        except (OSError, ValueError, KeyError) as error:
            raise DeployError(f"{kit} is no admin's startup kit: it has no startup/fed_admin.json") from error
        logging.getLogger("nvflare").setLevel(logging.CRITICAL)  # failures are raised as DeployError
        from nvflare.fuel.flare_api.api_spec import NoConnection
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        end = time.monotonic() + patience
        _await_port(admin["host"], admin["port"], patience)
        with self._flare_errors(), contextlib.redirect_stdout(io.StringIO()):
            left = max(3.0, end - time.monotonic())
            try:
                self._session = new_secure_session(user, str(kit.resolve()), timeout=left)
            except NoConnection as error:
                hint = "is the kit from this federation, and still valid?"
                raise DeployError(f"the server at {self.server} refuses {kit}: {hint}") from error

    def __enter__(self) -> Admin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Log out."""
        self._session.close()

    def nodes(self) -> dict[str, float]:
        """Return the connected nodes, with the seconds since the last heartbeat of each."""
        with self._flare_errors():
            clients = self._session.get_system_info().client_info
        return {client.name: max(0.0, time.time() - client.last_connect_time) for client in clients}

    def jobs(self) -> list[dict[str, Any]]:
        """Return all jobs of the server, newest first: ``job_id``, ``name``, ``status`` and more."""
        with self._flare_errors():
            jobs: list[dict[str, Any]] = self._session.list_jobs(detailed=True, reverse=True)
        return jobs

    def unfinished_jobs(self, node: str) -> list[dict[str, Any]]:
        """Return the jobs of a node that have not ended."""
        return [
            job
            for job in self.jobs()
            if not str(job["status"]).startswith("FINISHED")
            and any(node in sites for sites in job["deploy_map"].values())
        ]

    def wait_for(self, nodes: Sequence[str], patience: float) -> None:
        """Wait until all of these nodes are connected.

        Raises:
            DeployError: some are not after ``patience`` seconds.
        """
        end = time.monotonic() + patience
        while missing := sorted(set(nodes) - set(self.nodes())):
            if time.monotonic() > end:
                raise DeployError(f"not connected after {patience:g} s: {', '.join(missing)}")
            time.sleep(0.2)

    def submit(self, job: Path) -> str:
        """Submit a job's folder, written by :func:`~fedstill.federation.flare_job.write_job`; return its
        id."""
        with self._flare_errors():
            return str(self._session.submit_job(str(job.resolve())))

    def status(self, job: str) -> str:
        """Return a job's status: SUBMITTED, DISPATCHED, RUNNING, or FINISHED:... with its outcome."""
        with self._flare_errors():
            return str(self._session.get_job_status(job))

    def progress_and_metrics(
        self, job: str, known: int = 0
    ) -> tuple[ProgressSnapshot | None, list[dict[str, Any]]]:
        """Return the progress of a job's run, or None if it is unknown, and its newest metrics.

        Args:
            known: number of lines of ``metrics.jsonl`` that the caller has. A limited number of lines after
                these is returned.
        """
        with contextlib.suppress(DeployError, RunFolderError):  # the job is not running
            with self._flare_errors():
                reply = self._session.do_app_command(job, PROGRESS_TOPIC, {METRICS: known})
            note, lines = str(reply["note"]), reply[METRICS]
            return ProgressSnapshot.parse(note, Path(job)) if note else None, lines
        return None, []

    def wait(self, job: str, patience: float) -> str:
        """Wait until a job has ended and return its status.

        Raises:
            DeployError: it has not after ``patience`` seconds.
        """
        end = time.monotonic() + patience
        while not (status := self.status(job)).startswith("FINISHED"):
            if time.monotonic() > end:
                raise DeployError(f"job {job} has not ended after {patience:g} s: {status}")
            time.sleep(0.5)
        return status

    def abort(self, job: str) -> bool:
        """Abort a job; return whether it was running."""
        try:
            with self._flare_errors():
                self._session.abort_job(job)
        except DeployError as error:
            if "is not running" not in str(error):
                raise
            return False
        return True

    def download(self, job: str, to: Path) -> Path:
        """Download a job's results from the server into the folder ``to``; return the job's folder in it."""
        with self._flare_errors():
            return Path(self._session.download_job_result(job, str(to)))

    def revoke(self, node: str) -> bool:
        """Refuse a node from now on, even with a valid certificate; the server keeps this over restarts.

        Args:
            node: its name; FLARE accepts any name, also of a node that does not exist.

        Returns:
            Whether it was allowed until now.
        """
        with self._flare_errors():
            return not self._session.disable_client(node)["clients"][0]["already_disabled"]

    def readmit(self, node: str) -> bool:
        """Accept a revoked node again; return whether it was revoked until now."""
        with self._flare_errors():
            return bool(self._session.enable_client(node)["clients"][0]["was_disabled"])

    @contextlib.contextmanager
    def _flare_errors(self) -> Iterator[None]:
        """Raise FLARE's errors as DeployError."""
        from nvflare.fuel.flare_api import api_spec

        kinds = tuple(
            kind for kind in vars(api_spec).values() if isinstance(kind, type) and issubclass(kind, Exception)
        )
        try:
            yield
        except (api_spec.NoConnection, api_spec.SessionClosed) as error:
            raise DeployError(f"the server at {self.server} cannot be reached any more") from error
        except kinds as error:
            raise DeployError(f"the server at {self.server} refuses: {error}") from error


def _await_port(host: str, port: int, patience: float) -> None:
    """Wait until the port accepts connections, as FLARE's own attempts are seconds apart."""
    end = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((host, port), timeout=patience).close()
            return
        except socket.gaierror as error:
            raise DeployError(f"no machine has the name {host!r} here: {error.strerror}") from error
        except OSError as error:
            if time.monotonic() > end:
                hint = "does it run, and may this machine reach that port?"
                raise DeployError(f"no answer from the server at {host}:{port}: {hint}") from error
            time.sleep(0.1)
