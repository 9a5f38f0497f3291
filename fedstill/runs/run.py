"""One run from its configuration to its folder of results."""

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

from fedstill.core import toml
from fedstill.core.errors import ArgumentError, RunFolderError, by_caller
from fedstill.core.progress import PROGRESS_FILE, ProgressFile
from fedstill.core.run_writer import make_folder, require_no_objects, require_same_options, write_text
from fedstill.core.text_format import format_count, json_text
from fedstill.core.version import __version__
from fedstill.data.config import check_no_validation
from fedstill.runs.build import prepare
from fedstill.runs.config import RunConfig, fingerprint_options, load_toml, to_dict, to_toml
from fedstill.runs.simulation import Simulation
from fedstill.runs.trained_model_cache import TrainedModels
from fedstill.track.tracker_group import TrackerGroup

REHEARSED = ("flare", "flare-poc")  # engines whose nodes are processes of their own
COMMAND = "# Made by: "  # the first line of a run's config.toml, with the command that repeats it


Report = Callable[[Path], object]  # writes the report of a run's folder, as far as the run has come


def run(
    config: RunConfig,
    out: Path,
    *,
    command: str,
    progress: bool,
    trained: Path | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """Run a configuration from the start.

    Args:
        out: its folder; made here, once everything has been checked.
        command: the exact command that repeats it, for the report.
        trained: a folder for models of nodes, which runs that train them alike share.
        report: is called now and then while the run goes on.

    Returns:
        What ``result.json`` holds.

    Raises:
        RunFolderError: the folder holds something already.
        FedstillError: the configuration cannot run, or the federation cannot be reached; then no folder is
            made.
    """
    check_folder(out)
    _require_engine(config)
    if config.engine.startup_kit:
        config = _with_kit(config, Path(config.engine.startup_kit))
    listeners = TrackerGroup(config.track, to_dict(config))
    made = None if config.engine.startup_kit else prepare(config)
    make_folder(out)
    write_text(out / "config.toml", f"{COMMAND}{command}\n\n{to_toml(config)}")
    return _go(config, made, out, command, progress, trained, report, listeners)


def run_or_resume(
    config: RunConfig,
    out: Path,
    *,
    command: str,
    progress: bool,
    trained: Path | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """The result of a configuration: run from the start, gone on with where it stopped, or read if there.

    Arguments as of :func:`run`.

    Raises:
        RunFolderError: the folder holds another run, or something else.
        FedstillError: the configuration cannot run.
    """
    if not (out / "config.toml").exists():
        part = out / "config.toml.part"
        if out.is_dir() and list(out.iterdir()) == [part]:  # left by whoever was stopped as it began
            part.unlink()
        return run(config, out, command=command, progress=progress, trained=trained, report=report)
    if kit := config.engine.startup_kit:  # as it was written
        config = replace(config, engine=replace(config.engine, startup_kit=str(Path(kit).resolve())))
    if load_toml(out / "config.toml") != config:
        raise RunFolderError(f"{out / 'config.toml'} is another run than this: choose another folder")
    return resume(out, progress=progress, trained=trained, report=report)


def _require_engine(config: RunConfig) -> None:
    if config.engine.name in REHEARSED:
        from fedstill.federation.provision import require_flare

        require_flare()


def _with_kit(config: RunConfig, kit: Path) -> RunConfig:
    """A run at the federation that an admin's kit lets in to, wherever it will be resumed from."""
    from fedstill.runs.deployed import reach

    check_no_validation(config.data)

    reach(kit)
    return replace(config, engine=replace(config.engine, startup_kit=str(kit.resolve())))


def resume(
    out: Path,
    *,
    progress: bool,
    startup_kit: Path | None = None,
    trained: Path | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """Go on with a run that was stopped, to the figures that it would have reached.

    Args:
        startup_kit: of the admin, where the one that the run began with has moved or run out.
        trained, report: as of :func:`run`.

    Raises:
        RunFolderError: there is no run in the folder.
        ArgumentError: a kit for a run that is at no deployed federation.
    """
    if not (out / "config.toml").exists():
        require_no_objects(out, "it goes on where distil is called again with the same arguments")
        raise RunFolderError(f"{out} holds no run to go on with: there is no config.toml in it")
    if (out / "result.json").exists():
        result: dict[str, Any] = json.loads((out / "result.json").read_text(encoding="utf-8"))
        if "options" in result:
            require_same_options(out, result["options"], fingerprint_options(load_toml(out / "config.toml")))
        return result
    config = load_toml(out / "config.toml")
    _require_engine(config)
    first = toml.read_text(out / "config.toml").splitlines()[0]
    if startup_kit is not None:
        if not config.engine.startup_kit:
            raise ArgumentError("--startup-kit", str(startup_kit), "none, as this run began without one")
        config = _with_kit(config, startup_kit)
        write_text(out / "config.toml", f"{first}\n\n{to_toml(config)}")
    listeners = TrackerGroup(config.track, to_dict(config))
    made = None if config.engine.startup_kit else prepare(config)
    return _go(config, made, out, first.removeprefix(COMMAND), progress, trained, report, listeners)


def _go(
    config: RunConfig,
    made: tuple[Simulation, dict[str, Any]] | None,
    out: Path,
    command: str,
    progress: bool,
    trained: Path | None,
    report: Report | None,
    listeners: TrackerGroup,
) -> dict[str, Any]:
    """A run in its folder, wherever its nodes are; without a simulation, at a deployed federation."""
    bars = progress_bars(out, progress, report)
    if made is None:
        from fedstill.runs.deployed import submit

        results = submit(config, out, bars, listeners)
        result = {**results, "command": command, "options": fingerprint_options(config), **machine_and_date()}
        write_text(out / "result.json", json_text(result) + "\n")
        listeners.close(result)
        note_failures(listeners, result, out)
        (out / PROGRESS_FILE).unlink(missing_ok=True)
        return result
    simulation, about = made
    simulation.listeners = listeners
    about["command"] = command
    simulation.trained = None if trained is None else TrainedModels(trained, config)
    if config.engine.name in REHEARSED:
        from fedstill.runs.local_processes import rehearse

        return finish(simulation, about, rehearse(config, simulation, out, bars), out)
    return finish(simulation, about, simulation.run(out, bars=bars), out)


def progress_bars(out: Path, progress: bool, report: Report | None) -> ProgressFile:
    """Bars on a terminal, if wanted, and the same in a run's folder, where a report grows if there is one."""
    return ProgressFile(out / PROGRESS_FILE, progress, lambda note: report and report(out))


def check_folder(out: Path) -> None:
    """Refuse a folder that holds something already.

    Raises:
        RunFolderError: it does.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        resumable = (out / "config.toml").exists()
        again = by_caller(f"fedstill run --resume {out}", "the same options", f"fedstill run --resume {out}")
        how = f"go on with it ({again})" if resumable else "empty it"
        raise RunFolderError(f"{out} holds another run or other files: choose another folder, or {how}")


def finish(
    simulation: Simulation, about: dict[str, Any], results: dict[str, Any], out: Path
) -> dict[str, Any]:
    """Write the result of a simulation that has come to its end.

    Returns:
        What ``result.json`` holds.
    """
    result = {**about, **results, **machine_and_date()}
    simulation.finish(result)
    note_failures(simulation.listeners, result, out)
    (out / PROGRESS_FILE).unlink(missing_ok=True)
    return result


def note_failures(listeners: TrackerGroup, result: dict[str, Any], out: Path) -> None:
    """Add to a result that is written which listeners failed as they were told of it, or of the last metrics
    before it."""
    said = result.get("notes", [])
    if late := [note for note in listeners.notes if note not in said]:
        result["notes"] = [*said, *late]
        write_text(out / "result.json", json_text(result) + "\n")


def machine_and_date() -> dict[str, Any]:
    """Where and when a result was made."""
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
    """What computes here, in words."""
    threads = format_count(torch.get_num_threads(), "CPU thread")
    return f"{platform.machine()}, {platform.system()}, {threads} in use"
