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

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from fedstill.attacks.found import Attacked, Leakage, TableLine, lines, tables
from fedstill.attacks.rows import Column, Pictures, Row
from fedstill.core.errors import RunFolderError
from fedstill.core.words import listed
from fedstill.privacy.statement import NO_GUARANTEE, epsilon_text
from fedstill.report.bars import bar
from fedstill.report.files import read_stacks
from fedstill.report.names import labels
from fedstill.report.png import picture
from fedstill.report.result import Result

PICTURES = "leakage.safetensors"
MOST = 10  # pictures of a strip that are drawn
SIDE = 96  # pixels of a drawn picture's longer side

Stack = npt.NDArray[np.uint8]
Named = Callable[[str], str]


def section(folder: Path, result: Result) -> dict[str, Any] | None:
    """The section's content; None for a run that nobody attacked.

    Raises:
        RunFolderError: a file is broken, or its pictures are not those that the attacks tell of.
    """
    found = Leakage.read(folder)
    if found is None:
        return None
    stacks, named = read_stacks(folder / PICTURES, MOST), _named(labels(result))
    return {
        "found": found,
        "attacks": [_attack(folder, each, stacks or {}, named) for each in found.attacks],
        "left": listed(found.leaves) if found.leaves else None,
        "guarantee": _guarantee(found),
        "pictures_missing": PICTURES if stacks is None else None,
        "config": json.dumps(found.config, indent=2, ensure_ascii=False),
    }


def _guarantee(found: Leakage) -> str:
    if found.epsilon is None:
        return NO_GUARANTEE
    return f"epsilon {epsilon_text(found.epsilon)} at most, at each node"


def _named(names: Mapping[str, str]) -> Named:
    """Puts nodes' names into words as a report writes them."""
    other = [name for name, label in names.items() if label != name]
    if not other:
        return lambda text: text
    known = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, other))})(?![\w-])")
    return lambda text: known.sub(lambda found: names[found[1]], text)


def _attack(folder: Path, told: Attacked, stacks: Mapping[str, Stack], named: Named) -> dict[str, Any]:
    """One attack's part of the section."""
    columns = {column.name: column for column in told.columns}
    return {
        "title": told.title or told.name,
        "about": [(named(term), named(about)) for term, about in told.about],
        "tables": [_table(table, columns, named) for table in tables(lines(told.rows))],
        "notes": told.notes,
        "pictures": [_pictures(folder, each, stacks, named) for each in told.pictures],
    }


def _table(table: Sequence[TableLine], columns: Mapping[str, Column], named: Named) -> dict[str, Any]:
    """A table of the page."""
    heads = list(dict.fromkeys(figure for line in table for figure in line.figures))
    shared = {head: _shared([line.figures[head] for line in table if head in line.figures]) for head in heads}
    best = _best([row for line in table for row in line.figures.values()], columns)
    first = [line.figures[heads[0]] for line in table if heads[0] in line.figures]
    guesses = [columns[row.column].guess if row.column in columns else None for row in first]
    guess = None if None in guesses else guesses[0]
    return {
        "heads": [f"{head[:1].upper()}{head[1:]}" for head in heads],
        "attacks": any(line.attack for line in table),
        "rows": [
            {
                "attack": line.attack,
                "who": named(line.who),
                "cells": [
                    row and {"row": row, "without": "" if shared[head] else row.without, "best": row in best}
                    for head in heads
                    for row in (line.figures.get(head),)
                ],
                "bar": "" if guess is None else _bar(line.figures.get(heads[0]), guess),
            }
            for line in table
        ],
        "guess": None if guess is None else f"{guess:g}%",
        "without": list(shared.values()) if any(shared.values()) else None,
    }


def _shared(rows: Sequence[Row]) -> str:
    """What comes without attacking, if it is the same for all."""
    told = {row.without for row in rows}
    return told.pop() if len(told) == 1 else ""


def _best(rows: Sequence[Row], columns: Mapping[str, Column]) -> list[Row]:
    """The strongest of several figures of one column."""
    found = []
    for name, column in columns.items():
        told = [(row.value, row) for row in rows if row.column == name and row.value is not None]
        if len(told) > 1:
            strongest = min if column.lowest else max
            found.append(strongest(told, key=lambda each: each[0])[1])
    return found


def _bar(row: Row | None, guess: float) -> Markup:
    """From 0 to 100%: a ring with its interval; dotted, what guessing gets."""
    if row is None or row.value is None:
        return Markup("")
    whisker = row.interval or (row.value, row.value)
    return bar(whisker=whisker, rings=[row.value], levels=[("chance", guess)])


def _pictures(folder: Path, told: Pictures, stacks: Mapping[str, Stack], named: Named) -> dict[str, Any]:
    """Strips of pictures below their heads."""
    shapes, drawn = set(), []
    for strip in told.strips:
        if strip.stack not in stacks:
            continue
        images = stacks[strip.stack][: len(told.heads)]
        shapes.add(stacks[strip.stack].shape)
        if len(shapes) > 1:
            shape = f"of shape {stacks[strip.stack].shape}: allowed is that of the strips above it"
            raise RunFolderError(f"{folder / PICTURES}: {strip.stack} is {shape}")
        below = [*strip.below, *[""] * (len(images) - len(strip.below))]
        cells = [(_image(image, strip.head), under) for image, under in zip(images, below, strict=False)]
        drawn.append({"head": strip.head, "cells": cells})
    shown = len(drawn[0]["cells"]) if drawn else 0
    return {
        "title": told.title,
        "says": told.says,
        "heads": [named(head) for head in told.heads[:shown]],
        "strips": drawn,
        "more": len(told.heads) - shown,
    }


def _image(image: Stack, label: str) -> Markup:
    return Markup('<img src="{}" alt="{}">').format(picture(image, SIDE), label)
