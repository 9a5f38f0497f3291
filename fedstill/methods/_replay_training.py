"""Student that trains on ensembled responses: of a replay memory, or of fresh queries (published code)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedstill.core.compute import match_parameter_layout
from fedstill.core.cuda_graphs import CudaGraphStep, ModelAndOptimizerTensors, make_capturable
from fedstill.core.optimizers import Adam
from fedstill.core.options import CheckedOptions, NonNegativeFloat, PositiveInt
from fedstill.methods import ArgumentError, Server, Tensors, cosine_lr, descend, set_lr
from fedstill.methods._label_shift import LabelShift
from fedstill.methods._replay_memory import Augment, LabeledBatch, Replay


@dataclass(frozen=True, kw_only=True)
class ReplayTraining(CheckedOptions):
    """Options of the student S, which trains on ensembled responses to generated inputs."""

    section: ClassVar[str] = "method.student"

    steps: PositiveInt = 5
    """Training steps of the student after each query."""
    batch: PositiveInt = 64
    """Replayed inputs in a batch of the student."""
    memory: PositiveInt = 100_000
    """Size of the replay memory of inputs with their ensembled responses; at least one query's."""
    augment: Augment = "none"
    """Augmentation of replayed inputs, and of responses that are maps: none, shift (by up to an eighth of the
    image), shift-flip (also mirrored half the time), or turn (quarter turns and mirror images).
    """
    lr: NonNegativeFloat = 1e-3
    """Adam's learning rate for the student, falling on a cosine to lr_end."""
    lr_end: NonNegativeFloat = 1e-6
    """Learning rate of the student's last step."""

    def check_memory(self, batch: int) -> None:
        """Check that one query of ``batch`` inputs fits into the replay memory.

        Raises:
            ArgumentError: it does not.
        """
        if self.memory < batch:
            raise ArgumentError("method.student.memory", self.memory, f"at least method.batch ({batch})")


class Student:
    """Student S with its optimizer and replay memory.

    Args:
        options: its options.
        server: the server, whose student is S.
        tau: temperature of S's distance to the ensemble; inf is its l2 limit.
        shift: corrects ensembled logits before S trains on them; None: no correction.

    Raises:
        ArgumentError: an augmentation that does not suit the task or the shape.
    """

    def __init__(
        self, options: ReplayTraining, server: Server, tau: float, shift: LabelShift | None = None
    ) -> None:
        self.options, self.server, self.S, self.tau, self.shift = options, server, server.student, tau, shift
        self.map_loss = 0.0  # weight of the task's loss on the labels of the inputs' label maps
        self.replay = Replay(options.memory, options.augment, server.task, server.shape, server.seed)
        # Frozen parameters stay unchanged.
        self.trainable = [parameter for parameter in self.S.parameters() if parameter.requires_grad]
        self.adam = Adam(self.trainable, options.lr, fused=True)
        # On a GPU both are captured as CUDA graphs.
        self.uses_cuda_graphs = server.compute.uses_cuda_graphs(self.S)
        memory = ModelAndOptimizerTensors([self.S], [self.adam])
        self._captured_step = CudaGraphStep(self.step, memory)
        self._captured_evaluate = CudaGraphStep(self._evaluate, memory)

    def evaluate(self, x: torch.Tensor) -> torch.Tensor:
        """Return S(x) with gradients to x only; S and its running statistics do not change."""
        return (self._captured_evaluate if self.uses_cuda_graphs else self._evaluate)(x=x)["z_hat"]

    def _evaluate(self, x: torch.Tensor) -> Tensors:
        self._set_trainable(False)
        z_hat = self.S(self.server.task.observe(x)).float()
        self._set_trainable(True)
        return {"z_hat": z_hat}

    def corrected_target(self, z: torch.Tensor) -> torch.Tensor:
        """Return S's target for ensembled logits z ``(B, classes, ...)``."""
        return z if self.shift is None else self.shift.correct_logits(z)

    def loss(self, x: torch.Tensor, z: torch.Tensor, maps: torch.Tensor | None = None) -> torch.Tensor:
        """Return L_mimic as S descends it (Eq. 10), with the loss on the maps' labels."""
        task, z_hat = self.server.task, self.S(self.server.task.observe(x)).float()
        loss = task.distillation_loss(z_hat, z, self.tau).mean()
        if maps is None or not self.map_loss:
            return loss
        return loss + self.map_loss * task.loss(z_hat[None], task.targets_from_maps(maps, x)[None])[0]

    def train(self, t: int, of: int, fresh: Sequence[LabeledBatch]) -> torch.Tensor:
        """Run S's steps after query ``t`` of ``of`` on fresh or replayed batches; return the last loss."""
        options, server, done = self.options, self.server, self.server.completed_steps
        set_lr(self.adam, cosine_lr(t, of, options.lr, options.lr_end))
        L_S = torch.zeros((), device=server.device)
        if self.uses_cuda_graphs:
            make_capturable(self.adam)
        for index in range(options.steps):
            batch = fresh[index] if fresh else self.replay.sample(options.batch, done, index)
            with server.compute.step(server.seed, "student", done, index):
                tensors = batch._replace(z=self.corrected_target(batch.z)).tensors()
                L_S = (self._captured_step if self.uses_cuda_graphs else self.step)(**tensors)["loss"]
        return L_S

    def step(self, x: torch.Tensor, z: torch.Tensor, maps: torch.Tensor | None = None) -> Tensors:
        """Take one step of S."""
        loss = self.loss(x, z, maps)
        with torch.autocast(x.device.type, enabled=False):  # backward runs in the precision of forward
            descend(self.adam, loss)
        return {"loss": loss.detach()}

    def state_dict(self) -> dict[str, Any]:
        decided = None if self.shift is None else self.shift.decided
        return {"adam": self.adam.state_dict(), "replay": self.replay.state_dict(), "decided": decided}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        self.adam.load_state_dict(state["adam"])
        match_parameter_layout(self.adam)
        self.replay.load_state_dict(state["replay"], device)
        if self.shift is not None:
            self.shift.decided = state["decided"].to(device)

    def _set_trainable(self, mode: bool) -> None:
        self.S.train(mode)
        for parameter in self.trainable:
            parameter.requires_grad_(mode)
