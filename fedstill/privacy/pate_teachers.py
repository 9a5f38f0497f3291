"""PATE's teachers (Papernot et al. 2017; 2018): m networks that each know their own part of a node's records.

One record is in one part, so it can change one teacher: one vote of m on each input, and one of the m
gradients that are averaged. What that costs once noise is added, :class:`fedstill.privacy.pate.Votes` says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fedstill.core.dataset import TensorData
from fedstill.privacy.clipping import shorten


class Teachers(nn.Module):
    """Networks ``(B, C, H, W)`` to ``(B, classes)`` as one, which gives the share of their votes.

    Forward: ``sharpness`` times the share of teachers whose largest logit is that class. Backward: the
    gradient of ``sharpness`` times the mean of their softmax (straight through), where each teacher's own
    gradient with respect to each input is shortened to an L2 norm of at most ``clip`` before the mean over
    teachers is taken. So one teacher moves a row of votes by one vote in one class and one in another, and an
    input's gradient by at most ``2 clip / m``.

    A teacher that has no records abstains: its vote goes to no class, its gradient is zero. So does, for an
    input, a teacher whose logits for it are not all finite, as they may be for an input of huge numbers or
    after a training that diverged: what it answers concerns no vote but its own.

    The votes are the same to the bit, whether or not gradients are wanted.

    Args:
        teachers: m networks of one architecture.
        sharpness: above 0.
        clip: above 0.
    """

    voting: torch.Tensor  # (m,) float32: 1, or 0 for a teacher that abstains

    def __init__(self, teachers: Sequence[nn.Module], sharpness: float = 10.0, clip: float = 1.0) -> None:
        super().__init__()
        self.teachers = nn.ModuleList(teachers)
        self.sharpness, self.clip = sharpness, clip
        self.register_buffer("voting", torch.ones(len(teachers)))

    def __len__(self) -> int:
        return len(self.teachers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(B, C, H, W)`` to ``(B, classes)`` float32: ``sharpness`` times the share of votes."""
        # The mean over teachers comes after: the gradient that is clipped is one m-th of the teacher's own.
        clip = self.clip / len(self)
        z = torch.stack(
            [teacher(_Clipped.apply(x, clip)).float() for teacher in self.teachers]  # type: ignore[no-untyped-call]
        )  # (m, B, classes)
        share: torch.Tensor = _Votes.apply(z, self.voting)  # type: ignore[no-untyped-call]
        return self.sharpness * share

    def abstain(self, parts: Sequence[torch.Tensor]) -> None:
        """Let the teachers whose parts are empty abstain, and no others."""
        self.voting.copy_(torch.tensor([float(len(part) > 0) for part in parts]))

    def extra_repr(self) -> str:
        """What else its answers depend on."""
        return f"sharpness={self.sharpness}, clip={self.clip}"


class _Votes(torch.autograd.Function):
    """The share of votes for each class, ``(B, classes)``; backward, as if it were the mean softmax.

    Takes logits ``(m, B, classes)`` and who votes at all ``(m,)``. No gradient is computed in forward, so
    that nothing of it can enter the votes.
    """

    generate_vmap_rule = True  # nodes may be stacked

    @staticmethod
    def forward(z: torch.Tensor, voting: torch.Tensor) -> torch.Tensor:
        votes = nn.functional.one_hot(z.argmax(2), z.shape[2]) * _voices(z, voting)
        return votes.sum(0) / len(z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        z, voting = ctx.saved_tensors
        p = z.softmax(2)
        back = p * (grads[0] - (p * grads[0]).sum(2, keepdim=True)) / len(z)
        return torch.where(_voices(z, voting) > 0, back, 0.0), None


def _voices(z: torch.Tensor, voting: torch.Tensor) -> torch.Tensor:
    """1 where a teacher votes on an input, 0 where it abstains: ``(m, B, 1)``."""
    return z.isfinite().all(2, keepdim=True) * voting.view(-1, 1, 1)


class _Clipped(torch.autograd.Function):
    """The input itself; each row of the gradient that comes back is shortened to an L2 norm of ``clip``.

    No number in it (NaN, as a teacher that is broken gives) becomes zero.
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
        return shorten(grads[0], ctx.clip).to(grads[0].dtype), None


def shards(data: TensorData, m: int) -> list[torch.Tensor]:
    """The records of each of ``m`` teachers: indices (int64, rising), one tensor a teacher.

    Whose a record is, follows from a hash of its content (of its group's number, where records have groups)
    and from nothing else: adding or removing a record moves no other one. Parts are therefore of unequal
    size, and some may be empty. Equal records come to the same teacher.
    """
    if data.groups is not None:
        contents = [str(group).encode() for group in data.groups.tolist()]
    else:
        inputs, targets = data.inputs.cpu().numpy(), data.targets.cpu().numpy()
        contents = [x.tobytes() + y.tobytes() for x, y in zip(inputs, targets, strict=True)]
    hashes = (hashlib.blake2b(content, digest_size=8).digest() for content in contents)
    whose = torch.tensor([int.from_bytes(hashed, "big") % m for hashed in hashes], dtype=torch.int64)
    return [(whose == teacher).nonzero().flatten() for teacher in range(m)]
