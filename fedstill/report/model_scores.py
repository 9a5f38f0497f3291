"""Metrics of the models that a run compares: the main model, the baselines and the upper bounds.

They are the rows of a run's table in the terminal and on its page.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedstill.core.text_format import NOT_MEASURED, finite_number_at_keys, format_bytes, format_seconds
from fedstill.report import table_formats
from fedstill.report.metric_text import (
    format_header,
    format_spread,
    format_spread_without_unit,
    format_value_without_unit,
    lowercase_title,
)
from fedstill.report.result import MAIN_MODELS, MetricOverNodes, Result
from fedstill.report.result_records import IntervalsRecord
from fedstill.report.table_formats import Cell, Column, Fact, Row, Table
from fedstill.tasks.task import Metric

if TYPE_CHECKING:
    from rich.console import Console

NO_BREAK_SPACE = "\u00a0"
STANDALONE, LOCAL_MODELS, ENSEMBLE = "standalone mean", "local models (mean)", "teachers' ensemble"
CENTRALIZED, MAJORITY = "centralized", "majority class"

NEED_TITLES: Mapping[str, str] = {
    "same_architecture": "same architecture",
    "public": "public data",
    "public_labels": "labels of the public data",
    "split_models": "extractor and head",
    "student_architecture": "student like a node's model",
}


def describe_requirements(needs: Mapping[str, object]) -> tuple[str, ...]:
    """Return a method's requirements in words."""
    return tuple(title for key, title in NEED_TITLES.items() if needs.get(key) is True)


@dataclass(frozen=True)
class ModelScores:
    """Metrics of one model, or of the nodes' local models.

    Args:
        name: name of the row.
        description: the model in a few words.
        stats: one entry per metric of the task; the main metric, in percent, is first.
        is_main: whether the method is evaluated by this model.
        interval: ends of the main metric's 95% interval over test cases.
    """

    name: str
    description: str
    stats: tuple[MetricOverNodes, ...]
    is_main: bool = False
    interval: tuple[float, ...] | None = None

    @property
    def value(self) -> float | None:
        """Mean of the main metric."""
        return self.stats[0].mean


def list_model_scores(result: Result) -> list[ModelScores]:
    """Return the main model with baselines and upper bounds, in the order of the papers' tables.

    A model that the method does not have (for example no ensemble) is null in the result and has no row. A
    model that the result does not mention was not measured, and its row has no values.
    """
    main_name = f"{result.main_model_name} ({result.method_title})"
    description = MAIN_MODELS[result.evaluated_model][1]
    main = ModelScores(
        main_name, description, _single_model_stats(result, result.metric_values), is_main=True
    )
    scores = []
    if "standalone" not in result.absent_keys:
        standalone = "baseline: each node trains alone on its own data"
        scores.append(_scores_over_nodes(result, STANDALONE, standalone, result.standalone))
    if result.evaluated_model == "nodes":  # the main model is the local models
        local = _scores_over_nodes(result, main_name, description, result.local)
        stats = tuple(
            dataclasses.replace(over_nodes, mean=single.mean)
            for over_nodes, single in zip(local.stats, main.stats, strict=True)
        )
        scores, main = [], dataclasses.replace(local, stats=stats, is_main=True)
    elif "standalone" in result.absent_keys and result.metric.key in result.local:
        scores.append(
            _scores_over_nodes(result, LOCAL_MODELS, "each node's local model at the end", result.local)
        )
    scores.append(main)
    if "ensemble" not in result.absent_keys and result.evaluated_model != "ensemble":
        ensemble = _append_node_names(
            result, "upper bound: ensemble of the nodes' models", result.ensemble.get("nodes")
        )
        scores.append(ModelScores(ENSEMBLE, ensemble, _single_model_stats(result, result.ensemble)))
    centralized = "upper bound: one model trained on the pooled data"
    scores.append(ModelScores(CENTRALIZED, centralized, _single_model_stats(result, result.centralized)))
    if result.majority:
        majority = "baseline: always the most frequent class of the test data"
        scores.append(ModelScores(MAJORITY, majority, _single_model_stats(result, result.majority)))
    intervals = result.intervals or IntervalsRecord()
    by_name = {STANDALONE: intervals.nodes, LOCAL_MODELS: intervals.nodes, ENSEMBLE: intervals.ensemble,
               CENTRALIZED: intervals.centralized}  # fmt: skip
    main_interval = intervals.nodes if result.evaluated_model == "nodes" else intervals.global_model
    return [
        dataclasses.replace(model, interval=main_interval if model.is_main else by_name.get(model.name))
        for model in scores
    ]


def interval_text(metric: Metric, ends: tuple[float, ...] | None) -> str:
    """Return the ends of an interval in the metric's digits, as "90.1 to 93.2"; empty if None."""
    return "" if ends is None else " to ".join(format_value_without_unit(metric, end) for end in ends)


def interval_label(result: Result) -> str:
    """Return level and sample of the intervals, as "95% interval over 360 test cases"."""
    intervals = result.intervals
    return "" if intervals is None else f"{intervals.level}% interval over {intervals.cases:,} test cases"


def _single_model_stats(result: Result, record: Mapping[str, Any]) -> tuple[MetricOverNodes, ...]:
    return tuple(MetricOverNodes(mean=finite_number_at_keys(record, metric.key)) for metric in result.metrics)


def _scores_over_nodes(
    result: Result, name: str, description: str, record: Mapping[str, MetricOverNodes]
) -> ModelScores:
    stats = tuple(record.get(metric.key, MetricOverNodes()) for metric in result.metrics)
    return ModelScores(name, _append_node_names(result, description, stats[0].nodes), stats)


def _append_node_names(result: Result, description: str, nodes: tuple[str, ...] | None) -> str:
    if nodes is None:
        return description
    return f"{description} (only {', '.join(map(result.node_display_name, nodes))})"


def print_table(record: Mapping[str, Any], console: Console) -> None:
    """Print the table at the end of a run.

    Args:
        record: content of ``result.json``.
        console: rich console to print on.
    """
    from rich.text import Text

    result = Result.from_record(record)
    console.print(Text(result.name or "run", style="italic"))
    table_formats.print_rows(metrics_table(result), console)
    for label, value, _ in run_totals(result):
        # No line break between a number and its unit.
        unbroken = re.sub(r"(?<=[0-9]) (?=\S)", NO_BREAK_SPACE, value or NOT_MEASURED)
        line = textwrap.fill(
            f"  {label + ':':<19}{unbroken}",
            width=console.width,
            subsequent_indent=" " * 21,
            break_on_hyphens=False,
        )
        console.print(Text(line.replace(NO_BREAK_SPACE, " ")), soft_wrap=True)


def metrics_table(result: Result) -> Table:
    """Return the metrics of each model, for the metrics that short tables show."""
    shown = [index for index, metric in enumerate(result.metrics) if metric.in_summary or not index]
    metrics = [result.metrics[index] for index in shown]
    several = len(metrics) > 1  # then units are in the headers, to save width
    columns = [Column(lowercase_title(format_header(metric, units=several))) for metric in metrics]
    format_cell = format_spread_without_unit if several else format_spread
    rows = [
        Row(
            model.name,
            [Cell(format_cell(result.metrics[index], model.stats[index])) for index in shown],
            highlight=model.is_main,
        )
        for model in list_model_scores(result)
    ]
    return Table("", "", columns, rows)


def run_totals(result: Result) -> list[Fact]:
    """Return intervals, bytes, privacy and time of a whole run, and its message cost if distributed."""
    from fedstill.report.communication_time import message_cost_text, time_parts_text
    from fedstill.report.privacy_section import describe_privacy

    up, down, seconds = result.bytes.up, result.bytes_down, result.seconds.total
    intervals = {
        model.name: interval_text(result.metric, model.interval) for model in list_model_scores(result)
    }
    by_model = "; ".join(f"{name} {text}" for name, text in intervals.items() if text)
    facts = [
        Fact("intervals", f"{by_model} ({interval_label(result)})" if by_model else None),
        Fact("bytes from nodes", NOT_MEASURED if up is None else format_bytes(up)),
        Fact("bytes to nodes", NOT_MEASURED if down is None else format_bytes(down)),
        Fact("privacy", describe_privacy(result) or NOT_MEASURED),
        Fact("time", NOT_MEASURED if seconds is None else format_seconds(seconds)),
        Fact("time by activity", time_parts_text(result)),
        Fact("messages", message_cost_text(result)),
        *(Fact(event.node, event.text) for event in result.events),
    ]
    return [fact for fact in facts if fact.value is not None]
