"""``fedstill reproduce``: the papers' tables and figures, one command each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.cli.arguments import Given, leave, number
from fedstill.core.errors import ArgumentError

if TYPE_CHECKING:
    from fedstill.compare.reproduction import Record, Reproduction

ROOT = "runs/reproduce"


def reproduce(given: Given) -> None:
    """List the tables and figures, or run one and write the paper's table with ours beside it."""
    from fedstill.compare.reproduction import named
    from fedstill.report.reproduction_table import markdown, write

    if not given.places:
        return _list()
    entry, scale = named(given.places[0]), given.get("--scale") or "small"
    entry.seeds(scale)  # refuses a scale that it has not
    if "--recorded" in given:
        record = entry.record(scale)
        if record is None:
            leave(f"nothing is recorded of {entry.called(scale)}", 2)
        return print(markdown(entry, record), end="")
    seeds = number("--seeds", given.get("--seeds"), int, lambda count: count >= 1, "how many: 1 or more")
    folder = Path(given.get("--out") or ROOT)
    record = _made(entry, scale, seeds, given, folder)
    table = write(entry, record, folder / entry.called(scale))
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


def _made(entry: Reproduction, scale: str, seeds: int | None, given: Given, folder: Path) -> Record:
    """Run what is missing, and gather its figures."""
    from fedstill.cli.compare import changes_of
    from fedstill.cli.run import resumable
    from fedstill.compare import comparison_file, reproduction_runner
    from fedstill.report import write_report
    from fedstill.report.reproduction_table import compared

    source = entry.source
    root, changes = _root(given, source.compares), {}
    if source.compares:
        base = comparison_file.base_run([str(source.file)], scale=scale)
        changes = changes_of(given.rest, base, given)
    with resumable(folder / source.called(scale), "compare"):
        return reproduction_runner.make(
            entry,
            scale,
            folder,
            seeds=seeds,
            changes=changes,
            root=root,
            changed=_changed(given),
            command=given.command,
            report=write_report,
            figures=compared,
            quiet="--quiet" in given,
            bars=given.bars,
        )


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
