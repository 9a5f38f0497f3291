"""Apply a function of one example to many, and harden it against hostile servers.

Kernels are chosen by shape. The same row of a matrix product may round differently in a batch of two than
alone, and differently at a batch's end than in its middle. The difference is a last bit, but a server that
chooses the network's parameters can amplify it, so that one missing record would change the gradients of
all others. Batches therefore always have one fixed size, however many examples were sampled.

With option ``privacy.isolate_rounding``, a layout in which positions round differently is not used, either.
Each architecture is tested on random examples and parameters, which takes at most MAX_TRIALS batches. Without
the option, a node's privacy statement lists the assumption that positions round alike.
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

MIN_COMPARED_NUMBERS = 2**18  # before positions count as equal
MAX_TRIALS = 32

_layouts: dict[Hashable, tuple[bool, int]] = {}  # chosen layouts, cached for the life of the process


class PerExampleFunction:
    """Apply a function of one example to many.

    It computes ``rows`` examples at once, with shared parameters. With ``isolate_rounding``, and if the
    positions of a batch then round differently, each example gets its own copy of the parameters (a matrix
    product each). If they still differ, examples are computed one at a time.

    Args:
        function: maps parameters and one example to tensors without a batch axis.
        rows: examples at once; must not depend on the number of sampled ones.
        module: the network.
        leaves: its parameters that ``function`` takes, by name, or by name after "module."; only shapes and
            types matter here.
        tensors: inputs, and targets, ``(B, ...)``; only shapes and types matter.
        postprocess: maps the outputs of ``function`` for a whole batch to the results, each ``(B, ...)``.
        depends_on: everything else that ``function`` depends on.
        isolate_rounding: use a layout in which all positions of a batch round alike.
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
        isolate_rounding: bool = False,
    ) -> None:
        self._function, self._postprocess = function, postprocess
        self.shared, self.rows = True, rows
        if isolate_rounding:
            self.shared, self.rows = self._tested_layout(rows, module, leaves, tensors, depends_on)

    def _tested_layout(
        self, rows: int, module: nn.Module, leaves: Parameters, tensors: Outputs, depends_on: Hashable
    ) -> tuple[bool, int]:
        """Return the layout of a network, which is tested once."""
        tensors_by_name = chain(module.named_parameters(), module.named_buffers())
        passed_names = leaves.keys() | {name.removeprefix("module.") for name in leaves}
        not_passed = {name: tensor for name, tensor in tensors_by_name if name not in passed_names}
        self._fixed_tensors = [tensor for tensor in not_passed.values() if tensor.is_floating_point()]
        fixed_keys = [(name, *_tensor_key(tensor)) for name, tensor in not_passed.items()]
        key = _layout_key(rows, module, leaves, tensors, (depends_on, *fixed_keys))
        if key not in _layouts:
            _layouts[key] = self._choose_reproducible_layout(rows, leaves, tensors)
        return _layouts[key]

    def __call__(self, leaves: Parameters, *tensors: torch.Tensor) -> Iterator[Outputs]:
        """Yield the results of the examples, batch by batch, without padding."""
        for count, batch in padded_batches_with_counts(self.rows, *tensors):
            yield [outputs[:count] for outputs in self._compute(self.shared, leaves, batch)]

    def _compute(self, shared: bool, leaves: Parameters, batch: Outputs) -> Outputs:
        vectorized = vmap(
            self._function, in_dims=(None if shared else 0, *[0] * len(batch)), randomness="error"
        )
        if not shared:
            leaves = {name: leaf.expand(len(batch[0]), *leaf.shape) for name, leaf in leaves.items()}
        return self._postprocess(vectorized(leaves, *batch))

    def _choose_reproducible_layout(
        self, rows: int, leaves: Parameters, tensors: Outputs
    ) -> tuple[bool, int]:
        """Return the first layout in which all positions of a batch of equal examples give the same bits.

        Examples, parameters and floating-point buffers are random. The network's own values could hide a
        difference, and a server chooses them, also those of layers that are not trained.
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
        with _temporarily_randomized(self._fixed_tensors, generator):
            outputs = self._compute(shared, random_leaves, batch)
        return all(torch.equal(tensor, tensor[:1].expand_as(tensor)) for tensor in outputs)


def padded_batches_with_counts(rows: int, *tensors: torch.Tensor) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Yield batches of exactly ``rows`` rows, the last one padded with zeros, with the number of their real
    rows.

    Each batch is a copy, so that the memory address of a row does not depend on earlier rows either.

    >>> [(real, x.tolist()) for real, [x] in padded_batches_with_counts(2, torch.tensor([1, 2, 3]))]
    [(2, [1, 2]), (1, [3, 0])]
    """
    for start in range(0, len(tensors[0]), rows):
        parts = [tensor[start : start + rows] for tensor in tensors]
        count = len(parts[0])
        yield count, [torch.cat([part, part.new_zeros(rows - count, *part.shape[1:])]) for part in parts]


def _layout_key(
    rows: int, module: nn.Module, leaves: Parameters, tensors: Outputs, depends_on: Hashable
) -> Hashable:
    """Key of a network, its shapes, and the settings under which it is computed."""
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
    """Random 0 and 1, which are valid targets of any task."""
    return torch.randint(0, 2, tensor.shape, generator=generator).to(tensor)


def _random_weights_like(leaf: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random numbers of about the size of initial weights."""
    values = _random_like(leaf, generator)
    return values / math.prod(leaf.shape[1:]) ** 0.5 if leaf.is_floating_point() else values


def _tensor_key(tensor: torch.Tensor) -> Sequence[Hashable]:
    """Key of an untrained parameter or a buffer: the form of floating-point tensors, and the values of
    others, which may be indices or masks.
    """
    form = (tensor.shape, tensor.dtype, tensor.stride())
    return form if tensor.is_floating_point() else (*form, tensor.cpu().numpy().tobytes())


@contextmanager
def _temporarily_randomized(tensors: Sequence[torch.Tensor], generator: torch.Generator) -> Iterator[None]:
    """Replace tensors by random numbers within a context; those in buffers are not negative, as variances
    are not.
    """
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
