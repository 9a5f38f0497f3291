"""Steps that a GPU records once and launches as one from then on (CUDA graphs).

From Python a kernel takes longer to be launched than many take to run. So a step of tensors alone is computed
a few times as it stands, then recorded, and from then on its kernels are launched together: the same ones, on
the same memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import nn

logger = logging.getLogger(__name__)

Tensors = Mapping[str, torch.Tensor]
WARMUP_CALLS = 3  # calls before it is recorded, in which libraries and optimizers make what they keep


class Capture(Protocol):
    """What records."""

    def __call__(self, step: Callable[[], Tensors]) -> tuple[Tensors, Callable[[], None]]:
        """What a function gives, and what does again what it does, into the same tensors."""

    def warmup(self) -> AbstractContextManager[None]:
        """Where it is computed before it is recorded."""


class CudaGraphStep:
    """A function of tensors by name, recorded once it has been called a few times with tensors of equal form.

    What it does must follow from its arguments and from memory that stays where it is. It may change that
    memory (networks, optimizers); numbers that change lie in tensors (:func:`make_capturable`). Gradients that
    reach what it gives are pulled back to its arguments, for the last call. What cannot be recorded, as a
    look at values (``.item()``) or a tensor that comes from the CPU, is computed as it stands, and a warning
    says so.

    Args:
        step: the function. Python runs it while it is warmed up and recorded, and no more.
        static_buffers: the memory that it reads and writes beside its arguments. Where some of it has moved, it is
            warmed up and recorded anew.
        capture: what records; None: CUDA graphs with memory of their own.
    """

    def __init__(
        self,
        step: Callable[..., Tensors],
        static_buffers: Callable[[], Iterable[torch.Tensor]],
        capture: Capture | None = None,
    ) -> None:
        self._step, self._static_buffers, self._capture = step, static_buffers, capture or CudaGraphCapture()
        self._runs_eagerly = False
        self.calls = 0  # names the call whose gradients can be pulled back
        self._reset()

    def _reset(self, form: Any = None) -> None:
        self._signature, self._warmup_calls = form, 0
        self._replay_forward: Callable[[], None] | None = None
        self._replay_backward: Callable[[], None] | None = None
        self._static_inputs: Tensors = {}
        self._static_outputs: Tensors = {}
        self._output_gradients: Tensors = {}  # gradients of what it gives,
        self._input_gradients: Tensors = {}  # and of its arguments

    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the work gives for tensors, by name; new ones each time."""
        if self._runs_eagerly:
            return dict(self._step(**inputs))
        form = (
            [(name, each.shape, each.dtype, each.requires_grad) for name, each in inputs.items()],
            torch.is_grad_enabled(),
            [each.data_ptr() for each in self._static_buffers()],
        )
        if form != self._signature:
            self._reset(form)
        if self._warmup_calls < WARMUP_CALLS:
            self._warmup_calls += 1
            with self._capture.warmup():
                return dict(self._step(**inputs))
        if self._replay_forward is None:
            self._capture_graphs(inputs)
        if self._replay_forward is None:
            return dict(self._step(**inputs))
        self.calls += 1
        if self._replay_backward is None:
            with torch.no_grad():
                return dict(self.forward(inputs.values()))
        found = _ReplayFunction.apply(self, self.calls, *inputs.values())  # type: ignore[no-untyped-call]
        return dict(zip(self._static_outputs, found, strict=True))

    def _capture_graphs(self, given: Tensors) -> None:
        self._static_inputs = {
            name: torch.empty_like(each).copy_(each.detach()).requires_grad_(each.requires_grad)
            for name, each in given.items()
        }
        try:
            told, self._replay_forward = self._capture(lambda: self._step(**self._static_inputs))
            self._static_outputs = {name: each.detach() for name, each in told.items()}
            reached = {name: each for name, each in told.items() if each.requires_grad}
            wanted = {name: each for name, each in self._static_inputs.items() if each.requires_grad}
            if reached and wanted:
                self._output_gradients = {name: torch.zeros_like(each) for name, each in reached.items()}
                self._input_gradients, self._replay_backward = self._capture(
                    lambda: self._gradients(reached, wanted)
                )
        except RuntimeError as error:  # torch's word for all that cannot be recorded
            self._reset()
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            self._runs_eagerly = True
            _warn(str(error).splitlines()[0])

    def _gradients(self, reached: Tensors, wanted: Tensors) -> Tensors:
        ends, starts, pulls = (
            list(reached.values()),
            list(wanted.values()),
            list(self._output_gradients.values()),
        )
        with torch.autocast(ends[0].device.type, enabled=False):  # in the precision of the way forth
            found: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
                ends, starts, pulls, allow_unused=True
            )
        return {name: each for name, each in zip(wanted, found, strict=True) if each is not None}

    def forward(self, inputs: Iterable[torch.Tensor]) -> Tensors:
        """The step on other values; what it gives, by name."""
        assert self._replay_forward is not None
        for mine, each in zip(self._static_inputs.values(), inputs, strict=True):
            mine.detach().copy_(each)
        self._replay_forward()
        return {name: each.clone() for name, each in self._static_outputs.items()}

    def backward(
        self, call: int, output_gradients: Iterable[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Gradients of the arguments, from gradients of what the last call gave.

        Raises:
            RuntimeError: another call came between.
        """
        if call != self.calls or self._replay_backward is None:
            raise RuntimeError("gradients of a recorded step are pulled back before it is done once more")
        for name, pull in zip(self._static_outputs, output_gradients, strict=True):
            if name in self._output_gradients:
                mine = self._output_gradients[name]
                mine.zero_() if pull is None else mine.copy_(pull)
        self._replay_backward()
        found = (self._input_gradients.get(name) for name in self._static_inputs)
        return [None if each is None else each.clone() for each in found]

    def has_gradient(self, name: str) -> bool:
        """Whether gradients of a part of what it gives can be pulled back."""
        return name in self._output_gradients


@lru_cache(maxsize=64)  # once for all nodes
def _warn(reason: str) -> None:
    logger.warning("a step is not recorded on the GPU, and takes longer: %s", reason)


class _ReplayFunction(torch.autograd.Function):
    """A recorded step, for autograd."""

    @staticmethod
    def forward(
        ctx: Any, recorded: CudaGraphStep, call: int, *given: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        found = recorded.forward(given)
        ctx.recorded, ctx.call = recorded, call
        ctx.mark_non_differentiable(
            *(each for name, each in found.items() if not recorded.has_gradient(name))
        )
        return tuple(found.values())

    @staticmethod
    def backward(ctx: Any, *pulls: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.recorded.backward(ctx.call, pulls)


class CudaGraphCapture:
    """Records CUDA graphs, which share memory for what is there while they run."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._graphs: WeakSet[Any] = WeakSet()
        self._stream: Any = None

    def __call__(self, step: Callable[[], Tensors]) -> tuple[Tensors, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        pool = self._pool if self._graphs else None  # torch gives a pool up with its last graph
        # What other threads do with the device meanwhile is no part of it, and no fault.
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            told = step()
        self._pool = graph.pool()
        self._graphs.add(graph)
        return told, graph.replay

    @contextmanager
    def warmup(self) -> Iterator[None]:
        """In the stream in which it is recorded: what autograd keeps of a network belongs to one stream."""
        here = torch.cuda.current_stream()
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            yield
        here.wait_stream(self._stream)


def make_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer keep its learning rate in a tensor, so that a recorded step follows it."""
    for group in optimizer.param_groups:
        device = group["params"][0].device
        if not isinstance(group["lr"], torch.Tensor) or group["lr"].device != device:
            group["lr"] = torch.tensor(float(group["lr"]), device=device)
        if "capturable" in group:
            group["capturable"] = True


class StaticBuffers:
    """Where networks and optimizers keep their numbers."""

    def __init__(self, modules: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._layers = [layer for module in modules for layer in module.modules()]
        self._optimizers = list(optimizers)

    def __call__(self) -> Iterator[torch.Tensor]:
        for layer in self._layers:
            yield from (each for each in layer._parameters.values() if each is not None)
            yield from (each for each in layer._buffers.values() if each is not None)
        for optimizer in self._optimizers:
            rates = (group["lr"] for group in optimizer.param_groups)
            yield from (each for each in rates if isinstance(each, torch.Tensor))
            for state in optimizer.state.values():
                yield from (each for each in state.values() if isinstance(each, torch.Tensor))


# Layers whose result depends on torch's global generator.
RANDOM_LAYERS = (nn.modules.dropout._DropoutNd, nn.RNNBase, nn.MultiheadAttention, nn.RReLU)


def uses_global_rng(module: nn.Module) -> bool:
    """Whether a network has layers that draw from torch's global generator."""
    return any(isinstance(layer, RANDOM_LAYERS) for layer in module.modules())
