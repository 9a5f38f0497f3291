"""Servers that ask everything in their first turn, and whose student then learns from what was answered."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

import torch

from fedstill.core.compute import lay_out
from fedstill.core.errors import ArgumentError
from fedstill.federation.contract import Answers
from fedstill.methods.counting import Census
from fedstill.methods.server import Server, ServerSetting
from fedstill.protocol.method import Ask
from fedstill.protocol.schedule import cosine, set_lr
from fedstill.tasks import Ensemble


class OneShotConfig(Protocol):
    """Options that all of them have."""

    @property
    def epochs(self) -> int:
        """Passes of the student."""

    @property
    def lr(self) -> float:
        """Its learning rate, falling on a cosine."""

    @property
    def lr_end(self) -> float:
        """Its learning rate in the last pass."""

    @property
    def ensemble(self) -> Ensemble:
        """How answers become one."""


class OneShotServer(Server):
    """The first turn asks all questions; each turn is one pass of the student over the public data.

    Args:
        config: the method's options.
        setting: what the server is made of.
        optimiser: the student's.
    """

    turn: ClassVar[Literal["step", "epoch", "round"]] = "epoch"

    def __init__(
        self, config: OneShotConfig, setting: ServerSetting, optimiser: torch.optim.Optimizer
    ) -> None:
        super().__init__(setting)
        self.options, self.total, self.optimiser = config, config.epochs, optimiser
        self.census: Census | None = None
        self.targets: dict[str, torch.Tensor] = {}  # what the student learns from

    @abstractmethod
    def gather(self) -> dict[str, torch.Tensor]:
        """Ask everything, and make the targets of it."""

    @abstractmethod
    def learn(self, e: int) -> Mapping[str, float]:
        """Pass ``e`` of the student over the public data; its losses."""

    def step(self) -> Mapping[str, float]:
        """One pass, and before the first one all that is asked."""
        if not self.targets:
            self.targets = self.gather()
        set_lr(self.optimiser, cosine(self.done, self.total, self.options.lr, self.options.lr_end))
        self.student.train()
        losses = self.learn(self.done)
        self.done += 1
        return losses

    def answered(self, asks: Iterator[Ask] | Sequence[Ask]) -> Iterator[tuple[Ask, Answers]]:
        """Ask in order; label counts become the census, all else is passed on.

        Those are asked who told their counts, or all where nobody is to.
        """
        self.census = Census.even(self.federation.nodes, self.task.classes, self.compute.device)
        for ask in asks:
            answers = self.federation.ask(ask.question, of=self.census.names, number=None, **ask.tensors)
            if ask.question == "count_labels":
                self.census = Census.of_answers(answers)
            else:
                yield ask, answers

    def omega(self, answers: Answers) -> torch.Tensor:
        """The weights of the nodes that answered, by class: ``(K, 1, C)``, summing to 1 over nodes.

        Raises:
            ArgumentError: nobody has been asked yet.
        """
        if self.census is None:
            raise ArgumentError("census", None, "known once the nodes have been asked")
        return self.task.importance(self.census.of(answers.nodes).counts)

    def ensemble(self, answers: Answers) -> torch.Tensor | None:
        """The nodes' outputs as one, ``(B, C, ...)``; None before they were asked."""
        if self.census is None:
            return None
        return self.task.ensemble(answers["logits"], self.omega(answers), self.options.ensemble)

    def state(self) -> dict[str, Any]:
        """See :class:`Server`; with the targets, so that nobody is asked again."""
        return {
            **super().state(),
            "optimiser": self.optimiser.state_dict(),
            "census": None if self.census is None else self.census.state(),
            "targets": self.targets,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """See :class:`Server`."""
        super().load(state)
        self.optimiser.load_state_dict(state["optimiser"])
        lay_out(self.optimiser)
        device = self.compute.device
        self.census = Census.load(state["census"], device)
        self.targets = {name: tensor.to(device) for name, tensor in state["targets"].items()}
