"""Local training: the models of a group of nodes, each trained on its own node's data, G steps at a time.

One loop serves every method, task and engine. Nodes of unequal size take their own number of steps, each
with its own cosine schedule. Nodes with more steps come first in the stack, so that finished nodes fall off
its end. A deployed node trains a few steps at a time before the first query, so that it can be stopped in
between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fedstill.core.compute import Compute, copy_to_device
from fedstill.core.cuda_graphs import CudaGraphStep, ModelAndOptimizerTensors, make_capturable
from fedstill.core.errors import ArgumentError, NodeFault
from fedstill.data.augmentation import augment_examples, sample_augmentation
from fedstill.models.module_utils import in_mode
from fedstill.node import dp_training
from fedstill.node.dp_training import Report
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup, stack_tensors
from fedstill.protocol.local_config import FULL_TRAINING, LocalConfig, Span, cosine_lr, set_lr
from fedstill.tasks import Task

# One step of the nodes still in training: group, step number, inputs (G, B, ...) and targets (G, B, ...)
# to the losses (G,) whose gradients it has used.
TrainStep = Callable[[NodeGroup, int, torch.Tensor, torch.Tensor], torch.Tensor]


MIN_STEPS_TO_CAPTURE = 50  # steps from which capturing a CUDA graph pays off


def make_optimizer(parameters: Sequence[nn.Parameter], config: LocalConfig) -> torch.optim.Optimizer:
    """Return the optimizer of local training for one network's parameters."""
    if config.optimizer == "adam":
        return torch.optim.Adam(parameters, config.lr, weight_decay=config.weight_decay, fused=True)
    return torch.optim.SGD(
        parameters, config.lr, config.momentum, weight_decay=config.weight_decay, fused=True
    )


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
        roles: roles of the networks that ``train_step`` trains. All others stay in evaluation mode.
        purpose: name of the steps' random streams.

    Returns:
        Number of steps of the span done in total.
    """
    private = nodes[0].dp_sgd_parameters.get("model")
    if private is not None:
        if train_step is not None or len(nodes) > 1:
            option = f"privacy of {nodes[0].name}"
            raise ArgumentError(option, "dp-sgd", "a method that trains on the task's loss")
        arguments = (nodes[0], task, config, compute)
        position: dict[str, Any] = {"span": span, "start": start, "steps": steps}
        return dp_training.train_privately(*arguments, dp=private, report=report, purpose=purpose, **position)
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
        train_step = make_task_loss_step(task, config)
        if (
            len(nodes) == 1
            and lengths[0] >= MIN_STEPS_TO_CAPTURE
            and compute.uses_cuda_graphs(nodes[0].model)
        ):
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


def capture_train_step(node: Node, compute: Compute, train_step: TrainStep) -> TrainStep:
    """Return a training step of one node's model as a CUDA graph, kept until its training ends."""
    optimizer = node.optimizers["model"]
    make_capturable(optimizer)
    if node.captured_step is None:

        def one_step(inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"losses": train_step(NodeGroup([node]), 0, inputs, targets)}

        node.captured_step = CudaGraphStep(
            one_step, ModelAndOptimizerTensors([node.model], [optimizer]), compute.cuda_graphs
        )
    graph = node.captured_step
    return lambda group, one_step, inputs, targets: graph(inputs=inputs, targets=targets)["losses"]


def make_task_loss_step(task: Task, config: LocalConfig) -> TrainStep:
    """Return a training step of each model on the task's loss."""

    def train_step(group: NodeGroup, step: int, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = task.loss(group.module("model")(inputs), targets, config.smoothing)  # (G,)
        group.step("model", losses)
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
        indices = [
            self._shuffled_indices(pass_number)[
                max(start - pass_number * total, 0) : end - pass_number * total
            ]
            for pass_number in range(start // total, (end - 1) // total + 1)
        ]
        data = self.node.data.subset(copy_to_device(torch.cat(indices), self.node.data.inputs.device))
        if self.augment == "none":
            return data.inputs, data.targets
        numbers = sample_augmentation(len(data), self.node.random_generator("augment", number))
        return augment_examples(self.task, data.inputs, data.targets, numbers, self.augment)

    def _shuffled_indices(self, pass_number: int) -> torch.Tensor:
        if pass_number not in self._passes:
            self._passes = {
                number: order for number, order in self._passes.items() if number == pass_number - 1
            }
            self._passes[pass_number] = torch.randperm(
                len(self.node.data), generator=self.node.random_generator("pass", pass_number)
            )
        return self._passes[pass_number]


def inference_batch_size(inputs: torch.Tensor) -> int:
    """Return the batch size for inference: 1000, and less for large images.

    On a CPU the batch is so small that activations stay in the cache: a thousand 32 x 32 images at once may
    take twice as long as a dozen batches of 85 (``benchmarks/at_once.py``).

    >>> inference_batch_size(torch.empty(1, 3, 32, 32)), inference_batch_size(torch.empty(1, 3, 256, 256))
    (85, 1)
    """
    max_numbers = 2**18 if inputs.device.type == "cpu" else 2**22
    return max(1, min(1000, max_numbers // max(inputs[0].numel(), 1)))


def predict(model: nn.Module, inputs: torch.Tensor, compute: Compute) -> torch.Tensor:
    """Return a model's outputs for many inputs, in evaluation mode, without gradients: ``(N, ...)``
    float32.
    """
    with in_mode(model, False), torch.no_grad(), compute.autocast():
        return torch.cat([model(part).float() for part in torch.split(inputs, inference_batch_size(inputs))])


def shuffled_batches(count: int, batch: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Return one shuffled pass over ``count`` rows, in batches of nearly equal size up to ``batch``.

    Batch norm cannot train on one row: if ``batch`` is 2 and ``count`` odd, one batch has 3.

    >>> sorted(len(rows) for rows in shuffled_batches(10, 4, torch.Generator()))
    [3, 3, 4]
    >>> sorted(len(rows) for rows in shuffled_batches(5, 2, torch.Generator()))
    [2, 3]
    """
    order = torch.randperm(count, generator=generator)
    pieces = -(-count // batch)
    return torch.tensor_split(order, min(pieces, max(count // 2, 1)) if batch > 1 else pieces)


STEPS_PER_CHUNK = 20  # steps between two checks of the time


# --- training of a deployed node before the first query ---------------------------------------------


class InitialTraining:
    """Progress of a node's local training before the first query.

    Args:
        node: the node.
        span: part of the local training; None: nothing is trained.
        task: the task.
        local: options of local training.
        compute: device and precision.

    Attributes:
        steps: steps done, of all learners together.
        is_done: whether nothing is left to do.
    """

    def __init__(
        self, node: Node, span: Span | None, task: Task, local: LocalConfig, compute: Compute
    ) -> None:
        self._node, self._task, self._local_config, self._compute = node, task, local, compute
        if span is not None:
            attach_optimizers(node.self_or_teachers, local)
            if not any("model" in learner.optimizers for learner in node.self_or_teachers):
                span = None  # frozen by its owner
        self._span, self._is_interrupted = span, False
        self.steps, self.is_done = 0, span is None

    @property
    def is_needed(self) -> bool:
        """True if there is anything to train."""
        return self._span is not None

    @property
    def percent(self) -> int:
        """Progress in tens of percent; more digits would reveal the number of examples."""
        return 100 if self.is_done else 10 * (10 * self.steps // self._total_steps())

    def run(self, deadline: float, after_chunk: Callable[[], None]) -> bool:
        """Train until a deadline (``time.monotonic()``), or to the end; call ``after_chunk`` after every
        few steps.

        Returns:
            Whether all steps are done. The caller sets ``is_done`` after saving the state, since repeated
                training would differ.

        Raises:
            NodeFault: an earlier call failed: its steps would be repeated on top.
        """
        total = self._total_steps()
        while self._span is not None and self.steps < total and time.monotonic() < deadline:
            self._train_chunk(self._span)
            after_chunk()
        return self.steps >= total

    def drop_optimizers(self) -> None:
        """Drop the optimizers after training."""
        for learner in self._node.self_or_teachers:
            learner.optimizers.pop("model", None)

    def resume(self, steps: Any, is_done: Any) -> None:
        """Continue from a saved state; ValueError if it is impossible."""
        if type(steps) is not int or type(is_done) is not bool or not 0 <= steps <= self._total_steps():
            raise ValueError(f"{steps!r} steps of {self._total_steps()}, done: {is_done!r}")
        self.steps, self.is_done = steps, is_done
        if is_done:
            self.drop_optimizers()

    def _steps_of(self, learner: Node) -> range:
        return (
            range(0) if self._span is None else self._span.steps(self._local_config.steps(len(learner.data)))
        )

    def _total_steps(self) -> int:
        return sum(len(self._steps_of(learner)) for learner in self._node.self_or_teachers)

    def _train_chunk(self, span: Span) -> None:
        """Take a few steps of the current learner."""
        if self._is_interrupted:
            raise NodeFault(
                self._node.name, "train_locally", "its training failed half-way: restart the node"
            )
        done_before = 0
        for learner in self._node.self_or_teachers:
            own_steps = len(self._steps_of(learner))
            if self.steps < done_before + own_steps:
                start, arguments = self.steps - done_before, (self._task, self._local_config, self._compute)
                self._is_interrupted = True
                done = train([learner], *arguments, span=span, start=start, steps=STEPS_PER_CHUNK)
                self.steps, self._is_interrupted = done_before + done, False
                return
            done_before += own_steps
