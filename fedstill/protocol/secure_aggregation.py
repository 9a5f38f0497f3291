"""Answers that reach the server as sums over nodes only: what is added, in which ring, and how it is read.

A query says part by part what is added (:attr:`fedstill.protocol.queries.Query.sums`). Each node
multiplies what its gate lets out by its own weight, which the server need not know, and writes it as whole
numbers of 64 bits; these are added modulo 2^64, so that masks which cancel change no digit of the sum
(:mod:`fedstill.node.sum_masks`). The weights are added, too: sum over sum is the weighted mean, whoever took
part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Interval

from fedstill.core.errors import ArgumentError, DataError, NodeFault
from fedstill.core.options import Checked

SumWeighting = Literal["sum", "mean", "size", "counts"]
"""How a part is added: as it is; as it is, for its mean; or for its mean weighed by what each node told of
the size of its data, or of its examples of each class (by the part's second axis)."""

Corruption = Callable[[Sequence[int], int], torch.Tensor]

SUM = "sum of the nodes"  # stands for all nodes in answers
WEIGHT = ":weight"  # "logits:weight" goes with a sum of "logits" that is weighed
LEAST = 3  # nodes in a sum: of two, each could take its own away
FRACTION_BITS, GRADIENT_FRACTION_BITS = (
    32,
    36,
)  # bits behind the point, and those of gradients of what is pulled back at scale 1


SumNumber = Annotated[int, Interval(ge=0, lt=2**53)]


@dataclass(frozen=True)
class SumRequest(Checked):
    """Of which nodes one sum is made.

    Args:
        number: that no other sum of a run has; it rises.
        members: the nodes that add to it.
        recover: whether it may be read without those of them that fail meanwhile.
    """

    number: SumNumber
    members: tuple[str, ...]
    recover: bool = False

    def __post_init__(self) -> None:
        """Names each member once.

        Raises:
            ArgumentError: it does not.
        """
        super().__post_init__()
        if len(set(self.members)) != len(self.members):
            raise ArgumentError("members", list(self.members), "names of nodes, each once")


def to_ring(tensor: torch.Tensor, fraction: int = FRACTION_BITS) -> torch.Tensor:
    """Numbers as whole ones of 64 bits, rounded at so many bits behind the point; of equal shape.

    What is larger wraps around, as a sum does: a refusal would tell how large one node's answer is.

    Raises:
        DataError: NaN or infinity.

    >>> to_ring(torch.tensor([0.5, -1.0]), fraction=4)
    tensor([  8, -16])
    """
    scaled = (tensor.double() * 2.0**fraction).round()
    if not bool(torch.isfinite(scaled).all()):
        raise DataError("numbers to be summed are none")
    # A multiple of 2^64 is exact at any size; small numbers would lose digits by it.
    turns = torch.where(scaled.abs() < 2.0**63, 0.0, ((scaled + 2.0**63) / 2.0**64).floor())
    return (scaled - turns * 2.0**64).to(torch.int64)


def from_ring(tensor: torch.Tensor, fraction: int = FRACTION_BITS) -> torch.Tensor:
    """What :func:`to_ring` made, or a sum of it, in float64.

    >>> from_ring(to_ring(torch.tensor([0.5])) + to_ring(torch.tensor([0.25])))
    tensor([0.7500], dtype=torch.float64)
    """
    return tensor.double() / 2.0**fraction


def fraction_bits(kind: Any) -> int:
    """Bits behind the point for a kind of tensor."""
    return GRADIENT_FRACTION_BITS if kind.of == "gradients" else FRACTION_BITS


def gradient_scale(pull: Mapping[str, torch.Tensor]) -> float:
    """The power of two that takes the largest of all numbers to between a half and 1; 1 where all are 0.

    Gradients are linear in what is pulled back: by its scale a server could find how large one node's are.

    >>> gradient_scale({"z": torch.tensor([0.3, -5.0])}), gradient_scale({"z": torch.zeros(2)})
    (8.0, 1.0)
    """
    largest = max((float(tensor.abs().max()) for tensor in pull.values() if tensor.numel()), default=0.0)
    return math.ldexp(1.0, math.frexp(largest)[1]) if largest else 1.0


def node_weight(how: SumWeighting, told: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """A node's own weight, by what it has told of itself, by the way of weighing: ``()``, or ``(C,)`` by
    class; None: the part is added as it is.

    Raises:
        KeyError: it has not told it yet.
    """
    if how == "sum":
        return None
    if how == "mean":
        return torch.ones((), dtype=torch.float64)
    return told[how].double().cpu()


def spread(weight: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A weight as it multiplies a part: ``(C,)`` along the second axis of ``(B, C, ...)``."""
    if not weight.ndim:
        return weight
    return weight.reshape(1, -1, *(1,) * (like.ndim - 2))


def sum_contributions(
    released: Mapping[str, torch.Tensor],
    kinds: Mapping[str, Any],
    sums: Mapping[str, SumWeighting],
    told: Mapping[str, torch.Tensor],
    spoil: Corruption | None = None,
    always: bool = False,
) -> dict[str, torch.Tensor]:
    """What one node adds: its part of each sum, weighed, and its weights, as whole numbers of 64 bits.

    Args:
        released: what its gate lets out; of gradients, what was pulled back from what is weighed already.
        sums: how each part is added; one that is not named (gradients) is added as it is.
        told: what the node has told of itself.
        spoil: gives random whole numbers of a shape, by the part's place, to stand for an answer that is no
            number or too large in any place: a refusal, or any number known to the server, would tell that
            answer apart from the others'. For all of it, as a server chooses what is asked: of places that
            are spoilt one by one it could read how large each is. None, where nobody is to be kept from
            knowing: it is an error.
        always: whether they stand for whatever it is: of a node that has spoilt as many sums as it may.

    Raises:
        DataError: NaN or infinity, without ``spoil``.
        KeyError: the node has not told what it is weighed by.
    """
    parts, weights = {}, {}
    for name, tensor in sorted(released.items()):
        weight = node_weight(sums.get(name, "sum"), told)
        parts[name] = tensor.double().cpu()
        if weight is not None:
            parts[name] = parts[name] * spread(weight, parts[name])
            weights[name + WEIGHT] = to_ring(weight)
    bits = {name: fraction_bits(kinds[name]) for name in parts}
    sound = not always and all(_fits(part, bits[name]) for name, part in parts.items())
    if spoil is not None and not sound:
        return {name: spoil(part.shape, place) for place, (name, part) in enumerate(parts.items())} | weights
    return {name: to_ring(part, bits[name]) for name, part in parts.items()} | weights


def _fits(part: torch.Tensor, fraction: int) -> bool:
    """Whether each value can be written in the ring; NaN cannot."""
    return bool(((part * 2.0**fraction).abs() < 2.0**63).all())


def total(each: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The sum of what nodes added, modulo 2^64: each part as one of them."""
    first, *others = each
    found = {name: tensor.clone() for name, tensor in first.items()}
    for other in others:
        for name, tensor in found.items():
            tensor += other[name]
    return found


def spoilt(ring: Mapping[str, torch.Tensor]) -> bool:
    """Whether a total is as large as one of random numbers: an eighth of all that can be written, or more.

    >>> spoilt({"x": to_ring(torch.tensor([1e8]))}), spoilt({"x": torch.tensor([2**61])})
    (False, True)
    """
    return any(bool((tensor.double().abs() >= 2.0**60).any()) for tensor in ring.values())


def decode_sums(
    ring: Mapping[str, torch.Tensor], kinds: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the sums or weighted means in a total, float32, and the weight that divided each, float64.

    A class that no node holds has weight 0, and so no mean. It gets the lowest value of the other classes:
    giving it a small positive weight at every node would put a second sum, of equal weights, into the last
    digits, where a server reads it whenever the responses have few digits themselves.

    >>> from fedstill.protocol.payload_kinds import LOGITS
    >>> ring = {"z": to_ring(torch.tensor([[6.0, 2.0, 0.0]])), "z:weight": to_ring(torch.tensor([3.0, 2, 0]))}
    >>> decode_sums(ring, {"z": LOGITS})[0]["z"]
    tensor([[2., 1., 1.]])
    """
    values, weights = {}, {}
    for name, tensor in ring.items():
        if name.endswith(WEIGHT):
            continue
        value = from_ring(tensor, fraction_bits(kinds[name]))
        if name + WEIGHT in ring:
            weight = spread(from_ring(ring[name + WEIGHT]), value)
            absent = weight == 0  # (1, C, ...), of classes
            if weight.ndim and bool(absent.any()):
                weight = weight.masked_fill(absent, 1.0)
                lowest = (value / weight).masked_fill(absent, math.inf).amin(1, keepdim=True)
                value = torch.where(absent, lowest, value)
            weights[name] = weight
            value = value / weight
        values[name] = value.float()
    return values, weights


def invalid_contributions(
    each: Mapping[str, Mapping[str, torch.Tensor]], wanted: Sequence[str]
) -> dict[str, str]:
    """Nodes whose summands are none, by name: all that can be seen of one before it is added.

    Raises:
        NodeFault: they differ in shape, and it is not known whose is wrong.
    """
    found: dict[str, str] = {}
    shapes: dict[tuple[Any, ...], list[str]] = {}
    for node, parts in each.items():
        if set(parts) != set(wanted):
            found[node] = f"added {sorted(parts) or 'nothing'}, not {sorted(wanted)}"
        elif any(tensor.dtype != torch.int64 for tensor in parts.values()):
            found[node] = "added what are no whole numbers of 64 bits"
        else:
            shapes.setdefault(tuple(tuple(parts[name].shape) for name in wanted), []).append(node)
    if len(shapes) > 1:
        common = max(shapes.values(), key=len)
        odd = [node for nodes in shapes.values() if nodes is not common for node in nodes]
        if len(common) <= len(odd):
            names = ", ".join(name for nodes in shapes.values() for name in nodes)
            raise NodeFault(
                names, "sum", "what they added differs in shape, and it is not known whose is wrong"
            )
        found |= dict.fromkeys(odd, "added what differs in shape from what others did")
    return found
