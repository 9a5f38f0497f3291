"""A paper's table with ours beside it: the figures of a comparison, or those of a record, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedstill.compare.comparison import COSTS, Comparison
from fedstill.compare.comparison_file import read_folder
from fedstill.compare.reproduction import ReproducedMetric, Reproduction, ReproductionRecord, round_metric
from fedstill.core.run_writer import write_text
from fedstill.core.text_format import format_count
from fedstill.report import table_formats
from fedstill.report.compare_files import summarize, write_comparison
from fedstill.report.compare_summary import Summary
from fedstill.report.compared_method import LOCAL, FinishedRun
from fedstill.report.reproduction_order import compare_order
from fedstill.report.table_formats import Cell, Column
from fedstill.report.table_formats import Row as Line
from fedstill.runs.config import PaperMetric


def compared(folder: Path, comparison: Comparison) -> tuple[list[ReproducedMetric], float]:
    """Write a comparison's pages and tables into its folder; its rows, and the seconds of its runs.

    Args:
        folder: in which it has run.
        comparison: the same, with the paper's figures that its rows will stand beside.
    """
    write_comparison(folder, read_folder(folder))
    summary = summarize(folder, comparison)
    runs = [run for entry in summary.entries for run in entry.runs]
    return record_rows(summary, comparison.paper), sum(run.value("seconds") or 0.0 for run in runs)


def record_rows(summary: Summary, published: Sequence[PaperMetric]) -> list[ReproducedMetric]:
    """What a comparison's methods are judged by, the nodes' own models too, what the paper has beside these,
    and what crossed.
    """
    key = summary.metric.key
    names = dict.fromkeys([key, f"{LOCAL}{key}", *(metric.metric for metric in published), *COSTS])
    rows = []
    for setting in summary.settings:
        for entry in setting.entries:
            for name in names:
                found = {run.seed: _figure(run, name) for run in entry.runs}
                values = {seed: round_metric(value) for seed, value in found.items() if value is not None}
                if values:
                    rows.append(ReproducedMetric(setting.name, entry.label, name, values))
    return rows


def _figure(run: FinishedRun, name: str) -> float | None:
    if name not in COSTS:
        return run.value(name)
    up, down = run.value("bytes up"), run.value("bytes down")
    return None if up is None or down is None else (up + down) / 1e9


def write(entry: Reproduction, record: ReproductionRecord, folder: Path) -> Path:
    """Write the record's table into a folder; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "table.md", markdown(entry, record))
    return folder / "table.md"


def markdown(entry: Reproduction, record: ReproductionRecord) -> str:
    """The record's table, the paper's figures beside ours, and how far the order is the paper's."""
    published, about = entry.published(record.scale), entry.about
    known = {(metric.setting, metric.method, metric.metric): metric for metric in published}
    theirs = {metric.metric for metric in published}
    lines = [f"**{about.paper}, {about.what}**: {about.title}.", ""]
    if record.scale == "small":
        lines += [f"{about.reduction}", ""]
    for setting in dict.fromkeys(row.setting for row in record.rows):
        rows = [row for row in record.rows if row.setting == setting]
        metrics = list(dict.fromkeys(row.metric for row in rows))
        columns = [
            Column(head) for name in metrics for head in ([name, "paper"] if name in theirs else [name])
        ]
        ours = {(row.method, row.metric): row.mean_and_std() for row in rows}
        table = []
        for method in dict.fromkeys(row.method for row in rows):
            cells = []
            for name in metrics:
                cells.append(Cell(_text(*ours.get((method, name), (None, None)))))
                if name in theirs:
                    paper = known.get((setting, method, name)) or known.get(("", method, name))
                    cells.append(Cell(None if paper is None else _text(paper.value, paper.std)))
            table.append(Line(method, cells))
        lines += [f"**{setting}**", ""] if setting else []
        lines += table_formats.markdown(table_formats.Table("", "", columns, table))
        lines.append("")
    order = compare_order(record.rows, published)
    seeds = format_count(len(record.seeds), "seed")
    minutes = "" if record.minutes is None else f", {format_count(round(record.minutes), 'minute')} in all"
    changed = f", with {', '.join(record.changed)}" if record.changed else ""
    lines.append(f"Scale {record.scale}, {seeds}{changed}; {record.machine}, {record.date}{minutes}.")
    if order.pairs:
        lines.append(f"Pairs of methods in the paper's order: {order}.")
    lines += [record.note] if record.note else []
    return "\n".join(lines) + "\n"


def _text(mean: float | None, std: float | None) -> str | None:
    """To a tenth, or finer where figures are small.

    >>> _text(93.04, 0.26), _text(0.0891, None), _text(0.00041, None), _text(None, None)
    ('93.0 ± 0.3', '0.089', '0.00041', None)
    """
    if mean is None:
        return None
    if 0 < abs(mean) < 0.01:
        return f"{mean:.2g}" + ("" if std is None else f" \u00b1 {std:.2g}")
    digits = 1 if abs(mean) >= 10 else 2 if abs(mean) >= 1 else 3
    return f"{mean:.{digits}f}" + ("" if std is None else f" \u00b1 {std:.{digits}f}")
