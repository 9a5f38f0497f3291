"""Local training: every model of a group trained on its own node's data, G steps at a time.

One loop serves every method, every task and both engines. Nodes of unequal size take their own
number of steps, each on its own cosine schedule; those with more to do come first in the stack, so
that the ones that are done simply fall off its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from fedstill.choices import check_choices
from fedstill.compute import Compute
from fedstill.errors import ArgumentError
from fedstill.node.group import Group, stack
from fedstill.node.node import Node
from fedstill.tasks import Task

Report = Callable[[Sequence[Node], int, torch.Tensor], None]  # nodes still at work, steps done, losses


@dataclass(frozen=True)
class LocalConfig:
    """How each node trains its own model."""

    epochs: float = 30.0
    """Passes over the node's own data."""
    least_steps: int = 0
    """Steps that even the smallest node takes."""
    batch: int = 32
    """Examples a step."""
    optimiser: Literal["adam", "sgd"] = "adam"
    """Adam, or SGD with momentum."""
    lr: float = 1e-3
    """Learning rate of the first step."""
    lr_end: float = 1e-5
    """Learning rate of the last step; between them a cosine."""
    momentum: float = 0.9
    """Of SGD."""
    weight_decay: float = 0.0
    """L2 penalty."""
    smoothing: float = 0.1
    """Share of each label spread over all classes. A node that was taught certainty is certain of what
    it never saw, too; that costs the ensemble more than it gains the node."""
    augment: Literal["none", "shift", "shift-flip"] = "none"
    """Random shifts by up to an eighth of the image, and mirror images."""

    def __post_init__(self) -> None:
        check_choices(self, "local")
        names = ("epochs", "least_steps", "batch", "lr", "lr_end", "momentum", "weight_decay")
        for name in names:
            value, least = getattr(self, name), int(name == "batch")
            if not math.isfinite(value) or value < least:
                raise ArgumentError(f"local.{name}", value, f"{least} or more")
        if not 0 <= self.smoothing < 1:
            raise ArgumentError("local.smoothing", self.smoothing, "from 0 to below 1")
        if self.epochs == 0 and self.least_steps == 0:
            raise ArgumentError("local.epochs", self.epochs, "above 0, or local.least_steps above 0")

    def steps(self, examples: int) -> int:
        """Steps of a node with so many examples.

        >>> LocalConfig(epochs=2, batch=32).steps(100)
        7
        """
        return max(self.least_steps, math.ceil(self.epochs * examples / self.batch), 1)


def cosine(step: int, steps: int, start: float, end: float) -> float:
    """The learning rate of step 0..steps-1 on half a cosine from ``start`` to ``end``.

    >>> [round(cosine(step, 3, 1.0, 0.0), 3) for step in range(3)]
    [1.0, 0.5, 0.0]
    """
    share = step / max(steps - 1, 1)
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


def set_lr(optimiser: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameters."""
    for part in optimiser.param_groups:
        part["lr"] = lr


def make_optimiser(model: nn.Module, config: LocalConfig) -> torch.optim.Optimizer:
    """The optimiser of one node's model."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.optimiser == "adam":
        return torch.optim.Adam(trained, config.lr, weight_decay=config.weight_decay, fused=True)
    return torch.optim.SGD(trained, config.lr, config.momentum, weight_decay=config.weight_decay, fused=True)


def prepare(nodes: Sequence[Node], config: LocalConfig) -> None:
    """Give each node its optimiser, before its first step or before going on from a state.

    A node whose model is frozen as a whole has nothing to train and gets none.
    """
    for node in nodes:
        if any(parameter.requires_grad for parameter in node.model.parameters()):
            node.optimisers["model"] = make_optimiser(node.model, config)


def train(
    nodes: Sequence[Node],
    task: Task,
    config: LocalConfig,
    compute: Compute,
    *,
    start: int = 0,
    steps: int | None = None,
    report: Report | None = None,
) -> int:
    """Train the models of nodes of equal architecture on their own data.

    Args:
        nodes: computed together as one group; give one for a plain loop. :func:`prepare` them first.
        task: gives the loss.
        config: steps, optimiser, schedule.
        compute: device and precision.
        start: steps done before, to go on after a stop.
        steps: at most so many steps now, or None for all that are left.
        report: called after each step.

    Returns:
        Steps done in all.
    """
    nodes = sorted(nodes, key=lambda node: -config.steps(len(node.data)))  # stable: most work first
    totals = [config.steps(len(node.data)) for node in nodes]
    streams = [_Stream(node, config.batch) for node in nodes]
    group = Group(nodes)
    bench = group.bench("model")
    bench.train(True)
    end = totals[0] if steps is None else min(totals[0], start + steps)
    for step in range(start, end):
        active = sum(total > step for total in totals)
        batches = [stream.batch(step, config.augment) for stream in streams[:active]]
        inputs = stack([inputs for inputs, _ in batches])  # (active, batch, C, H, W)
        targets = stack([targets for _, targets in batches])  # (active, batch, ...)
        for node, total in zip(nodes[:active], totals, strict=False):
            set_lr(node.optimisers["model"], cosine(step, total, config.lr, config.lr_end))
        # The nodes of a group draw nothing from the global generator unless each stands alone.
        with compute.step(nodes[0].seed, nodes[0].name, "local", step):
            losses = task.loss(bench(inputs), targets, config.smoothing)  # (active,)
        group.step("model", losses)
        if report is not None:
            report(nodes[:active], step + 1, losses.detach())
    if end == totals[0]:
        bench.train(False)
    return end


class _Stream:
    """Batches from one endless sequence of shuffled passes; which batch, follows from its number."""

    def __init__(self, node: Node, batch: int) -> None:
        self.node, self.size = node, batch
        self._passes: dict[int, torch.Tensor] = {}

    def batch(self, number: int, augment: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs ``(batch, C, H, W)`` and targets ``(batch, ...)`` of one batch."""
        total = len(self.node.data)
        first, last = number * self.size, (number + 1) * self.size
        pieces = [
            self._shuffled(turn)[max(first - turn * total, 0) : last - turn * total]
            for turn in range(first // total, (last - 1) // total + 1)
        ]
        data = self.node.data.subset(torch.cat(pieces).to(self.node.data.inputs.device))
        if augment == "none":
            return data.inputs, data.targets
        generator = self.node.draw("augment", number)
        return shifted(data.inputs, generator, flip=augment == "shift-flip"), data.targets

    def _shuffled(self, turn: int) -> torch.Tensor:
        if turn not in self._passes:
            self._passes = {kept: order for kept, order in self._passes.items() if kept == turn - 1}
            self._passes[turn] = torch.randperm(len(self.node.data), generator=self.node.draw("pass", turn))
        return self._passes[turn]


def shifted(images: torch.Tensor, generator: torch.Generator, *, flip: bool) -> torch.Tensor:
    """Each image moved by up to an eighth of its size, its border repeated, and mirrored half the time.

    Args:
        images: ``(B, C, H, W)``.
        generator: of the shifts, on the CPU.
        flip: whether to mirror left and right.
    """
    count, channels, height, width = images.shape
    reach_y, reach_x = height // 8, width // 8
    padded = F.pad(images, (reach_x, reach_x, reach_y, reach_y), mode="replicate")
    draws = torch.randint(2**31, (3, count), generator=generator)
    top, left = draws[0] % (2 * reach_y + 1), draws[1] % (2 * reach_x + 1)
    rows = (top[:, None] + torch.arange(height)).to(images.device)  # (B, H)
    columns = left[:, None] + torch.arange(width)  # (B, W)
    if flip:
        mirror = (draws[2] % 2).bool()[:, None]
        columns = torch.where(mirror, columns.flip(1), columns)
    columns = columns.to(images.device)
    image = torch.arange(count, device=images.device)
    # One gather: index of image, row and column; channels come along.
    return (
        padded.permute(0, 2, 3, 1)[image[:, None, None], rows[:, :, None], columns[:, None, :]]
        .permute(0, 3, 1, 2)
        .reshape(count, channels, height, width)
    )


def predict(model: nn.Module, inputs: torch.Tensor, compute: Compute, batch: int = 1000) -> torch.Tensor:
    """A model's outputs on many inputs, in evaluation mode, without gradients: ``(N, ...)`` float32."""
    training = model.training
    model.eval()
    with torch.no_grad(), compute.autocast():
        outputs = torch.cat([model(part).float() for part in torch.split(inputs, batch)])
    model.train(training)
    return outputs
