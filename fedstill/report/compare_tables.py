"""A comparison as tables: CSV, LaTeX, Markdown, and in the terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from fedstill.attacks.rows import Column
from fedstill.core.words import human_bytes
from fedstill.report import budgets
from fedstill.report.compare_leakage import best
from fedstill.report.metrics import gap_text, head, in_a_sentence
from fedstill.report.privacy import guaranteed
from fedstill.report.result import Result
from fedstill.report.summary import ALL_TESTS, LOCAL, Row, Run, Setting, Spread, Summary

NONE = "-"

# --- CSV ----------------------------------------------------------------------------------------------

HEAD = ("setting", "method", "name", "title")
MARKS = ("standalone", "ensemble", "centralised")


def runs_csv(summary: Summary) -> str:
    """One row a run."""
    first, *others = summary.figures
    columns = (
        *HEAD, "seed", "status", "judged_by", first.key, f"local_{first.key}", f"local_{first.key}_all_tests",
        *MARKS,
        *(f"{whose}{other.key}" for other in others for whose in ("", "local_", *(f"{m}_" for m in MARKS))),
        "bytes_up", "bytes_down", "questions", "turn", "turns", "seconds", "epsilon", "delta",
        *(leak.name for leak in summary.leaks), "leaves", "needs", "reason", "folder",
    )  # fmt: skip
    return _csv(columns, _run_records(summary))


def summary_csv(summary: Summary) -> str:
    """One row a method in a setting."""
    first = summary.metric
    measured = _means(summary)
    compared = [name for name in summary.names() if name in summary.compared() or first.key in name.split()]
    columns = (
        *HEAD, "seeds", "judged_by",
        *(f"{_column(name)}_{what}" for name in measured for what in ("mean", "std")),
        "bytes_up_mean", "bytes_down_mean", "questions_mean", "seconds_mean", "epsilon_most", "delta",
        *(f"{leak.name}_{what}" for leak in summary.leaks for what in ("mean", "std", "attack")),
        "leaves", "needs",
        *(
            column
            for name in compared
            for column in (
                f"paper_{_column(name)}", f"paper_{_column(name)}_std", f"paper_{_column(name)}_source",
                f"{_column(name)}_gap",
            )
        ),
        "reason",
    )  # fmt: skip
    return _csv(columns, _summary_records(summary))


def _means(summary: Summary) -> list[str]:
    """The names of the figures that means are given of."""
    first, local, *others = summary.names()
    return [first, local, f"{local}{ALL_TESTS}", *others]


def _csv(columns: Sequence[str], records: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def _run_records(summary: Summary) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    others = [figure.key for figure in summary.figures[1:]]
    for setting in summary.settings:
        for row in setting.rows:
            head = _head(setting, row)
            for run in row.runs:
                figures = (*_means(summary), "seconds")
                counts = ("bytes up", "bytes down", "questions", "turns")
                marks = {f"{mark}_{key}": run.figure(f"{mark} {key}") for mark in MARKS for key in others}
                marks.update({mark: run.figure(f"{mark} {summary.metric.key}") for mark in MARKS})
                records.append(
                    {
                        **head,
                        **marks,
                        **{_column(name): run.figure(name) for name in figures},
                        **{_column(name): _whole(run.figure(name)) for name in counts},
                        "seed": run.seed,
                        "status": "finished",
                        "turn": run.result.turn,
                        **dict(zip(("epsilon", "delta"), guaranteed(run.result) or (), strict=False)),
                        **{leak.name: _of_run(leak, run) for leak in summary.leaks},
                        "leaves": _joined(run.result, row),
                        "folder": run.folder,
                    }
                )
            for seed, reason in row.not_run.items():
                status = "stopped" if reason.startswith("stopped: ") else "refused"
                records.append({**head, "seed": seed, "status": status, "reason": reason})
            records += [{**head, "seed": seed, "status": "not finished"} for seed in row.missing]
    return records


def _summary_records(summary: Summary) -> list[dict[str, Any]]:
    records = []
    for setting in summary.settings:
        for row in setting.rows:
            record: dict[str, Any] = {**_head(setting, row), "seeds": len(row.runs), "reason": row.reason()}
            for name in _means(summary):
                ours = row.spread(name)
                record[f"{_column(name)}_mean"] = None if ours is None else ours.mean
                record[f"{_column(name)}_std"] = None if ours is None else ours.std
            for name in ("bytes up", "bytes down", "questions", "seconds"):
                ours = row.spread(name)
                record[f"{_column(name)}_mean"] = None if ours is None else ours.mean
            record.update(zip(("epsilon_most", "delta"), row.epsilon() or (), strict=False))
            for leak in summary.leaks:
                attack, got = row.leak(leak) or ("", None)
                record[f"{leak.name}_mean"] = None if got is None else got.mean
                record[f"{leak.name}_std"] = None if got is None else got.std
                record[f"{leak.name}_attack"] = attack
            for name, paper in row.published.items():
                record[f"paper_{_column(name)}"], record[f"paper_{_column(name)}_std"] = (
                    paper.value,
                    paper.std,
                )
                record[f"paper_{_column(name)}_source"] = paper.source
                record[f"{_column(name)}_gap"] = row.gap(name)
            records.append(record)
    return records


def _head(setting: Setting, row: Row) -> dict[str, Any]:
    names = {"setting": setting.name, "method": row.label, "name": row.method, "title": row.title}
    return {**names, "judged_by": row.central, "leaves": "; ".join(row.leaves), "needs": "; ".join(row.needs)}


def _joined(result: Result, row: Row) -> str:
    return "; ".join(result.leaves or row.leaves)


def _of_run(leak: Column, run: Run) -> float | None:
    """What the attack that is strongest on one run got."""
    got = best(leak, [run.leakage])
    return None if got is None else got[1][0]


def _column(name: str) -> str:
    return name.replace(",", "").replace(" ", "_")


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


# --- LaTeX and Markdown -------------------------------------------------------------------------------


def latex(summary: Summary) -> str:
    """The table for a paper; it needs the package booktabs."""
    names, compared = shown(summary), summary.compared()
    heads = [
        "Method",
        *(_tex(f"{head[:1].upper()}{head[1:]}") for head in heads_of(summary, names, compared)),
    ]
    heads[len(names) + 2] = "Bytes down"
    gaps = range(len(heads) - 1, len(heads) - 1 - 2 * len(compared), -2)
    lines = [
        "% Needs \\usepackage{booktabs}.",
        *(f"% {_comment(note)}" for note in summary.notes),
        *(
            f"% Paper: {_comment(f'{paper.method}, {paper.figure}: {paper.source}')}"
            for paper in summary.published
        ),
        f"\\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}",
        "\\toprule",
        f"{' & '.join(heads)} \\\\",
    ]
    for setting in summary.settings:
        lines.append("\\midrule")
        if setting.name:
            lines.append(f"\\multicolumn{{{len(heads)}}}{{l}}{{\\emph{{{_tex(setting.name)}}}}} \\\\")
        best = best_of(summary, setting)
        for row in setting.rows:
            if not row.runs:
                reason = f"\\multicolumn{{{len(heads) - 1}}}{{l}}{{{_tex(row.reason())}}}"
                lines.append(f"{_tex(row.name)} & {reason} \\\\")
                continue
            cells = [row.name, *cells_of(summary, row, names, compared)]
            if summary.priced:
                cells[len(names) + 5] = row.price()
            told = ["--" if cell == NONE else _tex(cell) for cell in cells]
            for place, name in enumerate(names, start=1):
                told[place] = f"\\textbf{{{told[place]}}}" if row.label in best[name] else told[place]
            for place in gaps:
                told[place] = told[place] if told[place] == "--" else f"${cells[place]}$"
            lines.append(f"{' & '.join(told)} \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def markdown(summary: Summary) -> str:
    """A table for each setting, for a page of documentation; before them accuracy against epsilon."""
    names = shown(summary)
    heads = ["method", "judged by", *heads_of(summary, names, summary.compared())]
    priced = summary.budgets()
    lines = [*budgets.table(priced), ""] if priced else []
    for setting in summary.settings:
        if setting.name:
            lines += [f"**{setting.name}**", ""]
        lines += [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
        best = best_of(summary, setting)
        for row in setting.rows:
            told = cells_of(summary, row, names, summary.compared())
            for place, name in enumerate(names if row.runs else ()):
                if row.label in best[name]:
                    told[place] = f"**{told[place]}**"
            cells = [row.name, row.central or NONE, *told]
            lines.append(f"| {' | '.join(' '.join(cell.split()) for cell in cells)} |")
        lines.append("")
        left_out = [row for row in setting.rows if not row.runs and row.reason()]
        lines += [f"{row.name}: {row.reason()}." for row in left_out] + [""] * bool(left_out)
    return "\n".join(lines)


SPECIAL = {
    "\\": "\\textbackslash{}", "&": "\\&", "%": "\\%", "$": "\\$", "#": "\\#", "_": "\\_", "{": "\\{",
    "}": "\\}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "\u00b1": "$\\pm$",
    "\u2193": "$\\downarrow$",
}  # fmt: skip


def _tex(text: str) -> str:
    """Text with what LaTeX would read as a command escaped.

    >>> print(_tex("a_b & 5%"))
    a\\_b \\& 5\\%
    """
    return "".join(SPECIAL.get(letter, letter) for letter in " ".join(text.split()))


def _comment(text: str) -> str:
    return " ".join(text.split())


# --- words that all forms share -----------------------------------------------------------------------


def shown(summary: Summary) -> list[str]:
    """The names of the figures in tables: those of the central model, and of the nodes' own the first."""
    first, local, *others = summary.names()
    return [first, local, *(name for name in others if not name.startswith(LOCAL))]


def best_of(summary: Summary, setting: Setting) -> dict[str, set[str]]:
    """Who is best in each figure; nobody in the nodes' own, whose models are not compared."""
    best = {figure.key: setting.best(figure) for figure in setting.figures}
    return {name: best.get(name, set()) for name in shown(summary)}


def head_of(summary: Summary, name: str) -> str:
    """Over the column of a figure: "Accuracy", "Local accuracy", "HD95 \u2193 px"."""
    figure = summary.figure(name)
    told = head(figure, units=figure.unit != "%")
    return f"Local {in_a_sentence(told)}" if name.startswith(LOCAL) else told


def called(summary: Summary, name: str) -> str:
    """A figure in a sentence: "local accuracy", "HD95"."""
    title = in_a_sentence(summary.figure(name).title)
    return f"{LOCAL}{title}" if name.startswith(LOCAL) else title


def of_what(summary: Summary, name: str) -> str:
    """What a published figure is of, after "paper" or "gap": nothing for what models are judged by."""
    about = [] if summary.figure(name) is summary.metric else [summary.figure(name).title]
    about += ["local"] if name.startswith(LOCAL) else []
    return "".join(f", {part}" for part in about)


def paper_text(summary: Summary, row: Row, name: str) -> str | None:
    paper = row.published.get(name)
    return None if paper is None else Spread(paper.value, paper.std).text(summary.figure(name).digits)


def gap_of(summary: Summary, row: Row, name: str) -> str:
    gap = row.gap(name)
    return NONE if gap is None else gap_text(summary.figure(name), gap)


def _bytes(spread: Spread | None) -> str:
    return NONE if spread is None else human_bytes(round(spread.mean))


def count(spread: Spread | None) -> str:
    return NONE if spread is None else f"{round(spread.mean):,}"


def _seconds(row: Row) -> str:
    spread = row.spread("seconds")
    return NONE if spread is None else f"{spread.mean:,.1f}" if spread.mean < 100 else f"{spread.mean:,.0f}"


def heads_of(
    summary: Summary, names: Sequence[str], compared: Sequence[str], leaks: Sequence[Column] | None = None
) -> list[str]:
    """Over the cells that :func:`cells_of` gives."""
    heads = [in_a_sentence(head_of(summary, name)) for name in names]
    heads += ["bytes up", "down", "questions", "seconds", *(["epsilon"] if summary.priced else [])]
    heads += [leak.head for leak in (summary.leaks if leaks is None else leaks)]
    return heads + [f"{word}{of_what(summary, name)}" for name in compared for word in ("paper", "gap")]


def cells_of(
    summary: Summary,
    row: Row,
    names: Sequence[str],
    compared: Sequence[str],
    leaks: Sequence[Column] | None = None,
) -> list[str]:
    """A row's figures: those with these names, bytes, questions, seconds, epsilon, what attacks got (all that
    the comparison has, unless others are named), and papers' figures.
    """
    leaks = summary.leaks if leaks is None else leaks
    if not row.runs:
        short = row.reason().partition(":")[0]
        lacking = len(names) + 3 + summary.priced + len(leaks) + 2 * len(compared)
        return [short, *[NONE] * lacking]
    cells = [
        *(row.shown(name, summary.figure(name).digits) or NONE for name in names),
        *(_bytes(row.spread(name)) for name in ("bytes up", "bytes down")),
        count(row.spread("questions")),
        _seconds(row),
        *([row.price() if row.epsilon() else NONE] if summary.priced else []),
        *(row.leaked(leak) or NONE for leak in leaks),
    ]
    for name in compared:
        cells += [paper_text(summary, row, name) or NONE, gap_of(summary, row, name)]
    return cells
