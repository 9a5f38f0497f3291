"""Networks of equal architecture as one: a batched kernel computes all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, vmap

from fedstill.core import timing
from fedstill.core.compute import match_layout


class StackedModules:
    """Modules of equal architecture as one module: ``(G, B, ...)`` in, ``(G, B, ...)`` out.

    With G > 1 the parameters move into stacked tensors, one row per module. Each module keeps its
    parameters as views of its row, so optimizers and state dicts stay valid.

    Args:
        modules: G modules with equal :func:`stacking_key`.
        frozen: names of parameters that are not trained.
    """

    def __init__(self, modules: Sequence[nn.Module], frozen: frozenset[str] = frozenset()) -> None:
        self.modules = list(modules)
        self.frozen = frozen
        self._training: bool | None = None
        # Stacking changes the storage of these parameters, not their identity.
        self._module_parameters = [dict(module.named_parameters()) for module in self.modules]
        self._parameters: dict[str, torch.Tensor] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        if len(self.modules) > 1:
            self._stack()

    def train(self, mode: bool = True) -> None:
        """Switch to training mode with gradients of the parameters, or to evaluation mode without."""
        # Another group, or a view of one node, may have switched the same modules since.
        if mode is self._training and all(module.training is mode for module in self.modules):
            return
        self._training = mode
        for module in self.modules:
            module.train(mode)
        stacked: Mapping[str, torch.Tensor] = self._parameters
        for parameters in (*self._module_parameters, stacked):
            for name, tensor in parameters.items():
                tensor.requires_grad_(mode and name not in self.frozen)

    def __call__(self, x: torch.Tensor, submodule: str = "") -> torch.Tensor:
        """Compute module g on ``x[g]``. With fewer rows than modules, only the first modules are computed.

        Args:
            x: ``(G, B, ...)``.
            submodule: name of a submodule to compute instead of the whole, for example ``"head"``.

        Returns:
            Outputs ``(G, B, ...)`` in float32.
        """
        timing.check_limits()
        base = self.modules[0].get_submodule(submodule) if submodule else self.modules[0]
        if len(x) == 1:  # stacked kernels are slower for one module
            output: torch.Tensor = base(x.squeeze(0))
            return output.float().unsqueeze(0)
        count, prefix = len(x), f"{submodule}." if submodule else ""

        def call_one(parameters: Any, buffers: Any, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = functional_call(base, (parameters, buffers), (x,))
            return result

        parameters = _submodule_tensors(self._parameters, prefix, count)
        buffers = _submodule_tensors(self._buffers, prefix, count)
        # Public inputs are the same for all modules, and are not copied.
        is_shared = x.stride(0) == 0 and not (x.requires_grad and torch.is_grad_enabled())
        x, dim = (x[0], None) if is_shared else (x.contiguous(), 0)
        with _cast_batch_norm_inputs_to_float32(base, x.device):
            stacked: torch.Tensor = vmap(call_one, in_dims=(0, 0, dim))(parameters, buffers, x)
        return stacked.float()

    def trainable_parameters(self, count: int) -> dict[str, torch.Tensor]:
        """Return the trained parameters of the first ``count`` modules by name, each ``(count, ...)``, in
        the graph.
        """
        if count == 1:
            return {
                name: parameter.unsqueeze(0)
                for name, parameter in self._module_parameters[0].items()
                if name not in self.frozen
            }
        return {name: tensor[:count] for name, tensor in self._parameters.items() if name not in self.frozen}

    def is_current(self) -> bool:
        """Return whether the parameters still lie here; a later stack of the same modules moves them."""
        if not self._parameters:  # alone
            return True
        name, rows = next(iter(self._parameters.items()))
        return all(
            module_parameters[name].data_ptr() == row.data_ptr()
            for module_parameters, row in zip(self._module_parameters, rows, strict=True)
        )

    def backward(self, losses: torch.Tensor) -> None:
        """Compute the gradients of each module's own loss, ``losses`` (G,), into its parameters' ``grad``."""
        is_single = len(losses) == 1
        leaves: dict[str, torch.Tensor] = {**self._module_parameters[0]} if is_single else self._parameters
        names = [name for name, leaf in leaves.items() if leaf.requires_grad]
        grads: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
            losses.sum(), [leaves[name] for name in names], allow_unused=True
        )
        for name, grad in zip(names, grads, strict=True):
            for row, module_parameters in enumerate(self._module_parameters[: len(losses)]):
                gradient = grad if is_single or grad is None else grad[row]
                module_parameters[name].grad = (
                    None if gradient is None else match_layout(gradient, module_parameters[name])
                )

    def _stack(self) -> None:
        for name, _ in self.modules[0].named_parameters():
            parameters = [module.get_parameter(name) for module in self.modules]
            # vmap does not support channels last.
            rows = torch.stack([parameter.detach() for parameter in parameters]).contiguous()
            for parameter, row in zip(parameters, rows, strict=True):
                parameter.data = row
            self._parameters[name] = rows.requires_grad_(parameters[0].requires_grad)
        for name, _ in self.modules[0].named_buffers():
            rows = torch.stack([module.get_buffer(name) for module in self.modules])
            self._buffers[name] = rows
            path, _, leaf = name.rpartition(".")
            for module, row in zip(self.modules, rows, strict=True):
                module.get_submodule(path)._buffers[leaf] = row


@contextmanager
def _cast_batch_norm_inputs_to_float32(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Pass inputs of batch norms in float32.

    On a GPU, torch 2.11 has no backward pass through stacked batch norms in bfloat16 whose running
    statistics are float32.
    """
    is_reduced = device.type == "cuda" and torch.is_autocast_enabled(device.type)
    layers = module.modules() if is_reduced else ()
    with ExitStack() as hooks:
        for layer in layers:
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                hooks.enter_context(layer.register_forward_pre_hook(_as_float32))
        yield


def _as_float32(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.float() for tensor in inputs)


def _submodule_tensors(
    tensors: Mapping[str, torch.Tensor], prefix: str, count: int
) -> dict[str, torch.Tensor]:
    """Return the tensors of one submodule, under the names that they have inside it."""
    return {
        name[len(prefix) :]: tensor[:count] for name, tensor in tensors.items() if name.startswith(prefix)
    }


def stack_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack tensors as ``torch.stack``, without a copy if there is only one."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))
