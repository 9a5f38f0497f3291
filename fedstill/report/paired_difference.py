"""How far two models are apart, with an interval: on the same patients or pictures, or over seeds.

Twenty patients say little of the next twenty, yet two models find the same ones hard: the difference patient
by patient says more than two means do. So does that of two runs of one seed.
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

Model = Literal["central", "ensemble", "centralized"]
DRAWS = 10_000


@dataclass(frozen=True)
class CaseDifference:
    """Of two models' means over cases, first minus second, in the unit that models are judged by.

    Args:
        low, high: its 95 % interval over cases: of these trainings, not of another one.
        cases: patients or pictures.
    """

    mean: float
    low: float
    high: float
    cases: int

    def __str__(self) -> str:
        return f"{self.mean:+.1f} [{self.low:+.1f}, {self.high:+.1f}] over {self.cases} cases"


def paired_difference(
    first: Sequence[str | Path], second: Sequence[str | Path], of: Model = "central", than: Model = "central"
) -> CaseDifference:
    """How much better a model of some runs is than one of others, by a bootstrap over their common cases.

    Scores of a case are averaged over runs (seeds), the difference taken case by case, and cases drawn with
    replacement 10,000 times; the interval is between the 2.5th and the 97.5th percentile of the means. Cases
    that either model has no score of are left out.

    Args:
        first: folders of runs.
        second: folders of as many runs or others, measured on the same cases; or the same folders, to set
            two models of a run beside each other.
        of: which model of the first: central, ensemble (the teachers') or centralized (the mark).
        than: which of the second.

    Raises:
        RunFolderError: a folder holds no finished run.
        ArgumentError: a run has no such model, or judges no case by itself; or runs that were measured on
            other cases than the first.

    ``paired_difference(["runs/fediod"], ["runs/fedavg"])`` prints as ``+2.1 [-0.4, +4.8] over 22 cases``.
    """
    names, one = _scores(first, of)
    others, two = _scores(second, than)
    if names != others:
        raise ArgumentError("second", list(map(str, second)), f"runs that were measured on {_few(names)}")
    apart = one - two
    apart = apart[np.isfinite(apart)]
    if not len(apart):
        raise ArgumentError(
            "first", list(map(str, first)), "runs with a case that both models have a score of"
        )
    draws = bootstrap.resample_indices(len(apart), DRAWS, np.random.default_rng(0))
    between = bootstrap.confidence_interval(apart[draws].mean(1))
    assert between is not None  # of finite scores
    return CaseDifference(float(apart.mean()), *between, len(apart))


def seed_difference(first: Sequence[str | Path], second: Sequence[str | Path]) -> SeedDifference:
    """How much better the central model of some runs is than that of others, seed by seed, of any task.

    Student's t over the differences of runs with one seed, whose standard error has, where both were measured
    on the same test part, what another choice of test cases would change, too. Of fewer than three seeds
    nothing is told apart. Of many pairs that are tried so, one in twenty is told apart by chance.

    Args:
        first: folders of runs, one a seed.
        second: folders of runs with the same seeds, in any order.

    Returns:
        The mean difference in the unit that models are judged by, half of its 95 % interval, and whether the
        interval is on one side of 0 (``told``).

    Raises:
        RunFolderError: a folder holds no finished run.
        ArgumentError: other seeds or another figure than the first, or a run without a central model.

    ``seed_difference(["runs/a-0", "runs/a-1", "runs/a-2"], [...])`` prints as ``+2.1 ± 0.4 over 3 seeds``.
    """
    ours, theirs = _by_seed("first", first), _by_seed("second", second)
    if not ours or ours.keys() != theirs.keys():
        allowed = f"runs of seeds {', '.join(map(str, ours)) or 'of which each has one'}"
        raise ArgumentError("second", list(map(str, second)), allowed)
    return compare_paired_runs([(each, theirs[seed]) for seed, each in ours.items()])


def _by_seed(whose: str, folders: Sequence[str | Path]) -> dict[int | None, RunScore]:
    runs = [RunFiles.read(Path(folder)) for folder in folders]
    reached: dict[int | None, RunScore] = {}
    for run in runs:
        result = run.result
        metric = result.metric_values.get(result.metric.key)
        if metric is None:
            raise ArgumentError(
                whose, str(run.folder), "a run whose result has a figure of its central model"
            )
        tested = None if result.intervals is None else result.intervals.cases
        reached[result.seed] = RunScore(metric, run.resamples, tested)
    if len(reached) < len(runs) or len({run.result.metric.key for run in runs}) > 1:
        raise ArgumentError(whose, list(map(str, folders)), "runs of one figure, each with a seed of its own")
    return reached


def _scores(folders: Sequence[str | Path], model: Model) -> tuple[tuple[str, ...], npt.NDArray[np.float64]]:
    """Names of cases, and a model's score of each, the mean over runs."""
    names, rows = None, []
    for folder in folders:
        cases = Result.read(Path(folder)).cases
        scores = None if cases is None else getattr(cases, model)
        if cases is None or scores is None:
            allowed = (
                f"a run that tells scores of its {model} model by case (segmentation, nuclei, reconstruction)"
            )
            raise ArgumentError("folder", str(folder), f"{allowed}; seed_difference compares any, over seeds")
        if names not in (None, cases.names):
            raise ArgumentError("folder", str(folder), f"a run that was measured on {_few(names or ())}")
        names = cases.names
        rows.append([np.nan if score is None else score for score in scores])
    if names is None:
        raise ArgumentError("folders", list(folders), "one or more")
    return names, np.array(rows).mean(0)


def _few(names: Sequence[str]) -> str:
    return f"{len(names)} cases ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
