"""Predictions beside the truth, and inputs that the server made, drawn from a run's files.

Of predictions, the best, the median and the worst case of the central model, as a run keeps them. Outlines
are thin lines on the edges of pixels, whatever the picture's size. Where truth and prediction agree there is
one white line, else the truth is orange and the prediction blue, all on a dark rim: they are legible on gray
scans and on stained tissue, and by people who do not tell red from green, or blue from yellow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from fedstill.core.errors import RunFolderError
from fedstill.report.metric_text import format_with_unit, lowercase_title
from fedstill.report.png import (
    MAX_PIXELS,
    OUTLINE_COLORS,
    image_tag,
    image_url,
    indexed_image_url,
    outline_codes,
)
from fedstill.report.result import Result
from fedstill.report.result_parts import Case
from fedstill.report.run_files import Array, is_image_stack, read_tensors

FILE = "pictures.safetensors"
MAX_MODELS = 6  # drawn a case: the central model and the first nodes'
MAX_IMAGE_PIXELS = 256  # pixels of a drawn picture
LARGE = 100  # pixels: a picture with a longer side is drawn larger, as its outlines would run together
RANKS = {"best": "Best case", "median": "Median case", "worst": "Worst case"}
SATURATED = 0.995  # quantile of the models' errors that the brightest color stands for

MAX_STEPS, MAX_SAMPLES = 10, 12  # rows and columns of generated inputs
# Fewer and larger ones where they were made from label maps, to see whether they show what they should.
FROM_MAPS = (4, 6, 128)  # rows, columns and pixels of the longer side
MAPS_SUFFIX = ".maps"  # after a step's name: what its inputs were made from
# Of the codes of a label map, for any number of them; neighbors differ in brightness too.
COLORS = [(16, 16, 20), (86, 180, 233), (255, 217, 47), (213, 94, 0), (0, 158, 115), (240, 240, 240)]
CODE_COLORS = np.resize(np.array(COLORS, np.uint8), (256, 3))


# --- what the server made ---------------------------------------------------------------------------------


def samples(folder: Path) -> list[dict[str, Any]]:
    """Rows of generated inputs, evenly apart, the last among them; of other tasks they are no pictures."""
    tensors = read_tensors(folder / "samples.safetensors") or {}
    keys = sorted(
        (key for key, stack in tensors.items() if key.isdecimal() and is_image_stack(stack)), key=int
    )
    to_order = any(f"{key}{MAPS_SUFFIX}" in tensors for key in keys)
    rows, columns, side = FROM_MAPS if to_order else (MAX_STEPS, MAX_SAMPLES, MAX_PIXELS)
    keys = keys[:: -math.ceil(len(keys) / rows)][::-1] if keys else []
    return [
        {
            "step": int(key),
            "pictures": [image_url(image, side) for image in tensors[key][:columns]],
            "maps": [
                indexed_image_url(codes, CODE_COLORS)
                for codes in tensors.get(f"{key}{MAPS_SUFFIX}", ())[:columns]
            ],
        }
        for key in keys
    ]


# --- predictions ------------------------------------------------------------------------------------------


def section(folder: Path, result: Result) -> dict[str, Any] | None:
    """The section's content; None for a run without pictures. Raises RunFolderError for a broken file."""
    if not result.pictures:
        return None
    kind, metric = result.pictures[0].kind, result.metric
    tensors = read_tensors(folder / FILE)
    if tensors is None:
        return {"missing": FILE, "kind": kind, "cases": [], "more": 0}
    file = folder / FILE
    parts = [_parts(file, place, case, tensors, result) for place, case in enumerate(result.pictures)]
    most = max(map(_largest, parts)) if kind == "image" else 0.0
    views = []
    for place, (case, part) in enumerate(zip(result.pictures, parts, strict=True)):
        drawn = _images(part, most) if kind == "image" else _outlines(f"case-{place}", part)
        for panel, model in zip(drawn["panels"][drawn["first"] :], case.models, strict=False):
            panel["score"] = None if model.score is None else format_with_unit(metric, model.score)
        views.append(
            {
                "title": RANKS.get(case.rank, "The only case"),
                "about": _about(case),
                "judged": _judged(case, metric.title),
                "large": max(part.truth.shape[-2:]) > LARGE,
                **drawn,
            }
        )
    judge = parts[0].models[0] if parts[0].models else "model"
    return {
        "missing": None,
        "kind": kind,
        "judge": f"the {judge}" if judge == result.main_model else judge,
        "metric": lowercase_title(metric.title),
        "cases": views,
        "more": max(0, max(len(case.models) for case in result.pictures) - MAX_MODELS),
        "colored": kind != "image" and any(len(part.below) == 3 for part in parts),
        "scale": image_tag(
            indexed_image_url(np.arange(256, dtype=np.uint8)[None], _hot()), "from no error to the largest"
        ),
        "most": f"{100 * most:.1f}%",
    }


@dataclass(frozen=True)
class _Parts:
    """What there is of one case. Of maps ``below`` is the image, of images it is what the models saw."""

    truth: Array
    below: Array
    models: list[str]
    made: list[Array]


def _parts(path: Path, place: int, case: Case, tensors: Mapping[str, Array], result: Result) -> _Parts:
    """One case's tensors; the models are called what the page calls them: no average is a student."""

    def tensor(name: str) -> Array:
        if f"{place}/{name}" not in tensors:
            raise RunFolderError(f"{path}: {place}/{name} is missing")
        return tensors[f"{place}/{name}"]

    names = [result.display_name(model.name) for model in case.models]
    names[:1] = [result.main_model if name == "student" else name for name in names[:1]]
    made = [tensor(f"output/{m}") for m in range(len(names[:MAX_MODELS]))]
    below = "seen" if case.kind == "image" else "image"
    return _Parts(tensor("truth"), tensor(below), names[:MAX_MODELS], made)


def _about(case: Case) -> str:
    parts = [case.case, case.site]
    if case.part is not None and case.parts is not None:
        parts.append(f"slice {case.part + 1} of {case.parts}")
    if case.is_cut:
        sides = ((case.window or ())[2:], case.size or ())
        seen, whole = (" \u00d7 ".join(map(str, each)) for each in sides)
        parts.append(f"{seen} of its {whole} pixels")
    return ", ".join(part for part in parts if part)


def _judged(case: Case, title: str) -> str:
    if case.part is not None:
        return f"patient\u2019s {lowercase_title(title)}"
    return f"whole picture\u2019s {lowercase_title(title)}" if case.is_cut else title


def _panel(name: str, drawing: Markup) -> dict[str, Any]:
    return {"name": name, "score": None, "drawing": drawing}


def _outlines(name: str, parts: _Parts) -> dict[str, Any]:
    height, width = parts.truth.shape
    size = {"w": width, "h": height}
    base = Markup('<image id="{n}" href="{png}" width="{w}" height="{h}"/>').format(
        n=name, png=image_url(parts.below, MAX_IMAGE_PIXELS), **size
    )
    frame = Markup(
        '<svg class="sight" viewBox="0 0 {w} {h}" role="img" aria-label="{label}">{image}'
        '<image class="lines" href="{png}" width="{w}" height="{h}"/></svg>'
    )
    label, lines = (
        "the image with the true outline",
        indexed_image_url(outline_codes(parts.truth), OUTLINE_COLORS),
    )
    panels = [_panel("truth", frame.format(label=label, image=base, png=lines, **size))]
    again = Markup('<use href="#{}"/>').format(name)
    for model, found in zip(parts.models, parts.made, strict=True):
        lines = indexed_image_url(outline_codes(parts.truth, found), OUTLINE_COLORS)
        panels.append(
            _panel(model, frame.format(label=f"{label} and that of {model}", image=again, png=lines, **size))
        )
    return {"panels": panels, "first": 1, "errors": []}


def _errors(parts: _Parts) -> list[Array]:
    """How far what the models saw is from the truth, then what each made of it: ``(H, W)``, of white."""
    truth = parts.truth.astype(np.float32)
    return [np.abs(image.astype(np.float32) - truth)[0] for image in (parts.below, *parts.made)]


def _largest(parts: _Parts) -> float:
    seen, *made = _errors(parts)
    return max(float(np.quantile(error, SATURATED)) for error in (made or [seen]))


def _images(parts: _Parts, most: float) -> dict[str, Any]:
    names = ["truth", "measured, zero-filled", *parts.models]
    images = zip(names, (parts.truth, parts.below, *parts.made), strict=True)
    errors = zip(names[1:], _errors(parts), strict=True)
    pictures = [(name, image_url(_bytes(image), MAX_IMAGE_PIXELS)) for name, image in images]
    far = [(name, indexed_image_url(_bytes(error / (most or 1.0)), _hot())) for name, error in errors]
    return {
        "panels": [_panel(name, image_tag(drawn, f"image: {name}")) for name, drawn in pictures],
        "first": 2,
        "errors": [image_tag(drawn, f"error of {name}") for name, drawn in far],
    }


def _bytes(image: Array) -> npt.NDArray[np.uint8]:
    return np.clip(image.astype(np.float32) * 255, 0, 255).round().astype(np.uint8)


def _hot() -> npt.NDArray[np.uint8]:
    """256 colors from no error to the largest, ``(256, 3)``, brighter all the way: hues are not needed."""
    from matplotlib import colormaps

    return _bytes(colormaps["inferno"](np.arange(256))[:, :3])
