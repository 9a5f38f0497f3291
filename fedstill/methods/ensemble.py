"""The nodes' ensemble: no central model, all nodes are asked each time that it is used.

What distillation from outputs can at best reach without seeing data. It is no model that one could
take home: every prediction sends its input to all nodes, so the bytes of a run, which are the label
counts only, are not its cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedstill.core.choices import check_choices
from fedstill.federation.contract import Answers
from fedstill.methods.counting import Census, count_labels
from fedstill.methods.server import Server, ServerSetting
from fedstill.node.group import Group
from fedstill.node.node import Node
from fedstill.protocol.method import Method, Needs
from fedstill.protocol.questions import NodeSetting, NodeSide, Question
from fedstill.tasks import Ensemble


@dataclass(frozen=True)
class EnsembleConfig:
    """The ensemble's options."""

    name: ClassVar[str] = "ensemble"

    ensemble: Ensemble = "consensus"
    """How answers are ensembled: logits (class-count weights, as in FedKD Eq. 1), log_probs, probs, or
    consensus, which listens to those who know the classes that an input shows."""

    def __post_init__(self) -> None:
        check_choices(self, "method")


def look(nodes: Sequence[Node], x: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """The nodes' logits on inputs ``(B, ...)``: ``(K, B, C, ...)``."""
    return {"logits": torch.cat([Group([node]).bench("model")(x.unsqueeze(0)) for node in nodes])}


def node_side(config: EnsembleConfig, setting: NodeSetting) -> NodeSide:
    """Label counts, and logits of any inputs."""

    def predict(group: Group, number: int, x: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"logits": group.bench("model")(x)}

    questions = (
        count_labels(setting.task),
        Question("predict", predict, {"x": "inputs"}, {"logits": "logits"}, reads=()),
    )
    return NodeSide({question.name: question for question in questions}, look=look)


class EnsembleServer(Server):
    """Learns who holds which classes; the rest is asking."""

    def __init__(self, config: EnsembleConfig, setting: ServerSetting) -> None:
        super().__init__(setting)
        self.config, self.total = config, 1
        self.census: Census | None = None

    def step(self) -> Mapping[str, float]:
        """Ask for the label counts."""
        self.census = Census.take(self.federation)
        self.done += 1
        return {}

    def ensemble(self, answers: Answers) -> torch.Tensor | None:
        """Weighed by class counts, ``(B, C, ...)``."""
        if self.census is None:
            return None
        weights = self.task.importance(self.census.of(answers.nodes).counts)
        return self.task.ensemble(answers["logits"], weights, self.config.ensemble)

    def predict(self, x: torch.Tensor) -> torch.Tensor | None:
        """Ask all nodes about inputs ``(B, ...)``: what a use of the ensemble is, and costs."""
        return self.ensemble(self.federation.ask("predict", x=x))

    def state(self) -> dict[str, Any]:
        """See :class:`Server`."""
        return {**super().state(), "census": None if self.census is None else self.census.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """See :class:`Server`."""
        super().load(state)
        self.census = Census.load(state["census"], self.compute.device)


METHOD = Method(
    name="ensemble",
    title="Ensemble",
    paper="outputs of all nodes, each time",
    config=EnsembleConfig,
    node_side=node_side,
    server=EnsembleServer,
    needs=lambda config: Needs(),
    central="ensemble",
)
