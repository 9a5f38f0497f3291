"""Masks of the imaged body, on synthetic heads with known outlines."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from fedstill.tasks.label_maps import body_mask


def head(channels: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """One image of a bright skull around a dark cavity, in noisy air; and the mask of all in the skull."""
    rows, columns = torch.meshgrid(torch.arange(40.0), torch.arange(48.0), indexing="ij")
    radius = (((rows - 20) / 16) ** 2 + ((columns - 24) / 14) ** 2).sqrt()
    image = torch.where(radius < 1, 0.8, 0.02)
    image[(radius < 0.7) & (radius > 0.5)] = 0.0  # fluid, as dark as air
    image = image + 0.01 * torch.rand(40, 48, generator=torch.Generator().manual_seed(0))
    return image.expand(1, channels, 40, 48).clone(), (radius < 1).unsqueeze(0)


def agreement(mask: torch.Tensor, true: torch.Tensor) -> float:
    """Return the share of equal pixels."""
    return mask.bool().eq(true).double().mean().item()


def test_body_mask_fills_cavities_at_any_scale() -> None:
    image, body = head()
    mask = body_mask(image)
    assert mask.dtype == torch.uint8
    assert mask.shape == (1, 40, 48)
    assert agreement(mask, body) > 0.99
    assert torch.equal(body_mask((image - 0.5) / 0.25), mask)  # as normalized inputs are


def test_body_mask_is_the_largest_piece() -> None:
    image, body = head()
    image[0, 0, 1:5, 1:5] = 1.0  # a marker next to the head
    assert agreement(body_mask(image), body) > 0.99


def test_body_mask_ignores_one_channel_with_raised_background() -> None:
    image, body = head(3)
    image[0, 0] = image[0, 0] * 0.5 + 0.5  # air at half of the range
    image[0, 0, 0, 0] = 0.0
    assert agreement(body_mask(image), body) > 0.99
    assert agreement(body_mask(image[:, :1]), body) < 0.9  # alone it does


def test_constant_image_has_no_body() -> None:
    assert not body_mask(torch.full((2, 3, 8, 8), -1.0)).any()
    assert body_mask(torch.zeros(0, 3, 8, 8)).shape == (0, 8, 8)


def test_body_of_few_pixels_is_found() -> None:
    image = torch.zeros(1, 1, 20, 20)
    image[0, 0, 9, 9] = 1.0  # below the percentile that ends the range
    assert body_mask(image).sum() == 1


PACK = Path(os.environ.get("FEDSTILL_DATA", "")) / "brain_mri_lgg.npz"


@pytest.mark.skipif(not PACK.is_file(), reason="needs the pack brain_mri_lgg.npz in FEDSTILL_DATA")
def test_body_masks_of_real_heads_contain_all_tumors() -> None:
    pack = np.load(PACK)
    images = torch.from_numpy(pack["images"][::10]).permute(0, 3, 1, 2).float() / 255
    mask = body_mask(images)
    assert mask[torch.from_numpy(pack["masks"][::10]) > 0].all()
    share = mask.double().mean((1, 2))
    assert share.min() > 0.05  # near the top of a head it is small
    assert share.median() < 0.6
    assert (share > 0.9).sum() <= 1  # images of little but noise
