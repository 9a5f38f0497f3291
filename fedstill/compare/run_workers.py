"""Worker processes that execute the runs of a comparison.

A worker is the command ``fedstill compare --resume FOLDER --only-run stdin``. It reads numbers of runs from
standard input, executes them, and prints JSON lines: an event when a run or its attack starts, and the
outcome when it ends. A worker that dies loses its current run only. If the parent dies, its workers stop.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from fedstill.core.errors import ArgumentError, RunFolderError
from fedstill.data.user_data import default_folders

STOP_SECONDS = 60.0  # for workers to end when they are stopped
MAX_FAILED_STARTS = 2  # workers in a row that may end before their first run starts
ALL_DEVICES = "all"


@dataclass(frozen=True)
class RunOutcome:
    """Outcome of one run of a comparison.

    Args:
        not_run: reason why the run has no result; empty if it has one.
        not_attacked: reason why the finished run was not attacked; empty without a reason.
        folder_error: error that the method did not cause, such as a folder in use; it stops the comparison.
    """

    not_run: str = ""
    not_attacked: str = ""
    folder_error: str = ""


@dataclass(frozen=True)
class RunStart:
    """Start of one run, or of the attack on it.

    Args:
        phase: ``"run"`` or ``"attack"``.
    """

    phase: str


# --- in the parent --------------------------------------------------------------------------------------


def run_in_workers(
    groups: Mapping[int, object], folder: Path, jobs: int, devices: Sequence[str] = ()
) -> Generator[tuple[int, RunStart | RunOutcome], None, None]:
    """Execute runs in worker processes.

    Args:
        groups: by number of a run, its group. Runs of a group share trained models, so a worker prefers the
            group of its last run, and then one that no other worker has.
        folder: folder of the comparison, with its plan.
        jobs: number of processes.
        devices: GPUs such as ``cuda:0``, or ``cpu``; worker i sees device ``i % len(devices)`` only. Empty:
            each worker sees all GPUs.

    Yields:
        The number of a run, and its start or outcome.

    Raises:
        ArgumentError: a device is not known.
        RunFolderError: a folder is in use, or holds something else. The workers are stopped first.
    """
    environments = [
        {
            **_worker_environment(jobs),
            **visible_devices(devices[index % len(devices)] if devices else ALL_DEVICES),
        }
        for index in range(jobs)
    ]
    pending, events = dict(groups), queue.SimpleQueue[tuple[_Worker, str | None]]()
    workers: list[_Worker] = []
    failed_starts = 0
    try:
        for each in environments[: len(pending)]:
            workers.append(_Worker(folder, each, events))
            workers[-1].start_next(pending, groups, workers)
        while workers:
            worker, line = events.get()
            if line is None:
                current, reason = worker.current, worker.end()
                workers.remove(worker)
                failed_starts = 0 if worker.has_started_run else failed_starts + 1
                if current is not None and not worker.has_started_run and failed_starts <= MAX_FAILED_STARTS:
                    pending[current] = groups[current]
                elif current is not None:
                    yield current, RunOutcome(not_run=f"stopped: {reason}")
                if pending:
                    replacement = _Worker(folder, worker.environment, events)
                    workers.append(replacement)
                    replacement.start_next(pending, groups, workers)
                continue
            number, event = _read_event(line)
            worker.has_started_run = True
            if isinstance(event, RunOutcome):
                if event.folder_error:
                    raise RunFolderError(event.folder_error)
                worker.start_next(pending, groups, workers)
            yield number, event
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()


class _Worker:
    """A worker process, and the thread that reads its lines."""

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        events: queue.SimpleQueue[tuple[_Worker, str | None]],
    ) -> None:
        self.environment = environment
        self.current: int | None = None
        self.has_started_run = False
        self._group: object = None
        self._errors = TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        command = [
            sys.executable,
            "-m",
            "fedstill",
            "compare",
            "--resume",
            str(folder),
            "--only-run",
            "stdin",
        ]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=dict(environment),
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is for the parent, which stops the workers
        )
        self._reader = threading.Thread(target=self._read_lines, args=(events,), daemon=True)
        self._reader.start()

    def _read_lines(self, events: queue.SimpleQueue[tuple[_Worker, str | None]]) -> None:
        for line in self._stream(self._process.stdout):
            events.put((self, line))
        events.put((self, None))

    @staticmethod
    def _stream(stream: IO[str] | None) -> IO[str]:
        assert stream is not None, "the process was started with pipes"
        return stream

    def start_next(
        self, pending: dict[int, object], groups: Mapping[int, object], workers: Sequence[_Worker]
    ) -> None:
        """Give this worker one of the pending runs, or let it end."""
        stdin = self._stream(self._process.stdin)
        self.current = None
        if not pending:
            with suppress(OSError):
                stdin.close()
            return
        taken = {worker._group for worker in workers if worker is not self}
        own = [number for number, group in pending.items() if group == self._group]
        free = [number for number, group in pending.items() if group not in taken]
        self.current = [*own, *free, *pending][0]
        self._group = groups[self.current]
        del pending[self.current]
        with suppress(OSError):  # a worker that has died is found by the end of its output
            stdin.write(f"{self.current}\n")
            stdin.flush()

    def end(self) -> str:
        """Wait for a process whose output has ended, and return why it ended."""
        code = self._process.wait()
        self._errors.seek(0)
        last_line = ([""] + [line for line in self._errors.read().splitlines() if line.strip()])[-1]
        self._close()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"its process ended ({how})" + (f": {last_line.strip()}" if last_line and code > 0 else "")

    def terminate(self) -> None:
        """Ask the process to stop."""
        if self._process.poll() is None:
            self._process.terminate()

    def wait(self) -> None:
        """Wait for the end of the process; kill it if it takes too long."""
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._close()

    def _close(self) -> None:
        self._reader.join(timeout=5)  # a process that the worker started may hold its output
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


def _read_event(line: str) -> tuple[int, RunStart | RunOutcome]:
    content = json.loads(line)
    number = content.pop("run")
    return number, RunStart(**content) if "phase" in content else RunOutcome(**content)


def visible_devices(device: str) -> Mapping[str, str]:
    """Return environment variables by which a process sees one device only.

    Args:
        device: ``cuda:N``, the N-th GPU that this process sees; ``cpu``; or ``all``.

    Raises:
        ArgumentError: another name.

    >>> visible_devices("cuda:1"), visible_devices("cpu")
    ({'CUDA_VISIBLE_DEVICES': '1'}, {'CUDA_VISIBLE_DEVICES': ''})
    """
    if device == ALL_DEVICES:
        return {}
    if device == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    kind, _, index = device.partition(":")
    if kind != "cuda" or not index.isdecimal():
        raise ArgumentError("devices", device, "cpu, or GPUs such as cuda:0")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = None if visible is None else [name for name in visible.split(",") if name]
    if names is not None and int(index) >= len(names):
        raise ArgumentError("devices", device, f"one of {len(names)} visible GPUs, from cuda:0 on")
    return {"CUDA_VISIBLE_DEVICES": index if names is None else names[int(index)]}


def _worker_environment(jobs: int) -> dict[str, str]:
    """Return the environment of a worker: an equal share of the cores, and the same modules and data."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = max((cores or 1) // jobs, 1)
    return {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        **os.environ,
        **search_paths(),
    }


def search_paths() -> dict[str, str]:
    """Return environment variables by which another process finds the same modules and data."""
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "FEDSTILL_DATA": os.pathsep.join(str(data.resolve()) for data in default_folders()),
    }


# --- in a worker ----------------------------------------------------------------------------------------


def take_over_stdout() -> IO[str]:
    """Return standard output for events. What other code prints goes to standard error from now on."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return output


def serve_runs(execute: Callable[[int, Callable[[str], None]], RunOutcome], output: IO[str]) -> None:
    """Execute runs whose numbers are read from standard input, until it ends.

    If it ends during a run, the process stops as by a signal, as its parent is gone.

    Args:
        execute: executes the run of a number; its second argument is called at the start of a phase.
        output: where events are written (:func:`take_over_stdout`).
    """
    numbers, is_busy = queue.SimpleQueue[int | None](), threading.Event()

    def read_numbers() -> None:
        for line in sys.stdin:
            is_busy.set()
            numbers.put(int(line))
        if is_busy.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
        numbers.put(None)

    def emit(number: int, content: Mapping[str, Any]) -> None:
        output.write(json.dumps({"run": number, **content}) + "\n")
        output.flush()

    threading.Thread(target=read_numbers, daemon=True).start()
    while (number := numbers.get()) is not None:
        current = number
        outcome = execute(current, lambda phase: emit(current, {"phase": phase}))  # noqa: B023
        is_busy.clear()
        emit(current, asdict(outcome))
