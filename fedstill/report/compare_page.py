"""The page of a comparison: one file that loads nothing, with links to the runs' own reports."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from fedstill.attacks.leakage import Leakage, skipped_texts
from fedstill.core.text_format import format_bytes
from fedstill.report import compare_figures, compare_points, plotting
from fedstill.report.compare_summary import ComparedSetting, Summary
from fedstill.report.compare_table import budget_table, full_table, leakage_notes, leaves, needs
from fedstill.report.compared_method import ComparedMethod, Spread
from fedstill.report.result import MAIN_MODELS
from fedstill.report.table_formats import NONE, Cell, Column, Row, Table
from fedstill.report.templates import environment


def html(summary: Summary) -> str:
    """The page: one file that loads nothing, with links to the runs' own reports."""
    lines, metric = summary.budgets(), summary.metric.title
    by_budget = budget_table(summary)
    against = None
    if by_budget is not None:
        named = zip(lines, by_budget.rows, strict=True)
        rows = [replace(row, name=chip(line.place) + Markup(" {}").format(row.name)) for line, row in named]
        by_budget = replace(by_budget, name="Method", rows=rows)
        against = plotting.responsive(partial(compare_figures.against_epsilon, lines, metric), "epsilon")
    papers = []
    for paper in summary.published:
        value = Spread(paper.value, paper.std).text(summary.metric_named(paper.metric).digits)
        papers.append((paper, summary.called(paper.metric), value))
    template = environment().get_template("compare.html.j2")
    return template.render(
        title=summary.about or (summary.name if summary.name != "compare" else "Methods, side by side"),
        summary=summary,
        lede=_lede(summary),
        settings=[_setting(summary, setting) for setting in summary.settings],
        by_budget=by_budget,
        against=against,
        papers=papers,
        leaking=_leaking(summary) if summary.leakage else None,
        several=len(summary.metrics) > 1 or bool(set(summary.compared()) - set(summary.shown())),
        chip=chip,
    )


def chip(place: int) -> Markup:
    """A method's number in its color, as the drawings show it."""
    again = " again" if plotting.is_color_repeated(place) else ""
    return Markup('<span class="chip c{}{}" aria-hidden="true">{}</span>').format(
        (place - 1) % len(plotting.METHOD_COLORS), again, place
    )


def _lede(summary: Summary) -> str:
    counts = (
        ("method", len({entry.label for entry in summary.entries})),
        ("setting", len(summary.settings)),
        ("seed", len(summary.seeds)),
    )
    parts = [f"{n} {what}{'' if n == 1 else 's'}" for what, n in counts if n > 1 or what != "setting"]
    runs = sum(len(entry.runs) for entry in summary.entries)
    return f"{', '.join(parts)}: {runs} run{'' if runs == 1 else 's'}, on equal terms."


def _leaking(summary: Summary) -> dict[str, Any]:
    found = compare_points.leakage_scatter(summary)
    spots, column = found.spots, found.column
    most = max((spot.bytes for spot in spots), default=0.0)
    sizes = [round(share * most) for share in (1, 0.1, 0.01)] if most > 0 else []
    sizes += [0] if any(spot.bytes <= 0 for spot in spots) else []
    drawn = None
    if column is not None and spots:
        draw = partial(compare_figures.against_leakage, spots, column, summary.metric.title)
        drawn = plotting.responsive(draw, "leakage")
    return {
        **vars(found),
        "drawing": drawn,
        "names": {spot.place: spot.name for spot in spots},
        "sizes": [(_area(sent, most), format_bytes(sent) if sent else "nothing sent") for sent in sizes],
        "joined": any(spot.joined for spot in spots),
        "notes": leakage_notes(summary.leaks),
    }


def _area(count: float, most: float) -> Markup:
    side = 2 * max(compare_figures.radius(count, most), compare_figures.DOT + 1)
    return Markup('<span class="area{}" style="width:{s:.1f}px;height:{s:.1f}px"></span>').format(
        "" if count else " none", s=side
    )


def _setting(summary: Summary, setting: ComparedSetting) -> dict[str, Any]:
    title, best = setting.metric.title, setting.best(setting.metric)
    spots, curves = compare_points.scatter_points(setting), compare_points.learning_curves(setting)
    return {
        "name": setting.name,
        "context": setting.context,
        "title": title,
        "table": _table(summary, setting),
        "scatter": spots
        and plotting.responsive(partial(compare_figures.traffic, spots, title), f"bytes {setting.name}"),
        "curves": curves
        and plotting.responsive(partial(compare_figures.curves, curves, title), f"run {setting.name}"),
        "drawn": [entry for entry in setting.entries if entry.spread(entry.metric) is not None],
        "got": [got for entry in setting.entries if (got := _got(entry))],
        "leaders": sorted(
            {MAIN_MODELS[entry.central][0] for entry in setting.entries if entry.label in best}
        ),
        "verdicts": setting.verdicts(),
    }


def _got(entry: ComparedMethod) -> dict[str, Any] | None:
    for run in entry.runs:
        if run.leakage:
            got = {"sentence": run.leakage.sentence, "strength": strength(run.leakage)}
            return {"name": entry.name, "seed": run.seed, "skipped": skipped_texts(run.leakage), **got}
    return None


def strength(found: Leakage) -> str:
    """The attacks that were tried, and how strong they were, in one line."""
    parts = [attack.strength for attack in found.attacks]
    return f"Tried: {'; '.join(parts)}." if parts else "Nothing was tried."


# --- the table of methods ---------------------------------------------------------------------------------


def _table(summary: Summary, setting: ComparedSetting) -> Table:
    told = full_table(summary, setting)
    headings = {leak.head: leak.heading for leak in summary.leaks}
    columns = []
    for place, column in enumerate(told.columns):
        name = summary.shown()[place : place + 1]  # after the figures come bytes
        unit = " %" if name and summary.metric_named(name[0]).unit == "%" else ""
        capital = f"{column.head[:1].upper()}{column.head[1:]}{unit}"
        columns.append(Column(headings.get(column.head, capital), column.style))
    rows = []
    for entry, row in zip(setting.entries, told.rows, strict=True):
        reason = Cell(entry.reason(), style="reason wide-cell", span=len(columns))
        rows.append(
            Row(_name(entry), [*(row.cells if entry.runs else [reason]), _terms(entry), _reports(entry)])
        )
    columns += [Column("What leaves a node, what it needs", "told wide-cell"), Column("Reports", "links")]
    where = f", {setting.name}" if setting.name else ""
    caption = f"{setting.metric.title}, traffic, time and terms of each method{where}"
    return Table(caption, "Method", columns, rows, style="methods", none=NONE)


def _name(entry: ComparedMethod) -> Markup:
    detail = f"{entry.title}, " if entry.name != entry.title else ""
    return Markup('<span class="name">{}<span>{}<span class="meaning">{}{}</span></span></span>').format(
        chip(entry.place), entry.name, detail, MAIN_MODELS[entry.central][0]
    )


def _terms(entry: ComparedMethod) -> Cell:
    words = Markup("<span>leaves:</span> {}<br><span>needs:</span> {}").format(leaves(entry), needs(entry))
    lacking = Markup("<br><strong>{}</strong>").format(entry.reason())
    return Cell(words + lacking if entry.runs and entry.reason() else words)


def _reports(entry: ComparedMethod) -> Cell:
    link = Markup('<a href="{}/report.html">seed {}</a> ')
    return Cell(Markup("").join(link.format(quote(run.folder), run.seed) for run in entry.runs))
