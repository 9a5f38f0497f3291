"""Generators and critics: shapes, published layers, normalization."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from fedstill.core.table_schema import SchemaColumn, TableSchema
from fedstill.data.table_data import check_features
from fedstill.models import PatchCritic, build
from fedstill.models.extractor_head import count_features, split_model
from fedstill.models.gan import (
    FeatureCritic,
    FeatureGenerator,
    LabelMapGenerator,
    NoisyFeatureGenerator,
    PatchGAN,
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


def test_generated_features_span_the_space_and_have_the_normalization_of_real_ones() -> None:
    torch.manual_seed(0)
    G = NoisyFeatureGenerator(noise=4, features=32, width=8, normalization="example")
    e_w = torch.randn(64, 36)
    x = G(e_w)
    moves = G.body(e_w[:, 32:])
    assert torch.linalg.matrix_rank(moves - moves.mean(0)) <= 8
    assert torch.linalg.matrix_rank(x - x.mean(0)) >= 31  # each vector has mean 0
    torch.testing.assert_close(x, torch.nn.functional.layer_norm(e_w[:, :32] + moves, (32,)))


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
    assert torch.equal(G(w), x), "outputs depend on the noise only"


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


@pytest.mark.parametrize(("side", "patches"), [(8, 2), (28, 7), (32, 8)])
def test_critic_returns_one_value_per_patch(side: int, patches: int) -> None:
    critic = PatchCritic(3, 4)
    assert critic(torch.randn(2, 3, side, side)).shape == (2, patches, patches)


def test_default_critic_has_published_layers() -> None:
    critic = PatchCritic(3, 128)
    shapes = [tuple(p.shape) for name, p in critic.named_parameters() if p.ndim == 4]
    assert shapes == [(128, 3, 4, 4), (256, 128, 4, 4), (1, 256, 1, 1)]
    assert not list(critic.buffers()), "the critic must always use batch statistics"


@pytest.mark.parametrize(("norm", "mixes"), [("batch", True), ("group", False)])
def test_group_norm_critic_treats_examples_independently(norm: Any, mixes: bool) -> None:
    torch.manual_seed(0)
    critic = PatchCritic(3, 6, norm)
    x = torch.randn(5, 3, 8, 8)
    together, alone = critic(x), torch.cat([critic(row.unsqueeze(0)) for row in x])
    assert together.shape == (5, 2, 2)
    assert torch.allclose(together, alone, atol=1e-5) is not mixes


@pytest.mark.parametrize(("width", "groups"), [(1, 2), (3, 2), (4, 8), (6, 4), (32, 8)])
def test_group_norm_has_the_most_groups_up_to_eight(width: int, groups: int) -> None:
    layer = PatchCritic(1, width, "group")[3]
    assert isinstance(layer, nn.GroupNorm)
    assert (layer.num_groups, layer.num_channels) == (groups, 2 * width)


def test_batch_norm_equals_torch_batch_norm() -> None:
    torch.manual_seed(0)
    usual = PatchCritic(1, 4)
    assert isinstance(usual[3], nn.BatchNorm2d)
    torch.manual_seed(0)
    other = PatchCritic(1, 4, "group")
    assert list(usual.state_dict()) == list(other.state_dict())
    for name, value in usual.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


@pytest.mark.parametrize(
    ("sides", "patches"), [((24, 24), (1, 1)), ((64, 40), (6, 3)), ((256, 256), (30, 30))]
)
def test_patchgan_returns_one_value_per_patch_position(sides: Any, patches: Any) -> None:
    assert PatchGAN(2, 1)(torch.randn(2, 2, *sides)).shape == (2, *patches)


def test_patchgan_patch_has_70_pixels_per_side() -> None:
    torch.manual_seed(0)
    critic, x = PatchGAN(1, 4, "group"), torch.randn(1, 1, 256, 256, requires_grad=True)
    # The statistics of group norm cover the whole image; without them, a value depends on its patch only.
    alone = nn.Sequential(*(layer for layer in critic if not isinstance(layer, nn.GroupNorm)))
    alone(x)[0, 15, 15].backward()
    assert x.grad is not None
    rows, columns = torch.nonzero(x.grad[0, 0], as_tuple=True)
    assert [int(rows.max() - rows.min()) + 1, int(columns.max() - columns.min()) + 1] == [70, 70]


def test_default_patchgan_has_published_layers() -> None:
    shapes = [tuple(p.shape) for p in PatchGAN(6, 64).parameters() if p.ndim == 4]
    assert shapes == [(64, 6, 4, 4), (128, 64, 4, 4), (256, 128, 4, 4), (512, 256, 4, 4), (1, 512, 4, 4)]
    assert not list(PatchGAN(6, 64).buffers()), "the critic must always use batch statistics"


def test_group_norm_patchgan_treats_examples_independently() -> None:
    torch.manual_seed(0)
    critic, x = PatchGAN(1, 2, "group"), torch.randn(3, 1, 32, 32)
    alone = torch.cat([critic(row.unsqueeze(0)) for row in x])
    torch.testing.assert_close(critic(x), alone, rtol=1e-4, atol=1e-5)
