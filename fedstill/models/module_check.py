"""Checks whether a torch module can take part: its type, tensors and outputs, and whether it can be trained.

All entry points use the same check: ``fedstill.distil``, a run's configuration, a node's ``node.toml``.
"""

from __future__ import annotations

import torch
from torch import nn

from fedstill.core.dataset import Form
from fedstill.core.errors import ModelError
from fedstill.core.registry import COMPUTATION_ERRORS, first_line
from fedstill.core.seeds import seeded
from fedstill.models.module_utils import deep_copy, in_mode

FORWARD_ERRORS = COMPUTATION_ERRORS  # raised by a module's forward if an input does not fit


def example_inputs(shape: tuple[int, ...], form: Form = "images", count: int = 2) -> torch.Tensor:
    """Return inputs for a trial forward pass: images or rows of zeros, or texts of the first token."""
    if form == "texts":
        return torch.ones(count, *shape, dtype=torch.int64)
    return torch.zeros(count, *shape, dtype=torch.float32)


def check_module(
    model: object, shape: tuple[int, ...], outputs: tuple[int, ...], subject: str, form: Form = "images"
) -> None:
    """Refuse a network that does not map inputs ``(B, *shape)`` to outputs ``(B, *outputs)``.

    A network with trainable parameters must also be copyable, have float32 parameters, and return outputs of
    the same shape, with gradients, in training mode. This is tried on a copy.

    Args:
        model: the network.
        shape: shape of an input.
        outputs: shape of an output.
        subject: name of the model, the first words of an error.
        form: form of the inputs.

    Raises:
        ModelError: the first check that fails.
    """
    if isinstance(model, type):
        raise ModelError(f"{subject} is the class {model.__name__} (expected an instance)")
    if not isinstance(model, nn.Module):
        raise ModelError(f"{subject} is {model!r} (expected a torch.nn.Module)")
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    _reject_wrappers(model, subject, bool(trained))
    _check_tensors(model, trained, subject)
    x = example_inputs(shape, form).to(
        next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    )
    try:
        with in_mode(model, False), torch.no_grad():
            output = model(x)
    except FORWARD_ERRORS as error:
        raise ModelError(f"{subject} cannot take inputs of shape {shape}: {first_line(error)}") from error
    _check_output(output, outputs, subject, "")
    lazy = any(isinstance(parameter, nn.parameter.UninitializedParameter) for parameter in trained.values())
    if trained and not lazy:
        _check_training(model, x, outputs, subject)


def needs_two_examples(model: nn.Module, shape: tuple[int, ...], form: Form = "images") -> bool:
    """Return whether a network needs batches of two examples in training, as batch norm of one value does.

    >>> needs_two_examples(nn.BatchNorm1d(4), (4,), "rows"), needs_two_examples(nn.BatchNorm2d(1), (1, 8, 8))
    (True, False)
    """
    if not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in model.modules()):
        return False
    x = example_inputs(shape, form, 1).to(
        next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    )
    with seeded(0, "try"), torch.no_grad():
        try:
            deep_copy(model).train()(x)
        except ValueError as error:
            return "more than 1 value per channel" in str(error)
    return False


def _reject_wrappers(model: nn.Module, subject: str, trained: bool) -> None:
    """Refuse wrappers of a network that can neither be copied nor stacked."""
    for name, layer in model.named_modules():
        location = f"layer {name!r} of {subject}" if name else subject
        if isinstance(layer, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise ModelError(
                f"{location} is a {type(layer).__name__} (expected the module inside it, its .module)"
            )
        if isinstance(getattr(layer, "_orig_mod", None), nn.Module):
            raise ModelError(f"{location} is compiled by torch.compile (expected the original module)")
        if trained and isinstance(layer, torch.jit.ScriptModule):
            raise ModelError(
                f"{location} is a TorchScript module, which cannot be trained (expected the original "
                "torch.nn.Module, or a frozen module, without parameters that require gradients)"
            )


def _check_tensors(model: nn.Module, trained: dict[str, nn.Parameter], subject: str) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):  # gets its size in the forward pass below
            continue
        if tensor.is_inference():
            raise ModelError(
                f"{subject} has tensors from torch.inference_mode, which cannot be trained "
                "(expected a model created outside of it)"
            )
        if tensor.is_meta:
            raise ModelError(
                f"{subject} has no data in {name!r}, which is on the meta device (expected data)"
            )
        if tensor.is_complex():  # the imaginary part would be lost
            expected = "expected real numbers, as from torch.view_as_real"
            raise ModelError(f"{subject} has complex numbers in {name!r} ({expected})")
    for name, parameter in trained.items():
        if parameter.dtype != torch.float32:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise ModelError(
                f"{subject} has trainable parameters such as {name!r} of {dtype} "
                "(expected float32, call .float())"
            )


def _check_output(output: object, outputs: tuple[int, ...], subject: str, when: str) -> None:
    hint = ", as of unet" if len(outputs) == 3 else ""
    if not isinstance(output, torch.Tensor):
        expected = f"a tensor of shape (B, {', '.join(map(str, outputs))})"
        raise ModelError(f"{subject} returns a {type(output).__name__}{when} (expected {expected}{hint})")
    if tuple(output.shape) != (2, *outputs):
        shape = tuple(output.shape[1:])
        raise ModelError(
            f"{subject} returns outputs of shape {shape} per example{when} (expected {outputs}{hint})"
        )
    if not output.is_floating_point():
        dtype = str(output.dtype).removeprefix("torch.")
        raise ModelError(f"{subject} returns outputs of {dtype}{when} (expected floating-point logits)")


def _check_training(model: nn.Module, x: torch.Tensor, outputs: tuple[int, ...], subject: str) -> None:
    """Check a copy of the network in training mode."""
    try:
        copy = deep_copy(model).train()
    except FORWARD_ERRORS as error:
        raise ModelError(f"{subject} cannot be copied: {first_line(error)}") from error
    try:
        with seeded(0, "try"), torch.enable_grad():
            output = copy(x)
    except FORWARD_ERRORS as error:
        shape = tuple(x.shape[1:])
        raise ModelError(
            f"{subject} cannot be trained on inputs of shape {shape}: {first_line(error)}"
        ) from error
    _check_output(output, outputs, subject, " in training mode")
    if not output.requires_grad:
        raise ModelError(
            f"{subject} returns outputs without gradients to its parameters (expected a forward that "
            "autograd can follow, or a frozen model, requires_grad_(False))"
        )
