"""Checks whether DP-SGD can train a network: no layer may mix, store or randomly alter examples.

Random layers are excluded because torch samples by an example's position in the batch, which depends on the
other examples.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from fedstill.core.errors import FedstillError, ModelError
from fedstill.core.seeds import seeded
from fedstill.models import image_classifiers, tabular
from fedstill.models.module_utils import deep_copy

BUILTIN_MODULES = (image_classifiers.__name__, tabular.__name__)
MAX_LISTED_LAYERS = 6  # in an error


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


def _describe_replacement(layer: nn.Module, last: nn.Module | None) -> str:
    """Return a layer's problem and replacement, or an empty text. ``last`` is the layer before it."""
    try:
        import opacus.layers as private
        from opacus.validators import ModuleValidator
    except ImportError as error:
        raise FedstillError("Opacus is not installed: pip install 'fedstill[dp]'") from error
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
