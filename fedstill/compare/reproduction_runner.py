"""Running what a table or figure is made of, its comparison and then its program, into a record."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from fedstill.compare import comparison_runner
from fedstill.compare.comparison import Comparison
from fedstill.compare.reproduction import Record, ReproducedFigure, Reproduction, as_recorded
from fedstill.core.config_tables import changed
from fedstill.core.errors import ArgumentError, RunFolderError
from fedstill.core.json_text import json_text
from fedstill.core.run_writer import write_text
from fedstill.core.toml import Table
from fedstill.core.user_functions import look_in
from fedstill.runs.run import machine

__all__ = ["make"]

ROWS = "rows.json"
WHERE = ("data.root", "public.root", "data.download")  # where the same data lie makes no other table


def make(
    entry: Reproduction,
    scale: str,
    folder: Path,
    *,
    seeds: int | None,
    only: Sequence[str] = (),
    changes: Mapping[str, Any],
    command: str,
    report: Callable[[Path], object],
    figures: Callable[[Path, Comparison], tuple[list[ReproducedFigure], float]],
    quiet: bool = False,
    bars: bool = False,
) -> Record:
    """Run what is missing, and gather its figures.

    Args:
        folder: of all tables' folders; what was made there before is not made again.
        seeds: how many; None: those of the scale.
        only: methods and settings of its comparison (:meth:`.Comparison.places`) to run now.
        changes: run options that hold for all methods of its comparison, by dotted name; a program beside it
            is told ``data.root`` alone.
        command: the command that repeats it, for the reports.
        report: writes the report of a run's folder.
        figures: writes what a comparison's folder shows, and gives the rows of its methods' figures and the
            seconds that its runs took.
        quiet: say nothing of the runs on standard error.
        bars: show each run's own progress bars.

    Raises:
        RunFolderError: what is in the folder was made in another way.
        ArgumentError: ``only``, where a program makes the figures.
        FedstillError: something that cannot run.
    """
    if only and entry.about.program:
        raise ArgumentError(
            "--only", " ".join(only), f"a comparison's: a program makes those of {entry.name}"
        )
    source, about, own = entry.source, entry.about, entry.seeds(scale, seeds)
    root = changes.get("data.root", "")
    runs, rows, seconds = folder / source.called(scale), list[ReproducedFigure](), 0.0
    if source.compares:
        both = {**changes, "public.root": changes.get("public.root", root)} if root else changes
        plain = source.comparison(scale, seeds=seeds, changes=both)
        comparison_runner.compare(
            plain, runs, command=command, report=report, only=only or about.methods, quiet=quiet, bars=bars
        )
        comparison = entry.comparison(scale, seeds=seeds, changes=both)
        own = comparison.seeds
        rows, seconds = figures(runs, comparison)
    if about.program:
        shown = runs if source.compares else None
        found, more = _programmed(entry, scale, own, root, folder / entry.called(scale), shown)
        rows, seconds = found if found or about.runs else rows, seconds + more
    today = datetime.now(timezone.utc).date().isoformat()
    where = f"{machine()}, torch {torch.__version__}"
    other = [" ".join(changed({name: value}, {})) for name, value in changes.items() if name not in WHERE]
    return Record(scale, own, today, where, round(seconds / 60, 1), tuple(rows), tuple(other))


def _programmed(
    entry: Reproduction, scale: str, seeds: tuple[int, ...], root: str, folder: Path, runs: Path | None
) -> tuple[list[ReproducedFigure], float]:
    """The rows of a program, each seed once, and the seconds that it took."""
    arguments = entry.arguments(scale)
    look_in([str(entry.file.parent.resolve())])
    program = importlib.import_module(Path(entry.about.program).stem)
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    seconds = 0.0
    for seed in seeds:
        out = folder / f"seed{seed}"
        out.mkdir(parents=True, exist_ok=True)
        kept = json.loads((out / ROWS).read_text(encoding="utf-8")) if (out / ROWS).exists() else None
        if kept is not None and kept["arguments"] != arguments:
            raise RunFolderError(f"{out} holds figures of other arguments: choose another folder with --out")
        if kept is None or runs is not None:  # what draws from runs is quick, and these may be more by now
            start = time.monotonic()
            about: Table = {} if runs is None else {"runs": runs}
            if entry.about.methods:
                about["methods"] = list(entry.about.methods)
            rows = program.reproduce(root=root, out=out, seed=seed, **about, **arguments)
            kept = {"arguments": arguments, "seconds": time.monotonic() - start, "rows": rows}
            write_text(out / ROWS, json_text(kept, indent=1) + "\n")
        seconds += kept["seconds"]
        for row in kept["rows"]:
            key = (row.get("setting", ""), row["method"], row["figure"])
            found.setdefault(key, {})[seed] = as_recorded(row["value"])
    return [ReproducedFigure(*key, values) for key, values in found.items()], seconds
