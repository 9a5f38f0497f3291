"""How far two models are apart on the same patients or pictures, with an interval over these.

Twenty patients say little of the next twenty, yet two models find the same ones hard: the difference patient
by patient says more than two means do.
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

Model = Literal["central", "ensemble", "centralised"]
DRAWS = 10_000


@dataclass(frozen=True)
class Difference:
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
) -> Difference:
    """How much better a model of some runs is than one of others, by a bootstrap over their common cases.

    Scores of a case are averaged over runs (seeds), the difference taken case by case, and cases drawn with
    replacement 10,000 times; the interval is between the 2.5th and the 97.5th percentile of the means. Cases
    that either model has no score of are left out.

    Args:
        first: folders of runs.
        second: folders of as many runs or others, measured on the same cases; or the same folders, to set
            two models of a run beside each other.
        of: which model of the first: central, ensemble (the teachers') or centralised (the mark).
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
    draws = bootstrap.drawn(len(apart), DRAWS, np.random.default_rng(0))
    between = bootstrap.interval(apart[draws].mean(1))
    assert between is not None  # of finite scores
    return Difference(float(apart.mean()), *between, len(apart))


def _scores(folders: Sequence[str | Path], model: Model) -> tuple[tuple[str, ...], npt.NDArray[np.float64]]:
    """Names of cases, and a model's score of each, the mean over runs."""
    names, rows = None, []
    for folder in folders:
        cases = Result.read(Path(folder)).cases
        scores = None if cases is None else getattr(cases, model)
        if cases is None or scores is None:
            raise ArgumentError(
                "folder", str(folder), f"a run that tells scores of its {model} model by case"
            )
        if names not in (None, cases.names):
            raise ArgumentError("folder", str(folder), f"a run that was measured on {_few(names or ())}")
        names = cases.names
        rows.append([np.nan if score is None else score for score in scores])
    if names is None:
        raise ArgumentError("folders", list(folders), "one or more")
    return names, np.array(rows).mean(0)


def _few(names: Sequence[str]) -> str:
    return f"{len(names)} cases ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
