"""A comparison's tables, from its figures: a table a setting, a row a method; and the words below them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fedstill.attacks.leakage import LeakageColumn
from fedstill.core.text_format import format_bytes
from fedstill.report.compare_points import budgets, format_budget
from fedstill.report.compare_summary import ComparedSetting, Summary
from fedstill.report.compared_method import LOCAL, ComparedMethod, Spread
from fedstill.report.metric_text import format_difference, format_header, lowercase_title
from fedstill.report.table_formats import NONE, Cell, Column, Row, Table


@dataclass(frozen=True)
class Value:
    """One column of values: its head, what it says of a method, and the figure whose best is bold."""

    head: str
    of: Callable[[ComparedMethod], Cell | str | None]
    metric: str = ""
    style: str = "r"

    def cell(self, entry: ComparedMethod) -> Cell:
        """Of one method."""
        made = self.of(entry)
        return made if isinstance(made, Cell) else Cell(made)


def metric_columns(summary: Summary, names: Sequence[str]) -> list[Value]:
    """What methods reach, by the figures' names."""
    return [Value(_head(summary, name), partial(_figure, summary, name), name) for name in names]


def cost_columns(summary: Summary) -> list[Value]:
    """Bytes, queries, seconds, and epsilon where any row has one."""
    return [
        Value("bytes up", partial(_mean, "bytes up", _bytes)),
        Value("down", partial(_mean, "bytes down", _bytes)),
        Value("queries", partial(_mean, "queries", lambda count: f"{round(count):,}")),
        Value("seconds", partial(_mean, "seconds", lambda took: f"{took:,.{1 if took < 100 else 0}f}")),
        *([Value("epsilon", ComparedMethod.price)] if summary.priced else []),
    ]


def leakage_columns(summary: Summary) -> list[Value]:
    """What attacks got."""
    return [Value(leak.head, partial(_leaked, leak), style="r leak") for leak in summary.leaks]


def paper_columns(summary: Summary) -> list[Value]:
    """What papers have, and the gap to it."""
    values = []
    for name in summary.compared():
        about = [] if summary.metric_named(name) is summary.metric else [summary.metric_named(name).title]
        about += ["local"] if name.startswith(LOCAL) else []
        end = "".join(f", {part}" for part in about)
        values.append(Value(f"paper{end}", partial(paper_text, summary, name)))
        values.append(Value(f"gap{end}", partial(paper_gap_text, summary, name), style="r gap"))
    return values


def setting_table(setting: ComparedSetting, values: Sequence[Value]) -> Table:
    """One setting: a row a method; of one that has not run the reason, as far as a cell has room."""
    best = {metric.key: setting.best(metric) for metric in setting.metrics}
    rows = []
    for entry in setting.entries:
        cells = [value.cell(entry).bold_if(entry.label in best.get(value.metric, ())) for value in values]
        if not entry.runs:
            cells = [Cell(entry.reason().partition(":")[0]), *(Cell(NONE) for _ in values[1:])]
        rows.append(Row(entry.name, cells, "" if entry.runs else entry.reason()))
    return Table(setting.name, "method", [Column(value.head, value.style) for value in values], rows)


def full_table(summary: Summary, setting: ComparedSetting) -> Table:
    """The same with all values that there are."""
    values = [*metric_columns(summary, summary.shown()), *cost_columns(summary), *leakage_columns(summary)]
    return setting_table(setting, [*values, *paper_columns(summary)])


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
    return Table(title, "method", [Column(f"epsilon {format_budget(at)}") for at in columns], rows)


# --- one value --------------------------------------------------------------------------------------------


def _head(summary: Summary, name: str) -> str:
    metric = summary.metric_named(name)
    told = lowercase_title(format_header(metric, units=metric.unit != "%"))
    return f"{LOCAL}{told}" if name.startswith(LOCAL) else told


def _figure(summary: Summary, name: str, entry: ComparedMethod) -> str | None:
    return entry.shown(name, summary.metric_named(name).digits)


def _mean(name: str, write: Callable[[float], Cell | str], entry: ComparedMethod) -> Cell | str | None:
    spread = entry.spread(name)
    return None if spread is None else write(spread.mean)


def _bytes(count: float) -> Cell:
    return Cell(format_bytes(round(count)), title=f"{round(count):,} bytes")


def _leaked(leak: LeakageColumn, entry: ComparedMethod) -> Cell:
    found = entry.leak(leak)
    return Cell(None) if found is None else Cell(found[1].text(leak.digits), found[0])


def paper_text(summary: Summary, name: str, entry: ComparedMethod) -> str | None:
    """A published figure as tables have it."""
    paper = entry.published.get(name)
    return None if paper is None else Spread(paper.value, paper.std).text(summary.metric_named(name).digits)


def paper_gap_text(summary: Summary, name: str, entry: ComparedMethod) -> str | None:
    """Ours minus it."""
    gap = entry.gap(name)
    return None if gap is None else format_difference(summary.metric_named(name), gap)


def leaves(entry: ComparedMethod) -> str:
    """What leaves a node."""
    return ", ".join(entry.leaves) or "nothing"


def needs(entry: ComparedMethod) -> str:
    """What a method needs."""
    return ", ".join(entry.needs) or "nothing"


def leakage_notes(columns: Sequence[LeakageColumn]) -> tuple[str, str]:
    """How to read the figures that attacks got."""
    return (
        "An attack that gets little shows that this attack, at this strength, got little; it shows nothing "
        "of stronger ones. Nothing here is called safe.",
        "Each of these figures is of the strongest attack of those tried (the highest mean over seeds). "
        + "".join(f"{column.description} " for column in columns if column.description)
        + "The best of several attacks lies a little above guessing by chance, and one run's figure has an "
        "interval, in its report: marks that are close to each other, or to the dashed line, are not told "
        "apart.",
    )
