"""A network as a method needs it: on the device, whole or in two parts, and what tells kinds apart."""

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


def prepare_network(
    model: nn.Module,
    compute: Compute,
    shape: tuple[int, ...],
    seed: int,
    label: str,
    *,
    split_: bool,
    vocabulary: int = 0,
) -> nn.Module:
    """A network on the device; in extractor and head, if a method needs these.

    Raises:
        ModelError: it cannot be parted.
    """
    placed = compute.to_device(model)
    if not split_:
        return placed
    parts = split_model(placed, label)
    x = torch.randn(2, *shape, generator=torch_generator(seed, "try"))
    x = (x.abs() * vocabulary).long() % vocabulary if vocabulary else x
    x = x.to(compute.device)
    whole, in_parts = (predict(network, x, compute) for network in (placed, parts))
    count_features(parts, x, label, maps=whole.ndim > 2)
    if not torch.allclose(whole, in_parts, atol=1e-2 if compute.precision == "bfloat16" else 1e-4):
        raise ModelError(f"{label} cannot be split (expected a head that follows its extractor)")
    return parts


def check_local_batch(
    model: nn.Module, local: LocalConfig, shape: tuple[int, ...], form: Form, label: str
) -> None:
    """Refuse local training by single examples of a network that cannot learn from one.

    Raises:
        ArgumentError: naming the batch's option.
    """
    is_trained = any(parameter.requires_grad for parameter in model.parameters())
    if local.batch == 1 and is_trained and needs_two_examples(model, shape, form):
        raise ArgumentError("nodes.local.batch", 1, f"2 or more, for the batch norm of {label}")


def architecture_hash(model: nn.Module) -> str:
    """A fingerprint of a network's layers and tensors, equal in every process; not of its weights.

    >>> architecture(nn.Linear(2, 3)) == architecture(nn.Linear(2, 3)) != architecture(nn.Linear(2, 4))
    True
    """
    hashed = hashlib.blake2b(digest_size=16)
    for name, layer in model.named_modules():
        hashed.update(f"{name} {type(layer).__qualname__} {layer.extra_repr()}\n".encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        hashed.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
    return hashed.hexdigest()
