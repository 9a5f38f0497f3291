"""What attacks got from a run, from ``leakage.json`` and ``leakage.safetensors``: figures, and what they are
beside of guessing or of images that nobody had.

Nothing here is called safe: an attack at its strength got what it got. A part that is missing, or that is not
what it should be, counts as not measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from fedstill.core.errors import RunFolderError
from fedstill.core.words import listed, number, pick, whole, words
from fedstill.privacy.statement import NO_GUARANTEE, epsilon_text
from fedstill.report.files import read_leakage, read_stacks
from fedstill.report.names import labels
from fedstill.report.png import picture

FILE, PICTURES = "leakage.json", "leakage.safetensors"
MOST = 10  # recovered images, or closest pairs, that are drawn
SIDE = 96  # pixels of a drawn picture's longer side

PARTS = {
    "inversion": "Gradient inversion",
    "membership": "Membership inference",
    "copying": "Copying",
    "distances": "FID and KID",
    "scores": "Inception scores",
    "counts": "Label counts",
}
SHADOWS = {
    "federations": "each the whole run again, over other draws of the records",
    "alone": "each trained alone as a node trains its model",
}

Stack = npt.NDArray[np.uint8]


def section(folder: Path, result: Mapping[str, Any]) -> dict[str, Any] | None:
    """The section's content; None for a run that nobody attacked.

    Raises:
        RunFolderError: a file is broken, or its pictures are not those that the attacks tell of.
    """
    told = read_leakage(folder / FILE)
    if told is None:
        return None
    stacks = read_stacks(folder / PICTURES, MOST)
    names, config = labels(result), pick(told, "config")
    view = {
        "inversion": _inversion(folder, pick(told, "inversion"), stacks or {}),
        "membership": [_membership(target, names) for target in _records(told, "membership")],
        "copying": _copying(folder, pick(told, "copying"), stacks or {}, names),
        "distances": [_distances(space, names) for space in _records(told, "distances", "spaces")],
        "scores": _scores(pick(told, "scores"), names),
        "counts": [_counts(node, names) for node in _records(told, "counts")],
    }
    return {
        **view,
        "left": listed(leaves) if (leaves := _texts(told, "leaves")) else None,
        "heard": told.get("ledger", "unknown") is None,
        "disagreement": words(told, "ledger"),
        "guarantee": _guarantee(told),
        "pictures_missing": PICTURES if stacks is None else None,
        "skipped": _skipped(told, [name for name in PARTS if not view[name]]),
        "seconds": number(told, "seconds"),
        **{key: words(told, key) for key in ("sentence", "command", "machine")},
        "config": json.dumps(config, indent=2, ensure_ascii=False) if isinstance(config, Mapping) else None,
    }


def _guarantee(told: Mapping[str, Any]) -> str:
    epsilon = number(told, "epsilon")
    return NO_GUARANTEE if epsilon is None else f"epsilon {epsilon_text(epsilon)} at most, at each node"


def _skipped(told: Mapping[str, Any], missing: Sequence[str]) -> list[tuple[str, str | None]]:
    """Attacks that were not made, each with its reason; None where the file does not say why."""
    known = [(words(line, "attack") or "attack", words(line, "reason")) for line in _records(told, "skipped")]
    named = {name for name, _ in known}
    unknown = [(name, None) for name in missing if name not in named]
    return [(PARTS.get(name, name), reason) for name, reason in [*known, *unknown]]


# --- gradient inversion ---


def _inversion(folder: Path, part: object, stacks: Mapping[str, Stack]) -> dict[str, Any] | None:
    if not isinstance(part, Mapping):
        return None
    best = words(part, "best")
    attacks = _records(part, "attacks")
    rows = [
        {
            "name": _title(attack),
            "best": best is not None and words(attack, "name") == best,
            "psnr": _deviating(attack, "psnr"),
            "labels": _of(whole(attack, "labels", "right"), whole(attack, "labels", "of")),
            "seconds": number(attack, "seconds"),
        }
        for attack in attacks
    ]
    return {
        "rows": rows,
        "guess": _text(number(part, "guess"), ".1f"),
        **{key: words(part, key) for key in ("shared", "known", "optimiser")},
        **{key: whole(part, key) for key in ("victims", "images", "steps", "round")},
        **_recovered(folder, attacks, stacks, max(whole(part, "images") or 1, 1)),
    }


def _recovered(
    folder: Path, attacks: Sequence[Mapping[str, Any]], stacks: Mapping[str, Stack], images: int
) -> dict[str, Any]:
    """One row of original images, one for each attack: what it got, with each image's PSNR."""
    original = stacks.get("inversion.original")
    if original is None:
        return {"heads": [], "drawn": [], "more": 0}
    plain = [(_image(image, "original"), None) for image in original]
    drawn: list[dict[str, Any]] = [{"name": "original", "scored": False, "cells": plain}]
    most = len(original)
    for attack in attacks:
        key, title = f"inversion.{words(attack, 'name')}", _title(attack)
        found = stacks.get(key)
        if found is None:
            continue
        if found.shape != original.shape:
            shapes = f"of shape {found.shape}: allowed is {original.shape}, as the original images"
            raise RunFolderError(f"{folder / PICTURES}: {key} is {shapes}")
        each = _list(attack, "psnr", "per_image")
        most = max(most, len(each))
        scores = [_text(number({"it": value}, "it"), ".1f") for value in each[: len(found)]]
        scores += [None] * (len(found) - len(scores))
        cells = [
            (_image(image, f"what {title} got"), score) for image, score in zip(found, scores, strict=True)
        ]
        drawn.append({"name": title, "scored": True, "cells": cells})
    heads = [
        f"victim {place // images + 1}" + (f", image {place % images + 1}" if images > 1 else "")
        for place in range(len(original))
    ]
    return {"heads": heads, "drawn": drawn, "more": most - len(original)}


# --- membership inference ---


def _membership(target: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    attacks = _records(target, "attacks")
    low = list(dict.fromkeys(rate for attack in attacks for at in _records(attack, "at")
                             if (rate := number(at, "rate")) is not None))  # fmt: skip
    best = words(target, "best")
    of = words(target, "of") or "model"
    node = of.removeprefix("answers of ")
    title = of if node == of else f"answers of {names.get(node, node)}"
    trained, others = words(target, "trained"), whole(target, "others")
    return {
        "title": title[0].upper() + title[1:],
        "sees": words(target, "sees"),
        "members": whole(target, "members"),
        "others": others,
        "shadows": whole(target, "shadows"),
        "trained": SHADOWS.get(trained or "", trained),
        "rates": [_rate(rate) for rate in low],
        # What no number of these records can tell, whatever the attack.
        "unresolved": [
            (_rate(rate), math.ceil(1 / rate))
            for rate in low
            if 1e-9 < rate < 1 and others is not None and others * rate < 1 - 1e-9
        ],
        "rows": [
            {
                "name": _title(attack),
                "best": best is not None and words(attack, "name") == best,
                "auc": _interval(pick(attack, "auc"), 1, ".3f"),
                "chance": _holds_chance(pick(attack, "auc")),
                "bar": _auc_bar(pick(attack, "auc")),
                "at": [_found(attack, rate) for rate in low],
            }
            for attack in attacks
        ],
    }


def _found(attack: Mapping[str, Any], rate: float) -> dict[str, Any] | None:
    """True positives at a rate of false ones; None where the attack has no such figure."""
    at = next((at for at in _records(attack, "at") if number(at, "rate") == rate), None)
    if at is None:
        return None
    return {
        "share": _interval(pick(at, "true_positives"), 100, ".1f", "%"),
        "found": _of(whole(at, "found"), whole(at, "members")),
        "alarms": _of(whole(at, "accused"), whole(at, "others")),
    }


def _holds_chance(auc: object) -> bool | None:
    low, high = number(auc, "low"), number(auc, "high")
    return None if low is None or high is None else low <= 0.5 <= high


def _auc_bar(auc: object) -> Markup:
    """From 0 to 1: a ring with its interval; dotted, what guessing gets."""
    value = number(auc, "value")
    if value is None:
        return Markup("")
    ends = [value if end is None else end for end in (number(auc, "low"), number(auc, "high"))]
    x, low, high = (f"{100 * min(max(share, 0.0), 1.0):.2f}%" for share in (value, *ends))
    return Markup(
        '<svg class="bars" width="100%" height="24" aria-hidden="true">'
        '<rect class="track" width="100%" y="5" height="14" rx="3"/>'
        '<line class="chance" x1="50%" x2="50%" y1="2" y2="22"/>'
        '<line class="whisker" x1="{low}" x2="{high}" y1="12" y2="12"/>'
        '<circle class="node" cx="{x}" cy="12" r="3"/></svg>'
    ).format(x=x, low=low, high=high)


# --- generated images ---


def _copying(
    folder: Path, part: object, stacks: Mapping[str, Stack], names: Mapping[str, str]
) -> dict[str, Any] | None:
    if not isinstance(part, Mapping):
        return None
    spaces = _records(part, "spaces")
    return {
        "images": whole(part, "images"),
        "of": words(part, "of"),
        "rows": [
            {
                "name": words(space, "extractor") or "space",
                "counts": [whole(space, key) for key in ("generated", "private", "held_out")],
                "share": _interval(space, 100, ".1f", "%", key="share"),
                "p": _text(number(space, "p_value"), ".3g"),
                "drawings": whole(space, "drawings"),
                "z": _text(number(space, "z"), ".1f"),
                "z_p": _text(number(space, "z_p_value"), ".3g"),
                "closest": _text(min(_ratios(space), default=None), ".2f"),
                "fresh": _text(number(space, "fresh"), ".2f"),
            }
            for space in spaces
        ],
        "pairs": _pairs(folder, spaces[0], stacks, names) if spaces else [],
    }


def _ratios(space: Mapping[str, Any]) -> list[float]:
    ratios = [number(pair, "ratio") for pair in _records(space, "pairs")]
    return [ratio for ratio in ratios if ratio is not None]


def _pairs(
    folder: Path, space: Mapping[str, Any], stacks: Mapping[str, Stack], names: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The closest pairs as pictures in threes: generated, nearest private, nearest held-out."""
    kinds = {"generated": "generated", "private": "private", "held_out": "held-out"}
    threes = [stacks.get(f"copying.{kind}") for kind in kinds]
    there = [three for three in threes if three is not None]
    if len(there) < len(kinds):
        return []
    if len({three.shape for three in there}) > 1:
        shapes = ", ".join(str(three.shape) for three in there)
        raise RunFolderError(f"{folder / PICTURES}: copying is of shapes {shapes}: allowed are three alike")
    fresh = number(space, "fresh")
    shown = []
    for pair, images in zip(_records(space, "pairs"), zip(*there, strict=True), strict=False):
        ratio, node = number(pair, "ratio"), words(pair, "node")
        shown.append(
            {
                "images": [
                    (_image(image, kind), kind) for image, kind in zip(images, kinds.values(), strict=True)
                ],
                "ratio": _text(ratio, ".2f"),
                "node": None if node is None else names.get(node, node),
                "closer": ratio is not None and fresh is not None and ratio < fresh,
            }
        )
    return shown


def _distances(space: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    nodes, held_out = pick(space, "nodes"), pick(space, "held_out")
    return {
        "extractor": words(space, "extractor") or "a space without a name",
        "dimensions": whole(space, "dimensions"),
        "generated": whole(space, "generated"),
        "few": pick(space, "full_rank") is False,
        "average": _text(number(space, "average"), "#.4g"),
        "average_held_out": _text(number(space, "average_held_out"), "#.4g"),
        "rows": [
            {
                "name": names.get(str(name), str(name)),
                "real": whole(of, "real"),
                "figures": [
                    _text(number(of_whom, key), "#.4g" if key == "fid" else "#.3g")
                    for key in ("fid", "kid")
                    for of_whom in (of, pick(held_out, name))
                ],
            }
            for name, of in (nodes.items() if isinstance(nodes, Mapping) else ())
        ],
    }


def _scores(part: object, names: Mapping[str, str]) -> dict[str, Any] | None:
    if not isinstance(part, Mapping):
        return None
    nodes = pick(part, "nodes")
    judges = list(nodes) if isinstance(nodes, Mapping) else []
    return {
        "images": whole(part, "images"),
        "adapted": _text(number(part, "adapted"), ".2f"),
        "student": _text(number(part, "student"), ".2f"),
        "nodes": [(names.get(str(name), str(name)), _text(number(nodes, name), ".2f")) for name in judges],
    }


# --- label counts ---


def _counts(node: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    name = words(node, "node") or "node"
    exact = pick(node, "exact")
    lacks, told = _texts(node, "absent"), _texts(node, "told_absent")
    size = number(node, "size_error")
    return {
        "name": names.get(name, name),
        "exact": exact if isinstance(exact, bool) else None,
        "share": _text(number(node, "largest_error"), ".1f", 100),
        "class": words(node, "largest_class"),
        "size": _text(size, "+,.1f") if size else "0" if size == 0 else None,
        "lacks": len(lacks),
        "known": [of for of in lacks if of in told],
        "wrong": [of for of in told if of not in lacks],
    }


# --- figures in words ---


def _title(attack: Mapping[str, Any]) -> str:
    return words(attack, "title") or words(attack, "name") or "attack"


def _text(value: float | None, form: str, scale: float = 1.0) -> str | None:
    return None if value is None else format(scale * value, form)


def _deviating(record: Mapping[str, Any], key: str) -> str | None:
    mean, std = number(record, key, "mean"), number(record, key, "std")
    return None if mean is None else f"{mean:.1f}" + ("" if std is None else f" \u00b1 {std:.1f}")


def _interval(record: object, scale: float, form: str, unit: str = "", key: str = "value") -> Any:
    """A figure and its interval, ``{"value": str, "range": str | None}``, or None."""
    value, low, high = (_text(number(record, at), form, scale) for at in (key, "low", "high"))
    if value is None:
        return None
    return {"value": f"{value}{unit}", "range": None if low is None or high is None else f"{low} to {high}"}


def _rate(share: float) -> str:
    """A rate without needless digits.

    >>> _rate(0.001), _rate(0.01)
    ('0.1%', '1%')
    """
    return f"{100 * share:g}%"


def _of(part: int | None, all: int | None) -> str | None:
    return None if part is None or all is None else f"{part:,} of {all:,}"


def _image(image: Stack, label: str) -> Markup:
    return Markup('<img src="{}" alt="{}">').format(picture(image, SIDE), label)


def _list(record: object, *keys: str) -> list[Any]:
    found = pick(record, *keys)
    return found if isinstance(found, list) else []


def _records(record: object, *keys: str) -> list[Mapping[str, Any]]:
    return [line for line in _list(record, *keys) if isinstance(line, Mapping)]


def _texts(record: object, *keys: str) -> list[str]:
    return [str(name) for name in _list(record, *keys)]
