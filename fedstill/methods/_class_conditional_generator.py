"""Inputs that the nodes' models recognize as of a given class: what DENSE and Co-Boosting share.

A generator G is told a label y and makes x that the nodes' ensemble takes for y and the student does not yet;
the student learns from the ensemble's answers. Nodes are asked about each x; or, as published, they give
their models away once, and the server asks these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from fedstill.core.options import NonNegativeFloat, PositiveInt
from fedstill.methods import (
    ArgumentError,
    Needs,
    NodeGroup,
    Responses,
    Server,
    cosine_lr,
    descend,
    query,
    set_lr,
)
from fedstill.methods._generated_inputs import GeneratesFromLabels, GeneratesInputs
from fedstill.methods._student import LabeledBatch, Student
from fedstill.methods._teacher_queries import QueriesTeachers, evaluate_with_batch_norm
from fedstill.models.module_utils import deep_copy, load_vector
from fedstill.protocol.payload_kinds import PARAMETERS


@dataclass
class ClassConditionalState:
    """What changes from step to step."""

    source: Any  # of noise and labels
    generator: nn.Module  # G
    adam: torch.optim.Optimizer  # G's
    student: Student  # with what it remembers
    models: dict[str, nn.Module]  # the nodes', where they are given away
    received_models: bool = False  # whether they have been


@dataclass(frozen=True, kw_only=True)
class ClassConditionalGeneration(QueriesTeachers, GeneratesFromLabels, GeneratesInputs, ABC):
    """What DENSE and Co-Boosting share: inputs that all nodes together recognize."""

    length_options: ClassVar[tuple[str, ...]] = ("steps", "generator_steps")

    generator_steps: PositiveInt = 1
    """Steps of G on a batch's noise and labels, each with a query to all nodes (published: 30, each time
    with a new G)."""
    adversary: NonNegativeFloat = 1.0
    """Weight of the loss that seeks what the student does not know yet."""
    models: Literal["asked", "uploaded"] = "asked"
    """Nodes are asked about each x, and give answers; or they give their models to the server once
    (published), which a policy of outputs only refuses."""

    def needs(self) -> Needs:
        return Needs(generates_inputs=True, single_label=True, student_architecture=self.models == "uploaded")

    @property
    def queries_nodes(self) -> bool:
        return self.models == "asked"

    @property
    def queries_per_step(self) -> int:
        """Queries to all nodes in a step."""
        return self.generator_steps

    # --- what a method says -----------------------------------------------------------------------------

    @abstractmethod
    def ensemble_logits(
        self, server: Server, state: Any, z: torch.Tensor, nodes: Sequence[str]
    ) -> torch.Tensor:
        """The ensemble's answers ``(B, C)`` of some nodes' ``(K, B, C)``."""

    @abstractmethod
    def recognition_loss(self, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """What G loses where the ensemble ``(B, C)`` does not take its inputs for y ``(B,)``."""

    @abstractmethod
    def disagreement_reward(self, apart: torch.Tensor, z: torch.Tensor, z_S: torch.Tensor) -> torch.Tensor:
        """What G wins where ensemble and student ``(B, C)`` are so far apart ``(B,)``."""

    def replay_batch(
        self, server: Server, state: Any, x: torch.Tensor, z: torch.Tensor, y: torch.Tensor
    ) -> LabeledBatch:
        """What the student remembers of a batch: x and the ensemble's answers, unless a method does more."""
        return x.detach(), z.detach()

    # --- at the nodes -----------------------------------------------------------------------------------

    @query(
        releases={"parameters": PARAMETERS},
        times=1,
        depends_on_records=(),
        ragged=("parameters",),
        when=lambda self, setting: self.models == "uploaded",
    )
    def upload_model(self, nodes: NodeGroup) -> Mapping[str, Any]:
        """Each node's model."""
        return {"parameters": list(nodes.parameter_vectors("model"))}

    # --- at the server ----------------------------------------------------------------------------------

    def base_state(self, server: Server) -> dict[str, Any]:
        """All that :class:`Recognizing` holds, by name."""
        G, adam = self.init_generator(server)
        models = self.empty_models(server) if self.models == "uploaded" else {}
        student = Student(self, server)
        return {
            "source": self.source(server),
            "generator": G,
            "adam": adam,
            "student": student,
            "models": models,
        }

    def empty_models(self, server: Server) -> dict[str, nn.Module]:
        """A network of each node's architecture, for its parameters to be put into."""
        models = {name: deep_copy(like) for names, like in server.architectures for name in names}
        for name, model in models.items():
            if not len(model.state_dict()):
                allowed = f"asked, where a model has no parameters to give away, as that of {name}"
                raise ArgumentError("method.models", self.models, allowed)
            server.compute.to_device(model).eval().requires_grad_(False)
        return models

    def weighted_nodes(self, state: Any) -> Sequence[str] | None:
        """Whose answers the ensemble can weigh; None: everybody's."""
        return None

    def prepare_nodes(self, server: Server, state: Any) -> None:
        """Before the first step: take the nodes' models, where they give them away."""
        if self.models == "uploaded" and not state.received_models:
            told = server.query("upload_model", of=self.weighted_nodes(state)).by_node("parameters")
            state.models = {name: model for name, model in state.models.items() if name in told}
            for name, model in state.models.items():
                load_vector(model, told[name])
            state.received_models = True

    def responses(self, server: Server, state: Any, x: torch.Tensor) -> Responses:
        """What the nodes say of x ``(B, ...)``, or what their models do."""
        if self.models == "asked":
            return server.query("predict_logits", of=self.weighted_nodes(state), x=x)
        seen = server.task.observe(x)
        each = [evaluate_with_batch_norm(model, seen, self.bn) for model in state.models.values()]
        told = {name: torch.stack([one[name] for one in each]) for name in each[0]}
        return Responses(-1, tuple(state.models), told)

    def step(self, server: Server, state: Any, t: int) -> Mapping[str, float]:
        """Some steps of G on one batch, and some of the student on what it remembers."""
        task = server.task
        self.prepare_nodes(server, state)
        set_lr(state.adam, cosine_lr(t, self.steps, self.generator_lr, self.generator_lr_end))
        wish = state.source.sample(self.batch, "w", t)
        for step in range(self.generator_steps):
            with server.compute.step(server.seed, "server", t, step):
                x = state.generator(wish.generator_input).float()
                told = self.responses(server, state, x)
                z = self.ensemble_logits(server, state, told["logits"], told.nodes)  # (B, C)
                z_S = state.student.evaluate(x)
                apart = task.distillation_loss(z_S, z, self.tau)  # (B,)
                losses = {
                    "recognized": self.recognition_loss(z, wish.labels),
                    "sought": -self.disagreement_reward(apart, z, z_S),
                }
                L_G = losses["recognized"] + self.adversary * losses["sought"]
                if self.bn:
                    losses["statistics"] = told["statistics"].mean()
                    L_G = L_G + self.bn * losses["statistics"]
            descend(state.adam, L_G)
        state.student.replay.add(*self.replay_batch(server, state, x, z, wish.labels))
        losses["student"] = state.student.train(t, self.steps, [])
        return dict(zip(losses, torch.stack(list(losses.values())).tolist(), strict=True))
