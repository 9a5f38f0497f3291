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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

from fedstill.core.errors import DeployError, RunFolderError
from fedstill.core.name_normalization import is_run_name
from fedstill.core.private_files import is_locked
from fedstill.core.progress import PROGRESS_FILE, ProgressSnapshot
from fedstill.federation import flare_site, provision
from fedstill.federation.provision import require_flare

PATIENCE = 10.0  # seconds to reach the server
COMMAND_TIMEOUT = 60.0  # seconds in which a busy server must reply; FLARE's own default is 5
PROGRESS_TIMEOUT = 5.0  # for the process of a job, which may hang: a caller repeats the command


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
            self._session.set_timeout(COMMAND_TIMEOUT)

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
        """Submit a job's folder, written by :func:`~fedstill.federation.flare.write_job`; return its
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
            with self._timeout(PROGRESS_TIMEOUT), self._flare_errors():
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
    def _timeout(self, seconds: float) -> Iterator[None]:
        """Limit the time of commands, at the server too."""
        self._session.set_timeout(seconds)
        try:
            yield
        finally:
            self._session.set_timeout(COMMAND_TIMEOUT)

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


# --- status of a run, from its folder at the server -----------------------------------------------------

STOPPED = "stopped.json"  # in a run's folder: why it stopped
PROGRESS_TOPIC = "progress"  # FLARE command that returns the progress of a job
METRICS = "metrics"  # key in this command: first line of metrics.jsonl to return, and the lines in the reply
JOB = "job.lock"  # in a run's folder: locked by the job that runs it
RESULT = "result.json"  # in a run's folder once it is finished
REFUSED = ("QueryRefused", "MethodRefused")
# Errors after which the same run would only stop again.
FINAL = (*REFUSED, "ArgumentError", "UnknownName", "DataError", "ModelError")

RESUME_HINT = "; `fedstill run --resume` resumes it, on the machine where it was started"

_WAITING_TEXTS = {
    "SUBMITTED": "waiting: it begins once all its nodes are connected and free",
    "APPROVED": "waiting: it begins once all its nodes are connected and free",
    "DISPATCHED": "starting",
}


@dataclass(frozen=True)
class StopReason:
    """Reason why a run stopped.

    Args:
        error: name of the error's class.
        text: its message, one line.
    """

    error: str
    text: str

    @property
    def is_refusal(self) -> bool:
        """True if a node or a method refused the run."""
        return self.error in REFUSED

    @property
    def is_final(self) -> bool:
        """True if the run would stop again when it is resumed without changes."""
        return self.error in FINAL


def read_stop_reason(folder: Path) -> StopReason | None:
    """Return why the run in a folder stopped, or None if it did not. A run with a result did not stop."""
    path = folder / STOPPED
    if not path.exists() or (folder / RESULT).exists():
        return None
    values = json.loads(path.read_text(encoding="utf-8"))
    return StopReason(values["error"], values["text"])


def run_status_line(folder: Path, status: str = "", since: float = 0.0) -> str:
    """Return the status of a run in one line.

    Args:
        folder: of the run at the server; it need not exist.
        status: FLARE's status of its latest job; empty if no job is running. It has no reason, and stays
            "running" for ever if the server was killed.
        since: time at which that job was submitted, in seconds; older files belong to an earlier job.
    """
    if status in _WAITING_TEXTS:
        return _WAITING_TEXTS[status]
    if status and not status.startswith("FINISHED"):
        if has_running_job(folder):
            return f"running{progress_suffix(folder)}"
        if not _is_newer(folder / JOB, since):
            return _WAITING_TEXTS["DISPATCHED"]
    if (folder / RESULT).exists():
        return "done"
    why = read_stop_reason(folder)
    if why is not None and _is_newer(folder / STOPPED, since):
        if why.is_refusal:
            return f"refused: {why.text}"
        return f"stopped: {why.text}{'' if why.is_final else RESUME_HINT}"
    if status.startswith("FINISHED"):
        word = status.removeprefix("FINISHED:")
        return f"no result, for an unknown reason (FLARE's status: {word}){RESUME_HINT}"
    return f"the server ended before the run did{progress_suffix(folder)}{RESUME_HINT}"


def has_ended(folder: Path) -> bool:
    """Return whether the run in a folder at the server has finished or stopped, and all files are written."""
    return ((folder / RESULT).exists() or (folder / STOPPED).exists()) and not has_running_job(folder)


def has_running_job(folder: Path) -> bool:
    """Return whether a job is running in the folder."""
    return is_locked(folder / JOB)


def _is_newer(path: Path, since: float) -> bool:
    return path.exists() and path.stat().st_mtime >= since


def progress_suffix(folder: Path) -> str:
    """Return the progress of the run in a folder as ``", ..."`` to append to other text; empty if unknown."""
    noted = ProgressSnapshot.read(folder / PROGRESS_FILE)
    return "" if noted is None else f", {noted.describe()}"


# --- status of a server: its process, connected nodes and runs ------------------------------------------


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
        process, error = flare_site.process_id(flare_site.server(self._folder)), ""
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
