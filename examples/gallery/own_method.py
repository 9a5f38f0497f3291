"""
A method of your own
=====================

A method is one frozen dataclass. Its fields are its options, functions marked with ``@query`` run at the
nodes, ``begin`` and ``turn`` at the server. This one is the simplest of distillation: ask all nodes once
for their logits on public inputs, and let the student learn the mean of their softened answers. It runs
under the same gates, budgets and audit logs as all others, on every engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import fedstill
from fedstill.methods import Method, Needs, NodeGroup, Server, payload_kinds, query, torch_generator
from fedstill.models import SmallCNN


@dataclass
class State:
    """What changes at the server from epoch to epoch."""

    adam: torch.optim.Optimizer
    means: torch.Tensor  # the nodes' mean answer, (N, C)


@dataclass(frozen=True, kw_only=True)
class MeanTeacher(Method):
    """One query, then epochs of distillation."""

    title: ClassVar[str] = "Mean teacher"
    unit: ClassVar[str] = "epoch"

    rounds: int = 40
    """Epochs of the student on the public inputs."""
    temperature: float = 3.0
    """By which logits are divided before they are averaged."""

    def needs(self) -> Needs:
        """Public inputs."""
        return Needs(public=True)

    @query(releases={"logits": payload_kinds.LOGITS}, rows=lambda self, setting: len(at.public.inputs))
    def answer(self, nodes: NodeGroup) -> Mapping[str, torch.Tensor]:
        """At the nodes: z_k = T_k(x) of all public x, (G, N, C)."""
        x = nodes.setting.public.inputs.expand(len(nodes.nodes), *nodes.setting.public.inputs.shape)
        with torch.no_grad():
            return {"logits": nodes.module("model")(x)}

    def init_state(self, server: Server) -> State:
        """At the server, before its first turn. Nobody is asked yet."""
        return State(torch.optim.Adam(server.student.parameters(), 2e-3), torch.empty(0))

    def step(self, server: Server, state: State, t: int) -> Mapping[str, float]:
        """At the server, an epoch."""
        if t == 0:
            z = server.query("answer")["logits"]  # (K, N, C)
            state.targets = (z / self.temperature).softmax(2).mean(0)
        server.student.train()
        draw = torch_generator(server.seed, "order", t)
        for rows in torch.randperm(len(state.targets), generator=draw).split(32):
            z = server.student(server.public.inputs[rows]) / self.temperature
            loss = F.kl_div(z.log_softmax(1), state.targets[rows], reduction="batchmean")
            state.adam.zero_grad()
            loss.backward()
            state.adam.step()
        return {"student": loss.item()}


# %%
# Next to two methods that come with fedstill, on the same data, with the same local training. What a method
# that is not fedstill's own releases, the nodes' owners have to allow by name, as they have to allow
# FedAvg's parameters.

digits = load_digits()
x = torch.tensor(digits.images / 8 - 1).float().unsqueeze(1)  # (N, 1, 8, 8), from -1 to 1
y = torch.tensor(digits.target)
parts = y[:1000].argsort(stable=True).view(20, 50)  # runs of like digits, dealt out to four nodes
data = [(x[part], y[part]) for part in (parts[node::4].flatten() for node in range(4))]


def run(method: Method, **given: Any) -> Mapping[str, Any]:
    """The figures of one method."""
    torch.manual_seed(0)
    networks = [SmallCNN((1, 8, 8), 10, width=8) for _ in range(5)]
    first = networks[4].state_dict()
    for network in networks:  # FedAvg begins with equal ones, so all do
        network.load_state_dict(first)
    local = fedstill.LocalConfig(epochs=10)
    test = (x[1300:], y[1300:])
    return fedstill.distil(
        data, networks[:4], networks[4], test, 10, method=method, local=local, public=x[1000:1300], **given
    ).metrics


runs = {
    "FedAvg": run(fedstill.FedAvg(rounds=10), policies=[fedstill.PolicyConfig(outputs_only=False)] * 4),
    "FedKD": run(fedstill.FedKD(epochs=40)),
    "mine": run(MeanTeacher(), policies=[fedstill.PolicyConfig(kinds=(f"{__name__}: logits",))] * 4),
}

# %%
# What each reaches, and what it sends; below, what a node reaches alone.

alone = runs["mine"]["standalone"]["accuracy"]["mean"]
print(f"a node alone: {alone:.1f} %, mine: {runs['mine']['accuracy']:.1f} %")
metric, axis = plt.subplots(figsize=(6, 3))
axis.axhline(alone, color="C7", ls="--", label="a node alone")
for name, metrics in runs.items():
    axis.semilogx(metrics["bytes"]["up"] / 1e3, metrics["accuracy"], "o", label=name, ms=9)
axis.set(xlabel="kB that left the nodes", ylabel="accuracy, percent", ylim=(0, 100))
axis.legend()
metric.tight_layout()
plt.show()
