"""Status of a run as shown to an administrator, without FLARE's terms."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest

from fedstill.core.progress import ProgressFile
from fedstill.federation.admin import _runs, run_status_line

COMPLETED = "FINISHED:COMPLETED"
RESUME_HINT = "; `fedstill run --resume` resumes it, on the machine where it was started"


def stopped(folder: Path, error: str, at: float = 1000.0) -> None:
    (folder / "stopped.json").write_text(json.dumps({"error": error, "text": "node 'a' says no"}))
    os.utime(folder / "stopped.json", (at, at))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("QueryRefused", "refused: node 'a' says no"),
        ("MethodRefused", "refused: node 'a' says no"),
        ("ArgumentError", "stopped: node 'a' says no"),
        ("NodeFault", f"stopped: node 'a' says no{RESUME_HINT}"),
    ],
)
def test_stopped_run_reports_reason(error: str, message: str, tmp_path: Path) -> None:
    stopped(tmp_path, error)
    assert run_status_line(tmp_path, COMPLETED, 999.0) == run_status_line(tmp_path) == message
    (tmp_path / "result.json").write_text("{}")
    assert run_status_line(tmp_path, COMPLETED, 999.0) == run_status_line(tmp_path) == "done"


def test_ignores_stop_reason_of_earlier_job(tmp_path: Path) -> None:
    stopped(tmp_path, "NodeFault")
    line = run_status_line(tmp_path, "FINISHED:FAILED_TO_RUN", 1001.0)
    assert line == f"no result, for an unknown reason (FLARE's status: FAILED_TO_RUN){RESUME_HINT}"


def test_only_job_with_lock_is_running(tmp_path: Path) -> None:
    waits = "waiting: it begins once all its nodes are connected and free"
    assert run_status_line(tmp_path / "none", "SUBMITTED") == waits
    assert run_status_line(tmp_path / "none", "RUNNING") == "starting"
    noted = ProgressFile(tmp_path / "progress.json")
    noted.update("distillation", 31, 400)
    with (tmp_path / "job.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run_status_line(tmp_path, "RUNNING") == "running, distillation 31 of 400"
        noted.set_waiting(["north"])
        assert run_status_line(tmp_path, "RUNNING").startswith(
            "running, distillation 31 of 400, waits for north for "
        )
        noted.set_waiting([])
    ended = f"the server ended before the run did, distillation 31 of 400{RESUME_HINT}"
    assert (
        run_status_line(tmp_path, "RUNNING") == run_status_line(tmp_path) == ended
    )  # FLARE lists it as running forever
    os.utime(tmp_path / "job.lock", (1000.0, 1000.0))  # of an earlier job
    assert run_status_line(tmp_path, "RUNNING", 1001.0) == "starting"


def test_ignores_jobs_with_invalid_names(tmp_path: Path) -> None:
    """The submitter of a job chooses its name."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "stopped.json").write_text(json.dumps({"error": "X", "text": "of another folder"}))
    job = {"submit_time": 0.0, "status": "FINISHED:COMPLETED", "job_id": "1"}
    runs = _runs(tmp_path / "runs", [{**job, "name": name} for name in ("one", "../secret", "/etc")])
    assert [run.folder.name for run in runs] == ["one"]
