"""FedIOD for images that are generated from label maps: segmentation and reconstruction.

Gong et al., "Federated Learning via Input-Output Collaborative Distillation", AAAI 2024; as
:mod:`fedstill.methods.fediod`, but G generates x from label maps, D_k judges pairs of map and image, and
L_gan is complemented by the distance to the real image of the same map, computed at the node that owns it.

Beyond the paper: pretraining of generator and critics alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedstill.core.options import NonNegativeInt
from fedstill.methods import ArgumentError, NodeGroup, Server, Tensors, cosine_lr, descend, query, set_lr
from fedstill.methods._critics import generator_gan_loss
from fedstill.methods._label_maps import MapGeneratorOptions
from fedstill.methods.fediod import FedIOD, FedIODState
from fedstill.protocol.payload_kinds import INPUTS


@dataclass(frozen=True, kw_only=True)
class FedIODMaps(MapGeneratorOptions, FedIOD):
    """FedIOD with the options of label maps."""

    title: ClassVar[str] = "FedIOD"  # the same method, of another input
    needs_float32: ClassVar[bool] = True  # benchmarks/README.md: 1 to 2 points of Dice

    pretrain: NonNegativeInt = 0
    """Initial steps of generator and critics alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pretrain and not (self.backpropagate and self.gan):
            allowed = "0 where critics do not teach the generator (gan = 0, backpropagate = false)"
            raise ArgumentError("method.pretrain", self.pretrain, allowed)

    @property
    def total_steps(self) -> int:
        return self.pretrain + self.steps

    @query(
        sends=lambda self, setting: {"x": INPUTS, **self.make_critics(setting).sends},
        releases=lambda self, setting: self.make_critics(setting).releases,
        differentiable=("x",),
        times=lambda self, setting: self.pretrain,
        rows=lambda self, setting: self.batch,
        depends_on_records=lambda self, setting: self.make_critics(setting).depends_on_records,
        trains=("critic",),
        when=lambda self, setting: self.pretrain > 0,
    )
    def score_with_critic(self, nodes: NodeGroup, x: torch.Tensor, **about: torch.Tensor) -> Tensors:
        """Return D_k(x) after a step, and the distance of x from the node's own image."""
        return self.make_critics(nodes.setting).train_and_score(nodes, nodes.query_number, x, **about)

    def step(self, server: Server, state: FedIODState, t: int) -> Mapping[str, float]:
        """Run a step of G and the critics alone, or a distillation step."""
        if t >= self.pretrain:
            return super().step(server, state, t)
        state.histogram.fetch(server)
        state.source.fetch(server)
        set_lr(state.adam, cosine_lr(t, self.total_steps, self.generator_lr, self.generator_lr_end))
        with server.compute.step(server.seed, "server", t):
            w = state.source.sample(self.batch, "w", t)
            _, responses = self.query_teachers(server, state, "score_with_critic", w)
            sizes = state.histogram.select(responses.nodes).sizes
            losses = {
                "gan": self.weighted_gan_loss(
                    generator_gan_loss(responses["critic"], self.gan_form), sizes / sizes.sum()
                )
            }
            if "difference" in responses.tensors:
                losses["difference"] = responses["difference"].sum(0).mean()
            L_G = self.gan * losses["gan"] + losses.get("difference", 0.0)
        descend(state.adam, L_G)
        return {name: loss.item() for name, loss in losses.items()}
