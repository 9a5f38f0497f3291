"""A comparison's figures, for people and for papers: terminal, HTML, CSV, LaTeX, from the files of its runs.

Every figure is that of the last round on data that no node saw. Means and standard deviations are over
seeds; the standard deviation is the sample's (n - 1), and one seed alone has none.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fedstill.node.gate import PRIVATE_DATA
from fedstill.privacy.statement import NO_GUARANTEE, epsilon_text
from fedstill.records import write_text
from fedstill.report import budgets, plots
from fedstill.report.files import Metrics, read_metrics, read_result
from fedstill.report.page import environment
from fedstill.report.privacy import guaranteed
from fedstill.report.table import (
    CENTRAL,
    accuracy_of,
    human_bytes,
    human_seconds,
    needs_words,
    number,
    percent,
    pick,
    points,
    whole,
    words,
)

if TYPE_CHECKING:
    from fedstill.compare import Comparison
    from fedstill.config import PaperFigure

__all__ = ["Row", "Spread", "Summary", "print_comparison", "summarise", "write_comparison"]

FIGURES = ("accuracy", "local accuracy")  # that papers publish
WIDE = 130  # columns of a terminal that takes everything in one table
NONE = "-"


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds.

    >>> Spread.of([90.0, 92.0, 97.0])
    Spread(mean=93.0, std=3.605551275463989)
    >>> Spread.of([90.0])
    Spread(mean=90.0, std=None)
    """

    mean: float
    std: float | None = None

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        """Of values, or None where one is missing: no mean over fewer seeds than the others have."""
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return None
        mean = math.fsum(known) / len(known)
        if len(known) == 1:
            return cls(mean)
        return cls(mean, math.sqrt(math.fsum((value - mean) ** 2 for value in known) / (len(known) - 1)))

    def text(self) -> str:
        """ "93.0 ± 3.6": percent, without its sign."""
        return f"{self.mean:.1f}" + ("" if self.std is None else f" \u00b1 {self.std:.1f}")


@dataclass(frozen=True)
class Run:
    """One finished run: what its files say."""

    seed: int
    folder: str
    result: Mapping[str, Any]
    metrics: Metrics

    def figure(self, name: str) -> float | None:
        """One of the figures that means are taken of."""
        where: Mapping[str, tuple[str, ...]] = {
            "local accuracy": ("local", "share", "mean"),
            "local accuracy, all tests": ("local", "accuracy", "mean"),
            "standalone": ("standalone", "accuracy", "mean"),
            "ensemble": ("ensemble", "accuracy"),
            "centralised": ("centralised", "accuracy"),
            "bytes up": ("bytes", "up"),
            "bytes down": ("bytes", "down"),
            "questions": ("questions",),
            "turns": ("turns",),
            "seconds": ("seconds", "total"),
        }
        return accuracy_of(self.result) if name == "accuracy" else number(self.result, *where[name])


@dataclass(frozen=True)
class Row:
    """One method in one setting."""

    label: str
    method: str
    title: str
    central: str
    leaves: tuple[str, ...]
    needs: tuple[str, ...]
    runs: tuple[Run, ...] = ()
    not_run: Mapping[int, str] = field(default_factory=dict)  # reasons by seed
    missing: tuple[int, ...] = ()  # seeds whose runs are not finished
    published: Mapping[str, PaperFigure] = field(default_factory=dict)  # by figure
    budget: float = math.inf  # epsilon that a run may cost each node

    @property
    def name(self) -> str:
        """As people write it; where a method stands here more than once, as the comparison calls it."""
        return self.title if self.label == self.method else self.label

    def spread(self, figure: str) -> Spread | None:
        """A figure over seeds."""
        return Spread.of([run.figure(figure) for run in self.runs])

    def gap(self, figure: str) -> float | None:
        """Ours minus the paper's."""
        ours, paper = self.spread(figure), self.published.get(figure)
        return None if ours is None or paper is None else ours.mean - paper.value

    def epsilon(self) -> tuple[float, float] | None:
        """An epsilon and a delta that hold at each node in each run; None if one has no guarantee."""
        kept = [price for run in self.runs if (price := guaranteed(run.result)) is not None]
        if not kept or len(kept) < len(self.runs):
            return None
        return max(epsilon for epsilon, _ in kept), max(delta for _, delta in kept)

    def price(self) -> str:
        """That epsilon, or "no guarantee", or that nothing left the nodes."""
        kept = self.epsilon()
        if all(run.figure("bytes up") == 0 for run in self.runs):
            return "nothing left"
        return NO_GUARANTEE if kept is None else epsilon_text(kept[0])

    def traffic(self) -> float | None:
        """Bytes up and down of a whole run, all nodes, the mean over seeds."""
        up, down = self.spread("bytes up"), self.spread("bytes down")
        return None if up is None or down is None else up.mean + down.mean

    def reason(self) -> str:
        """Why runs are lacking, in one line; empty where none is."""
        reasons: dict[str, list[int]] = {}
        for seed, text in self.not_run.items():
            reasons.setdefault(text if text.startswith("stopped: ") else f"refused: {text}", []).append(seed)
        for seed in self.missing:
            reasons.setdefault("not finished", []).append(seed)
        if len(reasons) == 1 and not self.runs:
            return next(iter(reasons))
        return "; ".join(f"{text} (seed {_listed(seeds)})" for text, seeds in reasons.items())

    def curve(self) -> list[tuple[float, float]]:
        """Accuracy over the share of the run that is done, the mean over seeds."""
        lines = []
        for run in self.runs:
            last = run.figure("turns") or max(run.metrics.accuracy, default=0)
            lines.append({step / last: value for step, value in run.metrics.accuracy.items()} if last else {})
        shared = set.intersection(*map(set, lines)) if lines else set()
        return [(share, math.fsum(line[share] for line in lines) / len(lines)) for share in sorted(shared)]


@dataclass(frozen=True)
class Setting:
    """One setting of a comparison: its methods, in the order in which they were given."""

    name: str
    context: str
    rows: tuple[Row, ...]

    def highest(self) -> set[str]:
        """Labels with the highest mean accuracy among those that are judged by the same kind of model.

        Where the data themselves leave the nodes there is no federation, but a mark to reach.
        """
        best: dict[str, tuple[float, str]] = {}
        rows = [row for row in self.rows if row.spread("accuracy") and PRIVATE_DATA not in row.leaves]
        kinds = [row.central for row in rows]
        for row in rows:
            ours = row.spread("accuracy")
            if ours and kinds.count(row.central) > 1 and ours.mean > best.get(row.central, (-1.0, ""))[0]:
                best[row.central] = (ours.mean, row.label)
        return {label for _, label in best.values()}


@dataclass(frozen=True)
class Summary:
    """A comparison with its figures."""

    name: str
    about: str
    seeds: tuple[int, ...]
    settings: tuple[Setting, ...]
    notes: tuple[str, ...]
    published: tuple[PaperFigure, ...]  # those that stand in the table
    command: str

    @property
    def rows(self) -> list[Row]:
        """Of all settings."""
        return [row for setting in self.settings for row in setting.rows]

    @property
    def priced(self) -> bool:
        """Whether any row has a guarantee of privacy."""
        return any(row.epsilon() is not None for row in self.rows)

    def budgets(self) -> list[budgets.Line]:
        """Each method's accuracy under each budget; none unless settings differ in it, each from each."""
        lines = []
        for place, rows in enumerate(zip(*(setting.rows for setting in self.settings), strict=True), start=1):
            asked = [row.budget for row in rows]
            if len(rows) < 2 or len(set(asked)) < len(rows):
                return []
            points = [
                budgets.Point(row.budget, accuracy.mean, accuracy.std)
                for row in rows
                if (accuracy := row.spread("accuracy")) is not None
            ]
            lines.append(budgets.Line(place, rows[0].name, points))
        return lines if any(line.points for line in lines) else []

    def privacy(self) -> str:
        """Which runs have a formal guarantee of privacy."""
        runs = [run for row in self.rows for run in row.runs if run.figure("bytes up")]
        kept = sum(guaranteed(run.result) is not None for run in runs)
        if kept == 0:
            return "There is no formal guarantee of privacy."
        if kept == len(runs):
            return "What left the nodes has a formal guarantee of privacy in every run: see epsilon."
        have = f"{kept} {'has' if kept == 1 else 'have'} a formal guarantee of privacy (see epsilon)"
        return f"Of {len(runs)} runs in which anything left the nodes {have}, the others none."


# --- from files to figures ----------------------------------------------------------------------------


def summarise(out: Path, comparison: Comparison) -> Summary:
    """The figures of a comparison, from the folders of its runs.

    Raises:
        RunFolderError: a file in them is broken.
    """
    from fedstill import compare

    reasons = compare.not_run(out)
    settings = []
    for name in comparison.settings:
        rows = tuple(_row(out, comparison, name, label, reasons) for label in comparison.methods)
        settings.append(Setting(name, _context(comparison, name, rows), rows))
    found = {
        figure: None for setting in settings for row in setting.rows for figure in row.published.values()
    }
    return Summary(
        name=comparison.name,
        about=comparison.about,
        seeds=comparison.seeds,
        settings=tuple(settings),
        notes=tuple(_notes(comparison, settings)),
        published=tuple(found),
        command=compare.command_of(out),
    )


def _row(out: Path, comparison: Comparison, setting: str, label: str, reasons: Mapping[str, str]) -> Row:
    from fedstill import compare
    from fedstill.methods import method_of

    runs, not_run, missing = [], {}, []
    for seed in comparison.seeds:
        place = compare.Place(setting, label, seed)
        if place.folder in reasons:
            not_run[seed] = reasons[place.folder]
        elif (out / place.folder / "result.json").exists():
            result = read_result(out / place.folder / "result.json")
            runs.append(Run(seed, place.folder, result, read_metrics(out / place.folder / "metrics.jsonl")))
        else:
            missing.append(seed)
    config = comparison.config(compare.Place(setting, label, comparison.seeds[0]))
    method = method_of(config.method)
    published = {figure: comparison.published(setting, label, figure) for figure in FIGURES}
    return Row(
        label=label,
        method=method.name,
        title=method.title,
        central=method.central,
        leaves=compare.what_leaves(config),
        needs=needs_words(method.needs(config.method)),
        runs=tuple(runs),
        not_run=not_run,
        missing=tuple(missing),
        published={figure: paper for figure, paper in published.items() if paper is not None},
        budget=config.nodes.privacy.epsilon,
    )


def _context(comparison: Comparison, setting: str, rows: Sequence[Row]) -> str:
    """Data, split, networks and local budget, in one line."""
    from fedstill.compare import Place

    # What holds for all methods is best seen in one that has no run options of its own.
    label = min(comparison.methods, key=lambda name: "nodes" in comparison.runs.get(name, {}))
    config = comparison.config(Place(setting, label, comparison.seeds[0]))
    data, split, local = config.data, config.split, config.nodes.local
    how = {
        "dirichlet": f"Dirichlet alpha {split.alpha:g}",
        "shards": f"{split.classes_per_node} classes a node",
    }
    batch = f"batch {local.batch}"
    parts = [
        f"{data.name}, {split.nodes} nodes, {how.get(split.how, split.how)}",
        f"networks {', '.join(config.nodes.models)}, student {config.student.model}",
        f"each node trains {local.epochs:g} epochs in all, {local.optimiser}, rate {local.lr:g}, {batch}",
    ]
    notes = {words(run.result, "data", "note"): None for row in rows for run in row.runs}
    public = {_public(run.result): None for row in rows for run in row.runs}
    return "; ".join([*parts, *(note for note in (*notes, *public) if note)])


def _public(result: Mapping[str, Any]) -> str | None:
    name = words(result, "public", "name")
    if name is None:
        return None
    count, note = whole(result, "public", "examples"), words(result, "public", "note")
    size = "" if count is None else f", {count:,} examples"
    return f"public data: {name}{size}" + ("" if note is None else f" ({note})")


def _notes(comparison: Comparison, settings: Sequence[Setting]) -> list[str]:
    """What a reader must know to call the comparison fair, or not."""
    from fedstill.compare import SHARED

    count = len(comparison.seeds)
    over = (
        "one seed alone: no spread is known" if count == 1 else f"mean \u00b1 sample deviation, {count} seeds"
    )
    notes = [
        f"Accuracy is in percent, of the last round, on test data that no node saw ({over}).",
        "One seed gives all methods the same split, first weights drawn alike, the same local optimiser, "
        "batch and number of local epochs; local data are shuffled. Statistics of batch norm are part of a "
        "network: they travel and are averaged with the parameters around them.",
        "Bold is the highest mean of those judged by the same kind of model, where no data leave a node; "
        "methods stand as given.",
    ]
    if not comparison.sets_policy:
        notes.append(
            "Nodes let outputs pass and nothing else, except to methods that need more: these run under a "
            "policy that allows it, which owners of data would have to give."
        )
    kinds = {row.central for setting in settings for row in setting.rows}
    notes += [f"{CENTRAL[kind][0].capitalize()}: {CENTRAL[kind][1]}." for kind in CENTRAL if kind in kinds]
    if "ensemble" in kinds:
        notes.append(
            "An ensemble asks all nodes about every input that it is used on: that is not in its bytes."
        )
    notes.append(
        "Local accuracy is the mean over the nodes' own models at the end, each on a random share of the "
        "test data of its own (FedMD-CG, section 3.1); on all test data it is in the CSV."
    )
    deltas = {kept[1] for setting in settings for row in setting.rows if (kept := row.epsilon()) is not None}
    if deltas:
        notes.append(
            "Epsilon: what a run costs each record (or group of records) of a node, the most over nodes and "
            f"seeds, rounded up, at delta {', '.join(f'{delta:g}' for delta in sorted(deltas))}. What was "
            "learned in choosing options by looking at private data is not in it."
        )
    for label, table in comparison.runs.items():
        keys = ", ".join(_dotted(table))
        # How a node is protected is of its owner, and what a comparison by privacy is about.
        nodes = {key: value for key, value in table.get("nodes", {}).items() if key != "privacy"}
        if nodes or any(key in SHARED for key in table if key != "nodes"):
            notes.append(f"Not on equal terms: {label} has other run options ({keys}).")
        elif keys:
            notes.append(f"{label} has run options of its own: {keys}.")
    if comparison.changed:
        notes.append(f"Options given on the command line: {', '.join(comparison.changed)}.")
        if comparison.paper:
            notes.append("Published figures are of the setting without those options.")
    return notes


def _dotted(table: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Every value of a table with its dotted name: "evaluation.every = 5"."""
    found = []
    for key, value in table.items():
        nested = isinstance(value, Mapping)
        found += _dotted(value, f"{prefix}{key}.") if nested else [f"{prefix}{key} = {value}"]
    return found


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


# --- files --------------------------------------------------------------------------------------------


def write_comparison(out: Path, comparison: Comparison) -> Path:
    """Write page, CSV and LaTeX of a comparison into its folder; returns the path of the page.

    Raises:
        RunFolderError: a file of a run is broken.
    """
    summary = summarise(out, comparison)
    write_text(out / "compare.csv", _csv(RUN_COLUMNS, _run_records(summary)))
    write_text(out / "compare-summary.csv", _csv(SUMMARY_COLUMNS, _summary_records(summary)))
    write_text(out / "compare.tex", latex(summary))
    write_text(out / "compare.md", markdown(summary))
    write_text(out / "compare.html", html(summary))
    return out / "compare.html"


RUN_COLUMNS = (
    "setting", "method", "name", "title", "seed", "status", "judged_by", "accuracy", "local_accuracy",
    "local_accuracy_all_tests", "standalone", "ensemble", "centralised", "bytes_up", "bytes_down",
    "questions", "turn", "turns", "seconds", "epsilon", "delta", "leaves", "needs", "reason", "folder",
)  # fmt: skip
SUMMARY_COLUMNS = (
    "setting", "method", "name", "title", "seeds", "judged_by", "accuracy_mean", "accuracy_std",
    "local_accuracy_mean", "local_accuracy_std", "local_accuracy_all_tests_mean",
    "local_accuracy_all_tests_std", "bytes_up_mean", "bytes_down_mean", "questions_mean", "seconds_mean",
    "epsilon_most", "delta", "leaves", "needs", "paper_accuracy", "paper_accuracy_std",
    "paper_accuracy_source", "accuracy_gap", "paper_local_accuracy", "paper_local_accuracy_std",
    "paper_local_accuracy_source", "local_accuracy_gap", "reason",
)  # fmt: skip


def _csv(columns: Sequence[str], records: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def _run_records(summary: Summary) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for setting in summary.settings:
        for row in setting.rows:
            head = _head(setting, row)
            for run in row.runs:
                figures = (
                    "accuracy", "local accuracy", "local accuracy, all tests", "standalone", "ensemble",
                    "centralised", "seconds",
                )  # fmt: skip
                counts = ("bytes up", "bytes down", "questions", "turns")
                records.append(
                    {
                        **head,
                        **{_column(name): run.figure(name) for name in figures},
                        **{_column(name): _whole(run.figure(name)) for name in counts},
                        "seed": run.seed,
                        "status": "finished",
                        "turn": words(run.result, "turn"),
                        **dict(zip(("epsilon", "delta"), guaranteed(run.result) or (), strict=False)),
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
            for name in ("accuracy", "local accuracy", "local accuracy, all tests"):
                ours = row.spread(name)
                record[f"{_column(name)}_mean"] = None if ours is None else ours.mean
                record[f"{_column(name)}_std"] = None if ours is None else ours.std
            for name in ("bytes up", "bytes down", "questions", "seconds"):
                ours = row.spread(name)
                record[f"{_column(name)}_mean"] = None if ours is None else ours.mean
            record.update(zip(("epsilon_most", "delta"), row.epsilon() or (), strict=False))
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


def _joined(result: Mapping[str, Any], row: Row) -> str:
    stored = pick(result, "leaves")
    return "; ".join(map(str, stored)) if isinstance(stored, list) else "; ".join(row.leaves)


def _column(name: str) -> str:
    return name.replace(",", "").replace(" ", "_")


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


# --- LaTeX --------------------------------------------------------------------------------------------


def latex(summary: Summary) -> str:
    """The table for a paper; it needs the package booktabs."""
    figures = [name for name in FIGURES if any(name in row.published for row in summary.rows)]
    heads = ["Method", "Accuracy", "Local accuracy", "Bytes up", "Bytes down", "Questions", "Seconds"]
    heads += ["Epsilon"] if summary.priced else []
    for name in figures:
        heads += ["Paper", "Gap"] if name == "accuracy" else ["Paper, local", "Gap, local"]
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
        highest = setting.highest()
        for row in setting.rows:
            if not row.runs:
                reason = f"\\multicolumn{{{len(heads) - 1}}}{{l}}{{{_tex(row.reason())}}}"
                lines.append(f"{_tex(row.name)} & {reason} \\\\")
                continue
            accuracy = _tex_spread(row.spread("accuracy"))
            cells = [
                _tex(row.name),
                f"\\textbf{{{accuracy}}}" if row.label in highest else accuracy,
                _tex_spread(row.spread("local accuracy")),
                *(_tex(_bytes(row.spread(name))) for name in ("bytes up", "bytes down")),
                _tex(_count(row.spread("questions"))),
                _tex(_seconds(row)),
                *([_tex(row.price())] if summary.priced else []),
            ]
            for name in figures:
                cells += [_tex_spread(_paper(row, name)), _tex_gap(row.gap(name))]
            lines.append(f"{' & '.join(cells)} \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def markdown(summary: Summary) -> str:
    """A table for each setting, for a page of documentation; before them accuracy against epsilon."""
    figures = [name for name in FIGURES if any(name in row.published for row in summary.rows)]
    heads = ["method", "judged by", "accuracy", "local accuracy", "bytes up", "down", "questions", "seconds"]
    heads += ["epsilon"] if summary.priced else []
    for name in figures:
        heads += ["paper", "gap"] if name == "accuracy" else ["paper, local", "gap, local"]
    priced = summary.budgets()
    lines = [*budgets.table(priced), ""] if priced else []
    for setting in summary.settings:
        if setting.name:
            lines += [f"**{setting.name}**", ""]
        lines += [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
        highest = setting.highest()
        for row in setting.rows:
            accuracy, *rest = _cells(row, figures, summary.priced)
            shown = f"**{accuracy}**" if row.label in highest else accuracy
            cells = [row.name, row.central or NONE, shown, *rest]
            lines.append(f"| {' | '.join(' '.join(cell.split()) for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


SPECIAL = {
    "\\": "\\textbackslash{}", "&": "\\&", "%": "\\%", "$": "\\$", "#": "\\#", "_": "\\_", "{": "\\{",
    "}": "\\}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "\u00b1": "$\\pm$",
}  # fmt: skip


def _tex(text: str) -> str:
    """Text with what LaTeX would read as a command escaped.

    >>> print(_tex("a_b & 5%"))
    a\\_b \\& 5\\%
    """
    return "".join(SPECIAL.get(letter, letter) for letter in " ".join(text.split()))


def _comment(text: str) -> str:
    return " ".join(text.split())


def _tex_spread(spread: Spread | None) -> str:
    return "--" if spread is None else _tex(spread.text())


def _tex_gap(gap: float | None) -> str:
    return "--" if gap is None else f"${points(gap)}$"


# --- words that all forms share -----------------------------------------------------------------------


def _paper(row: Row, figure: str) -> Spread | None:
    paper = row.published.get(figure)
    return None if paper is None else Spread(paper.value, paper.std)


def _text(spread: Spread | None) -> str:
    return NONE if spread is None else spread.text()


def _gap(gap: float | None) -> str:
    return NONE if gap is None else points(gap)


def _bytes(spread: Spread | None) -> str:
    return NONE if spread is None else human_bytes(round(spread.mean))


def _count(spread: Spread | None) -> str:
    return NONE if spread is None else f"{round(spread.mean):,}"


def _seconds(row: Row) -> str:
    spread = row.spread("seconds")
    return NONE if spread is None else f"{spread.mean:,.1f}" if spread.mean < 100 else f"{spread.mean:,.0f}"


# --- the terminal -------------------------------------------------------------------------------------


def print_comparison(summary: Summary, console: Console) -> None:
    """Print one table a setting, one row a method. Names are printed as they are, never read as markup."""
    wide = console.width >= WIDE
    published = [name for name in FIGURES if any(name in row.published for row in summary.rows)]
    figures = published if wide else []
    for setting in summary.settings:
        title = Text(setting.name or summary.name, style="bold")
        console.print(title)
        console.print(Text(setting.context, style="dim"))
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("method", no_wrap=wide)
        heads = ("accuracy", "local", "bytes up", "down", "questions", "seconds")
        for head in (*heads, "epsilon") if summary.priced else heads:
            table.add_column(head, justify="right", no_wrap=True)
        for name in figures:
            local = "" if name == "accuracy" else " (local)"
            table.add_column(f"paper{local}", justify="right", no_wrap=True)
            table.add_column(f"gap{local}", justify="right", no_wrap=True)
        if wide:
            table.add_column("leaves a node", ratio=3)
            table.add_column("needs", ratio=2)
        highest = setting.highest()
        for row in setting.rows:
            cells = [Text(row.name), *map(Text, _cells(row, figures, summary.priced))]
            if row.label in highest:
                cells[1].stylize("bold")
            told = [Text(", ".join(row.leaves) or "nothing"), Text(", ".join(row.needs) or "nothing")]
            table.add_row(*cells, *(told if wide else []))
        console.print(table)
        for row in setting.rows:
            if row.reason():
                console.print(Text(f"{row.name}: {row.reason()}"))
            for name in row.published if not wide else ():
                theirs, gap = _text(_paper(row, name)), _gap(row.gap(name))
                console.print(Text(f"{row.name}, {name}: the paper has {theirs}, the gap is {gap}"))
        console.print()
    if not wide:
        _print_terms(summary, console)
    for paper in summary.published:
        where = f", {paper.setting}" if paper.setting else ""
        console.print(Text(f"Paper: {paper.method}, {paper.figure}{where}: {paper.source}", style="dim"))
    for note in summary.notes:
        console.print(Text(note, style="dim"))


def _cells(row: Row, figures: Sequence[str], priced: bool) -> list[str]:
    if not row.runs:
        short = row.reason().partition(":")[0]
        return [short, *[NONE] * (5 + priced + 2 * len(figures))]
    cells = [
        _text(row.spread("accuracy")),
        _text(row.spread("local accuracy")),
        *(_bytes(row.spread(name)) for name in ("bytes up", "bytes down")),
        _count(row.spread("questions")),
        _seconds(row),
        *([row.price() if row.epsilon() else NONE] if priced else []),
    ]
    for name in figures:
        cells += [_text(_paper(row, name)), _gap(row.gap(name))]
    return cells


def _print_terms(summary: Summary, console: Console) -> None:
    """What leaves a node and what a method needs, for terminals too narrow to have it beside the figures."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for head in ("method", "leaves a node", "needs"):
        table.add_column(head)
    told = {row.label: row for row in summary.rows}
    for row in told.values():
        leaves, needs = ", ".join(row.leaves) or "nothing", ", ".join(row.needs) or "nothing"
        table.add_row(*(escape(text) for text in (row.name, leaves, needs)))
    console.print(table)


# --- the page -----------------------------------------------------------------------------------------


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
            settings=[_setting_view(setting) for setting in summary.settings],
            lines=lines,
            columns=[(epsilon, budgets.named(epsilon)) for epsilon in budgets.budgets(lines)],
            against=budgets.plot(lines) if lines else None,
            papers=[(paper, Spread(paper.value, paper.std).text()) for paper in summary.published],
            notes=summary.notes,
            command=summary.command,
            figures=[name for name in FIGURES if any(name in row.published for row in summary.rows)],
            single=len(summary.seeds) == 1,
            chip=plots.chip,
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


def _setting_view(setting: Setting) -> dict[str, Any]:
    highest = setting.highest()
    rows = [_row_view(place, row, row.label in highest) for place, row in enumerate(setting.rows, start=1)]
    marks = [
        plots.Mark(place, row.name, row.traffic() or 0.0, accuracy.mean, accuracy.std)
        for place, row in enumerate(setting.rows, start=1)
        if (accuracy := row.spread("accuracy")) is not None and row.traffic() is not None
    ]
    curves = [
        plots.Curve(place, row.name, curve)
        for place, row in enumerate(setting.rows, start=1)
        if (curve := row.curve())
    ]
    return {
        "name": setting.name,
        "context": setting.context,
        "rows": rows,
        "scatter": plots.scatter_plot(marks) if marks else None,
        "curves": plots.curves_plot(curves) if curves else None,
        "drawn": [row for row in rows if row["accuracy"] is not None],
        "leaders": sorted({CENTRAL[row.central][0] for row in setting.rows if row.label in highest}),
    }


def _row_view(place: int, row: Row, highest: bool) -> dict[str, Any]:
    accuracy, local = row.spread("accuracy"), row.spread("local accuracy")
    up, down, seconds = row.spread("bytes up"), row.spread("bytes down"), row.spread("seconds")
    return {
        "place": place,
        "name": row.name,
        "detail": row.title if row.name != row.title else "",
        "judged": CENTRAL[row.central][0] if row.central in CENTRAL else row.central,
        "highest": highest,
        "accuracy": None if accuracy is None else accuracy.text(),
        "local": None if local is None else local.text(),
        "up": None if up is None else round(up.mean),
        "down": None if down is None else round(down.mean),
        "questions": _count(row.spread("questions")),
        "seconds": None if seconds is None else human_seconds(seconds.mean),
        "epsilon": row.price(),
        "leaves": ", ".join(row.leaves) or "nothing",
        "needs": ", ".join(row.needs) or "nothing",
        "papers": {
            name: {"value": _text(_paper(row, name)), "gap": _gap(row.gap(name)), "source": paper.source}
            for name, paper in row.published.items()
        },
        "reason": row.reason(),
        "runs": [
            {
                "seed": run.seed,
                "link": f"{quote(run.folder)}/report.html",
                "accuracy": None if (value := run.figure("accuracy")) is None else percent(value),
            }
            for run in row.runs
        ],
    }
