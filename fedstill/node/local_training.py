"""Local training: the models of a group of nodes, each trained on its own node's data, G steps at a time.

One loop serves every method, task and engine. Nodes of unequal size take their own number of steps, each
with its own cosine schedule. Nodes with more steps come first in the stack, so that finished nodes fall off
its end. For models that train with DP-SGD see :mod:`fedstill.node.dp_training`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fedstill.core.compute import Compute, copy_to_device
from fedstill.core.errors import ArgumentError
from fedstill.core.optimizers import SGD, Adam
from fedstill.data.augmentation import augment_examples, sample_augmentation
from fedstill.node import dp_training
from fedstill.node.captured_train_step import can_capture_training, capture_train_step
from fedstill.node.dp_training import Report
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup, TrainStep
from fedstill.node.stacked_calls import LossTerm
from fedstill.node.stacked_modules import stack_tensors
from fedstill.protocol.local_config import FULL_TRAINING, LocalConfig, Span, cosine_lr, set_lr
from fedstill.tasks import Task


def make_optimizer(parameters: Sequence[nn.Parameter], config: LocalConfig) -> torch.optim.Optimizer:
    """Return the optimizer of local training for one network's parameters."""
    if config.optimizer == "adam":
        return Adam(parameters, config.lr, weight_decay=config.weight_decay, fused=True)
    return SGD(parameters, config.lr, config.momentum, weight_decay=config.weight_decay, fused=True)


def attach_optimizers(nodes: Sequence[Node], config: LocalConfig) -> None:
    """Give each node a new optimizer for its model.

    A node whose model is frozen as a whole gets none.
    """
    for node in nodes:
        parameters, frozen = node.model.named_parameters(), node.frozen["model"]
        trainable = [parameter for name, parameter in parameters if name not in frozen]
        if trainable:
            node.optimizers["model"] = make_optimizer(trainable, config)
        node.captured_step = None


def train(
    nodes: Sequence[Node],
    task: Task,
    config: LocalConfig,
    compute: Compute,
    *,
    span: Span = FULL_TRAINING,
    start: int = 0,
    steps: int | None = None,
    report: Report | None = None,
    train_step: TrainStep | None = None,
    term: LossTerm | None = None,
    roles: Sequence[str] = ("model",),
    purpose: str = "local",
) -> int:
    """Train networks of nodes with equal architecture on their own data.

    Args:
        nodes: nodes computed together as one group; a single node gives a plain loop. Each needs an
            optimizer for each of the roles; :func:`attach_optimizers` makes the model's.
        task: the task, which defines loss and augmentation.
        config: options of local training.
        compute: device and precision.
        span: the part of each node's steps to take; the learning rate decays over all steps.
        start: number of steps of the span done before, to resume.
        steps: maximum number of steps now; None: all that are left.
        report: called after each step with nodes, steps done and losses.
        train_step: one training step; None: a step of the model on the task's loss.
        term: term that is added to the task's loss, without ``train_step``; it depends on no record.
        roles: roles of the networks that ``train_step`` trains. All others stay in evaluation mode.
        purpose: name of the steps' random streams.

    Returns:
        Number of steps of the span done in total.
    """
    if (private := nodes[0].dp_sgd_parameters.get("model")) is not None:
        if train_step is not None or len(nodes) > 1:
            expected = "a method that trains on the task's loss"
            raise ArgumentError(f"privacy of {nodes[0].name}", "dp-sgd", expected)
        position: dict[str, Any] = {"span": span, "start": start, "steps": steps}
        how: dict[str, Any] = {"report": report, "term": term, "purpose": purpose}
        return dp_training.train_privately(nodes[0], task, config, compute, dp=private, **how, **position)
    totals = {node.name: max(config.steps(len(node.data)), span.parts) for node in nodes}
    spans = {node.name: span.steps(totals[node.name]) for node in nodes}
    nodes = sorted(nodes, key=lambda node: -len(spans[node.name]))  # stable sort, longest first
    lengths = [len(spans[node.name]) for node in nodes]
    first_steps = [spans[node.name].start for node in nodes]
    streams = [_BatchStream(node, task, config) for node in nodes]
    group = NodeGroup(nodes)
    for role in nodes[0].modules:
        group.module(role).train(role in roles)
    if train_step is None:
        train_step = make_task_loss_step(task, config, term)
        if term is None and can_capture_training(nodes, lengths[0], compute):
            train_step = capture_train_step(nodes[0], compute, train_step)
    end = lengths[0] if steps is None else min(lengths[0], start + steps)
    for step in range(start, end):
        active = sum(length > step for length in lengths)
        batches = [
            stream.batch(first_step + step)
            for stream, first_step in zip(streams[:active], first_steps, strict=False)
        ]
        inputs = stack_tensors([inputs for inputs, _ in batches])  # (active, batch, C, H, W)
        targets = stack_tensors([targets for _, targets in batches])  # (active, batch, ...)
        for node, first_step in zip(nodes[:active], first_steps, strict=False):
            rate = cosine_lr(first_step + step, totals[node.name], config.lr, config.lr_end)
            for role in roles:
                set_lr(node.optimizers[role], rate)
        number = first_steps[0] + step
        # Stacked nodes do not use the global generator.
        with torch.enable_grad(), compute.step(nodes[0].seed, nodes[0].name, purpose, number):
            losses = train_step(group, number, inputs, targets)  # (active,)
        if report is not None:
            report(nodes[:active], step + 1, losses.detach())
    for role in nodes[0].modules:
        group.module(role).train(False)
    if end == lengths[0]:
        nodes[0].captured_step = None
    return end


def make_task_loss_step(task: Task, config: LocalConfig, term: LossTerm | None = None) -> TrainStep:
    """Return a training step of each model on the task's loss, and on a further term if there is one."""

    def train_step(group: NodeGroup, step: int, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = task.loss(group.module("model")(inputs), targets, config.smoothing)  # (G,)
        group.step("model", losses if term is None else losses + term(group, len(inputs)))
        return losses

    return train_step


class _BatchStream:
    """Batches of a node's data from a sequence of shuffled epochs; each batch follows from its number."""

    def __init__(self, node: Node, task: Task, config: LocalConfig) -> None:
        self.node, self.task, self.size, self.augment = node, task, config.batch, config.augment
        self._passes: dict[int, torch.Tensor] = {}

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs ``(batch, C, H, W)`` and targets ``(batch, ...)`` of one batch."""
        total = len(self.node.data)
        start, end = number * self.size, (number + 1) * self.size
        passes = range(start // total, (end - 1) // total + 1)
        indices = [self._shuffled_indices(p)[max(start - p * total, 0) : end - p * total] for p in passes]
        data = self.node.data.subset(copy_to_device(torch.cat(indices), self.node.data.inputs.device))
        if self.augment == "none":
            return data.inputs, data.targets
        numbers = sample_augmentation(len(data), self.node.random_generator("augment", number))
        return augment_examples(self.task, data.inputs, data.targets, numbers, self.augment)

    def _shuffled_indices(self, pass_number: int) -> torch.Tensor:
        if pass_number not in self._passes:
            self._passes = {p: order for p, order in self._passes.items() if p == pass_number - 1}
            generator = self.node.random_generator("pass", pass_number)
            self._passes[pass_number] = torch.randperm(len(self.node.data), generator=generator)
        return self._passes[pass_number]
