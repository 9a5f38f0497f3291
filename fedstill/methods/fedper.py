"""FedPer: the extractor is shared, the head stays personal.

Arivazhagan, Aggarwal, Singh, Choudhary: "Federated Learning with Personalization Layers", arXiv:1912.00818,
Algorithms 1 and 2: base layers are averaged; personalization layers never leave a node and keep their state
from round to round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedstill.methods._averaging import AveragingMethod
from fedstill.models.extractor_head import EXTRACTOR


@dataclass(frozen=True, kw_only=True)
class FedPer(AveragingMethod):
    """FedPer's options."""

    title: ClassVar[str] = "FedPer"
    paper: ClassVar[str] = "Arivazhagan et al., arXiv:1912.00818"
    evaluated_model: ClassVar[Literal["virtual"]] = "virtual"
    shared_part: ClassVar[str] = EXTRACTOR
