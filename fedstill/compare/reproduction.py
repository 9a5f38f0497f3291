"""Reproduce the papers' tables and figures from files in ``experiments/``, and record the results.

``[reproduces]`` in a file names the table or figure. Most files are comparisons. Others name a ``program``, a
module next to the file whose function ``reproduce`` returns rows of metrics and draws pictures. ``runs``
names another such file whose runs are shown in another form. ``[published]`` has the paper's metrics, and
``[scale.paper]`` the options of the published setting. ``[scale.features]`` has heads on a frozen pretrained
backbone, which are not the paper's networks: ``[scale.features.reproduces]`` says so next to its results. A
record is the result at one scale of a file, with date and machine, in the folder ``records`` next to the
file.
"""

from __future__ import annotations

import importlib
import json
import statistics
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Gt, MinLen

from fedstill.compare import comparison_runner
from fedstill.compare.comparison import (
    METHOD_KEYS,
    SMALL_SCALE,
    Comparison,
    at_scale,
    expand_short_forms,
    read_comparison,
)
from fedstill.compare.method_forms import FormName, MethodForm, read_forms
from fedstill.core.config_tables import Table, changed_options_as_cli_words, read_table, read_text, read_toml
from fedstill.core.errors import ArgumentError, RunFolderError, UnknownName
from fedstill.core.options import CheckedOptions
from fedstill.core.registry import add_search_folders
from fedstill.core.run_writer import write_text
from fedstill.core.text_format import json_text
from fedstill.data.public import BUILTIN_SOURCES, NONE
from fedstill.runs import presets
from fedstill.runs.run import machine
from fedstill.runs.spec import PaperMetric, RunSpec

PACKAGE = Path(__file__).parents[1]
NonEmptyText = Annotated[str, MinLen(1), "some words"]
NOT_AT_THIS_SCALE = "not at this scale"
Verdict = Literal["reproduced", "partly", "not", "not at this scale", ""]


@dataclass(frozen=True, kw_only=True)
class CitedRow(CheckedOptions):
    """A row of another table's record, shown next to the rows of this one."""

    section: ClassVar[str] = "reproduces.cites"

    record: NonEmptyText  # name of the other file, as fediod-table6
    row: NonEmptyText  # method in that record
    setting: str = ""  # setting in that record
    under: str = ""  # setting of this table
    name: NonEmptyText  # name of the row here
    form: FormName = "fedstill"
    differs: str = ""  # how it differs from the other rows' conditions


@dataclass(frozen=True, kw_only=True)
class HeadlineRow(CheckedOptions):
    """A metric that stands for a table in the summary of all tables."""

    section: ClassVar[str] = "reproduces.headline"

    row: NonEmptyText  # method in the record
    metric: str = "accuracy"
    setting: str = ""


@dataclass(frozen=True, kw_only=True)
class ScaleNotes(CheckedOptions):
    """Remarks on the results at one scale: ``[scale.NAME.reproduces]``, and ``[reproduces]`` for small."""

    section: ClassVar[str] = "reproduces"

    reduction: NonEmptyText  # how the scale differs from the published setting
    verdict: Verdict = ""  # whether the scale's record agrees with the paper; empty without a record
    why: str = ""  # one paragraph on the verdict
    headline: tuple[HeadlineRow, ...] = ()  # rows of the record in the summary


@dataclass(frozen=True, kw_only=True)
class ReproductionTarget(ScaleNotes):
    """The table or figure that a file reproduces, and remarks on the small scale."""

    paper: NonEmptyText
    what: NonEmptyText  # for example "Table 6"
    title: NonEmptyText  # its content in a few words
    minutes: Annotated[float, Gt(0)]  # of one seed at the small scale, on two cores
    program: str = ""  # a module next to the file
    runs: str = ""  # name of another file whose runs are shown
    methods: tuple[str, ...] = ()  # shown methods of these runs; empty: all
    data: tuple[str, ...] = ()  # data sets of a program without runs
    claim: str = ""  # the paper's result in a few words, if it prints no number for the headline
    cites: tuple[CitedRow, ...] = ()  # rows of other records next to the small scale's


def round_metric(value: float) -> float:
    """Round a metric for a record: to four decimals, or to four digits if it is small.

    >>> round_metric(81.23456), round_metric(0.00041239)
    (81.2346, 0.0004124)
    """
    return round(value, 4) if abs(value) >= 0.1 else float(f"{value:.4g}")


@dataclass(frozen=True)
class ReproducedMetric:
    """A metric of one method in one setting, by seed.

    >>> ReproducedMetric("", "fedkd", "accuracy", {0: 80.0, 1: 82.0}).mean_and_std()
    (81.0, 1.4142135623730951)
    """

    setting: str
    method: str
    metric: str
    values: Mapping[int, float]

    @property
    def row_key(self) -> tuple[str, str]:
        """Setting and method: the row of the table."""
        return self.setting, self.method

    def mean_and_std(self) -> tuple[float, float | None]:
        """Return mean and sample standard deviation over seeds; None for one seed."""
        values = list(self.values.values())
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


@dataclass(frozen=True)
class ReproductionRecord:
    """Result at one scale of a file.

    Args:
        scale: small, or a scale in the file.
        seeds: the seeds.
        date: day of the record, as 2026-11-24.
        machine: processor and torch version.
        minutes: time of all runs; None: unknown.
        rows: the metrics.
        changed: options of the command line.
        note: further remarks.
        flagged: reasons why results of a setting say nothing about the paper, by setting; the empty name is
            the whole table.
    """

    scale: str
    seeds: tuple[int, ...]
    date: str
    machine: str
    minutes: float | None
    rows: tuple[ReproducedMetric, ...]
    changed: tuple[str, ...] = ()
    note: str = ""
    flagged: Mapping[str, str] = field(default_factory=dict)

    def flag(self, setting: str) -> str:
        """Return the reason why a setting's results say nothing about the paper; empty if there is none."""
        return self.flagged.get(setting) or self.flagged.get("", "")

    @property
    def unflagged_rows(self) -> tuple[ReproducedMetric, ...]:
        """Rows of settings without a flag."""
        return tuple(row for row in self.rows if not self.flag(row.setting))

    @classmethod
    def read(cls, file: Path) -> ReproductionRecord | None:
        """Read a record, or return None if there is no file.

        Raises:
            RunFolderError: the file is not a record.
        """
        if not file.exists():
            return None
        try:
            content = json.loads(read_text(file))
            rows = [
                ReproducedMetric(
                    **{**row, "values": {int(seed): value for seed, value in row["values"].items()}}
                )
                for row in content.pop("rows")
            ]
            return cls(
                **{**content, "seeds": tuple(content["seeds"]), "changed": tuple(content.get("changed", ()))},
                rows=tuple(rows),
            )
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise RunFolderError(f"{file} is not a record: {error}") from error

    def part(self, only: Sequence[str], row_keys: Container[tuple[str, str]]) -> ReproductionRecord:
        """Return a record of some rows. The note says which.

        Args:
            only: the names by which the rows were requested.
            row_keys: settings and methods of the rows.
        """
        rows = tuple(row for row in self.rows if row.row_key in row_keys)
        return replace(self, rows=rows, note=f"{self.note} Only: {', '.join(only)}.".strip())

    def with_updated_rows(
        self, newer: ReproductionRecord, only: Sequence[str], row_keys: Container[tuple[str, str]]
    ) -> ReproductionRecord:
        """Return this record with some rows replaced by those of a newer record. The note says so.

        Args:
            newer: the newer record.
            only: the names by which the rows were requested.
            row_keys: settings and methods of the rows.
        """
        newer = replace(newer, rows=tuple(row for row in newer.rows if row.row_key in row_keys))
        order = list(dict.fromkeys(row.row_key for row in (*self.rows, *newer.rows)))
        replaced = {row.row_key for row in newer.rows}
        rows = [*(row for row in self.rows if row.row_key not in replaced), *newer.rows]
        options = "" if newer.changed == self.changed else f", with {', '.join(newer.changed) or 'no option'}"
        machine = "" if newer.machine == self.machine else f", {newer.machine}"
        note = f"{self.note} Run on {newer.date}{machine}{options}: {', '.join(only)}.".strip()
        return replace(self, rows=tuple(sorted(rows, key=lambda row: order.index(row.row_key))), note=note)

    def write(self, file: Path) -> None:
        """Write the record, one line per row."""
        header_values = {
            key: value for key, value in asdict(self).items() if key != "rows" and value not in ("", (), {})
        }
        header = json.dumps(header_values, indent=2, ensure_ascii=False).removesuffix("\n}")
        rows = [{**asdict(row), "values": dict(sorted(row.values.items()))} for row in self.rows]
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, f"{header},\n" + '  "rows": [\n    ' + ",\n    ".join(lines) + "\n  ]\n}\n")


@dataclass(frozen=True)
class Reproduction:
    """A file that reproduces a table or figure."""

    file: Path
    about: ReproductionTarget
    table: Table

    @property
    def name(self) -> str:
        """Name on the command line, such as fediod-table6."""
        return self.file.stem.replace("_", "-")

    @property
    def scales(self) -> tuple[str, ...]:
        """Small, and the scales in the file."""
        return (SMALL_SCALE, *self.table.get("scale", {}))

    def notes(self, scale: str) -> ScaleNotes | None:
        """Return the remarks on a scale, or None if the file has none."""
        if self._check_scale(scale) == SMALL_SCALE:
            return self.about
        own = self.table["scale"][scale].get("reproduces")
        return None if own is None else read_table(ScaleNotes, own, f"scale.{scale}.reproduces.")

    @property
    def is_comparison(self) -> bool:
        """True if the file is a comparison itself."""
        return any(key in self.table for key in METHOD_KEYS)

    @cached_property
    def data(self) -> tuple[str, ...]:
        """Private and public data sets of the small scale."""
        source = self.reproduction_with_runs
        if not source.is_comparison:
            return source.about.data
        whole = expand_short_forms(source.table)
        base = presets.filled(whole.get("base", {}), RunSpec, source.file.parent)
        parts = [base, *whole.get("settings", [])]
        names = [part.get(key, {}).get("name", NONE) for part in parts for key in ("data", "public")]
        return tuple(name for name in dict.fromkeys(names) if name not in BUILTIN_SOURCES)

    @cached_property
    def reproduction_with_runs(self) -> Reproduction:
        """The file whose runs are shown: this one, unless it names another."""
        return find_reproduction(self.about.runs, self.file.parent) if self.about.runs else self

    def scaled_name(self, scale: str) -> str:
        """Return the name with the scale, unless it is small, for folders and records."""
        return self.name if scale == SMALL_SCALE else f"{self.name}-{scale}"

    def record_file(self, scale: str) -> Path:
        return self.file.parent / "records" / f"{self.scaled_name(scale).replace('-', '_')}.json"

    def record(self, scale: str = SMALL_SCALE) -> ReproductionRecord | None:
        """Return the record of a scale, or None."""
        return ReproductionRecord.read(self.record_file(scale))

    def records(self) -> dict[str, ReproductionRecord]:
        """Return the records by scale."""
        return {scale: record for scale in self.scales if (record := self.record(scale)) is not None}

    def minutes_per_seed(self, record: ReproductionRecord | None) -> float:
        """Return the minutes of a seed of the small scale, by the record or the estimate in the file."""
        if record is None or record.minutes is None:
            return self.about.minutes
        return record.minutes / max(len(record.seeds), 1)

    def seeds(self, scale: str, count: int | None = None) -> tuple[int, ...]:
        """Return the seeds of a scale, or the first ``count`` ones."""
        own = count or at_scale(self.table, self._check_scale(scale)).get("seeds", 1)
        return tuple(range(own)) if isinstance(own, int) else tuple(own)

    def program_arguments(self, scale: str) -> Table:
        """Return the arguments of the program, except for data, folders and seed."""
        return dict(at_scale(self.table, self._check_scale(scale)).get("arguments", {}))

    def comparison(
        self, scale: str, *, seeds: int | None = None, changes: Mapping[str, Any] | None = None
    ) -> Comparison:
        """Return the comparison behind the file, with the metrics that the file publishes.

        Raises:
            FedstillError: the file is not a comparison.
        """
        source = self.reproduction_with_runs
        comparison = read_comparison(
            source.file, seeds=seeds, changes=changes, scale=source._check_scale(scale)
        )
        return comparison if source is self else replace(comparison, paper=tuple(self.published(scale)))

    def published(self, scale: str = SMALL_SCALE) -> list[PaperMetric]:
        """Return the paper's metrics."""
        metrics = expand_short_forms(self.table, self._check_scale(scale)).get("paper", [])
        return [read_table(PaperMetric, metric, "paper.") for metric in metrics]

    def forms(self, scale: str = SMALL_SCALE) -> Mapping[str, MethodForm]:
        """Return the forms of methods, by label; empty if the file names none."""
        table = expand_short_forms(self.reproduction_with_runs.table, self._check_scale(scale))
        return read_forms(table.get("forms", {}), table.get("methods", []))

    def cited_rows(self) -> list[tuple[CitedRow, list[ReproducedMetric]]]:
        """Return rows of other files' records at the small scale, which this table shows.

        Raises:
            ArgumentError: a record has no such row.
        """
        found = []
        for cited in self.about.cites:
            record = find_reproduction(cited.record, self.file.parent).record()
            wanted = (cited.setting, cited.row)
            rows = [] if record is None else [row for row in record.rows if row.row_key == wanted]
            if not rows:
                raise ArgumentError("reproduces.cites", cited.row, f"a row of the record of {cited.record}")
            found.append((cited, rows))
        return found

    def _check_scale(self, scale: str) -> str:
        """Return a scale if the file has it."""
        if scale not in self.scales:
            raise UnknownName("scale", scale, self.scales)
        return scale


def experiments_folder() -> Path:
    """Return the folder of the papers' files, in the installed package or in the checkout."""
    inside = PACKAGE / "experiments"
    return inside if inside.is_dir() else PACKAGE.parent / "experiments"


def reproductions(folder: Path | None = None) -> list[Reproduction]:
    """Return all files that reproduce a table or figure, by paper and number.

    Args:
        folder: the folder; None: :func:`experiments_folder`.

    Raises:
        FedstillError: a file cannot be read.
    """
    entries = [_read_reproduction(file) for file in sorted((folder or experiments_folder()).glob("*.toml"))]
    return sorted(filter(None, entries), key=lambda entry: _sort_key(entry.about))


def find_reproduction(name: str, folder: Path | None = None) -> Reproduction:
    """Return the file of a table or figure by name or path.

    Raises:
        UnknownName: there is no such name.
        ArgumentError: the file reproduces nothing.
    """
    if name.endswith(".toml"):
        reproduction = _read_reproduction(Path(name))
        if reproduction is None:
            raise ArgumentError("fedstill reproduce", name, "a file with a table [reproduces]")
        return reproduction
    inside = folder or experiments_folder()
    file = inside / f"{name.replace('-', '_')}.toml"
    named = _read_reproduction(file) if file.parent == inside and file.exists() else None
    if named is None or named.name != name:
        known = [entry.name for entry in reproductions(folder)]
        raise UnknownName("table or figure", name, known, see="fedstill reproduce lists them")
    return named


def _read_reproduction(file: Path) -> Reproduction | None:
    table = read_toml(file)
    if "reproduces" not in table:
        return None
    return Reproduction(file, read_table(ReproductionTarget, table["reproduces"], "reproduces."), table)


def _sort_key(about: ReproductionTarget) -> tuple[str, bool, int]:
    digits = "".join(filter(str.isdigit, about.what.partition(",")[0].partition("(")[0]))
    return about.paper, not about.what.startswith("Table"), int(digits or 0)


__all__ = ["run_reproduction"]

ROWS_FILE = "rows.json"
LOCATION_OPTIONS = (
    "data.root",
    "public.root",
    "data.download",
)  # locations of data do not change results


def run_reproduction(
    entry: Reproduction,
    scale: str,
    folder: Path,
    *,
    seeds: int | None,
    only: Sequence[str] = (),
    jobs: int | str | None = None,
    devices: Sequence[str] = (),
    changes: Mapping[str, Any],
    command: str,
    report: Callable[[Path], object],
    metrics: Callable[[Path, Comparison], tuple[list[ReproducedMetric], float]],
    quiet: bool = False,
    bars: bool = False,
) -> ReproductionRecord:
    """Run what is missing for a table or figure, and collect its metrics.

    Args:
        entry: the file.
        scale: the scale.
        folder: folder of all tables. Finished runs in it are not repeated.
        seeds: number of seeds; None: as the scale says.
        only: methods and settings of the comparison (:meth:`.Comparison.planned_runs`) to run now.
        jobs, devices: processes of the comparison (:func:`.comparison_runner.compare`).
        changes: options of all runs by dotted name. A program gets ``data.root`` only.
        command: the command that repeats it, for the reports.
        report: writes the report of a run's folder.
        metrics: writes the report of a comparison's folder, and returns the rows of metrics and the seconds
            of the runs.
        quiet: print nothing about runs on standard error.
        bars: show progress bars of each run.

    Raises:
        RunFolderError: the folder holds other results.
        ArgumentError: ``only`` or several processes are asked for, but a program computes the metrics.
        FedstillError: something cannot run.
    """
    if only and entry.about.program:
        raise ArgumentError("--only", " ".join(only), f"none: a program computes {entry.name}")
    if (jobs or devices) and not entry.reproduction_with_runs.is_comparison:
        raise ArgumentError("--jobs", jobs or len(devices), f"none: a program computes {entry.name}")
    source, about, run_seeds = entry.reproduction_with_runs, entry.about, entry.seeds(scale, seeds)
    root = changes.get("data.root", "")
    runs, rows, seconds = folder / source.scaled_name(scale), list[ReproducedMetric](), 0.0
    if source.is_comparison:
        run_changes = {**changes, "public.root": changes.get("public.root", root)} if root else changes
        source_plan = source.comparison(scale, seeds=seeds, changes=run_changes)
        comparison_runner.compare(
            source_plan,
            runs,
            command=command,
            report=report,
            only=only or about.methods,
            jobs=jobs,
            devices=devices,
            quiet=quiet,
            bars=bars,
        )
        comparison = entry.comparison(scale, seeds=seeds, changes=run_changes)
        run_seeds = comparison.seeds
        rows, seconds = metrics(runs, comparison)
    if about.program:
        shown = runs if source.is_comparison else None
        program_rows, program_seconds = _run_program(
            entry, scale, run_seeds, root, folder / entry.scaled_name(scale), shown
        )
        rows, seconds = program_rows if program_rows or about.runs else rows, seconds + program_seconds
    today = datetime.now(timezone.utc).date().isoformat()
    environment = f"{machine()}, torch {torch.__version__}"
    option_texts = [
        " ".join(changed_options_as_cli_words({name: value}, {}))
        for name, value in changes.items()
        if name not in LOCATION_OPTIONS
    ]
    return ReproductionRecord(
        scale, run_seeds, today, environment, round(seconds / 60, 1), tuple(rows), tuple(option_texts)
    )


def _run_program(
    entry: Reproduction, scale: str, seeds: tuple[int, ...], root: str, folder: Path, runs: Path | None
) -> tuple[list[ReproducedMetric], float]:
    """Return the rows of a program over all seeds, and the seconds that it took."""
    arguments = entry.program_arguments(scale)
    add_search_folders([str(entry.file.parent.resolve())])
    program = importlib.import_module(Path(entry.about.program).stem)
    values_by_row: dict[tuple[str, str, str], dict[int, float]] = {}
    seconds = 0.0
    for seed in seeds:
        out = folder / f"seed{seed}"
        out.mkdir(parents=True, exist_ok=True)
        results = (
            json.loads((out / ROWS_FILE).read_text(encoding="utf-8")) if (out / ROWS_FILE).exists() else None
        )
        if results is not None and results["arguments"] != arguments:
            raise RunFolderError(f"{out} holds results of other arguments: choose another folder with --out")
        if (
            results is None or runs is not None
        ):  # programs that show runs are fast, and there may be more runs now
            start = time.monotonic()
            run_arguments: Table = {} if runs is None else {"runs": runs}
            if entry.about.methods:
                run_arguments["methods"] = list(entry.about.methods)
            rows = program.reproduce(root=root, out=out, seed=seed, **run_arguments, **arguments)
            results = {"arguments": arguments, "seconds": time.monotonic() - start, "rows": rows}
            write_text(out / ROWS_FILE, json_text(results, indent=1) + "\n")
        seconds += results["seconds"]
        for row in results["rows"]:
            key = (row.get("setting", ""), row["method"], row["metric"])
            values_by_row.setdefault(key, {})[seed] = round_metric(row["value"])
    return [ReproducedMetric(*key, values) for key, values in values_by_row.items()], seconds
