"""Secure aggregation (experimental): the server sees sums over the nodes, and no single node's response.

A query declares how each part is added (:attr:`fedstill.protocol.queries.Query.sums`). Each node multiplies
its release by its own weight, which the server need not know, and encodes the product as 64-bit integers.
These are added modulo 2^64, so that masks which cancel change no digit of the sum
(:mod:`fedstill.node.secure_aggregation`). The weights are added, too: the ratio of both sums is the weighted
mean over all nodes that took part.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Interval

from fedstill.core.errors import ArgumentError, DataError, NodeFault, format_option, list_names
from fedstill.core.options import CheckedOptions

SumWeighting = Literal["sum", "mean", "size", "counts"]
"""Weighting of a summed part. ``sum``: a plain sum. ``mean``: the unweighted mean. ``size``: the mean
weighted by the nodes' numbers of examples. ``counts``: the mean weighted by their numbers of examples of each
class, along the part's second axis.
"""

Replacement = Callable[[Sequence[int], int], torch.Tensor]

SUM = "sum of the nodes"  # name of the sum in place of a node's name
WEIGHT_SUFFIX = ":weight"  # "logits:weight" is the sum of weights of a weighted sum of "logits"
MIN_SUM_NODES = 3  # in a sum of two, each node could subtract its own part
FRACTION_BITS = 32  # fractional bits of summed numbers
KEY_BYTES = 32
GRADIENT_FRACTION_BITS = 36  # of input gradients, for output gradients of scale 1

SumNumber = Annotated[int, Interval(ge=0, lt=2**53)]


def linear_sums(
    is_summed: bool, sums: Mapping[str, SumWeighting], **options: tuple[object, object]
) -> Mapping[str, SumWeighting]:
    """Return the weightings of a response that is linear with some options of a method only.

    Args:
        is_summed: the run has secure aggregation; otherwise no weighting is needed.
        sums: weighting of each tensor of the response.
        options: the option's value, and the value with which the response is linear, by option.

    Raises:
        ArgumentError: other options under secure aggregation; names all that must change.

    >>> linear_sums(True, {"logits": "size"}, levels=(0, 0))
    {'logits': 'size'}
    >>> linear_sums(True, {"logits": "size"}, levels=(20, 0))
    Traceback (most recent call last):
    ...
    fedstill.core.errors.ArgumentError: invalid link.secure_aggregation = True (expected false, or ...)
    """
    if not is_summed:
        return {}
    changes = [
        format_option(f"method.{name}", needed)
        for name, (value, needed) in options.items()
        if value != needed
    ]
    if changes:
        expected = f"false, or {', '.join(changes)}: one linear statistic of each response enters a sum"
        raise ArgumentError("link.secure_aggregation", True, expected)
    return sums


@dataclass(frozen=True)
class SumRequest(CheckedOptions):
    """Request for one sum.

    Args:
        number: number of the sum, unique in a run and increasing.
        members: names of the nodes that add to it.
        recover: the sum may be decoded without members that fail meanwhile.

    Raises:
        ArgumentError: a member is listed twice.
    """

    number: SumNumber
    members: tuple[str, ...]
    recover: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.members)) != len(self.members):
            raise ArgumentError("members", list(self.members), "unique names of nodes")


def to_ring(tensor: torch.Tensor, fraction: int = FRACTION_BITS) -> torch.Tensor:
    """Encode numbers as 64-bit integers with ``fraction`` fractional bits; the shape stays.

    Larger numbers wrap around, as a sum does. A refusal would reveal the size of one node's response.

    Raises:
        DataError: NaN or infinity.

    >>> to_ring(torch.tensor([0.5, -1.0]), fraction=4)
    tensor([  8, -16])
    """
    scaled = (tensor.double() * 2.0**fraction).round()
    if not bool(torch.isfinite(scaled).all()):
        raise DataError("numbers to be summed are NaN or infinite")
    # A multiple of 2^64 is exact at any size; small numbers would lose digits by it.
    wraps = torch.where(scaled.abs() < 2.0**63, 0.0, ((scaled + 2.0**63) / 2.0**64).floor())
    return (scaled - wraps * 2.0**64).to(torch.int64)


def from_ring(tensor: torch.Tensor, fraction: int = FRACTION_BITS) -> torch.Tensor:
    """Decode the result of :func:`to_ring`, or a sum of such results, to float64.

    >>> from_ring(to_ring(torch.tensor([0.5])) + to_ring(torch.tensor([0.25])))
    tensor([0.7500], dtype=torch.float64)
    """
    return tensor.double() / 2.0**fraction


def fraction_bits(kind: Any) -> int:
    """Return the number of fractional bits for a payload kind."""
    return GRADIENT_FRACTION_BITS if kind.category == "gradients" else FRACTION_BITS


def power_of_two_scale(output_gradients: Mapping[str, torch.Tensor]) -> float:
    """Return the power of two that scales the largest value to between 0.5 and 1; 1 for zeros.

    Input gradients are linear in the output gradients. With large output gradients a server could find the
    size of one node's input gradients.

    >>> power_of_two_scale({"z": torch.tensor([0.3, -5.0])}), power_of_two_scale({"z": torch.zeros(2)})
    (8.0, 1.0)
    """
    largest = max(
        (float(tensor.abs().max()) for tensor in output_gradients.values() if tensor.numel()), default=0.0
    )
    return math.ldexp(1.0, math.frexp(largest)[1]) if largest else 1.0


def node_weight(weighting: SumWeighting, reported: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return a node's own weight: ``()``, ``(C,)`` by class, or None for a plain sum.

    Args:
        weighting: how the part is weighted.
        reported: the counts that the node has released, by weighting.

    Raises:
        KeyError: the node has not released its counts yet.
    """
    if weighting == "sum":
        return None
    if weighting == "mean":
        return torch.ones((), dtype=torch.float64)
    return reported[weighting].double().cpu()


def broadcast_weight(weight: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a weight in the shape of a part: ``(C,)`` along the second axis of ``(B, C, ...)``."""
    if not weight.ndim:
        return weight
    return weight.reshape(1, -1, *(1,) * (like.ndim - 2))


def sum_contributions(
    released: Mapping[str, torch.Tensor],
    kinds: Mapping[str, Any],
    sums: Mapping[str, SumWeighting],
    reported: Mapping[str, torch.Tensor],
    replacement: Replacement | None = None,
    always_replace: bool = False,
) -> dict[str, torch.Tensor]:
    """Return one node's contribution to a sum: its weighted parts and its weights, as 64-bit integers.

    Args:
        released: the tensors that its gate releases. Gradients are those of outputs that are weighted
            already.
        kinds: payload kind of each part.
        sums: weighting of each part. Parts that are not listed (gradients) are added unweighted.
        reported: the counts that the node has released.
        replacement: function of shape and index of a part that returns random integers. They replace a
            response with NaN, infinity or too large numbers: a refusal, or any number known to the server,
            would distinguish that response from the others'. All of the response is replaced, as a server
            that chooses the inputs could read the size of each value from values that are replaced one by
            one. None: such a response is an error.
        always_replace: replace any response, for a node that has replaced as many as its policy allows.

    Raises:
        DataError: NaN or infinity, without ``replacement``.
        KeyError: the node has not released the counts that it is weighted by.
    """
    parts, weights = {}, {}
    for name, tensor in sorted(released.items()):
        weight = node_weight(sums.get(name, "sum"), reported)
        parts[name] = tensor.double().cpu()
        if weight is not None:
            parts[name] = parts[name] * broadcast_weight(weight, parts[name])
            weights[name + WEIGHT_SUFFIX] = to_ring(weight)
    bits = {name: fraction_bits(kinds[name]) for name in parts}
    fits = not always_replace and all(_fits_ring(part, bits[name]) for name, part in parts.items())
    if replacement is not None and not fits:
        return {
            name: replacement(part.shape, index) for index, (name, part) in enumerate(parts.items())
        } | weights
    return {name: to_ring(part, bits[name]) for name, part in parts.items()} | weights


def _fits_ring(part: torch.Tensor, fraction: int) -> bool:
    """Return whether the ring can represent each value; it cannot represent NaN."""
    return bool(((part * 2.0**fraction).abs() < 2.0**63).all())


def add_contributions(contributions: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the sum of the nodes' contributions modulo 2^64, by part."""
    first, *others = contributions
    total = {name: tensor.clone() for name, tensor in first.items()}
    for other in others:
        for name, tensor in total.items():
            tensor += other[name]
    return total


def is_corrupted(ring: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a sum is as large as one of random numbers: an eighth of the ring's range or more.

    >>> is_corrupted({"x": to_ring(torch.tensor([1e8]))}), is_corrupted({"x": torch.tensor([2**61])})
    (False, True)
    """
    return any(bool((tensor.double().abs() >= 2.0**60).any()) for tensor in ring.values())


def decode_sums(
    ring: Mapping[str, torch.Tensor], kinds: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the sums or weighted means, float32, and the weight that divided each, float64.

    A class that no node holds has weight 0 and no mean. It gets the lowest value of the other classes. A
    small positive weight for it at every node would put a second sum, of equal weights, into the last digits,
    which a server reads whenever the responses have few digits.

    >>> from fedstill.protocol.payload_kinds import LOGITS
    >>> ring = {"z": to_ring(torch.tensor([[6.0, 2.0, 0.0]])), "z:weight": to_ring(torch.tensor([3.0, 2, 0]))}
    >>> decode_sums(ring, {"z": LOGITS})[0]["z"]
    tensor([[2., 1., 1.]])
    """
    values, weights = {}, {}
    for name, tensor in ring.items():
        if name.endswith(WEIGHT_SUFFIX):
            continue
        value = from_ring(tensor, fraction_bits(kinds[name]))
        if name + WEIGHT_SUFFIX in ring:
            weight = broadcast_weight(from_ring(ring[name + WEIGHT_SUFFIX]), value)
            absent = weight == 0  # (1, C, ...), of classes
            if weight.ndim and bool(absent.any()):
                weight = weight.masked_fill(absent, 1.0)
                lowest = (value / weight).masked_fill(absent, math.inf).amin(1, keepdim=True)
                value = torch.where(absent, lowest, value)
            weights[name] = weight
            value = value / weight
        values[name] = value.float()
    return values, weights


def contribution_faults(
    contributions: Mapping[str, Mapping[str, torch.Tensor]], expected: Sequence[str]
) -> dict[str, str]:
    """Return the faults of contributions by node: the checks that are possible before the sum.

    Raises:
        NodeFault: contributions differ in shape, and the faulty one is unknown.
    """
    faults: dict[str, str] = {}
    shapes: dict[tuple[Any, ...], list[str]] = {}
    for node, parts in contributions.items():
        if set(parts) != set(expected):
            faults[node] = f"added {sorted(parts) or 'nothing'} (expected {sorted(expected)})"
        elif any(tensor.dtype != torch.int64 for tensor in parts.values()):
            faults[node] = "added other numbers than 64-bit integers"
        else:
            shapes.setdefault(tuple(tuple(parts[name].shape) for name in expected), []).append(node)
    if len(shapes) > 1:
        common = max(shapes.values(), key=len)
        odd = [node for nodes in shapes.values() if nodes is not common for node in nodes]
        if len(common) <= len(odd):
            names = list_names(name for nodes in shapes.values() for name in nodes)
            raise NodeFault(
                names, "sum", "their contributions differ in shape, and the faulty one is unknown"
            )
        faults |= dict.fromkeys(odd, "added tensors of another shape than the other nodes")
    return faults


# --- masks ----------------------------------------------------------------------------------------------


def mask_sign(name: str, other: str) -> int:
    """Return 1 if the first of two nodes adds their shared mask, and -1 if it subtracts it."""
    return 1 if name < other else -1


def mask_tensor(key: bytes, index: int, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor of 64-bit integers that look random without the key; equal keys and indices give
    equal numbers.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    count = torch.Size(shape).numel()
    if not count:
        return torch.zeros(tuple(shape), dtype=torch.int64)
    nonce = bytes(8) + index.to_bytes(8, "little")  # block counter and tensor index
    encryptor = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor()
    numbers = bytearray(encryptor.update(bytes(8 * count)))
    return torch.frombuffer(numbers, dtype=torch.int64).reshape(tuple(shape))


def derive_key(secret: bytes, context: bytes) -> bytes:
    """Return a key for one purpose, named by ``context``, from a shared or own secret."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), KEY_BYTES, salt=None, info=b"fedstill 1 " + context).derive(secret)


def encode_strings(*words: str) -> bytes:
    """Encode words as bytes, differently for any two lists."""
    return json.dumps(words).encode()
