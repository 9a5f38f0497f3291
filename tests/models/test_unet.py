"""U-Nets: shapes, split, stacking and DP-SGD."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedstill.core.errors import ModelError
from fedstill.models import build, check_module
from fedstill.models.extractor_head import Split, split_model
from fedstill.models.unet import UNet, unet_depth


def unet(shape: tuple[int, int, int] = (1, 16, 16), classes: int = 3, width: int = 4, seed: int = 0) -> UNet:
    torch.manual_seed(seed)
    return UNet(shape, classes, width)


@pytest.mark.parametrize("sides", [(4, 4), (8, 8), (12, 20), (16, 8), (64, 32), (28, 28)])
@pytest.mark.parametrize("channels", [1, 3])
def test_unet_returns_one_logit_per_class_and_pixel(channels: int, sides: tuple[int, int]) -> None:
    model = build("unet:4", (channels, *sides), 5, 0)
    assert model(torch.randn(2, channels, *sides)).shape == (2, 5, *sides)
    check_module(model, (channels, *sides), (5, *sides), "model")


@pytest.mark.parametrize(
    ("sides", "depth"),
    [
        ((64, 64), 4),
        ((256, 256), 4),
        ((128, 64), 4),
        ((32, 32), 4),
        ((16, 16), 3),
        ((12, 64), 2),
        ((6, 6), 1),
    ],
)
def test_unet_depth_follows_from_image_size(sides: tuple[int, int], depth: int) -> None:
    assert unet_depth(*sides) == depth
    latent = unet((1, *sides)).extractor.encoder(torch.zeros(1, 1, *sides))
    assert latent.shape == (1, 4 * 2**depth, sides[0] // 2**depth, sides[1] // 2**depth)


def test_published_width_has_published_channels_and_size() -> None:
    model = UNet((1, 64, 64), 2, 64)
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    widths = [layer.out_channels for layer in convolutions]
    assert widths[:10] == [64, 64, 128, 128, 256, 256, 512, 512, 1024, 1024]
    assert widths[10:] == [512, 512, 256, 256, 128, 128, 64, 64, 2]
    # 31.0 million parameters, as in Ronneberger et al.
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(31.03e6, rel=1e-3)


def test_skip_connections_carry_fine_detail() -> None:
    """Without upsampled features, the output still depends on single pixels of the input."""
    model = unet()
    with torch.no_grad():
        for up in model.extractor.decoder.ups:
            up.weight.zero_()  # type: ignore[operator]
            up.bias.zero_()  # type: ignore[operator]
    a, b = torch.zeros(1, 1, 16, 16), torch.zeros(1, 1, 16, 16)
    b[0, 0, 3, 3] = 1
    assert not torch.equal(model(a), model(b))


def test_unet_splits_before_its_last_layer() -> None:
    model = unet()
    parts = split_model(model, "model")
    assert isinstance(parts, Split)
    assert isinstance(parts.head, nn.Conv2d)
    assert parts.head.kernel_size == (1, 1)
    x = torch.randn(2, 1, 16, 16)
    assert parts.extractor(x).shape == (2, 4, 16, 16)
    assert torch.equal(parts(x), model(x))
    assert torch.equal(parts.get_submodule("extractor.encoder")(x), model.extractor.encoder(x))
    assert {id(p) for p in parts.parameters()} == {id(p) for p in model.parameters()}


# --- with batch norm ------------------------------------------------------------------------------


def test_batch_norm_unet_uses_running_statistics_in_evaluation() -> None:
    plain, model = build("unet:4", (1, 16, 16), 3, 0), build("bn-unet:4", (1, 16, 16), 3, 0)
    ours = dict(model.named_parameters())
    assert all(torch.equal(ours[name], value) for name, value in plain.named_parameters())
    x = torch.randn(4, 1, 16, 16)
    model(x)
    met = model.get_submodule("extractor.encoder.blocks.0.0")(x)
    norm = model.get_submodule("extractor.encoder.blocks.0.1")
    assert torch.allclose(norm.running_mean, 0.1 * met.mean((0, 2, 3)), atol=1e-6)  # type: ignore[arg-type]
    # Group norm removes an image's contrast; batch norm's running statistics do not.
    model.eval()
    assert torch.allclose(plain(10 * x), plain(x), atol=1e-2)
    assert not torch.allclose(model(10 * x), model(x), atol=1e-2)


# --- the residual one ------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
def test_residual_unet_is_identity_at_initialization(channels: int) -> None:
    model, x = build("residual-unet:4", (channels, 16, 16), channels, 0), torch.randn(2, channels, 16, 16)
    torch.testing.assert_close(model(x), x)
    parts = split_model(model, "model")
    torch.testing.assert_close(parts.head(parts.extractor(x)), x)
    assert parts.extractor(x).shape == (2, 4 + channels, 16, 16)
    check_module(model, (channels, 16, 16), (channels, 16, 16), "model")


def test_residual_unet_learns_the_residual() -> None:
    model, x = build("residual-unet:4", (1, 8, 8), 1, 0), torch.randn(8, 1, 8, 8)
    y, adam = x + x.roll(1, 3), torch.optim.Adam(model.parameters(), 1e-2)
    first = (model(x) - y).abs().mean().item()
    for _ in range(60):
        loss = (model(x) - y).abs().mean()
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            parameter.grad = gradient
        adam.step()
    assert loss.item() < 0.5 * first


def test_rejects_residual_unet_with_other_channels() -> None:
    with pytest.raises(ModelError, match=r"2 output .*expected 1"):
        build("residual-unet:4", (1, 8, 8), 2, 0)
