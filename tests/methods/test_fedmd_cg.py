"""FedMD-CG at the nodes: Eq. 1 to 9 against plain autograd on one node, and what each stage leaves alone."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedstill.core.compute import Compute
from fedstill.methods._generators import Received, diversity, draw_noise
from fedstill.methods.fedmd_cg import FedMDCG
from fedstill.models.features import condition
from fedstill.models.split import Split
from fedstill.models.vector import to_vector
from fedstill.node import training
from fedstill.node.group import Group
from fedstill.node.node import Node
from fedstill.protocol.questions import NodeSetting
from fedstill.protocol.schedule import LocalConfig
from tests.methods import small_world
from tests.methods.small_world import CLASSES, TASK, in_training, made

pytestmark = pytest.mark.usefixtures("steady_adam")

LOCAL = LocalConfig(epochs=2, batch=4, smoothing=0.1)
SETTING = NodeSetting(TASK, LOCAL, Compute())
CONFIG = FedMDCG(
    rounds=2,
    noise=4,
    generator_width=6,
    server_steps=2,
    server_batch=8,
    lambda1=0.3,
    lambda2=0.5,
    lambda3=0.7,
    lambda4=1.1,
    lambda5=1.3,
    lambda6=1.7,
)
COUNTS = torch.tensor([[4.0, 0.0, 12.0]])


def make_nodes(count: int = 2) -> list[Node]:
    nodes = small_world.make_nodes([made("lenet5:3", index, parted=True) for index in range(count)])
    for node in nodes:
        with torch.no_grad():
            for w in node.model.head.parameters():  # type: ignore[union-attr]
                w.mul_(4)  # so that predictions differ, and the directions of their divergences too
    return nodes


def prepared(config: FedMDCG = CONFIG) -> Node:
    """A node with its generator, outside a federation."""
    nodes = make_nodes()
    config.node_side(SETTING).prepare(nodes)
    training.prepare(nodes, LOCAL)
    return nodes[0]


def served(config: FedMDCG, nodes: list[Node], local: LocalConfig) -> small_world.World:
    return small_world.world(config, nodes, made("lenet5:3", "student", parted=True), local=local)


def parts(node: Node) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Copies of F_i, D_i and G_i."""
    model = copy.deepcopy(node.model)
    assert isinstance(model, Split)
    return model.extractor, model.head, copy.deepcopy(node.modules["generator"])


def grads(*modules: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{index}.{name}": torch.zeros_like(w) if w.grad is None else w.grad
        for index, module in enumerate(modules)
        for name, w in module.named_parameters()
    }


def slow_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) of rows of probabilities, summed up element by element; its mean over the rows."""
    total = torch.zeros(())
    for row in range(len(p)):
        for c in range(p.shape[1]):
            total = total + p[row, c] * (p[row, c].log() - q[row, c].log())
    return total / len(p)


def batch(node: Node) -> tuple[torch.Tensor, torch.Tensor]:
    return node.data.inputs[:4], node.data.targets[:4]


# --- stage (a) -----------------------------------------------------------------------------------


def eq_4(config: FedMDCG) -> tuple[float, dict[str, torch.Tensor], float, dict[str, torch.Tensor]]:
    """Loss and gradients of a step of stage (a), plainly, and as the method takes it."""
    node = prepared(config)
    x, y = batch(node)
    G_vector = to_vector(node.modules["generator"]).unsqueeze(0)
    received = Received(config, Group([node]), G_vector, COUNTS, 1)

    E, D, G = parts(node)
    G.eval()
    draw = node.draw("y", 1, 0)
    z = torch.randn(4, config.noise, generator=node.draw("z", 1, 0))
    z_hat = torch.randn(4, config.noise, generator=node.draw("z", 1, "resampled", 0))
    y_hat = torch.multinomial(COUNTS[0], 4, replacement=True, generator=draw)
    f, f_hat = E(x), G(condition(z, y, CLASSES)).detach()
    one_hot = F.one_hot(y, CLASSES) * 0.9 + 0.1 / CLASSES  # label smoothing, on real data only
    plain = -(one_hot * D(f).log_softmax(1)).sum(1).mean()  # Eq. 1
    plain = plain + config.lambda2 * ((f - f_hat) ** 2).mean()  # Eq. 2, per value
    if config.aggregation != "ave*":
        plain = plain + config.lambda3 * slow_kl(D(f).softmax(1), D(f_hat).softmax(1).detach())  # Eq. 2
    imagined = D(G(condition(z_hat, y_hat, CLASSES)).detach())
    plain = plain + config.lambda1 * F.cross_entropy(imagined, y_hat)  # Eq. 3
    plain.backward()

    group = in_training(node, SETTING, "model")
    loss = config.model_work(group, received)(group, 7, x.unsqueeze(0), y.unsqueeze(0))
    model = node.model
    assert isinstance(model, Split)
    return plain.item(), grads(E, D), loss.item(), grads(model.extractor, model.head)


@pytest.mark.parametrize(
    "changes", [{}, {"aggregation": "ave*"}, {"lambda3": 0.0}, {"lambda1": 0.0, "lambda2": 0.0}]
)
def test_stage_a_descends_eq_4(changes: dict[str, Any]) -> None:
    plain, plain_grads, loss, own_grads = eq_4(replace(CONFIG, **changes))
    assert loss == pytest.approx(plain, rel=1e-5)
    for name, expected in plain_grads.items():
        torch.testing.assert_close(own_grads[name], expected, rtol=1e-3, atol=1e-6, msg=name)


def test_before_a_generator_is_taught_stage_a_is_plain_training() -> None:
    one, other = prepared(), prepared()
    x, y = (part.unsqueeze(0) for part in batch(one))
    for _ in range(3):
        group = in_training(one, SETTING, "model")
        G = Received(CONFIG, group, to_vector(one.modules["generator"]).unsqueeze(0), COUNTS, 0)
        CONFIG.model_work(group, G)(group, 0, x, y)
        training.plain(TASK, LOCAL)(in_training(other, SETTING, "model"), 0, x, y)
    assert torch.equal(to_vector(one.model), to_vector(other.model))


# --- stage (b) -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["none", "div0", "div1", "div2"])
def test_stage_b_descends_eq_9(form: Any) -> None:
    config = replace(CONFIG, diversity=form)
    node = prepared(config)
    x, y = batch(node)
    E, D, G = parts(node)
    G.train()
    z = draw_noise(Group([node]), (1, 4), config.noise, "generator", 1, 0)[0]
    c = condition(z, y, CLASSES)
    f, f_hat = E(x).detach(), G(c)
    plain = slow_kl(D(f_hat).softmax(1), D(f).softmax(1).detach())  # Eq. 5
    plain = plain + config.lambda4 * ((f_hat - f) ** 2).mean()  # Eq. 5, per value
    plain = plain + config.lambda5 * F.cross_entropy(D(f_hat), y)  # Eq. 6
    labels = F.one_hot(y, CLASSES).float()
    plain = plain + config.lambda6 * diversity(form, f_hat, z, labels)  # Eq. 7, 8
    plain.backward()

    before = to_vector(node.model)
    group = in_training(node, SETTING, "generator")
    loss = config.generator_work(group, 1)(group, 7, x.unsqueeze(0), y.unsqueeze(0))
    assert loss.item() == pytest.approx(plain.item(), rel=1e-4)
    for name, expected in grads(G).items():
        own = grads(node.modules["generator"])[name]
        torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-5, msg=name)
    assert torch.equal(to_vector(node.model), before)


# --- a round -------------------------------------------------------------------------------------


def test_the_head_is_replaced_and_extractor_and_generator_are_not() -> None:
    config = replace(CONFIG, aggregation="ave", generator_lr=0.0)
    nodes = make_nodes()
    here = served(config, nodes, replace(LOCAL, lr=0.0, lr_end=0.0))  # nothing moves but what is sent
    server, student = here.server, here.server.student
    before = [to_vector(node.modules["generator"]) for node in nodes]
    server.step()
    for node, old in zip(nodes, before, strict=True):
        assert isinstance(node.model, Split)
        # All begin as the student does; its head has been averaged since, over equal ones.
        torch.testing.assert_close(to_vector(node.model), to_vector(student))
        assert not torch.equal(to_vector(node.modules["generator"]), old)
    with torch.no_grad():
        for w in (*student.parameters(), *server.state.G.parameters()):
            w.add_(1.0)
    marked = to_vector(student.head)
    kept = [to_vector(node.model.extractor) for node in nodes]  # type: ignore[union-attr]
    server.step()
    for node, extractor in zip(nodes, kept, strict=True):
        assert isinstance(node.model, Split)
        assert torch.equal(to_vector(node.model.head), marked)
        assert torch.equal(to_vector(node.model.extractor), extractor)
        assert not node.modules["generator"].get_parameter("1.bias").any()  # 1 in the global one
