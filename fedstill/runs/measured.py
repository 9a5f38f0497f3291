"""What the models of an experiment reach, now and then and at its end.

Only a simulation can know much of it: here, in the centralised mark and in the losses of local training,
nodes' data and networks are read past their gates. The student learns from none of it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fedstill.federation import Answers
from fedstill.methods._histogram import LabelHistogram
from fedstill.models.vector import load_vector, to_vector, weighted_mean
from fedstill.node import training
from fedstill.node.node import Node
from fedstill.protocol.schedule import WHOLE
from fedstill.runs.evaluation import Metrics, deviation, mean, number, plain
from fedstill.runs.prepared import Prepared
from fedstill.runs.result import common
from fedstill.runs.setting import normalisation


class Measured:
    """Measures an experiment's models as they stand.

    Args:
        experiment: whose server has been made.
    """

    def __init__(self, experiment: Prepared) -> None:
        self.of, self.evaluation, self.task = experiment, experiment.evaluation, experiment.task
        self.nodes, self.known = experiment.nodes, experiment.known

    def look(self) -> dict[str, float]:
        """What the method is judged by, and the nodes' own models, as they are now."""
        metric = self.task.metric
        told = {metric: self._central()[metric]}
        if self.of.side.learns:
            told[f"local_{metric}"] = mean([{metric: value} for value in self._score_shares()])[metric]
        return told

    def _central(self) -> Metrics:
        """The central model's metrics, or of what stands for it."""
        outputs = self.answers(self.of.test.inputs)
        if outputs is not None:
            return self.evaluation.metrics(outputs)
        look = self.evaluation
        return mean([look.metrics(look.outputs(node.model), node=node.name) for node in self.known])

    def answers(self, inputs: torch.Tensor) -> torch.Tensor | None:
        """What the central model answers about inputs ``(N, C, ...)``; None where nothing stands for one."""
        if self.of.method.central == "student":
            return training.predict(self.of.student, inputs, self.of.compute)
        if self.of.method.central == "virtual":
            virtual = copy.deepcopy(self.of.student)
            load_vector(virtual, self._average())
            return training.predict(virtual, inputs, self.of.compute)
        return self._ensemble(inputs) if self.of.method.central == "ensemble" else None

    def _average(self) -> torch.Tensor:
        """All local models as one, weighed by their data (FedMD-CG, section 3.1): made only to evaluate."""
        sizes = torch.tensor([float(len(node.data)) for node in self.known], device=self.of.compute.device)
        return weighted_mean(torch.stack([to_vector(node.model) for node in self.known]), sizes)

    def _score_shares(self, own: Mapping[str, torch.Tensor] | None = None) -> list[float]:
        """Each node's own model on its own share of the test set; ``own``: what they answer on all of it."""
        look, found = self.evaluation, []
        shares = {node.name: look.share(at, len(self.nodes)) for at, node in enumerate(self.nodes)}
        for node in self.known:
            rows = shares[node.name]
            outputs = look.outputs(node.model, rows) if own is None else own[node.name][rows]
            found.append(look.metrics(outputs, rows, node=node.name)[self.task.metric])
        return found

    def _ensemble(self, inputs: torch.Tensor) -> torch.Tensor | None:
        """The teachers' ensemble on real inputs, weighed as the method weighs it, if it has one."""
        if self.of.side.look is None:
            return None
        teachers = self._teachers()
        if not teachers:
            return None
        names = tuple(node.name for node in teachers)
        parts = []
        with torch.no_grad(), self.of.compute.autocast():
            for some in torch.split(inputs, training.at_once(inputs)):
                part = self.of.server.ensemble(Answers(-1, names, self.of.side.look(teachers, some)))
                if part is None:
                    return None
                parts.append(part)
        return torch.cat(parts)

    def _teachers(self) -> list[Node]:
        """The nodes that the ensemble is made of: all that have not been left out, as far as they can be
        weighed."""
        told, present = getattr(self.of.server.state, "histogram", None), self.of.server.federation.present
        names = told.names if isinstance(told, LabelHistogram) else present
        return [node for node in self.known if node.name in present and node.name in names]

    def _only(self, nodes: Sequence[Node]) -> dict[str, Any]:
        """Says over which nodes a figure is, where these are not all."""
        return {} if len(nodes) == len(self.nodes) else {"nodes": [node.name for node in nodes]}

    def _spread(self, values: Sequence[float]) -> dict[str, Any]:
        """Mean and standard deviation over the nodes; those of which nothing is known have None."""
        each = dict(zip((node.name for node in self.known), map(number, values), strict=True))
        return {
            "mean": number(mean([{"it": value} for value in values])["it"]),
            "std": number(deviation(values)),
            "per_node": [each.get(node.name) for node in self.nodes],
            **self._only(self.known),
        }

    def _spreads(self, each: Sequence[Metrics]) -> dict[str, Any]:
        return {key: self._spread([metrics[key] for metrics in each]) for key in each[0]}

    def figures(self) -> dict[str, Any]:
        """What ``result.json`` says of models, bytes, questions and privacy."""
        look = self.evaluation
        own = {node.name: look.outputs(node.model) for node in self.known} if self.of.side.learns else {}
        outputs, ensembled = self.answers(look.test.inputs), self._ensemble(look.test.inputs)
        marked = None if self.of.mark is None else look.outputs(self.of.mark.model)
        each = [look.metrics(told, node=name) for name, told in own.items()]
        central = plain(mean(each) if outputs is None else look.metrics(outputs))
        told, by_node = common(
            method=self.of.method,
            needs=self.of.needs,
            task=self.task,
            seed=self.of.setting.seed,
            side=self.of.side,
            server=self.of.server,
            public=self.of.public,
            ledger=self.of.ledger,
            compute=self.of.compute,
            engine=self.of.compute.config.name,
            parted={"stacked_over_one_by_one": self.of.ratios, "groups": self.of.groups},
            statements={
                node.name: node.gate.budgets.mechanism.statement()
                for node in self.nodes
                if node.gate.budgets is not None
            },
        )
        return {
            **told,
            **central,
            **({"notes": list(self.of.notes)} if self.of.notes else {}),
            "nodes": [
                {**about, "bytes": by_node.get(about["name"], {"up": 0, "down": 0})}
                for about in self._about()
            ],
            "student": (
                {
                    "model": type(self.of.setting.student).__name__,
                    "parameters": _size(self.of.student),
                    **central,
                }
                if self.of.has_student
                else None
            ),
            "local": (
                {**self._spreads(each), "share": self._spread(self._score_shares(own))}
                if self.of.side.learns
                else None
            ),
            "standalone": self._spreads(each) if self.of.side.first == WHOLE else None,
            "ensemble": (
                None
                if ensembled is None
                else {**plain(look.metrics(ensembled)), **self._only(self._teachers())}
            ),
            "centralised": ({self.task.metric: None} if marked is None else plain(look.metrics(marked))),
            **look.details(outputs, own, marked, self.of.setting.classes),
            "pictures": self._portray(outputs, own),
            "seconds": {"total": self.of.elapsed(), **self.of.seconds},
        }

    def _about(self) -> list[dict[str, Any]]:
        """Each node: what it holds, and with what it learned."""
        return [
            {
                "name": node.name,
                "model": type(node.model).__name__,
                "parameters": _size(node.model),
                "examples": len(part),
                "label_counts": [round(float(count)) for count in self.task.counts(part)],
                **_owners_own(node),
            }
            for node, part in zip(self.nodes, self.of.setting.parts, strict=True)
        ]

    def _portray(
        self, outputs: torch.Tensor | None, own: Mapping[str, torch.Tensor]
    ) -> list[dict[str, Any]] | None:
        mean, std = (tuple(values.flatten().tolist()) for values in normalisation(self.of.setting))
        return self.evaluation.portray(outputs, own, mean, std, self.of.records)


def _owners_own(node: Node) -> dict[str, float]:
    """What only the node's owner may know of what its releases cost."""
    budgets, votes = node.gate.budgets, node.gate.ledger.votes(node.name)
    found = None if budgets is None else budgets.data_dependent(votes)
    return {} if found is None else {"epsilon_data_dependent_not_to_be_published": found}


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
