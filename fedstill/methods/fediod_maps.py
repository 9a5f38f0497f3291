"""FedIOD for images that are generated from label maps: segmentation and reconstruction.

Gong et al., "Federated Learning via Input-Output Collaborative Distillation", AAAI 2024; as
:mod:`fedstill.methods.fediod`, but G generates x from label maps, D_k judges pairs of map and image, and
L_gan is complemented by the distance to the real image of the same map, computed at the node that owns it.

Beyond the paper: pretraining of generator and critics alone; a student that also learns the labels of the
maps, as in the published code for label maps (``lsl001006/asyndgan``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from fedstill.core.options import NonNegativeFloat, NonNegativeInt
from fedstill.methods import ArgumentError, Needs, NodeSetting, NodeView, Query, QueryDetails, Server, Tensors
from fedstill.methods._label_maps import DIFFERENCE, MapGenerator
from fedstill.methods.fediod import FedIOD, FedIODState
from fedstill.protocol.payload_kinds import CRITIC, INPUTS


@dataclass(frozen=True, kw_only=True)
class FedIODMaps(FedIOD):
    """FedIOD with the options of label maps."""

    title: ClassVar[str] = "FedIOD"  # the same method, of another input
    query_names: ClassVar[tuple[str, ...]] = (
        "send_label_maps",
        "count_labels",
        "predict",
        "predict_logits",
        "score_with_critic",
    )
    needs_float32: ClassVar[bool] = True  # benchmarks/README.md: 1 to 2 points of Dice

    pretrain: NonNegativeInt = 0
    """Initial steps of generator and critics alone."""
    map_loss: NonNegativeFloat = 0.0
    """Weight of the task's loss of the student on the labels of the map that an image is generated from. The
    published code has 1, and L_mimic at tau = 5 without the factor tau^2: here 25.
    """
    generator: MapGenerator = field(default_factory=MapGenerator)  # type: ignore[assignment]
    """The generator G."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pretrain and not (self.backpropagate and self.gan):
            allowed = "0 where critics do not teach the generator (gan = 0, backpropagate = false)"
            raise ArgumentError("method.pretrain", self.pretrain, allowed)

    @property
    def total_steps(self) -> int:
        return self.pretrain + self.steps

    def needs(self) -> Needs:
        return Needs(images=True, label_maps=True)

    def notes(self, setting: NodeSetting) -> tuple[str, ...]:
        return self.generator.notes(setting)

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        if self.generator.conditions == "nodes":
            yield self.generator.map_query()
        yield from super().queries(setting)
        if self.pretrain:
            compares = self.generator.compares_images(setting.task)
            difference = {"difference": DIFFERENCE} if compares else {}
            yield Query(
                self.score_with_critic,
                sends={"x": INPUTS, **self.generator.sends(setting.task, is_judged=True)},
                releases={"critic": CRITIC, **difference},
                differentiable=("x",),
                times=self.pretrain,
                rows=self.batch,
                depends_on_records=tuple(difference),
                trains=("critic",),
                stackable=True,
                details=QueryDetails(reads_values=compares),
            )

    # --- at a node --------------------------------------------------------------------------------------

    def score_with_critic(
        self,
        node: NodeView,
        x: torch.Tensor,
        maps: torch.Tensor | None = None,
        source: torch.Tensor | None = None,
    ) -> Tensors:
        """Return D_k(x) after a step, and the distance of x from the node's own images."""
        return {**self.train_critic(node, x, maps), **self.difference(node, x, source)}

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> FedIODState:
        state = super().init_state(server)
        state.student.map_loss = self.map_loss
        return state

    def step(self, server: Server, state: FedIODState, t: int) -> Mapping[str, float]:
        """Run a step of G and the critics alone, or a distillation step."""
        if t >= self.pretrain:
            return super().step(server, state, t)
        G = state.generator
        state.histogram.fetch(server)
        G.source.fetch(server)
        G.set_lr(t, self.total_steps)
        with server.compute.step(server.seed, "server", t):
            w = G.source.sample_batch(self.batch, "w", t)
            _, responses = self.query_teachers(server, state, "score_with_critic", w)
            sizes = state.histogram.select(responses.nodes).sizes
            each = self.critic.generator_loss(responses["critic"])  # (K, B)
            share = sizes / sizes.sum()
            losses = {"gan": each.mean() if self.gan_weights == "average" else share @ each.mean(1)}
            if "difference" in responses.tensors:
                losses["difference"] = responses["difference"].sum(0).mean()
            L_G = self.gan * losses["gan"] + losses.get("difference", 0.0)
        G.step(L_G)
        return {name: loss.item() for name, loss in losses.items()}
