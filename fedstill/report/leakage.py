"""What attacks got from a run, from ``leakage.json`` and ``leakage.safetensors``: figures, words, pictures.

The files hold all of it ready to be shown, whichever attacks there were. Nothing here is called safe: an
attack at its strength got what it got.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from fedstill.core.errors import RunFolderError
from fedstill.core.words import listed, number, pick, words
from fedstill.privacy.statement import NO_GUARANTEE, epsilon_text
from fedstill.report.bars import bar
from fedstill.report.files import read_leakage, read_stacks
from fedstill.report.names import labels
from fedstill.report.png import picture

FILE, PICTURES = "leakage.json", "leakage.safetensors"
MOST = 10  # pictures of a strip that are drawn
SIDE = 96  # pixels of a drawn picture's longer side

Stack = npt.NDArray[np.uint8]
Told = Mapping[str, Any]


def section(folder: Path, result: Told) -> dict[str, Any] | None:
    """The section's content; None for a run that nobody attacked.

    Raises:
        RunFolderError: a file is broken, or its pictures are not those that the attacks tell of.
    """
    told = read_leakage(folder / FILE)
    if told is None:
        return None
    stacks, config, named = read_stacks(folder / PICTURES, MOST), pick(told, "config"), _named(labels(result))
    return {
        "attacks": [_attack(folder, each, stacks or {}, named) for each in records(told, "attacks")],
        "left": listed(leaves) if (leaves := texts(told, "leaves")) else None,
        "heard": told.get("ledger", "unknown") is None,
        "disagreement": words(told, "ledger"),
        "guarantee": _guarantee(told),
        "pictures_missing": PICTURES if stacks is None else None,
        "skipped": [
            (words(line, "attack") or "attack", words(line, "reason")) for line in records(told, "skipped")
        ],
        "seconds": number(told, "seconds"),
        **{key: words(told, key) for key in ("sentence", "command", "machine")},
        "config": json.dumps(config, indent=2, ensure_ascii=False) if isinstance(config, Mapping) else None,
    }


def _guarantee(told: Told) -> str:
    epsilon = number(told, "epsilon")
    return NO_GUARANTEE if epsilon is None else f"epsilon {epsilon_text(epsilon)} at most, at each node"


def _named(names: Mapping[str, str]) -> Callable[[str], str]:
    """Puts nodes' names into words as a report writes them."""
    other = [name for name, label in names.items() if label != name]
    if not other:
        return lambda text: text
    known = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, other))})(?![\w-])")
    return lambda text: known.sub(lambda found: names[found[1]], text)


def _attack(
    folder: Path, told: Told, stacks: Mapping[str, Stack], named: Callable[[str], str]
) -> dict[str, Any]:
    """One attack's part of the section."""
    columns = {words(column, "name") or "": column for column in records(told, "columns")}
    about = [tuple(named(str(part)) for part in line) for line in _list(told, "about") if _pair(line)]
    return {
        "title": words(told, "title") or words(told, "name") or "attack",
        "about": about,
        "tables": [_table(table, columns, named) for table in tables(lines(records(told, "rows")))],
        "notes": texts(told, "notes"),
        "pictures": [_pictures(folder, each, stacks, named) for each in records(told, "pictures")],
    }


# --- figures ---


@dataclass(frozen=True)
class Line:
    """The figures that one attack got of one target, by their names."""

    attack: str
    who: str
    figures: Mapping[str, Told]


def lines(rows: Iterable[Told]) -> list[Line]:
    """Rows of one attack on one target as a line each, in the order of their first ones."""
    found: dict[tuple[str, str], dict[str, Told]] = {}
    for row in rows:
        where = words(row, "attack") or "", words(row, "who") or ""
        found.setdefault(where, {})[words(row, "figure") or ""] = row
    return [Line(attack, who, figures) for (attack, who), figures in found.items()]


def tables(lines: Sequence[Line]) -> list[list[Line]]:
    """Lines as tables: those that follow each other and have a figure in common.

    >>> figures = {"x": {}}, {"x": {}, "y": {}}, {"z": {}}
    >>> [len(table) for table in tables([Line("LiRA", "student", each) for each in figures])]
    [2, 1]
    """
    found: list[list[Line]] = []
    for line in lines:
        if found and any(line.figures.keys() & before.figures.keys() for before in found[-1]):
            found[-1].append(line)
        else:
            found.append([line])
    return found


def _table(table: Sequence[Line], columns: Mapping[str, Told], named: Callable[[str], str]) -> dict[str, Any]:
    """A table of the page."""
    heads = list(dict.fromkeys(figure for line in table for figure in line.figures))
    shared = {head: _shared([line.figures[head] for line in table if head in line.figures]) for head in heads}
    best = _best([row for line in table for row in line.figures.values()], columns)
    guesses = [
        number(columns.get(words(line.figures[heads[0]], "column") or ""), "guess")
        for line in table
        if heads[0] in line.figures
    ]
    guess = guesses[0] if guesses and None not in guesses else None
    return {
        "heads": [f"{head[:1].upper()}{head[1:]}" for head in heads],
        "attacks": any(line.attack for line in table),
        "rows": [
            {
                "attack": line.attack,
                "who": named(line.who),
                "cells": [
                    None
                    if (row := line.figures.get(head)) is None
                    else {
                        "text": words(row, "text"),
                        "says": words(row, "says"),
                        "without": None if shared[head] else words(row, "without"),
                        "best": id(row) in best,
                    }
                    for head in heads
                ],
                "bar": None if guess is None else _bar(line.figures.get(heads[0]), guess),
            }
            for line in table
        ],
        "guess": None if guess is None else f"{guess:g}%",
        "without": list(shared.values()) if any(shared.values()) else None,
    }


def _shared(rows: Sequence[Told]) -> str | None:
    """What comes without attacking, if it is the same for all."""
    told = {words(row, "without") for row in rows}
    return told.pop() if len(told) == 1 else None


def _best(rows: Sequence[Told], columns: Mapping[str, Told]) -> set[int]:
    """The strongest of several figures of one column."""
    found = set()
    for name, column in columns.items():
        told = [
            (value, id(row))
            for row in rows
            if words(row, "column") == name and (value := number(row, "value")) is not None
        ]
        if len(told) > 1:
            strongest = min if column.get("lowest") else max
            found.add(strongest(told, key=lambda each: each[0])[1])
    return found


def _bar(row: object, guess: float) -> Markup:
    """From 0 to 100%: a ring with its interval; dotted, what guessing gets."""
    value = number(row, "value")
    if value is None:
        return Markup("")
    ends = [number({"end": end}, "end") for end in _list(row, "interval")]
    low, high = (value if end is None else end for end in (*ends, None, None)[:2])
    return bar(whisker=(low, high), rings=[value], levels=[("chance", guess)])


# --- pictures ---


def _pictures(
    folder: Path, told: Told, stacks: Mapping[str, Stack], named: Callable[[str], str]
) -> dict[str, Any]:
    """Strips of pictures below their heads."""
    heads, shapes, drawn = texts(told, "heads"), set(), []
    for strip in records(told, "strips"):
        name, head = words(strip, "stack") or "", words(strip, "head") or ""
        if name not in stacks:
            continue
        images, below = stacks[name][: len(heads)], texts(strip, "below")
        shapes.add(stacks[name].shape)
        if len(shapes) > 1:
            shape = f"of shape {stacks[name].shape}: allowed is that of the strips above it"
            raise RunFolderError(f"{folder / PICTURES}: {name} is {shape}")
        below += [""] * (len(images) - len(below))
        cells = [(_image(image, head), under) for image, under in zip(images, below, strict=False)]
        drawn.append({"head": head, "cells": cells})
    shown = len(drawn[0]["cells"]) if drawn else 0
    return {
        "title": words(told, "title"),
        "says": words(told, "says"),
        "heads": [named(head) for head in heads[:shown]],
        "strips": drawn,
        "more": len(heads) - shown,
    }


def _image(image: Stack, label: str) -> Markup:
    return Markup('<img src="{}" alt="{}">').format(picture(image, SIDE), label)


# --- out of JSON ---


def _list(record: object, *keys: str) -> list[Any]:
    found = pick(record, *keys)
    return found if isinstance(found, list) else []


def _pair(line: object) -> bool:
    return isinstance(line, list) and len(line) == 2


def records(record: object, *keys: str) -> list[Told]:
    """The records in a list."""
    return [line for line in _list(record, *keys) if isinstance(line, Mapping)]


def texts(record: object, *keys: str) -> list[str]:
    """The texts in a list."""
    return [str(name) for name in _list(record, *keys)]
