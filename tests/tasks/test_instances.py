"""Nuclei: figures of stitched pictures, and maps for generators."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fedstill.core.dataset import Cases, TensorData
from fedstill.core.errors import ArgumentError
from fedstill.core.seeds import torch_generator
from fedstill.tasks.instances import Instances, InstancesConfig, stitch, three_classes

TASK = Instances()
Objects = npt.NDArray[np.int32]


def boxes(*corners: tuple[int, int, int, int], size: tuple[int, int] = (40, 40)) -> Objects:
    labels = np.zeros(size, dtype=np.int32)
    for number, (a, b, c, d) in enumerate(corners, 1):
        labels[a:b, c:d] = number
    return labels


def whole(*pictures: Objects) -> tuple[torch.Tensor, torch.Tensor]:
    """Certain logits of pictures and their targets, each an example."""
    targets = torch.from_numpy(np.stack([three_classes(one) for one in pictures])).long()
    return 40 * torch.nn.functional.one_hot(targets, 3).movedim(-1, 1).float(), targets


def cut(size: int, step: int, *pictures: Objects) -> tuple[torch.Tensor, torch.Tensor, Cases]:
    """The same, in patches."""
    outputs, targets, of, places = [], [], [], []
    for case, picture in enumerate(pictures):
        z, y = whole(picture)
        for top in range(0, picture.shape[0] - size + 1, step):
            for left in range(0, picture.shape[1] - size + 1, step):
                outputs.append(z[0, :, top : top + size, left : left + size])
                targets.append(y[0, top : top + size, left : left + size])
                of.append(case)
                places.append((top, left))
    names = tuple(f"slide {n}" for n in range(len(pictures)))
    sizes = tuple((one.shape[0], one.shape[1]) for one in pictures)
    cases = Cases(torch.tensor(of), names, ("",) * len(names), torch.tensor(places), sizes, pictures)
    return torch.stack(outputs), torch.stack(targets), cases


PERFECT = {"dice": 100, "object_dice": 100, "aji": 100, "pq": 100, "hd95": 0}
TWO = boxes((2, 18, 2, 18), (2, 18, 18, 34))  # 256 pixels each, side by side


def test_certain_and_right_is_perfect_also_where_objects_touch() -> None:
    assert TASK.compute_metrics(*whole(TWO)) == PERFECT


def test_touching_nuclei_found_as_one_have_a_perfect_dice_alone() -> None:
    _, targets = whole(TWO)
    merged, _ = whole((TWO > 0).astype(np.int32))
    metrics = TASK.compute_metrics(merged, targets)
    assert (metrics["dice"], metrics["hd95"]) == (100, 0)
    # one of both halves is matched: 256 of 512, and 256 more in the union
    assert metrics["aji"] == pytest.approx(100 * 256 / 768)
    # a half in the whole has a Dice of 512 / 768
    assert metrics["object_dice"] == pytest.approx(100 * 512 / 768)
    assert metrics["pq"] == 0


def test_one_nucleus_found_in_two_halves() -> None:
    _, targets = whole((TWO > 0).astype(np.int32))
    halves, _ = whole(TWO)
    metrics = TASK.compute_metrics(halves, targets)
    assert metrics["dice"] == 100
    assert metrics["aji"] == pytest.approx(100 * 256 / 768)
    assert metrics["pq"] == 0


def test_empty_pictures() -> None:
    nothing = boxes()
    metrics = TASK.compute_metrics(*whole(nothing))
    assert math.isnan(metrics.pop("hd95"))
    assert set(metrics.values()) == {100}
    for told, true in ((nothing, TWO), (TWO, nothing)):
        metrics = dict(TASK.compute_metrics(whole(told)[0], whole(true)[1]))
        assert metrics.pop("hd95") == pytest.approx(math.hypot(40, 40))
        assert set(metrics.values()) == {0}


def test_figures_are_means_over_pictures() -> None:
    told, _ = whole(TWO, boxes())
    _, targets = whole(TWO, TWO)
    metrics = TASK.compute_metrics(told, targets)
    assert metrics["aji"] == 50
    assert metrics["hd95"] == pytest.approx(math.hypot(40, 40) / 2)
    assert TASK.case_scores(told, targets).tolist() == [100, 0]


def test_small_finds_are_noise() -> None:
    _, targets = whole(boxes((2, 18, 2, 18)))  # 256 pixels
    small, _ = whole(boxes((2, 18, 2, 18), (30, 34, 30, 34)))  # and 16
    large, _ = whole(boxes((2, 18, 2, 18), (30, 34, 30, 35)))  # and 20
    assert TASK.compute_metrics(small, targets)["aji"] == 100
    assert TASK.compute_metrics(large, targets)["aji"] == pytest.approx(100 * 256 / 276)


def test_the_objects_of_a_picture_can_be_had_for_drawing() -> None:
    told, _ = whole(TWO)
    found = TASK.display_map(told[0].softmax(0))
    assert found.dtype == torch.int32
    assert torch.equal(found, torch.from_numpy(TWO))


# --- patches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [20, 10])
def test_patches_are_judged_as_the_picture_they_were_cut_from(step: int) -> None:
    outputs, targets, cases = cut(20, step, TWO, boxes((10, 30, 10, 30)))
    assert TASK.compute_metrics(outputs, targets, cases) == PERFECT
    # by themselves, the parts of a nucleus would each be one
    assert TASK.case_scores(outputs, targets, cases).tolist() == [100, 100]
    assert len(TASK.case_scores(outputs, targets)) == len(outputs)


def test_the_truth_is_the_objects_of_the_case() -> None:
    outputs, targets, cases = cut(20, 20, TWO)
    other = boxes((2, 18, 2, 34))  # the same pixels, but one object
    of_case = Cases(cases.of, cases.names, cases.sites, cases.places, cases.sizes, (other,))
    assert TASK.compute_metrics(outputs, targets, of_case)["aji"] == pytest.approx(100 * 256 / 768)
    without = Cases(cases.of, cases.names, cases.sites, cases.places, cases.sizes)
    assert TASK.compute_metrics(outputs, targets, without) == PERFECT  # from the targets, stitched


def test_a_part_of_the_cases_keeps_their_numbers() -> None:
    outputs, targets, cases = cut(20, 20, boxes(), TWO)
    second = torch.nonzero(cases.of == 1).flatten()
    part = cases.subset(second)
    assert TASK.compute_metrics(outputs[second], targets[second], part) == PERFECT
    assert TASK.case_scores(outputs[second], targets[second], part).tolist() == [100]


def test_only_what_patches_cover_is_judged() -> None:
    outputs, targets, cases = cut(20, 20, boxes((2, 18, 2, 18), (2, 18, 22, 38)))
    upper_left = torch.tensor([0])
    metrics = TASK.compute_metrics(outputs[upper_left], targets[upper_left], cases.subset(upper_left))
    assert metrics == PERFECT


def test_probabilities_and_not_logits_are_averaged_where_patches_overlap() -> None:
    outputs, targets, cases = cut(40, 40, TWO)
    # Three patches of one place: one is very sure that there is nothing, two are fairly sure of the truth.
    none = torch.zeros_like(outputs)
    none[:, 0] = 400.0
    thrice = Cases(
        torch.tensor([0, 0, 0]), cases.names, cases.sites, torch.zeros(3, 2).long(), ((40, 40),), (TWO,)
    )
    told = torch.cat([none, outputs / 4, outputs / 4])
    assert TASK.compute_metrics(told, targets.repeat(3, 1, 1), thrice)["aji"] == 100


# --- maps ------------------------------------------------------------------------------------------


def test_maps_are_the_classes_and_labels_give_them_back() -> None:
    _, targets = whole(TWO)
    maps = TASK.label_maps(TensorData(torch.zeros(1, 3, 40, 40), targets))
    assert maps.dtype == torch.uint8
    assert torch.equal(TASK.targets_from_maps(maps, torch.zeros(1, 3, 40, 40)), targets)
    assert TASK.encode_maps(maps).shape == (1, 3, 40, 40)


def test_drawn_maps_have_objects_with_contours() -> None:
    maps = TASK.sample_maps(3, 64, 48, torch_generator(0, "test"))
    assert maps.shape == (3, 64, 48)
    assert maps.dtype == torch.uint8
    assert all(set(drawn.unique().tolist()) == {0, 1, 2} for drawn in maps)
    assert not torch.equal(maps[0], maps[1])
    outputs = 40 * torch.nn.functional.one_hot(maps.long(), 3).movedim(-1, 1).float()
    assert TASK.compute_metrics(outputs, maps.long()) == PERFECT | {
        "aji": 100
    }  # as no object is taken for noise
    assert TASK.sample_maps(0, 8, 8, torch_generator(0, "test")).shape == (0, 8, 8)


# --- configuration ---------------------------------------------------------------------------------


def test_contours_weigh_double() -> None:
    task = InstancesConfig().make(["background", "inside", "contour"])
    assert isinstance(task, Instances)
    assert task.class_weights is not None
    assert task.class_weights.tolist() == [1, 1, 2]


def test_there_are_three_classes() -> None:
    with pytest.raises(ArgumentError, match="background, inside and contour"):
        InstancesConfig().make(2)


def pieces(picture: torch.Tensor, places: list[tuple[int, int]], size: int) -> torch.Tensor:
    return torch.stack([picture[:, top : top + size, left : left + size] for top, left in places])


def cases(of: list[int], places: list[tuple[int, int]], *sizes: tuple[int, int]) -> Cases:
    names = tuple("abcdef"[: len(sizes)])
    return Cases(torch.tensor(of), names, ("",) * len(sizes), torch.tensor(places), sizes)


PLACES = [(0, 0), (0, 3), (4, 0), (4, 3)]


def test_patches_that_overlap_give_back_the_picture_in_any_order() -> None:
    picture = torch.randn(2, 10, 9, generator=torch.Generator().manual_seed(0))
    order = [2, 0, 3, 1]
    patches = pieces(picture, PLACES, 6)[order]
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
