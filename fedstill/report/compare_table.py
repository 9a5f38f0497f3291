"""Tables of a comparison: one per setting with a row per method, and notes on leakage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fedstill.attacks.attack_results import ComparisonColumn
from fedstill.core.text_format import format_bytes
from fedstill.report.compare_summary import ComparedSetting, ComparisonSummary
from fedstill.report.compared_method import LOCAL_PREFIX, ComparedMethod, Spread
from fedstill.report.comparison_figure_data import format_budget, sorted_budgets
from fedstill.report.metric_text import format_difference, format_header, lowercase_title
from fedstill.report.table_formats import NO_VALUE, Cell, Column, Row, Table


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
        rows.append(Row(entry.name, cells, "" if entry.runs else entry.missing_reason()))
    return Table(setting.name, "method", [Column(column.header, column.style) for column in columns], rows)


def full_table(summary: ComparisonSummary, setting: ComparedSetting) -> Table:
    """Return the table of a setting with all columns."""
    columns = [*metric_columns(summary, summary.shown_metrics()), *cost_columns(summary)]
    return setting_table(setting, [*columns, *leakage_columns(summary), *paper_columns(summary)])


def budget_table(summary: ComparisonSummary) -> Table | None:
    """Return each method's main metric by privacy budget, as FedIOD's Table 5; None for other settings."""
    curves = summary.budget_curves()
    if not curves:
        return None
    budgets = sorted_budgets(curves)
    rows = [
        Row(
            curve.name,
            [
                Cell(spread.text() if (spread := curve.values.get(epsilon)) else NO_VALUE)
                for epsilon in budgets
            ],
        )
        for curve in curves
    ]
    title = f"{summary.metric.title} of each method in percent, by privacy budget"
    columns = [Column(f"epsilon {format_budget(epsilon)}") for epsilon in budgets]
    return Table(title, "method", columns, rows)


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
