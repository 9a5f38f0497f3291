"""
Your own method
===============

A method is one class in one file. It declares which queries it sends and what nodes release; fedstill does
the rest: policies, privacy budgets, audit logs, byte counts, resuming, reports, and deployment. In this
tutorial you write a method for federated distillation, check it, and compare it with two others over three
seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

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

# %%
# The idea
# --------
#
# The plain ensemble averages what all nodes predict for a public image. Nodes that have never seen its class
# disturb the average. Our method trusts certain nodes more: for each image, a node's weight falls with the
# entropy of its prediction, ``w_k(x) = softmax_k(-sharpness * entropy(p_k(x)))``. The student learns from the
# weighted mean.
#
# The class
# ---------
#
# Fields of the frozen dataclass are the method's options. ``queries`` declares each query with the payload
# kind of what it releases. ``predict`` runs at the nodes; ``init_state`` and ``step`` run at the server.
# Everything that changes during a run is in ``State``, so that a run can stop and resume. Random numbers come
# from named, seeded generators.


@dataclass
class State:
    """Server state of the method."""

    adam: torch.optim.Optimizer
    targets: torch.Tensor  # weighted mean of the nodes' predictions (N, C)


@dataclass(frozen=True, kw_only=True)
class CertainTeachers(Method):
    """One query about all public inputs, then epochs of distillation from the certain nodes."""

    title: ClassVar[str] = "Certain teachers"
    unit: ClassVar[str] = "epoch"

    rounds: int = 60
    """Epochs of the student on the public inputs."""
    sharpness: float = 5.0
    """Nodes are weighted by exp(-sharpness * entropy); 0: equal weights."""

    def needs(self) -> Needs:
        """Return the requirements: public inputs."""
        return Needs(public=True)

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        """Return the queries: one, sent once, that releases logits and reads no records but by the model."""
        rows = 0 if setting.public is None else len(setting.public)
        yield Query(
            self.predict,
            releases={"logits": payload_kinds.LOGITS},
            times=1,
            rows=rows,
            depends_on_records=(),
            stackable=True,
        )

    def predict(self, node: NodeView) -> Tensors:
        """Return the logits of all public inputs, (N, C); runs at a node."""
        return {"logits": node.predict(node.public.inputs)}

    def init_state(self, server: Server) -> State:
        """Return the initial state; runs at the server before the first step, without queries."""
        return State(adam(server.student, lr=2e-3), torch.empty(0))

    def step(self, server: Server, state: State, t: int) -> Mapping[str, float]:
        """Run one epoch at the server."""
        if t == 0:
            z = server.query("predict")["logits"]  # (K, N, C)
            entropy = -(z.softmax(2) * z.log_softmax(2)).sum(2)  # (K, N)
            weights = (-self.sharpness * entropy).softmax(0)  # (K, N)
            state.targets = (weights.unsqueeze(2) * z.softmax(2)).sum(0)  # (N, C)
        server.student.train()
        generator = torch_generator(server.seed, "order", t)
        for rows in torch.randperm(len(state.targets), generator=generator).split(32):
            log_p = server.student(server.public.inputs[rows]).log_softmax(1)
            loss = F.kl_div(log_p, state.targets[rows], reduction="batchmean")
            descend(state.adam, loss)
        return {"student": loss.item()}


# %%
# The check
# ---------
#
# ``check_method`` runs the method in a small federation, in seconds, and compares what it declares with what
# it does: number of queries and rows, records read, a restored state, a resumed run, nodes computed one by
# one or together. A mistake raises an error that names it, for example a State without the targets.

fedstill.check_method(CertainTeachers(rounds=3))

# %%
# The comparison
# --------------
#
# Each seed has its own split of the digits, its own initial weights and its own order of examples; within a
# seed all methods have the same nodes, which train in the same way. An owner must allow the logits of a
# method that is not built in by the name of its module, and parameters for FedAvg.

allowed = fedstill.PolicyConfig(outputs_only=False, kinds=(f"{__name__}: logits",))
methods = {
    "FedAvg": fedstill.FedAvg(rounds=10),
    "FedKD": fedstill.FedKD(student=fedstill.StudentTraining(epochs=60)),
    "equal weights": CertainTeachers(sharpness=0.0),
    "certain teachers": CertainTeachers(),
}
accuracy, kilobytes = {name: [] for name in methods}, {}
for seed in range(3):
    data = fedstill.datasets.digits(nodes=5, alpha=0.2, public="held-out", seed=seed)
    for name, method in methods.items():
        torch.manual_seed(seed)
        outcome = fedstill.distil(
            models=[SmallCNN(data.shape, 10, width=8) for _ in data.nodes],
            student=SmallCNN(data.shape, 10, width=8),
            method=method,
            local=fedstill.LocalConfig(epochs=15, lr=2e-3),
            policies=[allowed] * 5,
            seed=seed,
            every=0,
            **data.arguments(),
        )
        accuracy[name].append(outcome.accuracy)
        kilobytes[name] = outcome.result["bytes"]["up"] / 1e3

# %%
# Mean and range over the seeds, and bytes of the last one. With ``sharpness=0`` the same code is the plain
# average, so the two last rows differ by our idea only. Differences that are smaller than the range over
# seeds say nothing: use more seeds, and compare in pairs, seed by seed.

for name, values in accuracy.items():
    mean = sum(values) / 3
    spread = f"{min(values):.1f} to {max(values):.1f}"
    print(f"{name:17} {mean:5.1f} % ({spread}), {kilobytes[name]:6.1f} kB released")
pairs = zip(accuracy["certain teachers"], accuracy["equal weights"], strict=True)
print("certain minus equal, by seed:", [f"{ours - theirs:+.1f}" for ours, theirs in pairs])

figure, axis = plt.subplots(figsize=(6, 2.6))
for row, values in enumerate(accuracy.values()):
    axis.plot(values, [row] * 3, "o", color="C7")
    axis.plot(sum(values) / 3, row, "|", ms=18, mew=3, color="C0")
axis.set_yticks(range(len(methods)), list(methods))
axis.set(xlabel="accuracy, percent: three seeds and their mean")
axis.invert_yaxis()
figure.tight_layout()
plt.show()

# %%
# Save the class in a file, and every command takes it: ``fedstill run demo --method.name
# my_file:CertainTeachers``. The guide to `custom methods <../../docs/custom-method.md>`_ has all parts of
# ``node`` and ``server``, privacy and secure aggregation; ``fedstill.compare_methods`` and `many runs
# <../../docs/many-runs.md>`_ do comparisons like this one with tables.
