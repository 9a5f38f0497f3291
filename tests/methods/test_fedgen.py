"""FedGEN: the generator's loss against a plain loop, the nodes' loss, and who may learn."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fedstill.core.compute import Compute
from fedstill.methods._generators import Received, diversity, uploaded
from fedstill.methods.fedgen import FedGEN
from fedstill.methods.server import Server
from fedstill.models.features import condition
from fedstill.models.split import HEAD, Split
from fedstill.models.vector import to_vector
from fedstill.node import training
from fedstill.node.group import Group
from fedstill.node.node import Node
from fedstill.protocol.questions import NodeSetting
from fedstill.protocol.schedule import LocalConfig
from tests.methods import small_world
from tests.methods.small_world import CLASSES, TASK, in_training, made, same_slopes

pytestmark = pytest.mark.usefixtures("steady_adam")

LOCAL = LocalConfig(epochs=2, batch=4, smoothing=0.0)
SETTING = NodeSetting(TASK, LOCAL, Compute())
CONFIG = FedGEN(rounds=2, noise=4, generator_width=6, server_steps=20, server_batch=16, server_lr=0.01)


def make_nodes() -> list[Node]:
    return small_world.make_nodes([made("lenet5:3", index, parted=True) for index in range(2)], sizes=(9, 10))


def make_server(config: FedGEN, nodes: list[Node]) -> Server:
    student = made("lenet5:3", "student", parted=True)
    return small_world.world(config, nodes, student, local=LOCAL).server


@pytest.mark.parametrize("shares", ["head", "model"])
def test_the_generators_loss_against_a_loop(shares: Any) -> None:
    nodes = make_nodes()
    config = replace(CONFIG, shares=shares)
    server = make_server(config, nodes)
    server.step()
    heads, G = [], server.state.G
    for node in nodes:
        assert isinstance(node.model, Split)
        heads.append(node.model.head)  # as they were uploaded
    shared = nodes[0].model.get_submodule(config.part)
    uploads = uploaded(
        shared, torch.stack([to_vector(node.model.get_submodule(config.part)) for node in nodes])
    )
    counts = torch.tensor([[5.0, 0.0, 2.0], [1.0, 4.0, 0.0]])
    z, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 2, 1, 0])
    expected = 0.0
    with torch.no_grad():
        f = G(condition(z, y, CLASSES))  # evaluated as sent
        for b in range(6):
            label = int(y[b])
            share = counts[:, label] / counts[:, label].sum()
            logits = share[0] * heads[0](f[b]) + share[1] * heads[1](f[b])
            expected -= float(logits.softmax(0)[label].log()) / 6
        found = config.generator_loss(TASK, G, uploads, z, y, counts)
    assert found[0].item() == pytest.approx(expected, rel=1e-4)
    assert found[1].item() == pytest.approx(diversity("div0", f, z, y).item(), rel=1e-5)


def test_only_the_generator_learns_at_the_server() -> None:
    nodes = make_nodes()
    server = make_server(CONFIG, nodes)
    first = server.step()
    heads = torch.stack([to_vector(node.model.get_submodule(HEAD)) for node in nodes])
    uploads, student = uploaded(nodes[0].model.get_submodule(HEAD), heads), to_vector(server.student)
    counts = torch.ones(2, CLASSES)
    losses = [CONFIG.teach(server, server.state, uploads, counts, t)["generator"] for t in range(5)]
    assert losses[-1] < 0.5 * first["generator"]
    assert torch.equal(student, to_vector(server.student))
    for before, module in zip(heads, uploads.modules, strict=True):
        assert torch.equal(before, to_vector(module))
    assert not server.state.G.training  # sent, and listened to, with its running statistics


def test_a_node_descends_cross_entropy_on_its_data_and_on_features_of_labels_from_all_nodes() -> None:
    node = make_nodes()[0]
    training.prepare([node], LOCAL)
    counts = torch.tensor([[4.0, 0.0, 12.0]])
    config = replace(CONFIG, alpha=0.3)
    server = make_server(config, make_nodes())
    received = Received(config, Group([node]), to_vector(server.state.G).unsqueeze(0), counts, 1)
    x, y = node.data.inputs[:4], node.data.targets[:4]

    model, G = copy.deepcopy(node.model), copy.deepcopy(server.state.G).eval()
    y_hat = torch.multinomial(counts[0], 4, replacement=True, generator=node.draw("y", 1, 0))
    z = torch.randn(4, config.noise, generator=node.draw("z", 1, 0))
    assert isinstance(model, Split)
    imagined = model.head(G(condition(z, y_hat, CLASSES)).detach())
    plain = F.cross_entropy(model(x), y) + 0.3 * F.cross_entropy(imagined, y_hat)
    plain.backward()

    group = in_training(node, SETTING, "model")
    loss = config.work(group, received)(group, 0, x.unsqueeze(0), y.unsqueeze(0))
    assert loss.item() == pytest.approx(plain.item(), rel=1e-5)
    same_slopes(node.model, model)


def test_whole_models_are_averaged() -> None:
    nodes = make_nodes()
    server = make_server(replace(CONFIG, shares="model"), nodes)
    server.step()
    extractors = []
    for node in nodes:
        assert isinstance(node.model, Split)
        extractors.append(to_vector(node.model.extractor))
    assert isinstance(server.student, Split)
    mean = (9 * extractors[0] + 10 * extractors[1]) / 19
    torch.testing.assert_close(to_vector(server.student.extractor), mean)
