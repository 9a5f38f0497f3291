"""Checks whether DP-SGD can train a network: no layer may mix, remember or draw over examples.

torch draws by an example's place in the batch, which follows from the other examples.
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
MAX_LISTED_LAYERS = 6  # layers that are named


class DPIncompatibleError(ModelError):
    """A network that DP-SGD cannot train, with what takes the place of each layer, by name, that cannot."""

    def __init__(self, whose: str, layers: dict[str, str], *, ours: bool = False) -> None:
        self.layers = layers
        named = [f"{name or 'the network itself'}: {what}" for name, what in layers.items()]
        told = "; ".join(named[:MAX_LISTED_LAYERS]) + (
            f"; and {len(named) - MAX_LISTED_LAYERS} more" if len(named) > MAX_LISTED_LAYERS else ""
        )
        why = " (batch norm mixes examples)" if any("BatchNorm" in what for what in named) else ""
        other = "; small-cnn, lenet5 and mlp have none of these" if ours else ""
        super().__init__(f"{whose} cannot learn privately{why}: {told}{other}")


def check(model: nn.Module, whose: str, inputs: torch.Tensor | None = None) -> None:
    """Refuse a network that DP-SGD cannot train. Nothing of it is changed.

    Layers are judged by Opacus' validator, and by what it does not know: kinds derived from those it
    refuses, frozen ones too, plain recurrent layers, layers that draw at random, and layers without their
    sizes. With two ``inputs``, these examples' gradients are tried, which finds layers of one's own
    that keep what they saw, or draw. ``whose`` are the first words of the error.

    Raises:
        DPIncompatibleError: naming every layer that stands in the way, and what takes its place.
        FedstillError: Opacus is not installed.
    """
    layers, last = {}, None
    for name, layer in model.named_modules():
        if found := _describe_replacement(layer, last):
            layers[name] = found
        last = layer if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd) else last
    if not layers and inputs is not None:
        layers = _try_per_example_gradients(model, inputs)
    if layers:
        raise DPIncompatibleError(whose, layers, ours=type(model).__module__ in BUILTIN_MODULES)


def _describe_replacement(layer: nn.Module, last: nn.Module | None) -> str:
    """What is wrong with a layer and what takes its place, or nothing; ``last`` gives its inputs."""
    try:
        import opacus.layers as private
        from opacus.validators import ModuleValidator
    except ImportError as error:
        raise FedstillError("Opacus is not installed: pip install 'fedstill[dp]'") from error
    name = type(layer).__name__
    if any(isinstance(own, nn.parameter.UninitializedParameter) for own in layer.parameters(recurse=False)):
        return f"{name} has no sizes yet: call it once, or give its sizes"
    if type(layer) is nn.RNN:
        return f"{name} -> opacus.layers.{private.DPRNN.__name__}({layer.input_size}, {layer.hidden_size})"
    if isinstance(layer, nn.BatchNorm1d) and not isinstance(last, nn.Conv1d | nn.ConvTranspose1d):
        return f"{name} -> LayerNorm({layer.num_features})"  # groups of one value would all be 0
    for kind in type(layer).__mro__:
        if kind in ModuleValidator.VALIDATORS and ModuleValidator.VALIDATORS[kind](layer):
            other = ModuleValidator.FIXERS[kind](layer)
            return f"{name} -> {_layer_name(other)}"
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        return f"{name} -> GroupNorm"
    if isinstance(layer, nn.RReLU):
        return f"{name} -> LeakyReLU"
    if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
        return f"{name} -> none: what it drops depends on the other examples"
    return ""


def _layer_name(layer: nn.Module) -> str:
    if isinstance(layer, nn.GroupNorm):
        return f"GroupNorm({layer.num_groups}, {layer.num_channels})"
    name = type(layer).__name__
    return f"opacus.layers.{name}" if type(layer).__module__.startswith("opacus") else repr(layer)


def _try_per_example_gradients(model: nn.Module, inputs: torch.Tensor) -> dict[str, str]:
    """What the examples' gradients run into, tried on a copy."""
    twin = deep_copy(model).train()
    before = {name: tensor.clone() for name, tensor in _buffers_and_tensors(twin).items()}
    leaves = {name: own.detach() for name, own in twin.named_parameters()}
    x = inputs.to(next(iter(leaves.values())).device if leaves else "cpu")
    if x.is_floating_point():  # what a network keeps of zeros may not show
        with seeded(0, "inputs"):
            x = torch.randn_like(x)

    def one(leaves: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = functional_call(twin, leaves, (x.unsqueeze(0),))
        return output.float().sum()

    def output(network: nn.Module) -> torch.Tensor:
        with seeded(0, "output"):
            found: torch.Tensor = network(x)
            return found

    try:
        with torch.no_grad(), seeded(0, "try"):
            fresh = output(twin)
            after = _buffers_and_tensors(twin)
            kept = [
                name.rpartition(".")
                for name, tensor in after.items()
                if name not in before or not torch.equal(before[name], tensor)
            ]
            if not kept and not torch.equal(fresh, output(twin)):
                return {"": "it keeps what it saw"}
            if not kept:
                vmap(grad(one), in_dims=(None, 0), randomness="error")(leaves, x)
    except RuntimeError as error:  # random draws, .item(), a branch on values: torch says so in many ways
        return {"": f"no gradients by example ({str(error).splitlines()[0]})"}
    return {layer: f"{buffer!r} keeps what it saw -> a layer without it" for layer, _, buffer in kept}


def _buffers_and_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a model, and tensors that are plain attributes of its layers, by name."""
    plain = {
        f"{layer}.{name}" if layer else name: value
        for layer, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }
    return {**dict(model.named_buffers()), **plain}
