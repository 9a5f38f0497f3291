"""Calls the handlers of questions, on a GPU as steps that it has recorded."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from fedstill.core.compute import Compute
from fedstill.core.cuda_graphs import Memory, Recorded, recordable
from fedstill.node.node_group import Group
from fedstill.protocol.queries import Question
from fedstill.protocol.wire_format import Tensors


class Handlers:
    """The handlers of one group of nodes, each recorded where its question and the networks allow it."""

    def __init__(self, group: Group, compute: Compute) -> None:
        self.group, self.compute = group, compute
        self._recorded: dict[str, Recorded | None] = {}  # by the question's name; None: called each time

    def __call__(
        self, question: Question, number: int, inputs: Tensors, values: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """What a question's handler gives for tensors ``(G, ...)`` and plain values."""
        drawn = {} if question.draws is None else question.draws(self.group, number, **inputs, **values)
        if question.name not in self._recorded:
            self._recorded[question.name] = self._recording(question, number)
        recorded = self._recorded[question.name]
        if recorded is None:
            return question.handler(self.group, number, **inputs, **values, **drawn)
        return recorded(**inputs, **drawn)

    def _recording(self, question: Question, number: int) -> Recorded | None:
        nodes = self.group.nodes
        modules = [module for node in nodes for module in node.modules.values()]
        if nodes[0].private or not (question.records and self.compute.records(*modules)):
            return None
        learning = [node.optimizers[role] for node in nodes for role in question.trains]
        for optimizer in learning:
            recordable(optimizer)
        return Recorded(partial(question.handler, self.group, number), Memory(modules, learning))
