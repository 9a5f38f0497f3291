"""Preparation of a network for a method: on the device, whole or split; and fingerprints of architectures."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.dataset import Form
from fedstill.core.errors import ArgumentError, ModelError
from fedstill.core.seeds import torch_generator
from fedstill.models.extractor_head import count_features, split_model
from fedstill.models.module_check import needs_two_examples
from fedstill.node.local_training import predict
from fedstill.protocol.local_config import LocalConfig


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
