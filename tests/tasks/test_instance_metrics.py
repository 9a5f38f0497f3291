"""Object figures against hand-worked maps, a slow reading of the definitions, and MONAI."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstill.tasks.instances import aji, match_objects, object_dice, panoptic_quality

Map = npt.NDArray[np.int64]

NONE = np.zeros((4, 8), dtype=np.int64)


def nuclei(*boxes: tuple[int, int, int, int]) -> Map:
    """Objects 1, 2, ... in boxes of rows a..b and columns c..d, ends not included."""
    labels = NONE.copy()
    for number, (a, b, c, d) in enumerate(boxes, 1):
        labels[a:b, c:d] = number
    return labels


def random_map(seed: int, objects: int = 5) -> Map:
    """Blocks of random numbers, so that objects have several pieces, touch and overlap."""
    rng = np.random.default_rng(seed)
    return np.kron(rng.integers(0, objects + 1, (4, 4)), np.ones((2, 3), dtype=np.int64)).astype(np.int64)


def metrics(prediction: Map, truth: Map) -> tuple[float, float, float]:
    objects = match_objects(prediction, truth)
    return object_dice(objects), aji(objects), panoptic_quality(objects)


# --- by hand ---------------------------------------------------------------------------------------


def test_equal_maps_are_perfect_whatever_the_numbers() -> None:
    truth = nuclei((0, 2, 0, 3), (2, 4, 4, 8))
    assert metrics(np.where(truth == 1, 40, truth * 3), truth) == (1, 1, 1)


def test_empty_sides() -> None:
    some = nuclei((0, 2, 0, 3))
    assert metrics(NONE, NONE) == (1, 1, 1)
    assert metrics(NONE, some) == (0, 0, 0)
    assert metrics(some, NONE) == (0, 0, 0)


def test_no_prediction_is_assigned_twice_and_the_best_pair_comes_first() -> None:
    # In order of true objects the first would take the prediction with 2 of 12; the second has 8 of 10.
    truth = nuclei((0, 2, 0, 2), (0, 2, 2, 6))
    prediction = nuclei((0, 2, 1, 6))  # 10: 2 of the first, 8 of the second
    assert aji(match_objects(prediction, truth)) == pytest.approx(8 / (10 + 4))


# --- slow readings ---------------------------------------------------------------------------------


def masks(labels: Map) -> list[npt.NDArray[np.bool_]]:
    return [labels == number for number in np.unique(labels) if number]


def slow_object_dice(prediction: Map, truth: Map) -> float:
    def one_way(of: list[npt.NDArray[np.bool_]], others: list[npt.NDArray[np.bool_]]) -> float:
        total = 0.0
        for one in of:
            covers = [((one & o).sum(), 2 * (one & o).sum() / (one.sum() + o.sum())) for o in others]
            total += one.sum() * max(covers, default=(0, 0.0))[1]
        return total / sum(one.sum() for one in of)

    return (one_way(masks(truth), masks(prediction)) + one_way(masks(prediction), masks(truth))) / 2


def slow_aji(prediction: Map, truth: Map) -> float:
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
def test_figures_equal_the_slow_definitions(seed: int) -> None:
    prediction, truth = random_map(seed), random_map(seed + 20_000)
    if not (prediction.any() and truth.any()):
        return
    objects = match_objects(prediction, truth)
    assert object_dice(objects) == pytest.approx(slow_object_dice(prediction, truth))
    assert aji(objects) == pytest.approx(slow_aji(prediction, truth))


@given(st.integers(0, 10_000))
def test_figures_do_not_see_which_numbers_objects_have_and_stay_in_range(seed: int) -> None:
    prediction, truth = random_map(seed), random_map(seed + 20_000)
    other = np.random.default_rng(seed).permutation(np.arange(1, 60))[:6]
    other[0] = 0  # the background stays
    first = metrics(prediction, truth)
    assert object_dice(match_objects(other[prediction], truth)) == pytest.approx(first[0])
    assert panoptic_quality(match_objects(other[prediction], truth)) == pytest.approx(first[2])
    assert all(0 <= metric <= 1 for metric in first)


@pytest.mark.parametrize("seed", range(6))
def test_panoptic_quality_is_monais(seed: int) -> None:
    metrics = pytest.importorskip("monai.metrics")
    rng = np.random.default_rng(seed)
    truth = np.arange(1, 17).reshape(4, 4).repeat(5, 0).repeat(5, 1)
    truth[rng.random(truth.shape) < 0.1] = 0
    prediction = np.roll(truth, seed % 2, axis=1)
    prediction[rng.random(truth.shape) < 0.1] = 0
    prediction[:5] = 0  # four misses at least
    theirs = metrics.compute_panoptic_quality(torch.from_numpy(prediction), torch.from_numpy(truth))
    assert panoptic_quality(match_objects(prediction, truth)) == pytest.approx(theirs.item(), abs=1e-5)
    assert theirs > 0.1  # there were hits
