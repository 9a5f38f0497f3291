"""Evaluation of models on the test set: all metrics of a task, in total, by site, by case and by label."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from fedstill.core import bootstrap
from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.core.run_writer import RunWriter
from fedstill.core.seeds import torch_generator
from fedstill.core.text_format import replace_nonfinite
from fedstill.node import local_training
from fedstill.runs import bootstrap_weights
from fedstill.runs.example_predictions import choose_example_predictions
from fedstill.tasks import Task

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
        unit_ids = bootstrap_weights.resampling_units(self.test)
        if unit_ids.max() == 0:
            return None
        weights = bootstrap_weights.resample_counts(unit_ids)

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
            "draws": bootstrap_weights.DRAWS,
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
        return local_training.predict(model, inputs, compute.as_float32)


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
