"""Tables of a comparison and of a reproduction: for pages and the terminal, as Markdown, LaTeX and CSV."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from fedstill.attacks.attack import ComparisonColumn
from fedstill.compare.comparison import COSTS, SMALL_SCALE
from fedstill.compare.method_forms import FORM_TITLES, MethodForm, form_sentences
from fedstill.compare.reproduction import (
    NOT_AT_THIS_SCALE,
    CitedRow,
    ReproducedMetric,
    Reproduction,
    ReproductionRecord,
    round_metric,
)
from fedstill.core.run_writer import write_text
from fedstill.core.text_format import format_bytes, format_count
from fedstill.report.comparison_records import (
    ALL_TESTS_SUFFIX,
    LOCAL_PREFIX,
    AdversaryCurves,
    ComparedMethod,
    ComparedSetting,
    ComparisonSummary,
    FinishedRun,
    MethodCurve,
    metrics_by_attack,
    pick_strongest,
)
from fedstill.report.figures import sorted_budgets
from fedstill.report.records import Record
from fedstill.report.statistics import RunScore, SeedDifference, Spread, compare_paired_runs
from fedstill.report.tables import (
    NO_VALUE,
    Cell,
    Column,
    Row,
    Table,
    as_csv,
    format_budget,
    format_difference,
    format_header,
    latex,
    lowercase_title,
    markdown,
)
from fedstill.runs.spec import PaperMetric
from fedstill.tasks.task import Metric


@dataclass(frozen=True)
class ValueColumn:
    """Column of values of methods.

    Args:
        header: header of the column.
        value_of: function from a method to its cell or text.
        metric: key of the metric whose significantly best value is bold; empty for none.
        style: CSS classes.
    """

    header: str
    value_of: Callable[[ComparedMethod], Cell | str | None]
    metric: str = ""
    style: str = "r"

    def cell(self, entry: ComparedMethod) -> Cell:
        """Return the cell of one method."""
        value = self.value_of(entry)
        return value if isinstance(value, Cell) else Cell(value)


def metric_columns(summary: ComparisonSummary, names: Sequence[str]) -> list[ValueColumn]:
    """Return columns of metrics by their names."""
    return [
        ValueColumn(_metric_header(summary, name), partial(_metric_text, summary, name), name)
        for name in names
    ]


def cost_columns(summary: ComparisonSummary) -> list[ValueColumn]:
    """Return columns of bytes, queries, seconds, and of epsilon if a method has one."""
    return [
        ValueColumn("bytes up", partial(_mean, "bytes up", _bytes)),
        ValueColumn("down", partial(_mean, "bytes down", _bytes)),
        ValueColumn("queries", partial(_mean, "queries", lambda count: f"{round(count):,}")),
        ValueColumn(
            "seconds", partial(_mean, "seconds", lambda seconds: f"{seconds:,.{1 if seconds < 100 else 0}f}")
        ),
        *([ValueColumn("epsilon", ComparedMethod.epsilon_text)] if summary.has_epsilon else []),
    ]


def leakage_columns(summary: ComparisonSummary) -> list[ValueColumn]:
    """Return columns of the strongest attack's metrics."""
    return [
        ValueColumn(column.head, partial(_leakage_cell, column), style="r leak")
        for column in summary.leakage_columns
    ]


def paper_columns(summary: ComparisonSummary) -> list[ValueColumn]:
    """Return columns of published metrics and of our difference from them."""
    columns = []
    for name in summary.published_metrics():
        metric = summary.metric_named(name)
        parts = [] if metric is summary.metric else [metric.title]
        parts += ["local"] if name.startswith(LOCAL_PREFIX) else []
        suffix = "".join(f", {part}" for part in parts)
        columns.append(ValueColumn(f"paper{suffix}", partial(paper_text, summary, name)))
        columns.append(ValueColumn(f"gap{suffix}", partial(paper_gap_text, summary, name), style="r gap"))
    return columns


def setting_table(setting: ComparedSetting, columns: Sequence[ValueColumn]) -> Table:
    """Return the table of a setting; a method without runs has a short reason instead of values."""
    best = {metric.key: setting.significantly_best_labels(metric) for metric in setting.metrics}
    rows = []
    for entry in setting.entries:
        cells = [column.cell(entry).bold_if(entry.label in best.get(column.metric, ())) for column in columns]
        if not entry.runs:
            short_reason = entry.missing_reason().partition(":")[0]
            cells = [Cell(short_reason), *(Cell(NO_VALUE) for _ in columns[1:])]
        note = "" if entry.runs else entry.missing_reason()
        rows.append(Row(entry.name, cells, note, group=entry.form_title))
    return Table(setting.name, "method", [Column(column.header, column.style) for column in columns], rows)


def full_table(summary: ComparisonSummary, setting: ComparedSetting) -> Table:
    """Return the table of a setting with all columns."""
    columns = [*metric_columns(summary, summary.shown_metrics()), *cost_columns(summary)]
    return setting_table(setting, [*columns, *leakage_columns(summary), *paper_columns(summary)])


DECOMPOSITION_NOTE = (
    "Teachers: mean of the nodes' own models. Ensembling: ensemble minus teachers. Distilling: student minus "
    "ensemble. Both: mean ± half width of the 95% CI over seeds."
)


def decomposition_table(setting: ComparedSetting) -> Table | None:
    """Return each student's metric next to its teachers' and their ensemble's; None without such methods."""
    parts, digits = setting.decompositions, setting.metric.digits
    if not parts:
        return None
    rows = [
        Row(
            part.entry.name,
            [
                *(Cell(spread.text(digits)) for spread in (part.teachers, part.ensemble, part.student)),
                *(Cell(_difference_text(setting.metric, change)) for change in (part.gain, part.gap)),
            ],
        )
        for part in parts
    ]
    headers = ("teachers", "ensemble", "student", "ensembling", "distilling")
    title = f"{setting.metric.title} from the teachers over their ensemble to the student"
    return Table(title, "method", [Column(header) for header in headers], rows)


def _difference_text(metric: Metric, difference: SeedDifference) -> str:
    half_width = "" if difference.half_width is None else f" ± {difference.half_width:.{metric.digits}f}"
    return f"{format_difference(metric, difference.mean)}{half_width}"


def budget_table(summary: ComparisonSummary) -> Table | None:
    """Return each method's main metric by privacy budget, as FedIOD's Table 5; None for other settings."""
    curves = summary.budget_curves()
    if not curves:
        return None
    budgets = sorted_budgets(curves)
    title = f"{summary.metric.title} of each method in percent, by privacy budget"
    columns = [Column(f"epsilon {format_budget(epsilon)}") for epsilon in budgets]
    return Table(title, "method", columns, _curve_rows(curves, budgets))


def adversary_table(summary: ComparisonSummary, group: AdversaryCurves) -> Table:
    """Return each method's main metric by number of malicious nodes."""
    conditions = f", else as in {group.conditions!r}" if group.conditions else ""
    title = f"{summary.metric.title} in percent by number of nodes that run {group.adversary}{conditions}"
    columns = [Column(f"{count} malicious") for count in group.counts]
    return Table(title, "method", columns, _curve_rows(group.curves, group.counts))


def _curve_rows(curves: Sequence[MethodCurve], keys: Sequence[float]) -> list[Row]:
    return [
        Row(
            curve.name,
            [Cell(spread.text() if (spread := curve.values.get(key)) else NO_VALUE) for key in keys],
        )
        for curve in curves
    ]


# --- cells ------------------------------------------------------------------------------------------------


def _metric_header(summary: ComparisonSummary, name: str) -> str:
    metric = summary.metric_named(name)
    header = lowercase_title(format_header(metric, units=metric.unit != "%"))
    return f"{LOCAL_PREFIX}{header}" if name.startswith(LOCAL_PREFIX) else header


def _metric_text(summary: ComparisonSummary, name: str, entry: ComparedMethod) -> str | None:
    return entry.format_metric(name, summary.metric_named(name).digits)


def _mean(name: str, format_mean: Callable[[float], Cell | str], entry: ComparedMethod) -> Cell | str | None:
    spread = entry.spread(name)
    return None if spread is None else format_mean(spread.mean)


def _bytes(count: float) -> Cell:
    return Cell(format_bytes(round(count)), tooltip=f"{round(count):,} bytes")


def _leakage_cell(column: ComparisonColumn, entry: ComparedMethod) -> Cell:
    strongest = entry.strongest_attack_and_value(column)
    return Cell(None) if strongest is None else Cell(strongest[1].text(column.digits), strongest[0])


def paper_text(summary: ComparisonSummary, name: str, entry: ComparedMethod) -> str | None:
    """Return a published metric as text; None if the paper does not report it."""
    paper = entry.published.get(name)
    return None if paper is None else Spread(paper.value, paper.std).text(summary.metric_named(name).digits)


def paper_gap_text(summary: ComparisonSummary, name: str, entry: ComparedMethod) -> str | None:
    """Return our mean minus the published metric as text; None if the paper does not report it."""
    gap = entry.paper_gap(name)
    return None if gap is None else format_difference(summary.metric_named(name), gap)


def releases_text(entry: ComparedMethod) -> str:
    """Return the payload kinds that leave a node, in words."""
    return ", ".join(entry.releases) or "nothing"


def needs_text(entry: ComparedMethod) -> str:
    """Return a method's requirements in words."""
    return ", ".join(entry.needs) or "nothing"


def leakage_notes(columns: Sequence[ComparisonColumn]) -> tuple[str, str]:
    """Return notes on the interpretation of leakage metrics."""
    return (
        "A weak attack result shows only that this attack, with this strength, got little. A stronger "
        "attack may "
        "get more, so no method is called safe.",
        "Each leakage metric is that of the strongest attack (the highest mean over seeds). "
        + "".join(f"{column.description} " for column in columns if column.description)
        + "The best of several attacks is slightly above random guessing by chance alone. Intervals of "
        "single runs "
        "are in their reports: points close to each other, or to the dashed line, are not significantly "
        "different.",
    )


# --- CSV ------------------------------------------------------------------------------------------------


REFERENCES = ("standalone", "ensemble", "centralized")
MODELS = ("", "local", *REFERENCES)
PAIR_COLUMNS = (
    "setting", "metric", "method", "other_method", "seeds", "difference", "ci_low", "ci_high", "significant",
)  # fmt: skip


def runs_csv(summary: ComparisonSummary) -> str:
    """Return one row per run."""
    records = []
    for setting in summary.settings:
        for entry in setting.entries:
            context = (summary, setting, entry)
            records += [_run_record(*context, run.seed, "finished", run=run) for run in entry.runs]
            for seed, reason in entry.not_run.items():
                status = "stopped" if reason.startswith("stopped: ") else "refused"
                records.append(_run_record(*context, seed, status, reason))
            records += [_run_record(*context, seed, "not finished") for seed in entry.missing]
    return as_csv(records)


def _run_record(
    summary: ComparisonSummary,
    setting: ComparedSetting,
    entry: ComparedMethod,
    seed: int,
    status: str,
    reason: str = "",
    run: FinishedRun | None = None,
) -> dict[str, Any]:
    main, *others = (metric.key for metric in summary.metrics)
    metrics = [main, f"{LOCAL_PREFIX}{main}", f"{LOCAL_PREFIX}{main}{ALL_TESTS_SUFFIX}"]
    columns = {
        **{_column(name): name for name in metrics},
        **{reference: f"{reference} {main}" for reference in REFERENCES},
    }
    for other in others:
        columns |= {f"{model}_{other}".lstrip("_"): f"{model} {other}".strip() for model in MODELS}
    guarantee = None if run is None else run.result.guarantee
    traffic = [None if run is None else run.value(name) for name in ("bytes up", "bytes down", "queries")]
    up, down, queries = (None if value is None else round(value) for value in traffic)
    leakage = {
        column: metrics_by_attack(column, run.records if run else ()) for column in summary.leakage_columns
    }
    return {
        **_method_record(setting, entry),
        "seed": seed,
        "status": status,
        "evaluated_model": entry.evaluated_model,
        **{column: None if run is None else run.value(name) for column, name in columns.items()},
        "bytes_up": up,
        "bytes_down": down,
        "queries": queries,
        "iteration_unit": run and run.result.iteration_unit,
        "iterations": run and run.result.iterations,
        "seconds": run and run.result.seconds.total,
        "epsilon": guarantee and guarantee[0],
        "delta": guarantee and guarantee[1],
        **{
            column.name: pick_strongest(column, by_attack.values()) if by_attack else None
            for column, by_attack in leakage.items()
        },
        "releases": "; ".join((run.result.releases if run else ()) or entry.releases),
        "needs": "; ".join(entry.needs),
        "reason": reason,
        "folder": run and run.folder,
    }


def summary_csv(summary: ComparisonSummary) -> str:
    """Return one row per method and setting, with means and standard deviations over seeds.

    ``ensembling`` and ``distilling`` are the differences of :func:`decomposition_table`, with the half widths
    of their 95% confidence intervals.
    """
    main, local, *others = summary.metric_names()
    published, records = summary.published_metrics(), []
    papers = [name for name in summary.metric_names() if name in published or name in (main, local)]
    for setting in summary.settings:
        decompositions = {part.entry.label: part for part in setting.decompositions}
        for entry in setting.entries:
            record: dict[str, Any] = {**_method_record(setting, entry), "seeds": len(entry.runs)}
            record["evaluated_model"] = entry.evaluated_model
            for name in (main, local, f"{local}{ALL_TESTS_SUFFIX}", *others):
                record |= _spread_record(_column(name), entry.spread(name))
            part = decompositions.get(entry.label)
            record |= _spread_record("ensemble", part.ensemble if part else None)
            record |= _difference_record("ensembling", part.gain if part else None)
            record |= _difference_record("distilling", part.gap if part else None)
            for name in ("bytes up", "bytes down", "queries", "seconds"):
                spread = entry.spread(name)
                record[f"{_column(name)}_mean"] = spread and spread.mean
            record["epsilon_max"], record["delta"] = entry.privacy_bound() or (None, None)
            for column in summary.leakage_columns:
                attack, leakage = entry.strongest_attack_and_value(column) or ("", None)
                record |= {**_spread_record(column.name, leakage), f"{column.name}_attack": attack}
            record |= {"releases": "; ".join(entry.releases), "needs": "; ".join(entry.needs)}
            for name in papers:
                paper, column_name = entry.published.get(name), _column(name)
                record[f"paper_{column_name}"] = paper and paper.value
                record[f"paper_{column_name}_std"] = paper and paper.std
                record[f"paper_{column_name}_source"] = paper and paper.source
                record[f"{column_name}_gap"] = entry.paper_gap(name)
            records.append({**record, "reason": entry.missing_reason()})
    return as_csv(records)


def pairwise_differences_csv(summary: ComparisonSummary) -> str:
    """Return one row per setting, metric and pair of methods.

    A row has the paired difference, first minus second, its 95% interval over seeds, and whether the methods
    are significantly different.
    """
    records = []
    for setting in summary.settings:
        for metric in setting.metrics:
            for first, second, difference in setting.pairs(metric):
                mean, half_width = difference.mean, difference.half_width
                low, high = (None, None) if half_width is None else (mean - half_width, mean + half_width)
                values = (
                    setting.name,
                    metric.key,
                    first.label,
                    second.label,
                    difference.seeds,
                    mean,
                    low,
                    high,
                    difference.significant,
                )
                records.append(dict(zip(PAIR_COLUMNS, values, strict=True)))
    return as_csv(records, PAIR_COLUMNS)


def records_csv(summary: ComparisonSummary) -> str:
    """Return one row per measured value, with the fields of :class:`Record`."""
    names = [part.name for part in fields(Record)]
    header = [*(name for name in names if name != "interval"), "ci_low", "ci_high"]
    rows = []
    for record in summary.records:
        row = {name: getattr(record, name) for name in header[:-2]}
        row["ci_low"], row["ci_high"] = record.interval or (None, None)
        rows.append(row)
    return as_csv(rows, header)


def _method_record(setting: ComparedSetting, entry: ComparedMethod) -> dict[str, Any]:
    names = {"setting": setting.name, "method": entry.label, "name": entry.method, "title": entry.title}
    return {**names, "form": entry.form_title}


def _spread_record(column: str, spread: Spread | None) -> dict[str, Any]:
    return {f"{column}_mean": spread and spread.mean, f"{column}_std": spread and spread.std}


def _difference_record(column: str, difference: SeedDifference | None) -> dict[str, Any]:
    return {
        column: difference and difference.mean,
        f"{column}_half_width": difference and difference.half_width,
    }


def _column(name: str) -> str:
    return name.replace(",", "").replace(" ", "_")


# --- Markdown, LaTeX --------------------------------------------------------------------------------------


def comparison_markdown(summary: ComparisonSummary) -> str:
    """Return the Markdown text: tables by privacy budget and malicious nodes, then one per setting."""
    by_budget = budget_table(summary)
    lines = [] if by_budget is None else [*markdown(by_budget), ""]
    for group in summary.adversary_curves():
        by_count = adversary_table(summary, group)
        lines += [f"{by_count.title}:", "", *markdown(by_count), ""]
    for setting in summary.settings:
        table = full_table(summary, setting)
        lines += [f"**{setting.name}**", ""] if setting.name else []
        rows = [
            replace(row, cells=[Cell(entry.evaluated_model), *row.cells])
            for entry, row in zip(setting.entries, table.rows, strict=True)
        ]
        lines += markdown(replace(table, columns=[Column("evaluated model"), *table.columns], rows=rows))
        lines.append("")
        notes = [f"{row.name}: {row.note}." for row in table.rows if row.note] + setting.verdicts()
        lines += [*notes, ""] if notes else []
        if (parts := decomposition_table(setting)) is not None:
            lines += [f"{parts.title}. {DECOMPOSITION_NOTE}", "", *markdown(parts), ""]
    return "\n".join(lines)


def comparison_latex(summary: ComparisonSummary) -> str:
    """Return the LaTeX table of all settings, with notes as comments."""
    papers = [f"Paper: {paper.method}, {paper.metric}: {paper.source}" for paper in summary.published]
    verdicts = [
        f"{setting.name}: {verdict}" if setting.name else verdict
        for setting in summary.settings
        for verdict in setting.verdicts()
    ]
    tables = [full_table(summary, setting) for setting in summary.settings]
    text = latex(tables, [*summary.notes, *verdicts, *papers])
    return text.replace(" & Down & ", " & Bytes down & ", 1)


# --- reproductions --------------------------------------------------------------------------------------


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
    write_text(folder / "table.md", reproduction_markdown(entry, record))
    return folder / "table.md"


def reproduction_markdown(
    entry: Reproduction, record: ReproductionRecord, *, hides_flagged: bool = False
) -> str:
    """Return the record's table with the paper's metrics, and the agreement with the paper's ranking.

    Args:
        entry: the file.
        record: its record.
        hides_flagged: show no numbers of settings whose results say nothing about the paper.
    """
    published, about = entry.published(record.scale), entry.about
    is_small, notes = record.scale == SMALL_SCALE, entry.notes(record.scale)
    scale = "" if is_small else f", scale {record.scale}"
    lines = [f"**{about.paper}, {about.what}{scale}**: {about.title}.", ""]
    if notes is not None:
        lines += [f"{notes.reduction.strip()}", ""]
    forms, cited = entry.forms(record.scale), entry.cited_rows() if is_small else []
    for setting in dict.fromkeys(row.setting for row in record.rows):
        flag = record.flag(setting)
        if flag:
            lines += [f"**{setting or about.what}: {NOT_AT_THIS_SCALE}.** {flag}", ""]
        if not (flag and hides_flagged):
            lines += [f"**{setting}**", ""] if setting and not flag else []
            own = [row for row in record.rows if row.setting == setting]
            others = [part for part in cited if part[0].under == setting]
            lines += [*markdown(_reproduced_table(setting, own, published, forms, others)), ""]
    recorded = {row.method for row in record.rows}
    shown = {label: form for label, form in forms.items() if label in recorded}
    # Rows of a program may have names of their own: then all forms are described.
    lines += [f"- {sentence}" for sentence in form_sentences(shown or forms)]
    lines += [
        f"- {part.name}: row {part.row} of the record of {part.record}"
        + (f"; {part.differs}." if part.differs else ".")
        for part, _ in cited
    ]
    if lines[-1]:
        lines.append("")
    order = compare_ranking(record.unflagged_rows, published)
    seeds = format_count(len(record.seeds), "seed")
    minutes = "" if record.minutes is None else f", {format_count(round(record.minutes), 'minute')} in total"
    changed = f", with {', '.join(record.changed)}" if record.changed else ""
    lines.append(f"Scale {record.scale}, {seeds}{changed}; {record.machine}, {record.date}{minutes}.")
    if order.pairs:
        lines.append(f"Pairs of methods in the paper's order: {order}.")
    lines += [record.note] if record.note else []
    return "\n".join(lines) + "\n"


def _reproduced_table(
    setting: str,
    own: Sequence[ReproducedMetric],
    published: Sequence[PaperMetric],
    forms: Mapping[str, MethodForm],
    cited: Sequence[tuple[CitedRow, Sequence[ReproducedMetric]]],
) -> Table:
    """Return the table of one setting, grouped by form."""
    papers = {(paper.method, paper.metric): paper for paper in published if paper.setting in ("", setting)}
    in_paper = {metric.metric for metric in published}
    metrics = list(dict.fromkeys(row.metric for row in own))
    columns = [
        Column(header) for name in metrics for header in ([name, "paper"] if name in in_paper else [name])
    ]

    def row_of(name: str, rows: Sequence[ReproducedMetric], form: str, method: str) -> Row:
        means = {row.metric: row.mean_and_std() for row in rows}
        cells = []
        for metric in metrics:
            cells.append(Cell(format_mean_and_std(*means.get(metric, (None, None)))))
            if metric in in_paper:
                paper = papers.get((method, metric))
                cells.append(Cell(None if paper is None else format_mean_and_std(paper.value, paper.std)))
        return Row(name, cells, group=FORM_TITLES[form])

    rows = [
        row_of(
            method,
            [row for row in own if row.method == method],
            forms[method].form if method in forms else "",
            method,
        )
        for method in dict.fromkeys(row.method for row in own)
    ]
    rows += [row_of(part.name, others, part.form, "") for part, others in cited]
    titles = list(FORM_TITLES.values())
    return Table("", "", columns, sorted(rows, key=lambda row: titles.index(row.group)))


def format_mean_and_std(mean: float | None, std: float | None) -> str | None:
    """Return mean and deviation with one decimal, and more decimals for small values.

    >>> format_mean_and_std(93.04, 0.26), format_mean_and_std(0.0891, None)
    ('93.0 ± 0.3', '0.089')
    """
    if mean is None:
        return None
    if 0 < abs(mean) < 0.01:
        return f"{mean:.2g}" + ("" if std is None else f" \u00b1 {std:.2g}")
    digits = 1 if abs(mean) >= 10 else 2 if abs(mean) >= 1 else 3
    return f"{mean:.{digits}f}" + ("" if std is None else f" \u00b1 {std:.{digits}f}")


@dataclass(frozen=True)
class RankingAgreement:
    """Pairs of methods with published metrics in one setting; pairs that are equal in the paper do not count.

    Args:
        pairs: number of pairs.
        same_order: pairs that our means order as the paper does.
        significant: pairs whose 95% interval over seeds excludes 0.
        significant_same_order: significant pairs in the paper's order.
    """

    pairs: int
    same_order: int
    significant: int
    significant_same_order: int

    def __str__(self) -> str:
        """Return a cell of a table."""
        significant = f"{self.significant_same_order} of {self.significant}" if self.significant else "none"
        return f"{self.same_order} of {self.pairs}; significantly different: {significant}"


def compare_ranking(rows: Sequence[ReproducedMetric], published: Sequence[PaperMetric]) -> RankingAgreement:
    """Compare the ranking of methods with the paper's, pair by pair, over the seeds that both methods have.

    >>> papers = [PaperMetric(method=m, value=v, source="x") for m, v in (("a", 3.0), ("b", 2.0), ("c", 1.0))]
    >>> values = {"a": (9.0, 9.2, 9.1), "b": (7.0, 7.1, 7.3), "c": (8.0, 5.0, 9.0)}
    >>> rows = [ReproducedMetric("", m, "accuracy", dict(enumerate(v))) for m, v in values.items()]
    >>> print(compare_ranking(rows, papers))
    2 of 3; significantly different: 1 of 1
    """
    groups: dict[tuple[str, str], list[tuple[float, ReproducedMetric]]] = {}
    for row in rows:
        for paper in published:
            if (paper.method, paper.metric) == (row.method, row.metric) and paper.setting in (
                "",
                row.setting,
            ):
                groups.setdefault((row.setting, row.metric), []).append((paper.value, row))
    differences = [
        (
            first_paper > second_paper,
            compare_paired_runs(_scores_by_seed(first), _scores_by_seed(second)),
        )
        for group in groups.values()
        for (first_paper, first), (second_paper, second) in combinations(group, 2)
        if first_paper != second_paper and first.values.keys() & second.values.keys()
    ]
    same_order = [gap.mean > 0 if is_above else gap.mean < 0 for is_above, gap in differences]
    significant = [gap.significant for _, gap in differences]
    both = sum(map(bool.__and__, same_order, significant))
    return RankingAgreement(len(differences), sum(same_order), sum(significant), both)


def _scores_by_seed(row: ReproducedMetric) -> dict[int, RunScore]:
    return {seed: RunScore(value) for seed, value in row.values.items()}
