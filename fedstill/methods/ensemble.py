"""The nodes' ensemble: no central model, all nodes are asked each time that it is used.

What distillation from outputs can at best reach without seeing data. It is no model that one could
take home: every prediction sends its input to all nodes, so the bytes of a run, which are the label
counts only, are not its cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedstill.federation.contract import Answers
from fedstill.methods._histogram import CountsLabels, LabelHistogram, Tensors
from fedstill.methods.server import Server
from fedstill.node.group import Group
from fedstill.node.node import Node
from fedstill.protocol.kinds import INPUTS, LOGITS
from fedstill.protocol.method import Method
from fedstill.protocol.questions import NodeSetting, question
from fedstill.tasks import Ensemble


def look(nodes: Sequence[Node], x: torch.Tensor) -> Tensors:
    """The nodes' logits on inputs ``(B, ...)``: ``(K, B, C, ...)``."""
    return {"logits": torch.cat([Group([node]).bench("model")(x.unsqueeze(0)) for node in nodes])}


@dataclass
class Told:
    """What the server knows: who holds how many examples of which class."""

    histogram: LabelHistogram


@dataclass(frozen=True)
class NodeEnsemble(CountsLabels, Method):
    """The ensemble's options."""

    title: ClassVar[str] = "Ensemble"
    paper: ClassVar[str] = "outputs of all nodes, each time"
    central: ClassVar[Literal["ensemble"]] = "ensemble"
    turns: ClassVar[int] = 1

    ensemble: Ensemble = "consensus"
    """How answers are ensembled: logits (class-count weights, as in FedKD Eq. 1), log_probs, probs,
    consensus, which listens to those who know the classes that an input shows, or one of your own."""

    @question(sends={"x": INPUTS}, releases={"logits": LOGITS}, reads=())
    def predict(self, nodes: Group, x: torch.Tensor) -> Tensors:
        """Logits of any inputs: what a use of the ensemble asks, and costs."""
        return {"logits": nodes.bench("model")(x)}

    def look(self, nodes: Sequence[Node], x: torch.Tensor, at: NodeSetting) -> Tensors:
        """The nodes' logits."""
        return look(nodes, x)

    def begin(self, server: Server) -> Told:
        """Nobody has told anything yet."""
        return Told(LabelHistogram())

    def turn(self, server: Server, state: Told, t: int) -> Mapping[str, float]:
        """Ask for the label counts; the rest is asking."""
        state.histogram.gather(server)
        return {}

    def ensembled(self, server: Server, state: Told, answers: Answers) -> torch.Tensor | None:
        """Weighed by class counts, ``(B, C, ...)``."""
        if not state.histogram.names:
            return None
        weights = server.task.importance(state.histogram.of(answers.nodes).counts)
        return server.task.ensemble(answers["logits"], weights, self.ensemble)
