"""Leakage section of a run's report: metrics, notes and images of attacks.

``leakage.json`` and ``leakage.safetensors`` hold everything in displayable form, whichever attacks were run.
The section never calls a run safe: a stronger attack may get more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fedstill.attacks.attack_results import (
    AttackMetricsLine,
    AttackReport,
    ComparisonColumn,
    ImageTable,
    Leakage,
    LeakageMetric,
    group_metrics_into_lines,
    group_tables,
)
from fedstill.core.text_format import join_names
from fedstill.privacy.statement import NO_GUARANTEE, format_epsilon_bound
from fedstill.report.bars import bar
from fedstill.report.png import image_tag, image_url
from fedstill.report.result import Result
from fedstill.report.run_files import Array, is_image_stack, read_tensors
from fedstill.report.table_formats import NO_VALUE, Cell, Column, Row, Table

IMAGES_FILE = "leakage.safetensors"
MAX_IMAGES = 10  # images per strip
MAX_IMAGE_PIXELS = 96  # longer side

DisplayText = Callable[[str], str]


def build_leakage_section(folder: Path, result: Result) -> dict[str, Any] | None:
    """Return the variables of the template; None for a run without attacks.

    Raises:
        RunFolderError: a file is broken.
    """
    leakage = Leakage.read(folder)
    if leakage is None:
        return None
    stacks, display_text = read_tensors(folder / IMAGES_FILE), _name_replacer(result.node_display_names)
    guarantee = NO_GUARANTEE
    if leakage.epsilon is not None:
        guarantee = f"epsilon at most {format_epsilon_bound(leakage.epsilon)} at each node"
    shown = {name: stack[:MAX_IMAGES] for name, stack in (stacks or {}).items() if is_image_stack(stack)}
    return {
        "leakage": leakage,
        "attacks": [_attack_variables(attack, shown, display_text) for attack in leakage.attacks],
        "releases": join_names(leakage.releases) if leakage.releases else None,
        "guarantee": guarantee,
        "missing_images": IMAGES_FILE if stacks is None else None,
        "config": json.dumps(leakage.config, indent=2, ensure_ascii=False),
    }


def _name_replacer(names: Mapping[str, str]) -> DisplayText:
    """Return a function that replaces node names in a text by their display names."""
    changed = [name for name, display_name in names.items() if display_name != name]
    if not changed:
        return lambda text: text
    pattern = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, changed))})(?![\w-])")
    return lambda text: pattern.sub(lambda match: names[match[1]], text)


def _attack_variables(
    report: AttackReport, stacks: Mapping[str, Array], display_text: DisplayText
) -> dict[str, Any]:
    title, columns = report.title or report.name, {column.name: column for column in report.columns}
    return {
        "title": title,
        "about": [(display_text(term), display_text(about)) for term, about in report.about],
        "tables": [
            _table(title, table, columns, display_text)
            for table in group_tables(group_metrics_into_lines(report.rows))
        ],
        "notes": report.notes,
        "pictures": [_image_strips(images, stacks, display_text) for images in report.pictures],
    }


def _table(
    title: str,
    table: Sequence[AttackMetricsLine],
    columns: Mapping[str, ComparisonColumn],
    display_text: DisplayText,
) -> Table:
    metrics = list(dict.fromkeys(metric for line in table for metric in line.metrics))
    by_metric = {name: [line.metrics[name] for line in table if name in line.metrics] for name in metrics}
    shared_baselines = {name: _shared_baseline(rows) for name, rows in by_metric.items()}
    best = _strongest_by_column([row for line in table for row in line.metrics.values()], columns)
    chance_level = _chance_level(by_metric[metrics[0]], columns)
    has_attacks = any(line.attack for line in table)
    rows = []
    for line in table:
        cells = [Cell(display_text(line.target))] if has_attacks else []
        for name in metrics:
            row = line.metrics.get(name)
            baseline = "" if row is None or shared_baselines[name] else row.baseline
            cells.append(Cell(NO_VALUE) if row is None else _cell(row, baseline, row in best))
        cells += (
            []
            if chance_level is None
            else [Cell(_bar(line.metrics.get(metrics[0]), chance_level), style="bar")]
        )
        rows.append(Row(line.attack if has_attacks else display_text(line.target), cells))
    headers = [f"{name[:1].upper()}{name[1:]}" for name in metrics]
    shown = [*([Column("Target", "")] if has_attacks else []), *map(Column, headers)]
    baselines = [
        *([Cell("")] if has_attacks else []),
        *(Cell(baseline) for baseline in shared_baselines.values()),
    ]
    if chance_level is not None:
        shown.append(Column(f"{headers[0]}, 0 to 100%; random guessing: {chance_level:g}%", ""))
        baselines.append(Cell(""))
    footer = [Row("Baseline without attack", baselines)] if any(shared_baselines.values()) else []
    caption = f"{title}: {', '.join(headers)}"
    return Table(caption, "Attack" if has_attacks else "Target", shown, rows, footer, style="members")


def _cell(row: LeakageMetric, baseline: str, best: bool) -> Cell:
    notes = [row.note, f"baseline {baseline}" if baseline else ""]
    return Cell(row.written, Markup("<br>").join(filter(None, notes)), bold=best)


def _shared_baseline(rows: Sequence[LeakageMetric]) -> str:
    baselines = {row.baseline for row in rows}
    return baselines.pop() if len(baselines) == 1 else ""


def _strongest_by_column(
    rows: Sequence[LeakageMetric], columns: Mapping[str, ComparisonColumn]
) -> list[LeakageMetric]:
    best = []
    for name, column in columns.items():
        values = [(row.value, row) for row in rows if row.column == name and row.value is not None]
        if len(values) > 1:
            strongest = min if column.lower_is_stronger else max
            best.append(strongest(values, key=lambda pair: pair[0])[1])
    return best


def _chance_level(rows: Sequence[LeakageMetric], columns: Mapping[str, ComparisonColumn]) -> float | None:
    guesses = [columns[row.column].guess if row.column in columns else None for row in rows]
    return None if None in guesses else guesses[0]


def _bar(row: LeakageMetric | None, chance: float) -> Markup:
    if row is None or row.value is None:
        return Markup("")
    whisker = row.interval or (row.value, row.value)
    return bar(whisker=whisker, rings=[row.value], lines=[("chance", chance)])


def _image_strips(
    images: ImageTable, stacks: Mapping[str, Array], display_text: DisplayText
) -> dict[str, Any]:
    strips = []
    for strip in images.strips:
        if strip.stack not in stacks:
            continue
        stack = stacks[strip.stack][: len(images.heads)]
        captions = [*strip.below, *[""] * (len(stack) - len(strip.below))]
        tags = [image_tag(image_url(image, MAX_IMAGE_PIXELS), strip.head) for image in stack]
        strips.append({"header": strip.head, "cells": list(zip(tags, captions, strict=False))})
    count = len(strips[0]["cells"]) if strips else 0
    return {
        "title": images.title,
        "note": images.note,
        "headers": [display_text(header) for header in images.heads[:count]],
        "strips": strips,
        "more": len(images.heads) - count,
    }
