"""Networks, and the registry that builds one from its name.

``image_classifiers``, ``tabular``, ``unet``, ``pretrained_unet`` and ``text_classifiers`` hold networks for
nodes and student; ``gan`` the generators and critics that methods add. ``extractor_head`` splits a network in
two, ``module_utils`` copies it, sets its mode and flattens its state, ``attention_maps`` computes attention
maps, ``vgg`` features for a perceptual loss. ``ensemble`` combines networks as one. ``norm_layers`` has a
group norm that is fast with channels last. ``hugging_face`` loads models of that library, ``backbones``
frozen networks whose features are the inputs of a run; ``principal_components`` reduces these.
``feature_maps`` are maps of a pretrained network at several scales. ``module_check`` checks whether a module
can take part, and whether DP-SGD can train it.

For existing models, ``model_config`` holds the options and ``custom_model`` builds the model:
``weights_file`` reads weights, ``predictors`` wraps estimators, ONNX graphs and endpoints, ``interface``
defines inputs, outputs and the order of classes.

This package may import tasks and core only. To add a network, add a class to one of these files and a line in
``MODELS``.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import nn

from fedstill.core.dataset import Form
from fedstill.core.errors import ArgumentError, FedstillError, ModelError, closest_name
from fedstill.core.registry import USER_CODE_ERRORS, Registry, first_line, is_object_path
from fedstill.core.seeds import seeded
from fedstill.models.ensemble import Ensemble, EnsembleName, is_ensemble_name, member_names
from fedstill.models.gan import Generator, PatchCritic
from fedstill.models.image_classifiers import (
    BatchNormLeNet,
    LeNet5,
    RandomConv,
    ResNet8,
    SigmoidLeNet,
    SmallCNN,
    UnitLinear,
)
from fedstill.models.model_config import encoder_backbone
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
    "build_unchecked",
    "carries_gradient",
    "check_module",
    "check_name",
    "example_inputs",
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
        "scattering": "fedstill.models.image_classifiers:Scattering",
        "unet": "fedstill.models.unet:UNet",
        "bn-unet": "fedstill.models.unet:BatchNormUNet",
        "residual-unet": "fedstill.models.unet:ResidualUNet",
        "transformer": "fedstill.models.text_classifiers:Transformer",
        "bag": "fedstill.models.text_classifiers:Bag",
    },
    call_signature="shape and classes",
)

PREDICTION_ONLY = (  # the rule by which a node refuses input gradients of its model
    "model: it predicts only, no gradient passes through it (expected a method that queries "
    "outputs only, docs/custom-model.md)"
)
TEXT_MODELS = ("transformer", "bag")  # names of networks for texts
FIXED_WIDTH_MODELS = ("linear", "unit-linear")  # networks without a width
TABULAR_MODELS = (
    "linear",
    "mlp",
    "residual-mlp",
)  # networks for rows of a table and for flattened inputs


def build(
    spec: str,
    shape: tuple[int, ...],
    classes: int,
    seed: int,
    *names: str | int,
    vocabulary: int = 0,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
) -> nn.Module:
    """Return a network by name. Its initial weights follow from the seed and the names.

    Args:
        spec: see :func:`build_unchecked`.
        shape: shape of an input.
        classes: number of outputs.
        seed: seed of the initial weights.
        names: names of the random stream, in addition to the seed.
        vocabulary: number of token ids, for texts.
        mean, std: normalization of images.

    Raises:
        ArgumentError: the name is unknown or does not fit the inputs.
        ModelError: the model cannot be built, or a custom factory returns something other than a torch
            module.

    >>> build("mlp:8", (1, 8, 8), 10, 0)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    model = build_unchecked(spec, shape, classes, seed, *names, vocabulary=vocabulary, mean=mean, std=std)
    if not isinstance(model, nn.Module):
        raise ModelError(f"model {spec!r} returns a {type(model).__name__} (expected a torch.nn.Module)")
    return model


def build_unchecked(
    spec: str,
    shape: tuple[int, ...],
    classes: int,
    seed: int,
    *names: str | int,
    vocabulary: int = 0,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
) -> object:
    """Return a model by name: a network, or the return value of a custom factory.

    Args:
        spec: name of a built-in or installed network, such as ``"resnet8"`` or ``"resnet8:16"`` (width 16),
            or ``"package.module:factory"`` for a custom one. ``factory(shape, classes)`` receives
            ``vocabulary`` as third argument for texts, and ``width=16`` if the name has a width. For texts
            ``"transformer"`` or ``"bag"``. For texts and images also ``"hf:folder"``
            (:mod:`fedstill.models.hugging_face`). For images also ``"unet:BACKBONE"`` and
            ``"residual-unet:BACKBONE"`` (:mod:`fedstill.models.pretrained_unet`), without pretrained weights.
            ``"ensemble:AGGREGATOR:MEMBERS"`` (:mod:`fedstill.models.ensemble`) combines networks.
        shape: ``(channels, H, W)`` of an image, ``(L,)`` of a text, or ``(F,)`` of a row of a table.
        classes: number of logits per input or pixel, or of channels if outputs are images.
        seed: seed of the initial weights.
        names: names of the random stream, in addition to the seed.
        vocabulary: number of token ids if inputs are texts, else 0.
        mean, std: normalization of images, which a pretrained encoder has to know; default: 0.5 and 0.5.

    Raises:
        ArgumentError: the name is unknown or does not fit the inputs, or the factory cannot be imported.
        ModelError: a custom model cannot be built.
    """
    if is_ensemble_name(spec):
        ensemble = EnsembleName.parse(spec)
        members = [
            build(member, shape, classes, seed, *names, vocabulary=vocabulary, mean=mean, std=std)
            for member in ensemble.members
        ]
        with seeded(seed, *names):
            return Ensemble(members, classes, ensemble)
    name, _, folder = spec.partition(":")
    if name == "hf" and folder and (vocabulary or len(shape) > 1):
        from fedstill.models.hugging_face import load_classifier  # slow import of an optional package

        with seeded(seed, *names):
            return load_classifier(folder, shape, classes, vocabulary)
    if (backbone := encoder_backbone(spec)) and len(shape) == 3:
        with seeded(seed, *names):
            return _pretrained_unet(spec, backbone, shape, classes, mean, std)
    form = (shape, classes, vocabulary) if vocabulary else (shape, classes)
    name, width = _parse_model_name(spec, "texts" if vocabulary else "images" if len(shape) > 1 else "rows")
    factory = MODELS[name]
    with seeded(seed, *names):
        if name in MODELS.builtin:
            return factory(*form, **width)
        try:
            return factory(*form, **width)
        except USER_CODE_ERRORS as error:
            if isinstance(error, FedstillError):
                raise
            line = f"model {spec!r} cannot be built for inputs {shape}: {first_line(error)}"
            raise ModelError(line) from error


def check_name(spec: str) -> None:
    """Refuse an unknown model name without building a model.

    Raises:
        ArgumentError: the name or its width is invalid, or the factory cannot be imported.
    """
    if is_ensemble_name(spec):
        for member in dict.fromkeys(member_names(spec)):
            check_name(member)
        return
    name, _, folder = spec.partition(":")
    if backbone := encoder_backbone(spec):
        from fedstill.models.feature_maps import check_backbone

        try:
            check_backbone(backbone)
        except ArgumentError as error:
            raise ArgumentError("model", spec, f"{name}:BACKBONE, {error.expected}") from error
    elif not (name == "hf" and folder):
        MODELS[_parse_model_name(spec)[0]]


def _pretrained_unet(
    spec: str,
    backbone: str,
    shape: tuple[int, ...],
    classes: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> nn.Module:
    from fedstill.models.pretrained_unet import PretrainedUNet  # imports this package

    name = spec.partition(":")[0]
    try:
        return PretrainedUNet(backbone, shape, classes, mean, std, residual=name == "residual-unet")
    except ArgumentError as error:
        raise ArgumentError("model", spec, f"{name}:BACKBONE, {error.expected}") from error


def _parse_model_name(spec: str, form: Form | None = None) -> tuple[str, dict[str, int]]:
    """Return a network's name in the registry and its width, if any. ``form`` is the form of the inputs."""
    name, colon, width = spec.partition(":")
    known = [
        model for model in MODELS if form is None or model not in MODELS.builtin or _accepts_form(model, form)
    ]
    if name in known and (
        not colon or (name not in FIXED_WIDTH_MODELS and re.fullmatch("[1-9][0-9]*", width))
    ):
        return name, {"width": int(width)} if colon else {}
    if is_object_path(spec) and name not in (*MODELS.builtin, "hf"):
        return spec, {}
    if name in known:
        fixed = name in FIXED_WIDTH_MODELS
        expected = f"{name}, which has no width" if fixed else f"{name}:WIDTH, an integer >= 1"
        raise ArgumentError("model", spec, expected)
    suggestion = closest_name(name, known)
    hint = "" if suggestion is None else f"; did you mean {suggestion!r}?"
    custom = " or package.module:factory" if form == "rows" else ", hf:folder or package.module:factory"
    inputs = (
        "" if form is None else f", as inputs are {'rows of a table or features' if form == 'rows' else form}"
    )
    raise ArgumentError("model", spec, f"one of {', '.join(known)} (with :width){custom}{inputs}{hint}")


def _accepts_form(name: str, form: Form) -> bool:
    """Return whether a built-in network takes inputs of a form."""
    return (
        name in TEXT_MODELS
        if form == "texts"
        else name in TABULAR_MODELS
        if form == "rows"
        else name not in TEXT_MODELS
    )


def carries_gradient(model: nn.Module, shape: tuple[int, ...]) -> bool:
    """Return whether autograd can follow a network from its inputs ``(B, *shape)`` to its outputs.

    A module that wraps a random forest, for example, breaks the graph. Gradients may be zero, as they are in
    some networks with their initial weights.
    """
    if not getattr(model, "differentiable", True):
        return False
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with in_mode(model, False), torch.enable_grad():
        x = example_inputs(shape).to(device).requires_grad_()
        try:
            output = model(x)
            (gradient,) = torch.autograd.grad(output.sum(), x, allow_unused=True)
        except FORWARD_ERRORS:  # an output without gradient, or x.numpy()
            return False
    return gradient is not None
