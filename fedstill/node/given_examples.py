"""Training of nodes' models on given examples in place of their own, such as public data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fedstill.core.compute import Compute
from fedstill.core.dataset import shuffled_batches
from fedstill.core.errors import QueryRefused
from fedstill.node.local_training import make_optimizer
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup
from fedstill.node.stacked_modules import stack_tensors
from fedstill.protocol.local_config import LocalConfig


@dataclass(frozen=True)
class GivenExamples:
    """Examples that are the same for all nodes, and a training on them with a new Adam.

    Args:
        x: inputs ``(N, ...)``.
        targets: their targets ``(N, ...)``.
        purpose: names the random stream of the order.
        epochs: passes over the examples.
        batch: examples in a batch.
        lr: learning rate.
    """

    x: torch.Tensor
    targets: torch.Tensor
    purpose: tuple[str | int, ...]
    epochs: int
    batch: int
    lr: float

    def train(
        self,
        group: NodeGroup,
        nodes: Sequence[Node],
        losses_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        compute: Compute,
    ) -> None:
        """Train the models of the first nodes of a group.

        Args:
            group: the group.
            nodes: its first nodes.
            losses_of: maps outputs ``(G, B, C, ...)`` and targets ``(G, B, ...)`` to losses ``(G,)``.
            compute: device and precision.

        Raises:
            QueryRefused: a model trains privately, and the query's function has read its node's records, on
                which the examples could depend.
        """
        for node in nodes:
            if "model" in node.dp_sgd_parameters and node.records_read:
                rule = "privacy: its model trains with DP-SGD, and here without, after a read of its records"
                raise QueryRefused(node.name, "train_on", rule)
        model, first = group.module("model"), nodes[0]
        model.train(True)
        adam = LocalConfig(optimizer="adam", lr=self.lr)
        optimizers = [
            make_optimizer([w for w in node.model.parameters() if w.requires_grad], adam) for node in nodes
        ]
        for epoch in range(self.epochs):
            orders = [
                shuffled_batches(len(self.x), self.batch, node.random_generator(*self.purpose, epoch))
                for node in nodes
            ]
            for step, rows in enumerate(zip(*orders, strict=True)):
                chosen = stack_tensors(rows).to(self.x.device)  # (G, B)
                names = (first.name, *self.purpose, epoch, step)
                with torch.enable_grad(), compute.step(first.seed, *names):
                    model.backward(losses_of(model(self.x[chosen]), self.targets[chosen]))
                for optimizer in optimizers:
                    optimizer.step()
        model.train(False)
