"""The bootstrap (Efron 1979): cases are drawn with replacement; a figure lies where most draws have it."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

CONFIDENCE_PERCENT = 95  # percent


def resample_indices(count: int, resamples: int, generator: np.random.Generator) -> npt.NDArray[np.int64]:
    """Of ``count`` cases as many again, with replacement, ``resamples`` times: ``(resamples, count)``."""
    return generator.integers(count, size=(resamples, count))


def confidence_interval(metrics: Floats) -> tuple[float, float] | None:
    """Between which values the middle :data:`CONFIDENCE_PERCENT` percent of the draws' figures ``(draws,)`` lie; None
    where they cannot be said.

    >>> confidence_interval(np.arange(401.0))
    (10.0, 390.0)
    """
    known = metrics[~np.isnan(metrics)]
    if not len(known):
        return None
    low, high = np.percentile(known, [(100 - CONFIDENCE_PERCENT) / 2, (100 + CONFIDENCE_PERCENT) / 2])
    return (float(low), float(high)) if math.isfinite(low) and math.isfinite(high) else None
