"""Critics: their inputs, training and responses, also for images generated from maps."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.methods._discriminators import Discriminators, sample_real
from fedstill.methods._label_maps import owner_id
from fedstill.methods.asyndgan import AsynDGAN
from fedstill.methods.fediod import FedIOD
from fedstill.models.gan import PatchGAN
from fedstill.models.module_utils import to_vector
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup
from fedstill.node.node_view import NodeView
from fedstill.node.stacked_calls import QuerySamples, map_nodes, with_data
from fedstill.privacy import noise
from fedstill.privacy.dpsgd import DPParameters
from fedstill.protocol.node_side import NodeSetting
from fedstill.tasks.classification import TabularClassification
from tests.support.errors import raises_invalid
from tests.support.map_world import ASYN, FIOD, RECONSTRUCTION, SHAPE, TASK, sent_order, vgg, view, world
from tests.support.small_world import changed

pytestmark = pytest.mark.usefixtures("steady_adam")

X = torch.rand(4, *SHAPE, generator=torch.Generator().manual_seed(1)) * 2 - 1
MAPS = torch.randint(3, (4, 16, 16), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)


def prepare(config: Any, node: Node, task: Any = TASK) -> NodeView:
    """Return the view of a node that the method has prepared."""
    view_of_it = view(node, task)
    config.prepare(node, view_of_it.setting)
    return view_of_it


def setting_of(features: Any) -> NodeSetting:
    return view(world().nodes[0], features=features).setting


def test_only_owner_of_map_returns_difference() -> None:
    features = vgg()
    config = changed(FIOD, generator={"pixel": 2.0, "perceptual": 3.0})
    one = world(config, features=features)
    a, b = one.nodes[:2]
    # Two maps of a (the second in pose 3), one of b, and one that no node sent.
    source = torch.tensor(
        [[owner_id("n0"), 1, 0], [owner_id("n0"), 4, 3], [owner_id("n1"), 0, 0], [owner_id("n0"), 99, 0]]
    )
    x = X.expand(2, *X.shape).clone().requires_grad_()
    response = map_nodes(
        lambda node, x: config.predict_logits(node, x, MAPS, source),
        partial(NodeView, NodeGroup([a, b]), setting_of(features), 0),
        2,
        {"x": x},
    )
    difference = response["difference"]  # (2, 4)
    own = a.data.inputs[sent_order(a)]
    turned = torch.rot90(own[4].flip(-1), 1, (-2, -1))
    expected = torch.zeros(2, 4)
    for row, node, real in ((0, 0, own[1]), (1, 0, turned), (2, 1, b.data.inputs[sent_order(b)][0])):
        expected[node, row] = 2.0 * (X[row] - real).abs().mean()
        theirs, mine = features(real.unsqueeze(0)), features(X[row].unsqueeze(0))
        far = [(i - j).square().mean() for i, j in zip(mine, theirs, strict=True)]
        expected[node, row] += 3.0 * sum(far) / len(far)
    torch.testing.assert_close(difference, expected, rtol=1e-4, atol=1e-6)
    assert (expected[0, :2] > 0.01).all()
    assert expected[1, 2] > 0.01
    (gradient,) = torch.autograd.grad(difference.sum(), x)
    assert gradient[0, 0].abs().sum() > 0
    assert gradient[0, 3].abs().sum() == 0 == gradient[1, 0].abs().sum()


@pytest.mark.parametrize("config", [FIOD, ASYN])
def test_query_with_too_few_maps_is_refused(config: Any) -> None:
    node = view(world(config).nodes[0])
    ask = config.predict_logits if config is FIOD else config.score_with_critic
    with raises_invalid("shape of maps", (3, 16, 16), "each of 4"):
        ask(node, X, MAPS[:3])
    with raises_invalid("shape of source", (4, 2)):
        ask(node, X, MAPS, torch.zeros(4, 2, dtype=torch.int64))


def test_critics_see_whole_images_in_reconstruction() -> None:
    one = world(task=RECONSTRUCTION)
    node = view(one.nodes[0], RECONSTRUCTION)
    real = sample_real(node, 5, FIOD.generator.pairs(node.setting))
    batch = one.nodes[0].sample_batch(5, "critic", 0)
    assert torch.equal(real[:, 2:], batch.targets)
    assert not torch.equal(real[:, 2:], batch.inputs)


def test_paired_critic_trains_privately() -> None:
    one = world(specs=("unet:2",))
    node = one.nodes[0]
    node.dp_sgd_parameters = {"critic": DPParameters(1.0, 1.0, partial(noise.seeded_sampler, 0))}
    prepared = prepare(FIOD, node)
    assert not any(isinstance(layer, torch.nn.BatchNorm2d) for layer in node.modules["critic"])
    before, data = to_vector(node.modules["critic"]), node.data
    response = FIOD.predict_logits(prepared, X, MAPS)
    assert response["critic"].shape == (4, 4, 4)
    assert not torch.equal(to_vector(node.modules["critic"]), before)
    assert node.data is data


def test_patchgan_needs_large_enough_images() -> None:
    config, node = changed(FIOD, critic={"form": "patchgan"}), world().nodes[0]
    allowed = r"invalid method.critic.form = 'patchgan' \(expected two-layer, but for images of 24 pixels"
    with pytest.raises(ArgumentError, match=allowed):
        prepare(config, node)  # 16 x 16
    rows = with_data(node, TensorData(torch.randn(4, 30), torch.zeros(4).long()))
    with pytest.raises(ArgumentError, match=allowed):
        prepare(FedIOD(critic=Discriminators(form="patchgan")), rows, TabularClassification(2))
    images, maps = node.data.inputs, node.data.targets
    large = TensorData(images.repeat(1, 1, 2, 2), maps.repeat(1, 2, 2))
    node = with_data(node, large)
    prepared = prepare(config, node)
    critic = node.modules["critic"]
    assert isinstance(critic, PatchGAN)
    assert critic[0].in_channels == 1 + TASK.condition_channels
    before = to_vector(critic)
    response = config.predict_logits(prepared, X.repeat(1, 1, 2, 2), MAPS.repeat(1, 2, 2))
    assert response["critic"].shape == (4, 2, 2)
    assert not torch.equal(to_vector(critic), before)


@pytest.mark.parametrize("how", ["plain", "captured", "private"])
def test_critic_learning_rate_follows_cosine_after_resume(how: str) -> None:
    """Also with captured steps, where rates are set before each step."""
    config = changed(FIOD, pretrain=2, steps=3, critic={"lr": 0.01, "schedule": "cosine"})
    nodes, rates = world(config, specs=("unet:2",) * 2).nodes, []
    for number in range(5):
        if number == 3:  # stop and resume
            node, first = world(config, specs=("unet:2",) * 2).nodes[1], nodes[1]
            node.load_state_dict(first.state_dict())
            nodes = [node]
        for node in nodes:
            parameters = DPParameters(1.0, 1.0, partial(noise.seeded_sampler, 0))
            node.dp_sgd_parameters = {"critic": parameters} if how == "private" else {}
            samples = QuerySamples() if how == "captured" else None
            if how == "captured":
                node.set_learning_rates(["critic"])
            setting = view(node).setting
            config.score_with_critic(NodeView(NodeGroup([node]), setting, number, samples=samples), X, MAPS)
        rates.append([node.optimizers["critic"].param_groups[0]["lr"] for node in nodes])
    expected = [0.01 * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(5)]  # of 2 + 3 steps
    for actual, rate in zip(rates, expected, strict=True):
        assert actual == pytest.approx([rate] * len(actual))


def test_asyndgan_trains_critics_with_generator() -> None:
    config: AsynDGAN = changed(ASYN, steps=7, student={"steps": 9}, critic={"lr": 0.01, "schedule": "cosine"})
    node, rates = world(config).nodes[0], []
    for _ in range(7):
        config.score_with_critic(view(node), X, MAPS)
        rates.append(node.optimizers["critic"].param_groups[0]["lr"])
    assert rates == pytest.approx([0.01 * (1 + math.cos(math.pi * step / 6)) / 2 for step in range(7)])
