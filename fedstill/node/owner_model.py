"""The model of a node's owner, made from what ``node.toml`` says of it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from fedstill import models
from fedstill.core.compute import Compute
from fedstill.core.errors import ArgumentError, FedstillError, ModelError
from fedstill.core.seeds import seeded
from fedstill.core.user_functions import OWN, find, first_line, is_path
from fedstill.data.input_spec import InputSpec
from fedstill.models.non_torch import Predictor
from fedstill.node import memory_limits
from fedstill.node.network_setup import fitted
from fedstill.node.node_file import NodeFile, OwnModelConfig
from fedstill.protocol.method import Needs


def make_model(file: NodeFile, folder: Path, spec: InputSpec, most: int = 0) -> nn.Module:
    """The node's model with its first weights; nothing of it has gradients if it is not to be trained.

    Args:
        folder: from which paths count.
        most: bytes that it may take; 0 is no limit. An owner's own factory is not foreseen.

    Raises:
        TooLarge: it would take more.
        FedstillError: it cannot be made, does not fit the spec, or its weights are another model's.
    """
    config, classes = file.model, len(spec.classes)
    if _is_own(config.name):
        factory = find(config.name, folder, "model.name")
        try:
            with seeded(file.seed, "model", file.name):
                made = factory(spec.shape, classes)
        except OWN as error:
            if isinstance(error, FedstillError):
                raise
            raise ModelError(f"model.name {config.name!r}: the factory fails: {first_line(error)}") from error
        model = made if isinstance(made, nn.Module) else _predictor(made, spec, config)
    else:
        model = _ours(config.name, spec, file, most)
    if config.weights:
        _load_weights(model, folder / Path(config.weights).expanduser())
    if not config.train:
        model.requires_grad_(False)
    models.check(model, spec.shape, spec.outputs, f"model.name {config.name!r}", spec.task.makes.form)
    return model


def _predictor(source: Any, spec: InputSpec, config: OwnModelConfig) -> Predictor:
    """What is no torch module, as one; these classify images."""
    if spec.task.targets != "class":
        raise ModelError(
            f"model.name {config.name!r} gives a {type(source).__name__}: allowed for {spec.task.called} is "
            "a torch.nn.Module"
        )
    channels, height, width = spec.shape
    return Predictor(source, (channels, height, width), spec.classes, config.gives)


def perceptual(file: NodeFile, folder: Path, spec: InputSpec) -> nn.Module | None:
    """The node's VGG features of images as the spec normalises them, if it has any."""
    from fedstill.models.vgg import load_vgg

    path = file.model.perceptual
    return load_vgg(folder / Path(path).expanduser(), spec.mean, spec.std) if path else None


def _ours(name: str, spec: InputSpec, file: NodeFile, most: int) -> nn.Module:
    shape, classes, vocabulary = spec.shape, len(spec.classes), spec.vocabulary

    def build() -> nn.Module:
        return models.build(name, shape, classes, file.seed, "model", file.name, vocabulary=vocabulary)

    try:
        if name.partition(":")[0] in models.MODELS.own:  # of another no one can foresee what it takes
            memory_limits.check_model(build, spec, file.local.batch, most)
        return build()
    except ArgumentError as error:
        raise ArgumentError("model.name", name, error.allowed) from error
    except models.FORWARD as error:
        if isinstance(error, FedstillError):
            raise
        raise ModelError(
            f"model.name {name!r} cannot take inputs of shape {shape}: {first_line(error)}"
        ) from error


def _load_weights(model: nn.Module, path: Path) -> None:
    """Put a file's tensors into a model, exactly: the same names, shapes and types."""
    weights, wanted = _weights(path), model.state_dict()
    faults = [f"{name} is missing" for name in wanted if name not in weights]
    faults += [f"{name} is not of this model" for name in weights if name not in wanted]
    for name in (name for name in wanted if name in weights):
        mine, given = wanted[name], weights[name]
        if mine.shape != given.shape or mine.dtype != given.dtype:
            faults.append(f"{name} is {_described(given)}, and in this model {_described(mine)}")
    if faults:
        more = f", and {len(faults) - 1} more such tensors" if len(faults) > 1 else ""
        raise ModelError(f"model.weights {path.name!r} are of another model: {faults[0]}{more}")
    model.load_state_dict(weights)


def _weights(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise ModelError(f"model.weights {path.name!r}: there is no file {path}")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            f"model.weights {path.name!r} is no safetensors file: {first_line(error)}"
        ) from error


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def check_named(file: NodeFile, folder: Path) -> None:
    """Refuse what can be refused of a model (its name, its weights) while inputs and classes are not known.

    Nothing is made: a network for texts has nothing to be made for without their length and vocabulary.
    """
    if _is_own(file.model.name):
        find(file.model.name, folder, "model.name")
    else:
        try:
            models.check_name(file.model.name)
        except ArgumentError as error:
            raise ArgumentError("model.name", file.model.name, error.allowed) from error
    if file.model.weights:
        _weights(folder / Path(file.model.weights).expanduser())


def _is_own(name: str) -> bool:
    """Whether a name is of the owner's factory: ``hf:bert`` reads like one, and is none."""
    return is_path(name) and not name.startswith("hf:")


def unfit(model: nn.Module, needs: Needs, spec: InputSpec, compute: Compute) -> str | None:
    """Why a method with such needs cannot work with this node's model, or None."""
    if needs.trainable and not any(parameter.requires_grad for parameter in model.parameters()):
        return "nothing of its model is trained here, and every round trains it"
    if needs.split:
        try:
            own, vocabulary = copy.deepcopy(model), spec.vocabulary
            fitted(own, compute, spec.shape, 0, "its model", parted=True, vocabulary=vocabulary)
        except ModelError as error:
            return str(error)
    return None
