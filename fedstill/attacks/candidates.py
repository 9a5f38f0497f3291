"""Records whose membership is asked for: members, as many others, and records that no model learned from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.core.seeds import torch_generator

POPULATION = 4  # one of so many test records is RMIA's
MOST_POPULATION = 500


@dataclass(frozen=True, eq=False)
class Candidates:
    """Records whose membership is asked for: members, ``inside`` ``(N,)`` bool, and others.

    Args:
        population: further records that no model learned from.
        learned: how many members there are in all.
    """

    records: TensorData
    inside: torch.Tensor
    population: TensorData
    learned: int

    @property
    def all(self) -> TensorData:
        """Records, and behind them the population."""
        return merged([self.records, self.population])


def candidates(
    members: TensorData, test: TensorData, most: int, seed: int, *, alike: bool = False
) -> Candidates:
    """Of each ``most`` at most: of all records that the target learned from, and of ``test``, which it did
    not; ``alike``: others have the members' classes, in their shares."""
    order = torch.randperm(len(test), generator=torch_generator(seed, "membership", "test"))
    apart = min(len(test) // POPULATION, MOST_POPULATION)
    population, rest = test.subset(order[:apart]), test.subset(order[apart:])
    learned = len(members)
    drawn = torch.randperm(len(members), generator=torch_generator(seed, "membership", "members"))
    members = members.subset(drawn[:most].sort().values)
    first = torch.arange(min(len(rest), most))
    others = rest.subset(_alike(rest.targets, members.targets, most) if alike else first)
    if min(len(members), len(others), len(population)) < 2:
        sizes = f"{len(members)} members, {len(others)} others, a population of {len(population)}"
        raise ArgumentError("records", sizes, "two of each, to tell who was a member")
    inside = torch.arange(len(members) + len(others)) < len(members)
    return Candidates(merged([members, others]), inside, population, learned)


def _alike(targets: torch.Tensor, like: torch.Tensor, most: int) -> torch.Tensor:
    """Rows of ``targets`` (N,), as many as can be, whose classes have the shares that they have in ``like``.

    At most ``most``, but for rounding up in each class.

    >>> _alike(torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 1, 1, 1]), 10).tolist()
    [0, 3, 4]
    """
    classes = int(max(targets.max(), like.max())) + 1
    have, want = (torch.bincount(labels, minlength=classes).double() for labels in (targets, like))
    share = want / want.sum()
    known = (share > 0) & (have > 0)
    total = min(float((have[known] / share[known]).min()), most)  # limited by the scarcest class
    counts = torch.clamp((share * total).ceil(), max=have).long()
    rows = [torch.nonzero(targets == label).flatten()[: int(counts[label])] for label in range(classes)]
    return torch.cat(rows).sort().values


def merged(parts: Sequence[TensorData]) -> TensorData:
    return TensorData.joined([part.to("cpu") for part in parts])
