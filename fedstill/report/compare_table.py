"""A comparison's tables, from its figures: a table a setting, a row a method; and the words below them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fedstill.attacks.rows import Column as Leak
from fedstill.core.words import human_bytes
from fedstill.report.compare_points import budgets, written
from fedstill.report.metrics import gap_text, head, in_a_sentence
from fedstill.report.summary import LOCAL, Entry, Setting, Spread, Summary
from fedstill.report.tables import NONE, Cell, Column, Row, Table


@dataclass(frozen=True)
class Value:
    """One column of values: its head, what it says of a method, and the figure whose best is bold."""

    head: str
    of: Callable[[Entry], Cell]
    figure: str = ""
    style: str = "r"


def values_of(
    summary: Summary, names: Sequence[str], compared: Sequence[str], leaks: Sequence[Leak]
) -> list[Value]:
    """Figures with these names, bytes, questions, seconds, epsilon, what attacks got, and papers' figures."""
    values = [Value(_head(summary, name), partial(_figure, summary, name), name) for name in names]
    values += [
        Value("bytes up", partial(_bytes, "bytes up")),
        Value("down", partial(_bytes, "bytes down")),
        Value("questions", _questions),
        Value("seconds", _seconds),
        *([Value("epsilon", _price)] if summary.priced else []),
        *(Value(leak.head, partial(_leaked, leak), style="r leak") for leak in leaks),
    ]
    for name in compared:
        about = [] if summary.figure(name) is summary.metric else [summary.figure(name).title]
        about += ["local"] if name.startswith(LOCAL) else []
        end = "".join(f", {part}" for part in about)
        values.append(Value(f"paper{end}", partial(_paper, summary, name)))
        values.append(Value(f"gap{end}", partial(_gap, summary, name), style="r gap"))
    return values


def setting_table(summary: Summary, setting: Setting, values: Sequence[Value]) -> Table:
    """One setting: a row a method; of one that has not run the reason, as far as a cell has room."""
    best = {figure.key: setting.best(figure) for figure in setting.figures}
    rows = []
    for entry in setting.entries:
        cells = [value.of(entry).bolder(entry.label in best.get(value.figure, ())) for value in values]
        if not entry.runs:
            cells = [value.of(entry) if not value.style else Cell(NONE) for value in values]  # terms hold
            cells[0] = Cell(entry.reason().partition(":")[0])
        rows.append(Row(entry.name, cells, "" if entry.runs else entry.reason()))
    return Table(setting.name, "method", [Column(value.head, value.style) for value in values], rows)


def whole_table(summary: Summary, setting: Setting) -> Table:
    """The same with all values that there are."""
    values = values_of(summary, summary.shown(), summary.compared(), summary.leaks)
    return setting_table(summary, setting, values)


def budget_table(summary: Summary) -> Table | None:
    """What each method reaches under each budget of privacy, as FedIOD's Table 5; None for other settings."""
    lines = summary.budgets()
    if not lines:
        return None
    columns = budgets(lines)
    rows = [
        Row(line.name, [Cell(known.text() if (known := line.reached.get(at)) else NONE) for at in columns])
        for line in lines
    ]
    title = f"{summary.metric.title} in percent of each method under each budget"
    return Table(title, "method", [Column(f"epsilon {written(at)}") for at in columns], rows)


# --- one value --------------------------------------------------------------------------------------------


def _head(summary: Summary, name: str) -> str:
    figure = summary.figure(name)
    told = in_a_sentence(head(figure, units=figure.unit != "%"))
    return f"{LOCAL}{told}" if name.startswith(LOCAL) else told


def _figure(summary: Summary, name: str, entry: Entry) -> Cell:
    return Cell(entry.shown(name, summary.figure(name).digits))


def _bytes(name: str, entry: Entry) -> Cell:
    spread = entry.spread(name)
    if spread is None:
        return Cell(None)
    return Cell(human_bytes(round(spread.mean)), title=f"{round(spread.mean):,} bytes")


def _questions(entry: Entry) -> Cell:
    spread = entry.spread("questions")
    return Cell(None if spread is None else f"{round(spread.mean):,}")


def _seconds(entry: Entry) -> Cell:
    spread = entry.spread("seconds")
    return Cell(None if spread is None else f"{spread.mean:,.{1 if spread.mean < 100 else 0}f}")


def _price(entry: Entry) -> Cell:
    return Cell(entry.price())


def _leaked(leak: Leak, entry: Entry) -> Cell:
    found = entry.leak(leak)
    return Cell(None) if found is None else Cell(found[1].text(leak.digits), found[0])


def paper_text(summary: Summary, name: str, entry: Entry) -> str | None:
    """A published figure as tables have it."""
    paper = entry.published.get(name)
    return None if paper is None else Spread(paper.value, paper.std).text(summary.figure(name).digits)


def gap_of(summary: Summary, name: str, entry: Entry) -> str | None:
    """Ours minus it."""
    gap = entry.gap(name)
    return None if gap is None else gap_text(summary.figure(name), gap)


def _paper(summary: Summary, name: str, entry: Entry) -> Cell:
    return Cell(paper_text(summary, name, entry))


def _gap(summary: Summary, name: str, entry: Entry) -> Cell:
    return Cell(gap_of(summary, name, entry))


def leaves(entry: Entry) -> Cell:
    """What leaves a node."""
    return Cell(", ".join(entry.leaves) or "nothing")


def needs(entry: Entry) -> Cell:
    """What a method needs."""
    return Cell(", ".join(entry.needs) or "nothing")


def leak_notes(columns: Sequence[Leak]) -> tuple[str, str]:
    """How to read the figures that attacks got."""
    return (
        "An attack that gets little shows that this attack, at this strength, got little; it shows nothing "
        "of stronger ones. Nothing here is called safe.",
        "Each of these figures is of the strongest attack of those tried (the highest mean over seeds). "
        + "".join(f"{column.says} " for column in columns if column.says)
        + "The best of several attacks lies a little above guessing by chance, and one run's figure has an "
        "interval, in its report: marks that are close to each other, or to the dashed line, are not told "
        "apart.",
    )
