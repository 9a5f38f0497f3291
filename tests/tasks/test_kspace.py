"""Undersampling of k-space, against numpy and by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core.errors import ArgumentError
from fedstill.tasks.reconstruction import lines, undersample

whole = st.sampled_from([8, 16, 30, 64, 128, 320])


@pytest.mark.parametrize(("acceleration", "centre", "middle"), [(4, 0.08, 26), (8, 0.04, 13)])
def test_the_fastmri_masks(acceleration: int, centre: float, middle: int) -> None:
    """320 columns: 8 and 4 per cent in the middle, one line in 4 or in 8 in all."""
    mask = lines(320, acceleration, centre)
    first = (320 - middle + 1) // 2
    assert mask[first : first + middle].all()
    assert mask[160]  # the zero frequency
    assert mask.sum() == 320 // acceleration
    assert mask[:first].any()
    assert mask[first + middle :].any()


@given(whole, st.integers(2, 8), st.integers(0, 50))
def test_exactly_so_many_lines_and_the_middle_among_them(width: int, acceleration: int, seed: int) -> None:
    mask = lines(width, acceleration, 0.1, seed)
    assert int(mask.sum()) == max(round(width / acceleration), 1)
    assert bool(mask[width // 2]) or round(width * 0.1) == 0


def test_one_mask_for_everyone_and_another_seed_another_one() -> None:
    torch.manual_seed(0)
    first = lines(64, 4, 0.08)
    torch.manual_seed(1)
    assert torch.equal(lines(64, 4, 0.08), first)
    assert not torch.equal(lines(64, 4, 0.08, 1), first)


def test_a_centre_with_more_lines_than_may_be_measured_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"task.centre is 0.3: allowed is up to 0.25"):
        lines(64, 4, 0.3)
    assert lines(64, 4, 0.25).sum() == 16


def test_by_hand() -> None:
    """Columns 1 0 | 1 0: the mean is 1/2, the other line the alternation."""
    image = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    middle = torch.tensor([False, True])  # the zero frequency alone
    torch.testing.assert_close(undersample(image, middle), torch.full((2, 2), 0.5))
    torch.testing.assert_close(undersample(image, ~middle), torch.full((2, 2), 0.5))
    torch.testing.assert_close(undersample(image, torch.tensor([True, True])), image)


def test_gradients_pass_and_are_right() -> None:
    image = torch.rand(1, 1, 4, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: undersample(x, lines(8, 2, 0.2)), image)
    black = torch.zeros(1, 1, 8, 8, requires_grad=True)
    (slope,) = torch.autograd.grad(undersample(black, lines(8, 2, 0.2)).sum(), black)
    assert slope.isfinite().all()
