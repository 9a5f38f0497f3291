"""Ensemble of networks as one network: an aggregator combines its members' outputs (FENS).

Its name has the aggregator and the members, so that it can be built from the name alone, as for a student's
file: ``ensemble:nn80:19*linear,mlp:64``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import nn

from fedstill.core.errors import ArgumentError
from fedstill.models.module_utils import deep_copy

PREFIX = "ensemble"
AGGREGATOR = re.compile("nn([1-9][0-9]*)|linear|weights")
EXPECTED = "ensemble:AGGREGATOR:MEMBERS, such as ensemble:nn40:9*linear,mlp:64"


class EnsembleName(NamedTuple):
    """Parts of an ensemble's name.

    Args:
        aggregator: ``nn`` with a number of hidden units, ``linear`` or ``weights`` (:func:`make_aggregator`).
        members: name of each member.

    >>> EnsembleName.parse("ensemble:nn4:2*mlp:8,linear")
    EnsembleName(aggregator='nn4', members=('mlp:8', 'mlp:8', 'linear'))
    >>> str(EnsembleName("nn4", ("mlp:8", "mlp:8", "linear")))
    'ensemble:nn4:2*mlp:8,linear'
    """

    aggregator: str
    members: tuple[str, ...]

    def __str__(self) -> str:
        runs = [(len(list(equal)), name) for name, equal in groupby(self.members)]
        members = ",".join(name if count == 1 else f"{count}*{name}" for count, name in runs)
        return f"{PREFIX}:{self.aggregator}:{members}"

    @classmethod
    def parse(cls, name: str) -> EnsembleName:
        """Parse an ensemble's name.

        Raises:
            ArgumentError: it has another form.
        """
        _, _, rest = name.partition(":")
        aggregator, _, listed = rest.partition(":")
        members: list[str] = []
        for part in listed.split(","):
            repeated = re.fullmatch(r"(?:([1-9][0-9]{0,5})\*)?([^*]+)", part)
            if repeated is None or not AGGREGATOR.fullmatch(aggregator):
                raise ArgumentError("model", name, EXPECTED)
            members += [repeated[2]] * int(repeated[1] or 1)
        return cls(aggregator, tuple(members))


def is_ensemble_name(name: str) -> bool:
    """Return whether a name is that of an ensemble."""
    return name.partition(":")[0] == PREFIX


def member_names(name: str) -> tuple[str, ...]:
    """Return the names of an ensemble's members; of another network, its own name.

    >>> member_names("ensemble:linear:2*mlp:8"), member_names("mlp:8")
    (('mlp:8', 'mlp:8'), ('mlp:8',))
    """
    return EnsembleName.parse(name).members if is_ensemble_name(name) else (name,)


class WeightedSum(nn.Module):
    """Weighted sum of the members' outputs ``(B, K, C)`` and a bias: ``(B, C)``. At first it is their mean.

    Args:
        members: number K of members.
        outputs: number of weights of each member: C, or 1 for one weight for all its outputs.
    """

    def __init__(self, members: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((members, outputs), 1 / members))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum."""
        return (self.weight * z).sum(-2) + self.bias


def make_aggregator(name: str, members: int, outputs: int) -> nn.Module:
    """Return a network that maps the outputs ``(B, K, C)`` of K members to ``(B, C)``.

    Args:
        name: ``nn40``, a perceptron with 40 hidden units; ``linear``, one weight for each member; or
            ``weights``, one for each output of each member.
        members: number K of members.
        outputs: number C of outputs.

    >>> make_aggregator("linear", 2, 3)(torch.tensor([[[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]]))
    tensor([[2., 2., 2.]], grad_fn=<AddBackward0>)
    """
    if name == "linear":
        return WeightedSum(members, 1)
    if name == "weights":
        return WeightedSum(members, outputs)
    hidden = int(name.removeprefix("nn"))
    layers = nn.Linear(members * outputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    return nn.Sequential(nn.Flatten(), *layers)


class Ensemble(nn.Module):
    """Networks of the same inputs and outputs, and an aggregator of their outputs.

    Args:
        members: the networks, which are copied. Only the aggregator has gradients.
        outputs: number of outputs of each.
        name: the ensemble's name, with the names of the members.

    Example:
        >>> name = EnsembleName("linear", ("linear", "linear"))
        >>> Ensemble([nn.Linear(4, 3), nn.Linear(4, 3)], 3, name)(torch.zeros(5, 4)).shape
        torch.Size([5, 3])
    """

    def __init__(self, members: Iterable[nn.Module], outputs: int, name: EnsembleName) -> None:
        super().__init__()
        self.name = name
        self.members = nn.ModuleList(map(deep_copy, members)).requires_grad_(False)
        self.aggregator = make_aggregator(name.aggregator, len(self.members), outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the aggregated outputs ``(B, C)``."""
        outputs: torch.Tensor = self.aggregator(self.member_outputs(x))
        return outputs

    def member_outputs(self, x: torch.Tensor) -> torch.Tensor:
        """Return the members' outputs ``(B, K, C)``."""
        return stack_outputs([member(x) for member in self.members])


def stack_outputs(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return outputs of K networks ``(B, C)`` as an aggregator takes them: ``(B, K, C)`` float32."""
    return torch.stack([each.float() for each in outputs], -2)
