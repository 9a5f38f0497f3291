"""A run's tables: what models reach, by site, by finding; what nodes hold, what left, their models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import NamedTuple

from markupsafe import Markup

from fedstill.core.text_format import format_percent
from fedstill.report.bars import bar
from fedstill.report.metric_text import format_header, format_spread, format_value, format_with_unit
from fedstill.report.model_scores import ModelScores, comparison, interval_text
from fedstill.report.result import MAIN_MODELS, OverNodes, Result
from fedstill.report.result_parts import NodeRecord, StudentRecord
from fedstill.report.run_files import AuditTotals, NodeTraffic
from fedstill.report.table_formats import Cell, Column, Row, Table
from fedstill.report.templates import size
from fedstill.tasks.task import Metric

CHANCE = 50.0  # percent, the area under the curve of who guesses


def reached(result: Result) -> Table:
    """What the models reach, with a bar each."""
    first, *others = result.metrics
    rows = []
    for level in comparison(result):
        cells = [
            Cell(
                None if each.mean is None else format_spread(metric, each),
                "" if place else interval_text(metric, level.interval),
                style="other" if place else "",
            )
            for place, (metric, each) in enumerate(zip(result.metrics, level.measured, strict=True))
        ]
        rows.append(Row(level.name, [*cells, Cell(_bar_of(level))], level.meaning, accent=level.is_main))
    about = (
        f"{first.title} of the nodes' models, of what the method is judged by, and of the levels beside it"
    )
    columns = [Column(first.title), *(Column(format_header(other)) for other in others)]
    columns.append(Column(f"{first.title}, 0 to 100%" if others else "0 to 100%", "drawn"))
    return Table(about, "Model", columns, rows, style="compare several" if others else "compare")


def _bar_of(level: ModelScores) -> Markup:
    measured = level.measured[0]
    value, spread = measured.mean, measured.std
    if value is None:
        return Markup("")
    low_high = None if spread is None else (value - spread, value + spread)
    return bar(("bar student" if level.is_main else "bar", value), whisker=low_high, rings=measured.each)


def sites(result: Result) -> list[Table]:
    """One table a figure, one line a model, one column a site; none where the test part has no sites."""
    stored = result.sites
    if stored is None or not stored.names:
        return []
    models = {result.main_model: stored.central, "centralized": stored.centralized}
    models |= {result.display_name(name): by_site for name, by_site in stored.nodes.items()}
    made, columns = [], [Column(name) for name in stored.names]
    for metric in result.metrics:
        rows = []
        for model, by_site in models.items():
            if by_site is not None:
                values = [by_site.get(site, {}).get(metric.key) for site in stored.names]
                cells = [Cell(_format_known(format_value, metric, value)) for value in values]
                rows.append(Row(model, cells, accent=model == result.main_model))
        title = format_header(metric, units=True)
        made.append(Table(f"{title} of each model on the test data of each site", title, columns, rows))
    return made


def _format_known(write: Callable[[Metric, float], str], metric: Metric, value: float | None) -> str | None:
    return None if value is None else write(metric, value)


def findings(result: Result) -> Table | None:
    """One line a finding: the central model, the centralized one, the nodes; None for other tasks."""
    stored = result.labels
    if stored is None or not stored.names:
        return None
    metric, heads = result.metric, [MAIN_MODELS[result.central][0], "centralized", "nodes\u2019 mean"]
    values = []
    for place in range(len(stored.names)):
        ours, mark = (None if kept is None else kept[place] for kept in (stored.central, stored.centralized))
        each = [kept[place] for kept in stored.nodes.values() if kept is not None]
        own = [value for value in each if value is not None]
        values.append((ours, mark, sum(own) / len(own) if own else None, own))
    has = [True, *(any(line[column] is not None for line in values) for column in (1, 2))]
    rows = []
    for name, (ours, mark, mean, own) in zip(stored.names, values, strict=True):
        shown = zip((ours, mark, mean), has, strict=True)
        cells = [
            Cell(None if value is None else format_with_unit(metric, value))
            for value, there in shown
            if there
        ]
        levels = [("chance", CHANCE), ("mean", mean), ("mark", mark)]
        # A bar: the central model; rings: nodes; a thin line: their mean; a thick one: the mark to reach.
        drawn = bar(
            None if ours is None else ("bar student", ours),
            rings=own,
            levels=[(style, value) for style, value in levels if value is not None],
        )
        rows.append(Row(name, [*cells, Cell(drawn)]))
    styles = ["r", "r other", "r other"]
    columns = [Column(name, style) for name, style, there in zip(heads, styles, has, strict=True) if there]
    columns.append(Column("0 to 100%", "drawn"))
    return Table(f"{metric.title} of each finding", "Finding", columns, rows, style="compare several")


def confusion(result: Result) -> Table | None:
    """What the central model takes each class for; None where that was not counted."""
    if not result.confusion:
        return None
    classes = [*result.data.classes[: len(result.confusion)]]
    classes += [str(place) for place in range(len(classes), len(result.confusion))]
    rows = []
    for place, (name, counts) in enumerate(zip(classes, result.confusion, strict=True)):
        of = sum(counts)
        cells = [Cell(_shaded(count, max(of, 1))) for count in counts]
        rows.append(Row(name, [*cells, Cell(format_percent(100 * counts[place] / of) if of else "-")]))
    columns = [*map(_class_column, classes), Column("Right")]
    title = "How many test examples of each class (rows) are taken for each class (columns)"
    return Table(title, "True class", columns, rows, style="heat")


def holdings(result: Result, about: str, with_sum: bool) -> Table | None:
    """The classes each node holds, the more the stronger its color; None where no node tells."""
    held = {result.display_names[node.name]: node.label_counts for node in result.nodes}
    width = max((len(counts) for counts in held.values() if counts), default=0)
    if width == 0:
        return None
    classes = [*result.data.classes[:width]]
    classes += [str(place) for place in range(len(classes), width)]
    most = max(count or 0 for counts in held.values() for count in counts or ())
    rows = []
    for name, counts in held.items():
        padded = [] if not counts else [*counts, *[None] * (width - len(counts))]
        cells = [Cell(_shaded(count, most)) for count in padded] or [Cell(None, span=width)]
        total = None if counts is None else f"{sum(count or 0 for count in counts):,}"
        rows.append(Row(name, [*cells, Cell(total, style="r")] if with_sum else cells))
    columns = [*map(_class_column, classes), *([Column("All")] if with_sum else [])]
    return Table(about, "Node", columns, rows, style="heat")


def _class_column(name: str) -> Column:
    """A narrow page writes a name upwards that is longer than a number."""
    return Column(name, "tall" if len(name) > 3 else "")


def _shaded(count: int | None, most: int) -> Markup:
    # Even a single example gets a shade that can be told from none.
    shade = 0.08 + 0.84 * count / most if count else 0.0
    style = "cell" + ("" if count else " none") + (" strong" if shade > 0.75 else "")
    cell = Markup('<span class="{}" style="--shade:{:.2f}">{}</span>')
    return cell.format(style, shade, "?" if count is None else f"{count:,}")


class TrafficTable(NamedTuple):
    """What left each node and came to it; what the kinds mean; whether log and result agree, if known."""

    table: Table
    meanings: list[tuple[str, str]]
    agrees: bool | None


def traffic(result: Result, audit: AuditTotals | None) -> TrafficTable:
    """What left each node and what came to it, by kind where the audit log tells, else as sums."""
    ways = ("up", "down")
    by_kind = result.bytes.by_kind or {}
    told = {way: Counter({kind: getattr(sums, way) for kind, sums in by_kind.items()}) for way in ways}
    sums = told if audit is None else {way: audit.total(way) for way in ways}
    # The order of result.json, then whatever only the audit log knows.
    order = [*by_kind, *sorted((set(sums["up"]) | set(sums["down"])) - set(by_kind))]
    kinds = {way: [kind for kind in order if sums[way][kind]] for way in ways}
    records = {node.name: node.bytes for node in result.nodes}
    rows = []
    for name in [*records, *sorted(set(audit.nodes if audit else ()) - set(records))]:
        one = None if audit is None else audit.nodes.get(name, NodeTraffic())
        cells = [Cell(None if one is None else f"{len(one.queries):,}")]
        for way in ways:
            known = None if one is None else getattr(one, way)
            cells += [Cell(size(None if known is None else known[kind])) for kind in kinds[way]]
            total = getattr(records.get(name), way, None) if known is None else known.total()
            cells.append(Cell(size(total), style="sum"))
        rows.append(Row(result.display_name(name), cells))
    totals: dict[str, int | None] = {"up": result.bytes.up, "down": result.bytes.down}
    agrees = None
    if audit is not None:
        agrees = all(+sums[way] == +told[way] and sums[way].total() == totals[way] for way in ways)
        totals = {way: sums[way].total() for way in ways}
    foot = [Cell(None if result.queries is None else f"{result.queries:,}")]
    columns, groups = [Column("Queries")], [("", 1)]
    for way, title in zip(ways, ("Left the node", "Came to the node"), strict=True):
        heads = [*kinds[way], "all"]
        columns += [Column(kind, "r" if place else "r group") for place, kind in enumerate(heads)]
        foot += [Cell(size(sums[way][kind])) for kind in kinds[way]] + [Cell(size(totals[way]))]
        groups.append((title, len(heads)))
    about = "Queries answered, and bytes that left and came to each node, by kind"
    known_kinds, listed = result.payload_kinds(), kinds["up"] + kinds["down"]
    meanings = [
        (kind, known_kinds[kind].description) for kind in order if kind in known_kinds and kind in listed
    ]
    table = Table(about, "Node", columns, rows, [Row("All nodes", foot)], groups)
    return TrafficTable(table, [each for each in meanings if each[1]], agrees)


def nodes(result: Result) -> Table:
    """Each node's model with what it reaches; below them the central model, if there is one."""
    metric = result.metric
    alone, own = local_values(result)

    def cells(model: NodeRecord | StudentRecord, examples: str | None, value: float | None) -> list[Cell]:
        told_value = _format_known(format_with_unit, metric, value)
        return [Cell(model.model), Cell(_count(model.parameters)), Cell(examples), Cell(told_value)]

    known = zip_longest(result.nodes, own[: len(result.nodes)])
    rows = [
        Row(result.display_names[node.name], cells(node, _count(node.examples), value))
        for node, value in known
    ]
    foot = [Row(result.main_model, cells(result.student, "", result.value), accent=True)]
    title = f"{metric.title} {'alone' if alone else 'of its own'}"
    columns = [Column("Model", "model"), *map(Column, ("Parameters", "Examples", title))]
    about = "Model, size, examples and figures of each node and of the central model"
    return Table(about, "Node", columns, rows, [] if "student" in result.absent_keys else foot)


def _count(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"


def local_values(result: Result) -> tuple[bool, Sequence[float | None]]:
    """Whether the nodes' models were trained alone, and what they reach."""
    alone = result.standalone.get(result.metric.key)
    if alone is not None:
        return True, alone.per_node
    return not result.local, result.local.get(result.metric.key, OverNodes()).per_node
