"""The federation as a server sees it: a differentiable function of what it asks about.

``answers = federation.ask("examine", x=x)`` gives the nodes' answers with gradients attached: when a
loss over them is pulled back, the federation sends each node the gradient that reached its answer,
the node pulls it through its own networks, and what its gate lets out arrives in ``x.grad``. An
engine says how nodes are reached; a method cannot tell engines apart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedstill.errors import ArgumentError, QuestionRefused
from fedstill.node.questions import Question

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Answers:
    """What K nodes answered: ``answers["logits"]`` is ``(K, B, ...)``, in the order of ``nodes``."""

    number: int
    nodes: tuple[str, ...]
    tensors: Tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        """One part of the answers, of all nodes that were asked.

        Raises:
            ArgumentError: the question's answer has no such part.
        """
        if name not in self.tensors:
            raise ArgumentError("answer", name, f"one of {', '.join(self.tensors)}")
        return self.tensors[name]


class Federation(ABC):
    """K nodes and one way to reach them.

    Args:
        nodes: their names.
        questions: what they can be asked.
    """

    def __init__(self, nodes: Sequence[str], questions: Mapping[str, Question]) -> None:
        self.nodes, self.questions = tuple(nodes), questions
        self.number = 0  # of the next question; part of a run's state

    def ask(
        self,
        question: str,
        *,
        of: Sequence[str] | None = None,
        number: int | None = None,
        **tensors: torch.Tensor,
    ) -> Answers:
        """Ask all nodes, or a few, one question.

        Args:
            question: its name.
            of: names of the nodes to ask; None is all.
            number: to ask again under a number already used; None takes the next one.
            tensors: what goes down with it. Where the question is differentiable and a tensor requires
                gradients, the answers do too.

        Raises:
            ArgumentError: no such question or node.
            QuestionRefused: a node's gate does not answer it.
            QuestionMismatch: the number was used with other content.
        """
        if question not in self.questions:
            raise ArgumentError("question", question, f"one of {', '.join(self.questions)}")
        asked = self._chosen(of)
        if number is None:
            number = self.number
        self.number = max(self.number, number + 1)
        names = tuple(tensors)
        through = self.questions[question].differentiable
        wanted = torch.is_grad_enabled() and any(
            tensor.requires_grad for name, tensor in tensors.items() if name in through
        )
        if not wanted:
            sent = {name: tensor.detach() for name, tensor in tensors.items()}
            answers = self._answer(asked, question, number, sent, False)
            return Answers(
                number, asked, {name: torch.stack([each[name] for each in answers]) for name in answers[0]}
            )
        call = _Call(self, asked, question, number, names)
        flat = _Ask.apply(call, *tensors.values())  # type: ignore[no-untyped-call]
        return Answers(number, asked, dict(zip(call.answered, flat, strict=True)))

    def require(self, names: Sequence[str]) -> None:
        """Refuse at the start what some node would refuse later.

        Raises:
            QuestionRefused: naming the first node, question and rule.
        """
        for name in names:
            for node, rule in self.objections(self.questions[name]).items():
                raise QuestionRefused(node, name, rule)
        total = sum(self.questions[name].times for name in names)
        for node, limit in self.limits().items():
            if total > limit:
                rule = f"most_questions: {limit}, and the run asks {total}"
                raise QuestionRefused(node, ", ".join(names), rule)

    def _chosen(self, of: Sequence[str] | None) -> tuple[str, ...]:
        if of is None:
            return self.nodes
        unknown = [name for name in of if name not in self.nodes]
        if unknown or not of:
            raise ArgumentError("of", unknown or list(of), f"some of {', '.join(self.nodes)}")
        return tuple(name for name in self.nodes if name in of)

    @abstractmethod
    def objections(self, question: Question) -> Mapping[str, str]:
        """The rule by which each unwilling node would refuse a question, by the node's name."""

    @abstractmethod
    def limits(self) -> Mapping[str, int]:
        """How many questions each node that has a limit answers at most, by the node's name."""

    @abstractmethod
    def _answer(
        self, asked: tuple[str, ...], question: str, number: int, tensors: Tensors, differentiable: bool
    ) -> Sequence[Tensors]:
        """Each asked node's answer, in order."""

    @abstractmethod
    def _pull_back(self, asked: tuple[str, ...], number: int, pulls: Sequence[Tensors]) -> Sequence[Tensors]:
        """Each asked node's gradients with respect to the question's inputs, in order."""


@dataclass
class _Call:
    federation: Federation
    asked: tuple[str, ...]
    question: str
    number: int
    names: tuple[str, ...]
    answered: tuple[str, ...] = ()


class _Ask(torch.autograd.Function):
    """Bridges autograd over the wire: forward asks, backward has the nodes pull back."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sent = dict(zip(call.names, tensors, strict=True))
        answers = call.federation._answer(call.asked, call.question, call.number, sent, True)
        call.answered = tuple(answers[0])
        ctx.call = call
        return tuple(torch.stack([answer[name] for answer in answers]) for name in call.answered)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        through = call.federation.questions[call.question].differentiable
        pulls = [
            {name: grad[row] for name, grad in zip(call.answered, grads, strict=True)}
            for row in range(len(call.asked))
        ]
        pulled = call.federation._pull_back(call.asked, call.number, pulls)
        back: list[torch.Tensor | None] = [None]
        for name in call.names:
            if name in through:
                back.append(_sum([released[f"d/d{name}"] for released in pulled]))
            else:
                back.append(None)
        return tuple(back)


def _sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """In the order of the nodes, whatever the engine, so that rounding is the same."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total
