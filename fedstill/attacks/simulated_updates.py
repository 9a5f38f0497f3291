"""Parameter updates as functions of examples: a gradient, or the change by all steps of local training.

A step is that of :mod:`fedstill.node.local_training`, with the same loss, optimizers, learning rates and
batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from fedstill.core.errors import ArgumentError
from fedstill.models.extractor_head import split_model
from fedstill.models.module_utils import in_mode
from fedstill.protocol.local_config import FULL_TRAINING, LocalConfig, Span, cosine_lr
from fedstill.protocol.wire_format import Tensors

ModelPart = Literal["all", "extractor", "head"]


def shared_parameter_names(model: nn.Module, part: ModelPart) -> tuple[str, ...]:
    """Return the names of the parameters that a method shares: all, the extractor's or the head's.

    Raises:
        ModelError: the model cannot be split.

    >>> shared_parameter_names(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), "head")
    ('2.weight', '2.bias')
    """
    if part == "all":
        return tuple(name for name, _ in model.named_parameters())
    part_ids = {id(parameter) for parameter in split_model(model, "model").get_submodule(part).parameters()}
    return tuple(name for name, parameter in model.named_parameters() if id(parameter) in part_ids)


@dataclass(frozen=True)
class Schedule:
    """Local training of a node between the received and the released parameters, which the server knows.

    Args:
        rates: learning rate of each step.
        batch: examples in a step.
        optimizer: with a fresh state.
        momentum: of SGD.
        weight_decay: of the optimizer.
        smoothing: share of each label that is spread over all classes.
    """

    rates: tuple[float, ...] = ()
    batch: int = 1
    optimizer: Literal["adam", "sgd"] = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    smoothing: float = 0.0

    @classmethod
    def from_config(cls, local: LocalConfig, examples: int, span: Span = FULL_TRAINING) -> Schedule:
        """Return the steps of a node with a number of examples, in a span of its local training.

        Raises:
            ArgumentError: images are augmented, with random numbers that only the node knows.

        >>> Schedule.from_config(LocalConfig(epochs=1, batch=2, lr=0.5, lr_end=0.1), 4).rates
        (0.5, 0.1)
        """
        if local.augment != "none":
            raise ArgumentError("local.augment", local.augment, "none, as only the node knows the draws")
        total = max(local.steps(examples), span.parts)
        return cls(
            tuple(cosine_lr(step, total, local.lr, local.lr_end) for step in span.steps(total)),
            local.batch,
            local.optimizer,
            local.momentum,
            local.weight_decay,
            local.smoothing,
        )

    def batches(self, examples: int) -> list[torch.Tensor]:
        """Return the examples of each step, indices ``(batch,)``, if every pass takes them in their order.

        The first pass may have this order without loss; only the node knows that of later ones.

        >>> [indices.tolist() for indices in Schedule((0.1, 0.1), 2).batches(3)]
        [[0, 1], [2, 0]]
        """
        steps = range(len(self.rates))
        return [torch.arange(step * self.batch, (step + 1) * self.batch) % examples for step in steps]


def loss_gradients(
    model: nn.Module, parameters: Tensors, inputs: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0
) -> dict[str, torch.Tensor]:
    """Gradients of the mean cross-entropy in training mode, by the parameters' names, differentiable.

    The model itself stays as it is.

    Args:
        parameters: those that count, by name; the model's own stand in for others.
        labels: classes ``(B,)`` int64, or how much of each class, ``(B, classes)``.
    """
    used = {name: value.detach() for name, value in model.named_parameters()} | dict(parameters)
    buffers = {name: value.clone() for name, value in model.named_buffers()}  # batch norm writes to its own
    leaves = {
        name: value if value.requires_grad else value.clone().requires_grad_()
        for name, value in parameters.items()
    }
    with in_mode(model, True), torch.enable_grad():
        outputs = functional_call(model, ({**used, **leaves}, buffers), (inputs,))
        loss = F.cross_entropy(outputs, labels, label_smoothing=smoothing)
        gradients = torch.autograd.grad(
            loss, list(leaves.values()), create_graph=True, materialize_grads=True
        )
    return dict(zip(leaves, gradients, strict=True))


def simulate_training(
    model: nn.Module,
    before: Tensors,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    schedule: Schedule,
    order: Sequence[torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Parameters after all steps of local training on some examples, as a function of them.

    Args:
        before: the parameters that are trained, by name, at the start.
        order: which examples each step takes; None: as :meth:`Schedule.batches` has it.
    """
    now = {name: value.detach().clone() for name, value in before.items()}
    first: dict[str, torch.Tensor] = {}
    second: dict[str, torch.Tensor] = {}
    order = schedule.batches(len(inputs)) if order is None else order
    for step, (rate, indices) in enumerate(zip(schedule.rates, order, strict=True), 1):
        slopes = loss_gradients(model, now, inputs[indices], labels[indices], schedule.smoothing)
        for name, slope in slopes.items():
            g = slope + schedule.weight_decay * now[name]
            if schedule.optimizer == "sgd":
                first[name] = schedule.momentum * first[name] + g if name in first else g
                now[name] = now[name] - rate * first[name]
            else:
                first[name], second[name], move = _adam_step(g, first.get(name), second.get(name), step)
                now[name] = now[name] - rate * move
    return now


def _adam_step(
    g: torch.Tensor, first: torch.Tensor | None, second: torch.Tensor | None, step: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Adam's moments, and its step before the learning rate (torch's defaults: 0.9, 0.999, 1e-8)."""
    m = 0.1 * g if first is None else 0.9 * first + 0.1 * g
    v = 0.001 * g**2 if second is None else 0.999 * second + 0.001 * g**2
    nonzero = v > 0  # the square root has no gradient at 0
    root = torch.where(nonzero, torch.where(nonzero, v, 1.0).sqrt(), 0.0) / (1 - 0.999**step) ** 0.5
    return m, v, m / (1 - 0.9**step) / (root + 1e-8)


@dataclass(frozen=True)
class ObservedUpdate:
    """A node's release as a function of examples that an adversary can compute and differentiate.

    Args:
        model: network with the parameters before the update. For a part that a method keeps at the node,
            the adversary's best guess, such as the initial weights.
        target: released tensors by name: gradient of the mean loss, or ``before - after``.
        schedule: local training steps; without any, the target is a gradient.

    Raises:
        ArgumentError: the target holds NaN or infinity.
    """

    model: nn.Module
    target: Tensors
    schedule: Schedule = Schedule()

    def __post_init__(self) -> None:
        for name, value in self.target.items():
            if not bool(value.isfinite().all()):
                raise ArgumentError(f"release of {name}", "NaN or infinity", "finite numbers")

    @property
    def is_gradient(self) -> bool:
        return not self.schedule.rates

    def compute_target(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute the release of given examples, differentiably."""
        before = {name: value.detach() for name, value in self.model.named_parameters()}
        if self.is_gradient:
            released = {name: before[name] for name in self.target}
            return loss_gradients(self.model, released, inputs, labels, self.schedule.smoothing)
        after = simulate_training(self.model, before, inputs, labels, self.schedule)
        return {name: before[name] - after[name] for name in self.target}

    def mean_gradient(self) -> Tensors:
        """Approximate the mean gradient: an SGD update divided by the total weight of the steps' gradients
        in it.
        """
        if self.is_gradient:
            return self.target
        momentum = (
            self.schedule.momentum if self.schedule.optimizer == "sgd" else 0.0
        )  # later steps repeat a gradient
        rates = self.schedule.rates
        total = sum(
            rate * momentum**age for start in range(len(rates)) for age, rate in enumerate(rates[start:])
        )
        return {name: change / total for name, change in self.target.items()}

    def as_gradient(self) -> ObservedUpdate:
        """Convert the update of one step to a gradient.

        Adam's first step reveals little more than signs, which then replace the gradient.
        """
        (rate,), weight_decay = self.schedule.rates, self.schedule.weight_decay
        target = {name: change / rate for name, change in self.target.items()}
        if self.schedule.optimizer == "sgd":
            target = {
                name: gradient - weight_decay * self.model.get_parameter(name).detach()
                for name, gradient in target.items()
            }
        return replace(self, target=target, schedule=replace(self.schedule, rates=()))
