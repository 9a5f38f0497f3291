"""Capture training steps as CUDA graphs.

Launching a kernel from Python takes longer than many kernels run. A step of tensors alone is therefore run
eagerly a few times, then captured, and from then on all its kernels are launched together, on the same
memory.
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
WARMUP_CALLS = 3  # calls before capture, in which libraries and optimizers allocate their state


class GraphCapturer(Protocol):
    """Interface of a recorder of steps: CUDA graphs, or a substitute in tests."""

    def __call__(self, step: Callable[[], Tensors]) -> tuple[Tensors, Callable[[], None]]:
        """Capture a step.

        Returns:
            The step's outputs, and a function that runs the step again and writes into the same output
            tensors.
        """

    def warmup(self) -> AbstractContextManager[None]:
        """Context in which the step runs before it is captured."""


class CudaGraphStep:
    """A function of named tensors that is captured after a few calls with inputs of equal shape.

    The result must depend on the inputs and on static buffers only. The function may change static buffers
    (networks, optimizers). Numbers that change between calls must be tensors (:func:`make_capturable`).
    Gradients of the outputs can be propagated to the inputs, for the last call. A function that cannot be
    captured, because it reads values (``.item()``) or uses a tensor on the CPU, runs eagerly, with a warning.

    Args:
        step: the function. Python runs it only during warmup and capture.
        static_buffers: returns the tensors that the function reads and writes besides its inputs. If one of
            them has moved in memory, the step is captured again.
        capture: the recorder; None: CUDA graphs with their own memory pool.
    """

    def __init__(
        self,
        step: Callable[..., Tensors],
        static_buffers: Callable[[], Iterable[torch.Tensor]],
        capture: GraphCapturer | None = None,
    ) -> None:
        self._step, self._static_buffers, self._capture = step, static_buffers, capture or CudaGraphCapturer()
        self._runs_eagerly = False
        self.calls = 0  # number of the call whose gradients can be propagated
        self._reset()

    def _reset(self, signature: Any = None) -> None:
        self._signature, self._warmup_calls = signature, 0
        self._replay_forward: Callable[[], None] | None = None
        self._replay_backward: Callable[[], None] | None = None
        self._static_inputs: Tensors = {}
        self._static_outputs: Tensors = {}
        self._output_gradients: Tensors = {}
        self._input_gradients: Tensors = {}

    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the outputs for the inputs, by name, as new tensors."""
        if self._runs_eagerly:
            return dict(self._step(**inputs))
        signature = (
            [(name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in inputs.items()],
            torch.is_grad_enabled(),
            [tensor.data_ptr() for tensor in self._static_buffers()],
        )
        if signature != self._signature:
            self._reset(signature)
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
        outputs = _ReplayFunction.apply(self, self.calls, *inputs.values())  # type: ignore[no-untyped-call]
        return dict(zip(self._static_outputs, outputs, strict=True))

    def _capture_graphs(self, inputs: Tensors) -> None:
        self._static_inputs = {
            name: torch.empty_like(tensor).copy_(tensor.detach()).requires_grad_(tensor.requires_grad)
            for name, tensor in inputs.items()
        }
        try:
            outputs, self._replay_forward = self._capture(lambda: self._step(**self._static_inputs))
            self._static_outputs = {name: tensor.detach() for name, tensor in outputs.items()}
            differentiable = {name: tensor for name, tensor in outputs.items() if tensor.requires_grad}
            requiring = {name: tensor for name, tensor in self._static_inputs.items() if tensor.requires_grad}
            if differentiable and requiring:
                self._output_gradients = {
                    name: torch.zeros_like(tensor) for name, tensor in differentiable.items()
                }
                self._input_gradients, self._replay_backward = self._capture(
                    lambda: self._gradients(differentiable, requiring)
                )
        except RuntimeError as error:  # torch raises it for everything that cannot be captured
            self._reset()
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            self._runs_eagerly = True
            _warn(str(error).splitlines()[0])

    def _gradients(self, differentiable: Tensors, requiring: Tensors) -> Tensors:
        outputs, inputs, output_gradients = (
            list(differentiable.values()),
            list(requiring.values()),
            list(self._output_gradients.values()),
        )
        with torch.autocast(outputs[0].device.type, enabled=False):  # same precision as the forward pass
            gradients: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
                outputs, inputs, output_gradients, allow_unused=True
            )
        return {
            name: gradient
            for name, gradient in zip(requiring, gradients, strict=True)
            if gradient is not None
        }

    def forward(self, inputs: Iterable[torch.Tensor]) -> Tensors:
        """Run the captured step on other inputs and return its outputs by name."""
        assert self._replay_forward is not None
        for static, tensor in zip(self._static_inputs.values(), inputs, strict=True):
            static.detach().copy_(tensor)
        self._replay_forward()
        return {name: tensor.clone() for name, tensor in self._static_outputs.items()}

    def backward(
        self, call: int, output_gradients: Iterable[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Return gradients of the inputs, given gradients of the outputs of the last call.

        Raises:
            RuntimeError: the step was called again in between.
        """
        if call != self.calls or self._replay_backward is None:
            raise RuntimeError("backward of a captured step must run before its next call")
        for name, gradient in zip(self._static_outputs, output_gradients, strict=True):
            if name in self._output_gradients:
                static = self._output_gradients[name]
                static.zero_() if gradient is None else static.copy_(gradient)
        self._replay_backward()
        gradients = (self._input_gradients.get(name) for name in self._static_inputs)
        return [None if input_gradient is None else input_gradient.clone() for input_gradient in gradients]

    def output_has_gradient(self, name: str) -> bool:
        """Return whether gradients of an output can be propagated back."""
        return name in self._output_gradients


@lru_cache(maxsize=64)  # one warning for all nodes
def _warn(reason: str) -> None:
    logger.warning("a training step runs without CUDA graphs, which is slower: %s", reason)


class _ReplayFunction(torch.autograd.Function):
    """Autograd function of a captured step."""

    @staticmethod
    def forward(ctx: Any, step: CudaGraphStep, call: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = step.forward(inputs)
        ctx.step, ctx.call = step, call
        ctx.mark_non_differentiable(
            *(output for name, output in outputs.items() if not step.output_has_gradient(name))
        )
        return tuple(outputs.values())

    @staticmethod
    def backward(ctx: Any, *output_gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.step.backward(ctx.call, output_gradients)


class CudaGraphCapturer:
    """Captures CUDA graphs that share a memory pool."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._graphs: WeakSet[Any] = WeakSet()
        self._stream: Any = None

    def __call__(self, step: Callable[[], Tensors]) -> tuple[Tensors, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        pool = self._pool if self._graphs else None  # torch frees a pool with its last graph
        # Work of other threads on the device is not captured and raises no error.
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = step()
        self._pool = graph.pool()
        self._graphs.add(graph)
        return outputs, graph.replay

    @contextmanager
    def warmup(self) -> Iterator[None]:
        """Run in the capture stream, as autograd's state for a network belongs to one stream."""
        current = torch.cuda.current_stream()
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)


def make_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Store an optimizer's learning rate as a tensor, so that captured graphs see schedule changes."""
    for group in optimizer.param_groups:
        device = group["params"][0].device
        if not isinstance(group["lr"], torch.Tensor) or group["lr"].device != device:
            group["lr"] = torch.tensor(float(group["lr"]), device=device)
        if "capturable" in group:
            group["capturable"] = True


class ModelAndOptimizerTensors:
    """Parameters, buffers and optimizer states of networks. Calling it iterates over these tensors."""

    def __init__(self, modules: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._layers = [layer for module in modules for layer in module.modules()]
        self._optimizers = list(optimizers)

    def __call__(self) -> Iterator[torch.Tensor]:
        for layer in self._layers:
            yield from (tensor for tensor in layer._parameters.values() if tensor is not None)
            yield from (tensor for tensor in layer._buffers.values() if tensor is not None)
        for optimizer in self._optimizers:
            rates = (group["lr"] for group in optimizer.param_groups)
            yield from (tensor for tensor in rates if isinstance(tensor, torch.Tensor))
            for state in optimizer.state.values():
                yield from (tensor for tensor in state.values() if isinstance(tensor, torch.Tensor))


# Layers that use torch's global generator.
RANDOM_LAYERS = (
    nn.modules.dropout._DropoutNd,
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.RReLU,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)


def uses_global_rng(module: nn.Module) -> bool:
    """Return whether a network has layers that use torch's global generator."""
    return any(isinstance(layer, RANDOM_LAYERS) for layer in module.modules())
