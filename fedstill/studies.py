"""Runs and comparisons of presets and files, from Python: for notebooks, and for programs that try options.

Both go on where they were stopped, and what is finished is read, so that a notebook's cell can be run again.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstill.compare import comparison_file, comparison_runner
from fedstill.compare.comparison import methods_by_label
from fedstill.core.compute import torch_defaults
from fedstill.core.config_tables import layered, nested
from fedstill.core.errors import ArgumentError, called_from
from fedstill.core.run_writer import folder_of, read_object
from fedstill.report import write_report
from fedstill.report.compare_files import write_comparison
from fedstill.report.run_summary import comparison_summary
from fedstill.runs import run
from fedstill.runs.config import RunConfig, from_dict, load, to_dict


@dataclass(frozen=True, eq=False)
class Compared:
    """Results of a comparison; printed, they are a line for each method.

    Args:
        folder: with ``compare.csv``, a line a method, setting and seed, and ``compare.html``.
        results: what each finished run's ``result.json`` holds, by the run's folder: ``"fedavg-seed0"``.
        not_run: why others could not run, by their folders.
    """

    folder: Path
    results: Mapping[str, Mapping[str, Any]]
    not_run: Mapping[str, str]

    def __repr__(self) -> str:
        return f"Compared {comparison_summary(self.results, self.not_run, self.folder)}"


@called_from("options")
@torch_defaults()
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
        progress: show how far it is on standard error: bars on a terminal, else (in notebooks, too) lines.

    Returns:
        What ``result.json`` holds.

    Raises:
        RunFolderError: another run, or other files, are in the folder.
        FedstillError: no such preset or option, a value that is not allowed, or a run that cannot be.
    """
    config = from_dict(layered(RunConfig, to_dict(load(str(target))), nested(options or {})))
    folder = folder_of(out)
    again = shlex.join(["fedstill", "run", str(folder / "config.toml")])
    run.run_or_resume(config, folder, command=again, progress=progress, report=write_report)
    write_report(folder)
    return read_object(folder / "result.json")  # read, as it is read again: without numbers that JSON has not


@called_from("options")
@torch_defaults()
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
        methods: names of methods, presets or files; or one comparison's ``.toml`` file.
        options: by dotted name, of all runs, ``{"split.nodes": 10}``; where methods are named here, after a
            method's label of that one, too, ``{"fediod.steps": 50}``.
        out: its folder. The same comparison goes on there, with more seeds too.
        base: the preset or file that gives all but methods; None: digits, or what the file says.
        seeds: how many; None: what the file says, or one.
        leakage: attack each run.
        progress: say which run it is, and how far, on standard error.

    Raises:
        RunFolderError: another comparison, or other files, are in the folder.
        FedstillError: a name or an option that does not exist, a value that is not allowed, or no method that
            can run.
    """
    folder, given = folder_of(out), dict(options or {})
    names = [str(methods)] if isinstance(methods, (str, Path)) else [str(name) for name in methods]
    if len(names) == 1 and comparison_file.is_plan(names[0]):
        if base is not None:
            raise ArgumentError("base", str(base), f"none beside {names[0]}, which says its own")
        plan = comparison_file.read(Path(names[0]), seeds=seeds, changes=given, leakage=leakage)
    else:
        below = None if base is None else str(base)
        shared = to_dict(comparison_file.base_run(names, below))  # looks in its plugins, too
        own: dict[str, dict[str, Any]] = {}
        for label in methods_by_label(names, {}):
            mine = [name for name in given if name.startswith(f"{label}.")]
            if mine and label not in shared:  # else these are a table's of all runs
                own[label] = nested({name.removeprefix(f"{label}."): given.pop(name) for name in mine})
        many = 1 if seeds is None else seeds
        plan = comparison_file.plan(
            names, base=below, seeds=many, changes=given, options=own, leakage=leakage
        )
    comparison_runner.compare(
        plan,
        folder,
        command=shlex.join(["fedstill", "compare", str(folder / comparison_file.FILE)]),
        report=write_report,
        quiet=not progress,
        bars=progress,
    )
    comparison = comparison_file.read_folder(folder)
    write_comparison(folder, comparison)
    found = comparison_runner.results(folder, comparison)
    return Compared(folder, found, comparison_runner.not_run(folder))
