"""The page of a comparison: one file that loads nothing, with links to the runs' own reports."""

from __future__ import annotations

import dataclasses
from typing import Any
from urllib.parse import quote

from fedstill.attacks.rows import Column
from fedstill.core.words import human_bytes, human_seconds
from fedstill.privacy.statement import epsilon_text
from fedstill.report import budgets, leak_plot, marks
from fedstill.report.compare_leakage import notes, sentence, skipped, strength
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
from fedstill.report.summary import LOCAL, Row, Setting, Spread, Summary
from fedstill.report.table import CENTRAL
from fedstill.report.templates import environment

LETTERS = "abcdefghijklmnopqrstuvwxyz"  # of settings, in a drawing


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
            against=budgets.plot(lines, summary.metric.title) if lines else None,
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
            chip=marks.chip,
        )
    )


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
    """What methods reach against what attacks got: one picture of all settings.

    Settings that differ in the budget alone are joined by method; others have a letter.
    """
    by_budget = bool(summary.budgets())
    column = next((leak for leak in summary.leaks if leak.axis), None)
    letters = (
        {} if by_budget or len(summary.settings) == 1 else dict(zip(LETTERS, summary.settings, strict=False))
    )
    named = {setting.name: letter for letter, setting in letters.items()}
    spots: list[tuple[float, leak_plot.Spot]] = []  # with the budget
    absent = []
    for setting in summary.settings:
        for place, row in enumerate(setting.rows, start=1):
            spot = None if column is None else _spot(column, place, row, setting, named.get(setting.name, ""))
            if spot is None:
                absent.append(", ".join(part for part in (row.name, setting.name) if part))
            else:
                spots.append((row.budget if by_budget else 0.0, spot))
    drawn: list[leak_plot.Spot] = []
    for _, spot in sorted(spots, key=lambda item: (item[1].place, item[0])):
        joined = by_budget and bool(drawn) and drawn[-1].place == spot.place
        drawn.append(dataclasses.replace(spot, joined=joined))
    most = max((spot.bytes for spot in drawn), default=0.0)
    sizes = [round(share * most) for share in (1, 0.1, 0.01)] if most > 0 else []
    sizes += [0] if any(spot.bytes <= 0 for spot in drawn) else []
    title = summary.metric.title
    return {
        "wide": leak_plot.leak_plot(drawn, column, title) if drawn and column else None,
        "narrow": leak_plot.leak_plot(drawn, column, title, leak_plot.NARROW) if drawn and column else None,
        "names": {spot.place: spot.name for spot in drawn},
        "sizes": [
            (leak_plot.area(size, most), human_bytes(size) if size else "nothing sent") for size in sizes
        ],
        "letters": [(letter, setting.name) for letter, setting in letters.items()],
        "joined": any(spot.joined for spot in drawn),
        "priced": summary.priced,
        "absent": absent,
        "column": column,
        "notes": notes(summary.leaks),
    }


def _spot(column: Column, place: int, row: Row, setting: Setting, letter: str) -> leak_plot.Spot | None:
    """One row in that picture; None where a figure is missing."""
    leak, reached, sent, kept = row.leak(column), row.spread(row.metric), row.traffic(), row.epsilon()
    if leak is None or reached is None or sent is None:
        return None
    epsilon = "" if kept is None else epsilon_text(kept[0])
    return leak_plot.Spot(
        place,
        row.name,
        leak[1].mean,
        reached.mean,
        sent,
        tag=", ".join(part for part in (letter, epsilon and f"\u03b5 {epsilon}") if part),
        where=", ".join(part for part in (setting.name, epsilon and f"epsilon {epsilon}") if part),
        leak_spread=leak[1].std,
        spread=reached.std,
    )


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
    drawn = [
        marks.Mark(place, row.name, row.traffic() or 0.0, reached.mean, reached.std)
        for place, row in enumerate(setting.rows, start=1)
        if (reached := row.spread(row.metric)) is not None and row.traffic() is not None
    ]
    curves = [
        marks.Curve(place, row.name, curve)
        for place, row in enumerate(setting.rows, start=1)
        if (curve := row.curve())
    ]
    return {
        "name": setting.name,
        "context": setting.context,
        "rows": rows,
        "scatter": marks.scatter_plot(drawn, title) if drawn else None,
        "curves": marks.curves_plot(curves, title) if curves else None,
        "title": title,
        "drawn": [row for row in rows if row["judged_value"] is not None],
        "got": [_got(row) for row in setting.rows if any(run.leakage for run in row.runs)],
        "leaders": sorted({CENTRAL[row.central][0] for row in setting.rows if row.label in highest}),
    }


def _got(row: Row) -> dict[str, Any]:
    """What attacks got from a row's runs, in words: of its first seed."""
    run = next(run for run in row.runs if run.leakage)
    found = run.leakage or {}
    return {
        "name": row.name,
        "seed": run.seed,
        "sentence": sentence(found),
        "strength": strength(found),
        "skipped": skipped(found),
    }


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
