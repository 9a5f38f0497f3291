"""From objects to classes of pixels and back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core.seeds import torch_generator
from fedstill.tasks.instances import aji, grow, match_objects, objects_of, separate, three_classes
from fedstill.tasks.synthetic_maps import nuclei

Map = npt.NDArray[np.int64]


def boxes(*corners: tuple[int, int, int, int]) -> Map:
    """20 x 20 pixels, objects 1, 2, ... in rows a..b and columns c..d, ends not included."""
    labels = np.zeros((20, 20), dtype=np.int64)
    for number, (a, b, c, d) in enumerate(corners, 1):
        labels[a:b, c:d] = number
    return labels


def one_hot(classes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    return np.stack([classes == kind for kind in range(3)]).astype(np.float32)


def test_the_contour_is_two_pixels_of_the_object_and_none_of_the_background() -> None:
    classes = three_classes(boxes((4, 12, 5, 14)))
    inside = boxes((6, 10, 7, 12))
    assert np.array_equal(classes == 1, inside == 1)
    assert np.array_equal(classes > 0, boxes((4, 12, 5, 14)) > 0)
    assert classes.dtype == np.uint8


def test_touching_objects_have_contour_between_them_and_cut_ones_none_at_the_pictures_end() -> None:
    classes = three_classes(boxes((0, 20, 0, 10), (0, 20, 10, 20)))
    assert classes[7].tolist() == [1] * 8 + [2] * 4 + [1] * 8
    assert (classes[0] == classes[7]).all()


def test_small_objects_keep_an_inside() -> None:
    classes = three_classes(boxes((2, 5, 2, 5), (8, 10, 8, 10)))  # 3 x 3 and 2 x 2
    assert (classes[2:5, 2:5] == 1).sum() == 1  # one pixel less of contour
    assert (classes[8:10, 8:10] == 1).all()  # none


def test_neighbors_far_apart_in_number_do_not_matter() -> None:
    labels = boxes((0, 9, 0, 9), (9, 18, 9, 18))
    other = np.where(labels == 2, 70_000, labels).astype(np.int32)
    assert np.array_equal(three_classes(other), three_classes(labels))


@given(st.integers(0, 1000), st.booleans())
def test_true_classes_give_back_the_objects(seed: int, touching: bool) -> None:
    truth = nuclei(96, 80, torch_generator(seed, "test"))
    if touching:  # grown until many meet
        truth = grow(truth, np.ones(truth.shape, dtype=bool), 4)
    found = objects_of(three_classes(truth))
    assert found.max() >= truth.max()
    assert aji(match_objects(found, truth)) > 0.95


def test_objects_are_separated_at_their_contour_and_grow_back() -> None:
    truth = boxes((2, 12, 2, 9), (2, 12, 9, 18))
    found = separate(one_hot(three_classes(truth)), 20)
    assert np.array_equal(found, truth)


def test_small_objects_are_noise_once_grown() -> None:
    truth = boxes((2, 12, 2, 12), (14, 18, 14, 18))  # 100 and 16 pixels
    classes = one_hot(three_classes(truth))
    assert separate(classes, 17).max() == 1
    assert separate(classes, 16).max() == 2
    assert separate(classes, 101).max() == 0


def test_numbers_have_no_gaps_where_small_objects_are_left_out() -> None:
    truth = boxes((0, 2, 0, 2), (4, 16, 4, 16))
    assert set(np.unique(separate(one_hot(three_classes(truth)), 20))) == {0, 1}


def test_growth_ends_at_the_background_and_near_what_is_inside() -> None:
    probabilities = np.zeros((3, 9, 40), dtype=np.float32)
    probabilities[2] = 1.0  # contour all over
    probabilities[:, 4, 4], probabilities[:, 4, 6] = (0, 1, 0), (1, 0, 0)
    found = separate(probabilities, 0)
    rows, columns = np.indices(found.shape)
    near = np.abs(rows - 4) + np.abs(columns - 4) <= 4  # twice the contour's two pixels
    near[4, 6:9] = False  # background, and what is further away around it
    assert np.array_equal(found == 1, near)


def test_an_unsure_pixel_is_of_no_object() -> None:
    third = np.full((3, 8, 8), 1 / 3, dtype=np.float32)
    assert separate(third, 0).max() == 0


@pytest.mark.parametrize("kind", [0, 2])
def test_without_an_inside_there_is_no_object(kind: int) -> None:
    probabilities = np.zeros((3, 8, 8), dtype=np.float32)
    probabilities[kind] = 1.0
    assert separate(probabilities, 0).max() == 0
