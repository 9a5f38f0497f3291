"""Nodes' models examined: what they answer about the server's inputs, and what batch norm makes of these.

Both are differentiable in the inputs; by them DENSE, Co-Boosting and Co-Dream learn what to ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn

from fedstill.core.options import NonNegativeFloat, PositiveInt
from fedstill.methods import Node, NodeGroup, NodeSetting, Tensors, query
from fedstill.methods._student import StudentOptions
from fedstill.models.normalization import outputs_and_batch_norm_loss
from fedstill.protocol.payload_kinds import INPUTS, LOGITS, PayloadKind

BATCH_NORM_DISTANCE = PayloadKind(
    "batch norm distance",
    "how far the server's inputs are, inside a node's model, from the means and variances that it has kept "
    "of its training data: one number for all of them",
    category="responses",
    opt_out="with method.bn = 0 none is told",
)


def evaluate_with_batch_norm(model: nn.Module, x: torch.Tensor, bn: float) -> dict[str, torch.Tensor]:
    """What one model says of inputs ``(B, ...)``: ``logits`` (B, C), and ``statistics`` () if they count."""
    z, apart = outputs_and_batch_norm_loss(model, x)
    return {"logits": z, **({"statistics": apart} if bn else {})}


@dataclass(frozen=True, kw_only=True)
class QueriesTeachers(StudentOptions):
    """A student, and a query to models about inputs that the server makes for it."""

    unit: ClassVar[Literal["step"]] = "step"
    length_options: ClassVar[tuple[str, ...]] = ("steps",)

    steps: PositiveInt = 400
    """Batches of inputs, from each of which the student learns."""
    bn: NonNegativeFloat = 0.0
    """Weight of the distance of inputs to what the nodes' batch norm has kept; 0: none is told."""

    @property
    def total_steps(self) -> int:
        return self.steps

    @property
    def queries_nodes(self) -> bool:
        """Whether nodes are asked at all."""
        return True

    @property
    def queries_per_step(self) -> int:
        """Queries to all nodes in a step."""
        return 1

    @query(
        sends={"x": INPUTS},
        releases=lambda self, setting: {
            "logits": LOGITS,
            **({"statistics": BATCH_NORM_DISTANCE} if self.bn else {}),
        },
        differentiable=("x",),
        times=lambda self, setting: self.steps * self.queries_per_step,
        rows=lambda self, setting: self.batch,
        depends_on_records=(),
        when=lambda self, setting: self.queries_nodes,
    )
    def predict_logits(self, nodes: NodeGroup, x: torch.Tensor) -> Tensors:
        """z_k = f_k(x) ``(G, B, C)``, and the distance to what batch norm has kept ``(G,)``."""
        seen, model = nodes.setting.task.observe(x), nodes.module("model")
        if not self.bn:
            return {"logits": model(seen)}
        model.train(False)  # what flows inside is seen only where a model is computed by itself
        each = [
            evaluate_with_batch_norm(node.model, mine, self.bn)
            for node, mine in zip(nodes.nodes, seen, strict=True)
        ]
        return {name: torch.stack([told[name] for told in each]) for name in each[0]}

    def preview_responses(
        self, nodes: Sequence[Node], x: torch.Tensor, z: torch.Tensor, setting: NodeSetting
    ) -> Tensors:
        return {"logits": z}
