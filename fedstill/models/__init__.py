"""Networks, and how a name in a configuration becomes one.

``classifiers``, ``unet`` and ``transformer`` are for nodes and student; ``generator``, ``conditional``,
``critic`` and ``features`` are what methods add. ``split`` parts a network in two, ``vector`` makes it one
vector. ``foreign`` is a model that is no torch module, ``hub`` one of Hugging Face.

May import tasks and core. A newcomer adds a network: a function here, and a line in ``MODELS``.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fedstill.core.errors import ArgumentError, ModelError
from fedstill.core.seeds import seeded
from fedstill.models.classifiers import MLP, LeNet5, ResNet8, SigmoidLeNet, SmallCNN
from fedstill.models.critic import PatchCritic
from fedstill.models.generator import Generator
from fedstill.models.transformer import Bag, Transformer
from fedstill.models.unet import ResidualUNet, UNet

__all__ = [
    "MLP",
    "MODELS",
    "Generator",
    "LeNet5",
    "PatchCritic",
    "ResNet8",
    "SigmoidLeNet",
    "SmallCNN",
    "build",
    "check",
    "check_name",
    "example",
]

MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "small-cnn": SmallCNN,
    "lenet5": LeNet5,
    "sigmoid-lenet": SigmoidLeNet,
    "resnet8": ResNet8,
    "mlp": MLP,
    "unet": UNet,
    "residual-unet": ResidualUNet,
}

TEXTS: Mapping[str, Callable[..., nn.Module]] = {"transformer": Transformer, "bag": Bag}

# What a module's forward raises when an input does not suit it.
FORWARD = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError)


def build(
    spec: str, shape: tuple[int, ...], classes: int, seed: int, *names: str | int, vocabulary: int = 0
) -> nn.Module:
    """A network from its name, with first weights that follow from seed and names.

    Args:
        spec: ``"resnet8"``, ``"resnet8:16"`` (width 16) or ``"package.module:factory"``, where
            ``factory(shape, classes)`` (for texts ``factory(shape, classes, vocabulary)``) gives your own
            module. For texts ``"transformer"``, ``"bag"`` or ``"hf:folder"`` (:mod:`fedstill.models.hub`).
        shape: ``(channels, H, W)`` of an image, or ``(L,)`` of a text.
        classes: number of logits, an input or a pixel; of channels where outputs are images.
        seed, names: what the first weights are drawn from.
        vocabulary: how many token ids there are, where inputs are texts; 0: inputs are images.

    Raises:
        ArgumentError: no such network, or none for such inputs.

    >>> build("mlp:8", (1, 8, 8), 10, 0)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    name, _, detail = spec.partition(":")
    if vocabulary or name in TEXTS or name == "hf":
        return _build_text(spec, shape, classes, vocabulary, seed, *names)
    with seeded(seed, *names):
        if name in MODELS and not detail:
            return MODELS[name](shape, classes)
        if name in MODELS and re.fullmatch("[1-9][0-9]*", detail):
            return MODELS[name](shape, classes, int(detail))
        factory = _import(name, detail) if name not in MODELS else None
        if factory is None:
            known = ", ".join(MODELS)
            raise ArgumentError("model", spec, f"one of {known} (with :width) or package.module:factory")
        return _made(factory, spec, shape, classes)


def check_name(spec: str) -> None:
    """Refuse a name that no network here has, for inputs of whatever form; nothing is made.

    Raises:
        ArgumentError: no such network, or no width.

    >>> check_name("transformer:32"), check_name("hf:some/folder")
    (None, None)
    """
    name, _, detail = spec.partition(":")
    ours = name in (*MODELS, *TEXTS) and (not detail or re.fullmatch("[1-9][0-9]*", detail))
    if not ours and not (name == "hf" and detail):
        known = ", ".join((*MODELS, *TEXTS))
        allowed = f"one of {known} (with :width), hf:folder or package.module:factory"
        raise ArgumentError("model", spec, allowed)


def _made(factory: Callable[..., nn.Module], spec: str, *form: Any) -> nn.Module:
    """What a user's own factory gives for inputs of a form."""
    try:
        module: object = factory(*form)
    except FORWARD as error:
        raise ModelError(f"model {spec!r} cannot be made for inputs {form[0]}: {_first(error)}") from error
    if not isinstance(module, nn.Module):
        raise ModelError(f"model {spec!r} gives a {type(module).__name__}: allowed is a torch.nn.Module")
    return module


def _build_text(
    spec: str, shape: tuple[int, ...], classes: int, vocabulary: int, seed: int, *names: str | int
) -> nn.Module:
    """:func:`build` where inputs are texts; one's own factory is also given how many token ids there are."""
    name, _, detail = spec.partition(":")
    if not vocabulary:
        raise ArgumentError("model", spec, f"one of {', '.join(MODELS)}, as inputs are images")
    with seeded(seed, *names):
        if name == "hf" and detail:
            from fedstill.models.hub import classifier  # heavy, and an extra

            return classifier(detail, shape, classes, vocabulary)
        if name in TEXTS and (not detail or re.fullmatch("[1-9][0-9]*", detail)):
            width = {"width": int(detail)} if detail else {}
            return TEXTS[name](shape, classes, vocabulary=vocabulary, **width)
        factory = _import(name, detail) if name not in (*MODELS, *TEXTS) else None
        if factory is None:
            known = ", ".join(TEXTS)
            allowed = (
                f"one of {known} (with :width), hf:folder or package.module:factory, as inputs are texts"
            )
            raise ArgumentError("model", spec, allowed)
        return _made(factory, spec, shape, classes, vocabulary)


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


def example(shape: Sequence[int], count: int = 2) -> torch.Tensor:
    """Inputs of a form, to try a network with: images of zeros, or texts ``(L,)`` of the first token."""
    if len(shape) == 1:
        return torch.ones(count, *shape, dtype=torch.int64)
    return torch.zeros(count, *shape)


def check(model: object, shape: tuple[int, ...], outputs: tuple[int, ...], whose: str) -> None:
    """Refuse a network that does not map ``(B, *shape)`` to ``(B, *outputs)``.

    Raises:
        ModelError: it cannot take the shape, or gives another one.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"{whose} is {model!r}: allowed is a torch.nn.Module")
    training = model.training
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        with torch.no_grad():
            output = model.eval()(example(shape).to(device))
    except FORWARD as error:
        raise ModelError(f"{whose} cannot take inputs of shape {shape}: {_first(error)}") from error
    finally:
        model.train(training)
    if not isinstance(output, torch.Tensor) or tuple(output.shape) != (2, *outputs):
        found = tuple(output.shape[1:]) if isinstance(output, torch.Tensor) else type(output).__name__
        raise ModelError(f"{whose} gives outputs of shape {found} an example: allowed is {outputs}")
