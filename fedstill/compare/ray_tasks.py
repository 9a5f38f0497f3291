"""Runs of a comparison as tasks of a Ray cluster (``--jobs ray``).

Ray places each run on a machine with enough free CPUs and GPUs. All machines share the file system with the
comparison's folder, so the results are where the other ways to run a comparison leave them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstill.compare.run_workers import STOP_SECONDS, RunOutcome, RunStart, search_paths
from fedstill.core.errors import ArgumentError, RunFolderError, by_caller
from fedstill.core.registry import first_line
from fedstill.federation.ray_actors import connect, require_ray

RAY = "ray"  # the cluster that this machine belongs to
RAY_CLIENT = "ray://"  # a cluster by its address
MAX_RETRIES = 2  # of a run whose machine or process dies; it continues from its last checkpoint
POLL_SECONDS = 0.5

Execute = Callable[[int, Callable[[str], None]], RunOutcome]


@dataclass(frozen=True)
class RayTasks:
    """Placement of runs on a Ray cluster.

    Args:
        address: ``ray`` for the cluster that this machine belongs to, or ``ray://HOST:PORT``.
        cpus: CPUs of each run, 1 or more.
        gpus: GPUs of each run.
    """

    address: str
    cpus: int = 1
    gpus: int = 0


def run_on_ray(
    numbers: Collection[int], execute: Execute, tasks: RayTasks
) -> Generator[tuple[int, RunStart | RunOutcome], None, None]:
    """Execute runs as tasks of a Ray cluster.

    Args:
        numbers: numbers of the runs, in the order in which Ray gets them.
        execute: executes the run of a number; its second argument is called at the start of a phase. Ray
            sends it to other machines, which have the same version of fedstill.
        tasks: the cluster, and what each run gets of it.

    Yields:
        The number of a run, and its start or outcome.

    Raises:
        DeployError: Ray is not installed, or there is no such cluster.
        ArgumentError: no machine of the cluster has as many CPUs or GPUs as a run needs.
        RunFolderError: a folder is in use, holds something else, or is not shared by all machines. The other
            runs are stopped first.
    """
    require_ray()
    has_connected = connect("auto" if tasks.address == RAY else tasks.address)

    import ray
    from ray.util.queue import Queue

    pending: dict[Any, int] = {}
    starts: Any = None
    try:
        _require_resources(tasks)
        starts = Queue(actor_options={"num_cpus": 0})
        remote: Any = ray.remote(_execute)
        remote = remote.options(num_cpus=tasks.cpus, num_gpus=tasks.gpus, max_retries=MAX_RETRIES)
        place = (str(Path.cwd()), search_paths())
        pending = {remote.remote(execute, number, *place, starts): number for number in numbers}
        while pending:
            done, _ = ray.wait(list(pending), timeout=POLL_SECONDS)
            while not starts.empty():
                yield starts.get()
            for task in done:
                number, outcome = pending.pop(task), _outcome(task)
                if outcome.folder_error:
                    raise RunFolderError(outcome.folder_error)
                yield number, outcome
    finally:
        for task in pending:
            ray.cancel(task)  # interrupts a run as Ctrl-C does
        if pending:
            _, running = ray.wait(list(pending), num_returns=len(pending), timeout=STOP_SECONDS)
            for task in running:
                ray.cancel(task, force=True)
        if starts is not None:
            starts.shutdown(force=True)
        if has_connected:
            ray.shutdown()


def _execute(execute: Execute, number: int, folder: str, paths: Mapping[str, str], starts: Any) -> RunOutcome:
    """Execute one run in a process of Ray, with folder and search paths of the process that started it."""
    try:
        os.chdir(folder)
    except OSError:
        return RunOutcome(folder_error=f"a machine of the Ray cluster cannot open {folder}")
    sys.path[:] = dict.fromkeys([*sys.path, *paths["PYTHONPATH"].split(os.pathsep)])
    os.environ["FEDSTILL_DATA"] = paths["FEDSTILL_DATA"]

    def start(phase: str) -> None:
        # Queue.put would wait for the actor, and Ray would give the waiting task's CPU to another one.
        starts.actor.put_nowait.remote((number, RunStart(phase)))

    return execute(number, start)


def _outcome(task: Any) -> RunOutcome:
    """Return the outcome of a task that has ended, also if its process or machine has died."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        outcome: RunOutcome = ray.get(task)
    except RayError as error:
        cause = error.cause if isinstance(error, RayTaskError) else error  # of a task: what it raised
        return RunOutcome(not_run=f"stopped: {type(cause).__name__}: {first_line(cause)}")
    return outcome


def _require_resources(tasks: RayTasks) -> None:
    """Refuse runs that no machine of the cluster can hold, as Ray would let them wait for ever."""
    import ray

    needed = {"CPU": tasks.cpus, "GPU": tasks.gpus}
    machines = [machine["Resources"] for machine in ray.nodes() if machine["Alive"]]
    if not any(all(machine.get(kind, 0) >= count for kind, count in needed.items()) for machine in machines):
        each = " and ".join(f"{count} {kind}s" for kind, count in needed.items() if count)
        raise ArgumentError(
            by_caller("--jobs", "jobs", "jobs"), tasks.address, f"a cluster with a machine that has {each}"
        )
