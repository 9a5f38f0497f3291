"""Whether chance explains that one method is above another: their paired difference, over seeds and cases.

Runs of one seed share split, first weights and test part, so they are compared pair by pair. The standard
error of the mean difference has two parts that add up: what it varies by from seed to seed, and what it
varies by from draw to draw of test cases, the same for both methods (:mod:`fedstill.runs.bootstrap_weights`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fedstill.core.text_format import format_count

LEAST = 3  # seeds that may tell two methods apart
Draws = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SeedDifference:
    """A mean difference, and half of its 95 % interval; None of one seed, whose chance nobody knows."""

    mean: float
    half: float | None
    seeds: int = field(default=0, repr=False)

    @property
    def significant(self) -> bool:
        """Whether the interval is on one side of 0, and of seeds enough that their agreeing is not chance."""
        return self.half is not None and self.seeds >= LEAST and abs(self.mean) > self.half

    def __str__(self) -> str:
        half = "" if self.half is None else f" ± {self.half:.1f}"
        return f"{self.mean:+.1f}{half} over {format_count(self.seeds, 'seed')}"


@dataclass(frozen=True)
class RunScore:
    """What one run has of a figure.

    Args:
        draws: the same in each draw of test cases ``(R,)``; None: not known.
        tested: how many test cases were drawn from.
    """

    metric: float
    draws: Draws | None = None
    tested: int | None = None


def compare_paired_runs(pairs: Sequence[tuple[RunScore, RunScore]]) -> SeedDifference:
    """How far the first of each pair is above the second: two runs of one seed.

    >>> compare_paired_runs([(RunScore(80.0), RunScore(other)) for other in (79.0, 78.0, 77.0)])
    SeedDifference(mean=2.0, half=2.484...)
    """
    if not pairs:
        return SeedDifference(math.nan, None)
    drawn = [
        one.draws - other.draws
        for one, other in pairs
        if one.draws is not None and other.draws is not None and one.tested == other.tested
    ]
    return paired_t_interval(
        [one.metric - other.metric for one, other in pairs], drawn if len(drawn) == len(pairs) else ()
    )


def paired_t_interval(by_seed: Sequence[float], draws: Sequence[Draws] = ()) -> SeedDifference:
    """Of paired differences.

    Student's t with one degree of freedom less than there are seeds. Of two seeds nothing is told apart.

    Args:
        by_seed: one a seed.
        draws: one ``(R,)`` a seed, the same difference in each draw of test cases; none: not known.

    >>> paired_t_interval([1.0, 2.0, 3.0])
    SeedDifference(mean=2.0, half=2.484...)
    >>> paired_t_interval([1.0, 2.0, 3.0]).significant, paired_t_interval([2.0]).significant, paired_t_interval([2.0, 2.01]).significant
    (False, False, False)
    """
    from scipy.special import stdtrit

    seeds, mean = len(by_seed), statistics.fmean(by_seed)
    if seeds < 2:
        return SeedDifference(mean, None, seeds)
    variance = statistics.variance(by_seed) / seeds
    if draws:
        over_cases = np.mean(np.stack(list(draws)), axis=0)
        known = over_cases[~np.isnan(over_cases)]
        variance += float(known.var(ddof=1)) if len(known) > 1 else 0.0
    return SeedDifference(mean, float(stdtrit(seeds - 1, 0.975)) * math.sqrt(variance), seeds)
