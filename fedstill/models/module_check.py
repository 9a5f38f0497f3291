"""Checks whether a torch module can take part: kind, tensors, outputs, and that it can be trained.

One rule for every entry point: ``fedstill.distil``, a run's configuration, a node's ``node.toml``.
"""

from __future__ import annotations

import torch
from torch import nn

from fedstill.core.dataset import Form
from fedstill.core.errors import ModelError
from fedstill.core.registry import first_line
from fedstill.core.seeds import seeded
from fedstill.models.module_utils import deep_copy, in_mode

# What a module's forward raises when an input does not suit it.
FORWARD_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
)


def example_inputs(shape: tuple[int, ...], form: Form = "images", count: int = 2) -> torch.Tensor:
    """Inputs to try a network with: images or rows of zeros, or texts of the first token."""
    if form == "texts":
        return torch.ones(count, *shape, dtype=torch.int64)
    return torch.zeros(count, *shape, dtype=torch.float32)


def check_module(
    model: object, shape: tuple[int, ...], outputs: tuple[int, ...], whose: str, form: Form = "images"
) -> None:
    """Refuse a network that does not map inputs ``(B, *shape)`` of a form to ``(B, *outputs)``.

    What is to be trained must also be copyable, hold float32 parameters, and give the same form of output,
    with gradients, in training mode. This is tried on a copy.

    Raises:
        ModelError: naming the first misfit.
    """
    if isinstance(model, type):
        raise ModelError(
            f"{whose} is the class {model.__name__}: expected an instance, as its call makes one"
        )
    if not isinstance(model, nn.Module):
        raise ModelError(f"{whose} is {model!r}: expected a torch.nn.Module")
    trained = {name: own for name, own in model.named_parameters() if own.requires_grad}
    _check_kind(model, whose, bool(trained))
    _check_tensors(model, trained, whose)
    x = example_inputs(shape, form).to(next((own.device for own in model.parameters()), torch.device("cpu")))
    try:
        with in_mode(model, False), torch.no_grad():
            output = model(x)
    except FORWARD_ERRORS as error:
        raise ModelError(f"{whose} cannot take inputs of shape {shape}: {first_line(error)}") from error
    _check_output(output, outputs, whose, "")
    if trained and not any(isinstance(own, nn.parameter.UninitializedParameter) for own in trained.values()):
        _check_training(model, x, outputs, whose)


def needs_two_examples(model: nn.Module, shape: tuple[int, ...], form: Form = "images") -> bool:
    """Return whether a network needs two examples to train, as batch norm over a single value does.

    >>> needs_two_examples(nn.BatchNorm1d(4), (4,), "rows"), needs_two_examples(nn.BatchNorm2d(1), (1, 8, 8))
    (True, False)
    """
    if not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in model.modules()):
        return False
    x = example_inputs(shape, form, 1).to(
        next((own.device for own in model.parameters()), torch.device("cpu"))
    )
    with seeded(0, "try"), torch.no_grad():
        try:
            deep_copy(model).train()(x)
        except ValueError as error:
            return "more than 1 value per channel" in str(error)
    return False


def _check_kind(model: nn.Module, whose: str, trained: bool) -> None:
    """Refuse what wraps a network so that it can neither be copied nor computed stacked."""
    for name, layer in model.named_modules():
        told = f"layer {name!r} of {whose}" if name else whose
        if isinstance(layer, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise ModelError(
                f"{told} is a {type(layer).__name__}: expected the module inside it, its .module"
            )
        if isinstance(getattr(layer, "_orig_mod", None), nn.Module):
            raise ModelError(f"{told} is compiled by torch.compile: expected the module that was compiled")
        if trained and isinstance(layer, torch.jit.ScriptModule):
            frozen = (
                "; a node's model that only answers may be one, if none of its parameters requires a gradient"
            )
            raise ModelError(
                f"{told} is a TorchScript module, which cannot be trained here: expected the torch.nn.Module "
                f"that it was made from{frozen}"
            )


def _check_tensors(model: nn.Module, trained: dict[str, nn.Parameter], whose: str) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):  # a lazy layer: it gets its size below
            continue
        if tensor.is_inference():
            made = "was made in torch.inference_mode, and cannot be trained: expected one made outside it"
            raise ModelError(f"{whose} {made}")
        if tensor.is_meta:
            raise ModelError(f"{whose} has no numbers in {name!r} (device meta): expected tensors with data")
        if tensor.is_complex():  # whose imaginary part would be lost
            expected = "expected real numbers, as torch.view_as_real makes"
            raise ModelError(f"{whose} has complex numbers in {name!r}: {expected}")
    for name, own in trained.items():
        if own.dtype != torch.float32:
            found = f"{name!r} of {str(own.dtype).removeprefix('torch.')}"
            raise ModelError(
                f"{whose} is to be trained and has parameters such as {found}: expected float32, as .float() "
                "makes them"
            )


def _check_output(output: object, outputs: tuple[int, ...], whose: str, where: str) -> None:
    such = ", as unet gives" if len(outputs) == 3 else ""
    if not isinstance(output, torch.Tensor):
        allowed = f"a tensor of shape (B, {', '.join(map(str, outputs))})"
        raise ModelError(f"{whose} gives a {type(output).__name__}{where}: expected {allowed}{such}")
    if tuple(output.shape) != (2, *outputs):
        found = tuple(output.shape[1:])
        raise ModelError(
            f"{whose} gives outputs of shape {found} an example{where}: expected {outputs}{such}"
        )
    if not output.is_floating_point():
        dtype = str(output.dtype).removeprefix("torch.")
        raise ModelError(f"{whose} gives outputs of {dtype}{where}: expected logits, floating-point numbers")


def _check_training(model: nn.Module, x: torch.Tensor, outputs: tuple[int, ...], whose: str) -> None:
    """Try a copy in training mode."""
    try:
        twin = deep_copy(model).train()
    except (*FORWARD_ERRORS, NotImplementedError) as error:
        raise ModelError(f"{whose} cannot be copied: {first_line(error)}") from error
    try:
        with seeded(0, "try"), torch.enable_grad():
            output = twin(x)
    except FORWARD_ERRORS as error:
        told = f"{whose} cannot be trained on inputs of shape {tuple(x.shape[1:])}"
        raise ModelError(f"{told}: {first_line(error)}") from error
    _check_output(output, outputs, whose, " in training mode")
    if not output.requires_grad:
        raise ModelError(
            f"{whose} gives outputs without gradients to its parameters: expected a forward that autograd "
            "can follow, or a frozen model (requires_grad_(False))"
        )
