"""Property inference: guess the majority class of each node from its model's responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedstill.attacks.attack import Attack, AttackResult, ComparisonColumn, LeakageMetric, Target
from fedstill.core.errors import ArgumentError
from fedstill.protocol.node_side import NodeSide


@dataclass(frozen=True, kw_only=True)
class MajorityClass(Attack):
    """Guess by the mean softmax: a model tends to predict the class that it saw most often."""

    title: ClassVar[str] = "Majority class of each node"
    columns: ClassVar[tuple[ComparisonColumn, ...]] = (
        ComparisonColumn(
            name="majority_right",
            head="majority class",
            description="Percentage of the nodes whose majority class is guessed.",
        ),
    )

    responses: int = 500
    """Number of the latest responses of each node that are used."""

    @property
    def transcript_rows(self) -> int:
        return self.responses

    def refusal(self, side: NodeSide) -> str | None:
        releases_scores = any(kind.category == "scores" for kind in side.released_kinds())
        return None if releases_scores else "the nodes release no class scores"

    def run(self, target: Target) -> AttackResult:
        if target.experiment.task.kind != "class":
            raise ArgumentError("task", target.experiment.task.name, "one with a class for each input")
        nodes, classes = [], list(target.replay.data.classes)
        for node in target.nodes:
            pairs = target.transcript.responses(node.name)  # inputs (Q, ...) and logits (Q, classes)
            if pairs is not None:
                guess = pairs[1][-self.responses :].softmax(1).mean(0).argmax()
                true = torch.bincount(node.data.targets).argmax()
                nodes.append({"node": node.name, "guess": classes[guess], "true": classes[true]})
        return AttackResult({"nodes": nodes, "classes": len(classes)})

    def rows(self, part: Mapping[str, Any]) -> Iterator[LeakageMetric]:
        nodes = part["nodes"]
        right = sum(node["guess"] == node["true"] for node in nodes)
        share, column = 100 * right / max(len(nodes), 1), "majority_right"
        text, target, chance = f"{share:.0f}%", f"{len(nodes)} nodes", f"{100 / part['classes']:.0f}%"
        yield LeakageMetric(
            target=target, metric="right", value=share, text=text, baseline=chance, column=column
        )
        for node in nodes:
            yield LeakageMetric(target=node["node"], metric="guess", text=node["guess"], detail=True)
            yield LeakageMetric(target=node["node"], metric="most", text=node["true"], detail=True)
