"""Existing models in a federation: files, endpoints, estimators and custom torch modules.

:func:`build_model` serves ``node.toml``, ``nodes.models`` of a run and ``models`` of :func:`fedstill.distil`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedstill import models
from fedstill.core.errors import ArgumentError, FedstillError, ModelError
from fedstill.core.hashing import fingerprint
from fedstill.core.name_normalization import to_name
from fedstill.core.registry import first_line, searching_in
from fedstill.models import predictors
from fedstill.models.hugging_face import HuggingFace, wrap_hugging_face
from fedstill.models.interface import ClassMap, ClassMappedModel, Interface
from fedstill.models.model_config import (
    MODEL_SUFFIXES,
    PICKLE_SUFFIXES,
    CustomModel,
    ModelConfig,
    encoder_backbone,
    resolve_path,
)
from fedstill.models.predictors import URL_SCHEMES, Endpoint, Predictor
from fedstill.models.pretrained_unet import PretrainedUNet
from fedstill.models.weights_file import read_weights

LOADERS = {".onnx": predictors.load_onnx, ".skops": predictors.load_skops}


def build_model(
    config: ModelConfig,
    interface: Interface,
    folder: Path,
    seed: int,
    *names: str | int,
    option: str = "model",
) -> nn.Module:
    """Return a model with its initial weights; without gradients if it is not trained.

    Args:
        config: options of the model.
        interface: inputs and outputs of the federation's models.
        folder: folder for relative paths.
        seed: seed of the initial weights.
        names: names of the random stream, in addition to the seed.
        option: name of the option that chooses the model, for errors.

    Raises:
        FedstillError: the model cannot be built or does not fit, or its weights belong to another model.
    """
    given = source = config.source if isinstance(config, CustomModel) else None
    if source is None:
        source = _load_source(config, interface, folder, option, seed, names)
    described = f"{option} {config.name!r}" if given is None else option
    if isinstance(source, type):
        models.check_module(source, interface.shape, interface.output_shape, described, interface.task.form)
    if isinstance(source, nn.Module):
        source = wrap_hugging_face(source)
        for field, values in {"input_format": ("inputs",), "output_format": ("auto", "logits")}.items():
            value = getattr(config, field)
            if value not in values:
                expected = f"{' or '.join(values)} for a torch.nn.Module"
                raise ArgumentError(f"model.{field}", value, expected)
        _load_pretrained(source, config, folder, option)
        model: nn.Module = source
        own_classes = config.classes or _own_class_names(source, interface)
        if own_classes and interface.task.kind == "class":
            class_map = ClassMap(own_classes, interface.classes)
            model = ClassMappedModel(source, class_map) if class_map.is_nontrivial else source
    else:
        if config.weights:
            raise ArgumentError(
                "model.weights", config.weights, "none for a model that is not a torch.nn.Module"
            )
        model = Predictor(source, interface, config)
        if config.name.endswith(MODEL_SUFFIXES):
            model.file = fingerprint(_model_file(config.name, folder, described).read_bytes())
    if not config.train:
        model.requires_grad_(False)
    models.check_module(model, interface.shape, interface.output_shape, described, interface.task.form)
    return model


def _load_pretrained(source: nn.Module, config: ModelConfig, folder: Path, option: str) -> None:
    """Load the weights of a network, or those of its pretrained encoder."""
    weights, encoder_weights = config.weights, config.encoder_weights
    if weights and encoder_weights:
        raise ArgumentError(
            "model.encoder_weights", encoder_weights, "none with model.weights, which has these"
        )
    if weights:
        _load_weights(source, resolve_path(weights, folder, "model.weights"))
    elif isinstance(source, PretrainedUNet) or encoder_weights:
        name = f"{option.rpartition('.')[0] or option}.encoder_weights"
        path = resolve_path(encoder_weights, folder, name) if encoder_weights else ""
        load_encoder(source, path, name)


def load_encoder(network: nn.Module, weights: str | Path, option: str) -> None:
    """Load the pretrained weights of a network's encoder, and refuse weights that no encoder takes.

    Args:
        network: the network.
        weights: a .safetensors file; empty: none.
        option: option that names it, for errors.

    Raises:
        ArgumentError: an encoder of timm or torchvision has no weights, or the network has no encoder.
        ModelError: the weights do not fit.
    """
    if isinstance(network, PretrainedUNet):
        network.load_encoder(weights, option)
    elif weights:
        raise ArgumentError(option, str(weights), "none, as the model has no pretrained encoder")


def _own_class_names(source: nn.Module, interface: Interface) -> list[str]:
    """Return a network's own class names, "" for unknown ones.

    The list is empty if none of the names is a class of the federation.
    """
    labels = list(map(to_name, source.labels)) if isinstance(source, HuggingFace) else []
    return (
        [label if label in interface.classes else "" for label in labels]
        if {*labels} & {*interface.classes}
        else []
    )


def check_name(name: str, folder: Path, option: str) -> None:
    """Refuse an unknown model name, before inputs and classes are known and without building the model.

    Raises:
        FedstillError: the model, file or address does not exist.
    """
    if name.startswith(URL_SCHEMES):
        Endpoint(name)
    elif name.endswith((*MODEL_SUFFIXES, *PICKLE_SUFFIXES)) and not encoder_backbone(name):
        _model_file(name, folder, option)
    else:
        try:
            with searching_in(folder):
                models.check_name(name)
        except ArgumentError as error:
            raise ArgumentError(option, name, error.expected) from error


def _load_source(
    config: ModelConfig,
    interface: Interface,
    folder: Path,
    option: str,
    seed: int,
    names: tuple[str | int, ...],
) -> Any:
    """Return the model with a name: a network with its initial weights, or another kind of model."""
    name = config.name
    if name.startswith(URL_SCHEMES):
        return Endpoint(name)
    if name.endswith((*MODEL_SUFFIXES, *PICKLE_SUFFIXES)) and not encoder_backbone(name):
        path = _model_file(name, folder, option)
        return LOADERS[path.suffix](path)
    classes = len(config.classes) or len(interface.classes)
    with name_option_in_errors(option, name, interface.shape), searching_in(folder):
        return models.build_unchecked(
            name,
            interface.shape,
            classes,
            seed,
            *names,
            vocabulary=interface.vocabulary,
            mean=tuple(interface.mean),
            std=tuple(interface.std),
        )


@contextmanager
def name_option_in_errors(option: str, name: str, shape: tuple[int, ...]) -> Iterator[None]:
    """Add the name of the option to errors in building a model.

    Raises:
        FedstillError: the error.
    """
    try:
        yield
    except ArgumentError as error:
        raise ArgumentError(option, name, error.expected) from error
    except models.FORWARD_ERRORS as error:
        if isinstance(error, FedstillError):
            raise
        line = f"{option} {name!r} cannot take inputs of shape {shape}: {first_line(error)}"
        raise ModelError(line) from error


def _model_file(name: str, folder: Path, option: str) -> Path:
    """Return the path of a model's file.

    Raises:
        ArgumentError: it is a pickle.
        ModelError: it does not exist.
    """
    if name.endswith(PICKLE_SUFFIXES):
        expected = f"a {' or '.join(MODEL_SUFFIXES)} file, or .safetensors weights; pickles are not read"
        raise ArgumentError(option, name, expected)
    path = resolve_path(name, folder, option)
    if not path.is_file():
        raise ModelError(f"file not found: {path} ({option} = {name!r})")
    return path


def _load_weights(model: nn.Module, path: Path) -> None:
    """Load a file's tensors into a model, with exactly the same names, shapes and types."""
    weights, state = read_weights(path), model.state_dict()
    faults = [f"{name} is missing" for name in state if name not in weights]
    faults += [f"{name} is not in the model" for name in weights if name not in state]
    for name in (name for name in state if name in weights):
        expected, actual = state[name], weights[name]
        if expected.shape != actual.shape or expected.dtype != actual.dtype:
            faults.append(f"{name} is {_describe_tensor(actual)} (expected {_describe_tensor(expected)})")
    if faults:
        more = f", and {len(faults) - 1} more such tensors" if len(faults) > 1 else ""
        raise ModelError(f"model.weights {path.name!r} do not fit the model: {faults[0]}{more}")
    model.load_state_dict(weights)


def _describe_tensor(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
