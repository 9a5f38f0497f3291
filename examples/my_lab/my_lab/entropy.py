"""FedMD with weights by entropy: nodes train toward the predictions of the nodes that are certain.

Li, Wang: "FedMD: Heterogenous Federated Learning via Model Distillation", 2019, averages the nodes' logits on
public data. Here a node with uncertain predictions for an input has a small weight for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedstill.methods import (
    Method,
    Needs,
    NodeSetting,
    NodeView,
    Query,
    Responses,
    Server,
    Span,
    SpanOfRound,
    Tensors,
    adam,
    descend,
    payload_kinds,
    torch_generator,
)


@dataclass
class State:
    """Server state: all that changes from round to round, besides the student."""

    optimizer: torch.optim.Optimizer
    consensus: torch.Tensor  # weighted mean of the nodes' logits  (N, C)


@dataclass(frozen=True, kw_only=True)
class EntropyFedMD(Method):
    """FedMD with weights by entropy."""

    title: ClassVar[str] = "Entropy FedMD"
    initial_training: ClassVar[None] = None  # nodes train in the rounds
    has_ensemble: ClassVar[bool] = True

    rounds: int = 10
    """Rounds; the local training is divided among them."""
    sharpness: float = 1.0
    """Nodes are weighted by exp(-sharpness * entropy); 0: equal weights."""
    digest_lr: float = 1e-3
    """Learning rate of nodes and student for the consensus."""

    def needs(self) -> Needs:
        return Needs(public=True, trainable=True, single_label=True)

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        yield Query(
            self.learn,
            sends={"consensus": payload_kinds.LOGITS, "round": payload_kinds.SCHEDULE},
            releases={"logits": payload_kinds.LOGITS},
            times=self.rounds,
            rows=0 if setting.public is None else len(setting.public),
            depends_on_records=(),
            span=SpanOfRound(self.rounds),
            stackable=True,
        )

    # --- at a node --------------------------------------------------------------------------------------

    def learn(self, node: NodeView, consensus: torch.Tensor, round: int) -> Tensors:
        """Train toward the consensus, then on the node's own data; return its logits on public inputs."""
        x = node.public.inputs
        if round > 0:  # in the first round there is no consensus yet
            node.train_on(x, consensus, self.distance, "digest", round, epochs=1, batch=32, lr=self.digest_lr)
        node.train(Span.part(round, self.rounds))
        return {"logits": node.predict(x)}  # (N, C)

    def preview_response(self, node: NodeView, x: torch.Tensor, z: torch.Tensor) -> Tensors:
        return {"logits": z}

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> State:
        consensus = torch.zeros(len(server.public), server.task.classes, device=server.device)
        return State(adam(server.student, self.digest_lr), consensus)

    def step(self, server: Server, state: State, t: int) -> Mapping[str, float]:
        responses = server.query("learn", consensus=state.consensus, round=t)
        state.consensus = self.ensemble_responses(server, state, responses)  # (N, C)
        server.student.train()
        order = torch.randperm(len(state.consensus), generator=torch_generator(server.seed, "order", t))
        for step, rows in enumerate(order.to(server.device).split(32)):
            with server.compute.step(server.seed, "student", t, step):
                z = server.student(server.public.inputs[rows]).float()
                loss = self.distance(z, state.consensus[rows]).mean()
            descend(state.optimizer, loss)
        return {"student": loss.item()}

    def ensemble_responses(self, server: Server, state: State, responses: Responses) -> torch.Tensor:
        z = responses["logits"]  # (K, N, C)
        entropy = -(z.softmax(2) * z.log_softmax(2)).sum(2)  # (K, N)
        weights = (-self.sharpness * entropy).softmax(0)  # (K, N), of sum 1 for each input
        return (weights.unsqueeze(2) * z).sum(0)

    def distance(self, z: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of logits (B, C) for each input: (B,)."""
        return -(target.softmax(1) * z.log_softmax(1)).sum(1)
