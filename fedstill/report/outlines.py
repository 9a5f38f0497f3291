"""The outline of what a map shows, as SVG paths that run along the edges of its pixels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Regions = npt.NDArray[np.integer]
Edges = tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]  # below pixels, and to the right of them


class Compared(NamedTuple):
    """Two outlines on each other, as the ``d`` of SVG paths: each edge is in one of them."""

    truth: str
    made: str
    both: str


def outline(regions: Regions) -> str:
    """The lines between pixels that are of different regions, as the ``d`` of an SVG path.

    Regions that touch are parted by one line; what a region has at the map's own edge is not drawn, as
    nobody knows whether it ends there. One unit of the path is one pixel, and pixel (row r, column c) fills
    r..r + 1 and c..c + 1.

    Args:
        regions: ``(H, W)`` whole numbers: classes, or objects.

    >>> outline(np.array([[0, 0, 0], [0, 1, 1]]))
    'M1 1h2M1 1v1'
    """
    return _path(_edges(regions))


def compare(truth: Regions, made: Regions) -> Compared:
    """The lines that only the truth has, those that only a prediction has, and those of both.

    Args:
        truth, made: ``(H, W)`` whole numbers: classes, or objects.

    >>> compare(np.array([[0, 1, 1, 1]]), np.array([[0, 1, 1, 0]]))
    Compared(truth='', made='M3 0v1', both='M1 0v1')
    """
    (true_across, true_along), (across, along) = _edges(truth), _edges(made)
    return Compared(
        _path((true_across & ~across, true_along & ~along)),
        _path((across & ~true_across, along & ~true_along)),
        _path((across & true_across, along & true_along)),
    )


def _edges(regions: Regions) -> Edges:
    """Which edges lie between different regions: ``(H - 1, W)``, and ``(W - 1, H)`` column by column."""
    return regions[1:] != regions[:-1], (regions[:, 1:] != regions[:, :-1]).T


def _path(edges: Edges) -> str:
    across, along = edges
    lines = [f"M{start} {row}h{length}" for row, start, length in _runs(across)]
    lines += [f"M{column} {start}v{length}" for column, start, length in _runs(along)]
    return "".join(lines)


def _runs(edges: npt.NDArray[np.bool_]) -> list[tuple[int, int, int]]:
    """Where edges follow each other: (number of the line, from 1 up; start; length) of each run."""
    change = np.diff(np.pad(edges, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    line, start = np.nonzero(change == 1)
    _, end = np.nonzero(change == -1)
    return list(zip((line + 1).tolist(), start.tolist(), (end - start).tolist(), strict=True))
