"""The bootstrap (Efron 1979): resample cases with replacement to get a confidence interval."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

CONFIDENCE_PERCENT = 95  # percent


def resample_indices(count: int, resamples: int, generator: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return bootstrap samples of ``count`` cases.

    Args:
        count: number of cases N.
        resamples: number of bootstrap samples R.
        generator: source of randomness.

    Returns:
        Case indices ``(R, N)``, drawn with replacement.
    """
    return generator.integers(count, size=(resamples, count))


def confidence_interval(metrics: Floats) -> tuple[float, float] | None:
    """Return the percentile interval that holds the middle :data:`CONFIDENCE_PERCENT` percent of the metrics.

    Args:
        metrics: the metric in each bootstrap sample, ``(R,)``. NaN is ignored.

    Returns:
        Lower and upper bound, or None if all metrics are NaN or a bound is infinite.

    >>> confidence_interval(np.arange(401.0))
    (10.0, 390.0)
    """
    known = metrics[~np.isnan(metrics)]
    if not len(known):
        return None
    low, high = np.percentile(known, [(100 - CONFIDENCE_PERCENT) / 2, (100 + CONFIDENCE_PERCENT) / 2])
    return (float(low), float(high)) if math.isfinite(low) and math.isfinite(high) else None
