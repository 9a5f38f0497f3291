"""Generated inputs that the nodes' ensemble recognizes as a given class, for DENSE and Co-Boosting.

A generator G gets a label y and makes x that the ensemble classifies as y and the student does not yet. The
student trains on the ensemble's responses. Nodes are queried about each x; or, as published, they upload
their models once and the server evaluates these.
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
from fedstill.methods._generated_inputs import InputGeneratorMethod, LabelGeneratorOptions
from fedstill.methods._student import LabeledBatch, Student
from fedstill.methods._teacher_queries import TeacherQueryMethod, evaluate_with_batch_norm
from fedstill.models.module_utils import deep_copy, load_vector
from fedstill.protocol.payload_kinds import PARAMETERS


@dataclass
class ClassConditionalState:
    """Server state."""

    source: Any  # of noise and labels
    generator: nn.Module  # G
    adam: torch.optim.Optimizer  # G's
    student: Student  # with what it remembers
    models: dict[str, nn.Module]  # the nodes', where they are given away
    received_models: bool = False  # whether they have been


@dataclass(frozen=True, kw_only=True)
class ClassConditionalGeneration(TeacherQueryMethod, LabelGeneratorOptions, InputGeneratorMethod, ABC):
    """Base class of DENSE and Co-Boosting."""

    length_options: ClassVar[tuple[str, ...]] = ("steps", "generator_steps")

    generator_steps: PositiveInt = 1
    """Steps of G on a batch's noise and labels, each with a query to all nodes (published: 30, each time with
    a new G).
    """
    adversary: NonNegativeFloat = 1.0
    """Weight of the loss that seeks inputs on which student and ensemble differ."""
    models: Literal["queried", "uploaded"] = "queried"
    """Source of the teachers. queried: nodes are queried about each x. uploaded: they upload models once
    (published), which a policy of outputs only refuses.
    """

    def needs(self) -> Needs:
        return Needs(generates_inputs=True, single_label=True, student_architecture=self.models == "uploaded")

    @property
    def queries_nodes(self) -> bool:
        return self.models == "queried"

    @property
    def queries_per_step(self) -> int:
        """Number of queries to all nodes in a step."""
        return self.generator_steps

    # --- what a method says -----------------------------------------------------------------------------

    @abstractmethod
    def ensemble_logits(
        self, server: Server, state: Any, z: torch.Tensor, nodes: Sequence[str]
    ) -> torch.Tensor:
        """Return the ensemble's logits ``(B, C)`` of some nodes' ``(K, B, C)``."""

    @abstractmethod
    def recognition_loss(self, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss of G if the ensemble ``(B, C)`` does not predict y ``(B,)``."""

    @abstractmethod
    def disagreement_reward(self, distance: torch.Tensor, z: torch.Tensor, z_S: torch.Tensor) -> torch.Tensor:
        """Return the reward of G for the distance ``(B,)`` of ensemble and student ``(B, C)``."""

    def make_replay_batch(
        self, server: Server, state: Any, x: torch.Tensor, z: torch.Tensor, y: torch.Tensor
    ) -> LabeledBatch:
        """Return the batch for the student's replay memory: x and the ensemble's logits by default."""
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
        """Return each node's model."""
        return {"parameters": list(nodes.parameter_vectors("model"))}

    # --- at the server ----------------------------------------------------------------------------------

    def base_state_fields(self, server: Server) -> dict[str, Any]:
        """Return the fields of :class:`ClassConditionalState` by name."""
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
        """Return a network of each node's architecture, to load its parameters into."""
        models = {name: deep_copy(like) for names, like in server.architectures for name in names}
        for name, model in models.items():
            if not len(model.state_dict()):
                allowed = f"queried, as the model of {name} has no parameters to upload"
                raise ArgumentError("method.models", self.models, allowed)
            server.compute.to_device(model).eval().requires_grad_(False)
        return models

    def names_with_known_weights(self, state: Any) -> Sequence[str] | None:
        """Return the nodes with known weights; None: all nodes."""
        return None

    def prepare_nodes(self, server: Server, state: Any) -> None:
        """Fetch the nodes' models before the first step, if they are uploaded."""
        if self.models == "uploaded" and not state.received_models:
            responses = server.query("upload_model", nodes=self.names_with_known_weights(state)).by_node(
                "parameters"
            )
            state.models = {name: model for name, model in state.models.items() if name in responses}
            for name, model in state.models.items():
                load_vector(model, responses[name])
            state.received_models = True

    def responses(self, server: Server, state: Any, x: torch.Tensor) -> Responses:
        """Return the nodes' responses to x ``(B, ...)``, or those of their uploaded models."""
        if self.models == "queried":
            return server.query("predict_logits", nodes=self.names_with_known_weights(state), x=x)
        seen = server.task.observe(x)
        each = [evaluate_with_batch_norm(model, seen, self.bn) for model in state.models.values()]
        responses = {name: torch.stack([one[name] for one in each]) for name in each[0]}
        return Responses(-1, tuple(state.models), responses)

    def step(self, server: Server, state: Any, t: int) -> Mapping[str, float]:
        """Take steps of G on one batch, and steps of the student on its replay memory."""
        task = server.task
        self.prepare_nodes(server, state)
        set_lr(state.adam, cosine_lr(t, self.steps, self.generator_lr, self.generator_lr_end))
        batch = state.source.sample(self.batch, "w", t)
        for step in range(self.generator_steps):
            with server.compute.step(server.seed, "server", t, step):
                x = state.generator(batch.generator_input).float()
                responses = self.responses(server, state, x)
                z = self.ensemble_logits(server, state, responses["logits"], responses.nodes)  # (B, C)
                z_S = state.student.evaluate(x)
                distance = task.distillation_loss(z_S, z, self.tau)  # (B,)
                losses = {
                    "recognized": self.recognition_loss(z, batch.labels),
                    "sought": -self.disagreement_reward(distance, z, z_S),
                }
                L_G = losses["recognized"] + self.adversary * losses["sought"]
                if self.bn:
                    losses["statistics"] = responses["statistics"].mean()
                    L_G = L_G + self.bn * losses["statistics"]
            descend(state.adam, L_G)
        state.student.replay.add(*self.make_replay_batch(server, state, x, z, batch.labels))
        losses["student"] = state.student.train(t, self.steps, [])
        return dict(zip(losses, torch.stack(list(losses.values())).tolist(), strict=True))
