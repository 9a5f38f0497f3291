"""PATE's teachers (Papernot et al. 2017; 2018): m networks that each know their own part of a node's records.

One record is in one part, so it can change one teacher: one vote of m on each input, and one of the m
gradients that are averaged. What that costs once noise is added, :class:`fedstill.privacy.pate.NoisyVotes` says.

PATE: noisy votes of teachers on disjoint parts of the records.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Interval
from torch import nn

from fedstill.core.dataset import TensorData
from fedstill.core.options import Checked, NonNegativeFloat, PositiveFloat, PositiveInt
from fedstill.privacy.clipping import clip_rows, count_rows, to_finite
from fedstill.privacy.config import COUNTED, NOT_CHOSEN, Noise, Release, ResponsesConfig
from fedstill.privacy.events import Event, PrivacyCost
from fedstill.privacy.noise import NoiseSampler, add_noise
from fedstill.privacy.release_rules import Rule, SanitizedGradients
from fedstill.protocol.queries import Query
from fedstill.tasks import Task

MOSTLY_NOISE = (
    "the votes are almost all noise: more records and teachers, fewer queries, a larger epsilon, or dp-sgd"
)


@dataclass(frozen=True)
class PateConfig(Checked):
    """PATE at the node: teachers on disjoint parts of its data, and noisy votes."""

    under: ClassVar[str] = "pate"

    teachers: PositiveInt = 10
    """How many; each has its own part of the records."""
    noise: Noise = None
    """Standard deviation of the Gaussian noise on the votes for each class; none: as much as
    privacy.epsilon asks for."""
    release: Literal["votes", "label"] = "votes"
    """What leaves: all noisy votes, or only the class with the most (GNMax). They cost the same."""
    threshold: Annotated[float, Interval(ge=0, lt=inf), "0 (answer everywhere) or more"] = 0.0
    """Answer only where the most votes, with noise of their own, reach this number (Confident-GNMax);
    elsewhere nothing is said of any class. 0: answer everywhere."""
    threshold_noise: PositiveFloat = 10.0
    """Standard deviation of that noise, in votes."""
    sharpness: PositiveFloat = 10.0
    """Votes are told as logits: this number times their share."""
    share: PositiveFloat = 1.0
    """Of the epsilon that is divided among all whose noise is none, in parts."""


@dataclass(frozen=True, kw_only=True)
class PATE(ResponsesConfig):
    """Noisy votes of teachers on disjoint parts of the data."""

    about: ClassVar[str] = "noisy votes of teachers, each of whom learned from its own part of the records"
    assumes: ClassVar[tuple[str, ...]] = (
        "each record belongs to one teacher, which nobody else's records decide",
        f"{COUNTED}: where a critic learns, the rate at which it draws them tells it",
        NOT_CHOSEN,
    )

    pate: PateConfig = field(default_factory=PateConfig)
    """Teachers and votes."""

    def refusal(self, query: Query, task: Task) -> str | None:
        """Training in rounds, answers that are made of votes for a sum over nodes, and tasks in which there
        is nothing to vote for."""
        if query.span is not None:
            return "teachers learn once, before the first query, and this one trains the model"
        # Logarithms, probabilities, entropies: one vote moves each number of such an answer, and by way of it
        # the gradients of all teachers.
        if query.sums and any(kind.category == "scores" for kind in query.releases.values()):
            return "noise is on votes, and what is added over nodes (link.secure_aggregation) is made of them: take dp-sgd"
        if task.kind != "class" and any(
            kind.category not in ("counts", "moments") for kind in query.releases.values()
        ):
            return f"teachers vote for one class an input, which task {task.name} has not: take dp-sgd"
        return None

    def rule(self, release: Release, levels: Mapping[str, float]) -> Rule:
        """Votes, and the mean of the teachers' gradients.

        Only of the package's own methods, which let votes out as they are. What a stranger's method makes of
        them is not known: one vote may then move a row, and the gradients of all teachers, as far as it will.
        """
        pate, third_party = self.pate, bool(release.kind.package)
        if release.is_input_gradient:
            # One that carries records carries all of them, whoever's they are.
            teachers = 1 if release.depends_on_records or third_party else pate.teachers
            return SanitizedGradients(self.gradients.clip, levels["gradients"], teachers)
        if release.kind.category == "scores" and not (release.depends_on_records or third_party):
            return NoisyVotes(pate, levels["pate"])
        return super().rule(release, levels)

    def shards(self, data: TensorData) -> Sequence[torch.Tensor]:
        """By a hash of what a record is."""
        return partition_records(data, self.pate.teachers)

    def ensemble(self, networks: Sequence[nn.Module]) -> nn.Module:
        """Teachers, who vote."""
        return TeacherEnsemble(networks, self.pate.sharpness, self.gradients.clip)

    def facts(self, levels: Mapping[str, float]) -> Mapping[str, str]:
        """Whether anything is left of the votes."""
        noise, teachers = levels["pate"], self.pate.teachers
        text = f"noise {noise:.4g} on the votes of {teachers} teachers"
        return {"votes": f"{text}: {MOSTLY_NOISE}" if noise >= teachers / 2 else text} if noise else {}


@dataclass(frozen=True)
class NoisyVotes(Checked, Rule):
    """Noisy votes of teachers that learned from disjoint parts of the records: PATE.

    Papernot, Song, Mironov, Raghunathan, Talwar, Erlingsson, "Scalable Private Learning with PATE", ICLR
    2018: GNMax, Confident-GNMax (Alg. 1), and the price that does not depend on data (Prop. 8: with noise
    sigma an answer is (lambda, lambda / sigma^2)-RDP).

    Assumes that each record (or group) is in one teacher's part, and adding or removing it moves no other
    record from one part to another. Then one teacher's vote changes, from one class to another: votes move by
    sqrt(2) in L2 for each input, the most votes of an input by 1.

    What arrives is ``sharpness`` times the share of votes for each class, and so is what leaves. All noisy
    votes cost what their largest alone costs: it follows from them.

    Args:
        pate: how many teachers vote, and what of their votes is told where. Rows below its threshold are
            zeros, and cost no votes.
        sigma: standard deviation of the noise on the votes for each class; 0: none, no guarantee.
    """

    under: ClassVar[str] = "pate"
    noise_table: ClassVar[str] = "pate"

    pate: PateConfig
    sigma: NonNegativeFloat

    @property
    def text(self) -> str:
        if self.sigma == 0:
            return f"votes of {self.pate.teachers} teachers without noise: no guarantee"
        released = "all votes" if self.pate.release == "votes" else "the class with the most votes"
        text = f"{released} of {self.pate.teachers} teachers, Gaussian noise {self.sigma:g}"
        condition = f", where the most reach {self.pate.threshold:g} (noise {self.pate.threshold_noise:g})"
        return text + condition if self.pate.threshold else text

    def bound(self, tensor: torch.Tensor) -> torch.Tensor:
        """Whole votes from 0 to m, as logits: ``(B, C)``."""
        return self._logits(self.votes(tensor))

    def noise(self, tensor: torch.Tensor, sampler: NoiseSampler) -> torch.Tensor:
        """Noisy votes or the class of the most, as logits; rows below the threshold are zeros."""
        votes = self.votes(tensor)
        if self.sigma == 0 or votes.numel() == 0:
            return self._logits(votes)
        noisy = add_noise(votes, sampler.normal(votes.shape), self.sigma)
        if self.pate.release == "label":
            top_class = torch.zeros_like(noisy).scatter_(1, noisy.argmax(1, keepdim=True), self.pate.teachers)
            logits = self._logits(top_class)
        else:
            logits = self._logits(noisy)
            # Zeros throughout mean that nothing is said: a row that is answered must not look like one.
            logits = torch.where(logits == 0, torch.full_like(logits, 1e-6 * self.pate.sharpness), logits)
        if self.pate.threshold:
            top_votes = add_noise(votes.amax(1), sampler.normal(votes.shape[:1]), self.pate.threshold_noise)
            logits = logits * (top_votes >= self.pate.threshold).unsqueeze(1)
        return logits

    def cost(self, shape: Sequence[int]) -> PrivacyCost | None:
        """As if each row were answered."""
        return self._cost(count_rows(shape)[0], count_rows(shape)[0])

    def actual_cost(self, shape: Sequence[int], noised: torch.Tensor) -> PrivacyCost | None:
        """The threshold for each row, and votes for those that were answered."""
        rows = count_rows(shape)[0]
        answered_rows = int((noised != 0).any(1).sum()) if self.pate.threshold and rows else rows
        return self._cost(rows, answered_rows)

    def _cost(self, rows: int, answered_rows: int) -> PrivacyCost | None:
        if self.sigma == 0:
            return None
        cost = PrivacyCost()
        if self.pate.threshold and rows:
            cost[Event("gaussian", self.pate.threshold_noise / math.sqrt(rows))] += 1
        if answered_rows:
            cost[Event("gaussian", self.sigma / math.sqrt(2 * answered_rows))] += 1
        return cost

    def votes(self, logits: torch.Tensor) -> torch.Tensor:
        """Whole votes from 0 to m, without noise: ``(B, C)``."""
        votes = to_finite(logits) * (self.pate.teachers / self.pate.sharpness)
        return votes.round().clamp(0, self.pate.teachers)

    def _logits(self, votes: torch.Tensor) -> torch.Tensor:
        return votes * (self.pate.sharpness / self.pate.teachers)


class TeacherEnsemble(nn.Module):
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
            [teacher(_ClippedGradient.apply(x, clip)).float() for teacher in self.teachers]  # type: ignore[no-untyped-call]
        )  # (m, B, classes)
        share: torch.Tensor = _VoteShares.apply(z, self.voting)  # type: ignore[no-untyped-call]
        return self.sharpness * share

    def abstain(self, shards: Sequence[torch.Tensor]) -> None:
        """Let the teachers whose parts are empty abstain, and no others."""
        self.voting.copy_(torch.tensor([float(len(part) > 0) for part in shards]))

    def extra_repr(self) -> str:
        """What else its answers depend on."""
        return f"sharpness={self.sharpness}, clip={self.clip}"


class _VoteShares(torch.autograd.Function):
    """The share of votes for each class, ``(B, classes)``; backward, as if it were the mean softmax.

    Takes logits ``(m, B, classes)`` and who votes at all ``(m,)``. No gradient is computed in forward, so
    that nothing of it can enter the votes.
    """

    generate_vmap_rule = True  # nodes may be stacked

    @staticmethod
    def forward(z: torch.Tensor, voting: torch.Tensor) -> torch.Tensor:
        votes = nn.functional.one_hot(z.argmax(2), z.shape[2]) * _valid_votes(z, voting)
        return votes.sum(0) / len(z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        z, voting = ctx.saved_tensors
        p = z.softmax(2)
        gradient = p * (grads[0] - (p * grads[0]).sum(2, keepdim=True)) / len(z)
        return torch.where(_valid_votes(z, voting) > 0, gradient, 0.0), None


def _valid_votes(z: torch.Tensor, voting: torch.Tensor) -> torch.Tensor:
    """1 where a teacher votes on an input, 0 where it abstains: ``(m, B, 1)``."""
    return z.isfinite().all(2, keepdim=True) * voting.view(-1, 1, 1)


class _ClippedGradient(torch.autograd.Function):
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
        return clip_rows(grads[0], ctx.clip).to(grads[0].dtype), None


def partition_records(data: TensorData, m: int) -> list[torch.Tensor]:
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
    teacher_of = torch.tensor([int.from_bytes(hashed, "big") % m for hashed in hashes], dtype=torch.int64)
    return [(teacher_of == teacher).nonzero().flatten() for teacher in range(m)]
