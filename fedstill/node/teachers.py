"""A node's teachers as nodes of their own, each with its part of the records: they learn as any node does."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from fedstill.core.errors import ArgumentError
from fedstill.node.node import Node
from fedstill.privacy.teachers import Teachers


def teachers_of(node: Node, parts: Sequence[torch.Tensor]) -> list[Node]:
    """The teachers of a node as nodes, to be trained by :func:`fedstill.node.training.train`.

    Their networks are those in the node's model, so that training them trains it. Teachers without records
    are left out, and abstain.

    Args:
        node: whose model is :class:`Teachers`.
        parts: its records by teacher: :func:`shards`.

    Returns:
        Nodes named ``node-0/teacher-3``.

    Raises:
        ArgumentError: another model, or another number of parts.
    """
    model = node.model
    if not isinstance(model, Teachers):
        raise ArgumentError(f"the model of {node.name}", type(model).__name__, "Teachers")
    if len(parts) != len(model):
        raise ArgumentError("parts", len(parts), f"one a teacher, {len(model)}")
    model.abstain(parts)
    return [_teacher(node, model, index, part) for index, part in enumerate(parts) if len(part)]


def _teacher(node: Node, model: Teachers, index: int, part: torch.Tensor) -> Node:
    prefix = f"teachers.{index}."
    frozen = (name for name in node.frozen["model"] if name.startswith(prefix))
    teacher = copy.copy(node)
    teacher.name = f"{node.name}/teacher-{index}"
    teacher.data = node.data.subset(part.to(node.data.inputs.device))
    teacher.modules = {"model": model.teachers[index]}
    teacher.frozen = {"model": frozenset(name.removeprefix(prefix) for name in frozen)}
    teacher.optimisers, teacher.private, teacher.teachers = {}, {}, []
    return teacher
