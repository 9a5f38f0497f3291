"""Markdown table of a reproduction: our metrics next to the paper's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedstill.compare.comparison import COSTS, Comparison
from fedstill.compare.comparison_file import read_comparison_folder
from fedstill.compare.reproduction import ReproducedMetric, Reproduction, ReproductionRecord, round_metric
from fedstill.core.run_writer import write_text
from fedstill.core.text_format import format_count
from fedstill.report import table_formats
from fedstill.report.compare_files import summarize, write_comparison
from fedstill.report.compare_summary import ComparisonSummary
from fedstill.report.compared_method import LOCAL_PREFIX, FinishedRun
from fedstill.report.reproduction_ranking import compare_ranking
from fedstill.report.table_formats import Cell, Column, Row, Table
from fedstill.runs.spec import PaperMetric


def write_and_collect(folder: Path, comparison: Comparison) -> tuple[list[ReproducedMetric], float]:
    """Write a comparison's page and tables, and return its rows and the total seconds of its runs.

    Args:
        folder: folder of the comparison.
        comparison: the same comparison with the paper's metrics.
    """
    write_comparison(folder, read_comparison_folder(folder))
    summary = summarize(folder, comparison)
    runs = [run for entry in summary.entries for run in entry.runs]
    return record_rows(summary, comparison.paper), sum(run.value("seconds") or 0.0 for run in runs)


def record_rows(summary: ComparisonSummary, published: Sequence[PaperMetric]) -> list[ReproducedMetric]:
    """Return rows of the main metric, its local form, the paper's other metrics, and traffic."""
    key = summary.metric.key
    names = dict.fromkeys([key, f"{LOCAL_PREFIX}{key}", *(metric.metric for metric in published), *COSTS])
    rows = []
    for setting in summary.settings:
        for entry in setting.entries:
            for name in names:
                by_seed = {run.seed: _value(run, name) for run in entry.runs}
                values = {seed: round_metric(value) for seed, value in by_seed.items() if value is not None}
                if values:
                    rows.append(ReproducedMetric(setting.name, entry.label, name, values))
    return rows


def _value(run: FinishedRun, name: str) -> float | None:
    if name not in COSTS:
        return run.value(name)
    up, down = run.value("bytes up"), run.value("bytes down")
    return None if up is None or down is None else (up + down) / 1e9


def write_table(entry: Reproduction, record: ReproductionRecord, folder: Path) -> Path:
    """Write the record's table into a folder and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "table.md", markdown(entry, record))
    return folder / "table.md"


def markdown(entry: Reproduction, record: ReproductionRecord) -> str:
    """Return the record's table with the paper's metrics, and the agreement with the paper's ranking."""
    published, about = entry.published(record.scale), entry.about
    papers = {(metric.setting, metric.method, metric.metric): metric for metric in published}
    in_paper = {metric.metric for metric in published}
    lines = [f"**{about.paper}, {about.what}**: {about.title}.", ""]
    if record.scale == "small":
        lines += [f"{about.reduction}", ""]
    for setting in dict.fromkeys(row.setting for row in record.rows):
        rows = [row for row in record.rows if row.setting == setting]
        metrics = list(dict.fromkeys(row.metric for row in rows))
        columns = [
            Column(header) for name in metrics for header in ([name, "paper"] if name in in_paper else [name])
        ]
        means = {(row.method, row.metric): row.mean_and_std() for row in rows}
        table_rows = []
        for method in dict.fromkeys(row.method for row in rows):
            cells = []
            for name in metrics:
                cells.append(Cell(_format_spread(*means.get((method, name), (None, None)))))
                if name in in_paper:
                    paper = papers.get((setting, method, name)) or papers.get(("", method, name))
                    cells.append(Cell(None if paper is None else _format_spread(paper.value, paper.std)))
            table_rows.append(Row(method, cells))
        lines += [f"**{setting}**", ""] if setting else []
        lines += table_formats.markdown(Table("", "", columns, table_rows))
        lines.append("")
    order = compare_ranking(record.rows, published)
    seeds = format_count(len(record.seeds), "seed")
    minutes = "" if record.minutes is None else f", {format_count(round(record.minutes), 'minute')} in total"
    changed = f", with {', '.join(record.changed)}" if record.changed else ""
    lines.append(f"Scale {record.scale}, {seeds}{changed}; {record.machine}, {record.date}{minutes}.")
    if order.pairs:
        lines.append(f"Pairs of methods in the paper's order: {order}.")
    lines += [record.note] if record.note else []
    return "\n".join(lines) + "\n"


def _format_spread(mean: float | None, std: float | None) -> str | None:
    """Return mean and deviation with one decimal, and more decimals for small values.

    >>> _format_spread(93.04, 0.26), _format_spread(0.0891, None), _format_spread(0.00041, None)
    ('93.0 ± 0.3', '0.089', '0.00041')
    """
    if mean is None:
        return None
    if 0 < abs(mean) < 0.01:
        return f"{mean:.2g}" + ("" if std is None else f" \u00b1 {std:.2g}")
    digits = 1 if abs(mean) >= 10 else 2 if abs(mean) >= 1 else 3
    return f"{mean:.{digits}f}" + ("" if std is None else f" \u00b1 {std:.{digits}f}")
