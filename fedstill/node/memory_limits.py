"""How much memory a run may take at a node, what it will take, and a ceiling above which there is none.

What a plan or a query will take is worked out on torch's meta device, which has no memory, before
anything is made. What that cannot foresee (an owner's own code, say) meets the ceiling of the process.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.func import functional_call

from fedstill.core.dataset import Form
from fedstill.data.input_spec import (
    COPIES,
    InputSpec,
    example_bytes,
    require_memory,
    round_up_to_power_of_two,
)
from fedstill.models import FORWARD_ERRORS, example_inputs
from fedstill.models.module_utils import in_mode

DEFAULT_SHARE = 0.75  # of a machine's memory, where its owner says nothing
COPIES_IN_TRAINING = 4  # of each parameter: its weight, its gradient and what Adam remembers of it, twice
OUT_OF_MEMORY = re.compile("can't allocate memory|not enough memory|bad_alloc|out of memory", re.IGNORECASE)


def memory_limit(limit: int | None, device: torch.device) -> int:
    """Bytes that a run may take on a device under policy ``max_memory``; 0 is no limit."""
    if limit is not None:
        return limit
    machine = int(DEFAULT_SHARE * _machine_memory())
    if device.type != "cuda":
        return machine
    return min(machine, int(DEFAULT_SHARE * torch.cuda.get_device_properties(device).total_memory))


def _machine_memory() -> int:
    """Bytes of memory that this machine has, or the container that this process is in."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if Path(path).is_file():
            text = Path(path).read_text().strip()
            found += [int(text)] if text.isdecimal() else []  # "max" is none
    return min(found)


def limit_process(limit: int, device: torch.device) -> None:
    """Let this process have ``limit`` bytes (0: no limit) beside what it has now: what asks for more is
    refused.

    The system sees to it on Linux (``RLIMIT_DATA``), and torch on a GPU. On other systems only what is worked
    out beforehand is refused.
    """
    if not limit:
        return
    if sys.platform == "linux":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        now = re.search(r"^VmData:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        soft = limit + (int(now[1]) * 1024 if now else 0)
        resource.setrlimit(
            resource.RLIMIT_DATA, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard)
        )
    if device.type == "cuda":
        share = limit / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(share, 1.0), device)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is that there was no more memory."""
    seen: list[BaseException] = []  # an error may be named as its own cause
    while error is not None and error not in seen:
        seen.append(error)
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


# --- what things take -----------------------------------------------------------------------------------


def training_bytes(model: nn.Module) -> int:
    """Bytes of a network that is trained."""
    return COPIES_IN_TRAINING * sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())


def bytes_per_input(model: nn.Module, shape: tuple[int, ...], form: Form = "images") -> int:
    """Bytes that a network keeps of one input of a shape until its gradients are known, with its output.

    Found on the meta device; of a network that cannot be computed there, with inputs of zeros.

    >>> of_input(nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), (1, 2, 2))
    36
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    x = example_inputs(shape, form, 2 if form == "rows" else 1)  # a critic's batch norm takes no row alone
    with in_mode(model, False):
        try:
            return _saved_bytes(model, x, torch.device("meta")) // len(x)
        except FORWARD_ERRORS:
            return _saved_bytes(model, x, device) // len(x)


def _saved_bytes(model: nn.Module, x: torch.Tensor, device: torch.device) -> int:
    """Bytes of all that is kept for the way back from inputs, and of what comes out."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=device) if device.type == "meta" else tensor.detach()

    tensors = {name: moved(own).requires_grad_() for name, own in model.named_parameters()}
    tensors |= {name: moved(own) for name, own in model.named_buffers()}
    own_storages = {_storage_id(leaf) for leaf in tensors.values()}
    saved: dict[int, torch.Tensor] = {}  # by where they lie, so that none is counted twice

    def save(tensor: torch.Tensor) -> torch.Tensor:
        if _storage_id(tensor) not in own_storages:
            saved[_storage_id(tensor)] = tensor
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        # Gradients may be asked of it, but through a model that only predicts, which has no parameters.
        x = x.to(device).requires_grad_(x.is_floating_point() and any(True for _ in model.parameters()))
        save(functional_call(model, tensors, (x,)))
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def _storage_id(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def check_model(build: Callable[[], nn.Module], spec: InputSpec, batch: int, limit: int) -> None:
    """Refuse a network of ours, with what a batch of so many inputs keeps, before it has any memory.

    Raises:
        MemoryLimitExceeded: it would take more than ``limit`` bytes; 0 is no limit.
    """
    if not limit:
        return
    try:
        with torch.device("meta"):
            model = build()
        need: float = training_bytes(model) + batch * bytes_per_input(
            model, spec.shape, spec.task.task_class.form
        )
    except RuntimeError as error:
        if "overflow" not in str(error).lower():
            raise
        need = math.inf
    require_memory(_describe_model(spec), need, limit)


def check_run(model: nn.Module, spec: InputSpec, examples: int, batch: int, public: int, limit: int) -> None:
    """Refuse a run whose network, examples, a batch of these, and public inputs are too large together.

    Raises:
        MemoryLimitExceeded: they take more than ``limit`` bytes; 0 is no limit.
    """
    if not limit:
        return
    need = training_bytes(model) + batch * bytes_per_input(model, spec.shape, spec.task.task_class.form)
    require_memory(_describe_model(spec), need, limit)
    responses = public * (example_bytes(spec) + 2 * 4 * math.prod(spec.output_shape))
    require_memory(f"{public} public inputs with answers about them", need + responses, limit)
    data_bytes = COPIES * round_up_to_power_of_two(examples) * example_bytes(spec)
    require_memory("its data beside its model and public data", need + responses + data_bytes, limit)


def _describe_model(spec: InputSpec) -> str:
    sizes = " x ".join(map(str, spec.shape))
    tokens = f", {spec.vocabulary} token ids" if spec.vocabulary else ""
    return f"its model for inputs of {sizes}{tokens} and {len(spec.classes)} classes"
