"""Batches in which each example is computed by itself, to the last bit.

Kernels are chosen by shape: the same row of a matrix product rounds otherwise among two rows than among one,
and may round otherwise at a batch's end than in its middle. It is a last bit, but whoever gives the network
its parameters can make anything of it, so that one record less would change what all others say. So batches
have one shape, however many examples there are, and a shape in which places differ is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

_even: dict[tuple[object, ...], int] = {}  # what was found, for the life of the process


def batches(rows: int, *tensors: torch.Tensor) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Batches of exactly so many rows, the last filled up with zeros, and how many rows of each are real.

    Each is a copy: where rows begin in memory does not depend on what stood before them either.

    >>> [(real, x.tolist()) for real, [x] in batches(2, torch.tensor([1, 2, 3]))]
    [(2, [1, 2]), (1, [3, 0])]
    """
    for first in range(0, len(tensors[0]), rows):
        parts = [tensor[first : first + rows] for tensor in tensors]
        real = len(parts[0])
        yield real, [torch.cat([part, part.new_zeros(rows - real, *part.shape[1:])]) for part in parts]


def even(
    rows: int,
    module: nn.Module,
    leaves: dict[str, torch.Tensor],
    outputs: Callable[..., Sequence[torch.Tensor]],
    inputs: torch.Tensor,
    *others: torch.Tensor,
) -> int:
    """The first of ``rows``, a half, a quarter, ... at which all places of a batch give the same bits; at
    worst 1, whose only place does.

    So many equal examples of random numbers are given to the network, with random parameters: those that it
    has could be such that no difference shows. It is done once for each network, shape and way to compute.

    Args:
        leaves: the parameters by name, of which only shapes and types count here.
        outputs: of parameters and of a batch, each ``(rows, ...)``.
        inputs, others: what a batch is of, ``(B, ...)``; only shapes and types count.
    """
    kind = inputs.device.type
    precision = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    shapes = [(each.shape[1:], each.dtype) for each in (inputs, *others)]
    wide = [(name, leaf.shape) for name, leaf in leaves.items()]
    key = (rows, repr(module), kind, precision, torch.get_num_threads(), *shapes, *wide)
    if key not in _even:
        generator = torch.Generator().manual_seed(0)
        drawn = {
            name: _like(leaf, generator) / max(leaf[:1].numel(), 1) ** 0.5 for name, leaf in leaves.items()
        }
        example = [_like(inputs[:1], generator), *(each.new_zeros(1, *each.shape[1:]) for each in others)]
        while rows > 1:
            found = outputs(drawn, *(each.repeat(rows, *[1] * (each.ndim - 1)) for each in example))
            if all(torch.equal(each, each[:1].expand_as(each)) for each in found):
                break
            rows //= 2
        _even[key] = rows
    return _even[key]


def _like(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random numbers of a tensor's shape and type."""
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, generator=generator).to(tensor)
    return torch.randint(0, 2, tensor.shape, generator=generator).to(tensor)
