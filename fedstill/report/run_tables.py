"""Tables of a run: metrics by model, site and finding; label counts, bytes and models of the nodes; time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from fedstill.core.table_schema import decode_row
from fedstill.core.text_format import (
    format_bytes,
    format_percent,
    format_seconds,
)
from fedstill.report.records import (
    CENTRALIZED,
    LOCAL,
    MAIN,
    REFERENCE_MODELS,
    STANDALONE,
    Array,
    AuditTotals,
    ModelRow,
    NodeInfo,
    NodeTraffic,
    Result,
    StudentInfo,
    find_value,
    model_rows,
    read_tensors,
)
from fedstill.report.tables import (
    Cell,
    Column,
    Row,
    Table,
    bar,
    bytes_markup,
    format_header,
    format_record,
    format_record_without_unit,
    format_value_without_unit,
    format_with_unit,
    lowercase_title,
)
from fedstill.tasks.task import Metric

CHANCE = 50.0  # percent, area under the ROC curve of random guessing


def models_table(result: Result) -> Table:
    """Return the metrics of the main model, baselines and upper bounds, with a bar of the main metric."""
    main_metric, *others = result.metrics
    rows = []
    for model in model_rows(result):
        cells = [
            Cell(
                None if record is None else format_record(metric, record),
                "" if index else interval_text(metric, model.interval),
                style="other" if index else "",
            )
            for index, (metric, record) in enumerate(zip(result.metrics, model.records, strict=True))
        ]
        rows.append(Row(model.name, [*cells, Cell(_model_bar(model))], model.description, model.is_main))
    title = f"{main_metric.title} of the evaluated model, the baselines and the upper bounds"
    columns = [Column(main_metric.title), *(Column(format_header(other)) for other in others)]
    columns.append(Column(f"{main_metric.title}, 0 to 100%" if others else "0 to 100%", "drawn"))
    return Table(title, "Model", columns, rows, style="compare several" if others else "compare")


def _model_bar(model: ModelRow) -> Markup:
    record = model.main_record
    if record is None:
        return Markup("")
    whisker = None if record.std is None else (record.value - record.std, record.value + record.std)
    return bar(
        ("bar student" if model.is_main else "bar", record.value), whisker=whisker, rings=model.node_values
    )


def site_tables(result: Result) -> list[Table]:
    """Return one table per metric with a row per model and a column per site; empty without sites."""
    sites = result.sites
    if sites is None or not sites.names:
        return []
    models = [(result.main_model_name, MAIN, "")] if sites.global_model is not None else []
    models += [("centralized", CENTRALIZED, "")] if sites.centralized is not None else []
    models += [(result.node_display_name(node), LOCAL, node) for node in sites.nodes]
    tables, columns = [], [Column(name) for name in sites.names]
    for metric in result.metrics:
        rows = []
        for name, model, node in models:
            cells = []
            for site in sites.names:
                value = find_value(result.records, model, metric.key, node=node, site=site)
                cells.append(Cell(_format_known(format_value_without_unit, metric, value)))
            rows.append(Row(name, cells, highlight=model == MAIN))
        header = format_header(metric, units=True)
        tables.append(Table(f"{header} of each model on the test data of each site", header, columns, rows))
    return tables


def _format_known(
    format_known: Callable[[Metric, float], str], metric: Metric, value: float | None
) -> str | None:
    return None if value is None else format_known(metric, value)


def findings_table(result: Result) -> Table | None:
    """Return one row per finding: main model, centralized model, local models; None for other tasks."""
    if result.labels is None or not result.labels.names:
        return None
    metric, headers = result.metric, [result.main_model_name, "centralized", REFERENCE_MODELS[LOCAL][0]]
    scores = []
    for finding in result.labels.names:
        main, centralized = (
            find_value(result.records, model, metric.key, finding=finding) for model in (MAIN, CENTRALIZED)
        )
        known = [
            record.value for record in result.records if record.model == LOCAL and record.finding == finding
        ]
        scores.append((main, centralized, sum(known) / len(known) if known else None, known))
    shown = [True, *(any(row[column] is not None for row in scores) for column in (1, 2))]
    rows = []
    for name, (main, centralized, mean, by_node) in zip(result.labels.names, scores, strict=True):
        cells = [
            Cell(_format_known(format_with_unit, metric, value))
            for value, is_shown in zip((main, centralized, mean), shown, strict=True)
            if is_shown
        ]
        lines = [("chance", CHANCE), ("mean", mean), ("centralized", centralized)]
        # Bar: main model; rings: nodes; thin line: their mean; thick line: centralized model.
        markup = bar(
            None if main is None else ("bar student", main),
            rings=by_node,
            lines=[(style, value) for style, value in lines if value is not None],
        )
        rows.append(Row(name, [*cells, Cell(markup)]))
    styles = ["r", "r other", "r other"]
    columns = [
        Column(header, style)
        for header, style, is_shown in zip(headers, styles, shown, strict=True)
        if is_shown
    ]
    columns.append(Column("0 to 100%", "drawn"))
    return Table(f"{metric.title} of each finding", "Finding", columns, rows, style="compare several")


def confusion_table(result: Result) -> Table | None:
    """Return the confusion matrix of the main model; None if it was not measured."""
    if not result.confusion:
        return None
    classes = [*result.data.classes[: len(result.confusion)]]
    classes += [str(index) for index in range(len(classes), len(result.confusion))]
    rows = []
    for index, (name, counts) in enumerate(zip(classes, result.confusion, strict=True)):
        total = sum(counts)
        cells = [Cell(_shaded(count, max(total, 1))) for count in counts]
        rows.append(Row(name, [*cells, Cell(format_percent(100 * counts[index] / total) if total else "-")]))
    columns = [*map(_class_column, classes), Column("Recall")]
    title = "Confusion matrix: test examples by true class (rows) and predicted class (columns)"
    return Table(title, "True class", columns, rows, style="heat")


def label_counts_table(result: Result, title: str, with_sum: bool) -> Table | None:
    """Return the label counts of each node as a heat map; None if no node reports them."""
    by_node = {result.node_display_names[node.name]: node.label_counts for node in result.nodes}
    width = max((len(counts) for counts in by_node.values() if counts), default=0)
    if width == 0:
        return None
    classes = [*result.data.classes[:width]]
    classes += [str(index) for index in range(len(classes), width)]
    largest = max(count or 0 for counts in by_node.values() for count in counts or ())
    rows = []
    for name, counts in by_node.items():
        padded = [] if not counts else [*counts, *[None] * (width - len(counts))]
        cells = [Cell(_shaded(count, largest)) for count in padded] or [Cell(None, span=width)]
        total = None if counts is None else f"{sum(count or 0 for count in counts):,}"
        rows.append(Row(name, [*cells, Cell(total, style="r")] if with_sum else cells))
    columns = [*map(_class_column, classes), *([Column("All")] if with_sum else [])]
    return Table(title, "Node", columns, rows, style="heat")


def _class_column(name: str) -> Column:
    """Return the column of a class; narrow pages rotate long names."""
    return Column(name, "tall" if len(name) > 3 else "")


def _shaded(count: int | None, largest: int) -> Markup:
    # A single example is visibly darker than none.
    shade = 0.08 + 0.84 * count / largest if count else 0.0
    style = "cell" + ("" if count else " none") + (" strong" if shade > 0.75 else "")
    cell = Markup('<span class="{}" style="--shade:{:.2f}">{}</span>')
    return cell.format(style, shade, "?" if count is None else f"{count:,}")


class TrafficTable(NamedTuple):
    """Bytes from and to each node.

    Args:
        table: bytes by node and payload kind.
        descriptions: payload kinds with their descriptions.
        agrees: whether audit log and result agree; None without an audit log.
    """

    table: Table
    descriptions: list[tuple[str, str]]
    agrees: bool | None


def traffic_table(result: Result, audit: AuditTotals | None) -> TrafficTable:
    """Return bytes from and to each node, by payload kind if the audit log is there, otherwise as totals."""
    directions = ("up", "down")
    by_kind = result.bytes.by_kind or {}
    in_result = {
        direction: Counter({kind: getattr(sums, direction) for kind, sums in by_kind.items()})
        for direction in directions
    }
    sums = (
        in_result
        if audit is None
        else {direction: audit.bytes_by_kind(direction) for direction in directions}
    )
    # Kinds in the order of result.json, then kinds of the audit log alone.
    order = [*by_kind, *sorted((set(sums["up"]) | set(sums["down"])) - set(by_kind))]
    kinds = {direction: [kind for kind in order if sums[direction][kind]] for direction in directions}
    records = {node.name: node.bytes for node in result.nodes}
    rows = []
    for name in [*records, *sorted(set(audit.nodes if audit else ()) - set(records))]:
        node = None if audit is None else audit.nodes.get(name, NodeTraffic())
        cells = [Cell(None if node is None else f"{len(node.queries):,}")]
        for direction in directions:
            counts = None if node is None else getattr(node, direction)
            cells += [
                Cell(bytes_markup(None if counts is None else counts[kind])) for kind in kinds[direction]
            ]
            total = getattr(records.get(name), direction, None) if counts is None else counts.total()
            cells.append(Cell(bytes_markup(total), style="sum"))
        rows.append(Row(result.node_display_name(name), cells))
    totals: dict[str, int | None] = {"up": result.bytes.up, "down": result.bytes.down}
    agrees = None
    if audit is not None:
        agrees = all(
            +sums[direction] == +in_result[direction] and sums[direction].total() == totals[direction]
            for direction in directions
        )
        totals = {direction: sums[direction].total() for direction in directions}
    footer = [Cell(None if result.queries is None else f"{result.queries:,}")]
    columns, groups = [Column("Queries")], [("", 1)]
    for direction, title in zip(directions, ("Bytes from the node", "Bytes to the node"), strict=True):
        headers = [*kinds[direction], "all"]
        columns += [Column(kind, "r" if index else "r group") for index, kind in enumerate(headers)]
        footer += [Cell(bytes_markup(sums[direction][kind])) for kind in kinds[direction]]
        footer.append(Cell(bytes_markup(totals[direction])))
        groups.append((title, len(headers)))
    title = "Queries, and bytes from and to each node by payload kind"
    declared, listed = result.declared_payload_kinds(), kinds["up"] + kinds["down"]
    descriptions = [
        (kind, declared[kind].description) for kind in order if kind in declared and kind in listed
    ]
    table = Table(title, "Node", columns, rows, [Row("All nodes", footer)], groups)
    return TrafficTable(table, [entry for entry in descriptions if entry[1]], agrees)


def nodes_table(result: Result) -> Table:
    """Return each node's model with its main metric, and the global model in the footer if there is one."""
    metric = result.metric
    is_standalone = metric.key in result.standalone or not result.local
    local_model = STANDALONE if is_standalone else LOCAL

    def cells(model: NodeInfo | StudentInfo, examples: str | None, value: float | None) -> list[Cell]:
        text = _format_known(format_with_unit, metric, value)
        return [Cell(model.model), Cell(_count(model.parameters)), Cell(examples), Cell(text)]

    rows = []
    for node in result.nodes:
        value = find_value(result.records, local_model, metric.key, node=node.name)
        rows.append(Row(result.node_display_names[node.name], cells(node, _count(node.examples), value)))
    footer = [Row(result.main_model_name, cells(result.student, "", result.value), highlight=True)]
    title = f"{metric.title} ({'standalone' if is_standalone else 'local model'})"
    columns = [Column("Model", "model"), *map(Column, ("Parameters", "Examples", title))]
    caption = "Model, parameters, examples and main metric of each node and of the evaluated model"
    return Table(caption, "Node", columns, rows, [] if "student" in result.absent_keys else footer)


def _count(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"


# --- columns of tabular data ----------------------------------------------------------------------------


MAX_GENERATED_ROWS = 5


def columns_table(folder: Path, result: Result) -> Table | None:
    """Return one row per column of the schema; None for a run on other data.

    Raises:
        RunFolderError: a file is broken.
    """
    schema = result.data.schema
    if not schema:
        return None
    generated = [decode_row(row.tolist(), schema) for row in last_generated_rows(folder)[:MAX_GENERATED_ROWS]]
    rows = []
    for column in schema.columns:
        values = [Cell(row.get(column.name, ""), style="r") for row in generated]
        note = {schema.target: "target", schema.event: "event indicator"}.get(column.name, "")
        rows.append(Row(column.name, [Cell(column.allowed_values), *values], note))
    numbered = (Column(f"generated {number}") for number in range(1, len(generated) + 1))
    return Table(
        "Columns of the table", "Column", [Column("Allowed values", ""), *numbered], rows, style="columns"
    )


def last_generated_rows(folder: Path) -> list[Array]:
    """Return the rows ``(F,)`` of the server's last generated batch."""
    tensors = read_tensors(folder / "samples.safetensors") or {}
    keys = sorted((key for key, rows in tensors.items() if key.isdecimal() and rows.ndim == 2), key=int)
    return list(tensors[keys[-1]]) if keys else []


# --- time by activity -----------------------------------------------------------------------------------


# Parts of a run's time in the order of the bar: key in the result, name, description.
PARTS = (
    ("starting", "start and end", "processes connect before the first message, and stop after the last"),
    ("training", "local training", "the nodes train their local models before the first query"),
    ("nodes", "nodes", "the nodes compute responses (mean over nodes)"),
    ("waiting", "waiting", "the other nodes are done, the slowest one is not"),
    ("absent", "absent nodes", "nodes do not respond, until they are excluded"),
    ("link", "link", "messages are serialized, sent and parsed"),
    ("server", "server", "the server computes"),
)


class TimePart(NamedTuple):
    """Time of one activity; ``share`` is its share of the whole run, from 0 to 1."""

    key: str
    name: str
    description: str
    seconds: float
    share: float


def time_parts(result: Result) -> list[TimePart]:
    """Return the time of a run by activity; empty for a run in one process."""
    known = [(*part, result.link.get(part[0]) or 0.0) for part in PARTS]
    total = sum(seconds for *_, seconds in known)
    return [
        TimePart(key, name, description, seconds, seconds / total)
        for key, name, description, seconds in known
        if seconds > 0
    ]


def message_cost_text(result: Result) -> str | None:
    """Return number, time and size of messages as a sentence; None for a run in one process."""
    count, seconds, size, share = map(result.link.get, ("messages", "seconds_each", "bytes_each", "share"))
    if count is None or seconds is None or size is None or share is None:
        return None
    time_each = f"{1000 * seconds:.0f} ms" if seconds < 1 else format_seconds(seconds)
    cost = f"{count:,.0f} message rounds, {time_each} and {format_bytes(round(size))} each"
    return f"{cost}; the link took {format_percent(100 * share)} of the run's time"


def time_parts_text(result: Result) -> str | None:
    """Return the time by activity as a list in words; None for a run in one process."""
    return ", ".join(f"{part.name} {format_seconds(part.seconds)}" for part in time_parts(result)) or None


def time_table(result: Result) -> Table | None:
    """Return the time by activity as a table that is also the legend of :func:`time_bar`."""
    swatch, rows = Markup('<span class="swatch {}"></span> {}'), []
    for part in time_parts(result):
        texts = (format_seconds(part.seconds), format_percent(100 * part.share), part.description)
        rows.append(Row(swatch.format(part.key, part.name), list(map(Cell, texts))))
    columns = [Column(""), Column(""), Column("", "meaning")]
    return Table("Time of the run by activity", "", columns, rows, style="parts") if rows else None


def time_bar(result: Result) -> Markup:
    """Return the time by activity as one stacked bar."""
    parts, rectangles, start = time_parts(result), [], 0.0
    rectangle = (
        '<rect class="part {}" x="{:.2f}%" width="{:.2f}%" y="4" height="16"><title>{}: {}</title></rect>'
    )
    for part in parts:
        position = (100 * start, 100 * part.share)
        rectangles.append(
            Markup(rectangle).format(part.key, *position, part.name, format_seconds(part.seconds))
        )
        start += part.share
    return Markup('<svg class="bars" width="100%" height="24" role="img" aria-label="{}">{}</svg>').format(
        "; ".join(f"{part.name} {format_percent(100 * part.share)}" for part in parts),
        Markup("").join(rectangles),
    )


def interval_text(metric: Metric, ends: tuple[float, float] | None) -> str:
    """Return the ends of an interval in the metric's digits, as "90.1 to 93.2"; empty if None."""
    return "" if ends is None else " to ".join(format_value_without_unit(metric, end) for end in ends)


def interval_label(result: Result) -> str:
    """Return level and sample of the intervals, as "95% interval over 360 test cases"."""
    intervals = result.intervals
    return "" if intervals is None else f"{intervals.level}% interval over {intervals.cases:,} test cases"


def metrics_table(result: Result) -> Table:
    """Return the metrics of each model, for the metrics that short tables show."""
    shown = [index for index, metric in enumerate(result.metrics) if metric.in_summary or not index]
    metrics = [result.metrics[index] for index in shown]
    several = len(metrics) > 1  # then units are in the headers, to save width
    columns = [Column(lowercase_title(format_header(metric, units=several))) for metric in metrics]
    format_cell = format_record_without_unit if several else format_record
    rows = [
        Row(
            model.name,
            [Cell(format_cell(result.metrics[index], model.records[index])) for index in shown],
            highlight=model.is_main,
        )
        for model in model_rows(result)
    ]
    return Table("", "", columns, rows)
