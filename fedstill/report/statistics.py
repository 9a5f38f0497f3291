"""Intervals and significance: paired differences of methods over seeds, and of models over test cases.

Runs of one seed share split, initial weights and test data, so they are compared pair by pair. The variance
of the mean difference is a sum of two parts: the variance over seeds, and the variance over resamples of the
test cases, which are the same for both methods (:mod:`fedstill.runs.resampling`). Two models tend to find the
same cases hard, so paired differences vary less than the two means.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from fedstill.core import bootstrap
from fedstill.core.errors import ArgumentError
from fedstill.core.text_format import format_count
from fedstill.report.records import Result, RunFiles

# --- over seeds -----------------------------------------------------------------------------------------


MIN_SEEDS = 3  # seeds from which a difference can be significant
Resamples = npt.NDArray[np.float64]
S = TypeVar("S")  # seed


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

    def favors_first(self, better: str) -> bool:
        """Return whether the first method is significantly better; ``better`` is "higher" or "lower"."""
        return self.significant and (self.mean > 0 if better == "higher" else self.mean < 0)

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


def compare_paired_runs(first: Mapping[S, RunScore], second: Mapping[S, RunScore]) -> SeedDifference:
    """Return the mean difference, first minus second, over the seeds that both have.

    Every statement on the significance of a difference between methods comes from this function.

    Args:
        first: runs of one method by seed.
        second: runs of the other method by seed.

    >>> scores = {seed: RunScore(80.0) for seed in range(3)}
    >>> compare_paired_runs(scores, {0: RunScore(79.0), 1: RunScore(78.0), 2: RunScore(77.0)})
    SeedDifference(mean=2.0, half_width=2.484...)
    """
    pairs = [(score, second[seed]) for seed, score in first.items() if seed in second]
    if not pairs:
        return SeedDifference(math.nan, None)
    resamples = [
        one.resamples - other.resamples
        for one, other in pairs
        if one.resamples is not None
        and other.resamples is not None
        and one.test_cases == other.test_cases
        and len(one.resamples) == len(other.resamples)
    ]
    are_known = len(resamples) == len(pairs) and len(set(map(len, resamples))) == 1
    return paired_t_interval(
        [one.value - other.value for one, other in pairs], resamples if are_known else ()
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


# --- over test cases ------------------------------------------------------------------------------------


Model = Literal["global_model", "ensemble", "centralized"]
RESAMPLES = 10_000


@dataclass(frozen=True)
class CaseDifference:
    """Difference of two models' means over test cases, first minus second.

    Args:
        mean: difference in the unit of the main metric.
        low, high: ends of the 95% interval over test cases, for these trained models.
        cases: number of test cases (patients or images).

    >>> print(CaseDifference(2.1, -0.4, 4.8, 22))
    +2.1 [-0.4, +4.8] over 22 cases
    """

    mean: float
    low: float
    high: float
    cases: int

    def __str__(self) -> str:
        return f"{self.mean:+.1f} [{self.low:+.1f}, {self.high:+.1f}] over {self.cases} cases"


def paired_difference(
    first: Sequence[str | Path],
    second: Sequence[str | Path],
    first_model: Model = "global_model",
    second_model: Model = "global_model",
) -> CaseDifference:
    """Return the mean difference of two models over their common test cases, with a bootstrap interval.

    Scores of a case are averaged over runs (seeds) and subtracted case by case. The interval is between the
    2.5th and 97.5th percentile of the mean over 10,000 resamples of the cases. Cases without a score of
    either model are excluded.

    Args:
        first: folders of runs.
        second: folders of runs measured on the same cases; the same folders to compare two models of a run.
        first_model: model of the first runs: "global_model" (the main model), "ensemble" (the teachers'
            ensemble) or "centralized" (the upper bound).
        second_model: model of the second runs.

    Returns:
        The difference, first minus second, in the unit of the main metric.

    Raises:
        RunFolderError: a folder holds no finished run.
        ArgumentError: a run has no scores of the model by case, or the runs have different test cases.

    ``paired_difference(["runs/fediod"], ["runs/fedavg"])`` prints as ``+2.1 [-0.4, +4.8] over 22 cases``.
    """
    names, first_scores = _scores(first, first_model)
    second_names, second_scores = _scores(second, second_model)
    if names != second_names:
        raise ArgumentError("second", list(map(str, second)), f"runs measured on {_case_list(names)}")
    differences = first_scores - second_scores
    differences = differences[np.isfinite(differences)]
    if not len(differences):
        raise ArgumentError(
            "first", list(map(str, first)), "runs with a case that both models have a score for"
        )
    indices = bootstrap.resample_indices(len(differences), RESAMPLES, np.random.default_rng(0))
    interval = bootstrap.confidence_interval(differences[indices].mean(1))
    assert interval is not None  # of finite scores
    return CaseDifference(float(differences.mean()), *interval, len(differences))


def seed_difference(first: Sequence[str | Path], second: Sequence[str | Path]) -> SeedDifference:
    """Return the mean difference of two methods' main metrics over seeds, with a 95% interval, for any task.

    The interval is Student's t over differences of runs with the same seed. If both runs store resamples of
    the same test cases, the variance over test cases is added. Fewer than three seeds are never significant.
    Among many comparisons of equal methods, one in twenty is significant by chance.

    Args:
        first: folders of runs, one per seed.
        second: folders of runs with the same seeds, in any order.

    Returns:
        The mean difference, first minus second, in the unit of the main metric; ``half_width`` of its 95%
        interval; and whether it is ``significant``.

    Raises:
        RunFolderError: a folder holds no finished run.
        ArgumentError: the runs have other seeds or another main metric, or a run has no main model.

    ``seed_difference(["runs/a-0", "runs/a-1", "runs/a-2"], [...])`` prints as ``+2.1 ± 0.4 over 3 seeds``.
    """
    first_runs, second_runs = _run_scores_by_seed("first", first), _run_scores_by_seed("second", second)
    if not first_runs or first_runs.keys() != second_runs.keys():
        expected = f"runs with seeds {', '.join(map(str, first_runs)) or 'as in first'}"
        raise ArgumentError("second", list(map(str, second)), expected)
    return compare_paired_runs(first_runs, second_runs)


def _run_scores_by_seed(argument: str, folders: Sequence[str | Path]) -> dict[int | None, RunScore]:
    runs = [RunFiles.read(Path(folder)) for folder in folders]
    scores: dict[int | None, RunScore] = {}
    for run in runs:
        result = run.result
        if result.value is None:
            raise ArgumentError(argument, str(run.folder), "a run with a main metric of its main model")
        test_cases = None if result.intervals is None else result.intervals.cases
        scores[result.seed] = RunScore(result.value, run.resampled_metric, test_cases)
    if len(scores) < len(runs) or len({run.result.metric.key for run in runs}) > 1:
        raise ArgumentError(
            argument, list(map(str, folders)), "runs with the same main metric and different seeds"
        )
    return scores


def _scores(folders: Sequence[str | Path], model: Model) -> tuple[tuple[str, ...], npt.NDArray[np.float64]]:
    """Return names of cases, and a model's mean score of each case over runs."""
    names, rows = None, []
    for folder in folders:
        cases = Result.read(Path(folder)).cases
        scores = None if cases is None else getattr(cases, model)
        if cases is None or scores is None:
            expected = (
                f"a run with scores of its {model} model by case (segmentation, nuclei, reconstruction); "
                "seed_difference compares any runs, over seeds"
            )
            raise ArgumentError("folder", str(folder), expected)
        if names not in (None, cases.names):
            raise ArgumentError("folder", str(folder), f"a run measured on {_case_list(names or ())}")
        names = cases.names
        rows.append([np.nan if score is None else score for score in scores])
    if names is None:
        raise ArgumentError("folders", list(folders), "at least one run")
    return names, np.array(rows).mean(0)


def _case_list(names: Sequence[str]) -> str:
    return f"{len(names)} cases ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds.

    >>> Spread.of([90.0, 92.0, 94.0])
    Spread(mean=92.0, std=2.0)
    >>> Spread.of([90.0])
    Spread(mean=90.0, std=None)
    """

    mean: float
    std: float | None = None

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        """Return mean and deviation of values; None if any value is missing."""
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return None
        return cls(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)

    def text(self, digits: int = 1) -> str:
        """Return mean and deviation without a unit, as "93.0 ± 3.6"."""
        return f"{self.mean:.{digits}f}" + ("" if self.std is None else f" \u00b1 {self.std:.{digits}f}")
