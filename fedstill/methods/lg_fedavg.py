"""LG-FedAvg: the head is shared, the extractor stays local.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: "Think Locally, Act Globally: Federated
Learning with Local and Global Representations", arXiv:2001.01523, Algorithm 1: global parameters (the layers
near the output) are averaged, local representations never leave a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedstill.methods._averaging import AveragingMethod
from fedstill.models.extractor_head import HEAD


@dataclass(frozen=True, kw_only=True)
class LGFedAvg(AveragingMethod):
    """LG-FedAvg's options."""

    title: ClassVar[str] = "LG-FedAvg"
    paper: ClassVar[str] = "Liang et al., arXiv:2001.01523"
    evaluated_model: ClassVar[Literal["virtual"]] = "virtual"
    shared_part: ClassVar[str] = HEAD
