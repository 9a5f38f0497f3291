"""FedCG at the nodes, against plain autograd: what each stage descends and what it leaves alone."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fedstill.core.compute import Compute
from fedstill.methods._generators import Received, draw_noise
from fedstill.methods.fedcg import FedCG, ramp
from fedstill.models.features import condition
from fedstill.models.split import Split
from fedstill.models.vector import to_vector
from fedstill.node import training
from fedstill.node.group import Group
from fedstill.node.node import Node
from fedstill.protocol.questions import NodeSetting
from fedstill.protocol.schedule import LocalConfig
from tests.methods.small_world import CLASSES, TASK, in_training, made, make_nodes, same_slopes

pytestmark = pytest.mark.usefixtures("steady_adam")

LOCAL = LocalConfig(epochs=2, batch=4, smoothing=0.0)
SETTING = NodeSetting(TASK, LOCAL, Compute())
CONFIG = FedCG(rounds=2, noise=4, generator_width=6, server_steps=2, server_batch=8)
COUNTS = torch.tensor([[4.0, 1.0, 12.0]])


def make_node() -> Node:
    nodes = make_nodes([made("lenet5:3", parted=True)])
    CONFIG.node_side(SETTING).prepare(nodes)
    training.prepare(nodes, LOCAL)
    return nodes[0]


def test_the_model_descends_cross_entropy_and_gamma_times_the_distance() -> None:
    node = make_node()
    x, y = node.data.inputs[:4], node.data.targets[:4]
    received = Received(CONFIG, Group([node]), to_vector(node.modules["generator"]).unsqueeze(0), COUNTS, 1)
    model, G = copy.deepcopy(node.model), copy.deepcopy(node.modules["generator"]).eval()
    assert isinstance(model, Split)
    z = torch.randn(4, CONFIG.noise, generator=node.draw("z", 1, 0))
    f = model.extractor(x)
    plain = F.cross_entropy(model.head(f), y) + 0.6 * F.mse_loss(f, G(condition(z, y, CLASSES)).detach())
    plain.backward()
    config = replace(CONFIG, gamma=0.6 / ramp(1, CONFIG.rounds))
    group = in_training(node, SETTING, "model")
    loss = config.model_work(group, received)(group, 0, x.unsqueeze(0), y.unsqueeze(0))
    assert loss.item() == pytest.approx(plain.item(), rel=1e-5)
    same_slopes(node.model, model)


def test_critic_and_generator_play_and_the_model_stands_still() -> None:
    node = make_node()
    x, y = node.data.inputs[:4], node.data.targets[:4]
    model, G, critic = (copy.deepcopy(node.modules[role]) for role in ("model", "generator", "critic"))
    assert isinstance(model, Split)
    c = condition(draw_noise(Group([node]), (1, 4), CONFIG.noise, "generator", 1, 0)[0], y, CLASSES)
    f, f_hat = model.extractor(x).detach(), G.train()(c)
    real = torch.cat([f, F.one_hot(y, CLASSES).float()], 1)
    fake = torch.cat([f_hat, F.one_hot(y, CLASSES).float()], 1)
    bce = F.binary_cross_entropy_with_logits
    L_D = bce(critic(real), torch.ones(4, 1)) + bce(critic(fake.detach()), torch.zeros(4, 1))
    adam = torch.optim.Adam(critic.parameters(), CONFIG.generator_lr, betas=(0.5, 0.999))
    L_D.backward()
    adam.step()
    L_G = bce(critic(fake), torch.ones(4, 1))  # it would be called real
    L_G.backward()

    before = to_vector(node.model)
    group = in_training(node, SETTING, "generator", "critic")
    loss = CONFIG.generator_work(group, 1)(group, 0, x.unsqueeze(0), y.unsqueeze(0))
    assert loss.item() == pytest.approx((L_D + L_G).item(), rel=1e-4)
    torch.testing.assert_close(to_vector(node.modules["critic"]), to_vector(critic), rtol=1e-4, atol=1e-6)
    same_slopes(node.modules["generator"], G)
    assert torch.equal(to_vector(node.model), before)
