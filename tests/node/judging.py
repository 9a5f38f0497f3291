"""A custom method: FedIOD whose critics can also be queried alone, as they are for label maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedstill.methods import NodeGroup, payload_kinds, query
from fedstill.methods.fediod import FedIOD

NAME = "tests.node.judging:Judging"
POLICY = f"""methods = ["{NAME}"]
kinds = ["tests: logits", "tests: critic", "tests: gradients", "tests: label counts"]
"""


@dataclass(frozen=True, kw_only=True)
class Judging(FedIOD):
    title: ClassVar[str] = "Judging"

    @query(
        sends={"x": payload_kinds.INPUTS},
        releases={"critic": payload_kinds.CRITIC},
        differentiable=("x",),
        times=40,
        rows=lambda self, setting: self.batch,
        depends_on_records=(),
        trains=("critic",),
    )
    def score_with_critic(self, nodes: NodeGroup, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.make_critics(nodes.setting).train_and_score(nodes, nodes.query_number, x)
