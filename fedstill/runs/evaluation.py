"""What models are worth on data that no node saw: all of a task's figures, in all and site by site."""

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
    """What models answer on the test part.

    Args:
        central: the central model, or None where there is none.
        own: the nodes' own models, by name.
        marked: the centralized mark, or None.
        ensembled: the teachers' ensemble, or None.
    """

    global_model: torch.Tensor | None
    node_models: Mapping[str, torch.Tensor] = field(default_factory=dict)
    centralized: torch.Tensor | None = None
    ensemble: torch.Tensor | None = None


class Evaluation:
    """The test part of a run's data, and how outputs on it are measured.

    Args:
        test: data that no node sees, on the device.
        compute: where models are asked; always in float32 (:func:`float32_outputs`).
        seed: of the nodes' shares of the test part.
        learned: what nodes' own models learn from, by the nodes' names. These models are measured on nothing
            that their data never ask (:meth:`Task.measurable_targets`), all others on the whole of the test part.
    """

    def __init__(
        self,
        task: Task,
        test: TensorData,
        compute: Compute,
        seed: int,
        learned: Mapping[str, TensorData] | None = None,
    ) -> None:
        self.task, self.test, self.compute, self._seed = task, test, compute, seed
        self._asked = {
            name: replace(test, targets=task.measurable_targets(test.targets, data))
            for name, data in (learned or {}).items()
        }
        cases = test.cases
        here = [] if cases is None else [cases.sites[number] for number in cases.present_ids()]
        self.sites = sorted({site for site in here if site})

    def outputs(self, model: nn.Module, rows: torch.Tensor | None = None) -> torch.Tensor:
        """A model's outputs on the test part, or on some rows of it: ``(N, C, ...)``."""
        inputs = self.test.inputs if rows is None else self.test.inputs[rows]
        return float32_outputs(model, inputs, self.compute)

    def compute_metrics(
        self, outputs: torch.Tensor, rows: torch.Tensor | None = None, *, node: str | None = None
    ) -> Metrics:
        """All figures of outputs on the test part, or on some rows of it, by key; NaN where there is none.

        Args:
            node: whose own model gave them; None: a model of all.
        """
        test = self.test_data_for(node)
        data = test if rows is None else test.subset(rows)
        return self.task.compute_metrics(outputs, data.targets, data.cases)

    def main_metric(
        self, outputs: torch.Tensor, rows: torch.Tensor | None = None, *, node: str | None = None
    ) -> float:
        """What models are judged by, alone."""
        test = self.test_data_for(node)
        data = test if rows is None else test.subset(rows)
        return self.task.compute_primary_metric(outputs, data.targets, data.cases)

    def majority_baseline(self) -> dict[str, float | None] | None:
        """Figures of who knows nothing of the inputs; None for tasks without such a mark."""
        outputs = self.task.prior_outputs(self.test.targets)
        return None if outputs is None else replace_nonfinite(self.compute_metrics(outputs))

    def by_site(
        self, outputs: torch.Tensor, *, node: str | None = None
    ) -> Mapping[str, dict[str, float | None]]:
        """The same, for each site by itself."""
        found = {}
        for site in self.sites:
            rows = self.site_rows(site)
            found[site] = replace_nonfinite(self.compute_metrics(outputs[rows], rows, node=node))
        return found

    def test_share(self, index: int, of: int) -> torch.Tensor:
        """The rows of one of ``of`` even and random shares (FedMD-CG, section 3.1); cases are not parted."""
        draw, cases = torch_generator(self._seed, "test shares"), self.test.cases
        present = list(range(len(self.test))) if cases is None else cases.present_ids()
        order = torch.tensor(present)[torch.randperm(len(present), generator=draw)]
        # Of fewer examples than nodes, some nodes have none of their own and take another's.
        shares = [share for share in order.tensor_split(of) if len(share)]
        mine = shares[index % len(shares)]
        if cases is not None:
            mine = torch.nonzero(torch.isin(cases.case_ids, mine)).flatten()
        return mine.to(self.test.inputs.device)

    def details(self, outputs_by_model: Outputs, classes: Sequence[str]) -> dict[str, Any]:
        """What a result says of cases, sites and labels, and what a task says of the central model's answers;
        None where the task or its test data have none.
        """
        own = (
            {}
            if outputs_by_model.global_model is None
            else self.task.extra_results(outputs_by_model.global_model, self.test.targets)
        )
        found = {
            "cases": self._cases(outputs_by_model),
            "sites": self._sites(outputs_by_model),
            "labels": self._convert_labels(outputs_by_model, classes),
        }
        return {**found, **own}

    def confidence_intervals(self, outputs_by_model: Outputs, records: RunWriter) -> dict[str, Any] | None:
        """Between which values the leading figure lies by the choice of test cases, of each model; None where
        there are no draws. Those of what the run is judged by are kept, to be compared with other runs'.
        """
        of = bootstrap_weights.units(self.test)
        if of.max() == 0:
            return None
        weights = bootstrap_weights.weights(of)

        def drawn(outputs: torch.Tensor | None, node: str | None = None) -> bootstrap.Floats | None:
            if outputs is None:
                return None
            return self.task.bootstrap_metric(
                outputs, self.test_data_for(node).targets, self.test.cases, weights
            )

        each = [
            draws
            for name, own in outputs_by_model.node_models.items()
            if (draws := drawn(own, name)) is not None
        ]
        # A draw that one node's model has no figure of has no mean over the nodes.
        nodes = np.mean(each, axis=0) if each else None
        found = {"central": drawn(outputs_by_model.global_model), "nodes": nodes, "ensemble": drawn(outputs_by_model.ensemble),
                 "centralized": drawn(outputs_by_model.centralized)}  # fmt: skip
        judged = nodes if outputs_by_model.global_model is None else found["central"]
        if judged is None:
            return None
        records.save_resamples(torch.from_numpy(judged))
        ends = {
            who: None if draws is None else bootstrap.confidence_interval(draws)
            for who, draws in found.items()
        }
        about = {
            "level": bootstrap.CONFIDENCE_PERCENT,
            "draws": bootstrap_weights.DRAWS,
            "cases": int(of.max()) + 1,
        }
        return {**about, **{who: None if pair is None else list(pair) for who, pair in ends.items()}}

    def save_example_predictions(
        self, outputs_by_model: Outputs, mean: Sequence[float], std: Sequence[float], records: RunWriter
    ) -> list[dict[str, Any]] | None:
        """Keep pictures of predictions beside the truth; what a result says of them, None without any."""
        shown = {
            **({} if outputs_by_model.global_model is None else {"student": outputs_by_model.global_model}),
            **outputs_by_model.node_models,
        }
        on_cpu = {name: outputs.cpu() for name, outputs in shown.items()}
        tensors, told_of = choose_example_predictions(self.task, self.test.to("cpu"), on_cpu, mean, std) or (
            {},
            None,
        )
        if tensors:
            records.save_pictures(tensors)
        return told_of

    def _cases(self, outputs_by_model: Outputs) -> dict[str, Any] | None:
        """What models reach of each patient or picture; None for a task that judges no case by itself."""

        def each(outputs: torch.Tensor | None) -> list[float | None] | None:
            scores = None if outputs is None else self.task.case_scores(outputs, self.test.targets, cases)
            return None if scores is None else [replace_nonfinite(score) for score in scores.tolist()]

        cases = self.test.cases
        whole = {
            "central": outputs_by_model.global_model,
            "ensemble": outputs_by_model.ensemble,
            "centralized": outputs_by_model.centralized,
        }
        found = {name: each(outputs) for name, outputs in whole.items()}
        if cases is None or not any(found.values()):
            return None
        return {"names": [cases.names[place] for place in cases.present_ids()], **found}

    def _sites(self, outputs_by_model: Outputs) -> dict[str, Any] | None:
        if not self.sites:
            return None
        return {
            "names": self.sites,
            "central": None
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

    def _convert_labels(self, outputs_by_model: Outputs, classes: Sequence[str]) -> dict[str, Any] | None:
        def each(outputs: torch.Tensor | None, node: str | None = None) -> list[float | None] | None:
            values = (
                None if outputs is None else self.task.per_class(outputs, self.test_data_for(node).targets)
            )
            return None if values is None else [replace_nonfinite(value) for value in values]

        whole = {
            "central": each(outputs_by_model.global_model),
            "centralized": each(outputs_by_model.centralized),
        }
        nodes = {name: each(outputs, name) for name, outputs in outputs_by_model.node_models.items()}
        if not any(value is not None for value in (*whole.values(), *nodes.values())):
            return None
        return {**whole, "nodes": nodes, "names": list(classes)}

    def test_data_for(self, node: str | None) -> TensorData:
        """The test part, as far as a model was taught what it asks."""
        return self.test if node is None else self._asked.get(node, self.test)

    def site_rows(self, site: str) -> torch.Tensor:
        """Which rows of the test part come from a site."""
        cases = self.test.cases
        rows = torch.zeros(0, dtype=torch.int64) if cases is None else cases.examples_from_site(site)
        return rows.to(self.test.inputs.device)


class _AsDelivered(nn.Module):
    """A network whose tensors, and inputs, lie in memory as a file's do; its own stay as they are.

    They are copied, as a tensor with an axis of length 1 may count as contiguous and as channels last.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.training = network, network.training
        tensors = (*network.named_parameters(), *network.named_buffers())
        self._laid_out = {name: _laid_out(tensor.detach()) for name, tensor in tensors}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = functional_call(self.network, self._laid_out, (_laid_out(x),))
        return outputs


def _laid_out(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def float32_outputs(model: nn.Module, inputs: torch.Tensor, compute: Compute) -> torch.Tensor:
    """A model's outputs on many inputs, computed in float32 whatever the precision of training:
    ``(N, C, ...)``.

    Everything that is measured is measured of these.
    """
    with compute.in_float32():
        return local_training.predict(model, inputs, compute.as_float32)


def student_outputs(student: nn.Module, inputs: torch.Tensor, compute: Compute) -> torch.Tensor:
    """The same of a student, to the last bit as after it has been saved and loaded on such a device.

    Its tensors are contiguous, as its file has them: another layout adds in another order. A run measures its
    student so, and :mod:`fedstill.student.evaluate` measures it so again.
    """
    return float32_outputs(_AsDelivered(student), inputs, compute)


def mean(metrics: Sequence[Metrics]) -> Metrics:
    """The mean of each figure over models, as far as it can be said.

    >>> mean([{"dice": 50.0, "hd95": math.nan}, {"dice": 70.0, "hd95": 8.0}])
    {'dice': 60.0, 'hd95': 8.0}
    """
    return {key: _over([each[key] for each in metrics], np.mean) for key in metrics[0]}


def standard_deviation(values: Sequence[float]) -> float:
    """The standard deviation of the values that can be said."""
    return _over(values, np.std)


def _over(values: Sequence[float], how: Any) -> float:
    said = [value for value in values if math.isfinite(value)]
    return float(how(said)) if said else math.nan
