"""Maps made without labels: masks of the imaged body, and random maps of regions and nuclei."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import ndimage

from fedstill.core.seeds import torch_generator
from fedstill.tasks.label_maps import (
    MAX_COVERAGE,
    NUCLEUS_RADIUS,
    body_mask,
    sample_body_regions,
    sample_nuclei,
)


def head(channels: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an image of a bright skull around a dark cavity in noisy air, and the mask of the whole head."""
    rows, columns = torch.meshgrid(torch.arange(40.0), torch.arange(48.0), indexing="ij")
    radius = (((rows - 20) / 16) ** 2 + ((columns - 24) / 14) ** 2).sqrt()
    image = torch.where(radius < 1, 0.8, 0.02)
    image[(radius < 0.7) & (radius > 0.5)] = 0.0  # fluid, as dark as air
    image = image + 0.01 * torch.rand(40, 48, generator=torch.Generator().manual_seed(0))
    return image.expand(1, channels, 40, 48).clone(), (radius < 1).unsqueeze(0)


def agreement(mask: torch.Tensor, true: torch.Tensor) -> float:
    """Return the share of pixels in which both masks are equal."""
    return mask.bool().eq(true).double().mean().item()


def test_body_mask_fills_cavities_at_any_scale() -> None:
    image, body = head()
    mask = body_mask(image)
    assert mask.dtype == torch.uint8
    assert mask.shape == (1, 40, 48)
    assert agreement(mask, body) > 0.99
    assert torch.equal(body_mask((image - 0.5) / 0.25), mask)  # normalized as the inputs of a model


def test_body_mask_is_the_largest_piece() -> None:
    image, body = head()
    image[0, 0, 1:5, 1:5] = 1.0  # a marker next to the head
    assert agreement(body_mask(image), body) > 0.99


def test_body_mask_ignores_one_channel_with_raised_background() -> None:
    image, body = head(3)
    image[0, 0] = image[0, 0] * 0.5 + 0.5  # raises the air to half of the range
    image[0, 0, 0, 0] = 0.0
    assert agreement(body_mask(image), body) > 0.99
    assert agreement(body_mask(image[:, :1]), body) < 0.9  # this channel alone fails


def test_constant_image_has_no_body() -> None:
    assert not body_mask(torch.full((2, 3, 8, 8), -1.0)).any()
    assert body_mask(torch.zeros(0, 3, 8, 8)).shape == (0, 8, 8)


def test_body_of_few_pixels_is_found() -> None:
    image = torch.zeros(1, 1, 20, 20)
    image[0, 0, 9, 9] = 1.0  # below the percentile used as the upper end of the range
    assert body_mask(image).sum() == 1


PACK = Path(os.environ.get("FEDSTILL_DATA", "")) / "brain_mri_lgg.npz"


@pytest.mark.skipif(not PACK.is_file(), reason="needs the pack brain_mri_lgg.npz in FEDSTILL_DATA")
def test_body_masks_of_real_heads_contain_all_tumors() -> None:
    pack = np.load(PACK)
    images = torch.from_numpy(pack["images"][::10]).permute(0, 3, 1, 2).float() / 255
    mask = body_mask(images)
    assert mask[torch.from_numpy(pack["masks"][::10]) > 0].all()
    share = mask.double().mean((1, 2))
    assert share.min() > 0.05  # small near the top of the head
    assert share.median() < 0.6
    assert (share > 0.9).sum() <= 1  # images that contain almost only noise


def generator(seed: int = 0) -> torch.Generator:
    return torch_generator(seed, "shapes")


@pytest.mark.parametrize(("height", "width"), [(64, 64), (32, 48)])
def test_regions_lie_in_one_body_and_are_sometimes_absent(height: int, width: int) -> None:
    maps = sample_body_regions(60, height, width, 1, generator())
    assert maps.shape == (60, height, width)
    assert maps.dtype == torch.uint8
    assert set(maps.unique().tolist()) == {0, 1, 2}
    for codes in maps.numpy():
        assert ndimage.label(codes > 0)[1] == 1  # regions lie inside the body
        assert 0.1 < (codes > 0).mean() < 0.9
    having = (maps == 2).flatten(1).any(1).double().mean().item()
    assert 0.35 < having < 0.85


def test_all_kinds_of_regions_occur() -> None:
    assert set(sample_body_regions(30, 32, 32, 3, generator()).unique().tolist()) == {0, 1, 2, 3, 4}


def test_synthetic_maps_follow_from_the_seed() -> None:
    first, second = (sample_body_regions(3, 32, 32, 2, generator()) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, sample_body_regions(3, 32, 32, 2, generator(1)))
    assert np.array_equal(sample_nuclei(64, 64, generator()), sample_nuclei(64, 64, generator()))
    assert not np.array_equal(sample_nuclei(64, 64, generator()), sample_nuclei(64, 64, generator(1)))


@pytest.mark.parametrize("seed", range(5))
def test_nuclei_do_not_touch_and_have_realistic_size(seed: int) -> None:
    labels = sample_nuclei(200, 160, generator(seed))
    count = labels.max()
    assert ndimage.label(labels > 0, structure=np.ones((3, 3)))[1] == count > 5
    largest = np.bincount(labels.ravel())[1:].max()
    assert largest < 3.2 * NUCLEUS_RADIUS[1] ** 2 + 10
    assert 0.03 < (labels > 0).mean() < MAX_COVERAGE + 0.02


def test_nuclei_cover_nine_to_thirty_percent() -> None:
    sampler = generator()
    shares = [(sample_nuclei(200, 160, sampler) > 0).mean() for _ in range(100)]
    assert 0.3 * MAX_COVERAGE <= min(shares) < 0.4 * MAX_COVERAGE
    assert 0.9 * MAX_COVERAGE < max(shares) < MAX_COVERAGE + 0.02
    assert np.mean(shares) == pytest.approx(0.65 * MAX_COVERAGE, rel=0.1)


def test_nuclei_are_placed_alike_in_rows_and_columns() -> None:
    sampler = generator()
    pixels = [np.argwhere(sample_nuclei(16, 16, sampler)) for _ in range(4000)]
    row, column = np.concatenate(pixels).mean(0)
    assert row == pytest.approx(column, abs=0.1)


def test_nuclei_are_ellipses_with_their_sampled_axes() -> None:
    """A filled ellipse of half axes a and b has variances a^2 / 4 and b^2 / 4 along them."""
    labels = sample_nuclei(300, 300, generator(3))
    flats = []
    for number in range(1, labels.max() + 1):
        pixels = np.argwhere(labels == number)
        if pixels.min() == 0 or pixels.max() == 299:
            continue  # cut off at the image border
        short, long = 2 * np.sqrt(np.linalg.eigvalsh(np.cov(pixels.T)))
        assert NUCLEUS_RADIUS[0] - 0.5 < long < NUCLEUS_RADIUS[1] + 0.5
        assert len(pixels) == pytest.approx(np.pi * short * long, rel=0.1)
        flats.append(short / long)
    assert len(flats) > 10
    assert 0.55 < min(flats) < 0.75 < max(flats) <= 1.0


def test_map_smaller_than_a_nucleus() -> None:
    assert sample_nuclei(4, 4, generator()).shape == (4, 4)


def test_sampled_bodies_are_asymmetric() -> None:
    """Waves have random phases, so the upper half of a body differs from the lower half."""
    differ = []
    for body in sample_body_regions(10, 201, 201, 0, generator()).bool():
        rows = torch.nonzero(body.any(1)).flatten()
        body = body[rows[0] : rows[-1] + 1]
        differ.append((body != body.flip(0)).sum().item() / body.sum().item())
    assert 0.05 < np.mean(differ) < 0.2
