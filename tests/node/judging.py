"""A custom method: FedIOD whose critics can also be queried alone, as they are for label maps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedstill.methods import NodeSetting, NodeView, Query, Tensors, payload_kinds
from fedstill.methods.fediod import FedIOD

NAME = "tests.node.judging:Judging"
POLICY = f'plugins = ["{NAME}"]\n'


@dataclass(frozen=True, kw_only=True)
class Judging(FedIOD):
    title: ClassVar[str] = "Judging"

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        yield from super().queries(setting)
        yield Query(
            self.score_with_critic,
            sends={"x": payload_kinds.INPUTS},
            releases={"critic": payload_kinds.CRITIC},
            differentiable=("x",),
            times=40,
            rows=self.batch,
            depends_on_records=(),
            trains=("critic",),
            stackable=True,
        )

    def score_with_critic(self, node: NodeView, x: torch.Tensor) -> Tensors:
        return self.train_critic(node, x, None)
