"""FedFTG: losses by hand, a round compared with plain loops, and the labels of the pseudo data."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fedstill.core.compute import Compute
from fedstill.core.seeds import torch_generator
from fedstill.methods._input_generators import GeneratorBatch, GeneratorTraining, LabelGenerator
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fedftg import FedFTG, generator_losses
from fedstill.models.module_utils import load_vector, to_vector
from fedstill.node import local_training
from fedstill.node.node import Node
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.local_config import LocalConfig, Span
from tests.support import small_world
from tests.support.errors import raises_refused
from tests.support.small_world import CLASSES, SEED, TASK, World, few, made, make_nodes, run, same

pytestmark = pytest.mark.usefixtures("steady_adam")

LOCAL = LocalConfig(epochs=2, batch=4, lr=1e-2, augment="none")
CONFIG = FedFTG(
    rounds=2,
    steps=2,
    batch=4,
    generator_steps=2,
    student_steps=3,
    fidelity=0.7,
    diversity=0.3,
    lr=1e-2,
    lr_end=1e-2,
    generator=LabelGenerator(noise=6, width=4),
)


def world(config: Any, spec: str = "mlp:8", policy: PolicyConfig = small_world.OPEN) -> World:
    nodes = make_nodes([made(spec, index) for index in range(3)], classes=few, policy=policy)
    return small_world.world(config, nodes, made(spec, "student"), local=LOCAL)


def trained(node: Node, here: World) -> Node:
    """Return a copy of a node after its training in round 0, without a federation."""
    alone = Node(node.name, node.data, copy.deepcopy(here.server.student), node.gate, node.seed)
    local_training.attach_optimizers([alone], LOCAL)
    local_training.train([alone], TASK, LOCAL, Compute(), span=Span(0, 1, 2))
    return alone


def test_losses_by_hand() -> None:
    # Counts (3, 0) and (1, 2): nodes 0 and 1 weigh 3/4 and 1/4 for class 0, and 0 and 1 for class 1.
    alpha, y = torch.tensor([[0.75, 0.0], [0.25, 1.0]]), torch.tensor([0, 1])
    four = math.log(4)  # probabilities 0.8 and 0.2
    d_k = torch.tensor([[[four, 0.0], [9.0, -9.0]], [[0.0, 0.0], [0.0, four]]])
    d = torch.zeros(2, 2)  # probabilities 0.5 and 0.5
    x, z = torch.tensor([[[[0.0]]], [[[1.0]]]]), torch.tensor([[0.0], [2.0]])
    # KL((0.8, 0.2) || (0.5, 0.5)) = 0.8 ln 1.6 + 0.2 ln 0.4 = 0.19274.
    L_md = (0.75 * 0.19274 + 1.0 * 0.19274) / 2
    L_cls = (0.75 * 0.22314 + 0.25 * 0.69315 + 1.0 * 0.22314) / 2  # -ln 0.8 and -ln 0.5
    L_dis = 0.36788  # e^(-4/4): the four pairs have |x_j - x_k| |z_j - z_k| = 0, 2, 2, 0
    expected = torch.tensor([L_md, L_cls, L_dis])
    torch.testing.assert_close(generator_losses(alpha, d_k, d, x, z, y), expected, atol=1e-5, rtol=0)


def test_round_equals_plain_implementation() -> None:
    here = world(CONFIG)
    G, D = copy.deepcopy(here.server.state.generator.G), copy.deepcopy(here.server.student)
    D_k = [trained(node, here).model.eval().requires_grad_(False) for node in here.nodes]
    n = torch.stack([TASK.counts(node.data) for node in here.nodes])  # (K, C)
    losses = here.server.step()

    load_vector(D, (n.sum(1) / n.sum()) @ torch.stack([to_vector(each) for each in D_k]))
    g_adam = torch.optim.Adam(G.parameters(), 1e-3, betas=(0.5, 0.999))
    adam = torch.optim.Adam(D.parameters(), 1e-2)
    D.eval()

    def discrepancy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        q, total = D(x).softmax(1), torch.zeros(())
        for k in range(3):
            p = D_k[k](x).softmax(1)
            for b in range(4):
                alpha = n[k, y[b]] / n[:, y[b]].sum()
                total = total + alpha * (p[b] * (p[b] / q[b]).log()).sum() / 4
        return total

    for index in range(2):
        draw = torch_generator(SEED, "imagined", 0, index)
        z = torch.randn(4, 6, generator=draw)
        y = torch.multinomial(n.sum(0), 4, replacement=True, generator=draw)
        w = torch.cat([z, F.one_hot(y, CLASSES).float()], 1)
        for _ in range(2):
            x = G(w)
            L_cls = torch.zeros(())
            for k in range(3):
                for b in range(4):
                    alpha = n[k, y[b]] / n[:, y[b]].sum()
                    L_cls = L_cls - alpha * D_k[k](x).log_softmax(1)[b, y[b]] / 4
            far = torch.stack(
                [(x[i] - x[j]).square().mean().sqrt() * (z[i] - z[j]).square().mean().sqrt()
                 for i in range(4) for j in range(4) if i != j]
            )  # fmt: skip
            L_dis = (-far.sum() / 16).exp()
            g_adam.zero_grad()
            (-discrepancy(x, y) + 0.7 * L_cls + 0.3 * L_dis).backward()
            g_adam.step()
        with torch.no_grad():
            x = G.eval()(w)
        G.train()
        L_md = []
        for _ in range(3):
            adam.zero_grad()
            L_md.append(discrepancy(x, y))
            L_md[-1].backward()
            adam.step()

    expected = {"student": torch.stack(L_md).mean(), "recognized": L_cls, "diversity": L_dis}
    assert losses == pytest.approx({name: loss.item() for name, loss in expected.items()}, rel=1e-3)
    same(here.server.student, D, rtol=1e-3, atol=2e-4)
    same(here.server.state.generator.G, G, rtol=1e-2, atol=5e-4)


def test_pseudo_data_have_the_sampled_nodes_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """n0 has class 0 only, n1 classes 0 and 1: without n2 no input has class 2."""
    here, labels = world(replace(CONFIG, rounds=8, batch=32, participation=0.67)), []
    evaluate = GeneratorTraining.evaluate

    def recorded(self: GeneratorTraining, w: GeneratorBatch) -> torch.Tensor:
        assert w.labels is not None
        labels.append(set(w.labels.tolist()))
        return evaluate(self, w)

    monkeypatch.setattr(GeneratorTraining, "evaluate", recorded)
    run(here, 8)
    by_round = [
        {
            entry["node"]
            for entry in here.audit.entries()
            if entry["query"] == "train" and entry["number"] == t
        }
        for t in range(1, 9)
    ]
    assert [one | other for one, other in zip(labels[::2], labels[1::2], strict=True)] == [
        set(range(max(few(int(name[1:])) for name in names))) for names in by_round
    ]
    assert {"n0", "n1"} in by_round


def test_without_steps_fedftg_equals_fedavg() -> None:
    plain = FedAvg(rounds=2)
    one, other = run(world(replace(CONFIG, steps=0)), 2), run(world(plain), 2)
    same(one.server.student, other.server.student)


def test_batch_norm_keeps_the_averaged_statistics() -> None:
    means = []
    for steps in (0, 2):
        here = run(world(replace(CONFIG, steps=steps), "resnet8:4"), 1)
        buffers = dict(here.server.student.named_buffers())
        means.append(torch.cat([value.flatten().float() for value in buffers.values()]))
    assert torch.equal(*means)


def test_outputs_only_policy_refuses_parameters() -> None:
    with raises_refused("outputs_only: parameters"):
        world(CONFIG, policy=PolicyConfig())
