"""Conditional feature generators, for FedMD-CG, FedCG and FedGEN.

A model is an extractor F_i, which never leaves its node, and a head D_i. A generator G_i([z; y]) of features
is shared in place of the extractor. Symbols and equation numbers are those of FedMD-CG (Luo et al.,
"Privacy-Preserving Federated Learning with Consistency via Knowledge Distillation Using Conditional
Generator", arXiv:2409.06955), section 2.

Batch norm in generators: running statistics are averaged like parameters. A generator uses the batch's
statistics while it trains at a node, and the running ones everywhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge
from torch import nn
from torch.nn.utils import skip_init

from fedstill.core.compute import Compute
from fedstill.core.options import CheckedOptions, NonNegativeFloat, NonNegativeInt, PositiveInt
from fedstill.methods import NodeView, Server, seeded, torch_generator
from fedstill.models import example_inputs
from fedstill.models.extractor_head import count_features, split_model
from fedstill.models.gan import FeatureGenerator, append_one_hot
from fedstill.models.module_utils import deep_copy, load_vector
from fedstill.node.stacked_modules import StackedModules
from fedstill.tasks import Task

Divergence = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # student, teacher (..., C) to (...)
Diversity = Literal["none", "div0", "div1", "div2"]
CONSISTENCY = 512  # examples on which the consistency loss is measured, the same each round


@dataclass(frozen=True, kw_only=True)
class FeatureGeneratorOptions(CheckedOptions):
    """Options of a generator of features from noise z and a label y."""

    section: ClassVar[str] = "method.generator"

    noise: PositiveInt = 32
    """Values q in z, the generator's noise."""
    width: PositiveInt = 128
    """Width of the generator's two hidden layers."""

    def sizes(self, model: nn.Module, inputs: torch.Tensor, classes: int) -> tuple[int, int, int, int]:
        """Return noise, classes, features and width of a generator of the features that ``model``'s extractor
        computes for such inputs."""
        parts = split_model(model, "the model")
        p = count_features(parts, inputs.to(next(model.parameters()).device), "the model")
        return self.noise, classes, p, self.width

    def make(self, model: nn.Module, inputs: torch.Tensor, classes: int) -> FeatureGenerator:
        """Return a generator of such features."""
        return FeatureGenerator(*self.sizes(model, inputs, classes))

    def make_global(self, server: Server) -> nn.Module:
        """Return the untrained global generator G on the device."""
        with seeded(server.seed, "generator"):
            some = example_inputs(server.shape, server.task.form)
            G = self.make(server.student, some, server.task.classes)
        return server.compute.to_device(G)


@dataclass(frozen=True, kw_only=True)
class ServerTraining(CheckedOptions):
    """Options of the server's training on generated features, in each round."""

    section: ClassVar[str] = "method.server"

    steps: NonNegativeInt = 50
    """Training steps of the server in each round."""
    batch: Annotated[int, Ge(2)] = 64
    """Generated examples in a batch of the server."""
    lr: NonNegativeFloat = 1e-3
    """Adam's learning rate at the server."""


class GlobalGenerator:
    """Global generator G as a node received it, in evaluation mode.

    Args:
        options: its options.
        node: the node.
        generator: its parameters ``(P,)``.
        counts: label counts of all nodes together ``(C,)``, which define p(y).
        t: the round, which names the random streams. Before the first round G is untrained.
    """

    def __init__(
        self,
        options: FeatureGeneratorOptions,
        node: NodeView,
        generator: torch.Tensor,
        counts: torch.Tensor,
        t: int,
    ) -> None:
        self.t, self.noise, self.classes = t, options.noise, len(counts)
        inputs = example_inputs(node.input_shape, node.task.form)

        def build() -> nn.Module:
            sizes = options.sizes(node.model.structure, inputs, self.classes)
            # Initial weights would come from torch's global generator, which forbids parallel nodes.
            G: nn.Module = skip_init(FeatureGenerator, *sizes, device=node.device)  # type: ignore[no-untyped-call]
            load_vector(G, generator)
            return G.eval().requires_grad_(False)

        self._generator, self._counts = node.outside(build), counts.cpu()

    def sample_features(self, node: NodeView, y: torch.Tensor, *purpose: str | int) -> torch.Tensor:
        """Return G(z, y) for labels ``(B,)``, z sampled by the node: ``(B, p)``, constant."""
        z = sample_noise(node, len(y), self.noise, self.t, *purpose)

        def run(c: torch.Tensor) -> torch.Tensor:  # all nodes have the same G
            with torch.no_grad():
                f: torch.Tensor = self._generator(c.flatten(0, 1)).float()
            return f.view(*c.shape[:2], -1)

        features: torch.Tensor = node.on_group(run, append_one_hot(z, y, self.classes))
        return features

    def sample_labels(self, node: NodeView, count: int, *purpose: str | int) -> torch.Tensor:
        """Return labels y ~ p(y) sampled by the node: ``(count,)``."""
        return node.random(
            lambda generator: torch.multinomial(self._counts, count, replacement=True, generator=generator),
            "y",
            self.t,
            *purpose,
        )


def sample_noise(node: NodeView, count: int, noise: int, *purpose: str | int) -> torch.Tensor:
    """Return z ~ N(0, I) sampled by the node: ``(count, noise)``."""
    return node.random(lambda generator: torch.randn(count, noise, generator=generator), "z", *purpose)


# --- at the server ------------------------------------------------------------------------------------------


def sample_noise_and_labels(
    compute: Compute, n_y: torch.Tensor, batch: int, noise: int, seed: int, *purpose: str | int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return z ~ N(0, I) (batch, noise) and y ~ p(y) (batch,), with p(y) from the counts ``(K, C)`` summed
    over nodes. All classes are equally likely if all counts are 0, as noise can make them."""
    draw = torch_generator(seed, "imagined", *purpose)
    z = torch.randn(batch, noise, generator=draw)
    total = n_y.sum(0).cpu()
    p = total if total.any() else torch.ones_like(total)
    y = torch.multinomial(p, batch, replacement=True, generator=draw)
    return z.to(compute.device), y.to(compute.device)


def stack_uploads(like: nn.Module, vectors: torch.Tensor) -> StackedModules:
    """Return networks like ``like`` with the parameters ``(K, P)`` of K nodes, in evaluation mode."""
    stacked = StackedModules([deep_copy(like) for _ in vectors])
    stacked.train(False)
    for module, vector in zip(stacked.modules, vectors, strict=True):
        load_vector(module, vector)
    return stacked


class UploadedGenerators:
    """The generators and heads of K nodes, evaluated as one: ``(K, B, ...)``."""

    def __init__(self, G: nn.Module, D: nn.Module, generators: torch.Tensor, heads: torch.Tensor) -> None:
        self.generators, self.heads = stack_uploads(G, generators), stack_uploads(D, heads)

    def features(self, c: torch.Tensor) -> torch.Tensor:
        """Return G_i(z, y): ``c = [z; y]`` (B, q + C) to ``(K, B, p)``."""
        return self.generators(c.expand(len(self.generators.modules), *c.shape))


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return ``KL(softmax(p) || softmax(q))`` of logits ``(..., C)``: ``(...)``, in nats.

    >>> round(kl(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.0])).item(), 4)
    0.1201
    """
    log_p, log_q = p.float().log_softmax(-1), q.float().log_softmax(-1)  # small values have many digits
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def crossed_distillation_loss(
    uploads: UploadedGenerators,
    G: nn.Module,
    D: nn.Module,
    c: torch.Tensor,
    tau: torch.Tensor,
    divergence: Divergence,
) -> torch.Tensor:
    """Return L_kl,1, L_kl,2 and L_kl,3 of Eq. 10 and 11, means over a batch: ``(3,)``.

    Gradients flow to G and D only: in L_kl,2 to D, in L_kl,3 to G.

    Args:
        uploads: the nodes' generators and heads.
        G, D: the averages.
        c: ``[z; y]`` (B, q + C).
        tau: tau_{i, y} of each example's label ``(K, B)``.
        divergence: function of a student's and a teacher's logits.
    """
    with torch.no_grad():
        f_i = uploads.features(c)  # G_i(z, y)  (K, B, p)
        d_i = uploads.heads(f_i)  # D_i(G_i(z, y))  (K, B, C)
    f = G(c)  # G(z, y)  (B, p)
    d_g = D(f).expand_as(d_i)  # D(G(z, y))
    d_ig = D(f_i.flatten(0, 1)).view_as(d_i)  # D(G_i(z, y))
    d_gi = uploads.heads(f.expand_as(f_i))  # D_i(G(z, y))
    return torch.stack([(tau * divergence(d, d_i)).sum(0).mean() for d in (d_g, d_ig, d_gi)])


def ensemble_distillation_loss(
    uploads: UploadedGenerators, G: nn.Module, D: nn.Module, c: torch.Tensor, pi: torch.Tensor
) -> torch.Tensor:
    """Return FedCG's server loss: KL from the mean of D_i(G_i), weighted by pi ``(K,)``, to D(G)."""
    with torch.no_grad():
        d_i = uploads.heads(uploads.features(c))  # (K, B, C)
        teacher = torch.tensordot(pi, d_i, 1)  # (B, C)
    return kl(teacher, D(G(c))).mean()


def consistency_loss(
    compute: Compute, task: Task, uploads: UploadedGenerators, n_y: torch.Tensor, noise: int, seed: int
) -> float:
    """Return CE(rho(D_i(G_i(z, y))), y), nodes weighted by their numbers of examples of y (Fig. 5)."""
    z, y = sample_noise_and_labels(compute, n_y, CONSISTENCY, noise, seed, "consistency")
    tau = task.importance_weights(n_y).squeeze(1)[:, y]  # (K, B)
    with torch.no_grad(), compute.autocast():
        log_p = uploads.heads(uploads.features(append_one_hot(z, y, task.classes)))
        log_p = log_p.log_softmax(-1)  # (K, B, C)
    correct = log_p.gather(2, y.expand(len(n_y), -1).unsqueeze(2)).squeeze(2)  # (K, B)
    return -(tau * correct).sum(0).mean().item()


def diversity_loss(form: Diversity, f: torch.Tensor, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return ``exp(-mean_jk ||f_j - f_k|| w_jk)`` over a batch: a loss that is 1 if all outputs are equal.

    ``w_jk`` is ||z_j - z_k|| in div0 (Eq. 7), ||[z_j; y_j] - [z_k; y_k]|| in div1 (L_div^1), and ||z_j -
    z_k|| e^{|y_j - y_k|_1} in div2 (Eq. 8). Distances of outputs and noise are root *means* of squares: as
    printed, the exponent grows with the number of values, and with 400 features no gradient is left.

    Args:
        form: the variant; none gives 0.
        f: outputs ``(..., B, p)``.
        z: their noise ``(..., B, q)``.
        y: one-hot labels ``(..., B, C)``.

    Returns:
        ``(...)``.

    >>> f, z = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [2.0]])
    >>> round(diversity_loss("div0", f, z, torch.eye(2)).item(), 4)  # e^(-4/4)
    0.3679
    """
    if form == "none":
        return f.new_zeros(f.shape[:-2])
    apart = torch.cdist(z, z)
    if form == "div1":
        labeled = torch.cat([z, y], -1)
        apart = torch.cdist(labeled, labeled)
    elif form == "div2":
        apart = apart * torch.exp(torch.cdist(y, y, p=1.0))  # e^2 for two labels, 1 for one
    scale = 1 / math.sqrt(f.shape[-1] * z.shape[-1])
    # Centered, as distances of large, nearly equal vectors would be rounding noise.
    f = f - f.mean(-2, keepdim=True)
    return torch.exp(-scale * (torch.cdist(f, f) * apart).mean((-2, -1)))
