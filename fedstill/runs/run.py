"""Run a configuration: start, resume, and write the folder of results."""

from __future__ import annotations

import json
import platform
import resource
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from fedstill.core.config_tables import read_text
from fedstill.core.errors import ArgumentError, RunFolderError, by_caller
from fedstill.core.progress import PROGRESS_FILE, ProgressFile
from fedstill.core.run_writer import (
    make_folder,
    reject_run_of_python_objects,
    require_same_options,
    write_text,
)
from fedstill.core.text_format import format_count, json_text
from fedstill.core.version import __version__
from fedstill.data.config import check_no_validation
from fedstill.federation.ray_actors import require_ray
from fedstill.runs.ray_simulation import simulation_class
from fedstill.runs.results import write_results
from fedstill.runs.simulation import Simulation, build_simulation
from fedstill.runs.spec import (
    RunSpec,
    fingerprint_options,
    load_toml,
    to_dict,
    to_toml,
)
from fedstill.runs.trained_model_cache import TrainedModels
from fedstill.track.trackers import TrackerGroup

COMMAND = "# Made by: "  # start of the first line of config.toml, before the command that repeats the run


Report = Callable[[Path], object]  # writes the report of a run's folder, also of an unfinished run
Check = Callable[[Simulation], object]  # raises an error if a simulation must not run


def run(
    spec: RunSpec,
    out: Path,
    *,
    command: str,
    progress: bool,
    trained: Path | None = None,
    report: Report | None = None,
    check: Check | None = None,
) -> dict[str, Any]:
    """Run a configuration from the start.

    Args:
        spec: the run.
        out: its folder, created after all checks.
        command: the exact command that repeats it, for the report.
        progress: show progress.
        trained: folder for nodes' models that are shared with other runs.
        report: called repeatedly during the run.
        check: called with the simulation before it runs, to refuse it.

    Returns:
        Content of ``result.json``.

    Raises:
        RunFolderError: the folder is not empty.
        FedstillError: the configuration cannot run, or the federation cannot be reached; then no folder is
            created.
    """
    require_empty_folder(out)
    _require_engine(spec)
    if spec.engine.startup_kit:
        spec = _with_kit(spec, Path(spec.engine.startup_kit))
    listeners = TrackerGroup(spec.track, to_dict(spec))
    prepared = None if spec.engine.startup_kit else _build_simulation(spec, progress, check)
    make_folder(out)
    write_text(out / "config.toml", f"{COMMAND}{command}\n\n{to_toml(spec)}")
    return _run_in_folder(spec, prepared, out, command, progress, trained, report, listeners)


def run_or_resume(
    spec: RunSpec,
    out: Path,
    *,
    command: str,
    progress: bool,
    trained: Path | None = None,
    report: Report | None = None,
    check: Check | None = None,
) -> dict[str, Any]:
    """Run a configuration, resume it, or read its result if it is finished.

    Arguments as of :func:`run`.

    Raises:
        RunFolderError: the folder holds another run, or something else.
        FedstillError: the configuration cannot run.
    """
    if not (out / "config.toml").exists():
        part = out / "config.toml.part"
        if out.is_dir() and list(out.iterdir()) == [part]:  # left by a run that was interrupted at its start
            part.unlink()
        return run(spec, out, command=command, progress=progress, trained=trained, report=report, check=check)
    if kit := spec.engine.startup_kit:  # as it is written to config.toml
        spec = replace(spec, engine=replace(spec.engine, startup_kit=str(Path(kit).resolve())))
    if load_toml(out / "config.toml") != spec:
        raise RunFolderError(f"{out} holds a run with other options: choose another folder")
    return resume(out, progress=progress, trained=trained, report=report, check=check)


def _build_simulation(
    spec: RunSpec, progress: bool, check: Check | None
) -> tuple[Simulation, dict[str, Any]]:
    prepared = build_simulation(spec, simulation_class(spec), progress=progress)
    if check is not None:
        check(prepared[0])
    return prepared


def _require_engine(spec: RunSpec) -> None:
    if spec.engine.backend == "ray":
        require_ray()
    elif spec.engine.backend != "local":
        from fedstill.federation.provision import require_flare

        require_flare()


def _with_kit(spec: RunSpec, kit: Path) -> RunSpec:
    """Return the configuration with the absolute path of an admin's kit, after connecting to its
    federation."""
    from fedstill.runs.deployment import check_connection

    check_no_validation(spec.data)

    check_connection(kit)
    return replace(spec, engine=replace(spec.engine, startup_kit=str(kit.resolve())))


def resume(
    out: Path,
    *,
    progress: bool,
    startup_kit: Path | None = None,
    trained: Path | None = None,
    report: Report | None = None,
    check: Check | None = None,
) -> dict[str, Any]:
    """Resume a run that was interrupted; it reaches the metrics of an uninterrupted run.

    Args:
        startup_kit: the admin's kit, if the one that the run was started with has moved or expired.
        trained, report, check: as of :func:`run`.

    Raises:
        RunFolderError: there is no run in the folder.
        ArgumentError: a kit for a run that is not at a deployed federation.
    """
    if not (out / "config.toml").exists():
        reject_run_of_python_objects(out, "to resume it, call distil again with the same arguments")
        raise RunFolderError(f"{out} holds no run to resume: file not found: {out / 'config.toml'}")
    if (out / "result.json").exists():
        result: dict[str, Any] = json.loads((out / "result.json").read_text(encoding="utf-8"))
        if "options" in result:
            require_same_options(out, result["options"], fingerprint_options(load_toml(out / "config.toml")))
        return result
    spec = load_toml(out / "config.toml")
    _require_engine(spec)
    first = read_text(out / "config.toml").splitlines()[0]
    if startup_kit is not None:
        if not spec.engine.startup_kit:
            raise ArgumentError(
                "--startup-kit", str(startup_kit), "none, as this run was started without one"
            )
        spec = _with_kit(spec, startup_kit)
        write_text(out / "config.toml", f"{first}\n\n{to_toml(spec)}")
    listeners = TrackerGroup(spec.track, to_dict(spec))
    prepared = None if spec.engine.startup_kit else _build_simulation(spec, progress, check)
    return _run_in_folder(
        spec, prepared, out, first.removeprefix(COMMAND), progress, trained, report, listeners
    )


def _run_in_folder(
    spec: RunSpec,
    prepared: tuple[Simulation, dict[str, Any]] | None,
    out: Path,
    command: str,
    progress: bool,
    trained: Path | None,
    report: Report | None,
    listeners: TrackerGroup,
) -> dict[str, Any]:
    """Run in a folder: a simulation, or without one at a deployed federation."""
    bars = progress_bars(out, progress, report)
    if prepared is None:
        from fedstill.runs.deployment import submit

        results = submit(spec, out, bars, listeners)
        result = {**results, "command": command, "options": fingerprint_options(spec), **machine_and_date()}
        write_text(out / "result.json", json_text(result) + "\n")
        listeners.close(result)
        add_tracker_failure_notes(listeners, result, out)
        (out / PROGRESS_FILE).unlink(missing_ok=True)
        return result
    simulation, about = prepared
    simulation.listeners = listeners
    about["command"] = command
    simulation.trained = None if trained is None else TrainedModels(trained, spec)
    if spec.engine.backend in ("flare", "flare-poc"):
        from fedstill.runs.deployment import rehearse

        return write_simulation_result(simulation, about, rehearse(spec, simulation, out, bars), out)
    return write_simulation_result(simulation, about, simulation.run(out, bars=bars), out)


def progress_bars(out: Path, progress: bool, report: Report | None) -> ProgressFile:
    """Return progress bars that also write the progress to a run's folder and update its report."""
    return ProgressFile(out / PROGRESS_FILE, progress, lambda note: report and report(out))


def require_empty_folder(out: Path) -> None:
    """Refuse a folder that is not empty.

    Raises:
        RunFolderError: it is not empty. The message says how to resume a run in it.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        resumable = (out / "config.toml").exists()
        command = f"fedstill run --resume {out}"
        hint = by_caller(command, "call it with the options of that run", f"on the command line: {command}")
        advice = f"resume it ({hint})" if resumable else "empty it"
        raise RunFolderError(f"{out} holds another run or other files: choose another folder, or {advice}")


def write_simulation_result(
    simulation: Simulation,
    about: dict[str, Any],
    results: dict[str, Any],
    out: Path,
    *,
    keep_state: bool = False,
) -> dict[str, Any]:
    """Write the result of a finished simulation.

    Args:
        keep_state: keep the final state of nodes and server, for :meth:`Simulation.load_finished`.

    Returns:
        Content of ``result.json``.
    """
    result = {**about, **results, **machine_and_date()}
    if keep_state:
        simulation.save_state()
    write_results(simulation, result, keep_state=keep_state)
    add_tracker_failure_notes(simulation.listeners, result, out)
    (out / PROGRESS_FILE).unlink(missing_ok=True)
    return result


def add_tracker_failure_notes(listeners: TrackerGroup, result: dict[str, Any], out: Path) -> None:
    """Add notes to a written result about trackers that failed on the result or the last metrics."""
    known_notes = result.get("notes", [])
    if new_notes := [note for note in listeners.notes if note not in known_notes]:
        result["notes"] = [*known_notes, *new_notes]
        write_text(out / "result.json", json_text(result) + "\n")


def machine_and_date() -> dict[str, Any]:
    """Return machine, memory, date and software versions, for a result."""
    return {
        # ru_maxrss is in kB on Linux and in bytes on macOS.
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        / (1e6 if sys.platform == "darwin" else 1e3),
        "machine": machine(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "fedstill": __version__,
        },
    }


def machine() -> str:
    """Describe the processor and the number of threads."""
    threads = format_count(torch.get_num_threads(), "CPU thread")
    return f"{platform.machine()}, {platform.system()}, {threads} in use"
