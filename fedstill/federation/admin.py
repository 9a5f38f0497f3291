"""What the person with the admin's startup kit does: see who is there, start a run, fetch what it left.

Everything goes to a running server through FLARE's own API
(:class:`nvflare.fuel.flare_api.flare_api.Session`).
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
from fedstill.core.progress import Note
from fedstill.federation.provision import require_flare
from fedstill.federation.run_status import METRICS, PROGRESS_TOPIC

PATIENCE = 10.0  # seconds to reach the server


class Admin:
    """A session with the server of a federation.

    Args:
        patience: seconds to reach the server.

    Raises:
        DeployError: the folder is no admin's kit, the server cannot be reached, or it does not let in. So do
            all methods where the server refuses what is asked.
    """

    def __init__(self, kit: Path, patience: float = PATIENCE) -> None:
        require_flare()
        try:
            admin = json.loads((kit / "startup" / "fed_admin.json").read_text())["admin"]
            user, self.server = admin["username"], f"{admin['host']}:{admin['port']}"
        except (OSError, ValueError, KeyError) as error:
            raise DeployError(f"{kit} is no admin's startup kit: it has no startup/fed_admin.json") from error
        logging.getLogger("nvflare").setLevel(logging.CRITICAL)  # what goes wrong becomes an error of ours
        from nvflare.fuel.flare_api.api_spec import NoConnection
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        end = time.monotonic() + patience
        _await_port(admin["host"], admin["port"], patience)
        with self._refusals(), contextlib.redirect_stdout(io.StringIO()):
            left = max(3.0, end - time.monotonic())
            try:
                self._session = new_secure_session(user, str(kit.resolve()), timeout=left)
            except NoConnection as error:
                way_out = "is the kit from this federation, and still valid?"
                raise DeployError(f"the server at {self.server} does not let {kit} in: {way_out}") from error

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
        """The nodes that are there, and how many seconds ago each gave its last sign of life."""
        with self._refusals():
            clients = self._session.get_system_info().client_info
        return {client.name: max(0.0, time.time() - client.last_connect_time) for client in clients}

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs that the server knows, the newest first: ``job_id``, ``name``, ``status`` and more."""
        with self._refusals():
            jobs: list[dict[str, Any]] = self._session.list_jobs(detailed=True, reverse=True)
        return jobs

    def with_node(self, node: str) -> list[dict[str, Any]]:
        """The jobs that have not ended and in which a node takes part."""
        return [
            job
            for job in self.jobs()
            if not str(job["status"]).startswith("FINISHED")
            and any(node in sites for sites in job["deploy_map"].values())
        ]

    def wait_for(self, nodes: Sequence[str], patience: float) -> None:
        """Wait until all these nodes are there.

        Raises:
            DeployError: after `patience` seconds some are not.
        """
        end = time.monotonic() + patience
        while missing := sorted(set(nodes) - set(self.nodes())):
            if time.monotonic() > end:
                raise DeployError(f"after {patience:g} s not there: {', '.join(missing)}")
            time.sleep(0.2)

    def submit(self, job: Path) -> str:
        """Hand in a job's folder, as :func:`~fedstill.federation.flare_job.write_job` writes it; its id."""
        with self._refusals():
            return str(self._session.submit_job(str(job.resolve())))

    def status(self, job: str) -> str:
        """How a job does: SUBMITTED, DISPATCHED, RUNNING, or how it ended, FINISHED:... ."""
        with self._refusals():
            return str(self._session.get_job_status(job))

    def progress(self, job: str, known: int = 0) -> tuple[Note | None, list[dict[str, Any]]]:
        """How far a job's run is, None where the job does not say; and what it has measured since.

        Args:
            known: lines of ``metrics.jsonl`` that the caller has; of the next some come, if there are many.
        """
        with contextlib.suppress(DeployError, RunFolderError):  # it is not at work yet, or no more
            with self._refusals():
                told = self._session.do_app_command(job, PROGRESS_TOPIC, {METRICS: known})
            note, lines = str(told["note"]), told[METRICS]
            return Note.parse(note, Path(job)) if note else None, lines
        return None, []

    def wait(self, job: str, patience: float) -> str:
        """Wait until a job has ended, and say how.

        Raises:
            DeployError: after `patience` seconds it has not.
        """
        end = time.monotonic() + patience
        while not (status := self.status(job)).startswith("FINISHED"):
            if time.monotonic() > end:
                raise DeployError(f"job {job} has not ended after {patience:g} s: {status}")
            time.sleep(0.5)
        return status

    def abort(self, job: str) -> bool:
        """End a job; whether it ran."""
        try:
            with self._refusals():
                self._session.abort_job(job)
        except DeployError as error:
            if "is not running" not in str(error):
                raise
            return False
        return True

    def download(self, job: str, to: Path) -> Path:
        """Fetch what a job left at the server into the folder `to`; the folder of this job in there."""
        with self._refusals():
            return Path(self._session.download_job_result(job, str(to)))

    def revoke(self, node: str) -> bool:
        """Let a node in no more, whatever its certificate says; the server remembers it over restarts.

        Args:
            node: its name; FLARE takes any, whether there is such a node or not.

        Returns:
            Whether it was let in until now.
        """
        with self._refusals():
            return not self._session.disable_client(node)["clients"][0]["already_disabled"]

    def readmit(self, node: str) -> bool:
        """Let a revoked node in again; whether it was not until now."""
        with self._refusals():
            return bool(self._session.enable_client(node)["clients"][0]["was_disabled"])

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """FLARE's errors as ours."""
        from nvflare.fuel.flare_api import api_spec

        kinds = tuple(
            kind for kind in vars(api_spec).values() if isinstance(kind, type) and issubclass(kind, Exception)
        )
        try:
            yield
        except (api_spec.NoConnection, api_spec.SessionClosed) as error:
            raise DeployError(f"the server at {self.server} is gone, or the way to it") from error
        except kinds as error:
            raise DeployError(f"the server at {self.server} refuses: {error}") from error


def _await_port(host: str, port: int, patience: float) -> None:
    """Wait until something listens there: FLARE's own attempts are seconds apart."""
    end = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((host, port), timeout=patience).close()
            return
        except socket.gaierror as error:
            raise DeployError(f"no machine has the name {host!r} here: {error.strerror}") from error
        except OSError as error:
            if time.monotonic() > end:
                way_out = "does it run, and may this machine reach that port?"
                raise DeployError(f"no answer from the server at {host}:{port}: {way_out}") from error
            time.sleep(0.1)
