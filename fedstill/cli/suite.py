"""``fedstill reproduce suite-v1``: the benchmark suite, its parts and their leaderboards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.cli.arguments import Call
from fedstill.cli.compare import changes_of, device_names, read_jobs
from fedstill.cli.console import print_json
from fedstill.cli.run import resumable
from fedstill.core.errors import ArgumentError
from fedstill.core.private_files import alone_in

if TYPE_CHECKING:
    from fedstill.compare.comparison import Comparison
    from fedstill.compare.suite import SuitePart, SuiteRow

ROWS_FILE = "rows.jsonl"


@dataclass(frozen=True, kw_only=True)
class SuiteCall:
    """Arguments of ``fedstill reproduce suite-v1``; :func:`.reproduce` describes them."""

    parts: Sequence[str]
    methods: Sequence[str]
    seeds: int | None
    out: Path
    only: Sequence[str]
    jobs: str | None
    devices: Sequence[str]
    plan: bool
    record: bool
    recorded: bool
    quiet: bool
    as_json: bool


def run_suite(arguments: SuiteCall, call: Call) -> None:
    """Run parts of the suite, or print their plans or recorded leaderboards."""
    from fedstill.compare.comparison import base_run, slug
    from fedstill.compare.suite import SUITE, changes_measurement, find_parts, merge_rows, write_rows
    from fedstill.core.config_tables import to_table

    parts = find_parts(arguments.parts)
    shown: list[tuple[SuitePart, list[SuiteRow]]] = []
    if arguments.plan and len(parts) > 1:
        raise ArgumentError("--plan", "without --part", "one part (--part)")
    for part in parts:
        if arguments.recorded:
            shown.append((part, part.recorded_rows()))
            continue
        changes = changes_of(call.overrides, base_run([str(part.file)]), call, f"fedstill reproduce {SUITE}")
        changed = {name: str(value) for name, value in changes.items() if changes_measurement(name)}
        if arguments.record and changed:
            raise ArgumentError("--record", f"with --{next(iter(changed))}", "the part's own options")
        plan = part.comparison(arguments.methods, seeds=arguments.seeds, changes=changes)
        if arguments.plan:
            return print(plan.to_toml(), end="")
        labels = plan.methods if arguments.methods else ()
        options = [f"{name}-{value}" for name, value in sorted(changed.items())]
        folder = arguments.out / SUITE / slug("-".join([part.name, *labels, *options]))
        rows = _run_part(part, plan, folder, arguments, call)
        write_rows(folder / ROWS_FILE, rows)
        if arguments.record:
            with alone_in(part.results_file.parent):  # other commands add rows, too
                write_rows(part.results_file, merge_rows(part.recorded_rows(), rows))
        # Other options give other conditions than those of the recorded rows.
        shown.append((part, rows if changed else merge_rows(part.recorded_rows(), rows)))
        if not arguments.as_json:
            print(f"Rows: {folder / ROWS_FILE}")
            print(f"Report: {folder / 'compare.html'}\n")
    if arguments.as_json:
        return print_json([to_table(row) for _, rows in shown for row in rows])
    for part, rows in shown:
        _print_leaderboard(part, rows)
    return None


def _run_part(
    part: SuitePart, plan: Comparison, folder: Path, arguments: SuiteCall, call: Call
) -> list[SuiteRow]:
    from fedstill.compare import comparison_runner
    from fedstill.report import write_report
    from fedstill.report.comparison_page import write_comparison
    from fedstill.report.suite_results import collect_rows

    with resumable(folder, again=call.command):
        comparison_runner.compare(
            plan,
            folder,
            command=call.command,
            report=write_report,
            only=arguments.only,
            jobs=read_jobs(arguments.jobs),
            devices=device_names(arguments.devices),
            quiet=arguments.quiet,
            bars=not arguments.quiet,
        )
    write_comparison(folder, plan)
    return collect_rows(part, plan, folder)


def _print_leaderboard(part: SuitePart, rows: Sequence[SuiteRow]) -> None:
    from fedstill.report.suite_results import leaderboard, leaderboard_notes
    from fedstill.report.tables import markdown

    lines = [f"# {part.name}", "", *markdown(leaderboard(part, rows)), "", *leaderboard_notes(part, rows), ""]
    print("\n".join(lines))
