"""What became of a run, as its folder at the server tells it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from fedstill.core.private_files import is_locked
from fedstill.core.progress import PROGRESS, Note

STOPPED = "stopped.json"  # in a run's folder: why it stopped
PROGRESS_TOPIC = "progress"  # by which whoever waits for a job asks it how far it is
METRICS = "metrics"  # there, from which line on of metrics.jsonl, and in the answer these
JOB = "job.lock"  # there too: held by the one job that is at work on the run
RESULT = "result.json"  # there too, once it is done
REFUSED = ("QueryRefused", "MethodRefused")
# Errors after which the same run would only stop again.
FINAL = (*REFUSED, "ArgumentError", "UnknownName", "DataError", "ModelError")

AGAIN = "; `fedstill run --resume` goes on with it, where it was started"

_WAITING = {
    "SUBMITTED": "waiting: it begins once all its nodes are there and free",
    "APPROVED": "waiting: it begins once all its nodes are there and free",
    "DISPATCHED": "starting",
}


@dataclass(frozen=True)
class Stop:
    """Why a run stopped: the kind of the error, and what it says in one line."""

    error: str
    text: str

    @property
    def refused(self) -> bool:
        """Whether a node or a method refused what was asked."""
        return self.error in REFUSED

    @property
    def final(self) -> bool:
        """Whether the same run would only stop again."""
        return self.error in FINAL


def stop(folder: Path) -> Stop | None:
    """Why the run in a folder stopped; None where it did not.

    One with a result did not, whatever came after it.
    """
    path = folder / STOPPED
    if not path.exists() or (folder / RESULT).exists():
        return None
    told = json.loads(path.read_text(encoding="utf-8"))
    return Stop(told["error"], told["text"])


def outcome(folder: Path, status: str = "", since: float = 0.0) -> str:
    """What became of a run, in one line.

    Args:
        folder: of the run at the server; it need not be there.
        status: of its latest job as FLARE tells it, which says nothing of why, and for ever that a job runs
            whose server was killed; empty: there is no job at work.
        since: when that job was handed in, in seconds of the clock; what is older is an earlier job's.
    """
    if status in _WAITING:
        return _WAITING[status]
    if status and not status.startswith("FINISHED"):
        if at_work(folder):
            return f"running{progress(folder)}"
        if not _newer(folder / JOB, since):
            return _WAITING["DISPATCHED"]
    if (folder / RESULT).exists():
        return "done"
    why = stop(folder)
    if why is not None and _newer(folder / STOPPED, since):
        if why.refused:
            return f"refused: {why.text}"
        return f"stopped: {why.text}{'' if why.final else AGAIN}"
    if status.startswith("FINISHED"):
        word = status.removeprefix("FINISHED:")
        return f"no result, and not said why; FLARE's word for it is {word}{AGAIN}"
    return f"the server ended before it did{progress(folder)}{AGAIN}"


def over(folder: Path) -> bool:
    """Whether the run in a folder at the server has come to a result or stopped, and all is written."""
    return ((folder / RESULT).exists() or (folder / STOPPED).exists()) and not at_work(folder)


def at_work(folder: Path) -> bool:
    """Whether a job holds the run's folder."""
    return is_locked(folder / JOB)


def _newer(path: Path, since: float) -> bool:
    return path.exists() and path.stat().st_mtime >= since


def progress(folder: Path) -> str:
    """How far the run in a folder is, to follow other words; empty where it has not noted anything."""
    noted = Note.read(folder / PROGRESS)
    return "" if noted is None else f", {noted.words()}"
