"""Torch's own defaults for a while, whatever the caller's notebook has set.

Device, precision and threads of a run (``Compute``), and how a user says them (``EngineConfig``).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge

from fedstill.core import timing
from fedstill.core.cuda_graphs import CudaGraphCapture, uses_global_rng
from fedstill.core.errors import ArgumentError, ModelError
from fedstill.core.options import CheckedOptions
from fedstill.core.seeds import exclusive_run, seeded
from fedstill.core.workers import Workers


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Compute with gradients, float32 and tensors on the CPU where nothing else is said.

    A caller may be inside ``torch.no_grad`` or ``torch.inference_mode``, or have set another default dtype or
    device; all of it is restored. The dtype is one for all threads, which wait for each other.

    >>> torch.set_default_dtype(torch.float64)
    >>> with torch.no_grad(), torch_defaults():
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


Precision = Literal["float32", "bfloat16"]
CONVOLUTIONS = (torch.nn.Conv2d, torch.nn.ConvTranspose2d)


@dataclass(frozen=True)
class EngineConfig(CheckedOptions):
    """How the federation is computed. Precision apart, it changes speed and only the last digits."""

    section: ClassVar[str] = "engine"

    name: Literal["auto", "stacked", "one-by-one", "flare", "flare-poc"] = "auto"
    """Equal architectures in one stacked call, or each node for itself; auto stacks small ones on a GPU but
    while they only train, and on a CPU many that have no convolutions. Or nodes as processes of their own on
    NVIDIA FLARE: its simulator, or a federation deployed on this machine."""
    device: str = "cpu"
    """A torch device, for example cpu or cuda."""
    precision: Literal["float32", "bfloat16", "auto"] = "auto"
    """bfloat16 computes convolutions and products by autocast; parameters stay float32. auto takes it where
    the processor is faster in it and the network gains from it, a convolutional one on images of 16 x 16 or
    more, and float32 elsewhere: up to several times faster, but the last digits differ by machine. A method
    that loses accuracy by it, as FedIOD does on label maps, has float32. Evaluation is always in float32."""
    channels_last: bool = True
    """Keep images with channels last in memory: convolutions and pooling are faster so."""
    threads: Annotated[int, Ge(0), "0 (torch's own choice) or more"] = 0
    """CPU threads; 0 leaves it to torch, but for small convolutional networks on images of less than 16 x 16,
    which compute with one. Nodes that are computed each for itself are so many at once."""
    cuda_graphs: bool = True
    """On a GPU, record a step and launch all its kernels together from then on (CUDA graphs); what cannot be
    recorded is computed as it stands, which is warned of."""
    startup_kit: str = ""
    """With flare: the folder of the startup kit of a deployed federation, whose nodes then take part with
    their own data, models and policies."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.startup_kit and self.name != "flare":
            raise ArgumentError("engine.startup_kit", self.startup_kit, "none, unless engine.name is flare")


class Compute:
    """Device and precision of one run.

    Raises:
        ArgumentError: no such device on this machine.
    """

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        try:
            self.device = torch.device(self.config.device)
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:  # torch raises either for a device it lacks
            allowed = f"a device of this machine: {', '.join(available_devices())}"
            raise ArgumentError("engine.device", self.config.device, allowed) from error
        wanted = self.config.precision
        self.precision: Precision = "float32" if wanted == "auto" else wanted
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        self.threads = torch.get_num_threads()
        self.workers = Workers(self.threads if self.device.type == "cpu" else 1)
        self.cuda_graphs = CudaGraphCapture()  # of local training, one network's steps after another's

    def for_network(
        self, shape: Sequence[int], network: torch.nn.Module, *, force_float32: bool = False
    ) -> Compute:
        """The same, in the precision that suits a network and its inputs, where that is left open; in float32
        where it is to be ``as_float32``."""
        if self.config.precision != "auto" or force_float32:  # auto begins as float32
            return self
        suits = copy.copy(self)
        gains = _gains_from_bfloat16(shape, network) and is_bfloat16_faster(self.device)
        suits.precision = "bfloat16" if gains else "float32"
        return suits

    @contextmanager
    def limit_threads(self, shape: Sequence[int], network: torch.nn.Module) -> Iterator[None]:
        """Compute with one thread where the server's networks are too small for several, unless
        ``engine.threads`` says how many. Nodes are still computed at once, each on a core of its own.

        On 8 x 8 pixels, two threads spend more time on waiting for each other than they save; next to other
        work, where one of the two has to wait for a core, the run takes many times as long
        (``benchmarks/busy.py``).
        """
        alone = self.device.type == "cpu" and not self.config.threads and _too_small(shape, network)
        if alone:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            if alone:
                torch.set_num_threads(self.threads)

    @property
    def as_float32(self) -> Compute:
        """The same, in float32."""
        same = copy.copy(self)
        same.precision = "float32"
        return same

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Compute in float32 within, whatever the precision of training: as a student is used after its run.

        Convolutions on a GPU compute in float32, too, and not in TF32, which is torch's default there.
        """
        rounded = torch.backends.cudnn.allow_tf32
        torch.backends.cudnn.allow_tf32 = False
        try:
            with torch.autocast(self.device.type, enabled=False):
                yield
        finally:
            torch.backends.cudnn.allow_tf32 = rounded

    def uses_cuda_graphs(self, *modules: torch.nn.Module) -> bool:
        """Whether steps of some networks are recorded (:mod:`fedstill.core.cuda_graphs`)."""
        if self.device.type != "cuda" or not self.config.cuda_graphs:
            return False
        return not any(
            uses_global_rng(module) or not getattr(module, "differentiable", True) for module in modules
        )

    def to_device(self, module: torch.nn.Module) -> torch.nn.Module:
        """A network on the device, in the memory format of the run."""
        if self.config.channels_last and not self._keeps_channels_first(module):
            return module.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]
        return module.to(self.device)

    def tensors_to_device(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors that came over a wire, on the device."""
        return {name: tensor.to(self.device) for name, tensor in tensors.items()}

    def autocast(self) -> AbstractContextManager[None]:
        """Lower precision for convolutions and products, if the run asks for it."""
        # Without torch's cache of cast weights, which lives as long as the outermost autocast: inside one,
        # as in an answer, a model would be trained on the weights of its first step.
        enabled = self.precision == "bfloat16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)

    def _keeps_channels_first(self, module: torch.nn.Module) -> bool:
        """Whether channels last would be slower, or worse.

        torch's group norm (2.13, CPU) is slow with them in bfloat16. And where it may meet an input without
        gradient, as behind a frozen layer, its way back then ends the whole process. Ours takes any layout
        (:mod:`fedstill.models.normalization`). And some convolutions write over other memory (:func:`has_overrunning_gradient`).
        """
        norms = any(
            isinstance(layer, torch.nn.GroupNorm) and not getattr(layer, "any_layout", False)
            for layer in module.modules()
        )
        frozen = any(not parameter.requires_grad for parameter in module.parameters())
        slow = self.precision == "bfloat16" and self.device.type == "cpu"
        unsafe = self.device.type == "cpu" and any(
            has_overrunning_gradient(layer) for layer in module.modules()
        )
        return unsafe or (norms and (frozen or slow))

    @contextmanager
    def step(self, seed: int, *names: str | int) -> Iterator[None]:
        """One training step: its precision, and its seed for modules that draw by themselves (dropout).

        None begins once the time is over that whoever computes has set (:mod:`fedstill.core.timing`).
        """
        timing.check_limits()
        with seeded(seed, *names), self.autocast():
            try:
                yield
            except ValueError as error:
                if "more than 1 value per channel" not in str(error):
                    raise
                where = "the local training's batch, the method's, or the number of public examples"
                told = "a network with batch norm was to learn from a batch of one example"
                raise ModelError(f"{told}: expected 2 or more ({where})") from error


def has_overrunning_gradient(layer: torch.nn.Module) -> bool:
    """Whether the gradient of a layer's weights writes beyond its memory where all lies channels last.

    So it does in torch 2.13 on processors without AVX-512 (an AMD EPYC of 2021, in float32), of a 1x1
    convolution with a stride and two to seven channels.

    >>> has_overrunning_gradient(torch.nn.Conv2d(4, 8, 1, 2)), has_overrunning_gradient(torch.nn.Conv2d(8, 8, 1, 2))
    (True, False)
    """
    if not isinstance(layer, torch.nn.Conv2d) or tuple(layer.kernel_size) != (1, 1):
        return False
    return max(layer.stride) > 1 and 1 < layer.in_channels // layer.groups < 8


def _gains_from_bfloat16(shape: Sequence[int], network: torch.nn.Module) -> bool:
    """Whether a network computes faster in bfloat16, where a processor does.

    On AMD's with AVX-512 bf16 a step of a convolutional network on 28 x 28 takes 0.5 to 0.8 of the time in
    float32; on 8 x 8, and without convolutions, about as long (``benchmarks/precision.py``).
    """
    image = len(shape) == 3 and min(shape[1:]) >= 16
    return image and any(isinstance(layer, CONVOLUTIONS) for layer in network.modules())


def _too_small(shape: Sequence[int], network: torch.nn.Module) -> bool:
    """Return whether a network's convolutions are too small to gain from threads."""
    small = len(shape) == 3 and min(shape[1:]) < 16
    weights = sum(parameter.numel() for parameter in network.parameters())
    return small and weights < 1_000_000 and any(isinstance(each, CONVOLUTIONS) for each in network.modules())


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """What was drawn on the CPU, on the device, which does not wait for it."""
    return tensor.to(device, non_blocking=device.type == "cuda")


def match_parameter_layout(optimizer: torch.optim.Optimizer) -> None:
    """Lay an optimizer's memory out as its parameters are, say channels last.

    torch's fused optimizers pair numbers by their place in memory, whatever their place in the tensor.
    """
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                state[key] = match_layout(value, parameter)


def match_layout(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor, in the memory layout of another one of its shape."""
    return tensor if tensor.stride() == like.stride() else torch.empty_like(like).copy_(tensor)


def available_devices() -> list[str]:
    """The devices of this machine that torch can compute on."""
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return ["cpu", *gpus, *(["mps"] if torch.backends.mps.is_available() else [])]


def is_bfloat16_faster(device: torch.device) -> bool:
    """Whether this processor multiplies faster in bfloat16 than in float32.

    Processors with AMX do, and AMD's with AVX-512 bf16. Intel's with AVX-512 bf16 and no AMX, as virtual
    machines may have it, take up to twice as long (``benchmarks/precision.py``). Where torch does not tell
    which processor it is, as older releases do not, and on Arm, float32 is always right.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return False
    able: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    amd = str(able.get("cpu_name", "")).startswith("AMD")
    return bool(able.get("amx_bf16") or (amd and able.get("avx512_bf16")))
