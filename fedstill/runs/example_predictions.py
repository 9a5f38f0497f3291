"""Example predictions of a run as pictures: select cases and assemble them from slices or patches.

The examples are the best, the median and the worst case of the global model, with the outputs of the nodes'
own models. The report draws them (:mod:`fedstill.report.images`).
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

SIDE = 192  # pixels; larger pictures are cropped to the window of this side with most of the truth
STEP = 16  # pixels between two candidate windows
WHITE = 0.998  # quantile of a gray picture that is shown as white, as scanners have no unit of brightness


def choose_example_predictions(
    task: Task,
    test: TensorData,
    outputs: Mapping[str, torch.Tensor],
    mean: Sequence[float],
    std: Sequence[float],
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]] | None:
    """Select cases of the test set and assemble their pictures.

    Args:
        task: the task; only outputs that are maps or images can be shown.
        test: the test set.
        outputs: outputs ``(N, C, ...)`` of each model by its name, in display order. Cases are ranked by the
            first model.
        mean, std: normalization of inputs (and of images that are targets), per channel.

    Returns:
        The content of ``pictures.safetensors`` and of "pictures" in ``result.json``, or None for other tasks
        and if no case has a score.

        Tensors by name: for the k-th case ``"k/image"`` and ``"k/truth"``, ``"k/seen"`` if the model's input
        differs from the image, and ``"k/output/m"`` for the m-th model. Images are uint8 ``(1 or 3, H, W)``;
        maps are ``(H, W)`` int32 of classes or objects; images from models are float16 ``(1, H, W)``, where 1
        is white.

        One JSON object per case, best first: "case", "site", "rank" (best, median, worst, or only), "models"
        (each with "name" and "score", the main metric), "kind" (map or image), "part" and "parts" (index of
        the slice and their number; null for whole pictures), "window" (top, left, height, width) and "size"
        of the whole picture. Unknown values are null.
    """
    if task.kind not in ("map", "image") or not outputs:
        return None
    scores = task.case_scores(next(iter(outputs.values())), test.targets, test.cases)
    if scores is None:
        return None
    tensors: dict[str, torch.Tensor] = {}
    about: list[dict[str, Any]] = []
    for rank, index in best_median_and_worst(scores.tolist()):
        name, site, rows = _case_name_site_and_rows(test, index, len(scores))
        tensors_of_case, description = _picture(task, test, outputs, rows, mean, std)
        tensors.update(
            {f"{len(about)}/{key}": tensor.contiguous().clone() for key, tensor in tensors_of_case.items()}
        )
        about.append({"case": name, "site": site, "rank": rank, **description})
    return (tensors, about) if about else None


def best_median_and_worst(scores: Sequence[float]) -> list[tuple[str, int]]:
    """Return rank and index of the best, the median (the better of two) and the worst case with a score.

    >>> best_median_and_worst([10.0, 40.0, float("nan"), 20.0, 30.0])
    [('best', 1), ('median', 4), ('worst', 0)]
    >>> best_median_and_worst([5.0, 7.0]), best_median_and_worst([5.0]), best_median_and_worst([float("nan")])
    ([('best', 1), ('worst', 0)], [('only', 0)], [])
    """
    known = [case for case, score in enumerate(scores) if math.isfinite(score)]
    order = sorted(known, key=lambda case: -scores[case])
    if len(order) < 2:
        return [("only", case) for case in order]
    middle = [("median", order[(len(order) - 1) // 2])] if len(order) > 2 else []
    return [("best", order[0]), *middle, ("worst", order[-1])]


def _case_name_site_and_rows(test: TensorData, index: int, scored: int) -> tuple[str, str, torch.Tensor]:
    """Return a case's name, its site and its examples, by its index among the scored cases."""
    if test.cases is None:
        return f"example {index + 1}", "", torch.tensor([index])
    cases = test.cases
    # A subset keeps the case numbers of the whole data set; some tasks score only cases that are present.
    number = index if scored == len(cases.names) else cases.present_ids()[index]
    return cases.names[number], cases.sites[number], torch.nonzero(cases.case_ids == number).flatten()


def _picture(
    task: Task,
    test: TensorData,
    outputs: Mapping[str, torch.Tensor],
    rows: torch.Tensor,
    mean: Sequence[float],
    std: Sequence[float],
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of one case by name, and its description."""
    case_data = test.subset(rows.to(test.inputs.device)).to("cpu")
    responses = {name: output[rows.to(output.device)].float().cpu() for name, output in outputs.items()}
    scored = {name: _score(task, output, case_data) for name, output in responses.items()}
    stitched = case_data.cases is not None and case_data.cases.corners is not None
    part = None if stitched else _largest_slice(case_data.targets)
    x = _assemble_picture(case_data, case_data.inputs, part)  # (C, H, W)
    if task.kind == "map":  # probabilities, as patches are averaged where they overlap
        responses = {name: output.softmax(1) for name, output in responses.items()}
    responses = {name: _assemble_picture(case_data, output, part) for name, output in responses.items()}
    if task.kind == "image":
        tensors_of_case = _images(case_data.targets[part or 0], x, responses, mean, std)
    else:
        tensors_of_case = {"image": _to_uint8(x, mean, std), "truth": _truth(task, case_data, part).int()}
        for index, output in enumerate(responses.values()):
            tensors_of_case[f"output/{index}"] = task.display_map(output).int()
    size = tuple(tensors_of_case["truth"].shape[-2:])
    top, left, height, width = _crop_window(tensors_of_case["truth"])
    tensors_of_case = {
        key: tensor[..., top : top + height, left : left + width] for key, tensor in tensors_of_case.items()
    }
    return tensors_of_case, {
        "kind": task.kind,
        "models": [{"name": name, "score": score} for name, score in scored.items()],
        "part": None if stitched or len(case_data) == 1 else part,
        "parts": None if stitched or len(case_data) == 1 else len(case_data),
        "window": [top, left, height, width],
        "size": list(size),
    }


def _score(task: Task, outputs: torch.Tensor, case_data: TensorData) -> float | None:
    """Return the main metric of one case; None if it is undefined."""
    value = task.compute_primary_metric(outputs, case_data.targets, case_data.cases)
    return value if math.isfinite(value) else None


def _largest_slice(targets: torch.Tensor) -> int:
    """Return the index of the slice with the largest truth: most pixels of a class, or the brightest
    image."""
    sizes = targets.ne(0) if not targets.is_floating_point() else targets
    return int(sizes.flatten(1).double().sum(1).argmax())


def _assemble_picture(case_data: TensorData, values: torch.Tensor, part: int | None) -> torch.Tensor:
    """Return the values of a case's examples ``(n, C, h, w)`` as one picture ``(C, H, W)``: stitched patches,
    or one slice."""
    if part is not None or case_data.cases is None:
        return values[part or 0]
    return next(stitch_patches(values, case_data.cases))[0]


def _truth(task: Task, case_data: TensorData, part: int | None) -> torch.Tensor:
    """Return the true map of a case, ``(H, W)``: its objects if known, otherwise from its targets."""
    if case_data.cases is not None and case_data.cases.instances:
        return torch.from_numpy(case_data.cases.instances[int(case_data.cases.case_ids[0])])
    classes = F.one_hot(case_data.targets, task.classes).movedim(-1, 1).float()  # (n, C, h, w)
    return task.display_map(_assemble_picture(case_data, classes, part))


def _denormalize(x: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """Undo the normalization of channels ``(C, H, W)``: all three of a color picture, otherwise the first."""
    across = (-1, 1, 1)
    pixels = x * torch.tensor(std).view(across) + torch.tensor(mean).view(across)
    return pixels if len(pixels) == 3 else pixels[:1]


def _white_level(pixels: torch.Tensor) -> float:
    return max(float(pixels.flatten().double().quantile(WHITE)), 1e-6) if len(pixels) == 1 else 1.0


def _to_uint8(x: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """Return a picture as uint8, ``(1 or 3, H, W)``."""
    pixels = _denormalize(x, mean, std)
    return (pixels / _white_level(pixels)).clamp(0, 1).mul(255).round().to(torch.uint8)


def _images(
    truth: torch.Tensor,
    seen: torch.Tensor,
    responses: Mapping[str, torch.Tensor],
    mean: Sequence[float],
    std: Sequence[float],
) -> dict[str, torch.Tensor]:
    """Return the true image, the models' input and their outputs, scaled by the true image's white."""
    white = _white_level(_denormalize(truth, mean, std))
    model_images = {f"output/{index}": output for index, output in enumerate(responses.values())}
    return {
        key: (_denormalize(image, mean, std) / white).to(torch.float16)
        for key, image in {"truth": truth, "seen": seen, **model_images}.items()
    }


def _crop_window(truth: torch.Tensor) -> tuple[int, int, int, int]:
    """Return top, left, height and width of the shown window: all, or the one with most of the truth."""
    height, width = truth.shape[-2:]
    tall, wide = min(height, SIDE), min(width, SIDE)
    filled = truth.ne(0) if not truth.is_floating_point() else truth.abs()
    filled = filled.reshape(-1, height, width).any(0) if filled.dtype == torch.bool else filled[0]
    window_sums = F.avg_pool2d(filled[None, None].double(), (tall, wide), stride=STEP)[0, 0]
    row, column = divmod(int(window_sums.argmax()), window_sums.shape[1])
    return row * STEP, column * STEP, tall, wide
