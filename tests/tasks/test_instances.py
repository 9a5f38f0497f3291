"""Conversion between objects and pixel classes, object metrics, and metrics of stitched images."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core.dataset import CaseIndex, TensorData
from fedstill.core.seeds import torch_generator
from fedstill.tasks.instances import (
    Instances,
    InstancesConfig,
    aji,
    classes_from_objects,
    count_overlaps,
    grow_objects,
    object_dice,
    objects_from_classes,
    objects_from_probs,
    panoptic_quality,
    stitch_patches,
)
from fedstill.tasks.label_maps import sample_nuclei
from tests.support.errors import raises_invalid

ObjectMap = npt.NDArray[np.int64]


def draw_objects(*corners: tuple[int, int, int, int]) -> ObjectMap:
    """Return a map of 20 x 20 pixels; object i covers rows a..b and columns c..d of box i, ends excluded."""
    labels = np.zeros((20, 20), dtype=np.int64)
    for number, (a, b, c, d) in enumerate(corners, 1):
        labels[a:b, c:d] = number
    return labels


def one_hot(classes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    return np.stack([classes == kind for kind in range(3)]).astype(np.float32)


def test_contour_is_two_pixels_inside_the_object() -> None:
    classes = classes_from_objects(draw_objects((4, 12, 5, 14)))
    inside = draw_objects((6, 10, 7, 12))
    assert np.array_equal(classes == 1, inside == 1)
    assert np.array_equal(classes > 0, draw_objects((4, 12, 5, 14)) > 0)
    assert classes.dtype == np.uint8


def test_contour_separates_touching_objects_but_not_image_border() -> None:
    classes = classes_from_objects(draw_objects((0, 20, 0, 10), (0, 20, 10, 20)))
    assert classes[7].tolist() == [1] * 8 + [2] * 4 + [1] * 8
    assert (classes[0] == classes[7]).all()


def test_small_objects_keep_an_inside() -> None:
    classes = classes_from_objects(draw_objects((2, 5, 2, 5), (8, 10, 8, 10)))  # 3 x 3 and 2 x 2
    assert (classes[2:5, 2:5] == 1).sum() == 1  # contour reduced to one pixel
    assert (classes[8:10, 8:10] == 1).all()  # no contour


def test_pixel_classes_ignore_object_numbers() -> None:
    labels = draw_objects((0, 9, 0, 9), (9, 18, 9, 18))
    other = np.where(labels == 2, 70_000, labels).astype(np.int32)
    assert np.array_equal(classes_from_objects(other), classes_from_objects(labels))


@given(st.integers(0, 1000), st.booleans())
def test_objects_are_restored_from_true_classes(seed: int, touching: bool) -> None:
    truth = sample_nuclei(96, 80, torch_generator(seed, "test"))
    if touching:  # grown until many objects touch
        truth = grow_objects(truth, np.ones(truth.shape, dtype=bool), 4)
    objects = objects_from_classes(classes_from_objects(truth))
    assert objects.max() >= truth.max()
    assert aji(count_overlaps(objects, truth)) > 0.95


def test_touching_objects_are_separated_and_grow_back() -> None:
    truth = draw_objects((2, 12, 2, 9), (2, 12, 9, 18))
    objects = objects_from_probs(one_hot(classes_from_objects(truth)), 20)
    assert np.array_equal(objects, truth)


def test_small_objects_are_dropped_after_growth() -> None:
    truth = draw_objects((2, 12, 2, 12), (14, 18, 14, 18))  # 100 and 16 pixels
    classes = one_hot(classes_from_objects(truth))
    assert objects_from_probs(classes, 17).max() == 1
    assert objects_from_probs(classes, 16).max() == 2
    assert objects_from_probs(classes, 101).max() == 0


def test_object_numbers_have_no_gaps() -> None:
    truth = draw_objects((0, 2, 0, 2), (4, 16, 4, 16))
    assert set(np.unique(objects_from_probs(one_hot(classes_from_objects(truth)), 20))) == {0, 1}


def test_growth_stops_at_background_and_maximum_distance() -> None:
    probabilities = np.zeros((3, 9, 40), dtype=np.float32)
    probabilities[2] = 1.0  # contour everywhere
    probabilities[:, 4, 4], probabilities[:, 4, 6] = (0, 1, 0), (1, 0, 0)
    objects = objects_from_probs(probabilities, 0)
    rows, columns = np.indices(objects.shape)
    near = np.abs(rows - 4) + np.abs(columns - 4) <= 4  # twice the contour width of two pixels
    near[4, 6:9] = False  # background, and pixels whose path around it is longer than that
    assert np.array_equal(objects == 1, near)


def test_uncertain_pixels_form_no_object() -> None:
    third = np.full((3, 8, 8), 1 / 3, dtype=np.float32)
    assert objects_from_probs(third, 0).max() == 0


@pytest.mark.parametrize("kind", [0, 2])
def test_object_needs_inside_pixels(kind: int) -> None:
    probabilities = np.zeros((3, 8, 8), dtype=np.float32)
    probabilities[kind] = 1.0
    assert objects_from_probs(probabilities, 0).max() == 0


NO_OBJECTS = np.zeros((4, 8), dtype=np.int64)


def draw_small_objects(*boxes: tuple[int, int, int, int]) -> ObjectMap:
    """Return a map whose object i covers rows a..b and columns c..d of its box, ends excluded."""
    labels = NO_OBJECTS.copy()
    for number, (a, b, c, d) in enumerate(boxes, 1):
        labels[a:b, c:d] = number
    return labels


def random_map(seed: int, objects: int = 5) -> ObjectMap:
    """Return blocks of random numbers, so that objects have several pieces, touch and overlap."""
    rng = np.random.default_rng(seed)
    return np.kron(rng.integers(0, objects + 1, (4, 4)), np.ones((2, 3), dtype=np.int64)).astype(np.int64)


def object_metrics(prediction: ObjectMap, truth: ObjectMap) -> tuple[float, float, float]:
    objects = count_overlaps(prediction, truth)
    return object_dice(objects), aji(objects), panoptic_quality(objects)


# --- values by hand ------------------------------------------------------------------------------


def test_equal_maps_are_perfect_with_any_numbers() -> None:
    truth = draw_small_objects((0, 2, 0, 3), (2, 4, 4, 8))
    assert object_metrics(np.where(truth == 1, 40, truth * 3), truth) == (1, 1, 1)


def test_object_metrics_of_empty_maps() -> None:
    some = draw_small_objects((0, 2, 0, 3))
    assert object_metrics(NO_OBJECTS, NO_OBJECTS) == (1, 1, 1)
    assert object_metrics(NO_OBJECTS, some) == (0, 0, 0)
    assert object_metrics(some, NO_OBJECTS) == (0, 0, 0)


def test_aji_matches_best_pairs_first_and_once() -> None:
    # Matching true objects in order would pair the first with the prediction (overlap 2); the second has 8.
    truth = draw_small_objects((0, 2, 0, 2), (0, 2, 2, 6))
    prediction = draw_small_objects((0, 2, 1, 6))  # 10 pixels: 2 of the first object, 8 of the second
    assert aji(count_overlaps(prediction, truth)) == pytest.approx(8 / (10 + 4))


# --- slow reference implementations ---------------------------------------------------------------


def masks(labels: ObjectMap) -> list[npt.NDArray[np.bool_]]:
    return [labels == number for number in np.unique(labels) if number]


def slow_object_dice(prediction: ObjectMap, truth: ObjectMap) -> float:
    def one_way(of: list[npt.NDArray[np.bool_]], others: list[npt.NDArray[np.bool_]]) -> float:
        total = 0.0
        for one in of:
            covers = [((one & o).sum(), 2 * (one & o).sum() / (one.sum() + o.sum())) for o in others]
            total += one.sum() * max(covers, default=(0, 0.0))[1]
        return total / sum(one.sum() for one in of)

    return (one_way(masks(truth), masks(prediction)) + one_way(masks(prediction), masks(truth))) / 2


def slow_aji(prediction: ObjectMap, truth: ObjectMap) -> float:
    left, right = masks(truth), masks(prediction)
    both = union = 0
    while True:
        pairs = [
            ((a & b).sum() / (a | b).sum(), -i, -j) for i, a in enumerate(left) for j, b in enumerate(right)
        ]
        best, i, j = max(pairs, default=(0, 0, 0))
        if best == 0:
            return both / (union + sum(one.sum() for one in left + right))
        a, b = left.pop(-i), right.pop(-j)
        both, union = both + (a & b).sum(), union + (a | b).sum()


@given(st.integers(0, 10_000))
def test_object_metrics_equal_slow_definitions(seed: int) -> None:
    prediction, truth = random_map(seed), random_map(seed + 20_000)
    if not (prediction.any() and truth.any()):
        return
    objects = count_overlaps(prediction, truth)
    assert object_dice(objects) == pytest.approx(slow_object_dice(prediction, truth))
    assert aji(objects) == pytest.approx(slow_aji(prediction, truth))


@given(st.integers(0, 10_000))
def test_object_metrics_ignore_numbers_and_stay_in_range(seed: int) -> None:
    prediction, truth = random_map(seed), random_map(seed + 20_000)
    other = np.random.default_rng(seed).permutation(np.arange(1, 60))[:6]
    other[0] = 0  # the background keeps number 0
    first = object_metrics(prediction, truth)
    assert object_dice(count_overlaps(other[prediction], truth)) == pytest.approx(first[0])
    assert panoptic_quality(count_overlaps(other[prediction], truth)) == pytest.approx(first[2])
    assert all(0 <= metric <= 1 for metric in first)


@pytest.mark.parametrize("seed", range(6))
def test_panoptic_quality_equals_monai(seed: int) -> None:
    metrics = pytest.importorskip("monai.metrics")
    rng = np.random.default_rng(seed)
    truth = np.arange(1, 17).reshape(4, 4).repeat(5, 0).repeat(5, 1)
    truth[rng.random(truth.shape) < 0.1] = 0
    prediction = np.roll(truth, seed % 2, axis=1)
    prediction[rng.random(truth.shape) < 0.1] = 0
    prediction[:5] = 0  # at least four missed objects
    theirs = metrics.compute_panoptic_quality(torch.from_numpy(prediction), torch.from_numpy(truth))
    assert panoptic_quality(count_overlaps(prediction, truth)) == pytest.approx(theirs.item(), abs=1e-5)
    assert theirs > 0.1  # some objects are matched


TASK = Instances()
Objects = npt.NDArray[np.int32]


def draw_large_objects(*corners: tuple[int, int, int, int], size: tuple[int, int] = (40, 40)) -> Objects:
    labels = np.zeros(size, dtype=np.int32)
    for number, (a, b, c, d) in enumerate(corners, 1):
        labels[a:b, c:d] = number
    return labels


def certain_logits(*pictures: Objects) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits that predict the object maps with certainty, and their targets, one example per map."""
    targets = torch.from_numpy(np.stack([classes_from_objects(one) for one in pictures])).long()
    return 40 * torch.nn.functional.one_hot(targets, 3).movedim(-1, 1).float(), targets


def cut_into_patches(
    size: int, step: int, *pictures: Objects
) -> tuple[torch.Tensor, torch.Tensor, CaseIndex]:
    """Return the logits and targets of ``certain_logits``, cut into patches, and the case index."""
    outputs, targets, of, corners = [], [], [], []
    for case, picture in enumerate(pictures):
        z, y = certain_logits(picture)
        for top in range(0, picture.shape[0] - size + 1, step):
            for left in range(0, picture.shape[1] - size + 1, step):
                outputs.append(z[0, :, top : top + size, left : left + size])
                targets.append(y[0, top : top + size, left : left + size])
                of.append(case)
                corners.append((top, left))
    names = tuple(f"slide {n}" for n in range(len(pictures)))
    sizes = tuple((one.shape[0], one.shape[1]) for one in pictures)
    cases = CaseIndex(torch.tensor(of), names, ("",) * len(names), torch.tensor(corners), sizes, pictures)
    return torch.stack(outputs), torch.stack(targets), cases


PERFECT_METRICS = {"dice": 100, "object_dice": 100, "aji": 100, "pq": 100, "hd95": 0}
TWO_OBJECTS = draw_large_objects((2, 18, 2, 18), (2, 18, 18, 34))  # 256 pixels each, side by side


def test_correct_prediction_of_touching_objects_is_perfect() -> None:
    assert TASK.compute_metrics(*certain_logits(TWO_OBJECTS)) == PERFECT_METRICS


def test_merged_nuclei_have_perfect_dice_only() -> None:
    _, targets = certain_logits(TWO_OBJECTS)
    merged, _ = certain_logits((TWO_OBJECTS > 0).astype(np.int32))
    metrics = TASK.compute_metrics(merged, targets)
    assert (metrics["dice"], metrics["hd95"]) == (100, 0)
    # one half is matched: intersection 256 of 512 pixels, and the other half adds 256 to the union
    assert metrics["aji"] == pytest.approx(100 * 256 / 768)
    # a half and the whole have a Dice of 512 / 768
    assert metrics["object_dice"] == pytest.approx(100 * 512 / 768)
    assert metrics["pq"] == 0


def test_split_nucleus_metrics() -> None:
    _, targets = certain_logits((TWO_OBJECTS > 0).astype(np.int32))
    halves, _ = certain_logits(TWO_OBJECTS)
    metrics = TASK.compute_metrics(halves, targets)
    assert metrics["dice"] == 100
    assert metrics["aji"] == pytest.approx(100 * 256 / 768)
    assert metrics["pq"] == 0


def test_metrics_of_empty_images() -> None:
    nothing = draw_large_objects()
    metrics = TASK.compute_metrics(*certain_logits(nothing))
    assert math.isnan(metrics.pop("hd95"))
    assert set(metrics.values()) == {100}
    for predicted, true in ((nothing, TWO_OBJECTS), (TWO_OBJECTS, nothing)):
        metrics = dict(TASK.compute_metrics(certain_logits(predicted)[0], certain_logits(true)[1]))
        assert metrics.pop("hd95") == pytest.approx(math.hypot(40, 40))
        assert set(metrics.values()) == {0}


def test_metrics_are_means_over_images() -> None:
    outputs, _ = certain_logits(TWO_OBJECTS, draw_large_objects())
    _, targets = certain_logits(TWO_OBJECTS, TWO_OBJECTS)
    metrics = TASK.compute_metrics(outputs, targets)
    assert metrics["aji"] == 50
    assert metrics["hd95"] == pytest.approx(math.hypot(40, 40) / 2)
    assert TASK.case_scores(outputs, targets).tolist() == [100, 0]


def test_small_predicted_objects_are_dropped() -> None:
    _, targets = certain_logits(draw_large_objects((2, 18, 2, 18)))  # 256 pixels
    small, _ = certain_logits(draw_large_objects((2, 18, 2, 18), (30, 34, 30, 34)))  # and 16
    large, _ = certain_logits(draw_large_objects((2, 18, 2, 18), (30, 34, 30, 35)))  # and 20
    assert TASK.compute_metrics(small, targets)["aji"] == 100
    assert TASK.compute_metrics(large, targets)["aji"] == pytest.approx(100 * 256 / 276)


def test_display_map_shows_objects() -> None:
    outputs, _ = certain_logits(TWO_OBJECTS)
    objects = TASK.display_map(outputs[0].softmax(0))
    assert objects.dtype == torch.int32
    assert torch.equal(objects, torch.from_numpy(TWO_OBJECTS))


# --- patches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [20, 10])
def test_patches_are_evaluated_as_whole_image(step: int) -> None:
    outputs, targets, cases = cut_into_patches(20, step, TWO_OBJECTS, draw_large_objects((10, 30, 10, 30)))
    assert TASK.compute_metrics(outputs, targets, cases) == PERFECT_METRICS
    # evaluated separately, each part of a nucleus would count as an object
    assert TASK.case_scores(outputs, targets, cases).tolist() == [100, 100]
    assert len(TASK.case_scores(outputs, targets)) == len(outputs)


def test_true_objects_come_from_the_case() -> None:
    outputs, targets, cases = cut_into_patches(20, 20, TWO_OBJECTS)
    other = draw_large_objects((2, 18, 2, 34))  # the same pixels as one object
    of_case = CaseIndex(cases.case_ids, cases.names, cases.sites, cases.corners, cases.sizes, (other,))
    assert TASK.compute_metrics(outputs, targets, of_case)["aji"] == pytest.approx(100 * 256 / 768)
    without = CaseIndex(cases.case_ids, cases.names, cases.sites, cases.corners, cases.sizes)
    assert TASK.compute_metrics(outputs, targets, without) == PERFECT_METRICS  # stitched from the targets


def test_subset_of_cases_keeps_case_ids() -> None:
    outputs, targets, cases = cut_into_patches(20, 20, draw_large_objects(), TWO_OBJECTS)
    second = torch.nonzero(cases.case_ids == 1).flatten()
    part = cases.subset(second)
    assert TASK.compute_metrics(outputs[second], targets[second], part) == PERFECT_METRICS
    assert TASK.case_scores(outputs[second], targets[second], part).tolist() == [100]


def test_only_covered_pixels_are_evaluated() -> None:
    outputs, targets, cases = cut_into_patches(20, 20, draw_large_objects((2, 18, 2, 18), (2, 18, 22, 38)))
    upper_left = torch.tensor([0])
    metrics = TASK.compute_metrics(outputs[upper_left], targets[upper_left], cases.subset(upper_left))
    assert metrics == PERFECT_METRICS


def test_overlapping_patches_average_probabilities() -> None:
    outputs, targets, cases = cut_into_patches(40, 40, TWO_OBJECTS)
    # Three patches at one position: one predicts background with certainty, two the truth less certainly.
    none = torch.zeros_like(outputs)
    none[:, 0] = 400.0
    thrice = CaseIndex(
        torch.tensor([0, 0, 0]),
        cases.names,
        cases.sites,
        torch.zeros(3, 2).long(),
        ((40, 40),),
        (TWO_OBJECTS,),
    )
    patches = torch.cat([none, outputs / 4, outputs / 4])
    assert TASK.compute_metrics(patches, targets.repeat(3, 1, 1), thrice)["aji"] == 100


# --- maps ------------------------------------------------------------------------------------------


def test_label_maps_are_classes_and_targets_restore_them() -> None:
    _, targets = certain_logits(TWO_OBJECTS)
    maps = TASK.label_maps(TensorData(torch.zeros(1, 3, 40, 40), targets))
    assert maps.dtype == torch.uint8
    assert torch.equal(TASK.targets_from_maps(maps, torch.zeros(1, 3, 40, 40)), targets)
    assert TASK.encode_maps(maps).shape == (1, 3, 40, 40)


def test_sampled_maps_have_objects_with_contours() -> None:
    maps = TASK.sample_maps(3, 64, 48, torch_generator(0, "test"))
    assert maps.shape == (3, 64, 48)
    assert maps.dtype == torch.uint8
    assert all(set(classes.unique().tolist()) == {0, 1, 2} for classes in maps)
    assert not torch.equal(maps[0], maps[1])
    outputs = 40 * torch.nn.functional.one_hot(maps.long(), 3).movedim(-1, 1).float()
    assert TASK.compute_metrics(outputs, maps.long()) == PERFECT_METRICS | {
        "aji": 100
    }  # no object is removed as noise
    assert TASK.sample_maps(0, 8, 8, torch_generator(0, "test")).shape == (0, 8, 8)


# --- configuration ---------------------------------------------------------------------------------


def test_contours_have_double_weight() -> None:
    task = InstancesConfig().make(["background", "inside", "contour"])
    assert isinstance(task, Instances)
    assert task.class_weights is not None
    assert task.class_weights.tolist() == [1, 1, 2]


def test_rejects_other_class_counts() -> None:
    with raises_invalid("classes", 2, "background, inside and contour"):
        InstancesConfig().make(2)


def cut_patches(picture: torch.Tensor, corners: list[tuple[int, int]], size: int) -> torch.Tensor:
    return torch.stack([picture[:, top : top + size, left : left + size] for top, left in corners])


def cases(of: list[int], corners: list[tuple[int, int]], *sizes: tuple[int, int]) -> CaseIndex:
    names = tuple("abcdef"[: len(sizes)])
    return CaseIndex(torch.tensor(of), names, ("",) * len(sizes), torch.tensor(corners), sizes)


CORNERS = [(0, 0), (0, 3), (4, 0), (4, 3)]


def test_overlapping_patches_restore_image_in_any_order() -> None:
    picture = torch.randn(2, 10, 9, generator=torch.Generator().manual_seed(0))
    order = [2, 0, 3, 1]
    patches = cut_patches(picture, CORNERS, 6)[order]
    ((image, covered),) = stitch_patches(patches, cases([0] * 4, [CORNERS[n] for n in order], (10, 9)))
    torch.testing.assert_close(image, picture)
    assert covered.all()


def test_each_case_is_stitched_separately() -> None:
    patches = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 1, 2, 2)
    images = list(stitch_patches(patches, cases([2, 0, 2], [(0, 0), (0, 0), (2, 0)], (2, 2), (9, 9), (4, 2))))
    assert [one.shape for one, _ in images] == [(1, 2, 2), (1, 4, 2)]
    assert images[1][0].flatten().tolist() == [0.0] * 4 + [2.0] * 4


def test_uncovered_pixels_are_reported() -> None:
    ((image, covered),) = stitch_patches(torch.ones(1, 1, 2, 2), cases([0], [(1, 1)], (4, 4)))
    assert covered.nonzero().tolist() == [[1, 1], [1, 2], [2, 1], [2, 2]]
    assert image.sum() == 4


def test_patch_larger_than_image_is_cropped() -> None:
    patch = torch.arange(16.0).view(1, 1, 4, 4)
    ((image, _),) = stitch_patches(patch, cases([0], [(0, 0)], (3, 2)))
    assert torch.equal(image, patch[0, :, :3, :2])
