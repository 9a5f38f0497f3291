"""Limits of a node's computations: memory, time, and parameters of the networks that a plan creates.

The memory of a plan or query is estimated on torch's meta device, before anything is allocated. Other code,
for example the owner's, is stopped by the limit of the process.
"""

from __future__ import annotations

import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from fedstill.core import timing
from fedstill.core.dataset import Form
from fedstill.core.errors import MemoryLimitExceeded, QueryRefused
from fedstill.data.data_spec import (
    COPIES,
    DataSpec,
    example_bytes,
    require_memory,
    round_up_to_power_of_two,
)
from fedstill.models import FORWARD_ERRORS, example_inputs
from fedstill.models.module_utils import in_mode
from fedstill.protocol.node_side import NodeSide
from fedstill.protocol.payload_kinds import GENERATOR_PARAMETERS
from fedstill.protocol.queries import NodeFunction, Query

logger = logging.getLogger("fedstill.node")

JOIN = "join"
DEFAULT_SHARE = 0.75  # of a machine's memory, by default
COPIES_IN_TRAINING = 4  # per parameter: weight, gradient and two moments of Adam
OUT_OF_MEMORY = re.compile("can't allocate memory|not enough memory|bad_alloc|out of memory", re.IGNORECASE)


def allowed_memory_bytes(limit: int | None, device: torch.device) -> int:
    """Return the bytes that a run may take on a device under policy ``max_memory``; 0 is no limit."""
    if limit is not None:
        return limit
    machine = int(DEFAULT_SHARE * _machine_memory())
    if device.type != "cuda":
        return machine
    return min(machine, int(DEFAULT_SHARE * torch.cuda.get_device_properties(device).total_memory))


def _machine_memory() -> int:
    """Return the memory of this machine, or of this process's container, in bytes."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if Path(path).is_file():
            text = Path(path).read_text().strip()
            sizes += [int(text)] if text.isdecimal() else []  # "max": no limit
    return min(sizes)


def limit_process_memory(limit: int, device: torch.device) -> None:
    """Limit this process to ``limit`` bytes (0: no limit) in addition to its current memory.

    Enforced by the system on Linux (``RLIMIT_DATA``), and by torch on a GPU. On other systems only
    estimates are checked.
    """
    if not limit:
        return
    if sys.platform == "linux":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        current = re.search(r"^VmData:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        soft = limit + (int(current[1]) * 1024 if current else 0)
        resource.setrlimit(
            resource.RLIMIT_DATA, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard)
        )
    if device.type == "cuda":
        share = limit / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(share, 1.0), device)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or its cause, is a lack of memory."""
    seen: list[BaseException] = []  # an error may be its own cause
    while error is not None and error not in seen:
        seen.append(error)
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


# --- estimates ----------------------------------------------------------------------------------------


def training_bytes(model: nn.Module) -> int:
    """Return the bytes of a network in training."""
    return COPIES_IN_TRAINING * sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())


def bytes_per_input(model: nn.Module, shape: tuple[int, ...], form: Form = "images") -> int:
    """Return the bytes that a network keeps for the gradients of one input, with its output.

    Computed on the meta device; if a network does not support that, with inputs of zeros.

    >>> bytes_per_input(nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), (1, 2, 2))
    36
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    x = example_inputs(shape, form, 2 if form == "rows" else 1)  # a critic's batch norm needs two rows
    with in_mode(model, False):
        try:
            return _saved_bytes(model, x, torch.device("meta")) // len(x)
        except FORWARD_ERRORS:
            return _saved_bytes(model, x, device) // len(x)


def _saved_bytes(model: nn.Module, x: torch.Tensor, device: torch.device) -> int:
    """Return the bytes of all tensors saved for the backward pass, and of the output."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=device) if device.type == "meta" else tensor.detach()

    tensors = {name: moved(tensor_).requires_grad_() for name, tensor_ in model.named_parameters()}
    tensors |= {name: moved(tensor_) for name, tensor_ in model.named_buffers()}
    own_storages = {_storage_id(leaf) for leaf in tensors.values()}
    saved: dict[int, torch.Tensor] = {}  # by storage, so that none is counted twice

    def save(tensor: torch.Tensor) -> torch.Tensor:
        if _storage_id(tensor) not in own_storages:
            saved[_storage_id(tensor)] = tensor
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        # Inputs need gradients, except for models without parameters.
        x = x.to(device).requires_grad_(x.is_floating_point() and any(True for _ in model.parameters()))
        save(functional_call(model, tensors, (x,)))
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def _storage_id(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def check_model(build: Callable[[], nn.Module], spec: DataSpec, batch: int, limit: int) -> None:
    """Refuse a built-in network, with the activations of a batch, before it is allocated.

    A limit of its parameters would not do: activations grow with the inputs' shape, which a server chooses.

    Raises:
        MemoryLimitExceeded: it would take more than ``limit`` bytes; 0 is no limit.
    """
    if not limit:
        return
    try:
        with torch.device("meta"):
            model = build()
        need: float = training_bytes(model) + batch * bytes_per_input(model, spec.shape, spec.form)
    except (RuntimeError, TypeError) as error:  # an overflow of bytes or elements
        if "overflow" not in str(error).lower():
            raise
        need = math.inf
    require_memory(_describe_model(spec), need, limit)


def check_run(model: nn.Module, spec: DataSpec, examples: int, batch: int, public: int, limit: int) -> None:
    """Refuse a run whose network, examples, batch and public inputs are too large together.

    Raises:
        MemoryLimitExceeded: they take more than ``limit`` bytes; 0 is no limit.
    """
    if not limit:
        return
    need = training_bytes(model) + batch * bytes_per_input(model, spec.shape, spec.form)
    require_memory(_describe_model(spec), need, limit)
    responses = public * (example_bytes(spec) + 2 * 4 * math.prod(spec.output_shape))
    require_memory(f"{public} public inputs with their responses", need + responses, limit)
    data_bytes = COPIES * round_up_to_power_of_two(examples) * example_bytes(spec)
    require_memory("its data with its model and public data", need + responses + data_bytes, limit)


def _describe_model(spec: DataSpec) -> str:
    sizes = " x ".join(map(str, spec.shape))
    tokens = f", {spec.vocabulary} token ids" if spec.vocabulary else ""
    return f"its model for inputs of {sizes}{tokens} and {len(spec.classes)} classes"


# --- time and memory of one message -----------------------------------------------------------------


@contextmanager
def enforce_limits(node: str, query: str, seconds: int = 0) -> Iterator[None]:
    """Refuse a computation that takes more than ``seconds`` (0: no limit), or more memory than there is.

    Raises:
        QueryRefused: with the policy's rule. A server may know which of its own requests was too large, but
            not the amount of data or memory.
    """
    refusal = QueryRefused(node, query, f"max_seconds: {seconds}, and it takes longer")
    try:
        with timing.time_limit(seconds, lambda: refusal):
            yield
    except Exception as error:
        if isinstance(error, QueryRefused) or not (
            isinstance(error, MemoryLimitExceeded) or is_out_of_memory(error)
        ):
            raise
        subject = error.what if isinstance(error, MemoryLimitExceeded) else "it"
        if query == JOIN:  # the size of the parts would reveal the number of records
            logger.error("refused by max_memory: %s", error)
            subject = "the run"
        rule = f"max_memory: {subject} would take more than the node's owner allows"
        raise QueryRefused(node, query, rule) from error


# --- parameters of networks that a server plans -----------------------------------------------------


class _ParameterLimit(TorchFunctionMode):
    """Refuses layers beyond a number of parameters, in this thread, before they are allocated.

    All layers of torch allocate with ``torch.empty``, which is called here on the meta device first.
    """

    def __init__(self, limit: int, node: str, query: str) -> None:
        super().__init__()
        self.limit, self.node, self.query, self.created = limit, node, query, 0.0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        arguments = dict(kwargs or {})
        if func is torch.empty:
            self.created += _count_elements(*args, **arguments)
            if self.created > self.limit:
                rule = f"max_parameters: {self.limit}, and the plan's networks have more"
                raise QueryRefused(self.node, self.query, rule)
        return func(*args, **arguments)


def _count_elements(*args: Any, **given: Any) -> float:
    """Return the number of elements of a ``torch.empty`` call; inf if it overflows."""
    try:
        return torch.empty(*args, **{**given, "device": "meta"}).numel()
    except (RuntimeError, TypeError, OverflowError, ValueError):  # an overflow; its type depends on its size
        return float("inf")


def limit_parameters(limit: int, node: str, query: str) -> AbstractContextManager[object]:
    """Refuse, in the returned context, networks of more than ``limit`` parameters; 0: no limit.

    Args:
        limit: the policy's ``max_parameters``.
        node: name of the node.
        query: name of the query, or ``"join"``.
    """
    return _ParameterLimit(limit, node, query) if limit else nullcontext()


def limit_parameters_of_queries(side: NodeSide, limit: int, node: str) -> NodeSide:
    """Return a method's node side whose queries cannot create networks of more than ``limit`` parameters.

    The returned side refuses with :class:`QueryRefused` in each query that brings a network. Every function
    of torch takes longer then. A simulation, whose server is this process, compares sizes only
    (:func:`fedstill.node.admission.sent_networks`).
    """

    def guard(query: Query) -> NodeFunction:
        def function(*args: Any, **inputs: Any) -> Mapping[str, torch.Tensor]:
            with limit_parameters(limit, node, query.name):
                return query.function(*args, **inputs)

        return function if GENERATOR_PARAMETERS in query.sends.values() else query.function

    queries = {name: replace(declared, function=guard(declared)) for name, declared in side.queries.items()}
    return replace(side, queries=queries)
