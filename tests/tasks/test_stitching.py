"""Patches cut from a picture and put back."""

from __future__ import annotations

import pytest
import torch

from fedstill.core.dataset import Cases
from fedstill.core.errors import DataError
from fedstill.tasks.instances import stitch


def cut(picture: torch.Tensor, places: list[tuple[int, int]], size: int) -> torch.Tensor:
    return torch.stack([picture[:, top : top + size, left : left + size] for top, left in places])


def cases(of: list[int], places: list[tuple[int, int]], *sizes: tuple[int, int]) -> Cases:
    names = tuple("abcdef"[: len(sizes)])
    return Cases(torch.tensor(of), names, ("",) * len(sizes), torch.tensor(places), sizes)


PLACES = [(0, 0), (0, 3), (4, 0), (4, 3)]


def test_patches_that_overlap_give_back_the_picture_in_any_order() -> None:
    picture = torch.randn(2, 10, 9, generator=torch.Generator().manual_seed(0))
    order = [2, 0, 3, 1]
    patches = cut(picture, PLACES, 6)[order]
    (found,) = stitch(patches, cases([0] * 4, [PLACES[n] for n in order], (10, 9)))
    torch.testing.assert_close(found.values, picture)
    assert found.covered.all()


def test_each_case_has_its_own_picture_and_keeps_its_number() -> None:
    patches = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 1, 2, 2)
    found = list(stitch(patches, cases([2, 0, 2], [(0, 0), (0, 0), (2, 0)], (2, 2), (9, 9), (4, 2))))
    assert [(one.case, tuple(one.values.shape)) for one in found] == [(0, (1, 2, 2)), (2, (1, 4, 2))]
    assert found[1].values.flatten().tolist() == [0.0] * 4 + [2.0] * 4


def test_what_no_patch_covers_is_said() -> None:
    (found,) = stitch(torch.ones(1, 1, 2, 2), cases([0], [(1, 1)], (4, 4)))
    assert found.covered.nonzero().tolist() == [[1, 1], [1, 2], [2, 1], [2, 2]]
    assert found.values.sum() == 4


def test_what_sticks_out_of_a_picture_smaller_than_a_patch_is_cut_off() -> None:
    patch = torch.arange(16.0).view(1, 1, 4, 4)
    (found,) = stitch(patch, cases([0], [(0, 0)], (3, 2)))
    assert torch.equal(found.values, patch[0, :, :3, :2])


def test_patches_outside_their_picture_or_without_places_are_refused() -> None:
    with pytest.raises(
        DataError, match=r"patch 0 is at \(4, 0\): allowed are places in its picture of 4 x 4"
    ):
        list(stitch(torch.ones(1, 1, 2, 2), cases([0], [(4, 0)], (4, 4))))
    with pytest.raises(DataError, match="no places"):
        list(stitch(torch.ones(1, 1, 2, 2), Cases(torch.tensor([0]), ("a",), ("",))))
