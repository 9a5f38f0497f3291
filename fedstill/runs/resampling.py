"""How far a figure could be by the choice of test cases: the bootstrap (Efron 1979), all draws at once.

Draws are the same in every run that has as many test cases, whatever its seed and method: figures of two runs
on the same test part are compared draw by draw, so that what is hard for both cancels out.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from fedstill.core.dataset import TensorData
from fedstill.core.seeds import numpy_generator

Floats = npt.NDArray[np.float64]

DRAWS = 400
LEVEL = 95  # percent


def units(test: TensorData) -> npt.NDArray[np.int64]:
    """What is drawn as a whole, as a number from 0 of each example ``(N,)``: a patient or a picture where
    that is known, else an example."""
    whose = torch.arange(len(test)) if test.cases is None else test.cases.of
    whose = whose if test.groups is None else test.groups
    found: npt.NDArray[np.int64] = torch.unique(whose.cpu(), return_inverse=True)[1].numpy()
    return found


def weights(of: npt.NDArray[np.int64]) -> Floats:
    """How often each example counts in each draw ``(DRAWS, N)``: as many units as there are are drawn, with
    replacement."""
    count = int(of.max()) + 1
    drawn = numpy_generator(0, "test cases").integers(count, size=(DRAWS, count))
    places = (drawn + count * np.arange(DRAWS)[:, None]).ravel()
    times = np.bincount(places, minlength=DRAWS * count).reshape(DRAWS, count)
    told: Floats = times[:, of].astype(np.float64)
    return told


def interval(draws: Floats) -> tuple[float, float] | None:
    """Between which values the middle :data:`LEVEL` percent of the draws lie; None where they cannot be said.

    >>> interval(np.arange(401.0))
    (10.0, 390.0)
    """
    known = draws[~np.isnan(draws)]
    if not len(known):
        return None
    low, high = np.percentile(known, [(100 - LEVEL) / 2, (100 + LEVEL) / 2])
    return (float(low), float(high)) if math.isfinite(low) and math.isfinite(high) else None
