"""Status of a run, from its folder at the server."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from fedstill.core.private_files import is_locked
from fedstill.core.progress import PROGRESS_FILE, ProgressSnapshot

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
