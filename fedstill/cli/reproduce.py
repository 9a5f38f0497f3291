"""``fedstill reproduce``: the papers' tables and figures, one command each."""

from __future__ import annotations

import importlib
import json
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill.cli.arguments import Given, leave, number
from fedstill.core.errors import ArgumentError, RunFolderError

if TYPE_CHECKING:
    from fedstill.compare.comparison import Comparison
    from fedstill.compare.reproduction import Record, Reproduction

ROOT = "runs/reproduce"
ROWS = "rows.json"


def reproduce(given: Given) -> None:
    """List the tables and figures, or run one and write the paper's table with ours beside it."""
    from fedstill.compare.reproduction import named
    from fedstill.report.reproduction_table import markdown

    if not given.places:
        return _list()
    entry, scale = named(given.places[0]), given.get("--scale") or "small"
    seeds = entry.seeds(scale)  # refuses a scale that it has not
    if "--recorded" in given:
        record = entry.record(scale)
        if record is None:
            leave(f"nothing is recorded of {entry.called(scale)}", 2)
        return print(markdown(entry, record), end="")
    count = number("--seeds", given.get("--seeds"), int, lambda count: count >= 1, "how many: 1 or more")
    folder = Path(given.get("--out") or ROOT)
    record = _made(entry, scale, entry.seeds(scale, count) if count else seeds, given, folder)
    table = folder / entry.called(scale) / "table.md"
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text(markdown(entry, record), encoding="utf-8")
    print(table.read_text(encoding="utf-8"), end="")
    print(f"Table: {table}")
    if "--record" in given:
        record.write(entry.record_file(scale))
        print(f"Record: {entry.record_file(scale)}")
    return None


def _list() -> None:
    """Paper, what, the small scale's minutes a seed, when it was recorded, what it shows."""
    from rich.console import Console

    from fedstill.cli.console import columns
    from fedstill.compare.reproduction import reproductions

    table = columns("name", "shows", "scales", "minutes", "recorded")
    for entry in reproductions():
        found = [(scale, entry.record(scale)) for scale in entry.scales]
        told = [
            f"{scale} {record.date} ({len(record.seeds)} seed{'s' if len(record.seeds) > 1 else ''})"
            for scale, record in found
            if record is not None
        ]
        shows = f"{entry.about.paper}, {entry.about.what}: {entry.about.title}"
        minutes = f"{entry.about.minutes:g}"
        table.add_row(entry.name, shows, ", ".join(entry.scales), minutes, ", ".join(told) or "-")
    Console(highlight=False).print(table)
    print("Minutes are of one seed of the small scale, on two cores.")


def _made(entry: Reproduction, scale: str, seeds: tuple[int, ...], given: Given, folder: Path) -> Record:
    """Run what is missing, and gather its figures."""
    import torch

    from fedstill.compare.reproduction import Record, Row
    from fedstill.report.compare_files import summarise
    from fedstill.report.reproduction_table import rows_of
    from fedstill.runs.run import machine

    source, about = entry.source, entry.about
    runs, rows, seconds = folder / source.called(scale), list[Row](), 0.0
    comparison = None
    if source.compares:
        comparison = _compared(entry, scale, len(seeds) if given.get("--seeds") else None, given, runs)
        seeds = comparison.seeds
        summary = summarise(runs, comparison)
        rows = rows_of(summary, comparison.paper)
        for each in summary.entries:
            seconds += sum(run.figure("seconds") or 0.0 for run in each.runs)
    if about.program:
        found, more = _programmed(entry, scale, seeds, given, folder, runs if comparison else None)
        rows, seconds = found if found or about.runs else rows, seconds + more
    today = datetime.now(timezone.utc).date().isoformat()
    where = f"{machine()}, torch {torch.__version__}"
    return Record(scale, seeds, today, where, round(seconds / 60, 1), tuple(rows), _changed(given))


def _compared(entry: Reproduction, scale: str, seeds: int | None, given: Given, runs: Path) -> Comparison:
    """The comparison behind a file, run."""
    from fedstill.cli.compare import changes_of
    from fedstill.cli.run import resumable
    from fedstill.compare import comparison_file, comparison_runner
    from fedstill.report import write_report
    from fedstill.report.compare_files import write_comparison

    source = entry.source
    base = comparison_file.base_run([str(source.file)], scale=scale)
    root = _root(given, True)
    beside = ["--public.root", root] if root and "--public.root" not in given.rest else []
    changes = changes_of([*given.rest, *beside], base, given)
    plain = source.comparison(scale, seeds=seeds, changes=changes)
    with resumable(runs, "compare"):
        comparison_runner.compare(
            plain, runs, command=given.command, report=write_report, quiet="--quiet" in given, bars=given.bars
        )
    write_comparison(runs, plain)
    return entry.comparison(scale, seeds=seeds, changes=changes)


def _programmed(
    entry: Reproduction, scale: str, seeds: tuple[int, ...], given: Given, folder: Path, runs: Path | None
) -> tuple[list[Any], float]:
    """The rows of a program, each seed once, and the seconds that it took."""
    from fedstill.compare.reproduction import Row
    from fedstill.core.run_writer import write_text
    from fedstill.core.user_functions import look_in

    arguments, root = entry.arguments(scale), _root(given, runs is not None)
    look_in([str(entry.file.parent.resolve())])
    program = importlib.import_module(Path(entry.about.program).stem)
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    seconds = 0.0
    for seed in seeds:
        out = folder / entry.called(scale) / f"seed{seed}"
        out.mkdir(parents=True, exist_ok=True)
        kept = json.loads((out / ROWS).read_text(encoding="utf-8")) if (out / ROWS).exists() else None
        if kept is not None and kept["arguments"] != arguments:
            raise RunFolderError(f"{out} holds figures of other arguments: choose another folder with --out")
        if kept is None or runs is not None:  # what draws from runs is quick, and these may be more by now
            start = time.monotonic()
            about = {"runs": runs} if runs is not None else {}
            rows = program.reproduce(root=root, out=out, seed=seed, **about, **arguments)
            kept = {"arguments": arguments, "seconds": time.monotonic() - start, "rows": rows}
            write_text(out / ROWS, json.dumps(kept, indent=1) + "\n")
        seconds += kept["seconds"]
        for row in kept["rows"]:
            key = (row.get("setting", ""), row["method"], row["figure"])
            found.setdefault(key, {})[seed] = round(row["value"], 4)
    return [Row(*key, values) for key, values in found.items()], seconds


def _changed(given: Given) -> tuple[str, ...]:
    """The options that make it another table; where the data lie is none."""
    told: list[str] = []
    for word in given.rest:
        told += [word] if word.startswith("--") or not told else []
        if told[-1] != word:
            told[-1] += f" {word}"
    return tuple(option for option in told if not option.startswith("--data.root"))


def _root(given: Given, compares: bool) -> str:
    """The folder of the data; a program has no other option of a run."""
    words = [part for word in given.rest for part in word.split("=", 1)]
    if compares:
        return words[words.index("--data.root") + 1] if "--data.root" in words else ""
    if words and (len(words) != 2 or words[0] != "--data.root"):
        raise ArgumentError(
            "fedstill reproduce", " ".join(given.rest), "--data.root DIR, of what compares no runs"
        )
    return words[1] if words else ""
