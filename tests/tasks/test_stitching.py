"""Patches cut from a picture and put back."""

from __future__ import annotations

import torch

from fedstill.core.dataset import Cases
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
    ((found, covered),) = stitch(patches, cases([0] * 4, [PLACES[n] for n in order], (10, 9)))
    torch.testing.assert_close(found, picture)
    assert covered.all()


def test_each_case_has_its_own_picture() -> None:
    patches = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 1, 2, 2)
    found = list(stitch(patches, cases([2, 0, 2], [(0, 0), (0, 0), (2, 0)], (2, 2), (9, 9), (4, 2))))
    assert [one.shape for one, _ in found] == [(1, 2, 2), (1, 4, 2)]
    assert found[1][0].flatten().tolist() == [0.0] * 4 + [2.0] * 4


def test_what_no_patch_covers_is_said() -> None:
    ((found, covered),) = stitch(torch.ones(1, 1, 2, 2), cases([0], [(1, 1)], (4, 4)))
    assert covered.nonzero().tolist() == [[1, 1], [1, 2], [2, 1], [2, 2]]
    assert found.sum() == 4


def test_what_sticks_out_of_a_picture_smaller_than_a_patch_is_cut_off() -> None:
    patch = torch.arange(16.0).view(1, 1, 4, 4)
    ((found, _),) = stitch(patch, cases([0], [(0, 0)], (3, 2)))
    assert torch.equal(found, patch[0, :, :3, :2])
