"""Device, precision and threads of a run (:class:`Compute`) and their options (:class:`EngineConfig`).

:func:`use_torch_defaults` isolates a run from torch settings of the caller, such as ``torch.no_grad`` in a
notebook.

:class:`Workers` run independent functions concurrently, each in one thread on one core. Nodes are independent
of each other, and torch releases Python's lock while it computes. Many small networks on a few cores are
therefore fastest with one network per core. Results do not depend on the number of threads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field
from threading import Barrier, Event, local
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import torch
from annotated_types import Ge

from fedstill.core import timing
from fedstill.core.cuda_graphs import CudaGraphCapturer, uses_global_rng
from fedstill.core.errors import ArgumentError, FedstillError, ModelError
from fedstill.core.options import CheckedOptions, NonNegativeFloat, PositiveInt
from fedstill.core.seeds import exclusive_run, seeded, watch_global_rng, without_global_seeding

T = TypeVar("T")
R = TypeVar("R")
Runner = Callable[..., Any]
Precision = Literal["float32", "bfloat16"]
CONVOLUTIONS = (torch.nn.Conv2d, torch.nn.ConvTranspose2d)


@contextmanager
def use_torch_defaults() -> Iterator[None]:
    """Compute with gradients, float32 and tensors on the CPU by default.

    The caller may be inside ``torch.no_grad`` or ``torch.inference_mode``, or may have set another default
    dtype or device. All of it is restored afterwards. The default dtype belongs to the process, so that
    threads which enter this context wait for each other.

    >>> torch.set_default_dtype(torch.float64)
    >>> with torch.no_grad(), use_torch_defaults():
    ...     torch.zeros(1, requires_grad=True).add(1).requires_grad, torch.zeros(1).dtype
    (True, torch.float32)
    >>> torch.zeros(1).dtype
    torch.float64
    >>> torch.set_default_dtype(torch.float32)
    """
    with exclusive_run(), torch.inference_mode(False), torch.enable_grad(), ExitStack() as stack:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        stack.callback(torch.set_default_dtype, before)
        if torch.get_default_device().type != "cpu":  # as a context it costs a hook at each call
            stack.enter_context(torch.device("cpu"))
        yield


@dataclass(frozen=True, kw_only=True)
class ComputeConfig(CheckedOptions):
    """Device, precision and threads of computations."""

    section: ClassVar[str] = "compute"

    device: str = "cpu"
    """The torch device, for example cpu or cuda."""
    precision: Literal["float32", "bfloat16", "auto"] = "auto"
    """bfloat16 computes convolutions and products by autocast; parameters stay float32. auto uses bfloat16 if
    it is faster on the processor and the network is convolutional on images of 16 x 16 or more, else float32.
    It can be several times faster, but the last digits differ by machine. A method that loses accuracy in
    bfloat16, as FedIOD does on label maps, uses float32. Evaluation always uses float32."""
    channels_last: bool = True
    """Keep images with channels last in memory, which makes convolutions and pooling faster."""
    threads: Annotated[int, Ge(0), "0 (torch's default) or more"] = 0
    """CPU threads, and nodes that are computed in parallel; 0: torch's default, but one thread for small
    convolutional networks on images below 16 x 16."""


@dataclass(frozen=True, kw_only=True)
class RayConfig(CheckedOptions):
    """Options of the backend ray."""

    section: ClassVar[str] = "engine.ray"

    actors: PositiveInt | None = None
    """Number of actors, over which the nodes are divided; none: as many as the CPUs or GPUs of the cluster
    allow. Each takes engine.threads CPUs (one if that is 0), and at most one actor for each node is used."""
    address: str = ""
    """Address of a Ray cluster: auto for the one that this machine belongs to, HOST:PORT, or
    ray://HOST:PORT; empty: Ray is started on this machine for the run."""
    gpus_per_actor: NonNegativeFloat = 0.0
    """Share of a GPU for each actor with engine.device = "cuda"; with 0.25, four actors share one."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(ComputeConfig):
    """Options for computing the federation. Except for precision, they change only speed and last digits.

    Raises:
        ArgumentError: an option has an invalid value.

    >>> config = EngineConfig(device="cpu", precision="float32", threads=2)
    >>> config.precision, config.channels_last
    ('float32', True)
    """

    section: ClassVar[str] = "engine"

    backend: Literal["local", "ray", "flare", "flare-poc"] = "local"
    """Place of the nodes' computation. local: in this process. ray: in Ray actors, several nodes in each, on
    this machine or a cluster. flare: each in a process of its own, in NVIDIA FLARE's simulator or with
    startup_kit in a deployed federation. flare-poc: in a federation that is deployed on this machine for the
    run."""
    batching: Literal["auto", "stacked", "one-by-one"] = "auto"
    """Grouping of nodes in the backends local and ray. stacked computes nodes of equal architecture in one
    call, one-by-one computes each node separately. auto stacks small networks on a GPU, except while they
    only train, and many networks without convolutions on a CPU."""
    watch_random: bool = False
    """Find networks and methods that use torch's global generator outside of layers such as torch.nn.Dropout.
    The first computation of each architecture is watched, and if it uses the generator, nodes are computed
    one after another. Without this option, a run that computes such nodes in parallel stops with an error."""
    cuda_graphs: bool = True
    """On a GPU, capture training steps as CUDA graphs. Steps that cannot be captured run eagerly, with a
    warning."""
    startup_kit: str = ""
    """With the backend flare: the folder of the startup kit of a deployed federation. Its nodes take part
    with their own data, models and policies."""
    ray: RayConfig = field(default_factory=RayConfig)
    """The backend ray."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_ray()
        if self.startup_kit and self.backend != "flare":
            raise ArgumentError(
                "engine.startup_kit", self.startup_kit, "none, unless engine.backend is flare"
            )

    def _check_ray(self) -> None:
        if self.backend != "ray":
            for name, value in vars(self.ray).items():
                if value != getattr(RayConfig, name):
                    raise ArgumentError(f"engine.ray.{name}", value, "none, unless engine.backend is ray")
        elif (self.ray.gpus_per_actor > 0) != self.device.startswith("cuda"):
            expected = "above 0 if engine.device is cuda, else 0"
            raise ArgumentError("engine.ray.gpus_per_actor", self.ray.gpus_per_actor, expected)


class Compute:
    """Device, precision and threads of one run.

    Args:
        config: the options; None: the defaults.

    Raises:
        ArgumentError: this machine has no such device.
    """

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        try:
            self.device = torch.device(self.config.device)
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:  # torch raises either for a missing device
            expected = f"a device of this machine: {', '.join(available_devices())}"
            raise ArgumentError("engine.device", self.config.device, expected) from error
        precision = self.config.precision
        self.precision: Precision = "float32" if precision == "auto" else precision
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        self.threads = torch.get_num_threads()
        self.workers = Workers(
            self.threads if self.device.type == "cpu" else 1, watch_random=self.config.watch_random
        )
        self.cuda_graphs = CudaGraphCapturer()  # for local training, one network after another

    def for_network(
        self, shape: Sequence[int], network: torch.nn.Module, *, force_float32: bool = False
    ) -> Compute:
        """Return this object with the precision that suits a network, if the precision is ``"auto"``.

        Args:
            shape: shape of one input.
            network: the network to be trained.
            force_float32: use float32 even if bfloat16 is faster.
        """
        if self.config.precision != "auto" or force_float32:  # auto starts as float32
            return self
        copied = copy.copy(self)
        is_faster = _gains_from_bfloat16(shape, network) and is_bfloat16_faster(self.device)
        copied.precision = "bfloat16" if is_faster else "float32"
        return copied

    @contextmanager
    def limit_threads(self, shape: Sequence[int], network: torch.nn.Module) -> Iterator[None]:
        """Use one CPU thread if the server's networks are small, unless ``engine.threads`` is set.

        Nodes are still computed in parallel, each on one core. On 8 x 8 pixels two threads spend more time on
        waiting for each other than they save. On a busy machine the run would take many times as long
        (``benchmarks/busy.py``).
        """
        use_one_thread = self.device.type == "cpu" and not self.config.threads and _too_small(shape, network)
        if use_one_thread:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            if use_one_thread:
                torch.set_num_threads(self.threads)

    @property
    def as_float32(self) -> Compute:
        """This object with precision float32."""
        copied = copy.copy(self)
        copied.precision = "float32"
        return copied

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Compute in float32 within the block, whatever the precision of training.

        A student is used in float32 after its run. Convolutions on a GPU do not use TF32 within the block,
        which is torch's default.
        """
        allowed_tf32 = torch.backends.cudnn.allow_tf32
        torch.backends.cudnn.allow_tf32 = False
        try:
            with torch.autocast(self.device.type, enabled=False):
                yield
        finally:
            torch.backends.cudnn.allow_tf32 = allowed_tf32

    def uses_cuda_graphs(self, *modules: torch.nn.Module) -> bool:
        """Return whether training steps of these networks are captured (:mod:`fedstill.core.cuda_graphs`)."""
        if self.device.type != "cuda" or not self.config.cuda_graphs:
            return False
        return not any(
            uses_global_rng(module) or not getattr(module, "differentiable", True) for module in modules
        )

    def to_device(self, module: torch.nn.Module) -> torch.nn.Module:
        """Move a network to the device, in the memory format of the run."""
        if self.config.channels_last and not self._keeps_channels_first(module):
            return module.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]
        return module.to(self.device)

    def tensors_to_device(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Move received tensors to the device."""
        return {name: tensor.to(self.device) for name, tensor in tensors.items()}

    def autocast(self) -> AbstractContextManager[None]:
        """Return the autocast context of the run: bfloat16 for convolutions and products, if enabled."""
        # torch's cache of cast weights lives as long as the outermost autocast. Inside one, as in a query's
        # response, a model would be trained on the weights of its first step.
        enabled = self.precision == "bfloat16"
        if not (enabled or torch.is_autocast_enabled(self.device.type)):
            return nullcontext()  # a tenth of the time
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)

    def _keeps_channels_first(self, module: torch.nn.Module) -> bool:
        """Return whether channels-last memory would be slower or unsafe for a network.

        torch's group norm (2.13, CPU) is slow with channels-last memory in bfloat16, and its backward pass
        ends the process if its input needs no gradient, as behind a frozen layer. The group norm of
        :mod:`fedstill.models.norm_layers` accepts any layout. Some convolutions write beyond their memory
        (:func:`has_out_of_bounds_gradient`).
        """
        norms = any(
            isinstance(layer, torch.nn.GroupNorm) and not getattr(layer, "any_layout", False)
            for layer in module.modules()
        )
        frozen = any(not parameter.requires_grad for parameter in module.parameters())
        slow = self.precision == "bfloat16" and self.device.type == "cpu"
        unsafe = self.device.type == "cpu" and any(
            has_out_of_bounds_gradient(layer) for layer in module.modules()
        )
        return unsafe or (norms and (frozen or slow))

    @contextmanager
    def step(self, seed: int, *names: str | int) -> Iterator[None]:
        """Run one training step with its precision and, for modules such as dropout, its seed.

        Args:
            seed: the seed of the run.
            names: names of the random stream.

        Raises:
            ModelError: batch norm got a batch of one example.
            Exception: the error of :func:`fedstill.core.timing.time_limit`, if the time is over before the
                step begins.
        """
        timing.check_limits()
        with seeded(seed, *names), self.autocast():
            try:
                yield
            except ValueError as error:
                if "more than 1 value per channel" not in str(error):
                    raise
                where = "in local training, in the method and as number of public examples"
                raise ModelError(
                    f"invalid batch size = 1 for a network with batch norm (expected >= 2 {where})"
                ) from error


class Workers:
    """A pool of threads that compute with one core each.

    Args:
        count: number of threads; 1: functions run in the calling thread.
        watch_random: find calls that use torch's global generator by watching the first one of each kind.
    """

    def __init__(self, count: int, *, watch_random: bool = False) -> None:
        self.count = count
        self._pool: ThreadPoolExecutor | None = None
        self._watch_random = watch_random
        self._uses_rng: dict[Hashable, bool] = {}  # by kind: whether it uses torch's global generator

    def map(
        self,
        function: Callable[[T], R],
        items: Sequence[T],
        kinds: Sequence[Hashable],
        random: Sequence[bool] | None = None,
    ) -> list[R]:
        """Apply a function to each item and return the results in order.

        All threads share torch's global generator. Calls that use it run one after another, each seeded.

        Args:
            function: the function. Nested calls of ``map`` run sequentially in its thread.
            items: arguments of the function.
            kinds: kind of each call, equal if equal code computes on equal architectures.
            random: whether each call uses torch's global generator, as networks with dropout do; None: no
                call does.

        Raises:
            FedstillError: a call used torch's global generator unexpectedly, so its results would not repeat.
        """
        if self.count == 1 or _thread.is_worker:  # a worker thread has one core
            return [function(item) for item in items]
        results: dict[int, R] = {}
        for index, (item, kind) in enumerate(zip(items, kinds, strict=True)):
            if self._watch_random and kind not in self._uses_rng:
                with watch_global_rng() as watch:
                    results[index] = self._run_in_threads(_run_alone, function, {index: item})[index].result()
                self._uses_rng[kind] = watch.used
        for index, (item, kind) in enumerate(zip(items, kinds, strict=True)):
            is_random = self._uses_rng.get(kind, False) or (random is not None and random[index])
            if index not in results and is_random:
                # On one core as well: else the last digits would depend on the first call.
                results[index] = self._run_in_threads(_run_alone, function, {index: item})[index].result()
        remaining = [index for index in range(len(items)) if index not in results]
        before = torch.get_rng_state()
        futures = self._run_in_threads(
            _run_concurrently, function, {index: items[index] for index in remaining}
        )
        results |= {index: future.result() for index, future in futures.items()}
        if not torch.equal(torch.get_rng_state(), before):
            raise FedstillError(
                "nodes that are computed in parallel used torch's global generator outside of layers such as "
                "torch.nn.Dropout, so results would not repeat: set engine.watch_random to true, or "
                "engine.threads to 1"
            )
        return [results[index] for index in range(len(items))]

    def _run_in_threads(
        self, runner: Runner, function: Callable[[T], R], items: Mapping[int, T]
    ) -> Mapping[int, Future[R]]:
        """Run calls in threads and wait for them. An interrupt stops all of them between two steps."""
        stop = Event()
        pool, futures = self._threads(), dict[int, Future[R]]()
        try:
            for index, item in items.items():
                futures[index] = pool.submit(copy_context().run, runner, function, item, stop)
            wait(futures.values())
        except BaseException:
            stop.set()
            wait(futures.values())
            raise
        return futures

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            thread_count = torch.get_num_threads()
            pool, started = (
                ThreadPoolExecutor(self.count, "node", initializer=_use_one_core),
                Barrier(self.count),
            )
            try:
                wait([pool.submit(started.wait) for _ in range(self.count)])
            except BaseException:
                started.abort()  # else started threads would wait for ever
                raise
            finally:
                torch.set_num_threads(thread_count)
            self._pool = pool
        return self._pool


def has_out_of_bounds_gradient(layer: torch.nn.Module) -> bool:
    """Return whether a layer's weight gradient writes beyond its memory in channels-last format.

    torch 2.13 has this bug on processors without AVX-512 (an AMD EPYC of 2021, in float32) for a 1x1
    convolution with a stride and two to seven input channels.

    >>> [has_out_of_bounds_gradient(torch.nn.Conv2d(channels, 8, 1, 2)) for channels in (4, 8)]
    [True, False]
    """
    if not isinstance(layer, torch.nn.Conv2d) or tuple(layer.kernel_size) != (1, 1):
        return False
    return max(layer.stride) > 1 and 1 < layer.in_channels // layer.groups < 8


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to the device without waiting for the copy."""
    return tensor.to(device, non_blocking=device.type == "cuda")


def match_parameter_layout(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer's state the memory layout of its parameters, for example channels last.

    torch's fused optimizers pair numbers by their position in memory, not by their index in the tensor.
    """
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                state[key] = match_layout(value, parameter)


def match_layout(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the tensor in the memory layout of another tensor of its shape."""
    return tensor if tensor.stride() == like.stride() else torch.empty_like(like).copy_(tensor)


def available_devices() -> list[str]:
    """Return the devices of this machine that torch can compute on."""
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return ["cpu", *gpus, *(["mps"] if torch.backends.mps.is_available() else [])]


def is_bfloat16_faster(device: torch.device) -> bool:
    """Return whether this device multiplies faster in bfloat16 than in float32.

    That holds for processors with AMX, and for AMD processors with AVX-512 bf16. Intel processors with
    AVX-512 bf16 but without AMX, as in some virtual machines, take up to twice as long
    (``benchmarks/precision.py``). The result is False if torch does not report the processor, as in older
    releases and on Arm.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return False
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    is_amd = str(capabilities.get("cpu_name", "")).startswith("AMD")
    return bool(capabilities.get("amx_bf16") or (is_amd and capabilities.get("avx512_bf16")))


def _gains_from_bfloat16(shape: Sequence[int], network: torch.nn.Module) -> bool:
    """Return whether bfloat16 speeds up a network on a processor that supports it.

    On AMD processors with AVX-512 bf16, a step of a convolutional network on 28 x 28 takes 0.5 to 0.8 of the
    time in float32. On 8 x 8, and without convolutions, it takes about as long (``benchmarks/precision.py``).
    """
    image = len(shape) == 3 and min(shape[1:]) >= 16
    return image and any(isinstance(layer, CONVOLUTIONS) for layer in network.modules())


def _too_small(shape: Sequence[int], network: torch.nn.Module) -> bool:
    """Return whether a network's convolutions are too small to gain from threads."""
    small = len(shape) == 3 and min(shape[1:]) < 16
    weights = sum(parameter.numel() for parameter in network.parameters())
    return (
        small and weights < 1_000_000 and any(isinstance(layer, CONVOLUTIONS) for layer in network.modules())
    )


class _ThreadLocalState(local):
    is_worker = False


_thread = _ThreadLocalState()


def _use_one_core() -> None:
    """Let torch compute with one core in this thread.

    A thread takes the last number that any thread has set when it first asks for it, and keeps it.
    """
    _thread.is_worker = True
    torch.set_num_threads(1)
    torch.get_num_threads()


def _run_alone(function: Callable[[T], R], item: T, stop: Event) -> R:
    with timing.stop_on(stop):
        return function(item)


def _run_concurrently(function: Callable[[T], R], item: T, stop: Event) -> R:
    with timing.stop_on(stop), without_global_seeding():
        return function(item)
