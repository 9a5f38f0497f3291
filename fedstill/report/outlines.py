"""The outline of what a map shows, as an SVG path that runs along the edges of its pixels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def outline(regions: npt.NDArray[np.integer]) -> str:
    """The lines between pixels that are of different regions, as the ``d`` of an SVG path.

    Regions that touch are parted by one line; what a region has at the map's own edge is not drawn, as
    nobody knows whether it ends there. One unit of the path is one pixel, and pixel (row r, column c) fills
    r..r + 1 and c..c + 1.

    Args:
        regions: ``(H, W)`` whole numbers: classes, or objects.

    >>> outline(np.array([[0, 0, 0], [0, 1, 1]]))
    'M1 1h2M1 1v1'
    """
    across = np.pad(regions[1:] != regions[:-1], ((0, 0), (1, 1)))  # (H - 1, W + 2), below each row
    along = np.pad((regions[:, 1:] != regions[:, :-1]).T, ((0, 0), (1, 1)))  # (W - 1, H + 2)
    lines = [f"M{start} {row}h{length}" for row, start, length in _runs(across)]
    lines += [f"M{column} {start}v{length}" for column, start, length in _runs(along)]
    return "".join(lines)


def _runs(edges: npt.NDArray[np.bool_]) -> list[tuple[int, int, int]]:
    """Where edges follow each other: (number of the line, from 1 up; start; length) of each run."""
    change = np.diff(edges.astype(np.int8), axis=1)
    line, start = np.nonzero(change == 1)
    _, end = np.nonzero(change == -1)
    return list(zip((line + 1).tolist(), start.tolist(), (end - start).tolist(), strict=True))
