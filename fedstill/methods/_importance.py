"""Which node is listened to about which input: pi_k(x), FedIOD Eq. 8 and what stands in its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fedstill.core.errors import ArgumentError
from fedstill.federation.contract import Answers
from fedstill.methods._critics import CriticOptions
from fedstill.methods._histogram import CountsLabels
from fedstill.methods._student import StudentOptions
from fedstill.methods.server import Server
from fedstill.node.group import Group
from fedstill.protocol.kinds import CRITIC, Kind


@dataclass(frozen=True, kw_only=True)
class Importance(CountsLabels, CriticOptions, StudentOptions):
    """Nodes tell label counts, and their critics how well they know an input, where that is wanted."""

    importance: Literal["counts", "fakeness", "realness", "size"] = "counts"
    """pi_k(x): Eq. 8 by class counts alone (published code), times D_k(x)/E D_k(x') (fakeness, as
    printed), times the same ratio of 1 - D_k (realness), or by data size only (Table 6, ***)."""

    @property
    def rated(self) -> bool:
        """Whether pi_k(x) needs the critics."""
        return self.importance in ("fakeness", "realness")

    @property
    def critical(self) -> bool:
        """Whether there are critics at all."""
        return self.gan > 0 or self.rated

    @property
    def ratings(self) -> Mapping[str, Kind]:
        """What pi_k(x) needs of an answer, by kind."""
        return {"critic": CRITIC, "critic_real": CRITIC} if self.rated else {}

    def rating(self, nodes: Group, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """At the nodes: E D_k(x'_k), (G,), if pi_k(x) needs it."""
        if not self.rated:
            return {}
        real = nodes.bench("critic")(self.critics(nodes.at).own(nodes, nodes.number, x.shape[1]))
        return {"critic_real": real.sigmoid().flatten(1).mean(1)}

    def weights(self, server: Server, state: Any, answers: Answers) -> torch.Tensor:
        """At the server: pi_k(x), ``(K, B or 1, classes)``, summing to 1 over the nodes."""
        told = state.histogram.of(answers.nodes)
        counts = told.counts  # (K, classes)
        if self.importance == "size":
            return server.task.importance(told.sizes.unsqueeze(1).expand_as(counts))
        if not self.rated or "critic" not in answers.tensors:  # no map is known of what was asked
            return server.task.importance(counts)
        fake = answers["critic"].detach().sigmoid().flatten(2).mean(2)  # D_k(x) (K, B)
        real = answers["critic_real"].unsqueeze(1)  # E D_k(x'_k) (K, 1)
        if self.importance == "realness":
            fake, real = 1 - fake, 1 - real
        return server.task.importance(counts, fake / real.clamp_min(1e-6))

    def ensembled(self, server: Server, state: Any, answers: Answers) -> torch.Tensor | None:
        """A(z_1..z_K, x), Eq. 9, of any answers: ``(B, classes, ...)``."""
        if not state.histogram.names:
            raise ArgumentError("histogram", None, "known after the first step")
        return server.task.ensemble(answers["logits"], self.weights(server, state, answers), self.ensemble)
