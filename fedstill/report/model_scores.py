"""The levels that a run is judged by: the lines of its table, in the terminal and on its page."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedstill.core.text_format import NOT_MEASURED, format_bytes, format_seconds, number_at
from fedstill.report import table_formats
from fedstill.report.metric_text import (
    format_header,
    format_spread,
    format_spread_without_unit,
    format_value,
    lowercase_title,
)
from fedstill.report.result import MAIN_MODELS, OverNodes, Result
from fedstill.report.result_parts import Intervals
from fedstill.report.table_formats import Cell, Column, Fact, Row, Table
from fedstill.tasks.task import Metric

if TYPE_CHECKING:
    from rich.console import Console


UNBROKEN = "\u00a0"  # a space at which no line ends

NEED_TITLES: Mapping[str, str] = {
    "same_architecture": "same architecture",
    "public": "public data",
    "public_labels": "labels of it",
    "split_models": "extractor and head",
    "student_architecture": "student like a node's model",
}


def describe_needs(needs: Mapping[str, object]) -> tuple[str, ...]:
    """What a method needs, in words."""
    return tuple(word for key, word in NEED_TITLES.items() if needs.get(key) is True)


@dataclass(frozen=True)
class ModelScores:
    """One model, or the nodes' models, with all of the task's figures; the first one is in percent."""

    name: str
    meaning: str
    measured: tuple[OverNodes, ...]
    is_main: bool = False  # what the method is judged by
    interval: tuple[float, ...] | None = None  # of what models are judged by, over test cases

    @property
    def value(self) -> float | None:
        """What models are judged by."""
        return self.measured[0].mean


def comparison(result: Result) -> list[ModelScores]:
    """The lines that a run is judged by, in the order of the papers' tables.

    What a method does not have (a node's model trained alone, an ensemble) its result holds as null, and
    there is no line; what a result does not hold at all was not measured.
    """
    central = f"{result.main_model} ({result.method_title})"
    ours = ModelScores(
        central, MAIN_MODELS[result.central][1], _one(result, result.metric_values), is_main=True
    )
    levels = []
    if "standalone" not in result.absent_keys:
        alone = "each node alone, on its own data"
        levels.append(_over_nodes(result, "standalone mean", alone, result.standalone))
    if result.central == "nodes":  # the same models
        mean = _over_nodes(result, central, ours.meaning, result.local)
        own = zip(mean.measured, ours.measured, strict=True)
        measured = tuple(dataclasses.replace(each, mean=told.mean) for each, told in own)
        levels, ours = [], dataclasses.replace(mean, measured=measured, is_main=True)
    elif "standalone" in result.absent_keys and result.metric.key in result.local:
        own_models = "each node's own model, at the end"
        levels.append(_over_nodes(result, "nodes' own models", own_models, result.local))
    levels.append(ours)
    if "ensemble" not in result.absent_keys and result.central != "ensemble":
        together = _among(result, "the nodes' models, answering together", result.ensemble.get("nodes"))
        levels.append(ModelScores("teachers' ensemble", together, _one(result, result.ensemble)))
    alone = "one model, if all data lay in one place"
    levels.append(ModelScores("centralized", alone, _one(result, result.centralized)))
    if result.majority:
        blind = "always the most common class of the test data"
        levels.append(ModelScores("majority guess", blind, _one(result, result.majority)))
    kept = result.intervals or Intervals()
    of = {"standalone mean": kept.nodes, "nodes' own models": kept.nodes, "teachers' ensemble": kept.ensemble,
          "centralized": kept.centralized}  # fmt: skip
    judged = kept.nodes if result.central == "nodes" else kept.central
    return [
        dataclasses.replace(level, interval=judged if level.is_main else of.get(level.name))
        for level in levels
    ]


def interval_text(metric: Metric, ends: tuple[float, ...] | None) -> str:
    """The ends of an interval, in the figure's digits: "90.1 to 93.2"; empty: there is none."""
    return "" if ends is None else " to ".join(format_value(metric, end) for end in ends)


def tested(result: Result) -> str:
    """What an interval is over: "95% interval over 360 test cases"."""
    kept = result.intervals
    return "" if kept is None else f"{kept.level}% interval over {kept.cases:,} test cases"


def _one(result: Result, record: Mapping[str, Any]) -> tuple[OverNodes, ...]:
    return tuple(OverNodes(mean=number_at(record, metric.key)) for metric in result.metrics)


def _over_nodes(result: Result, name: str, meaning: str, record: Mapping[str, OverNodes]) -> ModelScores:
    measured = tuple(record.get(metric.key, OverNodes()) for metric in result.metrics)
    return ModelScores(name, _among(result, meaning, measured[0].nodes), measured)


def _among(result: Result, meaning: str, nodes: tuple[str, ...] | None) -> str:
    return meaning if nodes is None else f"{meaning} (only {', '.join(map(result.display_name, nodes))})"


def print_table(record: Mapping[str, Any], console: Console) -> None:
    """Print the table at the end of a run, from the content of ``result.json``."""
    from rich.text import Text

    result = Result.from_record(record)
    console.print(Text(result.name or "run", style="italic"))
    table_formats.print_rows(table(result), console)
    for label, value, _ in totals(result):
        # Under each other where the terminal is narrow, and no figure parted from its unit.
        unbroken = re.sub(r"(?<=[0-9]) (?=\S)", UNBROKEN, value or NOT_MEASURED)
        told = textwrap.fill(
            f"  {label + ':':<19}{unbroken}",
            width=console.width,
            subsequent_indent=" " * 21,
            break_on_hyphens=False,
        )
        console.print(Text(told.replace(UNBROKEN, " ")), soft_wrap=True)


def table(result: Result) -> Table:
    """What each model reaches, by the figures that are shown in brief."""
    shown = [place for place, metric in enumerate(result.metrics) if metric.in_summary or not place]
    metrics = [result.metrics[place] for place in shown]
    several = len(metrics) > 1  # then units stand above, to make room
    columns = [Column(lowercase_title(format_header(metric, units=several))) for metric in metrics]
    write = format_spread_without_unit if several else format_spread
    rows = [
        Row(
            level.name,
            [Cell(write(result.metrics[place], level.measured[place])) for place in shown],
            accent=level.is_main,
        )
        for level in comparison(result)
    ]
    return Table("", "", columns, rows)


def totals(result: Result) -> list[Fact]:
    """What a whole run cost, and how its nodes were reached where they were elsewhere."""
    from fedstill.report.communication_time import message_cost, time_split
    from fedstill.report.privacy_section import describe_privacy

    up, down, seconds = result.bytes.up, result.bytes_down, result.seconds.total
    ends = {level.name: interval_text(result.metric, level.interval) for level in comparison(result)}
    each = "; ".join(f"{name} {text}" for name, text in ends.items() if text)
    named = f"{each} ({tested(result)})" if each else None
    told = [
        Fact("by test cases", named),
        Fact("left the nodes", NOT_MEASURED if up is None else format_bytes(up)),
        Fact("came to the nodes", NOT_MEASURED if down is None else format_bytes(down)),
        Fact("privacy", describe_privacy(result) or NOT_MEASURED),
        Fact("time", NOT_MEASURED if seconds is None else format_seconds(seconds)),
        Fact("of it", time_split(result)),
        Fact("messages", message_cost(result)),
        *(Fact(event.node, event.text) for event in result.events),
    ]
    return [fact for fact in told if fact.value is not None]
