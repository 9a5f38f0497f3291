"""All nodes in this process: stacked where that is faster, one by one otherwise."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import torch

from fedstill.core.compute import Compute
from fedstill.federation.federation import Federation, Tensors
from fedstill.federation.link_config import LinkConfig
from fedstill.node.node import Node
from fedstill.node.node_group import Group, alike
from fedstill.node.request_handler import KEPT, RequestHandler
from fedstill.protocol.questions import NodeSide, Question

Partition = list[list[Node]]
MARGIN = 0.9  # stacked must take less than this share of one by one: a near tie goes the same way each run


def partition(nodes: Sequence[Node], stacked: bool) -> Partition:
    """Nodes in groups: equal architectures together, or each node alone."""
    return list(alike(nodes)) if stacked else [[node] for node in nodes]


def choose(
    nodes: Sequence[Node], compute: Compute, trial: Callable[[Group], None] | None
) -> tuple[Partition, dict[str, float]]:
    """Part nodes into groups as the engine says, or as a rehearsal on copies of them measures.

    Args:
        nodes: to be parted.
        compute: names the engine: ``stacked``, ``one-by-one`` or ``auto``.
        trial: does the work that is to be done fast, once, for nodes of one group; None: nothing is known of
            it, and ``auto`` is one by one.

    Returns:
        The groups, and for ``auto`` the seconds measured, stacked over one by one, for each kind of
        node by the name of its first one.
    """
    if compute.config.name != "auto" or trial is None:
        return partition(nodes, compute.config.name == "stacked"), {}
    groups: Partition = []
    ratios: dict[str, float] = {}
    for kind in alike(nodes):
        if len(kind) == 1:
            groups.append(kind)
            continue
        alone = _seconds(kind, [[node] for node in kind], compute, trial)
        ratio = _seconds(kind, [kind], compute, trial, most=1.5 * alone) / alone
        ratios[kind[0].name] = round(ratio, 3)
        groups += [kind] if ratio < MARGIN else [[node] for node in kind]
    return groups, ratios


def _seconds(
    kind: Sequence[Node],
    parts: Partition,
    compute: Compute,
    trial: Callable[[Group], None],
    most: float = math.inf,
) -> float:
    """The fastest of three rounds on copies, of which the first warms up.

    On a CPU nothing is compiled in the first round: if that one takes more than ``most``, it has lost.
    """
    copies = {node.name: node.rehearsing() for node in kind}
    groups = [Group([copies[node.name] for node in part]) for part in parts]
    rounds: list[float] = []
    for _ in range(3):
        start = time.perf_counter()
        for group in groups:
            trial(group)
        if compute.device.type == "cuda":
            torch.cuda.synchronize()
        rounds.append(time.perf_counter() - start)
        if compute.device.type == "cpu" and rounds[0] > 2 * most:
            return rounds[0]
    return min(rounds[1:])


class InProcess(Federation):
    """Nodes as objects of this process, in groups (:func:`partition`, :func:`choose`) that are computed
    together."""

    def __init__(
        self,
        nodes: Sequence[Node],
        groups: Sequence[Sequence[Node]],
        side: NodeSide,
        compute: Compute,
        link: LinkConfig | None = None,
    ) -> None:
        super().__init__([node.name for node in nodes], side.questions, link)
        self._members = {node.name: node for node in nodes}
        self._side, self._compute = side, compute
        self._groups = [[node.name for node in group] for group in groups]
        self._last = {node.name: -1 for node in nodes}  # the last number that each has served
        self._handlers: OrderedDict[tuple[str, ...], RequestHandler] = OrderedDict()
        self._asked_of: OrderedDict[int, tuple[str, ...]] = OrderedDict()  # number -> who was asked

    def _rule(self, node: str, question: Question) -> str | None:
        member = self._members[node]
        if question.differentiable and not getattr(member.model, "differentiable", True):
            return "model: it predicts, and has no gradients"
        return member.gate.objection(question)

    def _limit(self, node: str) -> int:
        return self._members[node].gate.policy.most_questions

    def _answer(
        self, asked: tuple[str, ...], question: str, number: int, tensors: Tensors, differentiable: bool
    ) -> Mapping[str, Tensors]:
        self._asked_of[number] = asked
        while len(self._asked_of) > KEPT:
            self._asked_of.popitem(last=False)
        answers: dict[str, Tensors] = {}
        for handler in self._serving(asked):
            names = [node.name for node in handler.group.nodes]
            releases = handler.answer(question, number, tensors, differentiable)
            answers.update(zip(names, releases, strict=True))
        return {name: answers[name] for name in asked}

    def _pull_back(self, number: int, question: str, pulls: Mapping[str, Tensors]) -> Mapping[str, Tensors]:
        gradients: dict[str, Tensors] = {}
        for handler in self._serving(self._asked_of.get(number, tuple(pulls))):
            names = [node.name for node in handler.group.nodes if node.name in pulls]
            if names:
                released = handler.pull_back(number, {name: pulls[name] for name in names})
                gradients.update(released)
        return {name: gradients[name] for name in pulls}

    def _serving(self, asked: tuple[str, ...]) -> list[RequestHandler]:
        """A request handler for those of each group that are asked, the same whenever the same are asked."""
        handlers: list[RequestHandler] = []
        for group in self._groups:
            names = tuple(name for name in group if name in asked)
            if not names:
                continue
            if names not in self._handlers:
                members = Group([self._members[name] for name in names])
                self._handlers[names] = RequestHandler(
                    members, self._side, self._compute, self._last, self.link
                )
            self._handlers.move_to_end(names)
            handlers.append(self._handlers[names])
        while len(self._handlers) > len(self._groups) + KEPT:  # each keeps answers, in case it is asked again
            self._handlers.popitem(last=False)
        return handlers
