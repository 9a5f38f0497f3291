"""SSIM, PSNR and NMSE, against scikit-image and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedstill.tasks import reconstruction


def pair(count: int = 3, side: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    true = torch.rand(count, 1, side, side, generator=generator)
    noise = torch.linspace(0.05, 0.3, count).view(-1, 1, 1, 1)
    return (true + noise * torch.randn(true.shape, generator=generator)).clamp(0, 1), true


def test_against_scikit_image() -> None:
    metrics = pytest.importorskip("skimage.metrics")
    found, true = pair()
    for row in range(len(true)):
        x, y = found[row, 0].numpy(), true[row, 0].numpy()
        # scikit-image leaves the border out, which is reflected here.
        wide = (np.pad(image, 5, mode="reflect") for image in (y, x))
        expected = metrics.structural_similarity(
            *wide, data_range=1.0, gaussian_weights=True, sigma=1.5, use_sample_covariance=False
        )
        assert reconstruction.ssim(found, true)[row].item() == pytest.approx(100 * expected, abs=1e-3)
        expected = metrics.peak_signal_noise_ratio(y, x, data_range=1.0)
        assert reconstruction.psnr(found, true)[row].item() == pytest.approx(expected, abs=1e-4)
        expected = metrics.normalized_root_mse(y, x, normalization="euclidean") ** 2
        assert reconstruction.nmse(found, true)[row].item() == pytest.approx(expected, rel=1e-4)


def test_by_hand() -> None:
    true, found = torch.full((1, 1, 8, 8), 0.5), torch.full((1, 1, 8, 8), 0.7)
    assert reconstruction.psnr(found, true).item() == pytest.approx(-10 * math.log10(0.04))
    assert reconstruction.nmse(found, true).item() == pytest.approx(0.04 / 0.25)


def test_what_is_outside_the_range_is_cut_off() -> None:
    true = torch.ones(1, 1, 16, 16)
    for name in ("ssim", "psnr", "nmse"):
        metric = getattr(reconstruction, name)
        assert metric(3 * true, true).item() == pytest.approx(metric(true, true).item())


def test_each_image_is_judged_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    found, true = pair(5)
    together = reconstruction.ssim(found, true)
    monkeypatch.setattr(reconstruction, "AT_ONCE", 2)
    torch.testing.assert_close(reconstruction.ssim(found, true), together)
    alone = torch.cat([reconstruction.ssim(found[row : row + 1], true[row : row + 1]) for row in range(5)])
    torch.testing.assert_close(alone, together)
    assert (together.diff() < 0).all()  # more noise, less alike


def test_a_black_image_has_no_nmse() -> None:
    assert reconstruction.nmse(torch.rand(1, 1, 8, 8), torch.zeros(1, 1, 8, 8)).isnan().all()
