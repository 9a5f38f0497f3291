"""FedAvg: rounds of local training and weighted averages of the parameters.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017, Algorithm 1. Buffers, such as batch norm's running statistics, are averaged
with the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstill.methods._averaging import AveragingMethod


@dataclass(frozen=True, kw_only=True)
class FedAvg(AveragingMethod):
    """FedAvg; see :class:`fedstill.methods._averaging.AveragingMethod` for the algorithm."""

    title: ClassVar[str] = "FedAvg"
    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
