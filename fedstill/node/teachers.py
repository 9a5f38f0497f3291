"""PATE's teachers (Papernot et al. 2017; 2018): m networks that each know their own part of a node's records.

One record is in one part, so it can change one teacher: one vote of m on each input, and one of the m
gradients that are averaged. What that costs once noise is added is the gate's business.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fedstill.data.dataset import TensorData
from fedstill.errors import ArgumentError
from fedstill.node.node import Node

SLACK = 1e-5  # gradients are clipped to so much less, relatively, that rounding never takes one over the clip


class Teachers(nn.Module):
    """Networks ``(B, C, H, W)`` to ``(B, classes)`` as one, which gives the share of their votes.

    Forward: ``sharpness`` times the share of teachers whose largest logit is that class. Backward: the
    gradient of ``sharpness`` times the mean of their softmax (straight through), where each teacher's own
    gradient with respect to each input is shortened to an L2 norm of at most ``clip`` before the mean over
    teachers is taken. So one teacher moves a row of votes by one vote in one class and one in another, and an
    input's gradient by at most ``2 clip / m``.

    A teacher that has no records abstains: its vote goes to no class, its gradient is zero.

    Args:
        teachers: m networks of one architecture.
        sharpness: above 0.
        clip: above 0.

    Raises:
        ArgumentError: no teachers, or a value outside its range.
    """

    voting: torch.Tensor  # (m,) float32: 1, or 0 for a teacher that abstains

    def __init__(self, teachers: Sequence[nn.Module], sharpness: float = 10.0, clip: float = 1.0) -> None:
        super().__init__()
        if not teachers:
            raise ArgumentError("teachers", 0, "1 or more")
        for name, value in (("sharpness", sharpness), ("clip", clip)):
            if not 0 < value < float("inf"):
                raise ArgumentError(f"{name} of teachers", value, "above 0")
        self.teachers = nn.ModuleList(teachers)
        self.sharpness, self.clip = sharpness, clip
        self.register_buffer("voting", torch.ones(len(teachers)))

    def __len__(self) -> int:
        return len(self.teachers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(B, C, H, W)`` to ``(B, classes)`` float32: ``sharpness`` times the share of votes."""
        m = len(self)
        shares, soft = [], []
        for teacher, voice in zip(self.teachers, self.voting, strict=True):
            # The mean over teachers comes after: this gradient is one m-th of the teacher's own.
            seen = _Clipped.apply(x, self.clip / m)  # type: ignore[no-untyped-call]
            z = teacher(seen).float()  # (B, classes)
            shares.append(voice * nn.functional.one_hot(z.detach().argmax(1), z.shape[1]))
            soft.append(voice * z.softmax(1))
        votes = torch.stack(shares).sum(0) / m
        if not torch.is_grad_enabled():
            return self.sharpness * votes
        mean = torch.stack(soft).sum(0) / m
        return self.sharpness * (votes + (mean - mean.detach()))

    def abstain(self, parts: Sequence[torch.Tensor]) -> None:
        """Let the teachers whose parts are empty abstain, and no others."""
        self.voting.copy_(torch.tensor([float(len(part) > 0) for part in parts]))

    def extra_repr(self) -> str:
        """What else its answers depend on."""
        return f"sharpness={self.sharpness}, clip={self.clip}"


class _Clipped(torch.autograd.Function):
    """The input itself; each row of the gradient that comes back is shortened to an L2 norm of ``clip``.

    A row that is not finite becomes zero.
    """

    generate_vmap_rule = True  # nodes may be stacked

    @staticmethod
    def forward(x: torch.Tensor, clip: float) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, float], output: torch.Tensor) -> None:
        ctx.clip = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return clipped(grads[0], ctx.clip), None


def clipped(rows: torch.Tensor, clip: float) -> torch.Tensor:
    """Each row shortened to an L2 norm of at most ``clip``; zero where it is not finite.

    Args:
        rows: ``(B, ...)``.
        clip: above 0.

    >>> clipped(torch.tensor([[3.0, 4.0], [0.3, 0.4], [torch.inf, 0.0]]), 1.0).round(decimals=3)
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000],
            [0.0000, 0.0000]])
    """
    lengths = rows.flatten(1).float().norm(dim=1).view(-1, *[1] * (rows.ndim - 1))
    factors = (clip * (1 - SLACK) / lengths).clamp(max=1.0)
    return torch.where(lengths.isfinite(), rows * factors, torch.zeros_like(rows))


def shards(data: TensorData, m: int) -> list[torch.Tensor]:
    """The records of each of ``m`` teachers: indices (int64, rising), one tensor a teacher.

    Whose a record is, follows from a hash of its content (of its group's number, where records have groups)
    and from nothing else: adding or removing a record moves no other one. Parts are therefore of unequal
    size, and some may be empty. Equal records come to the same teacher.

    Raises:
        ArgumentError: m below 1.
    """
    if m < 1:
        raise ArgumentError("pate.teachers", m, "1 or more")
    if data.groups is not None:
        contents = [str(group).encode() for group in data.groups.tolist()]
    else:
        inputs, targets = data.inputs.cpu().numpy(), data.targets.cpu().numpy()
        contents = [x.tobytes() + y.tobytes() for x, y in zip(inputs, targets, strict=True)]
    hashes = (hashlib.blake2b(content, digest_size=8).digest() for content in contents)
    whose = torch.tensor([int.from_bytes(hashed, "big") % m for hashed in hashes], dtype=torch.int64)
    return [(whose == teacher).nonzero().flatten() for teacher in range(m)]


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
