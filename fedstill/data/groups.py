"""Examples that belong together, of one patient say: protected as one, and so limited in number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.core.seeds import derive


def numbered(names: Iterable[object]) -> torch.Tensor:
    """Names as numbers, ``(N,)`` int64: hashes, so that a group's number depends on no other group.

    Whole numbers are what they are.

    >>> a, b, c = numbered(["a", "b", "a"])
    >>> bool(a == c), bool(a == b), bool(numbered(["b"]) == b)
    (True, False, True)
    """
    numbers = [name if type(name) is int else derive(0, "group", str(name)) for name in names]
    return torch.tensor(numbers, dtype=torch.int64)


def limit_groups(data: TensorData, most: int) -> TensorData:
    """At most ``most`` examples of each group, the first ones in order; of 1 each example is its own unit.

    An ArgumentError refuses a limit above 1 where no groups are known, or one below 1.

    >>> groups = torch.tensor([7, 7, 3, 7])
    >>> limit_groups(TensorData(torch.zeros(4, 1, 4, 4), torch.arange(4), groups), 2).targets
    tensor([0, 1, 2])
    """
    if most == 1:
        return data
    if most < 1 or data.groups is None:
        allowed = "1 or more" if most < 1 else "1, unless data.group says whose each example is"
        raise ArgumentError("privacy.group_size", most, allowed)
    seen: Counter[int] = Counter()
    kept = []
    for index, group in enumerate(data.groups.tolist()):
        seen[group] += 1
        if seen[group] <= most:
            kept.append(index)
    return data.subset(torch.tensor(kept, device=data.inputs.device))


def largest(data: TensorData) -> int:
    """How many examples the largest group has; 1 where nobody says whose they are.

    >>> largest(TensorData(torch.zeros(4, 1, 4, 4), torch.arange(4), torch.tensor([7, 7, 3, 7])))
    3
    """
    return 1 if data.groups is None else max(Counter(data.groups.tolist()).values(), default=1)
