"""What a student reaches on data that were not its run's, for the terminal: in all, and site by site."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedstill.core.text_format import format_count
from fedstill.report.metric_text import format_header, format_value
from fedstill.report.table_formats import Cell, Column, Row, Table
from fedstill.tasks.task import Metric


def evaluation_table(found: Mapping[str, Any], metrics: tuple[Metric, ...]) -> Table:
    """A line for all examples, and one a site, with every figure of the task."""
    columns = [Column("examples"), *(Column(format_header(each, units=True)) for each in metrics)]
    columns.insert(2, Column("95% interval"))

    def row(name: str, part: Mapping[str, Any], accent: bool = False) -> Row:
        reached = [part["metrics"][each.key] for each in metrics]
        values = [None if x is None else format_value(of, x) for of, x in zip(metrics, reached, strict=True)]
        ends = part["interval"]
        told = None if ends is None else " to ".join(format_value(metrics[0], end) for end in ends)
        cells = [f"{part['examples']:,}", values[0], told, *values[1:]]
        return Row(name, [Cell(each) for each in cells], accent=accent)

    rows = [row("all", found, accent=True), *(row(site, part) for site, part in found["sites"].items())]
    return Table("", "site" if found["sites"] else "", columns, rows)


def overlap_text(found: Mapping[str, Any]) -> str:
    """Whether a node had any of the examples, or the public data, as far as that was looked up."""
    seen, count = found["seen"], found["examples"]
    if seen["examples"] is None:
        return f"Whether a node had any of them was not checked: {seen['why']}."
    if not seen["examples"] and not seen["public"]:
        what = format_count(count, "example")
        compared = "each was compared with the nodes' and public data, to the last bit"
        return f"No node had any of these {what}: {compared}."
    whose = {"examples": "the nodes' own", "public": "the public data, on which a student may have learned"}
    some = [f"{seen[key]:,} are equal to some of {of}" for key, of in whose.items() if seen[key]]
    return f"Of {format_count(count, 'example')} {', and '.join(some)}: figures may flatter."
