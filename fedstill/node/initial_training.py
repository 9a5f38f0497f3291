"""Local training of a deployed node before its first query, a few steps at a time: it can be stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fedstill.core.compute import Compute
from fedstill.core.errors import NodeFault
from fedstill.node.local_training import attach_optimizers, train
from fedstill.node.node import Node
from fedstill.protocol.local_config import LocalConfig, Span
from fedstill.tasks import Task

STEPS_PER_CHUNK = 20  # steps between two checks of the time


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
