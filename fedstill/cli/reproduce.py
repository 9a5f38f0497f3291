"""``fedstill reproduce``: the papers' tables and figures, one command each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill.cli.arguments import ParsedArgs, leave, number
from fedstill.cli.console import print_json, print_list
from fedstill.core.errors import ArgumentError, UnknownName

if TYPE_CHECKING:
    from fedstill.compare.reproduction import Reproduction, ReproductionRecord

ROOT = "runs/reproduce"


def reproduce(args: ParsedArgs) -> None:
    """List the tables and figures, or run one and write the paper's table next to ours."""
    from fedstill.compare.reproduction import find_reproduction
    from fedstill.report.comparison_tables import reproduction_markdown, write_table

    if not args.positionals:
        if lost := [*(option for option in args.options if option != "--json"), *args.overrides]:
            raise ArgumentError("fedstill reproduce", " ".join(lost), "the name of a table or figure first")
        return _print_json() if "--json" in args else _list()
    entry, scale = find_reproduction(args.positionals[0]), args.get("--scale") or "small"
    entry.seeds(scale)  # refuses a scale that it has not
    if "--recorded" in args:
        if lost := [option for option in ("--only", "--seeds", "--record") if option in args]:
            raise ArgumentError("--recorded", " ".join(lost), "none of these, as nothing is run")
        record = entry.record(scale)
        if record is None:
            leave(f"nothing is recorded of {entry.scaled_name(scale)}", 2)
        if "--json" in args:
            return print_json(asdict(record))
        return print(reproduction_markdown(entry, record), end="")
    seeds = number("--seeds", args.get("--seeds"), int, lambda count: count >= 1, "how many: 1 or more")
    if "--plan" in args:
        return print(_plan(entry, scale, seeds, _changes(entry.reproduction_with_runs, scale, args)), end="")
    only = args.options.get("--only", [])
    before = _existing_record(entry, scale, seeds, only) if only and "--record" in args else None
    folder = Path(args.get("--out") or ROOT)
    record = _run_missing_and_read_metrics(entry, scale, seeds, args, folder)
    if before is not None:
        asked = entry.comparison(scale).planned_runs(only)
        record = before.with_updated_rows(record, only, {(place.setting, place.label) for place in asked})
    table = write_table(entry, record, folder / entry.scaled_name(scale))
    if "--record" in args:
        record.write(entry.record_file(scale))
    if "--json" in args:
        return print_json(asdict(record))
    print(table.read_text(encoding="utf-8"), end="")
    print(f"Table: {table}")
    if "--record" in args:
        print(f"Record: {entry.record_file(scale)}")
    return None


def all_options(name: str, args: ParsedArgs) -> str:
    """Return the run's options of a table or figure (default: of any comparison)."""
    from fedstill.cli.compare import shared_options
    from fedstill.compare.comparison import base_run
    from fedstill.compare.reproduction import find_reproduction

    if not args.positionals:
        return shared_options(base_run([]), args.overrides)
    source = find_reproduction(args.positionals[0]).reproduction_with_runs
    if not source.is_comparison:
        return f"{args.positionals[0]} compares no runs: of a run's options it takes --data.root only\n"
    base = base_run([str(source.file)], scale=args.get("--scale") or "small")
    return shared_options(base, args.overrides)


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


def _existing_record(
    entry: Reproduction, scale: str, seeds: int | None, only: Sequence[str]
) -> ReproductionRecord:
    """The record to which rows of these names are added."""
    record = entry.record(scale)
    if record is None:
        allowed = f"what a record has: none is kept of {entry.scaled_name(scale)}"
        raise ArgumentError("--only", " ".join(only), allowed)
    if (own := entry.seeds(scale, seeds)) != record.seeds:
        raise ArgumentError("--seeds", len(own), f"{len(record.seeds)}, as in the record")
    return record


def _list() -> None:
    """Print the content, data, minutes a seed (small scale) and date of each."""
    from fedstill.compare.comparison import SMALL_SCALE
    from fedstill.compare.reproduction import reproductions
    from fedstill.core.text_format import format_count

    rows = []
    for entry in reproductions():
        records = _records(entry)
        recorded = [
            f"{'' if scale == SMALL_SCALE else f'{scale}: '}{record.date}, "
            f"{format_count(len(record.seeds), 'seed')}"
            f"{_count_pairs_in_paper_order(entry, record)}"
            for scale, record in records.items()
        ]
        shows = f"{entry.about.paper}, {entry.about.what}: {entry.about.title}"
        minutes = f"{max(entry.minutes_per_seed(records.get(SMALL_SCALE)), 1):.0f}"
        rows.append((entry.name, shows, ", ".join(entry.data), minutes, "; ".join(recorded) or "-"))
    print_list(
        ("name", "content", "data", "minutes", "recorded; pairs of methods in the paper's order"), rows
    )
    print("Data, and minutes of a seed, are the small scale's: as recorded, or else estimated.")
    print("The data's form: docs/tasks.md")


def _count_pairs_in_paper_order(entry: Reproduction, record: ReproductionRecord) -> str:
    """Return how many pairs of methods are in the paper's order, where it has values."""
    from fedstill.report.comparison_tables import compare_ranking

    order = compare_ranking(record.rows, entry.published(record.scale))
    return f"; {order}" if order.pairs else ""


def _print_json() -> None:
    from fedstill.compare.comparison import SMALL_SCALE
    from fedstill.compare.reproduction import reproductions

    entries = []
    for entry in reproductions():
        about = {key: getattr(entry.about, key) for key in ("paper", "what", "title")}
        records = _records(entry)
        kept = {scale: asdict(record) for scale, record in records.items()}
        minutes = round(entry.minutes_per_seed(records.get(SMALL_SCALE)), 1)
        entries.append(
            {"name": entry.name, **about, "minutes": minutes, "data": list(entry.data), "records": kept}
        )
    print_json(entries)


def _records(entry: Reproduction) -> dict[str, ReproductionRecord]:
    """Return the records by scale."""
    return {scale: record for scale in entry.scales if (record := entry.record(scale)) is not None}


def _run_missing_and_read_metrics(
    entry: Reproduction, scale: str, seeds: int | None, args: ParsedArgs, folder: Path
) -> ReproductionRecord:
    """Run what is missing, and return its metrics."""
    from fedstill.cli.run import resumable
    from fedstill.compare import reproduction
    from fedstill.report import write_report
    from fedstill.report.comparison_page import write_and_collect

    with resumable(folder, again=args.command):
        return reproduction.run_reproduction(
            entry,
            scale,
            folder,
            seeds=seeds,
            only=args.options.get("--only", []),
            changes=_changes(entry.reproduction_with_runs, scale, args),
            command=args.command,
            report=write_report,
            metrics=write_and_collect,
            quiet="--quiet" in args,
            bars=args.show_progress,
        )


def _changes(source: Reproduction, scale: str, args: ParsedArgs) -> dict[str, Any]:
    """Run options by dotted name; what compares no runs has one alone, where the data lie."""
    from fedstill.cli.compare import changes_of
    from fedstill.cli.options import group
    from fedstill.compare.comparison import base_run

    if source.is_comparison:
        base = base_run([str(source.file)], scale=scale)
        return changes_of(args.overrides, base, args, f"fedstill reproduce {args.positionals[0]}")
    changes: dict[str, Any] = {}
    for option in group(args.overrides):
        if option.name != "data.root":
            see = "`fedstill reproduce --help` shows all; of a run's options it takes --data.root only"
            raise UnknownName("option", option.option, [*args.known, "--data.root"], see=see)
        if len(option.values) != 1:
            raise ArgumentError(option.option, " ".join(option.values), "one folder")
        changes[option.name] = option.values[0]
    return changes
