"""Checks whether a torch module can take part, and whether DP-SGD can train it.

:func:`check_module` checks a module's type, tensors and outputs, and whether it can be trained. All entry
points use it: ``fedstill.distil``, a run's configuration, a node's ``node.toml``.

:func:`reject_dp_incompatible` refuses layers that mix, store or randomly alter examples. Random layers are
excluded because torch samples by an example's position in the batch, which depends on the other examples.
"""

from __future__ import annotations

import importlib

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from fedstill.core.dataset import Form
from fedstill.core.errors import FedstillError, ModelError
from fedstill.core.registry import COMPUTATION_ERRORS, first_line
from fedstill.core.seeds import seeded
from fedstill.models import image_classifiers, tabular
from fedstill.models.module_utils import deep_copy, in_mode

FORWARD_ERRORS = COMPUTATION_ERRORS  # raised by a module's forward if an input does not fit
BUILTIN_MODULES = (image_classifiers.__name__, tabular.__name__)
MAX_LISTED_LAYERS = 6  # in an error


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


class DPIncompatibleError(ModelError):
    """A network that DP-SGD cannot train, with the problem and replacement of each such layer by name."""

    def __init__(self, subject: str, layers: dict[str, str], *, builtin: bool = False) -> None:
        self.layers = layers
        lines = [f"{name or 'the network itself'}: {problem}" for name, problem in layers.items()]
        more = len(lines) - MAX_LISTED_LAYERS
        listed = "; ".join(lines[:MAX_LISTED_LAYERS]) + (f"; and {more} more" if more > 0 else "")
        reason = " (batch norm mixes examples)" if any("BatchNorm" in line for line in lines) else ""
        hint = "; small-cnn, lenet5 and mlp have none of these" if builtin else ""
        super().__init__(f"{subject} cannot be trained with DP-SGD{reason}: {listed}{hint}")


def reject_dp_incompatible(model: nn.Module, subject: str, inputs: torch.Tensor | None = None) -> None:
    """Refuse a network that DP-SGD cannot train. The network is not changed.

    Layers are checked with Opacus' validator and for cases that it misses: subclasses of refused layers, also
    frozen ones, plain recurrent layers, random layers, and lazy layers without sizes. With two ``inputs``,
    per-example gradients are tried, which finds custom layers that store their inputs or sample.

    Args:
        model: the network.
        subject: name of the model, the first words of the error.
        inputs: two inputs for a trial, or None.

    Raises:
        DPIncompatibleError: lists every unsuitable layer and its replacement.
        FedstillError: Opacus is not installed.
    """
    layers, last = {}, None
    for name, layer in model.named_modules():
        if problem := _describe_replacement(layer, last):
            layers[name] = problem
        last = layer if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd) else last
    if not layers and inputs is not None:
        layers = _per_example_gradient_problems(model, inputs)
    if layers:
        raise DPIncompatibleError(subject, layers, builtin=type(model).__module__ in BUILTIN_MODULES)


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


def require_opacus() -> None:
    """Refuse private training without the package that checks networks for it.

    Raises:
        FedstillError: Opacus is not installed.
    """
    try:
        importlib.import_module("opacus")
    except ImportError as error:
        raise FedstillError("Opacus is not installed: pip install 'fedstill[dp]'") from error


def _describe_replacement(layer: nn.Module, last: nn.Module | None) -> str:
    """Return a layer's problem and replacement, or an empty text. ``last`` is the layer before it."""
    require_opacus()
    import opacus.layers as private
    from opacus.validators import ModuleValidator

    name = type(layer).__name__
    if any(
        isinstance(tensor, nn.parameter.UninitializedParameter) for tensor in layer.parameters(recurse=False)
    ):
        return f"{name} has no sizes yet: call the network once, or set the sizes"
    if type(layer) is nn.RNN:
        return f"{name} -> opacus.layers.{private.DPRNN.__name__}({layer.input_size}, {layer.hidden_size})"
    if isinstance(layer, nn.BatchNorm1d) and not isinstance(last, nn.Conv1d | nn.ConvTranspose1d):
        return f"{name} -> LayerNorm({layer.num_features})"  # in groups of one value all outputs would be 0
    for kind in type(layer).__mro__:
        if kind in ModuleValidator.VALIDATORS and ModuleValidator.VALIDATORS[kind](layer):
            replacement = ModuleValidator.FIXERS[kind](layer)
            return f"{name} -> {_layer_as_code(replacement)}"
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        return f"{name} -> GroupNorm"
    if isinstance(layer, nn.RReLU):
        return f"{name} -> LeakyReLU"
    if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
        return f"{name} -> none: its random mask depends on the other examples"
    return ""


def _layer_as_code(layer: nn.Module) -> str:
    if isinstance(layer, nn.GroupNorm):
        return f"GroupNorm({layer.num_groups}, {layer.num_channels})"
    name = type(layer).__name__
    return f"opacus.layers.{name}" if type(layer).__module__.startswith("opacus") else repr(layer)


def _per_example_gradient_problems(model: nn.Module, inputs: torch.Tensor) -> dict[str, str]:
    """Return the problem in computing per-example gradients of a copy, by layer, or an empty dictionary."""
    copy = deep_copy(model).train()
    before = {name: tensor.clone() for name, tensor in _buffers_and_tensors(copy).items()}
    parameters = {name: parameter.detach() for name, parameter in copy.named_parameters()}
    x = inputs.to(next(iter(parameters.values())).device if parameters else "cpu")
    if x.is_floating_point():  # a stored input of zeros may not be noticed
        with seeded(0, "inputs"):
            x = torch.randn_like(x)

    def one_output(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = functional_call(copy, parameters, (x.unsqueeze(0),))
        return output.float().sum()

    def output(network: nn.Module) -> torch.Tensor:
        with seeded(0, "output"):
            outputs: torch.Tensor = network(x)
            return outputs

    try:
        with torch.no_grad(), seeded(0, "try"):
            first = output(copy)
            after = _buffers_and_tensors(copy)
            changed = [
                name.rpartition(".")
                for name, tensor in after.items()
                if name not in before or not torch.equal(before[name], tensor)
            ]
            if not changed and not torch.equal(first, output(copy)):
                return {"": "it stores its inputs"}
            if not changed:
                vmap(grad(one_output), in_dims=(None, 0), randomness="error")(parameters, x)
    except RuntimeError as error:  # sampling, .item(), a branch on values
        return {"": f"no per-example gradients ({str(error).splitlines()[0]})"}
    return {layer: f"{buffer!r} stores inputs -> a layer without it" for layer, _, buffer in changed}


def _buffers_and_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's buffers and the tensors that are plain attributes of its layers, by name."""
    plain = {
        f"{layer}.{name}" if layer else name: value
        for layer, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }
    return {**dict(model.named_buffers()), **plain}
