"""The network of a node: the owner's model as ``node.toml`` describes it, on the device, whole or split."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import nn

from fedstill import models
from fedstill.core.compute import Compute
from fedstill.core.dataset import Form
from fedstill.core.errors import ArgumentError, ModelError, QueryRefused
from fedstill.core.registry import searching_in
from fedstill.core.seeds import torch_generator
from fedstill.data.data_spec import DataSpec
from fedstill.models import custom_model, perceptual
from fedstill.models.backbones import RawInputs
from fedstill.models.extractor_head import count_features, split_model
from fedstill.models.inference import predict
from fedstill.models.model_config import encoder_backbone
from fedstill.models.module_check import needs_two_examples
from fedstill.models.module_utils import deep_copy
from fedstill.models.weights_file import read_weights
from fedstill.node import limits
from fedstill.node.node_file import NodeFile
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.needs import Needs
from fedstill.protocol.recalibration import QUERY, Recalibration
from fedstill.protocol.run_plan import RunPlan


def prepare_model(
    model: nn.Module,
    compute: Compute,
    shape: tuple[int, ...],
    seed: int,
    label: str,
    *,
    split_: bool,
    vocabulary: int = 0,
) -> nn.Module:
    """Return a network on the device, split into extractor and head if the method needs that.

    Raises:
        ModelError: it cannot be split.
    """
    placed = compute.to_device(model)
    if not split_:
        return placed
    parts = split_model(placed, label)
    x = torch.randn(2, *shape, generator=torch_generator(seed, "try"))
    x = (x.abs() * vocabulary).long() % vocabulary if vocabulary else x
    x = x.to(compute.device)
    outputs, split_outputs = (predict(network, x, compute) for network in (placed, parts))
    count_features(parts, x, label, maps=outputs.ndim > 2)
    if not torch.allclose(outputs, split_outputs, atol=1e-2 if compute.precision == "bfloat16" else 1e-4):
        raise ModelError(f"{label} cannot be split (expected a head that follows its extractor)")
    return parts


def require_trainable_batch_size(
    model: nn.Module, local: LocalConfig, shape: tuple[int, ...], form: Form, label: str
) -> None:
    """Refuse a local batch size of one if the network cannot be trained with it.

    Raises:
        ArgumentError: with the batch's option.
    """
    is_trained = any(parameter.requires_grad for parameter in model.parameters())
    if local.batch == 1 and is_trained and needs_two_examples(model, shape, form):
        raise ArgumentError("nodes.local.batch", 1, f"2 or more, for the batch norm of {label}")


def architecture_hash(model: nn.Module) -> str:
    """Return a fingerprint of a network's layers and tensor shapes, equal in every process; weights do not
    count.

    >>> architecture_hash(nn.Linear(2, 3)) == architecture_hash(nn.Linear(2, 3))
    True
    >>> architecture_hash(nn.Linear(2, 3)) == architecture_hash(nn.Linear(2, 4))
    False
    """
    hashed = hashlib.blake2b(digest_size=16)
    for name, layer in model.named_modules():
        hashed.update(f"{name} {type(layer).__qualname__} {layer.extra_repr()}\n".encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        hashed.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
    return hashed.hexdigest()


MODEL_OPTION = "model.name"


# --- the owner's model ------------------------------------------------------------------------------


def make_model(file: NodeFile, folder: Path, spec: DataSpec, limit: int = 0) -> nn.Module:
    """Return the node's model with its first weights; a frozen model has no gradients.

    Args:
        file: the node's configuration.
        folder: base of relative paths.
        spec: shape and classes of the run.
        limit: bytes that it may take; 0 is no limit. Custom models and backbones are not estimated.

    Raises:
        MemoryLimitExceeded: it would take more.
        FedstillError: it cannot be created, does not fit the spec, or its weights belong to another model.
    """
    name, interface = file.model.name, spec.interface()
    # Custom models and backbones cannot be estimated.
    if name.partition(":")[0] in models.MODELS.builtin and not encoder_backbone(name):
        _check_memory(name, file, spec, limit)
    return custom_model.build_model(
        file.model, interface, folder, file.seed, "model", file.name, option=MODEL_OPTION
    )


def make_student(file: NodeFile, plan: RunPlan, limit: int = 0) -> nn.Module | None:
    """Return a network of the student's architecture for recalibration; None for a run without it.

    Args:
        file: the node's configuration.
        plan: the server's plan of the run.
        limit: bytes that it may take; 0 is no limit.

    Raises:
        MemoryLimitExceeded: it would take more.
        QueryRefused: the network is not built in, has more parameters than the policy allows, or other
            batch norm layers than planned.
    """
    if plan.recalibration is None:
        return None
    name, spec = plan.student, plan.model_spec
    if name.partition(":")[0] not in models.MODELS.builtin or encoder_backbone(name):
        raise QueryRefused(file.name, QUERY, f"student: {name} is no network that every node has")

    def build() -> nn.Module:
        return models.build(name, spec.shape, len(spec.classes), 0, vocabulary=spec.vocabulary)

    try:
        with limits.limit_parameters(file.policy.max_parameters, file.name, "join"):
            limits.check_model(build, spec, 1, limit)
            student = build()
    except (ArgumentError, ModelError) as error:
        raise QueryRefused(file.name, QUERY, f"student: {error}") from error
    if Recalibration.of(student) != plan.recalibration:
        rule = f"student: {name} has other batch norm layers than planned"
        raise QueryRefused(file.name, QUERY, rule)
    return student


def _check_memory(name: str, file: NodeFile, spec: DataSpec, limit: int) -> None:
    classes = len(file.model.classes) or len(spec.classes)

    def build() -> nn.Module:
        return models.build(name, spec.shape, classes, file.seed, vocabulary=spec.vocabulary)

    with custom_model.name_option_in_errors(MODEL_OPTION, name, spec.shape):
        limits.check_model(build, spec, file.local.batch, limit)


def load_perceptual(file: NodeFile, folder: Path, spec: DataSpec) -> nn.Module | None:
    """Return the node's network of the perceptual loss for images normalized by the spec, or None.

    Raises:
        ArgumentError: it is no file of a VGG and no backbone, or its weights are missing.
        FedstillError: its weights do not fit.
    """
    name, weights = file.model.perceptual, file.model.perceptual_weights
    if name and not perceptual.is_backbone(name):
        name = str(folder / Path(name).expanduser())
    weights = str(folder / Path(weights).expanduser()) if weights else ""
    raw = RawInputs((len(spec.mean), *spec.shape[1:]), spec.mean, spec.std)
    with searching_in(folder):
        return perceptual.load_perceptual(name, weights, raw, "model.perceptual")


def check_name_and_weights(file: NodeFile, folder: Path) -> None:
    """Check a model's name and weights while inputs and classes are not known.

    No model is created, since networks for texts need length and vocabulary.
    """
    custom_model.check_name(file.model.name, folder, MODEL_OPTION)
    for path in (file.model.weights, file.model.encoder_weights):
        if path:
            read_weights(folder / Path(path).expanduser())


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
