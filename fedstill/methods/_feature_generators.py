"""Shared parts of methods with a conditional feature generator: FedMD-CG, FedCG and FedGEN.

A model is an extractor F_i, which never leaves its node, and a head D_i. A generator G_i([z; y]) of features
is shared in place of the extractor. Symbols and equation numbers are those of FedMD-CG (Luo et al.,
"Privacy-Preserving Federated Learning with Consistency via Knowledge Distillation Using Conditional
Generator", arXiv:2409.06955), section 2.

Batch norm in generators: running statistics are averaged like parameters. A generator uses the batch's
statistics while it trains at a node, and the running ones everywhere else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge
from torch import nn
from torch.nn.utils import skip_init

from fedstill.core.compute import Compute
from fedstill.core.options import NonNegativeFloat, NonNegativeInt, PositiveInt
from fedstill.methods import LabelCountQuery, Needs, Server, seeded, torch_generator
from fedstill.methods._averaging import RoundsMethod
from fedstill.models import example_inputs
from fedstill.models.extractor_head import count_features, split_model
from fedstill.models.generators import FeatureGenerator, append_one_hot
from fedstill.models.module_utils import deep_copy, load_vector
from fedstill.node.node_group import NodeGroup, StackedModules, stack_tensors

Diversity = Literal["none", "div0", "div1", "div2"]


@dataclass(frozen=True, kw_only=True)
class FeatureGeneratorMethod(LabelCountQuery, RoundsMethod):
    """Base class of methods with a feature generator."""

    evaluated_model: ClassVar[Literal["virtual"]] = "virtual"

    noise: PositiveInt = 32
    """Values q in z, the generator's noise."""
    generator_width: PositiveInt = 128
    """Width of the generator's two hidden layers."""
    server_steps: NonNegativeInt = 50
    """Training steps of the server in each round."""
    server_batch: Annotated[int, Ge(2)] = 64
    """Generated examples in a batch of the server."""
    server_lr: NonNegativeFloat = 1e-3
    """Adam's learning rate at the server."""

    def needs(self) -> Needs:
        return Needs(trainable=True, same_architecture=True, split_models=True, single_label=True)

    def make_generator(self, model: nn.Module, inputs: torch.Tensor, classes: int) -> FeatureGenerator:
        """Return a generator of the features that ``model``'s extractor computes for such inputs."""
        return FeatureGenerator(*self.generator_sizes(model, inputs, classes))

    def generator_sizes(
        self, model: nn.Module, inputs: torch.Tensor, classes: int
    ) -> tuple[int, int, int, int]:
        """Return the sizes of such a generator: noise, classes, features and width."""
        parts = split_model(model, "the model")
        device = next(model.parameters()).device
        p = count_features(parts, inputs.to(device), "the model")
        return self.noise, classes, p, self.generator_width

    def init_generator(self, server: Server) -> nn.Module:
        """Return the untrained global generator G on the device."""
        with seeded(server.seed, "generator"):
            some = example_inputs(server.shape, server.task.form)
            G = self.make_generator(server.student, some, server.task.classes)
        return server.compute.to_device(G)


class GlobalGenerator:
    """Global generator G as a group of nodes received it, in evaluation mode.

    Args:
        method: the method.
        group: the nodes.
        generator: its parameters ``(G, P)``, equal for all nodes.
        counts: label counts of all nodes together ``(G, C)``, equal for all nodes.
        t: the round, which names the random streams. Before the first round G is untrained.
    """

    def __init__(
        self,
        method: FeatureGeneratorMethod,
        group: NodeGroup,
        generator: torch.Tensor,
        counts: torch.Tensor,
        t: int,
    ) -> None:
        node, self.classes, self.t = group.nodes[0], counts.shape[1], t
        sizes = method.generator_sizes(node.model, node.data.inputs[:2], self.classes)
        # skip_init: initial weights would come from torch's global generator, which forbids parallel nodes.
        G = skip_init(FeatureGenerator, *sizes, device=group.device)  # type: ignore[no-untyped-call]
        self._generator = G.eval().requires_grad_(False)
        load_vector(self._generator, generator[0])
        self._noise, self._counts = method.noise, counts[0].cpu()

    def sample_features(self, group: NodeGroup, y: torch.Tensor, *purpose: str | int) -> torch.Tensor:
        """Return G(z, y) for labels ``(G, B)``, z sampled by each node: ``(G, B, p)``, constant."""
        z = sample_noise(group, y.shape, self._noise, self.t, *purpose)
        with torch.no_grad():
            flat = self._generator(append_one_hot(z, y, self.classes).flatten(0, 1))
        f: torch.Tensor = flat.float().view(*y.shape, -1)
        return f

    def sample_labels(self, group: NodeGroup, shape: Sequence[int], *purpose: str | int) -> torch.Tensor:
        """Return labels y ~ p(y) sampled by each node: ``shape`` is (G, B)."""
        rows, batch = shape
        draws = [node.random_generator("y", self.t, *purpose) for node in group.nodes[:rows]]
        drawn = [torch.multinomial(self._counts, batch, replacement=True, generator=draw) for draw in draws]
        return stack_tensors(drawn).to(group.device)


def sample_noise(group: NodeGroup, shape: Sequence[int], noise: int, *purpose: str | int) -> torch.Tensor:
    """Return z ~ N(0, I) sampled by each of the first nodes: ``shape`` is (G, B), the result ``(G, B,
    noise)``."""
    rows, batch = shape
    draws = [node.random_generator("z", *purpose) for node in group.nodes[:rows]]
    return stack_tensors([torch.randn(batch, noise, generator=draw) for draw in draws]).to(group.device)


def sample_noise_and_labels(
    compute: Compute, n_y: torch.Tensor, batch: int, noise: int, seed: int, *purpose: str | int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return z ~ N(0, I) (batch, noise) and y ~ p(y) (batch,), with p(y) from the counts ``(K, C)`` summed
    over nodes."""
    draw = torch_generator(seed, "imagined", *purpose)
    z = torch.randn(batch, noise, generator=draw)
    y = torch.multinomial(n_y.sum(0).cpu(), batch, replacement=True, generator=draw)
    return z.to(compute.device), y.to(compute.device)


def stack_uploads(like: nn.Module, vectors: torch.Tensor) -> StackedModules:
    """Return networks like ``like`` with the parameters ``(K, P)`` of K nodes, in evaluation mode."""
    stacked = StackedModules([deep_copy(like) for _ in vectors])
    stacked.train(False)
    for module, vector in zip(stacked.modules, vectors, strict=True):
        load_vector(module, vector)
    return stacked


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
