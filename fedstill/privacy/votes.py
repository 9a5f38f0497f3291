"""The rule of PATE: noisy votes of teachers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedstill.core.checked import Checked, NonNegativeFloat, PositiveFloat, PositiveInt
from fedstill.privacy.bounds import numbers, rows_of
from fedstill.privacy.events import Event, Price
from fedstill.privacy.randomness import Draws, add_noise
from fedstill.privacy.rules import Rule


@dataclass(frozen=True)
class Votes(Checked, Rule):
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
        teachers: m, how many vote.
        sigma: standard deviation of the noise on the votes for each class; 0: none, no guarantee.
        release: "votes": all of them; "label": only which class has the most, as if all had voted for it.
        threshold: answer only inputs whose most votes, with noise of their own, reach it; other rows are
            zeros, and cost no votes. 0: answer all, and no such noise.
        threshold_noise: standard deviation of that noise, above 0.
        sharpness: logits of a class that all voted for.
    """

    under: ClassVar[str] = "pate"
    pays: ClassVar[str] = "pate"

    teachers: PositiveInt
    sigma: NonNegativeFloat
    release: Literal["votes", "label"] = "votes"
    threshold: NonNegativeFloat = 0.0
    threshold_noise: PositiveFloat = 10.0
    sharpness: PositiveFloat = 10.0

    @property
    def text(self) -> str:
        if self.sigma == 0:
            return f"votes of {self.teachers} teachers without noise: no guarantee"
        what = "all votes" if self.release == "votes" else "the class with the most votes"
        told = f"{what} of {self.teachers} teachers, Gaussian noise {self.sigma:g}"
        where = f", where the most reach {self.threshold:g} (noise {self.threshold_noise:g})"
        return told + where if self.threshold else told

    def bound(self, tensor: torch.Tensor) -> torch.Tensor:
        """Whole votes from 0 to m, as logits: ``(B, C)``."""
        return self._logits(self.votes(tensor))

    def noise(self, tensor: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Noisy votes or the class of the most, as logits; rows below the threshold are zeros."""
        votes = self.votes(tensor)
        if self.sigma == 0 or votes.numel() == 0:
            return self._logits(votes)
        noisy = add_noise(votes, draws.normal(votes.shape), self.sigma)
        if self.release == "label":
            chosen = torch.zeros_like(noisy).scatter_(1, noisy.argmax(1, keepdim=True), self.teachers)
            logits = self._logits(chosen)
        else:
            logits = self._logits(noisy)
            # Zeros throughout mean that nothing is said: a row that is answered must not look like one.
            logits = torch.where(logits == 0, torch.full_like(logits, 1e-6 * self.sharpness), logits)
        if self.threshold:
            most = add_noise(votes.amax(1), draws.normal(votes.shape[:1]), self.threshold_noise)
            logits = logits * (most >= self.threshold).unsqueeze(1)
        return logits

    def price(self, shape: Sequence[int]) -> Price | None:
        """As if each row were answered."""
        return self._price(rows_of(shape)[0], rows_of(shape)[0])

    def paid(self, shape: Sequence[int], noised: torch.Tensor) -> Price | None:
        """The threshold for each row, and votes for those that were answered."""
        rows = rows_of(shape)[0]
        answered = int((noised != 0).any(1).sum()) if self.threshold and rows else rows
        return self._price(rows, answered)

    def _price(self, rows: int, answered: int) -> Price | None:
        if self.sigma == 0:
            return None
        price = Price()
        if self.threshold and rows:
            price[Event("gaussian", self.threshold_noise / math.sqrt(rows))] += 1
        if answered:
            price[Event("gaussian", self.sigma / math.sqrt(2 * answered))] += 1
        return price

    def votes(self, logits: torch.Tensor) -> torch.Tensor:
        """Whole votes from 0 to m, without noise: ``(B, C)``."""
        votes = numbers(logits) * (self.teachers / self.sharpness)
        return votes.round().clamp(0, self.teachers)

    def _logits(self, votes: torch.Tensor) -> torch.Tensor:
        return votes * (self.sharpness / self.teachers)
