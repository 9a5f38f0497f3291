"""Evaluation of models on the test set: all metrics of a task, in total, by site, by case and by label."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from fedstill.core import bootstrap
from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.core.run_writer import RunWriter
from fedstill.core.seeds import numpy_generator, torch_generator
from fedstill.core.text_format import replace_nonfinite
from fedstill.models.inference import predict
from fedstill.tasks import Task
from fedstill.tasks.instances import stitch_patches

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Outputs:
    """Outputs of models on the test set, ``(N, C, ...)`` each.

    Args:
        global_model: of the global model, or None if there is none.
        node_models: of the nodes' own models, by name.
        centralized: of the centralized upper bound, or None.
        ensemble: of the teachers' ensemble, or None.
    """

    global_model: torch.Tensor | None
    node_models: Mapping[str, torch.Tensor] = field(default_factory=dict)
    centralized: torch.Tensor | None = None
    ensemble: torch.Tensor | None = None


class Evaluation:
    """Computes metrics of outputs on a test set.

    Args:
        test: data that no node sees, on the device.
        compute: where models are asked; always in float32 (:func:`float32_outputs`).
        seed: of the nodes' shares of the test part.
        training_data: what nodes' own models learn from, by the nodes' names. These models are measured on
            nothing that their data never ask (:meth:`Task.measurable_targets`), all others on the whole of
            the test part.
    """

    def __init__(
        self,
        task: Task,
        test: TensorData,
        compute: Compute,
        seed: int,
        training_data: Mapping[str, TensorData] | None = None,
    ) -> None:
        self.task, self.test, self.compute, self._seed = task, test, compute, seed
        self._node_test_data = {
            name: replace(test, targets=task.measurable_targets(test.targets, data))
            for name, data in (training_data or {}).items()
        }
        cases = test.cases
        here = [] if cases is None else [cases.sites[number] for number in cases.present_ids()]
        self.sites = sorted({site for site in here if site})

    def outputs(self, model: nn.Module, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Return a model's outputs ``(N, C, ...)`` on the test set, or on some rows of it."""
        inputs = self.test.inputs if rows is None else self.test.inputs[rows]
        return float32_outputs(model, inputs, self.compute)

    def compute_metrics(
        self, outputs: torch.Tensor, rows: torch.Tensor | None = None, *, node: str | None = None
    ) -> Metrics:
        """Return all metrics of outputs on the test set, or on some rows of it, by key; NaN if undefined.

        Args:
            node: whose own model gave them; None: a model of all.
        """
        test = self.test_data_for(node)
        data = test if rows is None else test.subset(rows)
        return self.task.compute_metrics(outputs, data.targets, data.cases)

    def main_metric(
        self, outputs: torch.Tensor, rows: torch.Tensor | None = None, *, node: str | None = None
    ) -> float:
        """Return the main metric only. Arguments as of :meth:`compute_metrics`."""
        test = self.test_data_for(node)
        data = test if rows is None else test.subset(rows)
        return self.task.compute_primary_metric(outputs, data.targets, data.cases)

    def majority_baseline(self) -> dict[str, float | None] | None:
        """Return the metrics of a constant prediction (majority class); None for tasks without one."""
        outputs = self.task.prior_outputs(self.test.targets)
        return None if outputs is None else replace_nonfinite(self.compute_metrics(outputs))

    def by_site(
        self, outputs: torch.Tensor, *, node: str | None = None
    ) -> Mapping[str, dict[str, float | None]]:
        """Return all metrics for each site. Arguments as of :meth:`compute_metrics`."""
        found = {}
        for site in self.sites:
            rows = self.site_rows(site)
            found[site] = replace_nonfinite(self.compute_metrics(outputs[rows], rows, node=node))
        return found

    def rows_of_test_share(self, index: int, unit_ids: int) -> torch.Tensor:
        """Return the rows of one of ``unit_ids`` equal random shares (FedMD-CG, section 3.1); cases are not
        split."""
        draw, cases = torch_generator(self._seed, "test shares"), self.test.cases
        present = list(range(len(self.test))) if cases is None else cases.present_ids()
        order = torch.tensor(present)[torch.randperm(len(present), generator=draw)]
        # With fewer examples than nodes, some nodes share a part.
        shares = [share for share in order.tensor_split(unit_ids) if len(share)]
        mine = shares[index % len(shares)]
        if cases is not None:
            mine = torch.nonzero(torch.isin(cases.case_ids, mine)).flatten()
        return mine.to(self.test.inputs.device)

    def detailed_metrics(self, outputs_by_model: Outputs, classes: Sequence[str]) -> dict[str, Any]:
        """Return metrics by case, by site and by label, and further results of the task, for the result.

        Entries are None if the task or its test data have none.
        """
        extra = (
            {}
            if outputs_by_model.global_model is None
            else self.task.extra_results(outputs_by_model.global_model, self.test.targets)
        )
        found = {
            "cases": self._case_metrics(outputs_by_model),
            "sites": self._site_metrics(outputs_by_model),
            "labels": self._label_metrics(outputs_by_model, classes),
        }
        return {**found, **extra}

    def confidence_intervals(self, outputs_by_model: Outputs, records: RunWriter) -> dict[str, Any] | None:
        """Return bootstrap confidence intervals of the main metric over test cases, for each model.

        The resamples of the evaluated model are saved, for paired comparisons with other runs.

        Returns:
            Intervals by model, or None with a single test case.
        """
        unit_ids = resampling_units(self.test)
        if unit_ids.max() == 0:
            return None
        weights = resample_counts(unit_ids)

        def bootstrap_metric(
            outputs: torch.Tensor | None, node: str | None = None
        ) -> bootstrap.Floats | None:
            if outputs is None:
                return None
            return self.task.bootstrap_metric(
                outputs, self.test_data_for(node).targets, self.test.cases, weights
            )

        node_samples = [
            draws
            for name, own in outputs_by_model.node_models.items()
            if (draws := bootstrap_metric(own, name)) is not None
        ]
        # NaN of one node's model makes the mean over the nodes NaN.
        nodes = np.mean(node_samples, axis=0) if node_samples else None
        samples = {
            "global_model": bootstrap_metric(outputs_by_model.global_model),
            "nodes": nodes,
            "ensemble": bootstrap_metric(outputs_by_model.ensemble),
            "centralized": bootstrap_metric(outputs_by_model.centralized),
        }
        evaluated = nodes if outputs_by_model.global_model is None else samples["global_model"]
        if evaluated is None:
            return None
        records.save_bootstrap_metrics(torch.from_numpy(evaluated))
        intervals = {
            model: None if draws is None else bootstrap.confidence_interval(draws)
            for model, draws in samples.items()
        }
        about = {
            "level": bootstrap.CONFIDENCE_PERCENT,
            "draws": DRAWS,
            "cases": int(unit_ids.max()) + 1,
        }
        return {**about, **{model: None if pair is None else list(pair) for model, pair in intervals.items()}}

    def save_example_predictions(
        self, outputs_by_model: Outputs, mean: Sequence[float], std: Sequence[float], records: RunWriter
    ) -> list[dict[str, Any]] | None:
        """Save pictures of predictions and truth; return their description for the result, or None."""
        shown = {
            **({} if outputs_by_model.global_model is None else {"student": outputs_by_model.global_model}),
            **outputs_by_model.node_models,
        }
        on_cpu = {name: outputs.cpu() for name, outputs in shown.items()}
        examples = choose_example_predictions(self.task, self.test.to("cpu"), on_cpu, mean, std)
        if examples is None:
            return None
        tensors, description = examples
        if tensors:
            records.save_predictions(tensors)
        return description

    def _case_metrics(self, outputs_by_model: Outputs) -> dict[str, Any] | None:
        """Return the main metric of each patient or picture; None for tasks without a metric per case."""

        def case_scores(outputs: torch.Tensor | None) -> list[float | None] | None:
            scores = None if outputs is None else self.task.case_scores(outputs, self.test.targets, cases)
            return None if scores is None else [replace_nonfinite(score) for score in scores.tolist()]

        cases = self.test.cases
        whole = {
            "global_model": outputs_by_model.global_model,
            "ensemble": outputs_by_model.ensemble,
            "centralized": outputs_by_model.centralized,
        }
        found = {name: case_scores(outputs) for name, outputs in whole.items()}
        if cases is None or not any(found.values()):
            return None
        return {"names": [cases.names[place] for place in cases.present_ids()], **found}

    def _site_metrics(self, outputs_by_model: Outputs) -> dict[str, Any] | None:
        if not self.sites:
            return None
        return {
            "names": self.sites,
            "global_model": None
            if outputs_by_model.global_model is None
            else self.by_site(outputs_by_model.global_model),
            "nodes": {
                name: self.by_site(outputs, node=name)
                for name, outputs in outputs_by_model.node_models.items()
            },
            "centralized": None
            if outputs_by_model.centralized is None
            else self.by_site(outputs_by_model.centralized),
        }

    def _label_metrics(self, outputs_by_model: Outputs, classes: Sequence[str]) -> dict[str, Any] | None:
        def label_values(outputs: torch.Tensor | None, node: str | None = None) -> list[float | None] | None:
            values = (
                None
                if outputs is None
                else self.task.metric_per_class(outputs, self.test_data_for(node).targets)
            )
            return None if values is None else [replace_nonfinite(value) for value in values]

        whole = {
            "global_model": label_values(outputs_by_model.global_model),
            "centralized": label_values(outputs_by_model.centralized),
        }
        nodes = {name: label_values(outputs, name) for name, outputs in outputs_by_model.node_models.items()}
        if not any(value is not None for value in (*whole.values(), *nodes.values())):
            return None
        return {**whole, "nodes": nodes, "names": list(classes)}

    def test_data_for(self, node: str | None) -> TensorData:
        """Return the test set, with the targets that a node's model was trained for (None: all)."""
        return self.test if node is None else self._node_test_data.get(node, self.test)

    def site_rows(self, site: str) -> torch.Tensor:
        """Return the rows of the test set that come from a site."""
        cases = self.test.cases
        rows = torch.zeros(0, dtype=torch.int64) if cases is None else cases.indices_from_site(site)
        return rows.to(self.test.inputs.device)


class _ContiguousNetwork(nn.Module):
    """Network with contiguous copies of its tensors and inputs, as after loading from a file.

    Tensors are always copied, as one with an axis of length 1 may count as contiguous and as channels last.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.training = network, network.training
        tensors = (*network.named_parameters(), *network.named_buffers())
        self._contiguous_tensors = {name: _contiguous_copy(tensor.detach()) for name, tensor in tensors}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = functional_call(
            self.network, self._contiguous_tensors, (_contiguous_copy(x),)
        )
        return outputs


def _contiguous_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def float32_outputs(model: nn.Module, inputs: torch.Tensor, compute: Compute) -> torch.Tensor:
    """Return a model's outputs ``(N, C, ...)`` on many inputs, in float32 whatever the precision of training.

    All metrics are computed from these.
    """
    with compute.in_float32():
        return predict(model, inputs, compute.as_float32)


def student_outputs_as_reloaded(student: nn.Module, inputs: torch.Tensor, compute: Compute) -> torch.Tensor:
    """Return a student's outputs, equal to the last bit to those after saving and loading it on such a
    device.

    Its tensors are contiguous as in its file, since another memory layout adds in another order. Runs and
    :mod:`fedstill.student.evaluate` both evaluate the student in this way.
    """
    return float32_outputs(_ContiguousNetwork(student), inputs, compute)


def mean(metrics: Sequence[Metrics]) -> Metrics:
    """Return the mean of each metric over models, without NaN.

    >>> mean([{"dice": 50.0, "hd95": math.nan}, {"dice": 70.0, "hd95": 8.0}])
    {'dice': 60.0, 'hd95': 8.0}
    """
    return {
        key: _reduce_finite([node_samples[key] for node_samples in metrics], np.mean) for key in metrics[0]
    }


def standard_deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of the values, without NaN."""
    return _reduce_finite(values, np.std)


def _reduce_finite(values: Sequence[float], reduce: Any) -> float:
    finite_values = [value for value in values if math.isfinite(value)]
    return float(reduce(finite_values)) if finite_values else math.nan


# --- example predictions as pictures --------------------------------------------------------------------

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


# --- bootstrap weights of test cases --------------------------------------------------------------------

DRAWS = 400


def resampling_units(test: TensorData) -> npt.NDArray[np.int64]:
    """Return the resampling unit ``(N,)`` of each example, from 0: its patient or picture if known, or
    itself."""
    unit_ids = torch.arange(len(test)) if test.cases is None else test.cases.case_ids
    unit_ids = unit_ids if test.groups is None else test.groups
    consecutive_ids: npt.NDArray[np.int64] = torch.unique(unit_ids.cpu(), return_inverse=True)[1].numpy()
    return consecutive_ids


def resample_counts(unit_ids: npt.NDArray[np.int64]) -> bootstrap.Floats:
    """Return how often each example occurs in each resample, ``(DRAWS, N)``: units are sampled with
    replacement."""
    count = int(unit_ids.max()) + 1
    sampled = bootstrap.resample_indices(count, DRAWS, numpy_generator(0, "test cases"))
    bins = (sampled + count * np.arange(DRAWS)[:, None]).ravel()
    times = np.bincount(bins, minlength=DRAWS * count).reshape(DRAWS, count)
    example_weights: bootstrap.Floats = times[:, unit_ids].astype(np.float64)
    return example_weights
