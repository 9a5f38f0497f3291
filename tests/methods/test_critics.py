"""What critics see, learn and answer where images are made from maps."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.methods._critics import Critics, copy_with_data
from fedstill.methods._label_maps import map_order, owner_id
from fedstill.methods.fediod import FedIOD
from fedstill.models.critics import PatchGAN
from fedstill.models.module_utils import to_vector
from fedstill.node.node_group import NodeGroup
from fedstill.privacy import noise
from fedstill.privacy.dpsgd import DPParameters
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.queries import NodeSetting
from fedstill.tasks.classification import TabularClassification
from tests.methods.map_world import ASYN, FIOD, RECONSTRUCTION, SHAPE, TASK, vgg, world

pytestmark = pytest.mark.usefixtures("steady_adam")

X = torch.rand(1, 4, *SHAPE, generator=torch.Generator().manual_seed(1)) * 2 - 1
MAPS = torch.randint(3, (1, 4, 16, 16), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)


def critics_of(config: Any = FIOD, task: Any = TASK, features: Any = None) -> Critics:
    return Critics(config, NodeSetting(task, LocalConfig(), Compute(), None, features))


def test_only_the_owner_of_a_map_returns_the_difference() -> None:
    features = vgg()
    config = replace(FIOD, pixel=2.0, perceptual=3.0)
    one = world(config, features=features)
    critics = critics_of(config, features=features)
    a, b = one.nodes[:2]
    # Two maps of a (the second turned by pose 3), one of b, one that no node sent.
    source = torch.tensor(
        [[owner_id("n0"), 1, 0], [owner_id("n0"), 4, 3], [owner_id("n1"), 0, 0], [owner_id("n0"), 99, 0]]
    )
    x = X.expand(2, *X.shape[1:]).clone().requires_grad_()
    response = critics.train_and_score(
        NodeGroup([a, b]), 0, x, MAPS.expand(2, -1, -1, -1), source.expand(2, 4, 3)
    )
    difference = response["difference"]  # (2, 4)
    own = a.data.inputs[map_order(a)]
    turned = torch.rot90(own[4].flip(-1), 1, (-2, -1))
    expected = torch.zeros(2, 4)
    for row, node, real in ((0, 0, own[1]), (1, 0, turned), (2, 1, b.data.inputs[map_order(b)][0])):
        expected[node, row] = 2.0 * (X[0, row] - real).abs().mean()
        theirs, mine = features(real.unsqueeze(0)), features(X[0, row].unsqueeze(0))
        far = [(i - j).square().mean() for i, j in zip(mine, theirs, strict=True)]
        expected[node, row] += 3.0 * sum(far) / len(far)
    torch.testing.assert_close(difference, expected, rtol=1e-4, atol=1e-6)
    assert (expected[0, :2] > 0.01).all()
    assert expected[1, 2] > 0.01
    (slope,) = torch.autograd.grad(difference.sum(), x)
    assert slope[0, 0].abs().sum() > 0
    assert slope[0, 3].abs().sum() == 0 == slope[1, 0].abs().sum()


def test_a_query_with_too_few_maps_is_refused() -> None:
    node, critics = world().nodes[0], critics_of()
    with pytest.raises(
        ArgumentError, match=r"invalid shape of maps = \(3, 16, 16\) \(expected one for each of 4"
    ):
        critics.train_and_score(NodeGroup([node]), 0, X, MAPS[:, :3])
    with pytest.raises(ArgumentError, match="invalid shape of source = "):
        critics.train_and_score(NodeGroup([node]), 0, X, MAPS, torch.zeros(1, 4, 2, dtype=torch.int64))


def test_critics_see_whole_images_in_reconstruction() -> None:
    one = world(task=RECONSTRUCTION)
    critics = critics_of(task=RECONSTRUCTION)
    real = critics.sample_real(NodeGroup(one.nodes[:1]), 0, 5)[0]
    batch = one.nodes[0].sample_batch(5, "critic", 0)
    assert torch.equal(real[:, 2:], batch.targets)
    assert not torch.equal(real[:, 2:], batch.inputs)


def test_a_critic_of_pairs_learns_privately() -> None:
    one = world(specs=("unet:2",))
    node = one.nodes[0]
    node.dp_sgd_parameters = {"critic": DPParameters(1.0, 1.0, partial(noise.seeded_sampler, 0))}
    critics = critics_of()
    critics.prepare([node])
    assert not any(isinstance(layer, torch.nn.BatchNorm2d) for layer in node.modules["critic"])
    before, data = to_vector(node.modules["critic"]), node.data
    response = critics.train_and_score(NodeGroup([node]), 0, X, MAPS)
    assert response["critic"].shape == (1, 4, 4, 4)
    assert not torch.equal(to_vector(node.modules["critic"]), before)
    assert node.data is data


def test_patchgan_needs_large_enough_images() -> None:
    config = replace(FIOD, critic_form="patchgan")
    node, critics = world().nodes[0], critics_of(config)
    allowed = r"invalid method.critic_form = 'patchgan' \(expected two-layer, but for images of 24 pixels"
    with pytest.raises(ArgumentError, match=allowed):
        critics.prepare([node])  # 16 x 16
    rows = copy_with_data(node, TensorData(torch.randn(4, 30), torch.zeros(4).long()))
    with pytest.raises(ArgumentError, match=allowed):
        critics_of(FedIOD(critic_form="patchgan"), TabularClassification(2)).prepare([rows])
    images, maps = node.data.inputs, node.data.targets
    large = TensorData(images.repeat(1, 1, 2, 2), maps.repeat(1, 2, 2))
    node = copy_with_data(node, large)
    critics.prepare([node])
    critic = node.modules["critic"]
    assert isinstance(critic, PatchGAN)
    assert critic[0].in_channels == 1 + TASK.condition_channels
    before = to_vector(critic)
    response = critics.train_and_score(NodeGroup([node]), 0, X.repeat(1, 1, 1, 2, 2), MAPS.repeat(1, 1, 2, 2))
    assert response["critic"].shape == (1, 4, 2, 2)
    assert not torch.equal(to_vector(critic), before)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("private", [False, True])
def test_critic_learning_rate_follows_cosine_after_resume(private: bool, sampled: bool) -> None:
    config = replace(FIOD, pretrain=2, steps=3, critic_lr=0.01, critic_schedule="cosine")
    nodes, critics = world(config, specs=("unet:2",) * 2).nodes, critics_of(config)
    rates = []
    for number in range(5):
        if number == 3:  # stopped and resumed
            node, first = world(config, specs=("unet:2",) * 2).nodes[1], nodes[1]
            node.load_state_dict(first.state_dict())
            nodes = [node]
        for node in nodes:
            node.dp_sgd_parameters = (
                {"critic": DPParameters(1.0, 1.0, partial(noise.seeded_sampler, 0))} if private else {}
            )
            before = critics.sample_real_and_set_rates(NodeGroup([node]), number, X) if sampled else {}
            critics.train_and_score(NodeGroup([node]), number, X, MAPS, **before)
        rates.append([node.optimizers["critic"].param_groups[0]["lr"] for node in nodes])
    expected = [0.01 * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(5)]  # of 2 + 3 steps
    for actual, rate in zip(rates, expected, strict=True):
        assert actual == pytest.approx([rate] * len(actual))


def test_asyndgans_critics_learn_while_the_generator_does() -> None:
    assert replace(ASYN, steps=7, student_steps=9).critic_steps == 7
