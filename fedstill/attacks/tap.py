"""What the server of a run sees: every release as it left its node's gate, and what had been asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedstill.federation.contract import Tensors
from fedstill.federation.inprocess import InProcess
from fedstill.node.entries import ANSWER, GRADIENT
from fedstill.node.node import Node
from fedstill.protocol.messages import refine
from fedstill.runs.simulation import Simulation


@dataclass(frozen=True, eq=False)
class Release:
    """One release, with the question that it answers.

    Args:
        number: of the question.
        part: ``"answer"`` or ``"gradient"``.
        kinds: the kind of each tensor that left.
        sent: what had come down, by name.
        asked: the kind of each tensor of the question; empty for what was pulled back.
        moved: whether it is about inputs that the node moved before it answered.
    """

    node: str
    number: int
    question: str
    part: str
    kinds: Mapping[str, str]
    tensors: Tensors
    sent: Tensors
    asked: Mapping[str, str]
    moved: bool = False


Hear = Callable[[Release], Any]


class Enough(Exception):
    """Everything wanted has been heard: the run is let go."""


class _Tapped(InProcess):
    """An engine whose releases are heard on their way to the server."""

    hear: Hear

    def _answer(
        self, asked: tuple[str, ...], question: str, number: int, tensors: Tensors, differentiable: bool
    ) -> Mapping[str, Tensors]:
        answers = super()._answer(asked, question, number, tensors, differentiable)
        for node, told in answers.items():
            self._told(node, told, question, number, ANSWER, tensors)
        return answers

    def _pull_back(self, number: int, question: str, pulls: Mapping[str, Tensors]) -> Mapping[str, Tensors]:
        gradients = super()._pull_back(number, question, pulls)
        for node, told in gradients.items():
            self._told(node, told, question, number, GRADIENT, pulls[node])
        return gradients

    def _told(self, node: str, told: Tensors, question: str, number: int, part: str, sent: Tensors) -> None:
        kinds, moves = self.questions[question].kinds(), self.questions[question].moves
        asked = self.questions[question].sends if part == ANSWER else {}
        # Copies: a server goes on to change its tensors in place.
        tensors, down = (
            {name: tensor.detach().clone() for name, tensor in refine(each).items()} for each in (told, sent)
        )
        moved = moves in down and bool(down[moves].any())
        of = {name: kinds[name] for name in tensors}
        self.hear(Release(node, number, question, part, of, tensors, down, asked, moved))


class Overheard(Simulation):
    """An experiment in this process whose releases somebody hears."""

    hear: Hear

    def listen(self, hear: Hear) -> bool:
        """Run from the start to its end, whether it came to it; nothing is heard after that, or kept.

        ``hear`` is called with each release in order, and raises :class:`Enough` to end the run.
        """
        self.hear = hear
        try:
            self.run()
        except Enough:
            return False
        finally:
            self.hear = lambda release: None  # what an attacker asks later on is no part of the run
        return True

    def reopen(self) -> None:
        """Let nodes answer after the run's end, as those of an ensemble in use do.

        What that costs is charged to a log that begins anew: a run's own is closed with the run.
        """
        self.audit.open(None)

    def _federation(self, groups: Sequence[Sequence[Node]]) -> InProcess:
        tapped = _Tapped(self.nodes, groups, self.side, self.compute, self.setting.link)
        tapped.hear = lambda release: self.hear(release)
        return tapped
