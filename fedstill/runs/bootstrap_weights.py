"""Bootstrap weights of test cases, for confidence intervals of metrics.

Resamples are equal in all runs with the same number of test cases, whatever their seed and method. So the
metrics of two runs on the same test set are compared resample by resample (paired).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from fedstill.core import bootstrap
from fedstill.core.dataset import TensorData
from fedstill.core.seeds import numpy_generator

DRAWS = 400


def resampling_units(test: TensorData) -> npt.NDArray[np.int64]:
    """Return the resampling unit ``(N,)`` of each example, from 0: its patient or picture if known, or
    itself."""
    unit_ids = torch.arange(len(test)) if test.cases is None else test.cases.case_ids
    unit_ids = unit_ids if test.groups is None else test.groups
    consecutive_ids: npt.NDArray[np.int64] = torch.unique(unit_ids.cpu(), return_inverse=True)[1].numpy()
    return consecutive_ids


def resample_counts(unit_ids: npt.NDArray[np.int64]) -> bootstrap.Floats:
    """Return how often each example occurs in each resample, ``(DRAWS, N)``: units are sampled with
    replacement."""
    count = int(unit_ids.max()) + 1
    sampled = bootstrap.resample_indices(count, DRAWS, numpy_generator(0, "test cases"))
    bins = (sampled + count * np.arange(DRAWS)[:, None]).ravel()
    times = np.bincount(bins, minlength=DRAWS * count).reshape(DRAWS, count)
    example_weights: bootstrap.Floats = times[:, unit_ids].astype(np.float64)
    return example_weights
