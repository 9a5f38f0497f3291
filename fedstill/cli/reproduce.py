"""``fedstill reproduce``: the papers' tables and figures, one command each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill.cli.arguments import AsJson, Call, CalledAs, Quiet, split_options
from fedstill.cli.compare import changes_of, device_names, read_jobs, shared_options
from fedstill.cli.console import leave, print_json, print_list
from fedstill.cli.run import resumable
from fedstill.cli.suite import SuiteCall, run_suite
from fedstill.core.errors import ArgumentError, UnknownName
from fedstill.core.options import PositiveInt
from fedstill.core.private_files import alone_in
from fedstill.core.text_format import format_count

if TYPE_CHECKING:
    from fedstill.compare.reproduction import Reproduction, ReproductionRecord

ROOT = "runs/reproduce"
SMALL = "small"  # scale of a table's file itself


def reproduce(
    name: str | None = None,
    /,
    *,
    scale: str = SMALL,
    seeds: PositiveInt | None = None,
    out: Path = Path(ROOT),
    part: tuple[str, ...] = (),
    method: tuple[str, ...] = (),
    only: tuple[str, ...] = (),
    jobs: str | None = None,
    devices: tuple[str, ...] = (),
    plan: bool = False,
    record: bool = False,
    recorded: bool = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    call: CalledAs,
) -> None:
    """List the papers' tables and figures, or rerun one of them or the benchmark suite.

    example: fedstill reproduce fediod-table1 --seeds 3

    It takes options of `fedstill run`, as --data.root DIR (--help-all lists all).

    Args:
        name: a table or figure, or its FILE.toml; suite-v1: the benchmark suite
        scale: small (default, for two CPU cores), features (heads on a frozen backbone) or paper (for a GPU)
        seeds: number of seeds
        out: folder of the results (default: runs/reproduce)
        part: of suite-v1, run only these parts
        method: of suite-v1, run these methods instead (names or MODULE:CLASS), to compare them with the
            recorded ones
        only: run only these methods or settings
        jobs: number of runs at once, each in a process of its own (default: 1, or one for each device);
            ray: tasks of a Ray cluster
        devices: GPUs of these processes in turn, as cuda:0,cuda:1
        plan: print the configuration of all runs as TOML, and run nothing
        record: write the metrics to the record file next to the table's file
        recorded: print the recorded table with the paper's values, and run nothing
    """
    from fedstill.compare.reproduction import find_reproduction
    from fedstill.compare.suite import SUITE
    from fedstill.report.comparison_tables import reproduction_markdown, write_table

    if name == SUITE:
        if scale != SMALL:
            raise ArgumentError("--scale", scale, f"none: {SUITE} has parts (--part)")
        arguments = SuiteCall(
            parts=part,
            methods=method,
            seeds=seeds,
            out=out,
            only=only,
            jobs=jobs,
            devices=devices,
            plan=plan,
            record=record,
            recorded=recorded,
            quiet=quiet,
            as_json=as_json,
        )
        return run_suite(arguments, call)
    for option, extra in (("--part", part), ("--method", method)):
        if extra:
            raise ArgumentError(option, " ".join(extra), f"none: it is an option of {SUITE}")
    if name is None:
        if lost := [word for word in [*call.words, *call.overrides] if word != "--json"]:
            raise ArgumentError("fedstill reproduce", " ".join(lost), "the name of a table or figure first")
        return _print_json() if as_json else _list()
    entry = find_reproduction(name)
    entry.seeds(scale)  # refuses a scale that it has not
    if recorded:
        if only or record or seeds is not None:
            given = " ".join(word for word in call.words if word in ("--only", "--seeds", "--record"))
            raise ArgumentError("--recorded", given, "none of these, as nothing is run")
        kept = entry.record(scale)
        if kept is None:
            leave(f"nothing is recorded of {entry.scaled_name(scale)}", 2)
        if as_json:
            return print_json(asdict(kept))
        return print(reproduction_markdown(entry, kept), end="")
    changes = _changes(entry.reproduction_with_runs, scale, name, call)
    if plan:
        return print(_plan(entry, scale, seeds, changes), end="")
    if only and record:
        _existing_record(entry, scale, seeds)  # refused before the runs
    measured = _run_missing_and_read_metrics(
        entry, scale, seeds, only, read_jobs(jobs), device_names(devices), changes, out, call, quiet
    )
    if record:
        with alone_in(entry.record_file(scale).parent):  # other commands add rows, too
            if only:
                asked = entry.comparison(scale).planned_runs(only)
                rows = {(place.setting, place.label) for place in asked}
                before = _existing_record(entry, scale, seeds)
                measured = (
                    measured.part(only, rows)
                    if before is None
                    else before.with_updated_rows(measured, only, rows)
                )
            measured.write(entry.record_file(scale))
    table = write_table(entry, measured, out / entry.scaled_name(scale))
    if as_json:
        return print_json(asdict(measured))
    print(table.read_text(encoding="utf-8"), end="")
    print(f"Table: {table}")
    if record:
        print(f"Record: {entry.record_file(scale)}")
    return None


def list_reproduction_options(call: Call) -> str:
    """Return the run's options of a table or figure (default: of any comparison)."""
    from fedstill.compare.comparison import base_run
    from fedstill.compare.reproduction import find_reproduction
    from fedstill.compare.suite import SUITE

    if not call.positionals or call.positionals[0] == SUITE:
        return shared_options(base_run([]), call.overrides)
    source = find_reproduction(call.positionals[0]).reproduction_with_runs
    if not source.is_comparison:
        return f"{call.positionals[0]} compares no runs: of a run's options it takes --data.root only\n"
    base = base_run([str(source.file)], scale=call.value("--scale") or "small")
    return shared_options(base, call.overrides)


def _plan(entry: Reproduction, scale: str, seeds: int | None, changes: dict[str, Any]) -> str:
    """Return the complete configuration of the runs, and the arguments of the table's program, as TOML."""
    import tomli_w

    text = ""
    if entry.reproduction_with_runs.is_comparison:
        text = replace(
            entry.reproduction_with_runs.comparison(scale, seeds=seeds, changes=changes), paper=()
        ).to_toml()
    if not entry.about.program:
        return text
    arguments = tomli_w.dumps({"arguments": entry.program_arguments(scale)})
    return f"{text}# arguments of {entry.about.program}\n{arguments}"


def _existing_record(entry: Reproduction, scale: str, seeds: int | None) -> ReproductionRecord | None:
    """Return the record to which rows are added, or None."""
    record = entry.record(scale)
    if record is not None and (own := entry.seeds(scale, seeds)) != record.seeds:
        raise ArgumentError("--seeds", len(own), f"{len(record.seeds)}, as in the record")
    return record


def _list() -> None:
    """Print the content, data, minutes a seed (small scale), date and verdict of each."""
    from fedstill.compare.comparison import SMALL_SCALE
    from fedstill.compare.reproduction import reproductions
    from fedstill.compare.suite import SUITE, suite_parts

    rows = []
    for entry in reproductions():
        records = entry.records()
        recorded = [
            f"{'' if scale == SMALL_SCALE else f'{scale}: '}{record.date}, "
            f"{format_count(len(record.seeds), 'seed')}"
            f"{_count_pairs_in_paper_order(entry, record)}"
            for scale, record in records.items()
        ]
        shows = f"{entry.about.paper}, {entry.about.what}: {entry.about.title}"
        minutes = f"{max(entry.minutes_per_seed(records.get(SMALL_SCALE)), 1):.0f}"
        verdict = entry.about.verdict or "-"
        rows.append((entry.name, shows, ", ".join(entry.data), minutes, "; ".join(recorded) or "-", verdict))
    header = (
        "name",
        "content",
        "data",
        "minutes",
        "recorded; pairs of methods in the paper's order",
        "verdict",
    )
    print_list(header, rows)
    parts = ", ".join(part.name for part in suite_parts())
    print(f"{SUITE} is the benchmark suite, with the parts {parts} (--part).")
    print("Data, and minutes of a seed, are the small scale's: as recorded, or else estimated.")
    print("The data's form: docs/tasks.md")


def _count_pairs_in_paper_order(entry: Reproduction, record: ReproductionRecord) -> str:
    """Return how many pairs of methods are in the paper's order, where it has values."""
    from fedstill.report.comparison_tables import compare_ranking

    order = compare_ranking(record.unflagged_rows, entry.published(record.scale))
    return f"; {order}" if order.pairs else ""


def _print_json() -> None:
    from fedstill.compare.comparison import SMALL_SCALE
    from fedstill.compare.reproduction import reproductions

    entries = []
    for entry in reproductions():
        about = {key: getattr(entry.about, key) for key in ("paper", "what", "title", "verdict")}
        records = entry.records()
        kept = {scale: asdict(record) for scale, record in records.items()}
        minutes = round(entry.minutes_per_seed(records.get(SMALL_SCALE)), 1)
        entries.append(
            {"name": entry.name, **about, "minutes": minutes, "data": list(entry.data), "records": kept}
        )
    print_json(entries)


def _run_missing_and_read_metrics(
    entry: Reproduction,
    scale: str,
    seeds: int | None,
    only: Sequence[str],
    jobs: int | str | None,
    devices: Sequence[str],
    changes: dict[str, Any],
    folder: Path,
    call: Call,
    quiet: bool,
) -> ReproductionRecord:
    """Run what is missing, and return its metrics."""
    from fedstill.compare import reproduction
    from fedstill.report import write_report
    from fedstill.report.comparison_page import write_and_collect

    with resumable(folder, again=call.command):
        return reproduction.run_reproduction(
            entry,
            scale,
            folder,
            seeds=seeds,
            only=list(only),
            jobs=jobs,
            devices=devices,
            changes=changes,
            command=call.command,
            report=write_report,
            metrics=write_and_collect,
            quiet=quiet,
            bars=not quiet,
        )


def _changes(source: Reproduction, scale: str, name: str, call: Call) -> dict[str, Any]:
    """Run options by dotted name; what compares no runs has one alone, where the data lie."""
    from fedstill.compare.comparison import base_run

    if source.is_comparison:
        base = base_run([str(source.file)], scale=scale)
        return changes_of(call.overrides, base, call, f"fedstill reproduce {name}")
    changes: dict[str, Any] = {}
    for option in split_options(call.overrides):
        if option.name != "data.root":
            see = "`fedstill reproduce --help` shows all; of a run's options it takes --data.root only"
            raise UnknownName("option", option.option, [*call.known, "--data.root"], see=see)
        if len(option.values) != 1:
            raise ArgumentError(option.option, " ".join(option.values), "one folder")
        changes[option.name] = option.values[0]
    return changes
