"""The page of a comparison: one file that loads nothing, with links to the runs' own reports."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from fedstill.attacks.found import skipped
from fedstill.core.words import human_bytes, human_seconds
from fedstill.report import budgets, compare_figures, drawing
from fedstill.report.compare_leakage import notes, strength
from fedstill.report.compare_points import (
    against_epsilon_told,
    against_leakage_told,
    curves_of,
    curves_told,
    leaking_of,
    marks_of,
    traffic_told,
)
from fedstill.report.compare_tables import (
    best_of,
    called,
    count,
    gap_of,
    head_of,
    paper_text,
    shown,
)
from fedstill.report.metrics import in_a_sentence, told
from fedstill.report.result import CENTRAL
from fedstill.report.summary import LOCAL, Row, Setting, Spread, Summary
from fedstill.report.templates import environment


def html(summary: Summary) -> str:
    """The page: one file that loads nothing, with links to the runs' own reports."""
    lines = summary.budgets()
    return (
        environment()
        .get_template("compare.html.j2")
        .render(
            title=summary.about or (summary.name if summary.name != "compare" else "Methods, side by side"),
            name=summary.name,
            lede=_lede(summary),
            privacy=summary.privacy(),
            priced=summary.priced,
            settings=[_setting_view(summary, setting) for setting in summary.settings],
            lines=lines,
            epsilons=[(epsilon, budgets.named(epsilon)) for epsilon in budgets.budgets(lines)],
            against=_against(lines, summary.metric.title) if lines else None,
            papers=[
                (
                    paper,
                    called(summary, paper.figure),
                    Spread(paper.value, paper.std).text(summary.figure(paper.figure).digits),
                )
                for paper in summary.published
            ],
            metric=summary.metric.title,
            notes=summary.notes,
            command=summary.command,
            leaks=[leak.heading for leak in summary.leaks],
            leaking=_leaking(summary) if summary.leakage else None,
            columns=_columns(summary),
            single=len(summary.seeds) == 1,
            chip=_chip,
        )
    )


def _chip(place: int) -> Markup:
    """A method's number in its colour, as the drawings show it."""
    again = " again" if drawing.again(place) else ""
    return Markup('<span class="chip c{}{}" aria-hidden="true">{}</span>').format(
        (place - 1) % len(drawing.METHODS), again, place
    )


def _area(count: float, most: float) -> Markup:
    """A mark of some bytes alone, for a legend."""
    size = 2 * max(compare_figures.radius(count, most), compare_figures.DOT + 1)
    return Markup('<span class="area{}" style="width:{s:.1f}px;height:{s:.1f}px"></span>').format(
        "" if count else " none", s=size
    )


def _against(lines: Sequence[budgets.Line], title: str) -> Markup:
    draw = partial(compare_figures.against_epsilon, lines)
    return drawing.responsive(draw, against_epsilon_told(lines, title), "epsilon")


def _lede(summary: Summary) -> str:
    methods = len({row.label for row in summary.rows})
    settings, seeds = len(summary.settings), len(summary.seeds)
    parts = [f"{methods} method{'' if methods == 1 else 's'}"]
    if settings > 1:
        parts.append(f"{settings} settings")
    parts.append(f"{seeds} seed{'' if seeds == 1 else 's'}")
    runs = sum(len(row.runs) for row in summary.rows)
    return f"{', '.join(parts)}: {runs} run{'' if runs == 1 else 's'}, on equal terms."


def _leaking(summary: Summary) -> dict[str, Any]:
    """What methods reach against what attacks got, in one drawing."""
    found = leaking_of(summary)
    spots, column = found.spots, found.column
    most = max((spot.bytes for spot in spots), default=0.0)
    sizes = [round(share * most) for share in (1, 0.1, 0.01)] if most > 0 else []
    sizes += [0] if any(spot.bytes <= 0 for spot in spots) else []
    return {
        "drawing": None
        if column is None or not spots
        else drawing.responsive(
            partial(compare_figures.against_leakage, spots, column),
            against_leakage_told(spots, column, summary.metric.title),
            "leakage",
        ),
        "names": {spot.place: spot.name for spot in spots},
        "sizes": [(_area(size, most), human_bytes(size) if size else "nothing sent") for size in sizes],
        "letters": found.letters,
        "joined": any(spot.joined for spot in spots),
        "priced": summary.priced,
        "absent": found.absent,
        "column": column,
        "notes": notes(summary.leaks),
    }


def _columns(summary: Summary) -> list[dict[str, Any]]:
    """Columns of figures: their heads, and whether a paper's stand behind them."""
    compared = summary.compared()
    names = [*shown(summary), *(name for name in compared if name not in shown(summary))]
    columns = []
    for name in names:
        head, figure = head_of(summary, name), summary.figure(name)
        local = name.startswith(LOCAL)
        percents = f"{head} %" if figure.unit == "%" else head
        columns.append(
            {
                "name": name,
                "head": percents,
                "label": head,
                "paper": name in compared,
                "local": local,
                "about": "" if figure is summary.metric else f", {in_a_sentence(figure.title)}",
            }
        )
    return columns


def _setting_view(summary: Summary, setting: Setting) -> dict[str, Any]:
    highest, title = setting.best(), setting.metric.title
    best = best_of(summary, setting)
    rows = [_row_view(summary, place, row, best) for place, row in enumerate(setting.rows, start=1)]
    drawn, curves = marks_of(setting), curves_of(setting)
    return {
        "name": setting.name,
        "context": setting.context,
        "rows": rows,
        "scatter": drawing.responsive(
            partial(compare_figures.traffic, drawn),
            traffic_told(drawn, title),
            f"bytes {setting.name}",
        )
        if drawn
        else None,
        "curves": drawing.responsive(
            partial(compare_figures.curves, curves),
            curves_told(curves, title),
            f"run {setting.name}",
        )
        if curves
        else None,
        "title": title,
        "drawn": [row for row in rows if row["judged_value"] is not None],
        "got": [got for row in setting.rows if (got := _got(row))],
        "leaders": sorted({CENTRAL[row.central][0] for row in setting.rows if row.label in highest}),
    }


def _got(row: Row) -> dict[str, Any] | None:
    """What attacks got from a row's runs, in words: of its first seed that was attacked."""
    for run in row.runs:
        if run.leakage:
            told = {"sentence": run.leakage.sentence, "strength": strength(run.leakage)}
            return {"name": row.name, "seed": run.seed, "skipped": skipped(run.leakage), **told}
    return None


def _leaks_view(summary: Summary, row: Row) -> list[tuple[str, str | None, str]]:
    """Heads, figures and the attacks that they are of."""
    found = [(leak, row.leak(leak)) for leak in summary.leaks]
    return [(leak.heading, row.leaked(leak), "" if got is None else got[0]) for leak, got in found]


def _row_view(summary: Summary, place: int, row: Row, best: dict[str, set[str]]) -> dict[str, Any]:
    up, down, seconds = row.spread("bytes up"), row.spread("bytes down"), row.spread("seconds")
    return {
        "place": place,
        "name": row.name,
        "detail": row.title if row.name != row.title else "",
        "judged": CENTRAL[row.central][0] if row.central in CENTRAL else row.central,
        "judged_value": row.spread(row.metric),
        "figures": {name: row.shown(name, summary.figure(name).digits) for name in summary.names()},
        "best": [name for name in best if row.label in best[name]],
        "up": None if up is None else round(up.mean),
        "down": None if down is None else round(down.mean),
        "questions": count(row.spread("questions")),
        "seconds": None if seconds is None else human_seconds(seconds.mean),
        "epsilon": row.price(),
        "leaks": _leaks_view(summary, row),
        "leaves": ", ".join(row.leaves) or "nothing",
        "needs": ", ".join(row.needs) or "nothing",
        "papers": {
            name: {
                "value": paper_text(summary, row, name),
                "gap": gap_of(summary, row, name),
                "source": paper.source,
            }
            for name, paper in row.published.items()
        },
        "reason": row.reason(),
        "runs": [
            {
                "seed": run.seed,
                "link": f"{quote(run.folder)}/report.html",
                "value": None if (value := run.figure(row.metric)) is None else told(summary.metric, value),
            }
            for run in row.runs
        ],
    }
