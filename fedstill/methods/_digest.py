"""Digesting what was agreed on: learning on public data to answer as a consensus does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Literal

import torch

from fedstill.core.seeds import torch_generator
from fedstill.federation.contract import Answers
from fedstill.methods._public import AT_ONCE, Batch, Distance, distil, known, optimiser_of, passes
from fedstill.methods._weights import WeighsNodes
from fedstill.methods.server import Server
from fedstill.node.group import Group, stack
from fedstill.tasks import Task


def learns(nodes: Group) -> bool:
    """Whether the owner left anything in the model to train; otherwise it only answers."""
    node = nodes.nodes[0]
    return any(name not in node.frozen["model"] for name, _ in node.model.named_parameters())


def by_node(scores: Answers) -> dict[str, torch.Tensor]:
    """Class scores ``(B, C, ...)`` by node."""
    return dict(zip(scores.nodes, scores["logits"], strict=True))


class Digests(WeighsNodes):
    """Nodes and student learn to match targets on public data."""

    distance: Literal["l1", "l2", "kl"]
    tau: float
    digest_batch: int
    digest_lr: float
    student_epochs: int

    def mismatch(self, task: Task, z: torch.Tensor, consensus: torch.Tensor) -> torch.Tensor:
        """What digesting descends: class scores and consensus ``(B, C, ...)`` to ``(B,)``."""
        if self.distance == "l1":
            return (z - consensus).abs().flatten(1).mean(1)
        return task.distance(z, consensus, self.tau if self.distance == "kl" else math.inf)

    def approach(
        self, nodes: Group, x: torch.Tensor, consensus: torch.Tensor, epochs: int, *purpose: str | int
    ) -> None:
        """Have each node's model approach a consensus ``(N, C, ...)`` about public examples."""
        task = nodes.at.task

        def losses(z: torch.Tensor, consensus: torch.Tensor) -> torch.Tensor:
            each = self.mismatch(task, z.flatten(0, 1), consensus.flatten(0, 1))
            return each.view(len(z), -1).mean(1)  # (G,)

        self.study(nodes, x, consensus, losses, epochs, *purpose)

    def study(
        self,
        nodes: Group,
        x: torch.Tensor,
        targets: torch.Tensor,
        losses: Distance,
        epochs: int,
        *purpose: str | int,
    ) -> None:
        """Train each node's model on the same public examples, each in its own order, with a new Adam.

        Args:
            nodes: whose models learn.
            x, targets: the examples, ``(N, ...)``.
            losses: outputs and targets ``(G, B, ...)`` to ``(G,)``.
            epochs: passes.
            purpose: of what is drawn.
        """
        bench, first = nodes.bench("model"), nodes.nodes[0]
        bench.train(True)
        optimisers = [optimiser_of(node.model, self.digest_lr) for node in nodes.nodes]
        for epoch in range(epochs):
            orders = [passes(len(x), self.digest_batch, node.draw(*purpose, epoch)) for node in nodes.nodes]
            for step, rows in enumerate(zip(*orders, strict=True)):
                chosen = stack(rows).to(x.device)  # (G, B)
                with (
                    torch.enable_grad(),
                    nodes.at.compute.step(first.seed, first.name, *purpose, epoch, step),
                ):
                    bench.backward(losses(bench(x[chosen]), targets[chosen]))
                for optimiser in optimisers:
                    optimiser.step()
        bench.train(False)

    def rehearse(self, nodes: Group) -> None:
        """A pass over some public examples."""
        x = known(nodes.at.public).inputs[:AT_ONCE]
        shape = nodes.at.task.outputs(tuple(x.shape[1:]))
        if learns(nodes):
            self.approach(nodes, x, torch.zeros(len(x), *shape, device=x.device), 1, "rehearse")

    def listen(
        self,
        server: Server,
        optimiser: torch.optim.Optimizer,
        rows: torch.Tensor,
        consensus: torch.Tensor,
        t: int,
    ) -> float:
        """Round ``t`` of the student, which digests a consensus as nodes do; its mean distance from it."""
        server.student.train()
        return distil(
            server.student,
            optimiser,
            self.batches(server, rows, consensus, t),
            partial(self.mismatch, server.task),
            server.compute,
            server.seed,
            "student",
            t,
        )

    def batches(self, server: Server, rows: torch.Tensor, consensus: torch.Tensor, t: int) -> Iterator[Batch]:
        """The student's passes over a round's public examples."""
        x = known(server.public).inputs[rows.long().to(server.device)]
        for epoch in range(self.student_epochs):
            draw = torch_generator(server.seed, "student's order", t, epoch)
            for part in passes(len(x), self.digest_batch, draw):
                chosen = part.to(x.device)
                yield x[chosen], consensus[chosen]
