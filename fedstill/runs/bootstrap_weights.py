"""How far a figure could be by the choice of test cases: by the bootstrap, all draws at once.

Draws are the same in every run that has as many test cases, whatever its seed and method: figures of two runs
on the same test part are compared draw by draw, so that what is hard for both cancels out.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from fedstill.core import bootstrap
from fedstill.core.dataset import TensorData
from fedstill.core.seeds import numpy_generator

DRAWS = 400


def units(test: TensorData) -> npt.NDArray[np.int64]:
    """What is drawn as a whole, as a number from 0 of each example ``(N,)``: a patient or a picture where
    that is known, else an example."""
    whose = torch.arange(len(test)) if test.cases is None else test.cases.case_ids
    whose = whose if test.groups is None else test.groups
    found: npt.NDArray[np.int64] = torch.unique(whose.cpu(), return_inverse=True)[1].numpy()
    return found


def weights(of: npt.NDArray[np.int64]) -> bootstrap.Floats:
    """How often each example counts in each draw ``(DRAWS, N)``: as many units as there are are drawn, with
    replacement."""
    count = int(of.max()) + 1
    drawn = bootstrap.resample_indices(count, DRAWS, numpy_generator(0, "test cases"))
    places = (drawn + count * np.arange(DRAWS)[:, None]).ravel()
    times = np.bincount(places, minlength=DRAWS * count).reshape(DRAWS, count)
    told: bootstrap.Floats = times[:, of].astype(np.float64)
    return told
