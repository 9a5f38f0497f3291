"""
Custom method
=============

A method is one frozen dataclass. Its fields are its options, ``queries`` declares the functions that run at
the nodes, ``init_state`` and ``step`` run at the server. This method is the simplest distillation: it
queries all nodes once for their logits on public inputs, and the student trains on the mean of their
softened responses. It runs with the same gates, budgets and audit logs as all methods, on every engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import fedstill
from fedstill.methods import (
    Method,
    Needs,
    NodeSetting,
    NodeView,
    Query,
    Server,
    Tensors,
    adam,
    descend,
    payload_kinds,
    torch_generator,
)
from fedstill.models import SmallCNN


@dataclass
class State:
    """Server state of the method."""

    adam: torch.optim.Optimizer
    targets: torch.Tensor  # mean of the nodes' softened responses (N, C)


@dataclass(frozen=True, kw_only=True)
class MeanTeacher(Method):
    """One query, then epochs of distillation."""

    title: ClassVar[str] = "Mean teacher"
    unit: ClassVar[str] = "epoch"

    rounds: int = 40
    """Epochs of the student on the public inputs."""
    temperature: float = 3.0
    """Temperature of the nodes' and the student's logits."""

    def needs(self) -> Needs:
        """Return the requirements: public inputs."""
        return Needs(public=True)

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        """Return the queries: one, which releases logits."""
        yield Query(self.predict, releases={"logits": payload_kinds.LOGITS}, stackable=True)

    def predict(self, node: NodeView) -> Tensors:
        """Return z_k = T_k(x) of all public x, (N, C); runs at a node."""
        return {"logits": node.predict(node.public.inputs)}

    def init_state(self, server: Server) -> State:
        """Return the initial state; runs at the server before the first step, without queries."""
        return State(adam(server.student, lr=2e-3), torch.empty(0))

    def step(self, server: Server, state: State, t: int) -> Mapping[str, float]:
        """Run one epoch at the server."""
        if t == 0:
            z = server.query("predict")["logits"]  # (K, N, C)
            state.targets = (z / self.temperature).softmax(2).mean(0)
        server.student.train()
        generator = torch_generator(server.seed, "order", t)
        for rows in torch.randperm(len(state.targets), generator=generator).split(32):
            z = server.student(server.public.inputs[rows]) / self.temperature
            loss = F.kl_div(z.log_softmax(1), state.targets[rows], reduction="batchmean")
            descend(state.adam, loss)
        return {"student": loss.item()}


# %%
# Compare it with two methods of fedstill, on the same data, with the same local training. The nodes' owners
# have to allow the releases of a custom method by name, as they have to allow FedAvg's parameters.

digits = load_digits()
x = torch.tensor(digits.images / 8 - 1).float().unsqueeze(1)  # (N, 1, 8, 8), from -1 to 1
y = torch.tensor(digits.target)
parts = y[:1000].argsort(stable=True).view(20, 50)  # blocks of equal digits, distributed over four nodes
data = [(x[part], y[part]) for part in (parts[node::4].flatten() for node in range(4))]


def run(method: Method, **given: Any) -> Mapping[str, Any]:
    """Return the metrics of one method."""
    torch.manual_seed(0)
    networks = [SmallCNN((1, 8, 8), 10, width=8) for _ in range(5)]
    first = networks[4].state_dict()
    for network in networks:  # FedAvg needs equal initial weights
        network.load_state_dict(first)
    local = fedstill.LocalConfig(epochs=10)
    test = (x[1300:], y[1300:])
    return fedstill.distil(
        data, networks[:4], networks[4], test, 10, method=method, local=local, public=x[1000:1300], **given
    ).result


runs = {
    "FedAvg": run(fedstill.FedAvg(rounds=10), policies=[fedstill.PolicyConfig(outputs_only=False)] * 4),
    "FedKD": run(fedstill.FedKD(student=fedstill.StudentTraining(epochs=40))),
    "custom": run(MeanTeacher(), policies=[fedstill.PolicyConfig(kinds=(f"{__name__}: logits",))] * 4),
}

# %%
# Accuracy and released bytes of each method; the dashed line is a standalone node.

standalone = runs["custom"]["standalone"]["accuracy"]["mean"]
print(f"a node standalone: {standalone:.1f} %, custom: {runs['custom']['accuracy']:.1f} %")
figure, axis = plt.subplots(figsize=(6, 3))
axis.axhline(standalone, color="C7", ls="--", label="a node alone")
for name, metrics in runs.items():
    axis.semilogx(metrics["bytes"]["up"] / 1e3, metrics["accuracy"], "o", label=name, ms=9)
axis.set(xlabel="released kB", ylabel="accuracy, percent", ylim=(0, 100))
axis.legend()
figure.tight_layout()
plt.show()
