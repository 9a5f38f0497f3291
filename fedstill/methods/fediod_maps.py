"""FedIOD where images are made from label maps: segmentation and reconstruction.

Gong et al., "Federated Learning via Input-Output Collaborative Distillation", AAAI 2024; as
:mod:`fedstill.methods.fediod`, but G makes x from label maps, D_k judges pairs of map and image, and L_gan is
helped by the distance to the real image of the same map, told by the node that owns it.

Beyond the paper: a start of generator and critics alone; S and G learn from the maps, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedstill.core.checked import NonNegativeFloat, NonNegativeInt
from fedstill.core.errors import ArgumentError
from fedstill.federation.contract import Answers
from fedstill.methods._critics import Critics
from fedstill.methods._gan import doubts
from fedstill.methods._histogram import Tensors
from fedstill.methods._maps import Maps, TellsMaps, notes
from fedstill.methods._noise import Wish
from fedstill.methods._replay import Known
from fedstill.methods.fediod import Distilling, FedIOD
from fedstill.methods.server import Server
from fedstill.models.conditional import ConditionalGenerator
from fedstill.node.group import Group
from fedstill.protocol.kinds import INPUTS
from fedstill.protocol.method import Needs
from fedstill.protocol.questions import NodeSetting, question
from fedstill.protocol.schedule import cosine, set_lr


@dataclass(frozen=True, kw_only=True)
class FedIODMaps(TellsMaps, FedIOD):
    """FedIOD's options, and those of label maps."""

    pretrain: NonNegativeInt = 0
    """Steps of generator and critics alone that come before."""
    obey: NonNegativeFloat = 0.0
    """Weight in the generator's loss of the task's own loss of the nodes' ensembled answers on the labels of
    x's map, so that x shows them what its map says; beyond the paper."""
    paired: NonNegativeFloat = 0.0
    """Weight of the task's own loss on x and the labels that its map gives, beside L_mimic; beyond the
    paper."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pretrain and not (self.through and self.gan):
            allowed = "0 where critics do not teach the generator (gan = 0, through = false)"
            raise ArgumentError("method.pretrain", self.pretrain, allowed)
        if self.paired and self.student_augment == "mixup":
            raise ArgumentError("method.paired", self.paired, "0 with mixup, as maps do not mix")

    def needs(self) -> Needs:
        """Inputs that a server can make, of label maps."""
        return Needs(images=True, maps=True)

    @property
    def turns(self) -> int:
        """Steps, those of generator and critics alone among them."""
        return self.pretrain + self.steps

    # --- at the nodes -----------------------------------------------------------------------------------

    def critics(self, at: NodeSetting) -> Critics:
        """D_k of the nodes, which see maps, too."""
        return at.once("critics", lambda: Critics(self, at, self.critical, self))

    @question(
        sends=lambda self, at: {"x": INPUTS, **self.critics(at).sends},
        releases=lambda self, at: self.critics(at).releases,
        differentiable=("x",),
        times=lambda self, at: self.pretrain,
        rows=lambda self, at: self.batch,
        reads=lambda self, at: self.critics(at).reads,
        trains=("critic",),
        when=lambda self, at: self.pretrain > 0,
    )
    def judge(self, nodes: Group, x: torch.Tensor, **about: torch.Tensor) -> Tensors:
        """What critics alone answer: D_k(x) after a step, and how far x is from the node's own."""
        return self.critics(nodes.at).judge(nodes, nodes.number, x, **about)

    def notes(self, at: NodeSetting) -> tuple[str, ...]:
        """What is switched off for want of something."""
        return notes(self, at)

    # --- at the server ----------------------------------------------------------------------------------

    def source(self, server: Server) -> Any:
        """Of what x is made: maps."""
        return Maps(self, server.setting)

    def generator(self, server: Server) -> nn.Module:
        """The 9-block ResNet."""
        conditions, channels = server.task.conditions, server.shape[0]
        return ConditionalGenerator(
            conditions, channels, self.generator_width, server.mean, server.std, noise=self.map_noise
        )

    def turn(self, server: Server, state: Distilling, t: int) -> Mapping[str, float]:
        """A step of G and the critics alone, or a distillation step."""
        if t >= self.pretrain:
            return super().turn(server, state, t)
        state.histogram.gather(server)
        state.source.gather(server.federation)
        set_lr(state.adam, cosine(t, self.turns, self.generator_lr, self.generator_lr_end))
        with server.compute.step(server.seed, "server", t):
            w = state.source.draw(self.batch, "w", t)
            _, answers = self.asked(server, state, "judge", w)
            sizes = state.histogram.of(answers.nodes).sizes
            losses = {"gan": sizes / sizes.sum() @ doubts(answers["critic"], self).mean(1)}
            if "difference" in answers.tensors:
                losses["difference"] = answers["difference"].sum(0).mean()
            L_G = self.gan * losses["gan"] + losses.get("difference", 0.0)
        state.adam.zero_grad()
        L_G.backward()  # type: ignore[no-untyped-call]
        state.adam.step()
        return {name: loss.item() for name, loss in losses.items()}

    def of_maps(
        self, server: Server, answers: Answers, w: Wish, x: torch.Tensor, z_bar: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """What x loses that is not what its maps say: beside real images, and in the nodes' eyes."""
        found: dict[str, torch.Tensor] = {}
        if "difference" in answers.tensors:  # told by the one node that owns each map
            found["difference"] = answers["difference"].sum(0).mean()
        if self.obey and w.maps is not None:
            labels = server.task.labels(w.maps, x)
            found["obey"] = server.task.loss(z_bar.unsqueeze(0), labels.unsqueeze(0))[0]
        return found

    def weighed(self, L_map: Mapping[str, torch.Tensor]) -> torch.Tensor | float:
        """These losses as G descends them."""
        return L_map.get("difference", 0.0) + self.obey * L_map.get("obey", 0.0)

    def student_loss(self, state: Distilling, known: Known) -> torch.Tensor:
        """L_mimic as S descends it (Eq. 10), and perhaps the task's own loss on the maps."""
        z_hat, loss = state.student.mimic(known)
        if self.paired and known.maps is not None:
            task = state.student.server.task
            labels = task.labels(known.maps, known.x)
            loss = loss + self.paired * task.loss(z_hat.unsqueeze(0), labels.unsqueeze(0))[0]
        return loss
