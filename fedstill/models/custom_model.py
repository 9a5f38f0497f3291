"""Outputs of a model whose classes have another order, other names, or are others, as a federation's.

A model made from what is said of it, as what a federation asks, whatever kind it is.

One way for ``node.toml``, ``nodes.models`` of a run and ``models`` of :func:`fedstill.distil`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from fedstill import models
from fedstill.core.errors import ArgumentError, FedstillError, ModelError
from fedstill.core.hashing import fingerprint
from fedstill.core.names import to_name
from fedstill.core.registry import first_line, searching_in
from fedstill.models import predictors
from fedstill.models.class_map import ClassMap, ClassMappedModel
from fedstill.models.hugging_face import HuggingFace, adapt
from fedstill.models.interface import Interface
from fedstill.models.model_config import (
    MODEL_SUFFIXES,
    PICKLE_SUFFIXES,
    CustomModel,
    ModelConfig,
    resolve_path,
)
from fedstill.models.predictors import URL_SCHEMES, Endpoint, Predictor

LOADERS = {".onnx": predictors.load_onnx, ".skops": predictors.load_skops}


def make(
    config: ModelConfig, to: Interface, folder: Path, seed: int, *names: str | int, whose: str = "model"
) -> nn.Module:
    """The model with its first weights; nothing of it has gradients if it is not to be trained.

    Args:
        to: what inputs it is given, and what it must give.
        folder: from which paths count.
        seed, names: what first weights are drawn from.
        whose: the option that names it, for errors.

    Raises:
        FedstillError: it cannot be made, does not fit, or its weights are another model's.
    """
    source = config.source if isinstance(config, CustomModel) else None
    if source is None:
        source = _load_source(config, to, folder, whose, seed, names)
        whose = f"{whose} {config.name!r}"
    if isinstance(source, type):
        models.check_module(source, to.shape, to.outputs, whose, to.task.form)
    if isinstance(source, nn.Module):
        source = adapt(source)
        for option, allowed in {"input_format": ("inputs",), "output_format": ("auto", "logits")}.items():
            value = getattr(config, option)
            if value not in allowed:
                told = f"{' or '.join(allowed)}, for a torch.nn.Module"
                raise ArgumentError(f"model.{option}", value, told)
        if config.weights:
            _load_weights(source, resolve_path(config.weights, folder, "model.weights"))
        model: nn.Module = source
        own = config.classes or _known_labels(source, to)
        if own and to.task.kind == "class":
            mapped = ClassMap(own, to.classes)
            model = ClassMappedModel(source, mapped) if mapped.changes else source
    else:
        if config.weights:
            raise ArgumentError("model.weights", config.weights, "none, for what is no torch.nn.Module")
        model = Predictor(source, to, config)
        if config.name.endswith(MODEL_SUFFIXES):
            model.file = fingerprint(_model_file(config.name, folder, whose).read_bytes())
    if not config.train:
        model.requires_grad_(False)
    models.check_module(model, to.shape, to.outputs, whose, to.task.form)
    return model


def _known_labels(source: nn.Module, to: Interface) -> list[str]:
    """A network's outputs by the federation's classes, where it names some of these itself."""
    labels = list(map(to_name, source.labels)) if isinstance(source, HuggingFace) else []
    return [label if label in to.classes else "" for label in labels] if {*labels} & {*to.classes} else []


def check_name(name: str, folder: Path, whose: str) -> None:
    """Refuse a name that nothing has, while inputs and classes are not known; nothing is made.

    Raises:
        FedstillError: there is no such model, file or address.
    """
    if name.startswith(URL_SCHEMES):
        Endpoint(name)
    elif name.endswith((*MODEL_SUFFIXES, *PICKLE_SUFFIXES)):
        _model_file(name, folder, whose)
    else:
        try:
            with searching_in(folder):
                models.check_name(name)
        except ArgumentError as error:
            raise ArgumentError(whose, name, error.expected) from error


def _load_source(
    config: ModelConfig, to: Interface, folder: Path, whose: str, seed: int, names: tuple[str | int, ...]
) -> Any:
    """What has a name: a network with its first weights, or what is no torch module."""
    name = config.name
    if name.startswith(URL_SCHEMES):
        return Endpoint(name)
    if name.endswith((*MODEL_SUFFIXES, *PICKLE_SUFFIXES)):
        path = _model_file(name, folder, whose)
        return LOADERS[path.suffix](path)
    classes = len(config.classes) or len(to.classes)
    with name_option_in_errors(whose, name, to.shape), searching_in(folder):
        return models.instantiate(name, to.shape, classes, seed, *names, vocabulary=to.vocabulary)


@contextmanager
def name_option_in_errors(whose: str, name: str, shape: tuple[int, ...]) -> Iterator[None]:
    """Say of what goes wrong as a model is made which option names it.

    Raises:
        FedstillError: what went wrong.
    """
    try:
        yield
    except ArgumentError as error:
        raise ArgumentError(whose, name, error.expected) from error
    except models.FORWARD_ERRORS as error:
        if isinstance(error, FedstillError):
            raise
        line = f"{whose} {name!r} cannot take inputs of shape {shape}: {first_line(error)}"
        raise ModelError(line) from error


def _model_file(name: str, folder: Path, whose: str) -> Path:
    """A model's file, if it is there and no pickle."""
    if name.endswith(PICKLE_SUFFIXES):
        allowed = f"a {' or '.join(MODEL_SUFFIXES)} file, or .safetensors weights: no pickle is read"
        raise ArgumentError(whose, name, allowed)
    path = resolve_path(name, folder, whose)
    if not path.is_file():
        raise ModelError(f"{whose} {name!r}: there is no file {path}")
    return path


def _load_weights(model: nn.Module, path: Path) -> None:
    """Put a file's tensors into a model, exactly: the same names, shapes and types."""
    weights, wanted = read_weights(path), model.state_dict()
    faults = [f"{name} is missing" for name in wanted if name not in weights]
    faults += [f"{name} is not of this model" for name in weights if name not in wanted]
    for name in (name for name in wanted if name in weights):
        mine, given = wanted[name], weights[name]
        if mine.shape != given.shape or mine.dtype != given.dtype:
            faults.append(f"{name} is {_describe_tensor(given)}, and in this model {_describe_tensor(mine)}")
    if faults:
        more = f", and {len(faults) - 1} more such tensors" if len(faults) > 1 else ""
        raise ModelError(f"model.weights {path.name!r} are of another model: {faults[0]}{more}")
    model.load_state_dict(weights)


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file."""
    if not path.is_file():
        raise ModelError(f"model.weights {path.name!r}: there is no file {path}")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            f"model.weights {path.name!r} is no safetensors file: {first_line(error)}"
        ) from error


def _describe_tensor(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
