"""How the nodes' outputs become one: who knows more of a class counts more in it, or all count equally."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from fedstill.federation.contract import Answers
from fedstill.methods._histogram import CountsLabels, LabelHistogram, Tensors
from fedstill.methods.ensemble import look
from fedstill.methods.server import Server
from fedstill.node.node import Node
from fedstill.protocol.method import Method
from fedstill.protocol.questions import NodeSetting, Question
from fedstill.tasks import Ensemble


@dataclass
class Weighed:
    """What a server keeps: the student's optimiser, and who counts how much.

    Args:
        optimiser: the student's.
        histogram: who holds how many examples of which class; empty until the first turn.
    """

    optimiser: torch.optim.Optimizer
    histogram: LabelHistogram = field(default_factory=LabelHistogram)


class WeighsNodes(CountsLabels, Method):
    """Nodes are weighed by their shares of each class's examples, which they then tell, or equally."""

    weights: Literal["counts", "equal"]
    ensemble: Ensemble

    def questions(self, at: NodeSetting) -> Iterable[Question]:
        """Without label counts, where nobody is weighed by them."""
        return [
            question
            for question in super().questions(at)
            if self.by_counts or question.name != "count_labels"
        ]

    @property
    def by_counts(self) -> bool:
        """Whether nodes are weighed by their shares of each class's examples."""
        return self.weights == "counts"

    def look(self, nodes: Sequence[Node], x: torch.Tensor, at: NodeSetting) -> Tensors:
        """The nodes' logits."""
        return look(nodes, x)

    def gather(self, server: Server, state: Any) -> None:
        """Know who counts how much: ask, where that is to be asked and is not done."""
        if self.by_counts:
            state.histogram.gather(server)
        elif not state.histogram.names:
            even = LabelHistogram.even(server.federation.nodes, server.task.classes, server.device)
            state.histogram = even

    def omega(self, server: Server, state: Any, nodes: Sequence[str]) -> torch.Tensor:
        """The weights of some nodes, by class: ``(K, 1, C)``, summing to 1 over nodes."""
        return server.task.importance(state.histogram.of(nodes).counts)

    def ensembled(self, server: Server, state: Any, answers: Answers) -> torch.Tensor | None:
        """The nodes' outputs as one, ``(B, C, ...)``; None before they were asked."""
        if not state.histogram.names:
            return None
        omega = self.omega(server, state, answers.nodes)
        return server.task.ensemble(answers["logits"], omega, self.ensemble)
