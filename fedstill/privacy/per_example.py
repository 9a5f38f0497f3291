"""Computes each example by itself, to the last bit, though many at once.

Kernels are chosen by shape: the same row of a matrix product rounds otherwise among two rows than among one,
and may round otherwise at a batch's end than in its middle. It is a last bit, but whoever gives the network
its parameters can make anything of it, so that one record less would change what all others say. So batches
have one shape, however many examples were drawn, and a way to compute in which places differ is not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn
from torch.func import vmap

Outputs = Sequence[torch.Tensor]
Parameters = dict[str, torch.Tensor]  # parameters by name

MIN_COMPARED_NUMBERS = 2**18  # numbers that are compared, at least, before a way to compute is taken for even
MAX_TRIALS = 32  # examples that are tried, at most

_layouts: dict[Hashable, tuple[bool, int]] = {}  # what was found, for the life of the process


class PerExample:
    """A function of one example, for many.

    Computed are ``rows`` at once, with the parameters that all share or, where places differ so, with a copy
    for each example (a matrix product each); where they still do, one at a time.

    Args:
        one: of parameters and one example, the tensors that follow from it, without a batch's axis.
        rows: examples at once; says nothing of how many were drawn.
        module: the network.
        leaves: those of its parameters that ``one`` is given, by name, or by name after "module."; only
            shapes and types count here.
        tensors: inputs, and targets, ``(B, ...)``; only shapes and types count.
        finish: of what ``one`` gives, for a whole batch, what is wanted of it, each ``(B, ...)``.
        about: what else ``one`` depends on.
    """

    def __init__(
        self,
        function: Callable[..., Outputs],
        rows: int,
        module: nn.Module,
        leaves: Parameters,
        *tensors: torch.Tensor,
        postprocess: Callable[[Outputs], Outputs] = tuple,
        depends_on: Hashable = None,
    ) -> None:
        self._function, self._postprocess = function, postprocess
        tensors_by_name = chain(module.named_parameters(), module.named_buffers())
        passed_names = leaves.keys() | {name.removeprefix("module.") for name in leaves}
        not_passed = {name: tensor for name, tensor in tensors_by_name if name not in passed_names}
        self._fixed_tensors = [tensor for tensor in not_passed.values() if tensor.is_floating_point()]
        fixed_keys = [(name, *_tensor_key(tensor)) for name, tensor in not_passed.items()]
        key = _layout_key(rows, module, leaves, tensors, (depends_on, *fixed_keys))
        if key not in _layouts:
            _layouts[key] = self._choose_layout(rows, leaves, tensors)
        self.shared, self.rows = _layouts[key]

    def __call__(self, leaves: Parameters, *tensors: torch.Tensor) -> Iterator[Outputs]:
        """What follows from each example, batch by batch, of those that are there alone."""
        for count, batch in fixed_size_batches(self.rows, *tensors):
            yield [outputs[:count] for outputs in self._compute(self.shared, leaves, batch)]

    def _compute(self, shared: bool, leaves: Parameters, batch: Outputs) -> Outputs:
        vectorized = vmap(
            self._function, in_dims=(None if shared else 0, *[0] * len(batch)), randomness="error"
        )
        if not shared:
            leaves = {name: leaf.expand(len(batch[0]), *leaf.shape) for name, leaf in leaves.items()}
        return self._postprocess(vectorized(leaves, *batch))

    def _choose_layout(self, rows: int, leaves: Parameters, tensors: Outputs) -> tuple[bool, int]:
        """The first way in which all places of a batch of equal examples give the same bits.

        Examples are random, and so are all parameters, and buffers of real numbers: those that the network
        has could be such that no difference shows, and whoever sends it chooses them, of layers that do not
        learn too.
        """
        parameter_count = sum(leaf.numel() for leaf in leaves.values())
        for shared in (True, False) if rows > 1 else ():
            generator = torch.Generator().manual_seed(0)
            trials = range(min(max(MIN_COMPARED_NUMBERS // max(rows * parameter_count, 1), 2), MAX_TRIALS))
            if all(self._is_position_independent(shared, rows, leaves, tensors, generator) for _ in trials):
                return shared, rows
        return True, 1

    def _is_position_independent(
        self, shared: bool, rows: int, leaves: Parameters, tensors: Outputs, generator: torch.Generator
    ) -> bool:
        inputs, *others = tensors
        random_leaves = {name: _random_weights_like(leaf, generator) for name, leaf in leaves.items()}
        example = [
            _random_like(inputs[:1], generator),
            *(_random_bits_like(other[:1], generator) for other in others),
        ]
        batch = [tensor.repeat(rows, *[1] * (tensor.ndim - 1)) for tensor in example]
        with _randomized(self._fixed_tensors, generator):
            outputs = self._compute(shared, random_leaves, batch)
        return all(torch.equal(tensor, tensor[:1].expand_as(tensor)) for tensor in outputs)


def fixed_size_batches(rows: int, *tensors: torch.Tensor) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Batches of exactly so many rows, the last filled up with zeros, and how many rows of each are real.

    Each is a copy: where rows begin in memory does not depend on what stood before them either.

    >>> [(real, x.tolist()) for real, [x] in fixed_size_batches(2, torch.tensor([1, 2, 3]))]
    [(2, [1, 2]), (1, [3, 0])]
    """
    for first in range(0, len(tensors[0]), rows):
        parts = [tensor[first : first + rows] for tensor in tensors]
        count = len(parts[0])
        yield count, [torch.cat([part, part.new_zeros(rows - count, *part.shape[1:])]) for part in parts]


def _layout_key(
    rows: int, module: nn.Module, leaves: Parameters, tensors: Outputs, depends_on: Hashable
) -> Hashable:
    """A network, the shapes of what it computes, and how."""
    device = tensors[0].device
    autocast = torch.is_autocast_enabled(device.type)
    settings = (rows, str(device), torch.get_autocast_dtype(device.type) if autocast else None)
    shapes = [(tensor.shape[1:], tensor.dtype) for tensor in tensors]
    leaf_keys = [(name, leaf.shape, leaf.dtype) for name, leaf in leaves.items()]
    return (*settings, torch.get_num_threads(), type(module), repr(module), depends_on, *shapes, *leaf_keys)


def _random_like(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random numbers of a tensor's shape and type."""
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, generator=generator).to(tensor)
    return _random_bits_like(tensor, generator)


def _random_bits_like(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random 0 and 1, which are targets of any task."""
    return torch.randint(0, 2, tensor.shape, generator=generator).to(tensor)


def _random_weights_like(leaf: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random numbers of about the size that first weights have."""
    values = _random_like(leaf, generator)
    return values / math.prod(leaf.shape[1:]) ** 0.5 if leaf.is_floating_point() else values


def _tensor_key(tensor: torch.Tensor) -> Sequence[Hashable]:
    """What is told of a parameter that does not learn, or of a buffer: the form of real numbers, and of
    others, which may be places or masks, what they are."""
    form = (tensor.shape, tensor.dtype, tensor.stride())
    return form if tensor.is_floating_point() else (*form, tensor.cpu().numpy().tobytes())


@contextmanager
def _randomized(tensors: Sequence[torch.Tensor], generator: torch.Generator) -> Iterator[None]:
    """Random numbers in their places for so long; in buffers not negative, as variances are."""
    saved = [tensor.detach().clone() for tensor in tensors]
    try:
        with torch.no_grad():
            for tensor in tensors:
                values = _random_weights_like(tensor, generator)
                tensor.copy_(values if isinstance(tensor, nn.Parameter) else values.abs())
        yield
    finally:
        with torch.no_grad():
            for tensor, original in zip(tensors, saved, strict=True):
                tensor.copy_(original)
