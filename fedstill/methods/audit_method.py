"""Queries of a privacy audit: differentiable logits, label counts and a critic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch

from fedstill.core.options import PositiveInt
from fedstill.methods import Method, Node, NodeSetting, NodeView, Query, Tensors, count_labels_query
from fedstill.methods._discriminators import Discriminators
from fedstill.protocol.payload_kinds import CRITIC, INPUTS, LOGITS


@dataclass(frozen=True, kw_only=True)
class AuditMethod(Method):
    """Queries whose responses reveal the most about one record; no server trains on them."""

    title: ClassVar[str] = "Audit"

    batch: PositiveInt = 64
    """Inputs x in a query."""
    critics: bool = True
    """Give each node a critic."""
    critic: Discriminators = field(default_factory=partial(Discriminators, width=4))
    """The critics."""

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        yield count_labels_query(setting)
        yield Query(
            self.predict_logits,
            sends={"x": INPUTS},
            releases={"logits": LOGITS, **({"critic": CRITIC} if self.critics else {})},
            differentiable=("x",),
            times=1,
            rows=self.batch,
            depends_on_records=(),
            trains=("critic",) if self.critics else (),
        )

    def prepare(self, node: Node, setting: NodeSetting) -> None:
        """Add a critic."""
        if self.critics:
            self.critic.add_to(node, setting.task, self.total_steps)

    def predict_logits(self, node: NodeView, x: torch.Tensor) -> Tensors:
        """Return logits of inputs, and a critic's values after one step of it on them and on as many own
        examples."""
        response = {"logits": node.model(node.task.observe(x))}
        if self.critics:
            self.critic.train_step(node, x.detach(), self.batch)
            response["critic"] = node.module("critic")(x)
        return response
