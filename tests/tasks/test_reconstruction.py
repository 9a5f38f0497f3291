"""Reconstruction: SSIM, PSNR and NMSE against scikit-image, k-space masks, and the task itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage

from fedstill.core.dataset import CaseIndex, TensorData
from fedstill.tasks import reconstruction
from fedstill.tasks.reconstruction import Reconstruction, ReconstructionConfig, kspace_mask, undersample
from tests.support.errors import raises_invalid


def image_pair(count: int = 3, side: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    true = torch.rand(count, 1, side, side, generator=generator)
    noise = torch.linspace(0.05, 0.3, count).view(-1, 1, 1, 1)
    return (true + noise * torch.randn(true.shape, generator=generator)).clamp(0, 1), true


def test_image_metrics_equal_scikit_image() -> None:
    metrics = pytest.importorskip("skimage.metrics")
    predicted, true = image_pair()
    for row in range(len(true)):
        x, y = predicted[row, 0].numpy(), true[row, 0].numpy()
        # scikit-image omits the border, which fedstill pads by reflection.
        wide = (np.pad(image, 5, mode="reflect") for image in (y, x))
        expected = metrics.structural_similarity(
            *wide, data_range=1.0, gaussian_weights=True, sigma=1.5, use_sample_covariance=False
        )
        assert reconstruction.ssim(predicted, true)[row].item() == pytest.approx(100 * expected, abs=1e-3)
        expected = metrics.peak_signal_noise_ratio(y, x, data_range=1.0)
        assert reconstruction.psnr(predicted, true)[row].item() == pytest.approx(expected, abs=1e-4)
        expected = metrics.normalized_root_mse(y, x, normalization="euclidean") ** 2
        assert reconstruction.nmse(predicted, true)[row].item() == pytest.approx(expected, rel=1e-4)


def test_psnr_and_nmse_by_hand() -> None:
    true, predicted = torch.full((1, 1, 8, 8), 0.5), torch.full((1, 1, 8, 8), 0.7)
    assert reconstruction.psnr(predicted, true).item() == pytest.approx(-10 * math.log10(0.04))
    assert reconstruction.nmse(predicted, true).item() == pytest.approx(0.04 / 0.25)


def test_predictions_are_clipped_to_the_range() -> None:
    true = torch.ones(1, 1, 16, 16)
    for name in ("ssim", "psnr", "nmse"):
        metric = getattr(reconstruction, name)
        assert metric(3 * true, true).item() == pytest.approx(metric(true, true).item())


def test_ssim_of_batches_equals_single_images(monkeypatch: pytest.MonkeyPatch) -> None:
    predicted, true = image_pair(5)
    together = reconstruction.ssim(predicted, true)
    monkeypatch.setattr(reconstruction, "IMAGES_PER_BATCH", 2)
    torch.testing.assert_close(reconstruction.ssim(predicted, true), together)
    alone = torch.cat(
        [reconstruction.ssim(predicted[row : row + 1], true[row : row + 1]) for row in range(5)]
    )
    torch.testing.assert_close(alone, together)
    assert (together.diff() < 0).all()  # more noise, lower similarity


def test_nmse_of_black_image_is_nan() -> None:
    assert reconstruction.nmse(torch.rand(1, 1, 8, 8), torch.zeros(1, 1, 8, 8)).isnan().all()


TASK = Reconstruction()


def heads(count: int = 4, side: int = 32) -> torch.Tensor:
    """Return images in -1..1: a bright ellipse with texture on black."""
    generator = torch.Generator().manual_seed(0)
    inside = TASK.sample_maps(count, side, side, generator).float()
    return (inside * (0.5 + 0.5 * torch.rand(count, side, side, generator=generator)) * 2 - 1).unsqueeze(1)


def data(count: int = 4, side: int = 32) -> TensorData:
    x = heads(count, side)
    return TensorData(TASK.observe(x), x)


def test_config_options_reach_the_task() -> None:
    task = ReconstructionConfig(acceleration=8, center=0.04).make(1)
    assert isinstance(task, Reconstruction)
    assert (task.acceleration, task.center) == (8, 0.04)
    assert (TASK.acceleration, TASK.center) == (4, 0.08)
    assert ReconstructionConfig().make(("image",)).output_shape((1, 64, 48)) == (1, 64, 48)
    assert (TASK.metric, TASK.kind, TASK.condition_channels) == ("ssim", "image", 2)


# --- data ------------------------------------------------------------------------------------------


def test_rejects_several_classes() -> None:
    with raises_invalid("classes", 3, "1"):
        Reconstruction(3)


# --- losses ----------------------------------------------------------------------------------------


def test_loss_is_l1_per_model() -> None:
    outputs = torch.tensor([[0.5, -0.5], [1.0, 1.0]]).view(2, 2, 1, 1, 1).expand(-1, -1, -1, 4, 4)
    losses = TASK.loss(outputs, torch.zeros(2, 2, 1, 4, 4), 0.3)
    torch.testing.assert_close(losses, torch.tensor([0.5, 1.0]))


def test_counts_one_example_per_image() -> None:
    assert TASK.counts(data(3)).tolist() == [3.0]


def test_uniqueness_loss_is_minus_weighted_variance() -> None:
    responses = torch.tensor([0.0, 4.0]).view(2, 1, 1, 1, 1).expand(2, 3, 1, 4, 4)
    pi = torch.tensor([0.75, 0.25])
    # Mean 1: 0.75 * 1 + 0.25 * 9 = 3.
    assert TASK.uniqueness_loss(responses, pi).item() == pytest.approx(-3.0)
    assert TASK.uniqueness_loss(responses[:1].expand(2, -1, -1, -1, -1), pi).item() == 0


def test_confidence_and_balance_losses_are_zero() -> None:
    responses = torch.randn(2, 3, 1, 4, 4)
    assert TASK.confidence_loss(responses, torch.ones(2) / 2).item() == 0
    assert TASK.balance_loss(responses[0]).item() == 0


def test_ensemble_is_mean_weighted_by_image_counts() -> None:
    responses = torch.tensor([0.0, 4.0]).view(2, 1, 1, 1, 1).expand(2, 3, 1, 4, 4)
    weights = TASK.importance_weights(torch.tensor([[30.0], [10.0]]))
    for how in ("logits", "log_probs", "probs", "consensus"):
        torch.testing.assert_close(TASK.ensemble(responses, weights, how), torch.ones(3, 1, 4, 4))
    share = TASK.expertise(torch.zeros(3, 1, 4, 4), weights)
    torch.testing.assert_close(share, torch.tensor([[0.75], [0.25]]).expand(2, 3))


def test_distillation_loss_by_hand() -> None:
    student, target = torch.tensor([[1.0, -3.0]]).view(1, 1, 1, 2), torch.zeros(1, 1, 1, 2)
    assert TASK.distillation_loss(student, target, 1.0).tolist() == [2.0]
    assert TASK.distillation_loss(student, target, math.inf).tolist() == [2.5]


# --- evaluation ------------------------------------------------------------------------------------


def test_metrics_are_means_over_images() -> None:
    true = heads()
    predicted = (true + 0.2 * torch.randn(true.shape, generator=torch.Generator().manual_seed(1))).clamp(
        -1, 1
    )
    metrics = TASK.compute_metrics(predicted, true)
    assert set(metrics) == {metric.key for metric in TASK.metrics}
    for key in metrics:
        values = getattr(reconstruction, key)((predicted + 1) / 2, (true + 1) / 2)
        assert metrics[key] == pytest.approx(values.mean().item())
    best = TASK.compute_metrics(true, true)
    assert best["ssim"] > metrics["ssim"]
    assert best["nmse"] == 0 < metrics["nmse"]


def test_nmse_ignores_black_images() -> None:
    true = torch.cat([heads(1), torch.full((1, 1, 32, 32), -1.0)])
    predicted = true + 0.1
    assert TASK.compute_metrics(predicted, true)["nmse"] == pytest.approx(
        TASK.compute_metrics(predicted[:1], true[:1])["nmse"]
    )
    assert math.isnan(TASK.compute_metrics(predicted[1:], true[1:])["nmse"])


def test_case_scores_are_means_over_present_cases() -> None:
    true = heads(3)
    predicted = true * torch.tensor([1.0, 0.5, 0.2]).view(-1, 1, 1, 1)
    image_scores = TASK.case_scores(predicted, true)
    assert image_scores is not None
    assert image_scores.shape == (3,)
    assert (image_scores.diff() < 0).all()
    cases = CaseIndex(torch.tensor([2, 0, 2]), ("a", "b", "c"), ("", "", ""))
    scores = TASK.case_scores(predicted, true, cases)
    assert scores is not None
    assert scores.shape == (2,)
    assert scores[0] == image_scores[1]
    assert scores[1].item() == pytest.approx((image_scores[0] + image_scores[2]).item() / 2)


# --- observation and label maps --------------------------------------------------------------------


def test_fewer_measured_lines_give_worse_observation() -> None:
    x = heads()
    four, eight = (
        TASK.compute_metrics(task.observe(x), x)["psnr"] for task in (TASK, Reconstruction(1, 8, 0.04))
    )
    assert eight < four < 60
    WIDTHS = Reconstruction(1, 2, 0.5).observe(torch.ones(1, 1, 8, 8))
    # a constant image is contained in the middle line
    torch.testing.assert_close(WIDTHS, torch.ones(1, 1, 8, 8))


def test_observation_is_differentiable() -> None:
    black = torch.full((1, 1, 8, 8), -1.0)
    torch.testing.assert_close(TASK.observe(black), black)
    x = heads(1, 16).requires_grad_()
    (gradient,) = torch.autograd.grad(TASK.observe(x).square().sum(), x)
    assert gradient.abs().sum() > 0
    stacked = TASK.observe(x.detach().expand(3, 2, 1, 16, 16))
    torch.testing.assert_close(stacked[2, 1], TASK.observe(x.detach())[0])


def test_label_maps_are_outlines_encoded_as_inside_and_outside() -> None:
    part = data(2)
    maps = TASK.label_maps(part)
    assert maps.shape == (2, 32, 32)
    assert maps.dtype == torch.uint8
    inside = part.targets[:, 0] > -0.9
    assert (maps.bool() & inside).sum() > 0.95 * inside.sum()
    condition = TASK.encode_maps(maps)
    assert condition.shape == (2, 2, 32, 32)
    assert torch.equal(condition[:, 1] == 1, maps.bool())
    assert torch.equal(condition[:, 0], -condition[:, 1])
    assert TASK.real_images(part) is part.targets
    assert TASK.targets_from_maps(maps, part.targets) is part.targets


def test_sampled_heads_are_connected_centered_and_seeded() -> None:
    maps = TASK.sample_maps(40, 48, 64, torch.Generator().manual_seed(3))
    assert maps.shape == (40, 48, 64)
    assert torch.equal(maps, TASK.sample_maps(40, 48, 64, torch.Generator().manual_seed(3)))
    assert not torch.equal(maps, TASK.sample_maps(40, 48, 64, torch.Generator().manual_seed(4)))
    for one in maps.numpy():
        assert ndimage.label(one)[1] == 1
        assert one.max() == one[24, 32] == 1
        assert 0.15 < one.mean() < 0.65


WIDTHS = st.sampled_from([8, 16, 30, 64, 128, 320])


@pytest.mark.parametrize(("acceleration", "center", "middle"), [(4, 0.08, 26), (8, 0.04, 13)])
def test_kspace_mask_follows_fastmri(acceleration: int, center: float, middle: int) -> None:
    """Check masks of 320 columns: 8 % and 4 % in the middle, and one in 4 or in 8 lines in total."""
    mask = kspace_mask(320, acceleration, center)
    first = (320 - middle + 1) // 2
    assert mask[first : first + middle].all()
    assert mask[160]  # zero frequency
    assert mask.sum() == 320 // acceleration
    assert mask[:first].any()
    assert mask[first + middle :].any()


@given(WIDTHS, st.integers(2, 8), st.integers(0, 50))
def test_kspace_mask_has_exact_line_count_and_center(width: int, acceleration: int, seed: int) -> None:
    mask = kspace_mask(width, acceleration, 0.1, seed)
    assert int(mask.sum()) == max(round(width / acceleration), 1)
    assert bool(mask[width // 2]) or round(width * 0.1) == 0


def test_kspace_mask_depends_on_its_seed_only() -> None:
    torch.manual_seed(0)
    first = kspace_mask(64, 4, 0.08)
    torch.manual_seed(1)
    assert torch.equal(kspace_mask(64, 4, 0.08), first)
    assert not torch.equal(kspace_mask(64, 4, 0.08, 1), first)


def test_rejects_center_with_too_many_lines() -> None:
    with raises_invalid("task.center", 0.3, "up to 0.25"):
        kspace_mask(64, 4, 0.3)
    assert kspace_mask(64, 4, 0.25).sum() == 16


def test_undersampling_by_hand() -> None:
    """Columns alternate between 1 and 0: the middle line is the mean 1/2, the other line the alternation."""
    image = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    middle = torch.tensor([False, True])  # zero frequency only
    torch.testing.assert_close(undersample(image, middle), torch.full((2, 2), 0.5))
    torch.testing.assert_close(undersample(image, ~middle), torch.full((2, 2), 0.5))
    torch.testing.assert_close(undersample(image, torch.tensor([True, True])), image)


def test_undersampling_gradients_are_correct() -> None:
    image = torch.rand(1, 1, 4, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: undersample(x, kspace_mask(8, 2, 0.2)), image)
    black = torch.zeros(1, 1, 8, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(undersample(black, kspace_mask(8, 2, 0.2)).sum(), black)
    assert gradient.isfinite().all()
