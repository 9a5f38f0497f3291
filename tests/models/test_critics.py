"""Patch critics: shapes, published layers and normalization."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fedstill.models import PatchCritic
from fedstill.models.critics import PatchGAN


@pytest.mark.parametrize(("side", "patches"), [(8, 2), (28, 7), (32, 8)])
def test_critic_returns_one_value_per_patch(side: int, patches: int) -> None:
    critic = PatchCritic(3, 4)
    assert critic(torch.randn(2, 3, side, side)).shape == (2, patches, patches)


def test_default_critic_has_published_layers() -> None:
    critic = PatchCritic(3, 128)
    shapes = [tuple(p.shape) for name, p in critic.named_parameters() if p.ndim == 4]
    assert shapes == [(128, 3, 4, 4), (256, 128, 4, 4), (1, 256, 1, 1)]
    assert not list(critic.buffers()), "the critic must always use the batch's own statistics"


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
    # Group norm's statistics are of the whole image: without them a value depends on its patch alone.
    alone = nn.Sequential(*(layer for layer in critic if not isinstance(layer, nn.GroupNorm)))
    alone(x)[0, 15, 15].backward()
    assert x.grad is not None
    rows, columns = torch.nonzero(x.grad[0, 0], as_tuple=True)
    assert [int(rows.max() - rows.min()) + 1, int(columns.max() - columns.min()) + 1] == [70, 70]


def test_default_patchgan_has_published_layers() -> None:
    shapes = [tuple(p.shape) for p in PatchGAN(6, 64).parameters() if p.ndim == 4]
    assert shapes == [(64, 6, 4, 4), (128, 64, 4, 4), (256, 128, 4, 4), (512, 256, 4, 4), (1, 512, 4, 4)]
    assert not list(PatchGAN(6, 64).buffers()), "the critic must always use the batch's own statistics"


def test_group_norm_patchgan_treats_examples_independently() -> None:
    torch.manual_seed(0)
    critic, x = PatchGAN(1, 2, "group"), torch.randn(3, 1, 32, 32)
    alone = torch.cat([critic(row.unsqueeze(0)) for row in x])
    torch.testing.assert_close(critic(x), alone, rtol=1e-4, atol=1e-5)
