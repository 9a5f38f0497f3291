"""Evaluation of a simulation's models during a run and at its end.

Most of it is possible only in a simulation: evaluation, the centralized upper bound and the losses of local
training read nodes' data and models without their gates. The student is never trained on any of this.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from fedstill.core.errors import ArgumentError
from fedstill.core.text_format import replace_nonfinite
from fedstill.methods._label_histogram import LabelHistogram
from fedstill.models.inference import inference_batch_size
from fedstill.models.module_utils import deep_copy, load_vector, parameter_count, to_vector, weighted_mean
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup
from fedstill.node.node_view import NodeView
from fedstill.privacy.statement import PrivacyStatement
from fedstill.protocol.local_config import FULL_TRAINING
from fedstill.protocol.node_side import NodeSetting
from fedstill.protocol.secure_aggregation import SUM
from fedstill.runs.base import Run
from fedstill.runs.evaluation import Metrics, Outputs, float32_outputs, mean, standard_deviation
from fedstill.runs.trained_model_cache import TrainedModels


class MeasuredSimulation(Run, ABC):
    """Evaluates a simulation's models.

    Attributes:
        nodes: all of them.
        evaluated_nodes: those whose models can be measured: all, but for what was left out of a rehearsal.
        trained: cache of node models and their outputs, shared with other runs of a comparison; None without
            one.
    """

    nodes: list[Node]
    evaluated_nodes: list[Node]
    centralized_node: Node | None
    at_nodes: NodeSetting
    groups: dict[str, list[list[str]]]
    trained: TrainedModels | None = None

    def evaluate(self) -> Mapping[str, float]:
        """Return the main metric of the global model and of the nodes' own models."""
        metric = self.task.metric
        metrics = {metric: self._global_metric()}
        if self.side.trains_models:
            metrics[f"local_{metric}"] = mean([{metric: value} for value in self._test_share_metrics()])[
                metric
            ]
        return metrics

    def responses(self, inputs: torch.Tensor) -> torch.Tensor | None:
        """See :class:`~fedstill.runs.base.Run`; also of an average model or an ensemble built for
        evaluation."""
        if self.method.evaluated_model == "virtual":
            virtual = deep_copy(self.student)
            load_vector(virtual, self._average_parameters())
            return float32_outputs(virtual, inputs, self.compute)
        return (
            self.ensemble_outputs(inputs)
            if self.method.evaluated_model == "ensemble"
            else super().responses(inputs)
        )

    # --- parts of the results -------------------------------------------------------------------------

    def test_outputs(self) -> Outputs:
        node_models = (
            self._node_outputs(self.evaluated_nodes, self.side.initial_training == FULL_TRAINING)
            if self.side.trains_models
            else {}
        )
        centralized = (
            None
            if self.centralized_node is None
            else self._node_outputs([self.centralized_node])[self.centralized_node.name]
        )
        ensemble = self.ensemble_outputs(self.test.inputs, node_models)
        global_model = (
            ensemble if self.method.evaluated_model == "ensemble" else self.responses(self.test.inputs)
        )
        return Outputs(global_model, node_models, centralized, ensemble)

    def _node_outputs(self, nodes: Sequence[Node], shared: bool = True) -> dict[str, torch.Tensor]:
        """Return the outputs of nodes' own models on the test set, by node.

        Args:
            shared: whether another run may have evaluated the same models.
        """
        file = self.trained.outputs_file(nodes, "float32") if self.trained and shared else None
        if file is not None and file.exists():
            return {
                name: stored.to(self.compute.device)
                for name, stored in TrainedModels.load_outputs(file).items()
            }
        own = {node.name: self.evaluation.outputs(node.model) for node in nodes}
        if file is not None:
            with suppress(OSError):  # with a full disk the next run computes them again
                TrainedModels.save_outputs(file, own)
        return own

    def baseline_metrics(self, model_outputs: Outputs) -> Mapping[str, Mapping[str, Any] | None]:
        evaluation, ensemble = self.evaluation, model_outputs.ensemble
        node_metrics = [
            evaluation.compute_metrics(outputs, node=name)
            for name, outputs in model_outputs.node_models.items()
        ]
        return {
            "local": (
                {
                    **self._summarize_metrics(node_metrics),
                    "share": self._summarize_over_nodes(self._test_share_metrics(model_outputs.node_models)),
                }
                if self.side.trains_models
                else None
            ),
            "standalone": self._summarize_metrics(node_metrics)
            if self.side.initial_training == FULL_TRAINING
            else None,
            "ensemble": (
                None
                if ensemble is None
                else {
                    **replace_nonfinite(evaluation.compute_metrics(ensemble)),
                    **self._node_names_unless_all(self._ensemble_nodes()),
                }
            ),
            "centralized": (
                {self.task.metric: None}
                if model_outputs.centralized is None
                else replace_nonfinite(evaluation.compute_metrics(model_outputs.centralized))
            ),
        }

    def describe_nodes(self) -> list[dict[str, Any]]:
        """Describe each node: its model, its examples and its label counts."""
        setting = self.setting
        names = setting.spec.nodes.models
        return [
            {
                "name": node.name,
                "model": names[index % len(names)],
                "parameters": parameter_count(node.model),
                "examples": len(given.data),
                "label_counts": [round(float(count)) for count in self.task.counts(given.data)],
                **({"site": given.site} if given.site else {}),
            }
            for index, (node, given) in enumerate(zip(self.nodes, setting.nodes, strict=True))
        ]

    def group_info(self) -> Mapping[str, Any]:
        return {"groups": self.groups}

    def privacy_statements(self) -> Mapping[str, PrivacyStatement]:
        holders = {node.name: node.gate.budgets for node in self.nodes}
        return {name: each.mechanism.statement() for name, each in holders.items() if each is not None}

    # --- models ---------------------------------------------------------------------------------------

    def _global_metric(self) -> float:
        """Return the main metric of the global model, or the mean over nodes' models without one."""
        evaluation, outputs = self.evaluation, self.responses(self.test.inputs)
        if outputs is not None:
            return evaluation.main_metric(outputs)
        each = [
            evaluation.main_metric(evaluation.outputs(node.model), node=node.name)
            for node in self.evaluated_nodes
        ]
        return mean([{"it": value} for value in each])["it"]

    def _average_parameters(self) -> torch.Tensor:
        """Return the average of all local models, weighted by their data (FedMD-CG, section 3.1), for
        evaluation."""
        sizes = torch.tensor(
            [float(len(node.data)) for node in self.evaluated_nodes], device=self.compute.device
        )
        return weighted_mean(torch.stack([to_vector(node.model) for node in self.evaluated_nodes]), sizes)

    def _test_share_metrics(self, node_outputs: Mapping[str, torch.Tensor] | None = None) -> list[float]:
        """Return the main metric of each node's own model on its share of the test set.

        Args:
            node_outputs: outputs of the models on the whole test set, if known.
        """
        evaluation, scores = self.evaluation, []
        shares = {
            node.name: evaluation.rows_of_test_share(at, len(self.nodes))
            for at, node in enumerate(self.nodes)
        }
        for node in self.evaluated_nodes:
            rows = shares[node.name]
            outputs = (
                evaluation.outputs(node.model, rows)
                if node_outputs is None
                else node_outputs[node.name][rows]
            )
            scores.append(evaluation.main_metric(outputs, rows, node=node.name))
        return scores

    def ensemble_outputs(
        self, inputs: torch.Tensor, node_outputs: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor | None:
        """Return the outputs of the teachers' ensemble with the method's weights; None if the method has
        none.

        Args:
            node_outputs: outputs of nodes' models on these inputs, as far as known.
        """
        teachers = self._ensemble_nodes() if self.side.preview_response is not None else []
        if not teachers:
            return None
        known_outputs = dict(node_outputs or {})
        for node in teachers:
            if node.name not in known_outputs:
                known_outputs[node.name] = float32_outputs(node.model, inputs, self.compute)
        parts, size = [], inference_batch_size(inputs)
        with torch.no_grad(), self.compute.in_float32():
            for start in range(0, len(inputs), size):
                rows = slice(start, start + size)
                z = torch.stack([known_outputs[node.name][rows] for node in teachers])  # (K, B, C, ...)
                responses = self._preview(teachers, inputs[rows], z)
                part = self.server.ensemble_responses(
                    self.server.federation.as_responses([node.name for node in teachers], responses)
                )
                if part is None:
                    return None
                parts.append(part)
        return torch.cat(parts)

    def _preview(self, teachers: Sequence[Node], x: torch.Tensor, z: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the responses of nodes to inputs ``(B, ...)``, ``(K, B, ...)`` each."""
        assert self.side.preview_response is not None
        each: list[object] = [
            self.side.preview_response(NodeView(NodeGroup([node]), self.at_nodes), x, z_k)
            for node, z_k in zip(teachers, z, strict=True)
        ]
        responses: dict[str, list[torch.Tensor]] = {}
        for response in each:
            if not isinstance(response, Mapping):
                raise ArgumentError(
                    f"preview_response of {self.method.title}",
                    type(response).__name__,
                    "a mapping of outputs by name, as {'logits': (B, C)}",
                )
            for name, tensor in response.items():
                responses.setdefault(name, []).append(tensor)
        return {name: torch.stack(tensors) for name, tensors in responses.items()}

    def _ensemble_nodes(self) -> list[Node]:
        """Return the nodes of the ensemble: those that take part and, if weights need label counts, sent
        them."""
        histogram, present = LabelHistogram.find_in(self.server.state), self.server.federation.present
        names = present if histogram is None or SUM in histogram.names else histogram.names
        return [node for node in self.evaluated_nodes if node.name in present and node.name in names]

    def _node_names_unless_all(self, nodes: Sequence[Node]) -> dict[str, Any]:
        """Return the names of the nodes that a metric covers, if not all."""
        return {} if len(nodes) == len(self.nodes) else {"nodes": [node.name for node in nodes]}

    def _summarize_over_nodes(self, values: Sequence[float]) -> dict[str, Any]:
        """Return mean and standard deviation over the nodes; unknown values are None."""
        each = dict(
            zip((node.name for node in self.evaluated_nodes), map(replace_nonfinite, values), strict=True)
        )
        return {
            "mean": replace_nonfinite(mean([{"it": value} for value in values])["it"]),
            "std": replace_nonfinite(standard_deviation(values)),
            "per_node": [each.get(node.name) for node in self.nodes],
            **self._node_names_unless_all(self.evaluated_nodes),
        }

    def _summarize_metrics(self, each: Sequence[Metrics]) -> dict[str, Any]:
        return {key: self._summarize_over_nodes([metrics[key] for metrics in each]) for key in each[0]}
