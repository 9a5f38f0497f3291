"""HTML page of a comparison: one file that loads nothing, with links to the runs' reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from fedstill.attacks.attack import Leakage, skipped_texts
from fedstill.compare.comparison import Comparison, read_comparison_folder
from fedstill.compare.reproduction import ReproducedMetric
from fedstill.core.run_writer import write_text
from fedstill.core.text_format import format_bytes
from fedstill.report import figures
from fedstill.report.comparison_records import (
    AdversaryCurves,
    ComparedMethod,
    ComparedSetting,
    ComparisonSummary,
    MethodCurve,
    summarize,
)
from fedstill.report.comparison_tables import (
    DECOMPOSITION_NOTE,
    adversary_table,
    budget_table,
    comparison_latex,
    comparison_markdown,
    decomposition_table,
    full_table,
    leakage_notes,
    needs_text,
    pairwise_differences_csv,
    record_rows,
    records_csv,
    releases_text,
    runs_csv,
    summary_csv,
)
from fedstill.report.records import MAIN_MODELS
from fedstill.report.statistics import Spread
from fedstill.report.tables import NO_VALUE, Cell, Column, Row, Table, template_environment


def render_comparison_page(summary: ComparisonSummary) -> str:
    """Return the HTML of a comparison's page."""
    curves, metric = summary.budget_curves(), summary.metric.title
    by_budget = budget_table(summary)
    epsilon_plot = None
    if by_budget is not None:
        by_budget = _numbered(by_budget, curves)
        epsilon_plot = figures.responsive_svg(
            partial(figures.plot_against_epsilon, curves, metric), "epsilon"
        )
    papers = []
    for paper in summary.published:
        value = Spread(paper.value, paper.std).text(summary.metric_named(paper.metric).digits)
        papers.append((paper, summary.title_of(paper.metric), value))
    template = template_environment().get_template("compare.html.j2")
    return template.render(
        title=summary.about or (summary.name if summary.name != "compare" else "Comparison of methods"),
        summary=summary,
        lead=_lead(summary),
        settings=[_setting_variables(summary, setting) for setting in summary.settings],
        by_budget=by_budget,
        adversaries=[_adversary_variables(summary, group) for group in summary.adversary_curves()],
        epsilon_plot=epsilon_plot,
        papers=papers,
        leakage=_leakage_variables(summary) if summary.leakage else None,
        several_metrics=len(summary.metrics) > 1
        or bool(set(summary.published_metrics()) - set(summary.shown_metrics())),
        number_badge=number_badge,
        decomposition_note=DECOMPOSITION_NOTE,
    )


def number_badge(number: int) -> Markup:
    """Return a method's number in its color, as figures show it."""
    hollow = " hollow" if figures.is_color_repeated(number) else ""
    return Markup('<span class="number c{}{}" aria-hidden="true">{}</span>').format(
        (number - 1) % len(figures.METHOD_COLORS), hollow, number
    )


def _lead(summary: ComparisonSummary) -> str:
    counts = (
        ("method", len({entry.label for entry in summary.entries})),
        ("setting", len(summary.settings)),
        ("seed", len(summary.seeds)),
    )
    parts = [
        f"{count} {noun}{'' if count == 1 else 's'}"
        for noun, count in counts
        if count > 1 or noun != "setting"
    ]
    runs = sum(len(entry.runs) for entry in summary.entries)
    return f"{', '.join(parts)}: {runs} run{'' if runs == 1 else 's'} under equal conditions."


def _numbered(table: Table, curves: Sequence[MethodCurve]) -> Table:
    """Return a table of curves with the methods' numbers."""
    rows = [
        replace(row, name=number_badge(curve.number) + Markup(" {}").format(row.name))
        for curve, row in zip(curves, table.rows, strict=True)
    ]
    return replace(table, row_header="Method", rows=rows)


def _adversary_variables(summary: ComparisonSummary, group: AdversaryCurves) -> dict[str, Any]:
    draw = partial(figures.plot_against_malicious_nodes, group.curves, summary.metric.title)
    return {
        "name": group.adversary,
        "conditions": group.conditions,
        "table": _numbered(adversary_table(summary, group), group.curves),
        "plot": figures.responsive_svg(draw, f"malicious {group.adversary} {group.conditions}"),
    }


def _leakage_variables(summary: ComparisonSummary) -> dict[str, Any]:
    scatter = figures.leakage_scatter(summary)
    points, column = scatter.points, scatter.column
    largest = max((point.bytes for point in points), default=0.0)
    sizes = [round(share * largest) for share in (1, 0.1, 0.01)] if largest > 0 else []
    sizes += [0] if any(point.bytes <= 0 for point in points) else []
    plot = None
    if column is not None and points:
        draw = partial(figures.plot_against_leakage, points, column, summary.metric.title)
        plot = figures.responsive_svg(draw, "leakage")
    return {
        **vars(scatter),
        "plot": plot,
        "names": {point.number: point.name for point in points},
        "sizes": [
            (_traffic_disk(size, largest), format_bytes(size) if size else "nothing sent") for size in sizes
        ],
        "connected": any(point.connected for point in points),
        "notes": leakage_notes(summary.leakage_columns),
    }


def _traffic_disk(byte_count: float, largest: float) -> Markup:
    side = 2 * max(figures.traffic_disk_radius(byte_count, largest), figures.DOT_RADIUS + 1)
    return Markup('<span class="area{}" style="width:{s:.1f}px;height:{s:.1f}px"></span>').format(
        "" if byte_count else " none", s=side
    )


def _setting_variables(summary: ComparisonSummary, setting: ComparedSetting) -> dict[str, Any]:
    title, best = setting.metric.title, setting.significantly_best_labels(setting.metric)
    points, curves = (
        figures.scatter_points(setting),
        figures.learning_curves(setting),
    )
    return {
        "name": setting.name,
        "context": setting.context,
        "title": title,
        "table": _table(summary, setting),
        "scatter": points
        and figures.responsive_svg(partial(figures.plot_traffic, points, title), f"bytes {setting.name}"),
        "curves": curves
        and figures.responsive_svg(
            partial(figures.plot_learning_curves, curves, title), f"run {setting.name}"
        ),
        "drawn": [entry for entry in setting.entries if entry.spread(entry.metric) is not None],
        "decomposition": _decomposition(setting),
        "decomposition_plot": setting.decompositions
        and figures.responsive_svg(
            partial(figures.plot_decompositions, setting.decompositions, title),
            f"decomposition {setting.name}",
        ),
        "attacks": [results for entry in setting.entries if (results := _attack_results(entry))],
        "best_models": sorted(
            {MAIN_MODELS[entry.evaluated_model][0] for entry in setting.entries if entry.label in best}
        ),
        "verdicts": setting.verdicts(),
    }


def _decomposition(setting: ComparedSetting) -> Table | None:
    table = decomposition_table(setting)
    if table is None:
        return None
    rows = [
        replace(row, name=number_badge(part.entry.number) + Markup(" {}").format(row.name))
        for part, row in zip(setting.decompositions, table.rows, strict=True)
    ]
    columns = [replace(column, header=column.header.capitalize()) for column in table.columns]
    return replace(table, row_header="Method", columns=columns, rows=rows)


def _attack_results(entry: ComparedMethod) -> dict[str, Any] | None:
    for run in entry.runs:
        if run.leakage:
            return {
                "name": entry.name,
                "seed": run.seed,
                "skipped": skipped_texts(run.leakage),
                "sentence": run.leakage.sentence,
                "strength": describe_attacks(run.leakage),
            }
    return None


def describe_attacks(leakage: Leakage) -> str:
    """Return the attacks that were run and their strength in one line."""
    parts = [attack.strength for attack in leakage.attacks]
    return f"Attacks: {'; '.join(parts)}." if parts else "No attack was run."


# --- table of methods -------------------------------------------------------------------------------------


def _table(summary: ComparisonSummary, setting: ComparedSetting) -> Table:
    table = full_table(summary, setting)
    leakage_titles = {column.head: column.heading for column in summary.leakage_columns}
    columns = []
    for index, column in enumerate(table.columns):
        name = summary.shown_metrics()[index : index + 1]  # columns after the metrics are costs
        unit = " %" if name and summary.metric_named(name[0]).unit == "%" else ""
        title = f"{column.header[:1].upper()}{column.header[1:]}{unit}"
        columns.append(Column(leakage_titles.get(column.header, title), column.style))
    rows = []
    for entry, row in zip(setting.entries, table.rows, strict=True):
        reason = Cell(entry.missing_reason(), style="reason wide-cell", span=len(columns))
        rows.append(
            Row(
                _name(entry),
                [*(row.cells if entry.runs else [reason]), _releases_and_needs(entry), _report_links(entry)],
                group=row.group,
            )
        )
    columns += [Column("Releases and needs", "conditions wide-cell"), Column("Reports", "links")]
    suffix = f", {setting.name}" if setting.name else ""
    caption = f"{setting.metric.title}, traffic, time and requirements of each method{suffix}"
    return Table(caption, "Method", columns, rows, style="methods", no_value=NO_VALUE)


def _name(entry: ComparedMethod) -> Markup:
    title = f"{entry.title}, " if entry.name != entry.title else ""
    return Markup('<span class="name">{}<span>{}<span class="meaning">{}{}</span></span></span>').format(
        number_badge(entry.number), entry.name, title, MAIN_MODELS[entry.evaluated_model][0]
    )


def _releases_and_needs(entry: ComparedMethod) -> Cell:
    text = Markup("<span>releases:</span> {}<br><span>needs:</span> {}").format(
        releases_text(entry), needs_text(entry)
    )
    missing = Markup("<br><strong>{}</strong>").format(entry.missing_reason())
    return Cell(text + missing if entry.runs and entry.missing_reason() else text)


def _report_links(entry: ComparedMethod) -> Cell:
    link = Markup('<a href="{}/report.html">seed {}</a> ')
    return Cell(Markup("").join(link.format(quote(run.folder), run.seed) for run in entry.runs))


def write_comparison(out: Path, comparison: Comparison) -> Path:
    """Write page, CSV, LaTeX and Markdown of a comparison into its folder and return the path of the page.

    Raises:
        RunFolderError: a file of a run is broken.
    """
    summary = summarize(out, comparison)
    write_text(out / "compare.csv", runs_csv(summary))
    write_text(out / "compare-summary.csv", summary_csv(summary))
    write_text(out / "compare-pairs.csv", pairwise_differences_csv(summary))
    write_text(out / "compare-records.csv", records_csv(summary))
    write_text(out / "compare.tex", comparison_latex(summary))
    write_text(out / "compare.md", comparison_markdown(summary))
    write_text(out / "compare.html", render_comparison_page(summary))
    return out / "compare.html"


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
