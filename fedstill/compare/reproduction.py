"""The papers' tables and figures: one file of ``experiments/`` each, and what was recorded of it.

A file says in ``[reproduces]`` which table or figure it is about. Most are comparisons; what is none names a
``program`` beside it, whose function ``reproduce`` gives rows of figures and writes pictures; ``runs`` names
another such file, whose runs this one shows in another way. ``[published]`` has the paper's own figures, and
``[scale.paper]`` what the published setting changes. A record is what one scale of a file came to, with date
and machine, in ``records`` beside the file.

Running what a table or figure is made of, its comparison and then its program, into a record.
"""

from __future__ import annotations

import importlib
import json
import statistics
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Gt, MinLen

from fedstill.compare import comparison_file, comparison_runner
from fedstill.compare.comparison import Comparison
from fedstill.compare.comparison_file import METHOD_KEYS, SMALL_SCALE, at_scale, expand_short_forms
from fedstill.core import toml
from fedstill.core.config_tables import changed_options, read_table
from fedstill.core.errors import ArgumentError, RunFolderError, UnknownName
from fedstill.core.options import CheckedOptions
from fedstill.core.registry import add_search_folders
from fedstill.core.run_writer import write_text
from fedstill.core.text_format import json_text
from fedstill.core.toml import Table
from fedstill.data.public import BUILTIN_SOURCES, NONE
from fedstill.runs import presets
from fedstill.runs.config import PaperMetric, RunConfig
from fedstill.runs.run import machine

PACKAGE = Path(__file__).parents[1]
NonEmptyText = Annotated[str, MinLen(1), "some words"]


@dataclass(frozen=True, kw_only=True)
class ReproductionInfo(CheckedOptions):
    """What a file says of the table or figure that it reproduces."""

    section: ClassVar[str] = "reproduces"

    paper: NonEmptyText
    what: NonEmptyText  # as "Table 6"
    title: NonEmptyText  # what it shows, in a few words
    reduction: NonEmptyText  # how the small scale differs from the published setting
    minutes: Annotated[float, Gt(0)]  # a seed of the small scale, on two cores
    program: str = ""  # a module beside the file
    runs: str = ""  # the name of another file, whose runs this one shows
    methods: tuple[str, ...] = ()  # of these runs: those that it shows; none: all
    data: tuple[str, ...] = ()  # of a program without runs: the data sets that it needs


def round_metric(value: float) -> float:
    """A figure as a record keeps it: to four decimals, or four digits where it is small.

    >>> round_metric(81.23456), round_metric(0.00041239)
    (81.2346, 0.0004124)
    """
    return round(value, 4) if abs(value) >= 0.1 else float(f"{value:.4g}")


@dataclass(frozen=True)
class ReproducedMetric:
    """One method's figure in one setting, by seed.

    >>> ReproducedMetric("", "fedkd", "accuracy", {0: 80.0, 1: 82.0}).mean_and_std()
    (81.0, 1.4142135623730951)
    """

    setting: str
    method: str
    metric: str
    values: Mapping[int, float]

    @property
    def row_key(self) -> tuple[str, str]:
        """Its line in a table."""
        return self.setting, self.method

    def mean_and_std(self) -> tuple[float, float | None]:
        """Mean and sample deviation over seeds."""
        values = list(self.values.values())
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


@dataclass(frozen=True)
class ReproductionRecord:
    """What one scale of a file came to.

    Args:
        scale: small, or one that the file names.
        date: of the day on which it was written, as 2026-11-24.
        minutes: of all runs together; None: not known.
        changed: options that the command line gave.
        note: what else a reader must know.
    """

    scale: str
    seeds: tuple[int, ...]
    date: str
    machine: str
    minutes: float | None
    rows: tuple[ReproducedMetric, ...]
    changed: tuple[str, ...] = ()
    note: str = ""

    @classmethod
    def read(cls, file: Path) -> ReproductionRecord | None:
        """A record; None where there is none.

        Raises:
            RunFolderError: the file is none.
        """
        if not file.exists():
            return None
        try:
            told = json.loads(toml.read_text(file))
            rows = [
                ReproducedMetric(
                    **{**row, "values": {int(seed): value for seed, value in row["values"].items()}}
                )
                for row in told.pop("rows")
            ]
            return cls(
                **{**told, "seeds": tuple(told["seeds"]), "changed": tuple(told.get("changed", ()))},
                rows=tuple(rows),
            )
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise RunFolderError(f"{file} is no record: {error}") from error

    def with_updated_rows(
        self, newer: ReproductionRecord, only: Sequence[str], row_keys: Container[tuple[str, str]]
    ) -> ReproductionRecord:
        """This one with a newer one's rows of some places for its own, which the note tells.

        Args:
            only: the names by which they were asked for.
            row_keys: their settings and methods.
        """
        newer = replace(newer, rows=tuple(row for row in newer.rows if row.row_key in row_keys))
        order = list(dict.fromkeys(row.row_key for row in (*self.rows, *newer.rows)))
        anew = {row.row_key for row in newer.rows}
        rows = [*(row for row in self.rows if row.row_key not in anew), *newer.rows]
        how = "" if newer.changed == self.changed else f", with {', '.join(newer.changed) or 'no option'}"
        note = f"{self.note} Run anew on {newer.date}, {newer.machine}{how}: {', '.join(only)}.".strip()
        return replace(self, rows=tuple(sorted(rows, key=lambda row: order.index(row.row_key))), note=note)

    def write(self, file: Path) -> None:
        """Keep it, one line a row."""
        told = {key: value for key, value in asdict(self).items() if key != "rows" and value not in ("", ())}
        head = json.dumps(told, indent=2, ensure_ascii=False).removesuffix("\n}")
        rows = [{**asdict(row), "values": dict(sorted(row.values.items()))} for row in self.rows]
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, f"{head},\n" + '  "rows": [\n    ' + ",\n    ".join(lines) + "\n  ]\n}\n")


@dataclass(frozen=True)
class Reproduction:
    """One file: the table or figure that it reproduces."""

    file: Path
    about: ReproductionInfo
    table: Table

    @property
    def name(self) -> str:
        """As the command line has it: fediod-table6."""
        return self.file.stem.replace("_", "-")

    @property
    def scales(self) -> tuple[str, ...]:
        """Small, and those that the file names."""
        return (SMALL_SCALE, *self.table.get("scale", {}))

    @property
    def is_comparison(self) -> bool:
        """Whether the file is a comparison itself."""
        return any(key in self.table for key in METHOD_KEYS)

    @cached_property
    def data(self) -> tuple[str, ...]:
        """The data sets that the small scale needs, private and public."""
        source = self.source
        if not source.is_comparison:
            return source.about.data
        whole = expand_short_forms(source.table)
        base = presets.filled(whole.get("base", {}), RunConfig, source.file.parent)
        parts = [base, *whole.get("settings", [])]
        names = [part.get(key, {}).get("name", NONE) for part in parts for key in ("data", "public")]
        return tuple(name for name in dict.fromkeys(names) if name not in BUILTIN_SOURCES)

    @cached_property
    def source(self) -> Reproduction:
        """The file whose runs are shown: this one, unless it names another."""
        return find_reproduction(self.about.runs, self.file.parent) if self.about.runs else self

    def scaled_name(self, scale: str) -> str:
        """The name with its scale, unless it is the small one: of folders and records."""
        return self.name if scale == SMALL_SCALE else f"{self.name}-{scale}"

    def record_file(self, scale: str) -> Path:
        return self.file.parent / "records" / f"{self.scaled_name(scale).replace('-', '_')}.json"

    def record(self, scale: str = SMALL_SCALE) -> ReproductionRecord | None:
        """What was recorded at a scale."""
        return ReproductionRecord.read(self.record_file(scale))

    def minutes(self, record: ReproductionRecord | None) -> float:
        """Of a seed of the small scale: as its record has it, or else the file's estimate."""
        if record is None or record.minutes is None:
            return self.about.minutes
        return record.minutes / max(len(record.seeds), 1)

    def seeds(self, scale: str, count: int | None = None) -> tuple[int, ...]:
        """Those of a scale, or as many as are asked for."""
        own = count or at_scale(self.table, self._check_scale(scale)).get("seeds", 1)
        return tuple(range(own)) if isinstance(own, int) else tuple(own)

    def arguments(self, scale: str) -> Table:
        """What the program is called with, beside data, folders and seed."""
        return dict(at_scale(self.table, self._check_scale(scale)).get("arguments", {}))

    def comparison(
        self, scale: str, *, seeds: int | None = None, changes: Mapping[str, Any] | None = None
    ) -> Comparison:
        """The comparison behind it, with the figures that this file publishes.

        Raises:
            FedstillError: it is none.
        """
        source = self.source
        comparison = comparison_file.read_comparison(
            source.file, seeds=seeds, changes=changes, scale=source._check_scale(scale)
        )
        return comparison if source is self else replace(comparison, paper=tuple(self.published(scale)))

    def published(self, scale: str = SMALL_SCALE) -> list[PaperMetric]:
        """The paper's own figures."""
        told = expand_short_forms(self.table, self._check_scale(scale)).get("paper", [])
        return [read_table(PaperMetric, metric, "paper.") for metric in told]

    def _check_scale(self, scale: str) -> str:
        """A scale that the file has."""
        if scale not in self.scales:
            raise UnknownName("scale", scale, self.scales)
        return scale


def experiments_folder() -> Path:
    """Where the papers' files are: in the installed package, or beside it in a checkout."""
    inside = PACKAGE / "experiments"
    return inside if inside.is_dir() else PACKAGE.parent / "experiments"


def reproductions(where: Path | None = None) -> list[Reproduction]:
    """All files that reproduce something, by paper and then as the paper counts.

    Raises:
        FedstillError: one of them cannot be read.
    """
    found = [_read(file) for file in sorted((where or experiments_folder()).glob("*.toml"))]
    return sorted(filter(None, found), key=lambda entry: _sort_key(entry.about))


def find_reproduction(name: str, folder: Path | None = None) -> Reproduction:
    """The file of a table or figure, by its name or by its path.

    Raises:
        UnknownName: there is none of that name.
        ArgumentError: a file that reproduces nothing.
    """
    if name.endswith(".toml"):
        found = _read(Path(name))
        if found is None:
            raise ArgumentError("fedstill reproduce", name, "a file with a table [reproduces]")
        return found
    known = {entry.name: entry for entry in reproductions(folder)}
    if name not in known:
        raise UnknownName("table or figure", name, known, see="fedstill reproduce lists them")
    return known[name]


def _read(file: Path) -> Reproduction | None:
    table = toml.read(file)
    if "reproduces" not in table:
        return None
    return Reproduction(file, read_table(ReproductionInfo, table["reproduces"], "reproduces."), table)


def _sort_key(about: ReproductionInfo) -> tuple[str, bool, int]:
    digits = "".join(filter(str.isdigit, about.what.partition(",")[0].partition("(")[0]))
    return about.paper, not about.what.startswith("Table"), int(digits or 0)


__all__ = ["run_reproduction"]

ROWS_FILE = "rows.json"
LOCATION_OPTIONS = (
    "data.root",
    "public.root",
    "data.download",
)  # where the same data lie makes no other table


def run_reproduction(
    entry: Reproduction,
    scale: str,
    folder: Path,
    *,
    seeds: int | None,
    only: Sequence[str] = (),
    changes: Mapping[str, Any],
    command: str,
    report: Callable[[Path], object],
    metrics: Callable[[Path, Comparison], tuple[list[ReproducedMetric], float]],
    quiet: bool = False,
    bars: bool = False,
) -> ReproductionRecord:
    """Run what is missing, and gather its figures.

    Args:
        folder: of all tables' folders; what was made there before is not made again.
        seeds: how many; None: those of the scale.
        only: methods and settings of its comparison (:meth:`.Comparison.places`) to run now.
        changes: run options that hold for all methods of its comparison, by dotted name; a program beside it
            is told ``data.root`` alone.
        command: the command that repeats it, for the reports.
        report: writes the report of a run's folder.
        metrics: writes what a comparison's folder shows, and gives the rows of its methods' figures and the
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
    runs, rows, seconds = folder / source.scaled_name(scale), list[ReproducedMetric](), 0.0
    if source.is_comparison:
        both = {**changes, "public.root": changes.get("public.root", root)} if root else changes
        plain = source.comparison(scale, seeds=seeds, changes=both)
        comparison_runner.compare(
            plain, runs, command=command, report=report, only=only or about.methods, quiet=quiet, bars=bars
        )
        comparison = entry.comparison(scale, seeds=seeds, changes=both)
        own = comparison.seeds
        rows, seconds = metrics(runs, comparison)
    if about.program:
        shown = runs if source.is_comparison else None
        found, more = _run_program(entry, scale, own, root, folder / entry.scaled_name(scale), shown)
        rows, seconds = found if found or about.runs else rows, seconds + more
    today = datetime.now(timezone.utc).date().isoformat()
    where = f"{machine()}, torch {torch.__version__}"
    other = [
        " ".join(changed_options({name: value}, {}))
        for name, value in changes.items()
        if name not in LOCATION_OPTIONS
    ]
    return ReproductionRecord(scale, own, today, where, round(seconds / 60, 1), tuple(rows), tuple(other))


def _run_program(
    entry: Reproduction, scale: str, seeds: tuple[int, ...], root: str, folder: Path, runs: Path | None
) -> tuple[list[ReproducedMetric], float]:
    """The rows of a program, each seed once, and the seconds that it took."""
    arguments = entry.arguments(scale)
    add_search_folders([str(entry.file.parent.resolve())])
    program = importlib.import_module(Path(entry.about.program).stem)
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    seconds = 0.0
    for seed in seeds:
        out = folder / f"seed{seed}"
        out.mkdir(parents=True, exist_ok=True)
        kept = (
            json.loads((out / ROWS_FILE).read_text(encoding="utf-8")) if (out / ROWS_FILE).exists() else None
        )
        if kept is not None and kept["arguments"] != arguments:
            raise RunFolderError(f"{out} holds figures of other arguments: choose another folder with --out")
        if kept is None or runs is not None:  # what draws from runs is quick, and these may be more by now
            start = time.monotonic()
            about: Table = {} if runs is None else {"runs": runs}
            if entry.about.methods:
                about["methods"] = list(entry.about.methods)
            rows = program.reproduce(root=root, out=out, seed=seed, **about, **arguments)
            kept = {"arguments": arguments, "seconds": time.monotonic() - start, "rows": rows}
            write_text(out / ROWS_FILE, json_text(kept, indent=1) + "\n")
        seconds += kept["seconds"]
        for row in kept["rows"]:
            key = (row.get("setting", ""), row["method"], row["metric"])
            found.setdefault(key, {})[seed] = round_metric(row["value"])
    return [ReproducedMetric(*key, values) for key, values in found.items()], seconds
