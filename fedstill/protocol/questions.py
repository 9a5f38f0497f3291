"""What a node can be asked: a method declares its questions as data, and how a group answers them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fedstill.core.compute import Compute
from fedstill.data.public import Public
from fedstill.protocol.schedule import WHOLE, LocalConfig, Span
from fedstill.tasks import Task

Handler = Callable[..., Mapping[str, torch.Tensor]]
GRADIENTS = "gradients"


@dataclass(frozen=True)
class Question:
    """One thing that a method asks nodes.

    Args:
        name: as policy and ledger know it.
        handler: called as ``handler(group, number, **inputs)``; inputs and answers have the group's
            nodes first, ``(G, ...)``.
        sends: the kind of each tensor that goes down with it.
        releases: the kind of each tensor that its answer holds.
        differentiable: the inputs through which gradients that reach the answer are pulled back. They
            leave the node as kind ``gradients``.
        times: how often a run asks it, so that a node with a limit can refuse beforehand; 0 is not known.
        constant: the answer follows from the node's data alone, whatever it has been asked before; asked
            again under another number's state, it is the same release.
        rows: inputs that it is about at most, where that is known beforehand: prices follow from it.
        reads: the tensors of its answer that are computed from the node's records themselves; all others
            come from its networks. None: not declared, and then no mechanism can protect any of them.
        trains: networks, beside the model, that take a step on the node's records for each answer.
        span: the part of the local training that comes with it, by the tensors that were sent; None is none.
        beside: what its training descends beside the task's own loss, from the second step or round on, in
            words; an attack that goes by the task's loss alone is then weaker than it could be.
        finish: what is done to an answer after the gate's noise and before it travels, by what was sent (a
            quantiser, say). It never sees what is private.
    """

    name: str
    handler: Handler
    sends: Mapping[str, str] = field(default_factory=dict)
    releases: Mapping[str, str] = field(default_factory=dict)
    differentiable: tuple[str, ...] = ()
    times: int = 0
    constant: bool = False
    rows: int = 0
    reads: tuple[str, ...] | None = None
    trains: tuple[str, ...] = ()
    span: Callable[[Mapping[str, torch.Tensor]], Span] | None = None
    beside: str = ""
    finish: Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]] | (
        None
    ) = None

    def kinds(self) -> Mapping[str, str]:
        """The kind of everything that may leave a node for this question."""
        return {**self.releases, **{f"d/d{name}": GRADIENTS for name in self.differentiable}}


@dataclass(frozen=True)
class NodeSetting:
    """What a method finds at every node.

    Args:
        task: losses and counts.
        local: how nodes train their models, and for how long in all.
        compute: device and precision.
        public: public data, or None.
        perceptual: VGG features, frozen, for losses that compare images by them; None: the node has none.
    """

    task: Task
    local: LocalConfig
    compute: Compute
    public: Public | None = None
    perceptual: nn.Module | None = None


def stand_in(task: Task, shape: tuple[int, ...] = ()) -> Public:
    """Public data in place of any: what a method declares follows from its options, not from the data."""
    shape = shape or ((8,) if task.tokens else (1, 8, 8))
    inputs = torch.zeros(2, *shape, dtype=torch.int64 if task.tokens else torch.float32)
    return Public("none", inputs, task.blank(2, shape))


def _nothing(_: object) -> None:
    """What a method does where it has nothing to prepare, or no work that is worth timing."""


@dataclass(frozen=True)
class NodeSide:
    """A method's part at the nodes.

    Args:
        questions: that it answers, by name.
        prepare: called once with all nodes, before anything else.
        rehearse: does the main work of one step for a group, for an engine to time; called on copies.
        look: what a question about inputs ``(B, ...)`` would be answered, ``(K, ...)`` a tensor, with
            nothing trained, released or counted: for evaluation in a simulation only. None where the
            method has no ensemble.
        first: the part of the local training that is done before the first question; None is nothing.
        learns: whether the nodes' own models are trained at all, then or later.
        notes: what a run should be told of it: what is switched off here, and why.
    """

    questions: Mapping[str, Question]
    prepare: Callable[[Sequence[Any]], None] = _nothing
    rehearse: Callable[[Any], None] = _nothing
    look: Callable[[Sequence[Any], torch.Tensor], Mapping[str, torch.Tensor]] | None = None
    first: Span | None = WHOLE
    learns: bool = True
    notes: tuple[str, ...] = ()

    def leaves(self) -> tuple[str, ...]:
        """The kinds of tensor that leave a node, each once, in alphabetical order."""
        kinds = [kind for question in self.questions.values() for kind in question.kinds().values()]
        return tuple(sorted(set(kinds)))
