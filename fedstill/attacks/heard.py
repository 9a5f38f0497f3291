"""What the server of a run heard: releases as they left their nodes' gates, and what attacks use of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fedstill.data.public import Public
from fedstill.protocol.kinds import INDICES, INPUTS, kind_named
from fedstill.protocol.wire_format import Tensors


@dataclass(frozen=True, eq=False)
class HeardRelease:
    """One release, with the question that it answers.

    Args:
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


Hear = Callable[[HeardRelease], Any]


@dataclass(eq=False)
class Heard:
    """What the server of a run saw, as far as attacks use it.

    Args:
        most: rows of questions and answers that are kept, the last ones.
        counts: label counts as each node told them first, ``(C,)``.
        taught: nodes of which something was heard beside how much they hold.
        made: whether the server made what it asked about, by itself.
    """

    most: int
    counts: dict[str, torch.Tensor] = field(default_factory=dict)
    taught: set[str] = field(default_factory=set)
    made: bool = False
    _asked: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # by number of the question
    _told: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)

    def take(self, release: HeardRelease, public: Public | None) -> None:
        """Hear one release."""
        kinds = {name: kind_named(kind) for name, kind in release.kinds.items()}
        if any(kind.of != "counts" for kind in kinds.values()):
            self.taught.add(release.node)
        counted = [release.tensors[name] for name, kind in kinds.items() if kind.by_class]
        if counted:  # by class, and perhaps their sum
            self.counts.setdefault(release.node, max(counted, key=torch.Tensor.numel).flatten())
        logits = next((release.tensors[name] for name, kind in kinds.items() if kind.of == "scores"), None)
        about = None if logits is None else _about(release, public, len(logits))
        if logits is None or about is None or len(logits) != len(about):
            return
        if not self._asked or self._asked[-1][0] != release.number:
            self._asked.append((release.number, about))
            self.made = self.made or INPUTS in release.asked.values()
            self._forget()
        self._told.setdefault(release.node, {})[release.number] = logits

    def _forget(self) -> None:
        """Keep as many questions as are needed for the rows that are wanted."""
        while len(self._asked) > 1 and sum(len(about) for _, about in self._asked[1:]) >= self.most:
            number, _ = self._asked.pop(0)
            for told in self._told.values():
                told.pop(number, None)

    @property
    def inputs(self) -> torch.Tensor | None:
        """What nodes were asked about ``(Q, ...)``, on the CPU; None where they were asked about nothing."""
        return torch.cat([about.cpu() for _, about in self._asked])[-self.most :] if self._asked else None

    def answers(self, node: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What a node was asked about ``(Q, ...)`` and what it answered ``(Q, classes)``; None: nothing."""
        told = self._told.get(node, {})
        if not told:
            return None
        inputs = torch.cat([about.cpu() for number, about in self._asked if number in told])
        outputs = torch.cat([told[number].cpu().float() for number, _ in self._asked if number in told])
        return inputs[-self.most :], outputs[-self.most :]


def _about(release: HeardRelease, public: Public | None, answers: int) -> torch.Tensor | None:
    """The inputs that so many answers are about; None where they were moved."""
    for name, kind in release.asked.items():
        if kind == INPUTS and name in release.sent:
            return release.sent[name]
    rows = [name for name, kind in release.asked.items() if kind == INDICES and name in release.sent]
    if not rows or public is None or release.moved:
        return None
    told = release.sent[rows[-1]].long().cpu()
    if len(told) == 2 and int(told[1] - told[0]) == answers:  # from one row up to another
        return public.inputs[int(told[0]) : int(told[1])]
    return public.inputs[told.to(public.inputs.device)]
