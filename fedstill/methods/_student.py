"""A student that learns from the nodes' answers: remembered ones, or (published code) fresh ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fedstill.core.checked import NonNegativeFloat, PositiveInt, PositiveOrInf
from fedstill.core.compute import lay_out
from fedstill.methods._replay import Augment, Known, Recall
from fedstill.methods.server import Server
from fedstill.protocol.method import Method
from fedstill.protocol.schedule import cosine, set_lr
from fedstill.tasks import Ensemble


@dataclass(frozen=True, kw_only=True)
class StudentOptions(Method):
    """How S learns from ensembled answers about inputs that the server makes."""

    ensemble: Ensemble = "consensus"
    """How answers are ensembled: logits (Eq. 9), log_probs, probs, consensus, which listens to those who
    know the classes that an input shows, or one of your own."""
    tau: PositiveOrInf = 1.0
    """Temperature of L_mimic; inf is the l2 limit of Eq. 10."""
    student_inputs: Literal["remembered", "fresh"] = "remembered"
    """What S learns on: remembered questions, or (published code) a fresh question for each step."""
    memory: int = 100_000
    """Remembered inputs with their ensembled answers; at least one batch."""
    student_steps: PositiveInt = 5
    """Student steps after each question."""
    student_batch: PositiveInt = 64
    """Remembered inputs in a student step."""
    student_augment: Augment = "none"
    """What is done to remembered inputs, and to answers that are maps: nothing, random shifts by up to an
    eighth of the image, quarter turns and mirror images, or convex mixtures of two with the same mixture of
    their answers."""
    student_lr: NonNegativeFloat = 1e-3
    """Adam's learning rate for S, falling on a cosine to student_lr_end."""
    student_lr_end: NonNegativeFloat = 1e-6
    """Learning rate of S's last step."""


class Student:
    """S, with its optimiser and what it remembers.

    Args:
        options: how it learns.
        server: whose student it is.

    Raises:
        ArgumentError: an augmentation that does not suit the task or the shape.
    """

    def __init__(self, options: StudentOptions, server: Server) -> None:
        self.options, self.server, self.S = options, server, server.student
        self.replay = Recall(server.task, options.memory, options.student_augment, server.shape, server.seed)
        # What its owner froze stays as it is.
        self.learning = [parameter for parameter in self.S.parameters() if parameter.requires_grad]
        self.adam = torch.optim.Adam(self.learning, options.student_lr, fused=True)

    def watching(self, x: torch.Tensor) -> torch.Tensor:
        """S(x) with gradients to x only; S neither learns nor moves its running statistics here."""
        self._learn(False)
        z_hat: torch.Tensor = self.S(self.server.task.observe(x)).float()
        self._learn(True)
        return z_hat

    def mimic(self, known: Known) -> tuple[torch.Tensor, torch.Tensor]:
        """S's own answers ``(B, classes, ...)``, and L_mimic as S descends it (Eq. 10)."""
        z_hat = self.S(self.server.task.observe(known.x)).float()
        return z_hat, self.server.task.distance(z_hat, known.z, self.options.tau).mean()

    def learn(
        self, t: int, of: int, fresh: Sequence[Known], loss: Callable[[Known], torch.Tensor]
    ) -> torch.Tensor:
        """The steps of S after question ``t`` of ``of``; the last one's loss.

        Args:
            t, of: which question, of how many.
            fresh: inputs with their answers for each step; none: remembered ones.
            loss: of S on some of them.
        """
        options, server = self.options, self.server
        set_lr(self.adam, cosine(t, of, options.student_lr, options.student_lr_end))
        L_S = torch.zeros((), device=server.device)
        for turn in range(options.student_steps):
            known = fresh[turn] if fresh else self.replay.sample(options.student_batch, *self.named(turn))
            with server.compute.step(server.seed, "student", *self.named(turn)):
                L_S = loss(known)
            self.adam.zero_grad()
            L_S.backward()  # type: ignore[no-untyped-call]
            self.adam.step()
        return L_S

    def named(self, turn: int) -> tuple[int, int]:
        """The names of a step's draws: the run's turn, and the step in it."""
        return self.server.done, turn

    def state(self) -> dict[str, Any]:
        """For a run to go on."""
        return {"adam": self.adam.state_dict(), "replay": self.replay.state()}

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Take up what :meth:`state` kept."""
        self.adam.load_state_dict(state["adam"])
        lay_out(self.adam)
        self.replay.load(state["replay"], device)

    def _learn(self, mode: bool) -> None:
        self.S.train(mode)
        for parameter in self.learning:
            parameter.requires_grad_(mode)
