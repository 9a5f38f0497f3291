"""Image classifiers: the scattering transform against its definition, and its invariances."""

from __future__ import annotations

import cmath
import math

import pytest
import torch

from fedstill.core.errors import ModelError
from fedstill.models import build
from fedstill.models.image_classifiers import WaveletModuli, gaussian_averages, morlet
from fedstill.node.limits import bytes_per_input

H, W, L = 8, 12, 4


def wavelet(j: int, angle: int) -> list[list[complex]]:
    """Return a periodic wavelet, computed from its definition."""
    sigma, xi, slant = 0.8 * 2**j, 0.75 * math.pi / 2**j, 4 / L
    theta = (L / 2 - 1 - angle) * math.pi / L

    def parts(y: int, x: int) -> tuple[float, complex]:
        bell, wave = 0.0, 0j
        for a in range(-2, 3):
            for b in range(-2, 3):
                v, u = y + a * H, x + b * W
                along = u * math.cos(theta) + v * math.sin(theta)
                across = v * math.cos(theta) - u * math.sin(theta)
                here = math.exp(-(along**2 + slant**2 * across**2) / (2 * sigma**2))
                bell, wave = bell + here, wave + here * cmath.exp(1j * xi * along)
        return bell, wave

    each = [[parts(y, x) for x in range(W)] for y in range(H)]
    mean = sum(wave for row in each for _, wave in row) / sum(bell for row in each for bell, _ in row)
    norm = slant / (2 * math.pi * sigma**2)
    return [[norm * (wave - mean * bell) for bell, wave in row] for row in each]


def modulus(u: list[list[float]], psi: list[list[complex]]) -> list[list[float]]:
    """Return |u * psi|, where * is circular convolution."""
    positions = [(y, x) for y in range(H) for x in range(W)]
    return [
        [abs(sum(u[b][a] * psi[(y - b) % H][(x - a) % W] for b, a in positions)) for x in range(W)]
        for y in range(H)
    ]


def test_scattering_coefficients_match_definition() -> None:
    image = torch.randn(1, 1, H, W, generator=torch.Generator().manual_seed(0))
    coefficients = WaveletModuli(H, W, L)(image)[0]
    assert coefficients.shape == (1 + 2 * L + L * L, H // 4, W // 4)
    low = lambda u: gaussian_averages(H) @ torch.tensor(u, dtype=torch.float64) @ gaussian_averages(W).T  # noqa: E731
    u = image[0, 0].tolist()
    torch.testing.assert_close(coefficients[0].double(), low(u), atol=1e-5, rtol=1e-4)
    fine, coarse = (modulus(u, wavelet(j, 1)) for j in (0, 1))
    torch.testing.assert_close(coefficients[1 + 1].double(), low(fine), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(coefficients[1 + L + 1].double(), low(coarse), atol=1e-5, rtol=1e-4)
    second = modulus(fine, wavelet(1, 3))
    torch.testing.assert_close(coefficients[1 + 2 * L + L + 3].double(), low(second), atol=1e-5, rtol=1e-4)


def test_averages_are_gaussian_around_every_fourth_position() -> None:
    rows = gaussian_averages(8)
    torch.testing.assert_close(rows.sum(1), torch.ones(2, dtype=torch.float64))
    assert rows[1].argmax() == 4
    assert rows[0, 2] / rows[0, 0] == pytest.approx(math.exp(-4 / (2 * 1.6**2)), rel=1e-2)
    torch.testing.assert_close(rows[0].roll(4), rows[1])


def test_wavelets_sum_to_zero_and_have_real_spectra() -> None:
    psi = morlet(H, W, 1, 2, L)
    assert psi.sum().abs() < 1e-12
    assert torch.fft.fft2(psi).imag.abs().max() < 1e-12
    flat = WaveletModuli(H, W, L)(torch.full((1, 3, H, W), 0.7))
    per = 1 + 2 * L + L * L
    assert flat.shape[1] == 3 * per
    torch.testing.assert_close(flat[:, ::per], torch.full((1, 3, 2, 3), 0.7))
    assert flat.view(1, 3, per, 2, 3)[:, :, 1:].abs().max() < 1e-5


def test_wavelets_with_many_angles_are_periodic() -> None:
    assert torch.fft.fft2(morlet(8, 8, 1, 3, 32)).imag.abs().max() < 1e-5


def test_batched_coefficients_equal_single_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    transform, images = WaveletModuli(H, W, L), torch.randn(5, 2, H, W)
    whole = transform(images)
    monkeypatch.setattr("fedstill.models.image_classifiers.PIXELS_PER_BATCH", 2 * H * W * 2)  # two images
    torch.testing.assert_close(transform(images), whole, atol=1e-6, rtol=1e-5)


def test_memory_estimate_covers_input_gradients() -> None:
    """Only the last layer has parameters, but gradients with respect to inputs pass through all layers."""
    least = 4 * (1 + 2 * L + L * L) * H * W  # each modulus in float32
    assert bytes_per_input(build(f"scattering:{L}", (1, H, W), 3, 0), (1, H, W)) > least


def test_rejects_images_smaller_than_averaging_squares() -> None:
    with pytest.raises(ModelError, match=r"3 x 28 .*4 or"):
        build("scattering", (1, 3, 28), 3, 0)


def test_shift_by_four_pixels_shifts_coefficients_by_one() -> None:
    transform, image = WaveletModuli(H, W, L), torch.randn(2, 1, H, W)
    torch.testing.assert_close(
        transform(image.roll(4, -1)), transform(image).roll(1, -1), atol=1e-5, rtol=1e-4
    )


def test_only_the_linear_layer_has_parameters() -> None:
    network = build("scattering:4", (1, H, W), 3, 0)
    assert list(network.state_dict()) == ["4.weight"]
    assert network.state_dict()["4.weight"].shape == (3, 25 * 2 * 3)
