"""Queries of a privacy audit: differentiable logits, label counts and a critic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedstill.methods._critics import CriticOptions
from fedstill.methods._label_histogram import LabelCountQuery, Tensors
from fedstill.node.node_group import NodeGroup
from fedstill.protocol.payload_kinds import INPUTS, LOGITS
from fedstill.protocol.queries import query


@dataclass(frozen=True, kw_only=True)
class AuditMethod(LabelCountQuery, CriticOptions):
    """Queries whose responses reveal the most about one record; no server trains on them."""

    title: ClassVar[str] = "Audit"

    critic_width: int = 4
    """Channels of the critic's first convolution."""

    @query(
        sends={"x": INPUTS},
        releases=lambda self, setting: {"logits": LOGITS, **self.make_critics(setting).releases},
        differentiable=("x",),
        times=1,
        rows=lambda self, setting: self.batch,
        depends_on_records=(),
        trains=lambda self, setting: ("critic",) if self.has_critics else (),
    )
    def predict_logits(self, nodes: NodeGroup, x: torch.Tensor) -> Tensors:
        """Return logits of inputs, and a critic's values after one step of it on them and on as many own
        examples."""
        response = self.make_critics(nodes.setting).train_and_score(nodes, nodes.query_number, x)
        return {"logits": nodes.module("model")(nodes.setting.task.observe(x)), **response}
