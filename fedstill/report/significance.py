"""Paired comparison of two methods: mean difference with a 95% confidence interval over seeds and test cases.

Runs of one seed share split, initial weights and test data, so they are compared pair by pair. The variance
of the mean difference is a sum of two parts: the variance over seeds, and the variance over resamples of the
test cases, which are the same for both methods (:mod:`fedstill.runs.resampling`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fedstill.core.text_format import format_count

MIN_SEEDS = 3  # seeds from which a difference can be significant
Resamples = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SeedDifference:
    """Mean paired difference of two methods over seeds, with its 95% confidence interval.

    Args:
        mean: first minus second, in the unit of the metric.
        half_width: half of the interval's width; None with one seed.
        seeds: number of pairs.

    >>> print(SeedDifference(2.1, 0.4, 3))
    +2.1 ± 0.4 over 3 seeds
    >>> SeedDifference(2.1, 0.4, 3).significant
    True
    """

    mean: float
    half_width: float | None
    seeds: int = field(default=0, repr=False)

    @property
    def significant(self) -> bool:
        """Return whether the interval excludes 0 and there are at least :data:`MIN_SEEDS` seeds."""
        return self.half_width is not None and self.seeds >= MIN_SEEDS and abs(self.mean) > self.half_width

    def __str__(self) -> str:
        half_width = "" if self.half_width is None else f" ± {self.half_width:.1f}"
        return f"{self.mean:+.1f}{half_width} over {format_count(self.seeds, 'seed')}"


@dataclass(frozen=True)
class RunScore:
    """Metric of one run.

    Args:
        value: the metric on the test data.
        resamples: the metric in each bootstrap resample of the test cases, ``(R,)``; None if not stored.
        test_cases: number of test cases that were resampled.
    """

    value: float
    resamples: Resamples | None = None
    test_cases: int | None = None


def compare_paired_runs(pairs: Sequence[tuple[RunScore, RunScore]]) -> SeedDifference:
    """Return the mean difference, first minus second, over pairs of runs that share a seed.

    >>> compare_paired_runs([(RunScore(80.0), RunScore(other)) for other in (79.0, 78.0, 77.0)])
    SeedDifference(mean=2.0, half_width=2.484...)
    """
    if not pairs:
        return SeedDifference(math.nan, None)
    resamples = [
        first.resamples - second.resamples
        for first, second in pairs
        if first.resamples is not None
        and second.resamples is not None
        and first.test_cases == second.test_cases
    ]
    return paired_t_interval(
        [first.value - second.value for first, second in pairs],
        resamples if len(resamples) == len(pairs) else (),
    )


def paired_t_interval(by_seed: Sequence[float], resamples: Sequence[Resamples] = ()) -> SeedDifference:
    """Return the mean of paired differences with its 95% interval by Student's t.

    The degrees of freedom are the number of seeds minus one. Two seeds are never enough for significance.

    Args:
        by_seed: one difference per seed.
        resamples: one array ``(R,)`` per seed, the same difference in each resample of the test cases.
            Without it, the interval is over seeds alone.

    >>> paired_t_interval([1.0, 2.0, 3.0])
    SeedDifference(mean=2.0, half_width=2.484...)
    >>> [paired_t_interval(x).significant for x in ([1.0, 2.0, 3.0], [2.0], [2.0, 2.01])]
    [False, False, False]
    """
    from scipy.special import stdtrit

    seeds, mean = len(by_seed), statistics.fmean(by_seed)
    if seeds < 2:
        return SeedDifference(mean, None, seeds)
    variance = statistics.variance(by_seed) / seeds
    if resamples:
        over_cases = np.mean(np.stack(list(resamples)), axis=0)
        known = over_cases[~np.isnan(over_cases)]
        variance += float(known.var(ddof=1)) if len(known) > 1 else 0.0
    return SeedDifference(mean, float(stdtrit(seeds - 1, 0.975)) * math.sqrt(variance), seeds)
