"""FedPFT: nodes release Gaussian mixtures of their features, and the student trains on samples of them.

Beitollahi, Bie, Hemati, Brunswic, Li, Chen, Zhang: "Parametric Feature Transfer: One-shot Federated Learning
with Foundation Models", arXiv:2402.01862, 2024. Each client i fits a mixture g^{i,c} of Gaussians to its
features F^{i,c} of each class c. The server samples as many features from each mixture as it was fitted to,
and trains a classifier head h on all samples.

With one Gaussian for each class the nodes release its sufficient statistics, from which the server computes
mean and covariance: sums of bounded vectors are what noise of a privacy mechanism can protect. The paper adds
the same Gaussian noise to mean and covariance of features of length 1.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F

from fedstill.core.options import PositiveInt, PositiveOrInf
from fedstill.methods import (
    Method,
    Needs,
    NodeSetting,
    NodeView,
    PayloadKind,
    PublicData,
    Query,
    QueryCall,
    QueryDetails,
    Responses,
    Server,
    Tensors,
    torch_generator,
)
from fedstill.methods._feature_sums import (
    FeatureSums,
    bound_vectors,
    in_float32,
    require_clip,
    require_vectors,
    sums_kind,
)
from fedstill.methods._public_data import StudentTraining, distill, iterate_batches
from fedstill.protocol.payload_kinds import LABEL_COUNTS

FEATURE_MIXTURES = PayloadKind(
    "feature mixtures",
    "weights, means and covariances of Gaussian mixtures of a node's features of each class; of a class with "
    "few examples, their features themselves",
    opt_out="with one Gaussian (method.components 1) of features of a bounded length (method.clip) noise can "
    "protect its sums",
)
Covariance = Literal["diag", "spherical", "full"]


class Mixture(NamedTuple):
    """Mixture of G Gaussians; covariances are ``(G,)`` spherical, ``(G, F)`` diagonal or ``(G, F, F)``."""

    weights: torch.Tensor  # (G,)
    means: torch.Tensor  # (G, F)
    covariances: torch.Tensor

    def sample(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Return samples ``(count, F)``. A node's numbers may be of any sign; negative variances are 0."""
        weights = self.weights.clamp_min(0)
        weights = weights if weights.sum() > 0 else torch.ones_like(weights)
        g = torch.multinomial(weights, count, replacement=True, generator=generator)
        noise = torch.randn(count, self.means.shape[1], generator=generator).to(self.means)
        if self.covariances.ndim < 3:  # spherical or diagonal
            deviation = self.covariances.clamp_min(0).sqrt().view(len(weights), -1)  # (G, 1) or (G, F)
            return self.means[g] + deviation[g] * noise
        samples = self.means[g]
        for component, covariance in enumerate(self.covariances):
            values, vectors = torch.linalg.eigh(covariance)
            root = vectors * values.clamp_min(0).sqrt()  # root root^T is the covariance
            samples[g == component] += noise[g == component] @ root.T
        return samples


@dataclass
class FedPFTState:
    """Server state besides the student; without samples before the first step."""

    optimizer: torch.optim.Optimizer  # the student's
    features: torch.Tensor | None = None  # (N, F), samples of all mixtures
    labels: torch.Tensor | None = None  # (N,)


@dataclass(frozen=True, kw_only=True)
class FedPFT(Method):
    """Training of a head on samples of the nodes' Gaussian mixtures of features."""

    title: ClassVar[str] = "FedPFT"
    paper: ClassVar[str] = "Beitollahi et al., 2024"
    query_names: ClassVar[tuple[str, ...]] = ("sum_features", "fit_mixtures")
    unit: ClassVar[Literal["epoch"]] = "epoch"
    initial_training: ClassVar[None] = None
    trains_models: ClassVar[bool] = False
    one_round: ClassVar[bool] = True
    batch_options: ClassVar[tuple[str, ...]] = ("student.batch",)
    server_only_options: ClassVar[tuple[str, ...]] = ("samples", "student")

    components: PositiveInt = 1
    """Gaussians in the mixture of each class (at most one for each example of the class)."""
    covariance: Covariance = "diag"
    """Covariance of each Gaussian: one variance for each feature (diag), one for all features (spherical), or
    a whole matrix (full)."""
    clip: PositiveOrInf = math.inf
    """Largest root mean square of an example's features; longer vectors are scaled down. inf: none, and no
    privacy mechanism can protect the releases. 1 changes nothing with features.normalize = "example".
    """
    samples: PositiveInt = 50_000
    """Sampled features in all, at most: as many as there are examples, or a share of these that is the same
    for all nodes and classes."""

    student: StudentTraining = field(default_factory=lambda: StudentTraining(epochs=50))
    """The training of the student on the sampled features."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.student.require_epochs()
        require_clip(self.clip)

    @property
    def total_steps(self) -> int:
        return self.student.epochs

    def needs(self) -> Needs:
        return Needs(vectors=True, single_label=True)

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        if self.components == 1:
            yield Query(
                self.sum_features,
                releases={"moments": sums_kind(self.clip)},
                times=1,
                depends_on_records=("moments",),
                details=QueryDetails(
                    constant=True,
                    postprocess=in_float32,
                    width=self.layout(setting.task.classes).size(setting.shape),
                ),
            )
        else:
            mixture = dict.fromkeys(("weights", "means", "covariances"), FEATURE_MIXTURES)
            yield Query(
                self.fit_mixtures,
                releases={**mixture, "counts": LABEL_COUNTS},
                times=1,
                depends_on_records=(*mixture, "counts"),
                details=QueryDetails(constant=True),
            )

    # --- at a node --------------------------------------------------------------------------------------

    def sum_features(self, node: NodeView) -> Tensors:
        """Return the sufficient statistics of g^{i,c} of all classes, for one Gaussian, in one vector."""
        layout = self.layout(node.task.classes)
        return {"moments": layout.compute(node.data.inputs, node.data.targets)}

    def fit_mixtures(self, node: NodeView) -> Tensors:
        """Fit g^{i,c} to F^{i,c} by expectation maximization, for each class c.

        Returns:
            weights ``(C, G)``, means ``(C, G, F)``, covariances ``(C, G, ...)``, and counts ``(C,)``. A class
            without examples has zeros, and so have Gaussians above the number of examples.
        """
        x, R = bound_vectors(require_vectors(node.data.inputs), self.clip)
        y, classes = node.data.targets, node.task.classes
        each = [self.fit_mixture(R * x[y == c], node.random_generator("mixture", c)) for c in range(classes)]
        weights, means, covariances = (torch.stack(part).to(node.device) for part in zip(*each, strict=True))
        counts = node.task.counts(node.data)
        return {"weights": weights, "means": means, "covariances": covariances, "counts": counts}

    def fit_mixture(self, x: torch.Tensor, generator: torch.Generator) -> Mixture:
        """Return the mixture of features ``(n, F)`` of one class, with zeros for Gaussians above n."""
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.mixture import GaussianMixture

        size, (n, features) = self.components, x.shape
        shape = {"spherical": (size,), "diag": (size, features), "full": (size, features, features)}
        mixture = Mixture(torch.zeros(size), torch.zeros(size, features), torch.zeros(shape[self.covariance]))
        if n == 1:
            mixture.weights[0], mixture.means[0] = 1, x[0]
        if n < 2:
            return mixture
        seed = int(torch.randint(2**31, (), generator=generator))
        model = GaussianMixture(min(size, n), covariance_type=self.covariance, random_state=seed)
        with warnings.catch_warnings():  # a mixture after the largest number of iterations is one, too
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(x.cpu().numpy())
        for part, fitted in zip(mixture, (model.weights_, model.means_, model.covariances_), strict=True):
            part[: len(fitted)] = torch.as_tensor(fitted)
        return mixture

    def layout(self, classes: int) -> FeatureSums:
        """Return the layout of the released vector of sums."""
        return FeatureSums(classes, self.covariance, self.clip)

    # --- at the server ----------------------------------------------------------------------------------

    def planned_queries(self, public: PublicData | None, seed: int) -> Sequence[QueryCall]:
        return (QueryCall(self.query_name),)

    @property
    def query_name(self) -> str:
        """Name of the one query."""
        return "sum_features" if self.components == 1 else "fit_mixtures"

    def init_state(self, server: Server) -> FedPFTState:
        return FedPFTState(self.student.make_optimizer(server.student))

    def step(self, server: Server, state: FedPFTState, t: int) -> Mapping[str, float]:
        """Train h on all samples once, which are drawn in the first step."""
        if state.features is None or state.labels is None:
            responses = server.query(self.query_name)
            state.features, state.labels = self.sample_features(server, responses)
        self.student.set_lr(state.optimizer, t, self.total_steps)
        pairs = iterate_batches(
            state.features, state.labels, self.student.batch, server.seed, "features' order", t
        )
        student, compute = server.student.train(), server.compute
        loss = distill(student, state.optimizer, pairs, cross_entropy, compute, server.seed, "student", t)
        return {"student": loss}

    def sample_features(self, server: Server, responses: Responses) -> tuple[torch.Tensor, torch.Tensor]:
        """Return samples ``(N, F)`` of all g^{i,c}, in proportion to the sizes of F^{i,c}, and their classes
        ``(N,)``."""
        rows = range(len(responses.nodes))
        sizes = torch.stack([self.read_mixtures(server, responses, row)[0] for row in rows])  # (K, C)
        sizes = sizes.double().clamp_min(0)  # with noise
        wanted = (sizes * min(1.0, self.samples / sizes.sum().clamp_min(1).item())).round().long()
        features, labels = [torch.zeros(0, *server.shape)], []
        for row, name in enumerate(responses.nodes):  # one after another, as covariances may be large
            mixtures = self.read_mixtures(server, responses, row)[1]
            for c, (mixture, count) in enumerate(zip(mixtures, wanted[row].tolist(), strict=True)):
                if count:
                    generator = torch_generator(server.seed, "features", name, c)
                    features.append(mixture.sample(count, generator).float())
                    labels += [c] * count
        return torch.cat(features).to(server.device), torch.tensor(labels, device=server.device).long()

    def read_mixtures(
        self, server: Server, responses: Responses, row: int
    ) -> tuple[torch.Tensor, list[Mixture]]:
        """Return a node's numbers of examples ``(C,)`` and its mixture of each class."""
        response = {name: tensor[row].cpu() for name, tensor in responses.tensors.items()}
        if self.components > 1:
            parts = (response[name] for name in Mixture._fields)
            return response["counts"], [Mixture(*each) for each in zip(*parts, strict=True)]
        layout = self.layout(server.task.classes)
        counts, sums, products = layout.read(response["moments"], server.shape[0])
        return counts, [Mixture(*one_gaussian(*each)) for each in zip(counts, sums, products, strict=True)]


def one_gaussian(
    n: torch.Tensor, total: torch.Tensor, products: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return weight ``(1,)``, mean ``(1, F)`` and covariance ``(1, ...)`` of a Gaussian from its sufficient
    statistics: its number of examples, the sum of their features, and the sums of products of these.

    >>> weight, mean, variances = one_gaussian(*map(torch.tensor, (2.0, [4.0, 2.0], [10.0, 2.0])))
    >>> mean, variances
    (tensor([[2., 1.]]), tensor([[1., 0.]]))
    """
    n = n.clamp_min(1)  # with noise
    mean = total / n
    if products.ndim == 2:
        covariance = products / n - torch.outer(mean, mean)
    elif products.ndim == 1:
        covariance = products / n - mean.square()
    else:
        covariance = (products / n - mean.square().sum()) / len(mean)
    return torch.ones(1), mean.unsqueeze(0), covariance.unsqueeze(0)


def cross_entropy(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of logits ``(B, C)`` for each input, ``(B,)``."""
    return F.cross_entropy(z, y, reduction="none")
