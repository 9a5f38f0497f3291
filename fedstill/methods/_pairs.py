"""A task network that learns on pairs (G(x), x): images generated from label maps, with these as targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from fedstill.core.checked import NonNegativeFloat, PositiveInt
from fedstill.core.errors import ArgumentError
from fedstill.core.seeds import torch_generator
from fedstill.data.augment import augmented, drawn
from fedstill.methods._imagine import made
from fedstill.methods._maps import Maps
from fedstill.methods._noise import Wish
from fedstill.methods.server import Server
from fedstill.protocol.method import Method
from fedstill.protocol.schedule import cosine, set_lr


@dataclass(frozen=True, kw_only=True)
class LearnsPairs(Method):
    """How the task network learns."""

    student_steps: PositiveInt = 1000
    """Steps of the task network, when the generator is done."""
    student_batch: PositiveInt = 16
    """Generated pairs in such a step."""
    student_augment: Literal["none", "shift", "shift-flip", "turn"] = "none"
    """What is done to generated pairs: as local.augment."""
    student_lr: NonNegativeFloat = 1e-3
    """Adam's learning rate for the task network, falling on a cosine to student_lr_end."""
    student_lr_end: NonNegativeFloat = 1e-6
    """Learning rate of its last step."""

    def learn_pairs(
        self,
        server: Server,
        source: Maps,
        generator: nn.Module,
        adam: torch.optim.Optimizer,
        t: int,
    ) -> Mapping[str, float]:
        """Step ``t`` of the task network on generated pairs; its loss.

        Args:
            server: with the task network as its student.
            source: of maps x.
            generator: G, which does not learn from it.
            adam: of the task network.
            t: from 0.
        """
        set_lr(adam, cosine(t, self.student_steps, self.student_lr, self.student_lr_end))
        w = source.draw(self.student_batch, "student", t)
        with server.compute.step(server.seed, "student", t):
            x, targets = self.pairs(server, generator, w, t)
            server.student.train()
            outputs = server.student(x).float()
            loss = server.task.loss(outputs.unsqueeze(0), targets.unsqueeze(0))[0]
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        return {"student": loss.item()}

    def pairs(
        self, server: Server, generator: nn.Module, w: Wish, t: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs as the task network gets them, and their targets."""
        if w.maps is None:
            raise ArgumentError("task", server.task.name, "one whose inputs are made from maps")
        x, task = made(generator, w), server.task
        targets = task.labels(w.maps, x)
        if self.student_augment == "none":
            return task.observe(x), targets
        draws = drawn(len(x), torch_generator(server.seed, "augment", t))
        return augmented(task, x, targets, draws, self.student_augment)
