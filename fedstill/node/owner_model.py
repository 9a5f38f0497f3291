"""Model of a node's owner, as ``node.toml`` describes it."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from fedstill import models
from fedstill.core.compute import Compute
from fedstill.core.errors import ModelError
from fedstill.data.data_spec import DataSpec
from fedstill.models import custom_model
from fedstill.models.module_utils import deep_copy
from fedstill.node import memory_limits
from fedstill.node.model_setup import prepare_model
from fedstill.node.node_file import NodeFile
from fedstill.protocol.needs import Needs

MODEL_OPTION = "model.name"


def make_model(file: NodeFile, folder: Path, spec: DataSpec, limit: int = 0) -> nn.Module:
    """Return the node's model with its first weights; a frozen model has no gradients.

    Args:
        file: the node's configuration.
        folder: base of relative paths.
        spec: shape and classes of the run.
        limit: bytes that it may take; 0 is no limit. Custom models are not estimated.

    Raises:
        TooLarge: it would take more.
        FedstillError: it cannot be created, does not fit the spec, or its weights belong to another model.
    """
    name, interface = file.model.name, spec.interface()
    if name.partition(":")[0] in models.MODELS.builtin:  # custom models cannot be estimated
        _check_memory(name, file, spec, limit)
    return custom_model.build_model(
        file.model, interface, folder, file.seed, "model", file.name, option=MODEL_OPTION
    )


def _check_memory(name: str, file: NodeFile, spec: DataSpec, limit: int) -> None:
    classes = len(file.model.classes) or len(spec.classes)

    def build() -> nn.Module:
        return models.build(name, spec.shape, classes, file.seed, vocabulary=spec.vocabulary)

    with custom_model.name_option_in_errors(MODEL_OPTION, name, spec.shape):
        memory_limits.check_model(build, spec, file.local.batch, limit)


def load_perceptual(file: NodeFile, folder: Path, spec: DataSpec) -> nn.Module | None:
    """Return the node's VGG features for images normalized by the spec, or None."""
    from fedstill.models.vgg import load_vgg

    path = file.model.perceptual
    return load_vgg(folder / Path(path).expanduser(), spec.mean, spec.std) if path else None


def check_name_and_weights(file: NodeFile, folder: Path) -> None:
    """Check a model's name and weights while inputs and classes are not known.

    No model is created, since networks for texts need length and vocabulary.
    """
    custom_model.check_name(file.model.name, folder, MODEL_OPTION)
    if file.model.weights:
        custom_model.read_weights(folder / Path(file.model.weights).expanduser())


def unfit_reason(model: nn.Module, needs: Needs, spec: DataSpec, compute: Compute) -> str | None:
    """Return the reason why a method with such needs cannot use this node's model, or None."""
    if needs.trainable and not any(parameter.requires_grad for parameter in model.parameters()):
        return "its model is frozen here, and every round trains it"
    if needs.split_models:
        try:
            copied_model, vocabulary = deep_copy(model), spec.vocabulary
            prepare_model(
                copied_model, compute, spec.shape, 0, "its model", split_=True, vocabulary=vocabulary
            )
        except ModelError as error:
            return str(error)
    return None
