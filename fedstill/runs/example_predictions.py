"""The pictures of a run: which cases to show, put together from their parts, as result files keep them.

The best, the median and the worst case of the central model, so that nobody chooses; each with what the
nodes' own models make of it. Drawing them is the report's work (fedstill/report/image_panels.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fedstill.core.dataset import TensorData
from fedstill.tasks.instances import stitch_patches
from fedstill.tasks.task import Task

SIDE = 192  # pixels: of a larger picture the window of this side that holds most of the truth is shown
STEP = 16  # pixels between two windows that are tried
WHITE = 0.998  # quantile of a gray picture that is shown as white: scanners have no unit of brightness


def choose_example_predictions(
    task: Task,
    test: TensorData,
    outputs: Mapping[str, torch.Tensor],
    mean: Sequence[float],
    std: Sequence[float],
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]] | None:
    """Choose cases of the test part and put their pictures together.

    Args:
        task: what was learned; only outputs that are maps or images can be shown.
        outputs: of each model on all of it ``(N, C, ...)``, by the model's name; shown in this order. The
            first is what cases are ranked by.
        mean, std: one a channel, by which inputs (and images that are targets) were normalized.

    Returns:
        What ``pictures.safetensors`` and "pictures" in ``result.json`` hold, or None where there is nothing
        to show: another kind of task, or no case with a score.

        Tensors by name: for the k-th case ``"k/image"`` and ``"k/truth"``, ``"k/seen"`` where a model sees
        something else than the image, and ``"k/output/m"`` for its m-th model. Images are uint8
        ``(1 or 3, H, W)``; maps are ``(H, W)`` int32 of classes or objects; images that models made are
        float16 ``(1, H, W)``, where 1 is the white of the page.

        One JSON object a case, best first: "case", "site", "rank" (best, median, worst, or only), "models"
        (each with "name" and "score", what models are judged by), "kind" (map or image), "part" and "parts"
        (which slice of how many; null for whole pictures), "window" (top, left, height, width) and "size" of
        the whole picture. What cannot be said is null.
    """
    if task.kind not in ("map", "image") or not outputs:
        return None
    scores = task.case_scores(next(iter(outputs.values())), test.targets, test.cases)
    if scores is None:
        return None
    tensors: dict[str, torch.Tensor] = {}
    about: list[dict[str, Any]] = []
    for rank, place in ranked(scores.tolist()):
        name, site, rows = _case(test, place, len(scores))
        drawn, told = _picture(task, test, outputs, rows, mean, std)
        tensors.update({f"{len(about)}/{key}": tensor.contiguous().clone() for key, tensor in drawn.items()})
        about.append({"case": name, "site": site, "rank": rank, **told})
    return (tensors, about) if about else None


def ranked(scores: Sequence[float]) -> list[tuple[str, int]]:
    """The best, the median (of two the better one) and the worst case; cases without a score are left out.

    >>> ranked([10.0, 40.0, float("nan"), 20.0, 30.0])
    [('best', 1), ('median', 4), ('worst', 0)]
    >>> ranked([5.0, 7.0]), ranked([5.0]), ranked([float("nan")])
    ([('best', 1), ('worst', 0)], [('only', 0)], [])
    """
    known = [case for case, score in enumerate(scores) if math.isfinite(score)]
    order = sorted(known, key=lambda case: -scores[case])
    if len(order) < 2:
        return [("only", case) for case in order]
    middle = [("median", order[(len(order) - 1) // 2])] if len(order) > 2 else []
    return [("best", order[0]), *middle, ("worst", order[-1])]


def _case(test: TensorData, place: int, scored: int) -> tuple[str, str, torch.Tensor]:
    """A case's name, its site and its examples, by its place among so many scored ones."""
    if test.cases is None:
        return f"example {place + 1}", "", torch.tensor([place])
    cases = test.cases
    # A part of a data set keeps the numbers of the whole; some tasks score only those that are there.
    number = place if scored == len(cases.names) else cases.present_ids()[place]
    return cases.names[number], cases.sites[number], torch.nonzero(cases.case_ids == number).flatten()


def _picture(
    task: Task,
    test: TensorData,
    outputs: Mapping[str, torch.Tensor],
    rows: torch.Tensor,
    mean: Sequence[float],
    std: Sequence[float],
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """One case: its tensors by name, and what is to be said of it."""
    here = test.subset(rows.to(test.inputs.device)).to("cpu")
    responses = {name: given[rows.to(given.device)].float().cpu() for name, given in outputs.items()}
    scored = {name: _score(task, given, here) for name, given in responses.items()}
    stitched = here.cases is not None and here.cases.corners is not None
    part = None if stitched else _fullest(here.targets)
    x = _whole(here, here.inputs, part)  # (C, H, W)
    if task.kind == "map":  # probabilities, as patches are averaged where they overlap
        responses = {name: given.softmax(1) for name, given in responses.items()}
    responses = {name: _whole(here, given, part) for name, given in responses.items()}
    if task.kind == "image":
        drawn = _images(here.targets[part or 0], x, responses, mean, std)
    else:
        drawn = {"image": _pixels(x, mean, std), "truth": _truth(task, here, part).int()}
        for place, given in enumerate(responses.values()):
            drawn[f"output/{place}"] = task.display_map(given).int()
    size = tuple(drawn["truth"].shape[-2:])
    top, left, height, width = _window(drawn["truth"])
    drawn = {key: tensor[..., top : top + height, left : left + width] for key, tensor in drawn.items()}
    return drawn, {
        "kind": task.kind,
        "models": [{"name": name, "score": score} for name, score in scored.items()],
        "part": None if stitched or len(here) == 1 else part,
        "parts": None if stitched or len(here) == 1 else len(here),
        "window": [top, left, height, width],
        "size": list(size),
    }


def _score(task: Task, outputs: torch.Tensor, here: TensorData) -> float | None:
    """What models are judged by, of one case; None where it cannot be said."""
    value = task.compute_primary_metric(outputs, here.targets, here.cases)
    return value if math.isfinite(value) else None


def _fullest(targets: torch.Tensor) -> int:
    """Which of a case's slices has the largest truth: most pixels of a class, or the brightest image."""
    sizes = targets.ne(0) if not targets.is_floating_point() else targets
    return int(sizes.flatten(1).double().sum(1).argmax())


def _whole(here: TensorData, values: torch.Tensor, part: int | None) -> torch.Tensor:
    """What belongs to the examples of a case ``(n, C, h, w)`` as one picture ``(C, H, W)``: the patches put
    together, or one of the slices."""
    if part is not None or here.cases is None:
        return values[part or 0]
    return next(stitch_patches(values, here.cases))[0]


def _truth(task: Task, here: TensorData, part: int | None) -> torch.Tensor:
    """The true map of a case, ``(H, W)``: its objects where they are known, else what its targets show."""
    if here.cases is not None and here.cases.instances:
        return torch.from_numpy(here.cases.instances[int(here.cases.case_ids[0])])
    classes = F.one_hot(here.targets, task.classes).movedim(-1, 1).float()  # (n, C, h, w)
    return task.display_map(_whole(here, classes, part))


def _shown(x: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """Normalized channels as they were, ``(C, H, W)``: all three of a color picture, else the first."""
    across = (-1, 1, 1)
    pixels = x * torch.tensor(std).view(across) + torch.tensor(mean).view(across)
    return pixels if len(pixels) == 3 else pixels[:1]


def _white(pixels: torch.Tensor) -> float:
    return max(float(pixels.flatten().double().quantile(WHITE)), 1e-6) if len(pixels) == 1 else 1.0


def _pixels(x: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """A picture as bytes: ``(1 or 3, H, W)`` uint8."""
    pixels = _shown(x, mean, std)
    return (pixels / _white(pixels)).clamp(0, 1).mul(255).round().to(torch.uint8)


def _images(
    truth: torch.Tensor,
    seen: torch.Tensor,
    responses: Mapping[str, torch.Tensor],
    mean: Sequence[float],
    std: Sequence[float],
) -> dict[str, torch.Tensor]:
    """A true image, what the models saw of it and what they made, in units of the true one's white."""
    white = _white(_shown(truth, mean, std))
    made = {f"output/{place}": given for place, given in enumerate(responses.values())}
    return {
        key: (_shown(image, mean, std) / white).to(torch.float16)
        for key, image in {"truth": truth, "seen": seen, **made}.items()
    }


def _window(truth: torch.Tensor) -> tuple[int, int, int, int]:
    """Top, left, height and width of what is shown: all, or where most of the truth is."""
    height, width = truth.shape[-2:]
    tall, wide = min(height, SIDE), min(width, SIDE)
    filled = truth.ne(0) if not truth.is_floating_point() else truth.abs()
    filled = filled.reshape(-1, height, width).any(0) if filled.dtype == torch.bool else filled[0]
    held = F.avg_pool2d(filled[None, None].double(), (tall, wide), stride=STEP)[0, 0]
    row, column = divmod(int(held.argmax()), held.shape[1])
    return row * STEP, column * STEP, tall, wide
