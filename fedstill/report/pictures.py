"""Predictions beside the truth, drawn: outlines on the image, images with their errors.

The best, the median and the worst case of the central model, as a run keeps them.
Outlines are thin lines on the edges of pixels, whatever the picture's size. Where truth and prediction agree
there is one white line, else the truth is orange and the prediction blue, all on a dark rim: they are legible
on grey scans and on stained tissue, and by people who do not tell red from green, or blue from yellow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from fedstill.core.errors import RunFolderError
from fedstill.report.metrics import in_a_sentence, told
from fedstill.report.names import labels
from fedstill.report.outlines import compare, outline
from fedstill.report.png import indexed, picture
from fedstill.report.result import CENTRAL, Result
from fedstill.report.result_parts import Case, Scored

FILE = "pictures.safetensors"
MOST_MODELS = 6  # drawn a case: the central model and the first nodes'
MOST_SIDE = 256  # pixels of a drawn picture
LARGE = 100  # pixels: a picture with a longer side is drawn larger, as its outlines would run together
RANKS = {"best": "Best case", "median": "Median case", "worst": "Worst case"}
SATURATED = 0.995  # quantile of the models' errors that the brightest colour stands for

Array = npt.NDArray[Any]


def section(folder: Path, result: Result) -> dict[str, Any] | None:
    """The section's content; None for a run without pictures.

    Raises:
        RunFolderError: the file of pictures is broken, or does not hold what the result tells of it.
    """
    if not result.pictures:
        return None
    kind = result.pictures[0].kind
    if not (folder / FILE).exists():
        return {"missing": FILE, "kind": kind, "cases": [], "more": 0}
    figure = result.metric
    tensors = _read(folder / FILE)
    central = CENTRAL[result.central][0]
    names = labels(result)
    cases = [_renamed(case, names, central) for case in result.pictures]
    parts = [_parts(folder / FILE, place, case, tensors) for place, case in enumerate(cases)]
    most = max(map(_largest, parts)) if kind == "image" else 0.0
    views = [
        {
            "title": RANKS.get(case.rank, "The only case"),
            "about": _about(case),
            "judged": _judged(case, figure.title),
            "large": max(part.truth.shape[-2:]) > LARGE,
            **_drawn(f"case-{place}", part, most),
        }
        for place, (case, part) in enumerate(zip(cases, parts, strict=True))
    ]
    for view, case in zip(views, cases, strict=True):
        for panel, model in zip(view["panels"][view["first"] :], case.models, strict=False):
            panel["score"] = None if model.score is None else told(figure, model.score)
    return {
        "missing": None,
        "kind": kind,
        "judge": _judge(cases[0].models, central),
        "metric": in_a_sentence(figure.title),
        "cases": views,
        "more": max(0, max(len(case.models) for case in cases) - MOST_MODELS),
        "coloured": any(part.kind == "map" and len(part.below) == 3 for part in parts),
        "scale": _scale() if kind == "image" else None,
        "most": f"{100 * most:.1f}%",
    }


def _renamed(case: Case, names: Mapping[str, str], central: str) -> Case:
    """A case whose models are called what the page calls them: no average is a student."""
    called = [
        central if place == 0 and model.name == "student" else names.get(model.name, model.name)
        for place, model in enumerate(case.models)
    ]
    models = zip(case.models, called, strict=True)
    return dataclasses.replace(
        case, models=tuple(Scored(name=name, score=each.score) for each, name in models)
    )


def _read(path: Path) -> dict[str, Array]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise RunFolderError(f"{path} cannot be read as safetensors: {error}") from None


class _Parts(NamedTuple):
    """What there is of one case. Of maps ``below`` is the image, of images it is what the models saw."""

    kind: str
    truth: Array
    below: Array
    models: list[str]
    made: list[Array]


def _parts(path: Path, place: int, case: Case, tensors: Mapping[str, Array]) -> _Parts:
    """One case's tensors."""

    def tensor(name: str, dimensions: int) -> Array:
        found = tensors.get(f"{place}/{name}")
        if found is None or found.ndim != dimensions or 0 in found.shape:
            form = "missing" if found is None else f"of shape {found.shape}"
            axes = "(H, W)" if dimensions == 2 else "(1 or 3, H, W)"
            raise RunFolderError(f"{path}: {place}/{name} is {form}: allowed is {axes}")
        return found

    kind, axes = ("image", 3) if case.kind == "image" else ("map", 2)
    names = [model.name for model in case.models][:MOST_MODELS]
    made = [tensor(f"output/{m}", axes) for m in range(len(names))]
    return _Parts(kind, tensor("truth", axes), tensor("seen" if kind == "image" else "image", 3), names, made)


def _drawn(name: str, parts: _Parts, most: float) -> dict[str, Any]:
    return _images(parts, most) if parts.kind == "image" else _outlines(name, parts)


def _about(case: Case) -> str:
    """Which case it is, from where, and which part of it is seen."""
    parts = [case.case, case.site]
    if case.part is not None and case.parts is not None:
        parts.append(f"slice {case.part + 1} of {case.parts}")
    if case.window is not None and case.size is not None and _is_cut(case):
        shown, whole = (" \u00d7 ".join(map(str, sides)) for sides in (case.window[2:], case.size))
        parts.append(f"{shown} of its {whole} pixels")
    return ", ".join(part for part in parts if part)


def _judge(models: Sequence[Scored], central: str) -> str:
    """The model that cases were ranked by, in a sentence."""
    name = models[0].name if models else "model"
    return f"the {name}" if name == central else name


def _judged(case: Case, title: str) -> str:
    """What a score below a picture is, and of what, if only a part of the case is seen."""
    if case.part is not None:
        return f"patient\u2019s {in_a_sentence(title)}"
    return f"whole picture\u2019s {in_a_sentence(title)}" if _is_cut(case) else title


def _is_cut(case: Case) -> bool:
    return case.window is not None and case.size is not None and case.window[2:] != case.size


# --- maps ---


def _outlines(name: str, parts: _Parts) -> dict[str, Any]:
    """The image with the true outline, then for each model with both; the image is there only once."""
    truth = parts.truth
    height, width = truth.shape
    base = Markup('<image id="{n}" href="{png}" width="{w}" height="{h}"/>').format(
        n=name, png=picture(parts.below, MOST_SIDE), w=width, h=height
    )
    again = Markup('<use href="#{}"/>').format(name)

    def drawing(label: str, drawn: Sequence[Markup]) -> Markup:
        return Markup('<svg class="sight" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
            width, height, label, Markup("").join(drawn)
        )

    first = drawing(
        "the image with the true outline", [base, *_lines([(f"{name}-truth", "truth", outline(truth))])]
    )
    panels: list[dict[str, Any]] = [{"name": "truth", "score": None, "drawing": first}]
    for place, (model, found) in enumerate(zip(parts.models, parts.made, strict=True)):
        own = compare(truth, found)._asdict()
        lines = _lines([(f"{name}-{place}-{style}", style, path) for style, path in own.items()])
        label = f"the image with the true outline and that of {model}"
        panels.append({"name": model, "score": None, "drawing": drawing(label, [again, *lines])})
    return {"panels": panels, "first": 1, "errors": []}


def _lines(paths: Sequence[tuple[str, str, str]]) -> list[Markup]:
    """Outlines (name, style, path), each on its rim; all rims are below all lines, and hide none.

    What keeps a line as thin on a small picture as on a large one stands at the path itself: no style sheet
    reaches it where it is drawn by its name.
    """
    there = [(name, style, path) for name, style, path in paths if path]
    kept = '<path id="{}" d="{}" fill="none" vector-effect="non-scaling-stroke"/>'
    return [
        Markup("<defs>{}</defs>").format(
            Markup("").join(Markup(kept).format(name, path) for name, _, path in there)
        ),
        *(_line(name, "rim") for name, _, _ in there),
        *(_line(name, style) for name, style, _ in there),
    ]


def _line(name: str, style: str) -> Markup:
    return Markup('<use class="{}" href="#{}"/>').format(style, name)


# --- images ---


def _errors(parts: _Parts) -> list[Array]:
    """How far what the models saw is from the truth, then what each made of it: ``(H, W)``, of white."""
    truth = parts.truth.astype(np.float32)
    return [np.abs(image.astype(np.float32) - truth)[0] for image in (parts.below, *parts.made)]


def _largest(parts: _Parts) -> float:
    """The error that the brightest colour stands for: nearly the largest of the models'."""
    seen, *made = _errors(parts)
    return max(float(np.quantile(error, SATURATED)) for error in (made or [seen]))


def _images(parts: _Parts, most: float) -> dict[str, Any]:
    """The true image, what the models saw and what they made of it; below them their errors, on one scale."""
    names = ["truth", "measured, zero-filled", *parts.models]
    panels: list[dict[str, Any]] = [
        {"name": name, "score": None, "drawing": _shown(picture(_bytes(image), MOST_SIDE), f"image: {name}")}
        for name, image in zip(names, (parts.truth, parts.below, *parts.made), strict=True)
    ]
    scaled = [_bytes(error / (most or 1.0)) for error in _errors(parts)]
    errors = [
        _shown(indexed(error, _hot()), f"error of {name}")
        for name, error in zip(names[1:], scaled, strict=True)
    ]
    return {"panels": panels, "first": 2, "errors": errors}


def _bytes(image: Array) -> npt.NDArray[np.uint8]:
    return np.clip(image.astype(np.float32) * 255, 0, 255).round().astype(np.uint8)


def _shown(address: str, label: str) -> Markup:
    return Markup('<img src="{}" alt="{}">').format(address, label)


def _hot() -> npt.NDArray[np.uint8]:
    """256 colours from no error to the largest, ``(256, 3)``, brighter all the way: hues are not needed."""
    from matplotlib import colormaps

    return _bytes(colormaps["inferno"](np.arange(256))[:, :3])


def _scale() -> Markup:
    """The colours from the smallest error to the largest."""
    return _shown(
        indexed(np.arange(256, dtype=np.uint8)[None], _hot()), "colours from no error to the largest"
    )
