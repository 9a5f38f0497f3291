"""How sites of FL-MRCM learn latent features like the target's: against a network that tells these apart.

Symbols are those of Guo et al., see :mod:`fedstill.methods.fl_mrcm`: encoders E^k, latent features z^k and
z_t, domain identifiers C^k.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from fedstill.core.errors import ModelError
from fedstill.core.seeds import seeded
from fedstill.models.split import EXTRACTOR, split
from fedstill.node.group import Group, stack
from fedstill.node.node import MakeOptimiser, Node
from fedstill.node.training import Work

ENCODER = f"{EXTRACTOR}.encoder"


def latent(model: nn.Module) -> str:
    """The part of a network that gives its latent features: its encoder, or its extractor if it has none."""
    return ENCODER if isinstance(getattr(model.extractor, "encoder", None), nn.Module) else EXTRACTOR


def coarse(z: torch.Tensor) -> torch.Tensor:
    """Latent features as vectors: maps ``(..., B, C, h, w)`` averaged over quarters, ``(..., B, 4 C)``.

    Vectors ``(..., B, p)`` stay. Any number of axes before B, one or none.

    >>> coarse(torch.arange(16.0).view(1, 1, 4, 4))
    tensor([[ 2.5000,  4.5000, 10.5000, 12.5000]])
    """
    if z.ndim < 4:
        return z
    front = z.shape[:-3]
    return F.adaptive_avg_pool2d(z.reshape(-1, *z.shape[-3:]), 2).reshape(*front, -1)


def make_identifier(features: int, width: int) -> nn.Module:
    """C^k: features ``(B, p)`` to one value (B, 1), high where they look like the target's."""
    return nn.Sequential(nn.Linear(features, width), nn.LeakyReLU(0.2), nn.Linear(width, 1))


def give_identifiers(nodes: Sequence[Node], width: int, adam: MakeOptimiser) -> None:
    """A domain identifier C^k for each node, with its own first weights.

    Raises:
        ModelError: a network's latent features are neither maps nor vectors.
    """
    for node in nodes:
        model = split(node.model, node.name)
        with torch.no_grad():
            z = coarse(model.eval().get_submodule(latent(model))(node.data.inputs[:2]))
        if z.ndim != 2:
            found = tuple(z.shape[1:])
            raise ModelError(f"latent features of {node.name} are {found}: allowed is (C, h, w) or (p,)")
        with seeded(node.seed, node.name, "identifier"):
            identifier = make_identifier(z.shape[1], width)
        node.add("identifier", identifier, adam)


def aligned(nodes: Group, features: torch.Tensor, t: int, lambda_adv: float) -> Work:
    """A step at source sites: one of C^k, and one of the model on its loss + lambda_adv L_advE.

    C^k learns to be high on the target's features and low on the site's own; the encoder learns to make it
    high on these. Both are binary cross-entropies, the encoder's in its non-saturating form.

    Args:
        nodes: the sites.
        features: the target's ``(M, p)``, of which each step draws as many as a batch has examples.
        t: the round.
        lambda_adv: the weight.
    """
    task, smoothing, turns = nodes.at.task, nodes.at.local.smoothing, itertools.count()

    def work(group: Group, step: int, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        model, identifier, turn = group.bench("model"), group.bench("identifier"), next(turns)
        identifier.train(True)
        part, (active, batch) = latent(group.nodes[0].model), inputs.shape[:2]
        rows = [
            torch.randint(len(features), (batch,), generator=node.draw("target's", t, turn))
            for node in group.nodes[:active]
        ]
        z_t = features[stack(rows).to(features.device)]  # (G, B, p)
        z = coarse(model(inputs, part))  # z^k = E^k(x)
        L_C = (F.softplus(-identifier(z_t)) + F.softplus(identifier(z.detach()))).mean((1, 2)) / 2
        group.step("identifier", L_C)
        L_advE = F.softplus(-identifier(z)).mean((1, 2))
        losses: torch.Tensor = task.loss(model(inputs), targets, smoothing)
        group.step("model", losses + lambda_adv * L_advE)
        return losses

    return work
