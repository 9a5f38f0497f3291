"""PATE (Papernot et al. 2017; 2018): noisy votes of teachers trained on disjoint parts of a node's records.

Each record is in one part, so it can change one teacher: one vote of m for each input, and one of the m
averaged input gradients. :class:`TeacherEnsemble` counts the votes inside the network, :class:`NoisyVotes`
adds noise to them and states their privacy cost, and :class:`PATE` is the mechanism.
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
from fedstill.core.options import CheckedOptions, NonNegativeFloat, PositiveFloat, PositiveInt
from fedstill.privacy.clipping import clip_rows, row_count_and_size, to_finite
from fedstill.privacy.config import COUNTED, NOT_CHOSEN, DeclaredRelease, Noise, ResponseMechanism
from fedstill.privacy.events import Event, PrivacyCost
from fedstill.privacy.noise import NoiseSampler, add_noise
from fedstill.privacy.release_rules import ReleaseRule, SanitizedGradients
from fedstill.protocol.queries import Query
from fedstill.tasks import Task

MOSTLY_NOISE = (
    "the votes are almost all noise: use more records and teachers, fewer queries, more epsilon, or dp-sgd"
)


@dataclass(frozen=True)
class PateConfig(CheckedOptions):
    """Options of PATE: the teachers, and the noise on their votes."""

    section: ClassVar[str] = "pate"

    teachers: PositiveInt = 10
    """Number of teachers; each one learns from its own part of the records."""
    noise: Noise = None
    """Standard deviation of the Gaussian noise on the votes for each class; none: calibrated to
    privacy.epsilon.
    """
    release: Literal["votes", "label"] = "votes"
    """votes: all noisy votes. label: only the class with the most votes (GNMax). They cost the same."""
    threshold: Annotated[float, Interval(ge=0, lt=inf), "0 (answer everywhere) or more"] = 0.0
    """Respond only to inputs whose most frequent vote, with separate noise, reaches this number
    (Confident-GNMax); other rows are zeros. 0: respond to all inputs.
    """
    threshold_noise: PositiveFloat = 10.0
    """Standard deviation of the noise for the threshold, in votes."""
    sharpness: PositiveFloat = 10.0
    """Factor from the share of votes to the released logits."""
    share: PositiveFloat = 1.0
    """Relative share of the epsilon that is divided among all tables whose noise is none."""


@dataclass(frozen=True, kw_only=True)
class PATE(ResponseMechanism):
    """Noisy votes of teachers trained on disjoint parts of the data."""

    about: ClassVar[str] = "noisy votes of teachers, each trained on its own part of the records"
    assumes: ClassVar[tuple[str, ...]] = (
        "each record belongs to one teacher, whatever the other records are",
        f"{COUNTED}: the sampling rate of a critic reveals it",
        NOT_CHOSEN,
    )

    pate: PateConfig = field(default_factory=PateConfig)
    """Teachers and votes."""

    def refusal(self, query: Query, task: Task) -> str | None:
        """Refuse training in rounds, secure sums of values derived from votes, and tasks without classes to
        vote for.
        """
        if query.span is not None:
            return "teachers are trained once, before the first query, and this query trains the model"
        # One vote moves each value of logarithms, probabilities or entropies, and so the gradients of all
        # teachers.
        if query.sums and any(kind.category == "scores" for kind in query.releases.values()):
            return (
                "noise is added to votes, and the sums of link.secure_aggregation are computed from them: "
                "use dp-sgd"
            )
        if task.kind != "class" and any(
            kind.category not in ("counts", "moments") for kind in query.releases.values()
        ):
            return f"teachers vote for one class an input, unlike task {task.name}: use dp-sgd"
        return None

    def rule(self, release: DeclaredRelease, levels: Mapping[str, float]) -> ReleaseRule:
        """Add noise to votes, and to the mean of the teachers' gradients.

        This holds for built-in methods only, which release votes unchanged. A plug-in may transform them in
        unknown ways, so that one vote may move a row, and the gradients of all teachers, without limit.
        """
        pate = self.pate
        if release.is_input_gradient:
            # A gradient that depends on records depends on those of all teachers.
            teachers = 1 if release.depends_on_records or release.from_plugin else pate.teachers
            return SanitizedGradients(self.gradients.clip, levels["gradients"], teachers)
        if release.kind.category == "scores" and not (release.depends_on_records or release.from_plugin):
            return NoisyVotes(pate, levels["pate"])
        return super().rule(release, levels)

    def shard_indices(self, data: TensorData) -> Sequence[torch.Tensor]:
        """Partition the records by a hash of their content."""
        return partition_records(data, self.pate.teachers)

    def ensemble(self, networks: Sequence[nn.Module]) -> nn.Module:
        """Return the teachers as one voting network."""
        return TeacherEnsemble(networks, self.pate.sharpness, self.gradients.clip)

    def facts(self, levels: Mapping[str, float]) -> Mapping[str, str]:
        """Report the noise on the votes, with a warning if it exceeds the votes."""
        noise, teachers = levels["pate"], self.pate.teachers
        text = f"noise {noise:.4g} on the votes of {teachers} teachers"
        return {"votes": f"{text}: {MOSTLY_NOISE}" if noise >= teachers / 2 else text} if noise else {}


@dataclass(frozen=True)
class NoisyVotes(CheckedOptions, ReleaseRule):
    """Noisy votes of teachers that learned from disjoint parts of the records: PATE.

    Papernot, Song, Mironov, Raghunathan, Talwar, Erlingsson, "Scalable Private Learning with PATE", ICLR
    2018: GNMax, Confident-GNMax (Alg. 1), and the data-independent cost (Prop. 8: with noise sigma a
    response is (lambda, lambda / sigma^2)-RDP).

    Assumes that each record (or group) is in one teacher's part, and that adding or removing it moves no
    other record to another part. Then one teacher's vote changes from one class to another: votes move by
    sqrt(2) in L2 for each input, the largest number of votes of an input by 1.

    Inputs and outputs are ``sharpness`` times the share of votes for each class. All noisy votes cost the
    same as the class with the most votes, which follows from them.

    Args:
        pate: number of teachers, and the form of the release. Rows below its threshold are zeros, and cost
            no votes.
        sigma: standard deviation of the noise on the votes for each class; 0: no noise, no guarantee.
    """

    section: ClassVar[str] = "pate"
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
        """Round to whole votes from 0 to m, as logits: ``(B, C)``."""
        return self._logits(self.votes(tensor))

    def noise(self, tensor: torch.Tensor, sampler: NoiseSampler) -> torch.Tensor:
        """Return noisy votes or the class with the most of them, as logits; rows below the threshold are
        zeros.
        """
        votes = self.votes(tensor)
        if self.sigma == 0 or votes.numel() == 0:
            return self._logits(votes)
        noisy = add_noise(votes, sampler.normal(votes.shape), self.sigma)
        if self.pate.release == "label":
            top_class = torch.zeros_like(noisy).scatter_(1, noisy.argmax(1, keepdim=True), self.pate.teachers)
            logits = self._logits(top_class)
        else:
            logits = self._logits(noisy)
            # Rows of zeros mean "below the threshold", so that other rows must not be all zeros.
            logits = torch.where(logits == 0, torch.full_like(logits, 1e-6 * self.pate.sharpness), logits)
        if self.pate.threshold:
            top_votes = add_noise(votes.amax(1), sampler.normal(votes.shape[:1]), self.pate.threshold_noise)
            logits = logits * (top_votes >= self.pate.threshold).unsqueeze(1)
        return logits

    def cost(self, shape: Sequence[int]) -> PrivacyCost | None:
        """Cost if all rows reach the threshold."""
        return self._cost(row_count_and_size(shape)[0], row_count_and_size(shape)[0])

    def actual_cost(self, shape: Sequence[int], noised: torch.Tensor) -> PrivacyCost | None:
        """Cost of the threshold for each row, and of votes for the rows that reach it."""
        rows = row_count_and_size(shape)[0]
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
        """Return whole votes from 0 to m, without noise: ``(B, C)``."""
        votes = to_finite(logits) * (self.pate.teachers / self.pate.sharpness)
        return votes.round().clamp(0, self.pate.teachers)

    def _logits(self, votes: torch.Tensor) -> torch.Tensor:
        return votes * (self.pate.sharpness / self.pate.teachers)


class TeacherEnsemble(nn.Module):
    """Ensemble of networks ``(B, C, H, W)`` to ``(B, classes)`` that returns the share of their votes.

    Forward: ``sharpness`` times the share of teachers whose largest logit is that class. Backward: the
    gradient of ``sharpness`` times the mean of their softmax (straight through), where each teacher's own
    gradient with respect to each input is clipped to an L2 norm of ``clip`` before the mean over teachers.
    One teacher thus moves a row of votes by one vote in one class and one in another, and an input's
    gradient by at most ``2 clip / m``.

    A teacher without records abstains: its vote goes to no class, and its gradient is zero. A teacher also
    abstains for an input if its logits for it are not all finite, as may happen for huge inputs or after a
    diverged training. Its outputs then affect no vote but its own.

    The votes are the same to the bit, with or without gradients.

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
        """Map ``(B, C, H, W)`` to ``(B, classes)`` float32: ``sharpness`` times the share of votes."""
        # The mean over teachers comes later, so that each gradient here is one m-th of the teacher's own.
        clip = self.clip / len(self)
        z = torch.stack(
            [teacher(_ClippedGradient.apply(x, clip)).float() for teacher in self.teachers]  # type: ignore[no-untyped-call]
        )  # (m, B, classes)
        share: torch.Tensor = _VotesOverAllTeachers.apply(z, self.voting)  # type: ignore[no-untyped-call]
        return self.sharpness * share

    def set_abstaining_teachers(self, shards: Sequence[torch.Tensor]) -> None:
        """Let exactly the teachers with empty shards abstain."""
        self.voting.copy_(torch.tensor([float(len(part) > 0) for part in shards]))

    def extra_repr(self) -> str:
        """Options that the outputs depend on."""
        return f"sharpness={self.sharpness}, clip={self.clip}"


class _VotesOverAllTeachers(torch.autograd.Function):
    """Share of votes for each class, ``(B, classes)``, with the gradient of the mean softmax.

    Takes logits ``(m, B, classes)`` and a mask of the voting teachers ``(m,)``. The forward pass computes
    no gradient, so that no gradient can affect the votes.
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
    """Return 1 where a teacher votes on an input, 0 where it abstains: ``(m, B, 1)``."""
    return z.isfinite().all(2, keepdim=True) * voting.view(-1, 1, 1)


class _ClippedGradient(torch.autograd.Function):
    """Identity whose backward pass clips each row of the gradient to an L2 norm of ``clip``.

    NaN in the gradient, as from a broken teacher, becomes zero.
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
    """Return the records of each of ``m`` teachers: indices (int64, ascending), one tensor for each teacher.

    A hash of a record's content (or of its group number, if records have groups) chooses the teacher.
    Adding or removing a record thus moves no other one. Shards have unequal sizes, and some may be empty.
    Equal records belong to the same teacher.
    """
    if data.groups is not None:
        contents = [str(group).encode() for group in data.groups.tolist()]
    else:
        inputs, targets = data.inputs.cpu().numpy(), data.targets.cpu().numpy()
        contents = [x.tobytes() + y.tobytes() for x, y in zip(inputs, targets, strict=True)]
    hashes = (hashlib.blake2b(content, digest_size=8).digest() for content in contents)
    teacher_of = torch.tensor([int.from_bytes(hashed, "big") % m for hashed in hashes], dtype=torch.int64)
    return [(teacher_of == teacher).nonzero().flatten() for teacher in range(m)]
