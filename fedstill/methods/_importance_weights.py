"""Importance weights of the nodes for each input: pi_k(x), FedIOD Eq. 8 or FedGO's, and their queries.

FedGO: Jang, Park, Lee, "Provably Near-Optimal Federated Ensemble Distillation with Negligible Overhead", ICML
2025.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fedstill.methods import ArgumentError, LabelCountQuery, Node, NodeGroup, Responses, Server, Tensors
from fedstill.methods._critics import CriticOptions, generator_gan_loss
from fedstill.methods._label_maps import LABEL_MAPS
from fedstill.methods._public_data import LogitEnsembleMethod
from fedstill.methods._student import StudentOptions
from fedstill.protocol.payload_kinds import CRITIC, INPUTS, LOGITS, PayloadKind
from fedstill.protocol.queries import NodeSetting, query
from fedstill.protocol.secure_aggregation import SumWeighting
from fedstill.tasks import Task


def critic_odds(d: torch.Tensor) -> torch.Tensor:
    """Return each critic's odds that an image is real, ``(K, B, h, w)`` to ``(K, B)``, up to a common factor.

    An optimal critic has odds p_k(x) / p_G(x) (Goodfellow et al. 2014), and p_G(x) is the same for all nodes.
    Multiplied by n_k and normalized over nodes, they are the probability that x came from node k (FedGO).
    Patches are combined by their geometric mean.

    >>> critic_odds(torch.tensor([[[[0.0]]], [[[-1.0]]]])).flatten()  # d is high for generated inputs
    tensor([0.3679, 1.0000])
    """
    log_odds = -d.flatten(2).mean(2)
    return (log_odds - log_odds.amax(0)).exp()


@dataclass(frozen=True, kw_only=True)
class ImportanceWeightingMethod(LabelCountQuery, LogitEnsembleMethod, CriticOptions, StudentOptions):
    """Base class of FedIOD: label counts and, if needed, critics weight the nodes' responses."""

    importance: Literal["counts", "fakeness", "realness", "odds", "size"] = "counts"
    """Importance weight of a node for an input (pi_k(x), Eq. 8). counts: by class counts alone (published
    code). fakeness: times D_k(x)/E D_k(x') (as printed). realness: times the same ratio of 1 - D_k. odds:
    data size times D_k's odds that x is the node's own, with ensemble = probs (FedGO). size: data size alone
    (Table 6, three stars).
    """
    student_inputs: Literal["remembered", "fresh"] = "remembered"
    """Inputs of the student: remembered queries, or (published code) a fresh query for each step."""
    gan_weights: Literal["size", "average", "expertise"] = "size"
    """Weights of the critics: by data size (pi_k), equal, or by which node holds the classes that x shows (in
    pretraining by data size).
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.importance == "odds" and self.gan_form == "eq2":
            allowed = "bce where importance = odds: what else critics learn says nothing of odds"
            raise ArgumentError("method.gan_form", self.gan_form, allowed)

    @property
    def uses_critics(self) -> bool:
        """True if pi_k(x) needs the critics."""
        return self.compares_with_real or self.importance == "odds"

    @property
    def compares_with_real(self) -> bool:
        """True if pi_k(x) compares the critic's values of x with those of the node's own data."""
        return self.importance in ("fakeness", "realness")

    @property
    def has_critics(self) -> bool:
        return self.gan > 0 or self.uses_critics

    # --- at the nodes -----------------------------------------------------------------------------------

    @property
    def weighting_payload_kinds(self) -> Mapping[str, PayloadKind]:
        """Payload kinds of the tensors that pi_k(x) needs."""
        return {
            **({"critic": CRITIC} if self.uses_critics else {}),
            **({"critic_real": CRITIC} if self.compares_with_real else {}),
        }

    def sum_weightings(self, setting: NodeSetting) -> Mapping[str, SumWeighting]:
        """Return the weighting of the summed logits, as in Eq. 9: by class counts or by size.

        Raises:
            ArgumentError: options that compare nodes with each other.
        """
        summed = self.logit_sum_weighting("size" if self.importance == "size" else "counts")
        if self.uses_critics:
            allowed = "counts or size where link.secure_aggregation: others compare the nodes' critics"
            raise ArgumentError("method.importance", self.importance, allowed)
        if self.make_critics(setting).compares_images:
            allowed = "false for images made from label maps: who owns which map is each node's own"
            raise ArgumentError("link.secure_aggregation", True, allowed)
        return summed

    def sample_real_inputs(self, nodes: NodeGroup, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return ``known``, a sample of each node's own inputs ``(G, B, ...)``, if pi_k(x) needs it."""
        if not self.compares_with_real:
            return {}
        return {"known": self.make_critics(nodes.setting).sample_real(nodes, nodes.query_number, x.shape[1])}

    def mean_critic_output_on_real(
        self, nodes: NodeGroup, x: torch.Tensor, known: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Return E D_k(x'_k), (G,), if pi_k(x) needs it."""
        if not self.compares_with_real:
            return {}
        own = self.sample_real_inputs(nodes, x)["known"] if known is None else known
        real = nodes.module("critic")(own)
        return {"critic_real": real.sigmoid().flatten(1).mean(1)}

    @query(
        sends=lambda self, setting: {
            "x": INPUTS,
            **({"maps": LABEL_MAPS} if self.uses_critics and self.make_critics(setting).judges_pairs else {}),
        },
        releases=lambda self, setting: {"logits": LOGITS, **self.weighting_payload_kinds},
        times=lambda self, setting: self.steps,
        rows=lambda self, setting: self.student_steps * self.batch,
        depends_on_records=lambda self, setting: ("critic_real",) if self.compares_with_real else (),
        when=lambda self, setting: self.student_inputs == "fresh",
        sums=lambda self, setting: self.sum_weightings(setting),
    )
    def predict(self, nodes: NodeGroup, x: torch.Tensor, maps: torch.Tensor | None = None) -> Tensors:
        """Return z_k = T_k(x), and the critic's values if pi_k(x) needs them; nothing is trained (published
        code)."""
        logits = nodes.module("model")(nodes.setting.task.observe(x))
        return {"logits": logits, **(self.critic_outputs(nodes, x, maps) if self.uses_critics else {})}

    def critic_outputs(self, nodes: NodeGroup, x: torch.Tensor, maps: torch.Tensor | None = None) -> Tensors:
        """Return the critics' values that pi_k(x) needs."""
        return {
            "critic": self.make_critics(nodes.setting).evaluate(nodes, x, maps),
            **self.mean_critic_output_on_real(nodes, x),
        }

    def preview_responses(
        self, nodes: Sequence[Node], x: torch.Tensor, z: torch.Tensor, setting: NodeSetting
    ) -> Tensors:
        """Return the response of :meth:`predict` to model inputs without known maps."""
        logits = {"logits": z}
        if setting.task.condition_channels or not self.uses_critics:
            return logits
        outputs = [
            self.critic_outputs(NodeGroup([node]).set_query(setting), x.unsqueeze(0)) for node in nodes
        ]
        return logits | {name: torch.cat([response[name] for response in outputs]) for name in outputs[0]}

    # --- at the server ----------------------------------------------------------------------------------

    def weights(self, server: Server, state: Any, responses: Responses) -> torch.Tensor:
        """Return pi_k(x), ``(K, B or 1, classes)``, summing to 1 over the nodes."""
        histogram = state.histogram.select(responses.nodes)
        counts = histogram.counts  # (K, classes)
        if self.importance == "size":
            return server.task.importance_weights(histogram.sizes.unsqueeze(1).expand_as(counts))
        if not self.uses_critics or "critic" not in responses.tensors:  # no map is known of what was asked
            return server.task.importance_weights(counts)
        if self.importance == "odds":
            by_size = histogram.sizes.unsqueeze(1).expand_as(counts)
            return server.task.importance_weights(by_size, critic_odds(responses["critic"].detach()))
        fake = responses["critic"].detach().sigmoid().flatten(2).mean(2)  # D_k(x) (K, B)
        real = responses["critic_real"].unsqueeze(1)  # E D_k(x'_k) (K, 1)
        if self.importance == "realness":
            fake, real = 1 - fake, 1 - real
        return server.task.importance_weights(counts, fake / real.clamp_min(1e-6))

    def ensemble_responses(self, server: Server, state: Any, responses: Responses) -> torch.Tensor | None:
        if not state.histogram.names:
            raise ArgumentError("histogram", None, "known after the first step")
        z = responses["logits"]
        return server.task.ensemble(z, self.weights(server, state, responses), self.ensemble)

    def gan_loss(
        self, task: Task, responses: Responses, pi: torch.Tensor, z_bar: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return L_gan as G descends it (Eq. 2): the critics' losses, weighted over nodes by ``gan_weights``.

        Args:
            task: the task.
            responses: the nodes' responses.
            pi: shares of the data ``(K,)``.
            z_bar: ensembled logits ``(B, classes)``.
            weights: weights of the nodes in z_bar ``(K, B or 1, classes)``.
        """
        if not self.has_critics:
            return torch.zeros((), device=z_bar.device)
        each = generator_gan_loss(responses["critic"], self.gan_form)  # (K, B)
        if self.gan_weights == "expertise":
            return (task.expertise(z_bar.detach(), weights) * each).sum(0).mean()
        return self.weighted_gan_loss(each, pi)

    def weighted_gan_loss(self, each: torch.Tensor, pi: torch.Tensor) -> torch.Tensor:
        """Return L_gan of the critics' losses ``(K, B)``, by data size or, with averaged critics, equally."""
        return each.mean() if self.gan_weights == "average" else pi @ each.mean(1)
