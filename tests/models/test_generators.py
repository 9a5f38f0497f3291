"""Generators and critics of images, feature vectors and table rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from fedstill.core.table_schema import SchemaColumn, TableSchema
from fedstill.data.table_data import check_features
from fedstill.models import build
from fedstill.models.extractor_head import count_features, split_model
from fedstill.models.generators import (
    FeatureCritic,
    FeatureGenerator,
    LabelMapGenerator,
    ResidualBlock,
    TableCritic,
    TableGenerator,
    append_one_hot,
    hidden_widths,
    straight_through_one_hot,
)


def generator() -> LabelMapGenerator:
    torch.manual_seed(0)
    return LabelMapGenerator(2, 3, 4, (0.5,) * 3, (0.25,) * 3, blocks=1)


@pytest.mark.parametrize("sides", [(8, 8), (64, 64), (12, 32)])
def test_generated_images_have_size_of_maps_and_range_of_data(sides: tuple[int, int]) -> None:
    x = generator()(torch.randn(2, 2, *sides))
    assert x.shape == (2, 3, *sides)
    assert x.min() >= -2  # (0 - 0.5) / 0.25
    assert x.max() <= 2


def test_default_conditional_generator_has_published_size() -> None:
    G = LabelMapGenerator(3, 3, 64, (0.5,), (0.5,))
    assert sum(isinstance(layer, ResidualBlock) for layer in G.body) == 9
    convolutions = [layer for layer in G.modules() if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d)]
    weights = sum(layer.weight.numel() for layer in convolutions)
    down = 3 * 64 * 49 + 64 * 128 * 9 + 128 * 256 * 9
    assert weights == down + 18 * 256 * 256 * 9 + 256 * 128 * 9 + 128 * 64 * 9 + 64 * 3 * 49


def test_conditional_generator_treats_maps_independently() -> None:
    G, maps = generator(), torch.randn(3, 2, 8, 8)
    together = G(maps)
    torch.testing.assert_close(
        together, torch.cat([G(one.unsqueeze(0)) for one in maps]), rtol=1e-4, atol=1e-5
    )
    assert not torch.allclose(together[0], together[1])


def test_gradients_reach_maps_and_all_weights() -> None:
    G, maps = generator(), torch.randn(2, 2, 8, 8, requires_grad=True)
    G(maps).square().sum().backward()
    assert maps.grad is not None
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in G.parameters())


def test_append_one_hot_by_hand() -> None:
    v = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])  # (1, 2, 2)
    c = append_one_hot(v, torch.tensor([[2, 0]]), 3)
    assert c.tolist() == [[[1.0, 2.0, 0.0, 0.0, 1.0], [3.0, 4.0, 1.0, 0.0, 0.0]]]


def test_feature_generator_has_three_linear_layers_with_batch_norm() -> None:
    G = FeatureGenerator(noise=4, classes=3, features=7, width=5)
    assert [type(layer).__name__ for layer in G if not isinstance(layer, nn.ReLU)] == [
        "Linear",
        "BatchNorm1d",
        "Linear",
        "BatchNorm1d",
        "Linear",
    ]
    assert G(torch.randn(6, 7)).shape == (6, 7)
    size = sum(parameter.numel() for parameter in G.parameters())
    assert size == 7 * 5 + 2 * 5 + 5 * 5 + 2 * 5 + (5 * 7 + 7)  # no bias before batch norm


@pytest.mark.parametrize(("spec", "widths"), [("lenet5", (120, 84)), ("small-cnn", ())])
def test_feature_critic_has_layers_of_the_head_and_one_output(spec: str, widths: tuple[int, ...]) -> None:
    parts = split_model(build(spec, (1, 28, 28), 10, 0), "model")
    assert hidden_widths(parts.head) == widths
    p = count_features(parts, torch.zeros(2, 1, 28, 28), "model")
    critic = FeatureCritic(p, 10, widths)
    linear = [layer for layer in critic if isinstance(layer, nn.Linear)]
    assert [layer.out_features for layer in linear] == [*widths, 1]
    assert critic(torch.randn(2, p + 10)).shape == (2, 1)


@pytest.mark.parametrize("training", [True, False])
def test_feature_generator_stays_in_float32_under_autocast(training: bool) -> None:
    G = FeatureGenerator(noise=4, classes=3, features=7, width=5).train(training)
    with torch.autocast("cpu", torch.bfloat16):
        f = G(torch.randn(6, 7))
    assert f.dtype == torch.float32


SCHEMA = TableSchema(
    "ill",
    (
        SchemaColumn(name="age", range=(0.0, 100.0), missing=True),
        SchemaColumn(name="dose", range=(-5.0, 5.0)),
        SchemaColumn(name="ward", type="category", categories=("a", "b", "c")),
        SchemaColumn(name="ill", type="category", categories=("no", "yes")),
    ),
)


def test_generated_rows_fit_the_schema() -> None:
    torch.manual_seed(0)
    G = TableGenerator(SCHEMA, noise=6, width=8)
    w = torch.randn(200, 6)
    x = G(w)
    assert x.shape == (200, 6)
    check_features(x.detach(), SCHEMA, "made")
    assert x[:, 3:].sum(1).eq(1).all()
    empty = x[:, 1] == 1
    assert 0 < empty.sum() < 200
    assert (x[empty, 0] == 0).all()
    assert (x[~empty, 0] != 0).all()
    assert torch.equal(G(w), x), "nothing is drawn but the noise"


def test_every_generated_feature_has_a_gradient() -> None:
    torch.manual_seed(0)
    G = TableGenerator(SCHEMA, noise=6, width=8)
    last = G.body[-1]
    for feature in range(6):
        (grad,) = torch.autograd.grad(G(torch.randn(50, 6))[:, feature].sum(), last.weight)
        assert grad.abs().sum() > 0


def test_straight_through_one_hot_has_gradient_of_softmax() -> None:
    scores = torch.tensor([[0.5, 2.0, 1.0]], requires_grad=True)
    (hard,) = torch.autograd.grad(straight_through_one_hot(scores)[0, 1], scores)
    (soft,) = torch.autograd.grad(scores.softmax(1)[0, 1], scores)
    assert torch.equal(hard, soft)


def test_table_critic_with_group_norm_treats_rows_independently() -> None:
    x = torch.randn(5, 6)
    assert TableCritic(6, 8)(x).shape == (5, 1)
    critic = TableCritic(6, 8, "group")
    alone = vmap(lambda row: functional_call(critic, dict(critic.named_parameters()), (row[None],))[0])(x)
    assert torch.allclose(critic(x), alone, atol=1e-6)
