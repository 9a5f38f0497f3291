"""What attacks got from a run, from ``leakage.json`` and ``leakage.safetensors``: figures, words, pictures.

The files hold all of it ready to be shown, whichever attacks there were. Nothing here is called safe: an
attack at its strength got what it got.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fedstill.attacks.leakage import (
    AttackReport,
    ImageTable,
    Leakage,
    LeakageColumn,
    LeakageMetric,
    TableLine,
    group_tables,
    table_lines,
)
from fedstill.core.text_format import join_names
from fedstill.privacy.statement import NO_GUARANTEE, format_epsilon_bound
from fedstill.report.bars import bar
from fedstill.report.png import image_tag, image_url
from fedstill.report.result import Result
from fedstill.report.run_files import Array, is_image_stack, read_tensors
from fedstill.report.table_formats import NONE, Cell, Column, Row, Table

PICTURES = "leakage.safetensors"
MOST = 10  # pictures of a strip that are drawn
SIDE = 96  # pixels of a drawn picture's longer side

Named = Callable[[str], str]


def section(folder: Path, result: Result) -> dict[str, Any] | None:
    """The section's content; None for a run that nobody attacked. Raises RunFolderError for a broken file."""
    found = Leakage.read(folder)
    if found is None:
        return None
    stacks, named = read_tensors(folder / PICTURES), _named(result.display_names)
    price = NO_GUARANTEE
    if found.epsilon is not None:
        price = f"epsilon {format_epsilon_bound(found.epsilon)} at most, at each node"
    there = {name: stack[:MOST] for name, stack in (stacks or {}).items() if is_image_stack(stack)}
    return {
        "found": found,
        "attacks": [_attack(each, there, named) for each in found.attacks],
        "left": join_names(found.leaves) if found.leaves else None,
        "guarantee": price,
        "pictures_missing": PICTURES if stacks is None else None,
        "config": json.dumps(found.config, indent=2, ensure_ascii=False),
    }


def _named(names: Mapping[str, str]) -> Named:
    """Puts nodes' names into words as a report writes them."""
    other = [name for name, label in names.items() if label != name]
    if not other:
        return lambda text: text
    known = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, other))})(?![\w-])")
    return lambda text: known.sub(lambda found: names[found[1]], text)


def _attack(told: AttackReport, stacks: Mapping[str, Array], named: Named) -> dict[str, Any]:
    title, columns = told.title or told.name, {column.name: column for column in told.columns}
    return {
        "title": title,
        "about": [(named(term), named(about)) for term, about in told.about],
        "tables": [_table(title, table, columns, named) for table in group_tables(table_lines(told.rows))],
        "notes": told.notes,
        "pictures": [_pictures(each, stacks, named) for each in told.pictures],
    }


def _table(
    title: str, table: Sequence[TableLine], columns: Mapping[str, LeakageColumn], named: Named
) -> Table:
    metrics = list(dict.fromkeys(metric for line in table for metric in line.metrics))
    columns_of = {name: [line.metrics[name] for line in table if name in line.metrics] for name in metrics}
    shared = {name: _shared(rows) for name, rows in columns_of.items()}
    best = _best([row for line in table for row in line.metrics.values()], columns)
    guess = _guess(columns_of[metrics[0]], columns)
    attacks = any(line.attack for line in table)
    rows = []
    for line in table:
        cells = [Cell(named(line.target))] if attacks else []
        for name in metrics:
            row = line.metrics.get(name)
            own = "" if row is None or shared[name] else row.baseline
            cells.append(Cell(NONE) if row is None else _cell(row, own, row in best))
        cells += [] if guess is None else [Cell(_bar(line.metrics.get(metrics[0]), guess), style="bar")]
        rows.append(Row(line.attack if attacks else named(line.target), cells))
    heads = [f"{name[:1].upper()}{name[1:]}" for name in metrics]
    told = [*([Column("Tried on", "")] if attacks else []), *map(Column, heads)]
    foot = [*([Cell("")] if attacks else []), *(Cell(without) for without in shared.values())]
    if guess is not None:
        told.append(Column(f"{heads[0]}, 0 to 100%; guessing: {guess:g}%", ""))
        foot.append(Cell(""))
    without = [Row("Without attacking", foot)] if any(shared.values()) else []
    about = f"{title}: {', '.join(heads)}"
    return Table(about, "Attack" if attacks else "Tried on", told, rows, without, style="members")


def _cell(row: LeakageMetric, without: str, best: bool) -> Cell:
    small = [row.note, f"without it {without}" if without else ""]
    return Cell(row.written, Markup("<br>").join(filter(None, small)), bold=best)


def _shared(rows: Sequence[LeakageMetric]) -> str:
    told = {row.baseline for row in rows}
    return told.pop() if len(told) == 1 else ""


def _best(rows: Sequence[LeakageMetric], columns: Mapping[str, LeakageColumn]) -> list[LeakageMetric]:
    found = []
    for name, column in columns.items():
        told = [(row.value, row) for row in rows if row.column == name and row.value is not None]
        if len(told) > 1:
            strongest = min if column.lower_is_stronger else max
            found.append(strongest(told, key=lambda each: each[0])[1])
    return found


def _guess(rows: Sequence[LeakageMetric], columns: Mapping[str, LeakageColumn]) -> float | None:
    guesses = [columns[row.column].guess if row.column in columns else None for row in rows]
    return None if None in guesses else guesses[0]


def _bar(row: LeakageMetric | None, guess: float) -> Markup:
    if row is None or row.value is None:
        return Markup("")
    whisker = row.interval or (row.value, row.value)
    return bar(whisker=whisker, rings=[row.value], levels=[("chance", guess)])


def _pictures(told: ImageTable, stacks: Mapping[str, Array], named: Named) -> dict[str, Any]:
    drawn = []
    for strip in told.strips:
        if strip.stack not in stacks:
            continue
        images = stacks[strip.stack][: len(told.heads)]
        below = [*strip.below, *[""] * (len(images) - len(strip.below))]
        drawings = [image_tag(image_url(image, SIDE), strip.head) for image in images]
        cells = list(zip(drawings, below, strict=False))
        drawn.append({"head": strip.head, "cells": cells})
    count = len(drawn[0]["cells"]) if drawn else 0
    return {
        "title": told.title,
        "note": told.note,
        "heads": [named(head) for head in told.heads[:count]],
        "strips": drawn,
        "more": len(told.heads) - count,
    }
