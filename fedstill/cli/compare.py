"""``fedstill compare``: several methods under equal conditions."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from cyclopts import Parameter

from fedstill.cli.arguments import (
    AsJson,
    Call,
    CalledAs,
    MethodName,
    Quiet,
    UsageError,
    list_options,
    read_words,
    split_options,
)
from fedstill.cli.console import leave, print_json, print_list
from fedstill.cli.run import changed, check_nothing_else, in_full, out_folder, resumable
from fedstill.core.errors import ArgumentError, FedstillError, UnknownName, similar_names
from fedstill.core.options import PositiveInt

if TYPE_CHECKING:
    from fedstill.compare.comparison import Comparison
    from fedstill.protocol.method import Method
    from fedstill.runs.spec import RunSpec


FROM_INPUT = "stdin"  # numbers of runs are read from standard input


def compare(
    *names: MethodName,
    seeds: PositiveInt | None = None,
    base: str | None = None,
    data: str | None = None,
    only: tuple[str, ...] = (),
    leakage: bool = False,
    jobs: str | None = None,
    devices: tuple[str, ...] = (),
    list_runs: Annotated[bool, Parameter(name="--list")] = False,
    only_run: str | None = None,
    merge: tuple[str, ...] = (),
    out: Path | None = None,
    resume: Path | None = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    call: CalledAs,
) -> None:
    """Run several methods on the same data, split and seeds, with confidence intervals.

    example: fedstill compare standalone fedavg fedkd fediod --seeds 3

    options of a configuration (--help-all lists all with defaults):
      --METHOD.NAME VALUE  option of one method, as --fediod.steps 200
      --OPTION VALUE       option of `fedstill run` for all methods, as --nodes 10

    The exit code is 1 if a method was refused or failed.

    Args:
        names: methods or presets, or one FILE.toml that describes a comparison
        seeds: run each method with seeds 0 to N-1 (default: 1)
        base: take data, split, models and local training from a preset or file (default: digits)
        data: short for --data.name
        only: run only these methods or settings now
        leakage: attack each run (see `fedstill attack`), also in a finished comparison
        jobs: number of runs at once, each in a process of its own (default: 1, or one for each device);
            ray: tasks of a Ray cluster
        devices: GPUs of these processes in turn, as cuda:0,cuda:1
        list_runs: print all runs with their numbers and run nothing
        only_run: run one run by its number, as a task of a cluster's array job
        merge: add finished runs of other folders of this comparison and run nothing
        out: folder of the results (default: runs/compare, or runs/NAME for NAME.toml)
        resume: folder of a stopped comparison to resume
    """
    _require_one_mode(list=list_runs, merge=merge, only_run=only_run, jobs=jobs or devices)
    if resume is None:
        planned = plan_comparison(
            names, call, seeds=seeds, base=base, data=data, leakage=leakage, quiet=quiet
        )
    else:
        kept = ("--only", "--jobs", "--devices", "--list", "--only-run", "--merge", "--quiet", "--json")
        check_nothing_else(call, "fedstill compare", names, kept)
        planned = None

    from fedstill.compare import comparison_runner
    from fedstill.compare.comparison import read_comparison_folder
    from fedstill.report import write_report

    if only_run == FROM_INPUT and resume is not None:  # a worker of --jobs
        with resumable(resume, "compare"):
            return comparison_runner.serve_numbered_runs(resume, write_report)
    if list_runs:
        folder = resume or out
        return _list_runs(planned or read_comparison_folder(resume or Path()), folder, as_json)
    folder = resume or out_folder(out, f"runs/{planned.name if planned else ''}", "comparison")
    plan = planned or read_comparison_folder(folder)
    if merge:
        comparison_runner.merge_comparisons(plan, folder, [*map(Path, merge)], command=call.command)
        return (_print_json if as_json else _show_comparison)(folder, only)
    with resumable(folder, "compare"):
        if only_run is not None:
            number = read_words(int, [only_run], "--only-run")
            outcome = comparison_runner.run_one(
                plan, folder, number, command=call.command, report=write_report, quiet=quiet
            )
            if outcome.not_run or outcome.not_attacked:
                leave(outcome.not_run or f"not attacked: {outcome.not_attacked}", 1)
            return None
        comparison_runner.compare(
            plan,
            folder,
            command=call.command,
            report=write_report,
            only=list(only),
            jobs=read_jobs(jobs),
            devices=device_names(devices),
            quiet=quiet,
            bars=not quiet,
        )
    return (_print_json if as_json else _show_comparison)(folder, only)


def device_names(words: Sequence[str]) -> list[str]:
    """Return names of devices, which may be separated by commas.

    >>> device_names(["cuda:0,cuda:1", "cuda:2"])
    ['cuda:0', 'cuda:1', 'cuda:2']
    """
    return [name for word in words for name in word.split(",") if name]


def read_jobs(word: str | None) -> int | str | None:
    """Return the value of ``--jobs``: a number of processes, or a Ray cluster.

    >>> read_jobs("2"), read_jobs("ray"), read_jobs(None)
    (2, 'ray', None)
    """
    return int(word) if word is not None and word.isdecimal() else word


def _require_one_mode(**modes: object) -> None:
    """Refuse options of which one would have no effect."""
    given = [f"--{name.replace('_', '-')}" for name, value in modes.items() if value]
    if len(given) > 1:
        raise ArgumentError(given[1], "given", f"none with {given[0]}")


def _list_runs(comparison: Comparison, folder: Path | None, as_json: bool) -> None:
    """Print all runs of a comparison with their numbers, and which are finished."""
    from fedstill.compare.comparison_runner import numbered_runs

    rows = []
    for number, planned in numbered_runs(comparison):
        finished = folder is not None and (folder / planned.folder / "result.json").exists()
        rows.append((number, planned, "finished" if finished else ""))
    if as_json:
        return print_json([{"run": number, **dataclasses.asdict(planned)} for number, planned, _ in rows])
    cells = [
        (str(number), planned.setting, planned.label, str(planned.seed), state)
        for number, planned, state in rows
    ]
    return print_list(("run", "setting", "method", "seed", "state"), cells)


def list_comparison_options(call: Call) -> str:
    """Return the run options that all methods share, with the base's values, and those of each method."""
    from fedstill.compare.comparison import base_run, is_file_listing_methods, methods_by_label
    from fedstill.runs.spec import from_dict

    names = call.positionals
    base = base_run(names, call.value("--base"))
    planned = any(is_file_listing_methods(each) for each in names)
    tables = {} if planned or not names else methods_by_label(names, {})
    methods = {label: from_dict({"method": table}).method for label, table in tables.items()}
    return shared_options(base, call.overrides, methods)


def shared_options(base: RunSpec, words: Sequence[str], methods: Mapping[str, Method] | None = None) -> str:
    """Return the run options that all methods of a comparison share, and those of each method by label."""
    from fedstill.compare.comparison import PER_RUN_KEYS

    shared = [part for part in dataclasses.fields(base) if part.name not in PER_RUN_KEYS]
    parts = {part.name: getattr(base, part.name) for part in shared}
    types = get_type_hints(type(base))
    own = {re.sub(r"\W", "_", label): method for label, method in (methods or {}).items()}
    form: Any = dataclasses.make_dataclass(
        "Comparison",
        [*((key, types[key]) for key in parts), *((key, type(method)) for key, method in own.items())],
        namespace={"__doc__": type(base).__doc__},
        frozen=True,
    )
    listed = list_options(form(**parts, **own), [in_full(word) for word in words])
    return f"all options of `fedstill run` that hold for all methods, and their values:\n\n{listed}"


def plan_comparison(
    names: Sequence[str],
    call: Call,
    *,
    seeds: int | None = None,
    base: str | None = None,
    data: str | None = None,
    leakage: bool = False,
    quiet: bool = False,
) -> Comparison:
    """Return the comparison that a call describes."""
    if not names:
        raise UsageError("fedstill compare", missing="METHOD|PRESET|FILE.toml")

    from fedstill.compare.comparison import (
        base_run,
        is_file_listing_methods,
        plan_comparison,
        read_comparison,
    )

    prog = f"fedstill compare {' '.join(names)}"
    planned = any(is_file_listing_methods(name) for name in names)
    run = base_run(names, base)  # which also says where modules are looked for
    options, shared = (
        ({}, call.overrides) if planned else _split_off_method_options(call.overrides, names, run, prog)
    )
    words = [*map(in_full, shared), *([] if data is None else ["--data.name", data])]
    changes = changes_of(words, run, call, prog)
    if not planned:
        many = seeds or 1
        plan = plan_comparison(
            names, base=base, seeds=many, changes=changes, options=options, leakage=leakage
        )
        if not quiet:
            run = plan.run_config(plan.planned_runs()[0])
            _print_ignored_settings([name for name in names if name != base], run, based=base is not None)
        return plan
    if len(names) > 1 or base is not None:
        raise ArgumentError("fedstill compare", " ".join(names), "one comparison's file alone, or methods")
    return read_comparison(Path(names[0]), seeds=seeds, changes=changes, leakage=leakage)


def _print_ignored_settings(names: Sequence[str], run: RunSpec, *, based: bool) -> None:
    """Say of a run's file, and of a preset whose data are others, that its method alone is taken."""
    from fedstill.compare.comparison import table_at
    from fedstill.runs import presets
    from fedstill.runs.spec import RunSpec

    data = run.data.registered_name
    for name in names:
        if name.endswith(".toml") or name in presets.names():
            own = table_at(presets.read(name, RunSpec), "data").get("name", data)
            if own != data or (name.endswith(".toml") and not based):
                apart = f", not on its {own}" if own != data else ""
                cure = "" if based else f"; --base {name} takes all else from it, too"
                note = f"Of {name} the method alone is taken: all run on {data}{apart}{cure}."
                print(note, file=sys.stderr)


def _split_off_method_options(
    words: Sequence[str], names: Sequence[str], base: RunSpec, prog: str
) -> tuple[dict[str, dict[str, Any]], Sequence[str]]:
    """Options of one method, as ``--fediod.steps 200``, by label; and the other words."""
    from fedstill.compare.comparison import methods_by_label
    from fedstill.runs.spec import from_dict, to_dict

    own: dict[str, list[str]] = {}
    shared: list[str] = []
    methods = methods_by_label(names, {})
    # A file may be called as a table of all runs is, whose options these are then.
    spelled = {label.replace("-", "_"): label for label in methods if label not in to_dict(base)}
    for option in split_options(words):
        first, dot, rest = option.name.rpartition(".")
        if ":" in first:  # a method of a module, which is called by its class
            called = f"'--{first.rpartition(':')[2]}.{rest}'"
            raise UnknownName("option", option.option, [], suggestion=called)
        label = spelled.get(first, "") if dot else ""
        if dot and not label and first not in to_dict(base):
            meant = [name for name in spelled if first in name.split("_")] or similar_names(first, spelled)
            if len(meant) == 1:
                option_of = f"'--{spelled[meant[0]]}.{rest}'"
                raise UnknownName("option", option.option, [], suggestion=option_of)
        (own.setdefault(label, []) if label else shared).extend(
            [f"--method.{rest}" if label else option.option, *option.values]
        )
    found = {}
    for label, given in own.items():
        try:
            run = changed(from_dict({"method": methods[label]}), given, f"{prog} --{label}")
        except UnknownName as error:
            known = [name for name in error.known if name.startswith("--method.")]
            known.remove("--method.name")
            wrong, *others = [name.replace("--method.", f"--{label}.") for name in (str(error.value), *known)]
            raise UnknownName("option", wrong, others) from error
        table = to_dict(run)["method"]
        names_of = [option.name.removeprefix("method.") for option in split_options(given)]
        found[label] = {name: table[name] for name in names_of}
    return found, shared


def changes_of(words: Sequence[str], base: RunSpec, call: Call, prog: str) -> dict[str, Any]:
    """Run options that hold for all methods, by dotted name, read and checked as those of a run are."""
    from fedstill.attacks.attack import ATTACKS
    from fedstill.compare.comparison import PER_RUN_KEYS
    from fedstill.runs.spec import to_dict

    given = split_options(words)
    for option in given:
        first, _, key = option.name.partition(".")
        if first == "method":
            raise FedstillError(
                f"{option.option} is an option of one method, and a comparison has several: say which, as "
                f"--fediod.{key}, or write a file with methods = [...] and, below [options.METHOD], {key} = "
                "..., and compare that file"
            )
        if first in PER_RUN_KEYS or first in ATTACKS:
            see = "the options of attacks belong to the table [leakage] of a comparison's file"
            raise UnknownName("option", option.option, call.known, see=see if first in ATTACKS else "")
    run = to_dict(changed(base, words, prog, call.known))
    return {option.name: reduce(dict.__getitem__, option.name.split("."), run) for option in given}


def _show_comparison(folder: Path, only: Sequence[str]) -> None:
    """Print a comparison and write its files; leave with 1 where a method that was to run did not."""
    from fedstill.compare import comparison as compare
    from fedstill.compare import comparison_runner
    from fedstill.core.safe_console import SafeConsole
    from fedstill.report.comparison_page import write_comparison
    from fedstill.report.comparison_records import summarize
    from fedstill.report.terminal import print_comparison

    comparison = compare.read_comparison_folder(folder)
    page = write_comparison(folder, comparison)
    summary = summarize(folder, comparison)
    print_comparison(summary, SafeConsole())
    print(f"Report: {page}")
    names = {entry.label: entry.name for entry in summary.entries}
    reasons = comparison_runner.read_not_run(folder)
    asked = [place for place in comparison.planned_runs(only) if place.folder in reasons]
    if lacking := dict.fromkeys(names[place.label] for place in asked):
        leave(f"not all methods ran, the table says why: {', '.join(lacking)}", 1)


def _print_json(folder: Path, only: Sequence[str]) -> None:
    """Write a comparison's files, and print each run's result by its folder; leave with 1 if one that was to
    run has none."""
    from fedstill.compare.comparison import read_comparison_folder
    from fedstill.compare.comparison_runner import read_results
    from fedstill.report.comparison_page import write_comparison

    comparison = read_comparison_folder(folder)
    write_comparison(folder, comparison)
    found = read_results(folder, comparison)
    print_json(found)
    if lacking := [place.folder for place in comparison.planned_runs(only) if place.folder not in found]:
        leave(f"not all methods ran: {', '.join(lacking)}", 1)
