"""The generator from label maps, and the patch critic of pix2pix."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedstill.core.errors import ArgumentError
from fedstill.models.conditional import ConditionalGenerator, ResidualBlock
from fedstill.models.critic import PatchCritic, PatchGAN


def generator(noise: int = 0, blocks: int = 1, width: int = 4) -> ConditionalGenerator:
    torch.manual_seed(0)
    return ConditionalGenerator(2, 3, width, (0.5,) * 3, (0.25,) * 3, blocks=blocks, noise=noise)


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


def test_with_noise_one_map_gives_many_images() -> None:
    G, maps = generator(noise=1), torch.randn(1, 2, 8, 8).expand(2, -1, -1, -1)
    x = G(maps, torch.randn(2, 1, 8, 8))
    assert not torch.allclose(x[0], x[1])


@pytest.mark.parametrize(("noise", "given"), [(0, 1), (1, 0), (2, 1)])
def test_other_noise_than_it_takes_is_refused(noise: int, given: int) -> None:
    w = torch.zeros(2, given, 8, 8) if given else None
    with pytest.raises(ArgumentError, match="shape of w is"):
        generator(noise)(torch.zeros(2, 2, 8, 8), w)


def test_gradients_reach_the_maps_and_every_weight() -> None:
    G, maps = generator(noise=1), torch.randn(2, 2, 8, 8, requires_grad=True)
    G(maps, torch.randn(2, 1, 8, 8)).square().sum().backward()
    assert maps.grad is not None
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in G.parameters())


# --- the critic ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "seen"), [(2, 34), (3, 70), (4, 142)])
def test_a_value_of_the_critic_sees_so_many_pixels(layers: int, seen: int) -> None:
    torch.manual_seed(0)
    critic = PatchGAN(1, 2, "group", layers)
    for layer in critic.modules():  # group norm sees the whole image
        if isinstance(layer, nn.GroupNorm):
            layer.forward = lambda input: input  # type: ignore[method-assign]
    x = torch.randn(1, 1, 256, 256, requires_grad=True)
    out = critic(x)
    assert out.ndim == 3
    middle = out.shape[1] // 2
    (touched,) = torch.autograd.grad(out[0, middle, middle], x)
    rows = torch.nonzero(touched[0, 0].abs().sum(1)).flatten()
    assert int(rows.max() - rows.min()) + 1 == seen


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_critics_map_has_the_documented_size(layers: int) -> None:
    assert PatchGAN(5, 4, layers=layers)(torch.randn(2, 5, 64, 32)).shape == (
        2,
        64 // 2**layers - 2,
        32 // 2**layers - 2,
    )


def test_the_published_critic_has_the_published_widths() -> None:
    widths = [layer.out_channels for layer in PatchGAN(6, 64).modules() if isinstance(layer, nn.Conv2d)]
    assert widths == [64, 128, 256, 512, 1]
    wide = [
        layer.out_channels for layer in PatchGAN(6, 64, layers=5).modules() if isinstance(layer, nn.Conv2d)
    ]
    assert wide == [64, 128, 256, 512, 512, 512, 1]


def test_both_critics_take_a_map_and_an_image_behind_each_other() -> None:
    pair = torch.randn(2, 2 + 3, 32, 32)
    assert PatchCritic(5, 4)(pair).shape == (2, 8, 8)
    assert PatchGAN(5, 4)(pair).shape == (2, 2, 2)
