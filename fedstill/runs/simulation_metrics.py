"""What the models of a simulation reach, now and then and at its end.

Only a simulation can know much of it: here, in the centralized mark and in the losses of local training,
nodes' data and networks are read past their gates. The student learns from none of it.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from fedstill.core.errors import ArgumentError
from fedstill.core.text_format import finite
from fedstill.federation.federation import Responses
from fedstill.methods._label_histogram import LabelHistogram
from fedstill.models.module_utils import deep_copy, load_vector, parameter_count, to_vector, weighted_mean
from fedstill.node.local_training import inference_batch_size
from fedstill.node.node import Node
from fedstill.privacy.statement import Statement
from fedstill.protocol.local_config import FULL_TRAINING
from fedstill.protocol.secure_aggregation import SUM, add_contributions, decode_sums, sum_contributions
from fedstill.runs.evaluation import Metrics, Outputs, deviation, float32_outputs, mean
from fedstill.runs.simulation_nodes import PreparedSimulation
from fedstill.runs.trained_model_cache import TrainedModels


class MeasuredSimulation(PreparedSimulation, ABC):
    """Measures a simulation's models as they stand, once its server has been made.

    Attributes:
        trained: where other runs keep the models of nodes that were trained as this run's would be, and what
            these answer; None where there are no other runs.
    """

    trained: TrainedModels | None = None

    def look(self) -> Mapping[str, float]:
        """What the method is judged by, and the nodes' own models, as they are now."""
        metric = self.task.metric
        told = {metric: self._central()}
        if self.side.trains_models:
            told[f"local_{metric}"] = mean([{metric: value} for value in self._score_shares()])[metric]
        return told

    def responses(self, inputs: torch.Tensor) -> torch.Tensor | None:
        """See :class:`~fedstill.runs.loop.Run`; also of a model or an ensemble made only to be measured."""
        if self.method.evaluated_model == "virtual":
            virtual = deep_copy(self.student)
            load_vector(virtual, self._average())
            return float32_outputs(virtual, inputs, self.compute)
        return (
            self._ensemble(inputs) if self.method.evaluated_model == "ensemble" else super().responses(inputs)
        )

    # --- the parts of the figures ---------------------------------------------------------------------

    def _outputs(self) -> Outputs:
        own = (
            self._own(self.known, self.side.initial_training == FULL_TRAINING)
            if self.side.trains_models
            else {}
        )
        marked = None if self.mark is None else self._own([self.mark])[self.mark.name]
        ensembled = self._ensemble(self.test.inputs, own)
        central = ensembled if self.method.evaluated_model == "ensemble" else self.responses(self.test.inputs)
        return Outputs(central, own, marked, ensembled)

    def _own(self, nodes: Sequence[Node], shared: bool = True) -> dict[str, torch.Tensor]:
        """What nodes' own models answer on the test part, by name; ``shared``: another run may have asked the
        same models."""
        file = self.trained.answers_file(nodes, "float32") if self.trained and shared else None
        if file is not None and file.exists():
            return {
                name: told.to(self.compute.device) for name, told in TrainedModels.responses(file).items()
            }
        own = {node.name: self.evaluation.outputs(node.model) for node in nodes}
        if file is not None:
            with suppress(OSError):  # on a full disk the next run asks for itself
                TrainedModels.keep_answers(file, own)
        return own

    def _beside(self, told: Outputs) -> Mapping[str, Mapping[str, Any] | None]:
        look, ensembled = self.evaluation, told.ensembled
        each = [look.compute_metrics(outputs, node=name) for name, outputs in told.own.items()]
        return {
            "local": (
                {**self._spreads(each), "share": self._spread(self._score_shares(told.own))}
                if self.side.trains_models
                else None
            ),
            "standalone": self._spreads(each) if self.side.initial_training == FULL_TRAINING else None,
            "ensemble": (
                None
                if ensembled is None
                else {**finite(look.compute_metrics(ensembled)), **self._only(self._teachers())}
            ),
            "centralized": (
                {self.task.metric: None} if told.marked is None else finite(look.compute_metrics(told.marked))
            ),
        }

    def _about_nodes(self) -> list[dict[str, Any]]:
        """Each node: what it holds, and with what it learned."""
        one = self.setting
        names = one.model_names or [type(node.model).__name__ for node in self.nodes]
        return [
            {
                "name": node.name,
                "model": name,
                "parameters": parameter_count(node.model),
                "examples": len(part),
                "label_counts": [round(float(count)) for count in self.task.counts(part)],
                **({"site": one.values[place]} if one.values else {}),
            }
            for place, (node, name, part) in enumerate(zip(self.nodes, names, one.parts, strict=True))
        ]

    def _grouped(self) -> Mapping[str, Any]:
        return {"groups": self.groups}

    def _statements(self) -> Mapping[str, Statement]:
        holders = {node.name: node.gate.budgets for node in self.nodes}
        return {name: each.mechanism.statement() for name, each in holders.items() if each is not None}

    # --- models ---------------------------------------------------------------------------------------

    def _central(self) -> float:
        """What the central model, or what stands for it, is judged by."""
        look, outputs = self.evaluation, self.responses(self.test.inputs)
        if outputs is not None:
            return look.leading(outputs)
        each = [look.leading(look.outputs(node.model), node=node.name) for node in self.known]
        return mean([{"it": value} for value in each])["it"]

    def _average(self) -> torch.Tensor:
        """All local models as one, weighed by their data (FedMD-CG, section 3.1): made only to evaluate."""
        sizes = torch.tensor([float(len(node.data)) for node in self.known], device=self.compute.device)
        return weighted_mean(torch.stack([to_vector(node.model) for node in self.known]), sizes)

    def _score_shares(self, own: Mapping[str, torch.Tensor] | None = None) -> list[float]:
        """Each node's own model on its own share of the test set; ``own``: what they answer on all of it."""
        look, found = self.evaluation, []
        shares = {node.name: look.share(at, len(self.nodes)) for at, node in enumerate(self.nodes)}
        for node in self.known:
            rows = shares[node.name]
            outputs = look.outputs(node.model, rows) if own is None else own[node.name][rows]
            found.append(look.leading(outputs, rows, node=node.name))
        return found

    def _ensemble(
        self, inputs: torch.Tensor, own: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor | None:
        """The teachers' ensemble on real inputs, weighed as the method weighs it, if it has one.

        Args:
            own: what nodes' models answer on them, as far as it is known.
        """
        teachers = self._teachers() if self.side.preview_responses is not None else []
        if self.side.preview_responses is None or not teachers:
            return None
        answered = dict(own or {})
        for node in teachers:
            if node.name not in answered:
                answered[node.name] = float32_outputs(node.model, inputs, self.compute)
        parts, size = [], inference_batch_size(inputs)
        with torch.no_grad(), self.compute.in_float32():
            for start in range(0, len(inputs), size):
                rows = slice(start, start + size)
                z = torch.stack([answered[node.name][rows] for node in teachers])  # (K, B, C, ...)
                told: object = self.side.preview_responses(teachers, inputs[rows], z)
                if not isinstance(told, Mapping):
                    allowed = "answers by name, as {'logits': (K, B, C)}"
                    raise ArgumentError(f"look of {self.method.title}", type(told).__name__, allowed)
                part = self.server.ensemble_responses(self._heard(teachers, told))
                if part is None:
                    return None
                parts.append(part)
        return torch.cat(parts)

    def _teachers(self) -> list[Node]:
        """The nodes that the ensemble is made of: all that have not been left out, as far as they can be
        weighed."""
        told, present = LabelHistogram.among(self.server.state), self.server.federation.present
        names = present if told is None or SUM in told.names else told.names
        return [node for node in self.known if node.name in present and node.name in names]

    def _heard(self, teachers: Sequence[Node], told: Mapping[str, torch.Tensor]) -> Responses:
        """What nodes would be answering, as the server would hear it: node by node, or their sum."""
        if not self.at_nodes.sums:
            return Responses(-1, tuple(node.name for node in teachers), told)
        asked = next(each for each in self.side.queries.values() if told.keys() <= each.sums.keys())
        added = []
        for row, node in enumerate(teachers):
            mine = {name: each[row] for name, each in told.items()}
            added.append(sum_contributions(mine, asked.released_kinds(), asked.sums, node.released_counts))
        values, _ = decode_sums(add_contributions(added), asked.released_kinds())
        placed = self.compute.here({name: value.unsqueeze(0) for name, value in values.items()})
        return Responses(-1, (SUM,), placed)

    def _only(self, nodes: Sequence[Node]) -> dict[str, Any]:
        """Says over which nodes a figure is, where these are not all."""
        return {} if len(nodes) == len(self.nodes) else {"nodes": [node.name for node in nodes]}

    def _spread(self, values: Sequence[float]) -> dict[str, Any]:
        """Mean and standard deviation over the nodes; those of which nothing is known have None."""
        each = dict(zip((node.name for node in self.known), map(finite, values), strict=True))
        return {
            "mean": finite(mean([{"it": value} for value in values])["it"]),
            "std": finite(deviation(values)),
            "per_node": [each.get(node.name) for node in self.nodes],
            **self._only(self.known),
        }

    def _spreads(self, each: Sequence[Metrics]) -> dict[str, Any]:
        return {key: self._spread([metrics[key] for metrics in each]) for key in each[0]}
