"""Networks, and how a name in a configuration becomes one."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping

import torch
from torch import nn

from fedstill.errors import ArgumentError, ModelError
from fedstill.models.classifiers import MLP, LeNet5, ResNet8, SmallCNN
from fedstill.models.critic import PatchCritic
from fedstill.models.generator import Generator
from fedstill.seeds import seeded

__all__ = ["MLP", "MODELS", "Generator", "LeNet5", "PatchCritic", "ResNet8", "SmallCNN", "build", "check"]

MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "small-cnn": SmallCNN,
    "lenet5": LeNet5,
    "resnet8": ResNet8,
    "mlp": MLP,
}


# What a module's forward raises when an input does not suit it.
FORWARD = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError)


def build(spec: str, shape: tuple[int, int, int], classes: int, seed: int, *names: str | int) -> nn.Module:
    """A network from its name, with first weights that follow from seed and names.

    Args:
        spec: ``"resnet8"``, ``"resnet8:16"`` (width 16) or ``"package.module:factory"``, where
            ``factory(shape, classes)`` gives your own module.
        shape: ``(channels, H, W)``.
        classes: number of logits.

    Raises:
        ArgumentError: no such network.

    >>> build("mlp:8", (1, 8, 8), 10, 0)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    name, _, detail = spec.partition(":")
    with seeded(seed, *names):
        if name in MODELS and not detail:
            return MODELS[name](shape, classes)
        if name in MODELS and re.fullmatch("[1-9][0-9]*", detail):
            return MODELS[name](shape, classes, int(detail))
        factory = _import(name, detail) if name not in MODELS else None
        if factory is None:
            known = ", ".join(MODELS)
            raise ArgumentError("model", spec, f"one of {known} (with :width) or package.module:factory")
        try:
            module = factory(shape, classes)
        except FORWARD as error:
            raise ModelError(f"model {spec!r} cannot be made for inputs {shape}: {_first(error)}") from error
        if not isinstance(module, nn.Module):
            raise ModelError(f"model {spec!r} gives a {type(module).__name__}: allowed is a torch.nn.Module")
        return module


def _import(module: str, attribute: str) -> Callable[..., nn.Module] | None:
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        return None
    if "" not in sys.path:
        sys.path.append("")  # a module of the user's own in the folder where they work
    try:
        factory = getattr(importlib.import_module(module), attribute, None)
    except (ImportError, SyntaxError) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module}.".startswith(f"{missing}."):
            return None
        raise ModelError(f"model module {module!r} cannot be imported: {_first(error)}") from error
    return factory if callable(factory) else None


def _first(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def check(model: object, shape: tuple[int, int, int], classes: int, whose: str) -> None:
    """Refuse a network that does not map ``(B, *shape)`` to ``(B, classes)``.

    Raises:
        ModelError: it cannot take the shape, or gives another one.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"{whose} is {model!r}: allowed is a torch.nn.Module")
    training = model.training
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        with torch.no_grad():
            output = model.eval()(torch.zeros(2, *shape, device=device))
    except FORWARD as error:
        raise ModelError(f"{whose} cannot take inputs of shape {shape}: {_first(error)}") from error
    finally:
        model.train(training)
    if not isinstance(output, torch.Tensor) or tuple(output.shape) != (2, classes):
        found = tuple(output.shape[1:]) if isinstance(output, torch.Tensor) else type(output).__name__
        raise ModelError(f"{whose} gives outputs of shape {found} an example: allowed is ({classes},)")
