"""Critics of patches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fedstill.models import PatchCritic


@pytest.mark.parametrize(("side", "patches"), [(8, 2), (28, 7), (32, 8)])
def test_the_critic_gives_one_value_a_patch(side: int, patches: int) -> None:
    critic = PatchCritic(3, 4)
    assert critic(torch.randn(2, 3, side, side)).shape == (2, patches, patches)


def test_the_published_critic() -> None:
    critic = PatchCritic(3, 128)
    shapes = [tuple(p.shape) for name, p in critic.named_parameters() if p.ndim == 4]
    assert shapes == [(128, 3, 4, 4), (256, 128, 4, 4), (1, 256, 1, 1)]
    assert not list(critic.buffers()), "the critic must always use the batch's own statistics"


@pytest.mark.parametrize(("norm", "mixes"), [("batch", True), ("group", False)])
def test_group_norm_judges_each_example_by_itself(norm: Any, mixes: bool) -> None:
    torch.manual_seed(0)
    critic = PatchCritic(3, 6, norm)
    x = torch.randn(5, 3, 8, 8)
    together, alone = critic(x), torch.cat([critic(row.unsqueeze(0)) for row in x])
    assert together.shape == (5, 2, 2)
    assert torch.allclose(together, alone, atol=1e-5) is not mixes


@pytest.mark.parametrize(("width", "groups"), [(1, 2), (3, 2), (4, 8), (6, 4), (32, 8)])
def test_as_many_groups_up_to_eight_as_divide_the_channels(width: int, groups: int) -> None:
    layer = PatchCritic(1, width, "group")[3]
    assert isinstance(layer, nn.GroupNorm)
    assert (layer.num_groups, layer.num_channels) == (groups, 2 * width)


def test_batch_norm_is_the_usual_one_with_the_same_weights() -> None:
    torch.manual_seed(0)
    usual = PatchCritic(1, 4)
    assert isinstance(usual[3], nn.BatchNorm2d)
    torch.manual_seed(0)
    other = PatchCritic(1, 4, "group")
    assert list(usual.state_dict()) == list(other.state_dict())
    for name, value in usual.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
