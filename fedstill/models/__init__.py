"""Networks, and how a name in a configuration becomes one.

``classifiers``, ``tables``, ``unet`` and ``transformer`` are for nodes and student; ``generator``,
``patch_critics``, ``table_gan`` and ``feature_gan`` are what methods add. ``extractor_head`` parts a network
in two, ``parameter_vector`` makes it one vector, ``modes`` puts it into a mode for a while,
``attention_maps`` are where it looks, ``vgg`` is what a perceptual loss compares. ``hugging_face`` has models
of that library. ``module_check`` says which can take part at all, ``dp_compatibility`` which can learn
privately; ``copies`` are copies.

A model that is there already: ``model_config`` is what is said of it, and ``own_model`` makes it, by
``non_torch`` from a ``skops_file``, an ``onnx_graph`` or an ``endpoint``, to fit an ``interface``, with its
classes by ``class_map``.

May import tasks and core. A newcomer adds a network: a class in one of these files, and a line in ``MODELS``.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import nn

from fedstill.core.dataset import Form
from fedstill.core.errors import ArgumentError, FedstillError, ModelError, nearest
from fedstill.core.registry import OWN, Registry, first_line, is_path
from fedstill.core.seeds import seeded
from fedstill.models.critics import PatchCritic
from fedstill.models.generators import Generator
from fedstill.models.image_classifiers import (
    BatchNormLeNet,
    LeNet5,
    RandomConv,
    ResNet8,
    SigmoidLeNet,
    SmallCNN,
    UnitLinear,
)
from fedstill.models.module_check import FORWARD_ERRORS, check_module, example_inputs
from fedstill.models.module_utils import in_mode
from fedstill.models.tabular import MLP, Linear, ResidualMLP

__all__ = [
    "FORWARD_ERRORS",
    "MLP",
    "MODELS",
    "PREDICTION_ONLY",
    "TEXT_MODELS",
    "BatchNormLeNet",
    "Generator",
    "LeNet5",
    "Linear",
    "PatchCritic",
    "RandomConv",
    "ResNet8",
    "ResidualMLP",
    "SigmoidLeNet",
    "SmallCNN",
    "UnitLinear",
    "build",
    "carries_gradient",
    "check_module",
    "check_name",
    "example_inputs",
    "instantiate",
]

MODELS: Registry[Callable[..., nn.Module]] = Registry(
    "model",
    {
        "small-cnn": "fedstill.models.image_classifiers:SmallCNN",
        "lenet5": "fedstill.models.image_classifiers:LeNet5",
        "bn-lenet": "fedstill.models.image_classifiers:BatchNormLeNet",
        "sigmoid-lenet": "fedstill.models.image_classifiers:SigmoidLeNet",
        "resnet8": "fedstill.models.image_classifiers:ResNet8",
        "mlp": "fedstill.models.tabular:MLP",
        "linear": "fedstill.models.tabular:Linear",
        "residual-mlp": "fedstill.models.tabular:ResidualMLP",
        "unit-linear": "fedstill.models.image_classifiers:UnitLinear",
        "random-conv": "fedstill.models.image_classifiers:RandomConv",
        "scattering": "fedstill.models.scattering:Scattering",
        "unet": "fedstill.models.unet:UNet",
        "bn-unet": "fedstill.models.unet:BatchNormUNet",
        "residual-unet": "fedstill.models.unet:ResidualUNet",
        "transformer": "fedstill.models.text_classifiers:Transformer",
        "bag": "fedstill.models.text_classifiers:Bag",
    },
    takes="shape and classes",
)

PREDICTION_ONLY = (  # by which rule a node refuses that gradients are pulled back through its model
    "model: it predicts, and no gradient goes through it; allowed are methods that ask for answers alone "
    "(docs/own-model.md)"
)
TEXT_MODELS = ("transformer", "bag")  # of these, those whose inputs are texts
FIXED_WIDTH_MODELS = ("linear", "unit-linear")  # and those of one width
TABULAR_MODELS = (
    "linear",
    "mlp",
    "residual-mlp",
)  # and those that take rows of a table, or whatever is flattened


def build(
    spec: str, shape: tuple[int, ...], classes: int, seed: int, *names: str | int, vocabulary: int = 0
) -> nn.Module:
    """A network from its name, with first weights that follow from seed and names: :func:`instantiate`, a module.

    Raises:
        ArgumentError, ModelError: as :func:`instantiate`; or one's own is no torch module.

    >>> build("mlp:8", (1, 8, 8), 10, 0)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    model = instantiate(spec, shape, classes, seed, *names, vocabulary=vocabulary)
    if not isinstance(model, nn.Module):
        raise ModelError(f"model {spec!r} gives a {type(model).__name__} (expected a torch.nn.Module)")
    return model


def instantiate(
    spec: str, shape: tuple[int, ...], classes: int, seed: int, *names: str | int, vocabulary: int = 0
) -> object:
    """What has a name: a network, or whatever one's own factory gives.

    Args:
        spec: ``"resnet8"``, ``"resnet8:16"`` (width 16), the name of one that an installed package offers, or
            ``"package.module:factory"``, where ``factory(shape, classes)`` (for texts ``factory(shape,
            classes, vocabulary)``, and after a name with a width also ``width=16``) gives your own module.
            For texts ``"transformer"`` or ``"bag"``. For texts and images ``"hf:folder"``
            (:mod:`fedstill.models.hugging_face`).
        shape: ``(channels, H, W)`` of an image, ``(L,)`` of a text, or ``(F,)`` of a row of a table.
        classes: number of logits, an input or a pixel; of channels where outputs are images.
        seed, names: what the first weights are drawn from.
        vocabulary: how many token ids there are, where inputs are texts; 0: they are none.

    Raises:
        ArgumentError: no such network, or none for such inputs; or it cannot be imported.
        ModelError: one's own cannot be made.
    """
    name, _, folder = spec.partition(":")
    if name == "hf" and folder and (vocabulary or len(shape) > 1):
        from fedstill.models.hugging_face import load_classifier  # heavy, and an extra

        with seeded(seed, *names):
            return load_classifier(folder, shape, classes, vocabulary)
    form = (shape, classes, vocabulary) if vocabulary else (shape, classes)
    name, width = _parse_model_name(spec, "texts" if vocabulary else "images" if len(shape) > 1 else "rows")
    factory = MODELS[name]
    with seeded(seed, *names):
        if name in MODELS.own:
            return factory(*form, **width)
        try:
            return factory(*form, **width)
        except OWN as error:
            if isinstance(error, FedstillError):
                raise
            line = f"model {spec!r} cannot be made for inputs {shape}: {first_line(error)}"
            raise ModelError(line) from error


def check_name(spec: str) -> None:
    """Refuse a name that no network has, for inputs of whatever form; nothing is made.

    Raises:
        ArgumentError: no such network, or no width; or it cannot be imported.
    """
    name, _, folder = spec.partition(":")
    if not (name == "hf" and folder):
        MODELS[_parse_model_name(spec)[0]]


def _parse_model_name(spec: str, form: Form | None = None) -> tuple[str, dict[str, int]]:
    """A network's name in the registry, and its width, if it is given one, for inputs of a form."""
    name, colon, width = spec.partition(":")
    known = [each for each in MODELS if form is None or each not in MODELS.own or _accepts_form(each, form)]
    if name in known and (
        not colon or (name not in FIXED_WIDTH_MODELS and re.fullmatch("[1-9][0-9]*", width))
    ):
        return name, {"width": int(width)} if colon else {}
    if is_path(spec) and name not in (*MODELS.own, "hf"):
        return spec, {}
    if name in known:
        one = (
            f"{name}, which has no width"
            if name in FIXED_WIDTH_MODELS
            else f"{name}:WIDTH, a whole number from 1 up"
        )
        raise ArgumentError("model", spec, one)
    meant = nearest(name, known)
    hint = "" if meant is None else f"; did you mean {meant!r}?"
    folders = form != "rows"
    own = ", hf:folder or package.module:factory" if folders else " or package.module:factory"
    inputs = "" if form is None else f", as inputs are {'rows of a table' if form == 'rows' else form}"
    raise ArgumentError("model", spec, f"one of {', '.join(known)} (with :width){own}{inputs}{hint}")


def _accepts_form(name: str, form: Form) -> bool:
    """Whether one of the package's own networks takes inputs of a form."""
    return (
        name in TEXT_MODELS
        if form == "texts"
        else name in TABULAR_MODELS
        if form == "rows"
        else name not in TEXT_MODELS
    )


def carries_gradient(model: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether a network's outputs depend on its inputs ``(B, *shape)`` in a way that autograd can follow.

    A module around a forest, say, gives tensors that came from nowhere. That a gradient is zero does not
    count: networks may begin so.
    """
    if not getattr(model, "differentiable", True):
        return False
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with in_mode(model, False), torch.enable_grad():
        x = example_inputs(shape).to(device).requires_grad_()
        try:
            output = model(x)
            (gradient,) = torch.autograd.grad(output.sum(), x, allow_unused=True)
        except FORWARD_ERRORS:  # of what needs no gradient, or of x.numpy()
            return False
    return gradient is not None
