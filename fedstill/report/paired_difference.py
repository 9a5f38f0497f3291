"""Paired difference of two models with a 95% confidence interval, over test cases or over seeds.

Two models tend to find the same cases hard, so paired differences vary less than the two means. The same
holds for runs with the same seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedstill.core import bootstrap
from fedstill.core.errors import ArgumentError
from fedstill.report.result import Result
from fedstill.report.run_files import RunFiles
from fedstill.report.significance import RunScore, SeedDifference, compare_paired_runs

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
    return compare_paired_runs([(score, second_runs[seed]) for seed, score in first_runs.items()])


def _run_scores_by_seed(argument: str, folders: Sequence[str | Path]) -> dict[int | None, RunScore]:
    runs = [RunFiles.read(Path(folder)) for folder in folders]
    scores: dict[int | None, RunScore] = {}
    for run in runs:
        result = run.result
        value = result.metric_values.get(result.metric.key)
        if value is None:
            raise ArgumentError(argument, str(run.folder), "a run with a main metric of its main model")
        test_cases = None if result.intervals is None else result.intervals.cases
        scores[result.seed] = RunScore(value, run.resampled_metric, test_cases)
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
