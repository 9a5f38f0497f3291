"""DP-SGD at a node: private training steps of its networks (:mod:`fedstill.privacy.dpsgd`).

Reported losses are for the node's owner only.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.func import functional_call

from fedstill.core.compute import Compute, match_layout
from fedstill.core.errors import ArgumentError, QueryRefused
from fedstill.data.augmentation import augment_examples
from fedstill.models.module_utils import in_mode
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup
from fedstill.node.stacked_calls import LossTerm
from fedstill.privacy import dpsgd
from fedstill.privacy.dpsgd import (
    DPParameters,
    PrivateLoss,
    PublicLoss,
    augmentation_numbers,
    clipped_sum_and_loss,
    examples_at_once,
    poisson_sample,
    public_gradient,
    sampling_rate,
    tensor_digest,
)
from fedstill.privacy.noise import NoiseSampler, add_noise
from fedstill.privacy.per_example import PerExampleFunction
from fedstill.protocol.local_config import FULL_TRAINING, LocalConfig, Span, cosine_lr, set_lr
from fedstill.tasks import Task

# Inputs (B, C, H, W), each augmented by itself, given the step's random numbers.
Augment = Callable[[torch.Tensor, torch.Tensor, NoiseSampler], tuple[torch.Tensor, torch.Tensor]]
Report = Callable[[Sequence[Node], int, torch.Tensor], None]  # nodes in training, steps done, losses
MAX_CACHED_NUMBERS = 2**27  # cached features of all examples (512 MiB)
FEATURE_BATCH = 250  # examples per batch of features


def private_step(
    node: Node,
    role: str,
    dp: DPParameters,
    rate: float,
    *purpose: str | int,
    private_loss: PrivateLoss,
    batch: float,
    public_loss: PublicLoss | None = None,
    augment: Augment | None = None,
) -> float:
    """Take one DP-SGD step of a node's network, with its optimizer, on the node's own data.

    An empty sample is a step like any other: noise alone.

    Args:
        node: the node.
        role: role of the network.
        dp: clipping, noise and random streams.
        rate: sampling rate of each record.
        purpose: names of the step's random streams, in addition to the current query.
        private_loss: loss of each example.
        batch: mean sample size; the noisy sum of gradients is divided by it.
        public_loss: loss added to the mean of the private one; costs nothing.
        augment: augmentation of inputs and targets; it must treat each example by itself, whatever its
            position.

    Returns:
        Mean private loss of the sampled records, 0 if there are none. Not protected: for the owner only.

    Raises:
        ArgumentError: the current query has not declared this step, or not for so many records.
    """
    _subtract_remaining_step(node, role, rate)
    module, optimizer = node.modules[role], node.optimizers[role]
    names = (
        node.query_context_hash,
        *purpose,
    )  # a query with other content is another release, with other noise
    batch_ = poisson_sample(node.data, rate, dp.sampler(*names, "sample"))
    trained = {
        name: parameter for name, parameter in module.named_parameters() if name not in node.frozen[role]
    }
    inputs, targets = batch_.inputs, batch_.targets
    if augment is not None and len(batch_):
        inputs, targets = augment(inputs, targets, dp.sampler(*names, "augment"))
    rows = examples_at_once(len(node.data), batch)
    with in_mode(module, True):
        total, loss = clipped_sum_and_loss(
            module, trained, private_loss, inputs, targets, dp.clip, rows, dp.isolate_rounding
        )
        if dp.noise:
            # The stream depends on the sum, too: if a sum differs under equal names, say in its last digits
            # on another machine, all of its noise differs, and no difference of two steps is free of noise.
            noise = dp.sampler(*names, "noise", tensor_digest(total)).normal(tuple(total.shape))
            total = add_noise(total, noise, dp.noise * dp.clip)
        gradient = total.float() / batch
        if public_loss is not None:
            gradient = gradient + public_gradient(module, trained, public_loss)
    pieces = torch.split(gradient, [parameter.numel() for parameter in trained.values()])
    for parameter, piece in zip(trained.values(), pieces, strict=True):
        parameter.grad = match_layout(piece.view(parameter.shape), parameter)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _subtract_remaining_step(node: Node, role: str, sampling_rate_: float) -> None:
    """Subtract a step from those that are charged for the current query."""
    if node.remaining_private_steps is None:
        return
    batch, remaining = node.remaining_private_steps.get(role, (0, 0))
    if not remaining or sampling_rate_ > dpsgd.sampling_rate(len(node.data), batch):
        expected = "no more private steps or records than the query declares (span, trains, rows)"
        raise ArgumentError(f"steps of the {role} of {node.name}", "more", expected)
    node.remaining_private_steps[role] = batch, remaining - 1


def train_privately(
    node: Node,
    task: Task,
    config: LocalConfig,
    compute: Compute,
    *,
    dp: DPParameters,
    span: Span = FULL_TRAINING,
    start: int = 0,
    steps: int | None = None,
    report: Report | None = None,
    purpose: str = "local",
    term: LossTerm | None = None,
) -> int:
    """Train a node's model with DP-SGD: as :func:`fedstill.node.local_training.train`, for one node; batch
    sizes are means.

    Random numbers of each step follow from its number, so a resumed training equals an uninterrupted one. The
    gradient of ``term``, which depends on no record, is added after clipping and noise.

    Returns:
        Number of steps of the span done in total.

    Raises:
        QueryRefused: the query's function has read the node's records, and the term could depend on them.
    """
    total = max(config.steps(len(node.data)), span.parts)
    numbers = span.steps(total)
    end = len(numbers) if steps is None else min(len(numbers), start + steps)
    if config.augment == "none" and start < end and term is None:
        with compute.autocast():
            node = _copy_with_precomputed_features(node, dp.isolate_rounding)
    q = sampling_rate(len(node.data), config.batch)
    for number in numbers[start:end]:
        set_lr(node.optimizers["model"], cosine_lr(number, total, config.lr, config.lr_end))
        with compute.step(node.seed, node.name, purpose, number):
            loss = private_step(
                node,
                "model",
                dp,
                q,
                purpose,
                number,
                private_loss=_example_losses(task, config),
                batch=q * len(node.data),
                augment=_make_augmentation(task, config),
                public_loss=None if term is None else _term_without_records(node, term),
            )
        if report is not None:
            report([node], number - numbers[0] + 1, torch.tensor([loss]))
    return end


def _copy_with_precomputed_features(node: Node, isolate_rounding: bool) -> Node:
    """Return the node with the trained layers only, and with the fixed layers' features as its data,
    computed once.

    The node is unchanged if layers do not simply follow one another. Each example is a batch of one, as in
    a step.
    """
    model, data = node.model, node.data
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        return node
    learning = {
        id(parameter) for name, parameter in model.named_parameters() if name not in node.frozen["model"]
    }
    layers = list(model)
    is_trained = [any(id(parameter) in learning for parameter in layer.parameters()) for layer in layers]
    first_trained = is_trained.index(True) if any(is_trained) and len(data) else 0
    fixed, head = nn.Sequential(*layers[:first_trained]), nn.Sequential(*layers[first_trained:])
    leaves = {name: parameter.detach() for name, parameter in fixed.named_parameters()}
    training = model.training

    def features_of(leaves: dict[str, torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
        return [functional_call(fixed, leaves, (x.unsqueeze(0),))[0]]

    with torch.no_grad():
        fixed.train()
        fits = (
            first_trained > 0
            and len(data) * features_of(leaves, data.inputs[0])[0].numel() <= MAX_CACHED_NUMBERS
        )
        per_example = (
            PerExampleFunction(
                features_of,
                min(FEATURE_BATCH, len(data)),
                fixed,
                leaves,
                data.inputs,
                isolate_rounding=isolate_rounding,
            )
            if fits
            else None
        )
        pieces = [] if per_example is None else [features for [features] in per_example(leaves, data.inputs)]
        fixed.train(training)
    if per_example is None:
        return node
    copied = copy.copy(node)
    copied.data = dataclasses.replace(data, inputs=torch.cat(pieces))
    copied.modules = {"model": head[0] if len(head) == 1 else head}
    frozen_names = (
        name for name, parameter in copied.model.named_parameters() if id(parameter) not in learning
    )
    copied.frozen = {"model": frozenset(frozen_names)}
    return copied


def _term_without_records(node: Node, term: LossTerm) -> PublicLoss:
    """Return a further term of the loss, which is refused if it could depend on the node's records."""
    group = NodeGroup([node])

    def loss(module: nn.Module) -> torch.Tensor:
        value = term(group, 1).sum()
        if node.records_read:
            rule = (
                "privacy: its loss has a further term, and the query's function has read the node's records"
            )
            raise QueryRefused(node.name, "train_locally", rule)
        return value

    return loss


def _example_losses(task: Task, config: LocalConfig) -> PrivateLoss:
    """Return the task's loss of each example; each is a batch of one."""

    def losses(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return task.loss(module(inputs).float().unsqueeze(1), targets.unsqueeze(1), config.smoothing)

    return losses


def _make_augmentation(task: Task, config: LocalConfig) -> Augment | None:
    mode = config.augment
    if mode == "none":
        return None
    return lambda inputs, targets, draws: augment_examples(
        task, inputs, targets, augmentation_numbers(inputs, draws), mode
    )
