"""Runs and comparisons of presets and TOML files from Python.

Both resume a run that was interrupted and read one that is finished, so that a notebook's cell can be run
again.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstill.compare import comparison_runner
from fedstill.compare.comparison import (
    COMPARISON_FILE,
    base_run,
    is_file_listing_methods,
    methods_by_label,
    plan_comparison,
    read_comparison,
    read_comparison_folder,
)
from fedstill.core.compute import use_torch_defaults
from fedstill.core.config_tables import merge_tables, unflatten
from fedstill.core.errors import ArgumentError, caller_context
from fedstill.core.run_writer import parse_folder, read_object
from fedstill.report import write_report
from fedstill.report.comparison_page import write_comparison
from fedstill.report.terminal import comparison_summary
from fedstill.runs import run
from fedstill.runs.spec import RunSpec, from_dict, load, to_dict


@dataclass(frozen=True, eq=False)
class Compared:
    """Results of :func:`compare_methods`. Its ``repr`` has a line for each method.

    Args:
        folder: folder of the comparison, with ``compare.csv`` (one line per method, setting and seed) and
            ``compare.html``.
        results: content of each finished run's ``result.json``, by the name of the run's folder, such as
            ``"fedavg-seed0"``.
        not_run: reasons why other runs could not run, by the names of their folders.
    """

    folder: Path
    results: Mapping[str, Mapping[str, Any]]
    not_run: Mapping[str, str]

    def __repr__(self) -> str:
        return f"Compared {comparison_summary(self.results, self.not_run, self.folder)}"


@caller_context("options")
@use_torch_defaults()
def run_preset(
    target: str | Path,
    options: Mapping[str, Any] | None = None,
    *,
    out: str | Path,
    progress: bool = False,
) -> Mapping[str, Any]:
    """Run a preset or a TOML file, as the command ``fedstill run`` does.

    Args:
        target: name of a preset, or path of a run's ``.toml`` file.
        options: options to change, by dotted name, such as ``{"method.steps": 50, "seed": 1}``. Default:
            none.
        out: folder of the run. A run of the same options that was interrupted there resumes, and a finished
            one is read.
        progress: show progress on standard error, as bars on a terminal and as lines elsewhere. Default:
            False.

    Returns:
        Content of ``result.json``: metrics in their units, bytes, queries, seconds, and the privacy cost.

    Raises:
        RunFolderError: ``out`` holds another run or other files.
        UnknownName: there is no such preset or option.
        ArgumentError: an option has an invalid value.
        FedstillError: base class of all of these; also raised if the run fails.

    Example:
        >>> result = fedstill.run_preset("demo", {"method.steps": 50}, out="runs/demo")  # doctest: +SKIP
        >>> result["accuracy"]  # doctest: +SKIP
        91.7
    """
    config = from_dict(merge_tables(RunSpec, to_dict(load(str(target))), unflatten(options or {})))
    folder = parse_folder(out)
    again = shlex.join(["fedstill", "run", str(folder / "config.toml")])
    run.run_or_resume(config, folder, command=again, progress=progress, report=write_report)
    write_report(folder)
    return read_object(folder / "result.json")  # read, as it is read again: without numbers that JSON has not


@caller_context("options")
@use_torch_defaults()
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
    """Compare several methods on equal terms, as the command ``fedstill compare`` does.

    Args:
        methods: names of methods, presets or TOML files of runs; or the ``.toml`` file of one comparison.
        options: options to change, by dotted name: of all runs, as ``{"split.nodes": 10}``, or of one of
            several methods, as ``{"fediod.steps": 50}``. Default: none.
        out: folder of the comparison. An equal comparison that was interrupted there resumes, also with more
            seeds.
        base: preset or TOML file with all options except the method. Default: None, the comparison's file or
            the digits.
        seeds: number of seeds, 1 or more. Default: None, the comparison's file or 1.
        leakage: also attack each run. Default: False.
        progress: show progress on standard error. Default: False.

    Returns:
        The results of all runs, and reasons why some could not run.

    Raises:
        RunFolderError: ``out`` holds another comparison or other files.
        UnknownName: a name or an option does not exist.
        ArgumentError: an option has an invalid value.
        FedstillError: base class of all of these; also raised if no method can run.

    Example:
        >>> fedstill.compare_methods(["fedkd", "fedavg"], out="runs/compare", seeds=3)  # doctest: +SKIP
    """
    folder, given = parse_folder(out), dict(options or {})
    names = [str(methods)] if isinstance(methods, (str, Path)) else [str(name) for name in methods]
    if len(names) == 1 and is_file_listing_methods(names[0]):
        if base is not None:
            raise ArgumentError("base", str(base), f"None with {names[0]}, which has its own")
        plan = read_comparison(Path(names[0]), seeds=seeds, changes=given, leakage=leakage)
    else:
        base_target = None if base is None else str(base)
        shared = to_dict(base_run(names, base_target))  # also registers its plugins
        options_by_method: dict[str, dict[str, Any]] = {}
        for label in methods_by_label(names, {}):
            method_options = [name for name in given if name.startswith(f"{label}.")]
            if (
                method_options and label not in shared
            ):  # otherwise options of all runs in a table of this name
                options_by_method[label] = unflatten(
                    {name.removeprefix(f"{label}."): given.pop(name) for name in method_options}
                )
        seed_count = 1 if seeds is None else seeds
        plan = plan_comparison(
            names,
            base=base_target,
            seeds=seed_count,
            changes=given,
            options=options_by_method,
            leakage=leakage,
        )
    comparison_runner.compare(
        plan,
        folder,
        command=shlex.join(["fedstill", "compare", str(folder / COMPARISON_FILE)]),
        report=write_report,
        quiet=not progress,
        bars=progress,
    )
    comparison = read_comparison_folder(folder)
    write_comparison(folder, comparison)
    found = comparison_runner.read_results(folder, comparison)
    return Compared(folder, found, comparison_runner.read_not_run(folder))
