"""The generator from label maps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedstill.models.generator import ConditionalGenerator, ResidualBlock


def generator() -> ConditionalGenerator:
    torch.manual_seed(0)
    return ConditionalGenerator(2, 3, 4, (0.5,) * 3, (0.25,) * 3, blocks=1)


@pytest.mark.parametrize("sides", [(8, 8), (64, 64), (12, 32)])
def test_images_have_the_maps_size_and_the_datas_scale(sides: tuple[int, int]) -> None:
    x = generator()(torch.randn(2, 2, *sides))
    assert x.shape == (2, 3, *sides)
    assert x.min() >= -2  # (0 - 0.5) / 0.25
    assert x.max() <= 2


def test_the_published_one_has_nine_blocks_and_the_published_size() -> None:
    G = ConditionalGenerator(3, 3, 64, (0.5,), (0.5,))
    assert sum(isinstance(layer, ResidualBlock) for layer in G.body) == 9
    convolutions = [layer for layer in G.modules() if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d)]
    weights = sum(layer.weight.numel() for layer in convolutions)
    down = 3 * 64 * 49 + 64 * 128 * 9 + 128 * 256 * 9
    assert weights == down + 18 * 256 * 256 * 9 + 256 * 128 * 9 + 128 * 64 * 9 + 64 * 3 * 49


def test_each_map_gives_its_own_image_whatever_is_made_beside_it() -> None:
    G, maps = generator(), torch.randn(3, 2, 8, 8)
    together = G(maps)
    torch.testing.assert_close(
        together, torch.cat([G(one.unsqueeze(0)) for one in maps]), rtol=1e-4, atol=1e-5
    )
    assert not torch.allclose(together[0], together[1])


def test_gradients_reach_the_maps_and_every_weight() -> None:
    G, maps = generator(), torch.randn(2, 2, 8, 8, requires_grad=True)
    G(maps).square().sum().backward()
    assert maps.grad is not None
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in G.parameters())
