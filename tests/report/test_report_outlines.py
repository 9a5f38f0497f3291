"""Outlines run along the edges of pixels: each edge between two regions, and no other."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedstill.report.outlines import compare, outline

Edge = tuple[str, int, int]  # "h" from (x, y) to (x + 1, y), "v" from (x, y) to (x, y + 1)


def edges(path: str) -> list[Edge]:
    """The unit edges of a path, each as often as it is drawn."""
    assert re.fullmatch(r"(M\d+ \d+[hv]\d+)*", path)
    found = []
    for x, y, way, length in re.findall(r"M(\d+) (\d+)([hv])(\d+)", path):
        for step in range(int(length)):
            found.append((way, int(x) + step * (way == "h"), int(y) + step * (way == "v")))
    return found


def slowly(regions: npt.NDArray[np.int64]) -> set[Edge]:
    """Pixel by pixel: is the one below, or the one to the right, of another region?"""
    height, width = regions.shape
    found: set[Edge] = set()
    for row in range(height):
        for column in range(width):
            if row + 1 < height and regions[row, column] != regions[row + 1, column]:
                found.add(("h", column, row + 1))
            if column + 1 < width and regions[row, column] != regions[row, column + 1]:
                found.add(("v", column + 1, row))
    return found


def test_a_square_by_hand() -> None:
    regions = np.zeros((4, 5), np.int64)
    regions[1:3, 2:4] = 1
    # Rows 1..3 and columns 2..4: two sides of length 2 each way.
    assert sorted(re.findall(r"M\d+ \d+[hv]\d+", outline(regions))) == [
        "M2 1h2",
        "M2 1v2",
        "M2 3h2",
        "M4 1v2",
    ]


def test_objects_that_touch_are_parted_by_one_line() -> None:
    assert outline(np.array([[1, 1, 2, 2]])) == "M2 0v1"


def test_nothing_is_drawn_where_nothing_is_and_at_the_maps_edge() -> None:
    assert outline(np.zeros((3, 3), np.int64)) == ""
    assert outline(np.ones((3, 3), np.int64)) == ""


def test_two_outlines_are_parted_by_who_has_an_edge() -> None:
    truth = np.array([[0, 1, 1, 1, 1]])
    made = np.array([[0, 1, 1, 0, 0]])
    assert compare(truth, made) == ("", "M3 0v1", "M1 0v1")
    assert compare(made, truth) == ("M3 0v1", "", "M1 0v1")


@given(arrays.arrays(np.int64, (2, 5, 6), elements=st.integers(0, 2)))
def test_each_edge_of_two_outlines_is_in_one_part(both: npt.NDArray[np.int64]) -> None:
    true, made = slowly(both[0]), slowly(both[1])
    parts = [edges(path) for path in compare(both[0], both[1])]
    assert [set(part) for part in parts] == [true - made, made - true, true & made]
    assert sum(map(len, parts)) == len(true | made)


@given(arrays.arrays(np.int64, st.tuples(st.integers(1, 7), st.integers(1, 7)), elements=st.integers(0, 3)))
def test_edges_are_those_of_a_slow_reading(regions: npt.NDArray[np.int64]) -> None:
    found = edges(outline(regions))
    assert len(found) == len(set(found))
    assert set(found) == slowly(regions)
