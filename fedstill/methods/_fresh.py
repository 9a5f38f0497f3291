"""Questions about what a generator makes: for itself, for each of a student's steps, or to be looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedstill.core.errors import ArgumentError
from fedstill.federation.contract import Answers
from fedstill.methods._histogram import Tensors
from fedstill.methods._imagine import Imagines
from fedstill.methods._importance import Importance
from fedstill.methods._maps import LABEL_MAPS
from fedstill.methods._noise import Wish
from fedstill.methods._replay import Known
from fedstill.methods.server import Server
from fedstill.node.group import Group
from fedstill.node.node import Node
from fedstill.protocol.kinds import INPUTS, LOGITS
from fedstill.protocol.questions import NodeSetting, question


@dataclass(frozen=True, kw_only=True)
class AsksAfresh(Importance, Imagines):
    """The question of the published code: what nodes answer, and nothing is learned for it."""

    through: bool = True
    """Pull losses back through the nodes; false: they only answer, and G learns from S (and from what else
    is known without them), as models that have no gradients, or gates that withhold them, allow."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory < self.batch:
            raise ArgumentError("method.memory", self.memory, f"at least method.batch ({self.batch})")

    @question(
        sends=lambda self, at: {
            "x": INPUTS,
            **({"maps": LABEL_MAPS} if self.rated and self.critics(at).pairs else {}),
        },
        releases=lambda self, at: {"logits": LOGITS, **self.ratings},
        times=lambda self, at: self.steps,
        rows=lambda self, at: self.student_steps * self.batch,
        reads=lambda self, at: ("critic_real",) if self.rated else (),
        when=lambda self, at: self.student_inputs == "fresh",
    )
    def predict(self, nodes: Group, x: torch.Tensor, maps: torch.Tensor | None = None) -> Tensors:
        """z_k = T_k(x), and what pi_k(x) needs of the critic; nothing is trained."""
        answer = {"logits": nodes.bench("model")(nodes.at.task.observe(x))}
        if self.rated:
            answer.update({"critic": self.critics(nodes.at).look(nodes, x, maps), **self.rating(nodes, x)})
        return answer

    def look(self, nodes: Sequence[Node], x: torch.Tensor, at: NodeSetting) -> Tensors:
        """What :meth:`predict` would answer about inputs as models get them, and of which no map is known."""
        groups = [Group([node]).knowing(at) for node in nodes]
        plain = at.task.conditions or not self.rated
        answers = [
            {"logits": group.bench("model")(x.unsqueeze(0))} if plain else self.predict(group, x.unsqueeze(0))
            for group in groups
        ]
        return {name: torch.cat([answer[name] for answer in answers]) for name in answers[0]}

    def asked(self, server: Server, state: Any, question: str, w: Wish) -> tuple[torch.Tensor, Answers]:
        """x = G(w) and the nodes' answers about it."""
        x = state.generator(*w.told).float()  # (B, C, H, W)
        sent = w.sent(server.federation.questions[question])
        asked = x if self.through else x.detach()
        return x, server.ask(question, of=state.histogram.names, x=asked, **sent)

    def ask_afresh(self, server: Server, state: Any, t: int) -> list[Known]:
        """New inputs and their ensembled answers for all of this step's turns of S: one more question.

        G does not learn between the turns, so that one question serves them all.
        """
        wishes, batches = [], []
        for turn in range(self.student_steps):
            wishes.append(state.source.draw(self.batch, "fresh w", t, turn))
            with torch.no_grad(), server.compute.step(server.seed, "fresh", t, turn):
                batches.append(state.generator(*wishes[-1].told).float())  # (B, C, H, W)
        x, every = torch.cat(batches), [wish.maps for wish in wishes if wish.maps is not None]
        maps = torch.cat(every) if every else None
        sent = Wish((), maps).sent(server.federation.questions["predict"])
        with torch.no_grad():
            answers = server.ask("predict", of=state.histogram.names, x=x, **sent)
            weights = self.weights(server, state, answers)
            z = server.task.ensemble(answers["logits"], weights, self.ensemble)
        return Known(x, z, maps).parts(self.batch)
