"""Queries to the nodes' models for their logits and their batch norm statistics on the server's inputs.

Both are differentiable in the inputs. DENSE, Co-Boosting and Co-Dream optimize their inputs with them.
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
    "the distance of the server's inputs, inside a node's model, from the means and variances of its "
    "training data in batch norm: one number for all inputs",
    category="responses",
    opt_out="with method.bn = 0 none is released",
)


def evaluate_with_batch_norm(model: nn.Module, x: torch.Tensor, bn: float) -> dict[str, torch.Tensor]:
    """Return ``logits`` (B, C) of one model and, if weighted, the batch norm distance ``statistics`` ()."""
    z, apart = outputs_and_batch_norm_loss(model, x)
    return {"logits": z, **({"statistics": apart} if bn else {})}


@dataclass(frozen=True, kw_only=True)
class TeacherQueryMethod(StudentOptions):
    """Base class of methods with a student and a query to the nodes' models about generated inputs."""

    unit: ClassVar[Literal["step"]] = "step"
    length_options: ClassVar[tuple[str, ...]] = ("steps",)

    steps: PositiveInt = 400
    """Batches of inputs; the student trains after each."""
    bn: NonNegativeFloat = 0.0
    """Weight of the distance of inputs to the nodes' batch norm statistics; 0: none is released."""

    @property
    def total_steps(self) -> int:
        return self.steps

    @property
    def queries_nodes(self) -> bool:
        """True if nodes are queried at all."""
        return True

    @property
    def queries_per_step(self) -> int:
        """Number of queries to all nodes in a step."""
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
        """Return z_k = f_k(x) ``(G, B, C)``, and the distance to batch norm statistics ``(G,)``."""
        seen, model = nodes.setting.task.observe(x), nodes.module("model")
        if not self.bn:
            return {"logits": model(seen)}
        model.train(False)  # hooks work only on a model that is evaluated by itself
        outputs = [
            evaluate_with_batch_norm(node.model, mine, self.bn)
            for node, mine in zip(nodes.nodes, seen, strict=True)
        ]
        return {name: torch.stack([output[name] for output in outputs]) for name in outputs[0]}

    def preview_responses(
        self, nodes: Sequence[Node], x: torch.Tensor, z: torch.Tensor, setting: NodeSetting
    ) -> Tensors:
        return {"logits": z}
