"""FedCGS: a linear head in closed form, from sums over the features of all nodes.

Guan, Zhou, Gu: "Capture Global Feature Statistics for One-Shot Federated Learning", AAAI 2025. Each client i
releases its number of examples N_i^j of each class j, the sum A_i^j of their features f, and the sum B_i of
f f^T over all its examples. The server adds them up to the means mu^j and the covariance Sigma of all
features, and takes these as a Gaussian naive Bayes classifier, which is linear. The paper's personalized
models are not part of this file.

Nothing is trained. All sums are plain sums over the examples, so that the head does not depend on how
examples are split over the nodes, and the server needs no more than their sums over the nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Interval
from torch import nn

from fedstill.core.options import PositiveOrInf
from fedstill.methods import (
    ArgumentError,
    Method,
    Needs,
    NodeSetting,
    NodeView,
    PublicData,
    Query,
    QueryCall,
    QueryDetails,
    Server,
    Tensors,
)
from fedstill.methods._feature_sums import FeatureSums, in_float32, require_clip, sums_kind

ABSENT = -1e9  # logit of a class that no node holds: finite, and below all others
PRESENT = 0.5  # a class with fewer examples is absent; noise makes numbers that are not whole


@dataclass(frozen=True, kw_only=True)
class FedCGS(Method):
    """Linear head from the means and the covariance of all nodes' features."""

    title: ClassVar[str] = "FedCGS"
    paper: ClassVar[str] = "Guan et al., AAAI 2025"
    query_names: ClassVar[tuple[str, ...]] = ("sum_features",)
    total_steps: ClassVar[int] = 1
    initial_training: ClassVar[None] = None
    trains_models: ClassVar[bool] = False
    one_round: ClassVar[bool] = True
    server_only_options: ClassVar[tuple[str, ...]] = ("covariance", "shrinkage")

    covariance: Literal["global", "within"] = "global"
    """Covariance of the features around their global mean, as in the paper, or around the mean of their class
    (linear discriminant analysis)."""
    shrinkage: Annotated[float, Interval(ge=0, le=1), "0 to 1"] = 0.0
    """Share of the covariance that is replaced by a multiple of the identity with the same trace. Noise of a
    privacy mechanism needs a larger one."""
    clip: PositiveOrInf = math.inf
    """Largest root mean square of an example's features; longer vectors are scaled down. inf, as in the
    paper: none, and no privacy mechanism can protect the sums. 1 changes nothing with features.normalize =
    "example".
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        require_clip(self.clip)

    def needs(self) -> Needs:
        return Needs(vectors=True, single_label=True)

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        yield Query(
            self.sum_features,
            releases={"moments": sums_kind(self.clip)},
            times=1,
            depends_on_records=("moments",),
            sums={"moments": "sum"},
            details=QueryDetails(
                constant=True,
                postprocess=in_float32,
                width=self.layout(setting.task.classes).size(setting.shape),
            ),
        )

    # --- at a node --------------------------------------------------------------------------------------

    def sum_features(self, node: NodeView) -> Tensors:
        """Return N_i^j, A_i^j and B_i in one vector, ``(M,)``."""
        layout = self.layout(node.task.classes)
        return {"moments": layout.compute(node.data.inputs, node.data.targets)}

    def layout(self, classes: int) -> FeatureSums:
        """Return the layout of the released vector."""
        return FeatureSums(classes, "pooled", self.clip)

    # --- at the server ----------------------------------------------------------------------------------

    def planned_queries(self, public: PublicData | None, seed: int) -> Sequence[QueryCall]:
        return (QueryCall("sum_features"),)

    def init_state(self, server: Server) -> Any:
        """Return an empty state: the student is all that the method makes.

        Raises:
            ArgumentError: the student is no linear layer.
        """
        linear_layer(server.student, server.shape[0])
        return super().init_state(server)

    def step(self, server: Server, state: Any, t: int) -> Mapping[str, float]:
        """Add up the sums of all nodes, and set the student's weights."""
        moments = server.query("sum_features")["moments"].double().sum(0)  # over nodes i  (M,)
        N, A, B = self.layout(server.task.classes).read(moments, server.shape[0])  # N^j, A^j and B
        W, b = self.compute_head(N, A, B)
        layer = linear_layer(server.student, server.shape[0])
        with torch.no_grad():
            layer.weight.copy_(W)
            layer.bias.copy_(b)
        return {}

    def compute_head(
        self, N_j: torch.Tensor, A: torch.Tensor, B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights ``(C, F)`` and bias ``(C,)`` of the Gaussian naive Bayes head.

        Args:
            N_j: number of examples of each class, ``(C,)``.
            A: sum of the features of each class, ``(C, F)``.
            B: sum of f f^T over all examples, ``(F, F)``.
        """
        is_present = N_j >= PRESENT
        N_j = N_j.clamp_min(1)
        N = (N_j * is_present).sum().clamp_min(2)
        mu_j = A / N_j.unsqueeze(1)  # means of the classes  (C, F)
        if self.covariance == "global":
            mu = A.sum(0) / N
            Sigma = (B - N * torch.outer(mu, mu)) / (N - 1)
        else:
            Sigma = (B - (N_j * is_present * mu_j.T) @ mu_j) / N
        W = mu_j @ invert_covariance(Sigma, self.shrinkage)
        b = (N_j / N).log() - (W * mu_j).sum(1) / 2
        return W * is_present.unsqueeze(1), torch.where(is_present, b, ABSENT)


def invert_covariance(Sigma: torch.Tensor, shrinkage: float) -> torch.Tensor:
    """Return the inverse of a shrunk covariance ``(F, F)``; of a singular one, the pseudo-inverse.

    Noise can make eigenvalues negative, which are taken as 0.

    >>> invert_covariance(torch.diag(torch.tensor([4.0, 0.0])).double(), 0.0).diag()
    tensor([0.2500, 0.0000], dtype=torch.float64)
    >>> invert_covariance(torch.diag(torch.tensor([4.0, 0.0])).double(), 0.5).diag()
    tensor([0.3333, 1.0000], dtype=torch.float64)
    """
    values, vectors = torch.linalg.eigh(Sigma)
    values = values.clamp_min(0)
    values = (1 - shrinkage) * values + shrinkage * values.mean()
    # Sums in float32 leave rounding errors of this size in directions without variance.
    smallest = len(values) * torch.finfo(torch.float32).eps * values.max()
    inverse = torch.where(values > smallest, 1 / values, 0)
    inverted: torch.Tensor = (vectors * inverse) @ vectors.T
    return inverted


def linear_layer(student: nn.Module, features: int) -> nn.Linear:
    """Return the one layer of a student that is linear in its inputs, of so many features.

    Raises:
        ArgumentError: it has other parameters, or no bias.
    """
    layers = [module for module in student.modules() if isinstance(module, nn.Linear)]
    own = {id(parameter) for layer in layers for parameter in (layer.weight, layer.bias)}
    is_linear = len(layers) == 1 and layers[0].in_features == features
    if not is_linear or own != {id(parameter) for parameter in student.parameters()}:
        raise ArgumentError(
            "student.model", type(student).__name__, "linear, as the head is computed in closed form"
        )
    return layers[0]
