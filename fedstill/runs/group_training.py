"""Local training of groups of nodes in chunks of steps, several groups at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedstill.core.compute import Compute
from fedstill.core.cuda_graphs import uses_global_rng
from fedstill.node import local_training
from fedstill.node.architectures import stacking_key
from fedstill.node.node import Node
from fedstill.protocol.local_config import LocalConfig, Span
from fedstill.tasks import Task

CHUNK = 50  # local steps between two checks whether a checkpoint is due
LOG_INTERVAL = 50  # local steps between two logged losses; each node's last loss is logged, too


class GroupTraining:
    """Trains groups of nodes from the steps that they have reached to the end of a span.

    Args:
        groups: the nodes, in the groups in which they are computed.
        phase: name of the phase in metrics.
        span: the part of each node's steps to take.
        task: the task.
        local: options of local training.
        compute: device, precision and threads.
        done: steps that each group has reached, by the name of its first node. It is updated.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Node]],
        phase: str,
        span: Span,
        task: Task,
        local: LocalConfig,
        compute: Compute,
        done: dict[str, int],
    ) -> None:
        self._groups, self._phase, self._span, self._done = groups, phase, span, done
        self._task, self._local, self._compute = task, local, compute
        nodes = [node for group in groups for node in group]
        self._last_steps = {node.name: len(span.steps(local.steps(len(node.data)))) for node in nodes}
        self._group_ends = [max(self._last_steps[node.name] for node in group) for group in groups]
        self._architectures = [(phase, stacking_key(group[0].model)) for group in groups]
        self._random = [uses_global_rng(group[0].model) for group in groups]

    def remaining_steps(self) -> Mapping[int, int]:
        """Return the number of remaining steps of each unfinished group, by its index."""
        done = [self._done.get(group[0].name, 0) for group in self._groups]
        return {at: end - done[at] for at, end in enumerate(self._group_ends) if end > done[at]}

    def advance(self) -> list[dict[str, Any]]:
        """Train as many groups as there are workers by up to :data:`CHUNK` steps; return lines of metrics."""
        left, workers = self.remaining_steps(), self._compute.workers
        # The groups with most remaining steps first, so that all cores are busy until the end.
        batch = sorted(left, key=lambda index: -left[index])[: workers.count]
        if any(
            self._groups[index][0].dp_sgd_parameters for index in batch
        ):  # whose training is charged in order
            batch = batch[:1]
        now = [self._groups[index] for index in batch]
        results = (
            map(self._train_chunk, now)
            if len(self._groups) == 1
            else workers.map(
                self._train_chunk,
                now,
                [self._architectures[index] for index in batch],
                [self._random[index] for index in batch],
            )
        )
        new_lines: list[dict[str, Any]] = []
        for group, (done, lines) in zip(now, results, strict=True):
            self._done[group[0].name] = done
            new_lines += lines
        return new_lines

    def _train_chunk(self, nodes: Sequence[Node]) -> tuple[int, list[dict[str, Any]]]:
        lines = []

        def report(nodes: Sequence[Node], step: int, losses: torch.Tensor) -> None:
            due = [
                at
                for at, node in enumerate(nodes)
                if step % LOG_INTERVAL == 0 or step == self._last_steps[node.name]
            ]
            for at, loss in zip(
                due, losses[due].tolist() if due else (), strict=True
            ):  # otherwise avoid waiting for the device
                line = {"phase": self._phase, "node": nodes[at].name, "step": step, "loss": round(loss, 5)}
                lines.append(line)

        done = local_training.train(
            nodes,
            self._task,
            self._local,
            self._compute,
            span=self._span,
            start=self._done.get(nodes[0].name, 0),
            steps=CHUNK,
            report=report,
        )
        return done, lines
