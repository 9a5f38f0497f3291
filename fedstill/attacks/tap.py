"""What the server of a run sees: every release as it left its node's gate, and what had been asked.

An attack is given these and nothing else. They are what the audit log counts: the same nodes, kinds and
bytes, which :func:`disagreement` checks against the log of the run that is attacked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedstill.federation import InProcess
from fedstill.federation.contract import Tensors
from fedstill.node.audit import AuditLog
from fedstill.node.entries import ANSWER, GRADIENT
from fedstill.node.node import Node
from fedstill.protocol.messages import kind_of, refine, size
from fedstill.runs.simulation import Simulation


@dataclass(frozen=True, eq=False)
class Release:
    """One release, with the question that it answers.

    Args:
        node: that it left.
        number: of the question.
        question: its name.
        part: ``"answer"`` or ``"gradient"``.
        kinds: the kind of each tensor that left.
        tensors: what left, by name.
        sent: what had come down, by name.
        asked: the kind of each tensor of the question; empty for what was pulled back.
        bytes: that left, by kind, as the audit log counts them.
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
    bytes: Mapping[str, int]
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
        self._told(answers, question, number, ANSWER, tensors)
        return answers

    def _pull_back(self, number: int, question: str, pulls: Mapping[str, Tensors]) -> Mapping[str, Tensors]:
        gradients = super()._pull_back(number, question, pulls)
        for node, told in gradients.items():
            self._told({node: told}, question, number, GRADIENT, pulls[node])
        return gradients

    def _told(
        self, releases: Mapping[str, Tensors], question: str, number: int, part: str, sent: Tensors
    ) -> None:
        kinds, moves = self.questions[question].kinds(), self.questions[question].moves
        asked = self.questions[question].sends if part == ANSWER else {}
        for node, told in releases.items():
            bytes: Counter[str] = Counter()
            for name, tensor in told.items():
                bytes[kind_of(name, kinds)] += size(tensor)
            plain = {name: tensor.detach().clone() for name, tensor in refine(told).items()}
            down = {name: tensor.detach().clone() for name, tensor in refine(sent).items()}
            of = {name: kinds[name] for name in plain}
            moved = bool(down[moves].any()) if moves in down else False
            self.hear(Release(node, number, question, part, of, plain, down, asked, dict(bytes), moved))


def nothing(release: Release) -> None:
    """What is no longer listened to."""


class Overheard(Simulation):
    """An experiment in this process whose releases somebody hears.

    Args:
        setting: of the experiment.
        hear: called with each release in order; raises :class:`Enough` to end the run.
    """

    hear: Hear

    def listen(self, hear: Hear) -> bool:
        """Run from the start without keeping anything; nothing is heard after the run's end.

        Returns:
            Whether the run came to its end.
        """
        self.hear = hear
        try:
            self.run()
        except Enough:
            return False
        finally:
            self.hear = nothing  # what an attacker asks later on is no part of the run
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


def disagreement(heard: Mapping[tuple[str, str], int], audit: AuditLog) -> str | None:
    """Why what was heard is not what an audit log says has left, or None.

    Args:
        heard: bytes by node and kind, of all of a run.
        audit: of that run.
    """
    written = {(node, kind): n for (_, node, way, kind), n in audit.sums.bytes.items() if way == "up" and n}
    for node, kind in sorted({*written, *heard}):
        if heard.get((node, kind), 0) != written.get((node, kind), 0):
            told, seen = written.get((node, kind), 0), heard.get((node, kind), 0)
            return f"{node}: {told} bytes of {kind} by the audit log, {seen} heard"
    return None


def weighed(releases: Sequence[Release]) -> Counter[tuple[str, str]]:
    """Bytes of releases by node and kind."""
    total: Counter[tuple[str, str]] = Counter()
    for release in releases:
        total.update({(release.node, kind): count for kind, count in release.bytes.items()})
    return total
