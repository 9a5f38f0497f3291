"""Runs and comparisons of presets and files, from Python: for notebooks, and for programs that try options.

Both go on where they were stopped, and what is finished is read, so that a notebook's cell can be run again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstill.compare import comparison_file, comparison_runner
from fedstill.compare.comparison_methods import methods_by_label
from fedstill.core.config_tables import layered
from fedstill.core.dotted_names import nested
from fedstill.core.run_writer import read_object
from fedstill.report import write_report
from fedstill.report.compare_files import write_comparison
from fedstill.runs import run
from fedstill.runs.config import RunConfig, from_dict, load, to_dict


@dataclass(frozen=True, eq=False)
class Compared:
    """What a comparison came to.

    Args:
        folder: with ``compare.csv``, a line a method, setting and seed, and ``compare.html``.
        results: what each finished run's ``result.json`` holds, by the run's folder: ``"fedavg-seed0"``.
        not_run: why others could not run, by their folders.
    """

    folder: Path
    results: Mapping[str, Mapping[str, Any]]
    not_run: Mapping[str, str]


def run_preset(
    target: str | Path,
    options: Mapping[str, Any] | None = None,
    *,
    out: str | Path,
    progress: bool = False,
) -> Mapping[str, Any]:
    """A run by a preset or a file, as ``fedstill run`` does it.

    Args:
        target: the name of a preset, or a run's ``.toml`` file.
        options: those that are to be others, by dotted name: ``{"method.steps": 50, "seed": 1}``.
        out: its folder. A run of the same options that was stopped there goes on; a finished one is read.
        progress: show bars.

    Returns:
        What ``result.json`` holds.

    Raises:
        RunFolderError: another run, or other files, are in the folder.
        FedstillError: no such preset or option, a value that is not allowed, or a run that cannot be.
    """
    config = from_dict(layered(RunConfig, to_dict(load(str(target))), nested(options or {})))
    folder = Path(out)
    again = f"fedstill run {folder / 'config.toml'}"
    run.reach(config, folder, command=again, progress=progress, report=write_report)
    write_report(folder)
    return read_object(folder / "result.json")  # read, as it is read again: without numbers that JSON has not


def compare_methods(
    methods: str | Path | Sequence[str],
    options: Mapping[str, Any] | None = None,
    *,
    out: str | Path,
    base: str | Path | None = None,
    seeds: int | None = None,
    leakage: bool = False,
    progress: bool = False,
) -> Compared:
    """Several methods side by side, as ``fedstill compare`` has them.

    Args:
        methods: names of methods, presets or files, or one comparison's ``.toml`` file.
        options: by dotted name, of all runs, ``{"split.nodes": 10}``, or after a method's label of that one,
            ``{"fediod.steps": 50}``.
        out: its folder. The same comparison goes on there, with more seeds too.
        base: the preset or file that gives all but methods; None: digits.
        seeds: how many; None: what the file says, or one.
        leakage: attack each run.
        progress: say which run it is, and show bars.

    Raises:
        RunFolderError: another comparison, or other files, are in the folder.
        FedstillError: a name or an option that does not exist, a value that is not allowed, or no method that
            can run.
    """
    folder, given = Path(out), dict(options or {})
    if isinstance(methods, (str, Path)):
        plan = comparison_file.read(Path(methods), seeds=seeds, changes=given, leakage=leakage)
    else:
        own: dict[str, dict[str, Any]] = {}
        for label in methods_by_label(methods, {}):
            start = f"{label}."
            mine = [name for name in given if name.startswith(start)]
            if mine:
                own[label] = nested({name.removeprefix(start): given.pop(name) for name in mine})
        plan = comparison_file.plan(
            methods,
            base=None if base is None else str(base),
            seeds=seeds or 1,
            changes=given,
            options=own,
            leakage=leakage,
        )
    comparison_runner.compare(
        plan,
        folder,
        command=f"fedstill compare {folder / comparison_file.FILE}",
        report=write_report,
        quiet=not progress,
        bars=progress,
    )
    comparison = comparison_file.read_folder(folder)
    write_comparison(folder, comparison)
    files = {place.folder: folder / place.folder / "result.json" for place in comparison.places()}
    return Compared(
        folder,
        {name: read_object(file) for name, file in files.items() if file.exists()},
        comparison_runner.not_run(folder),
    )
