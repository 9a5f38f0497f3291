"""One method of a comparison in one setting: metrics of its runs with mean and standard deviation over seeds.

Every metric is that of the last round on data that no node saw. Standard deviations are the sample's (n - 1);
one seed has none. An attack's metric is that of the strongest attack: of the attacks on a row's runs, the one
with the highest mean over seeds (the lowest for a p-value).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedstill.attacks.attack_results import ComparisonColumn, Leakage
from fedstill.privacy.statement import NO_GUARANTEE, format_epsilon_bound
from fedstill.report.privacy_section import run_guarantee, weakest_guarantee
from fedstill.report.result import MetricOverNodes, Result
from fedstill.report.run_files import MetricsLog
from fedstill.report.significance import Resamples

if TYPE_CHECKING:
    from fedstill.runs.spec import PaperMetric


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


RUN_COSTS: Mapping[str, Callable[[Result], float | None]] = {
    "bytes up": lambda result: result.bytes.up,
    "bytes down": lambda result: result.bytes.down,
    "queries": lambda result: result.queries,
    "iterations": lambda result: result.iterations,
    "seconds": lambda result: result.seconds.total,
}
LOCAL_PREFIX, ALL_TESTS_SUFFIX = "local ", ", all tests"  # before and after the key of a metric


@dataclass(frozen=True)
class FinishedRun:
    """One finished run of a comparison.

    Args:
        seed: its seed.
        folder: its folder within the comparison's.
        result: its result.
        metrics: metrics during the run.
        leakage: results of the comparison's attacks on the run.
        resamples: main metric in each bootstrap resample of the test cases, ``(R,)``.
    """

    seed: int
    folder: str
    result: Result
    metrics: MetricsLog
    leakage: Leakage | None = None
    resamples: Resamples | None = None

    @property
    def resampled_case_count(self) -> int | None:
        """Number of test cases that were resampled."""
        intervals = self.result.intervals
        return None if intervals is None else intervals.cases

    def value(self, name: str) -> float | None:
        """Return a cost or a metric of the run by its name.

        Args:
            name: a key of :data:`RUN_COSTS`; or a metric's key for the main model; or the key after "local",
                "standalone", "ensemble" or "centralized". "local KEY" of the main metric is over each node's
                share of the test data, "local KEY, all tests" over all test data.
        """
        if name in RUN_COSTS:
            return RUN_COSTS[name](self.result)
        model, _, key = name.removesuffix(ALL_TESTS_SUFFIX).rpartition(" ")
        result = self.result
        if not model:
            return result.metric_values.get(key)
        if model in ("local", "standalone"):
            on_shares = model == "local" and key == result.metric.key and not name.endswith(ALL_TESTS_SUFFIX)
            stats = result.local if model == "local" else result.standalone
            return stats.get("share" if on_shares else key, MetricOverNodes()).mean
        return (result.ensemble if model == "ensemble" else result.centralized).get(key)


@dataclass(frozen=True)
class ComparedMethod:
    """One method in one setting of a comparison.

    Args:
        number: its number in figures, from 1.
        label: its name in the comparison.
        method: its registered name.
        title: its title, such as "FedIOD".
        evaluated_model: kind of model that it is evaluated by: student, virtual, ensemble or nodes.
        releases: payload kinds that leave a node.
        needs: requirements of the method, in words.
        runs: its finished runs.
        not_run: reasons of refused or stopped runs, by seed.
        missing: seeds of unfinished runs.
        published: the paper's metrics, by name.
        budget: privacy budget (epsilon) of a run at each node.
        metric: key of the main metric.
    """

    number: int
    label: str
    method: str
    title: str
    evaluated_model: str
    releases: tuple[str, ...]
    needs: tuple[str, ...]
    runs: tuple[FinishedRun, ...] = ()
    not_run: Mapping[int, str] = field(default_factory=dict)
    missing: tuple[int, ...] = ()
    published: Mapping[str, PaperMetric] = field(default_factory=dict)
    budget: float = math.inf
    metric: str = "accuracy"

    @property
    def name(self) -> str:
        """Title of the method; its label if the comparison has the method more than once."""
        return self.title if self.label in (self.method, self.method.rpartition(":")[2]) else self.label

    def spread(self, metric: str) -> Spread | None:
        """Return mean and deviation of a metric or cost over seeds."""
        return Spread.of([run.value(metric) for run in self.runs])

    def has(self, metric: str) -> bool:
        """Return whether any run has a metric."""
        return any(run.value(metric) is not None for run in self.runs)

    def format_metric(self, metric: str, digits: int = 1) -> str | None:
        """Return mean and deviation of a metric as text; one seed has deviation over nodes."""
        spread = self.spread(metric)
        if spread is not None and self.spread_is_over_nodes and not metric.startswith(LOCAL_PREFIX):
            spread = Spread(spread.mean, self.runs[0].result.local.get(metric, MetricOverNodes()).std)
        return None if spread is None else spread.text(digits)

    @property
    def spread_is_over_nodes(self) -> bool:
        """True if deviations are over nodes instead of seeds."""
        return self.evaluated_model == "nodes" and len(self.runs) == 1

    def paper_gap(self, metric: str) -> float | None:
        """Return our mean minus the paper's value."""
        spread, paper = self.spread(metric), self.published.get(metric)
        return None if spread is None or paper is None else spread.mean - paper.value

    def privacy_bound(self) -> tuple[float, float] | None:
        """Return the epsilon and delta that hold at each node in each run; None if a run has no guarantee."""
        return weakest_guarantee([run_guarantee(run.result) for run in self.runs])

    def epsilon_text(self) -> str:
        """Return the epsilon, "no guarantee", or "nothing released" in words."""
        bound = self.privacy_bound()
        if all(run.value("bytes up") == 0 for run in self.runs):
            return "nothing released"
        return NO_GUARANTEE if bound is None else format_epsilon_bound(bound[0])

    def strongest_attack_and_value(self, column: ComparisonColumn) -> tuple[str, Spread] | None:
        """Return name and metric of the strongest attack over seeds; None if a run has no such metric."""
        by_run = [metrics_by_attack(column, run.leakage) for run in self.runs]
        spreads = {
            name: Spread.of([metrics.get(name) for metrics in by_run])
            for name in (by_run[0] if by_run else ())
        }
        known = {name: spread for name, spread in spreads.items() if spread is not None}
        if not known:
            return None
        strongest = pick_strongest(column, [spread.mean for spread in known.values()])
        return next((name, spread) for name, spread in known.items() if spread.mean == strongest)

    def total_bytes(self) -> float | None:
        """Return bytes up and down of a whole run over all nodes, the mean over seeds."""
        up, down = self.spread("bytes up"), self.spread("bytes down")
        return None if up is None or down is None else up.mean + down.mean

    def missing_reason(self) -> str:
        """Return the reasons of missing runs in one line; empty if none is missing."""
        reasons: dict[str, list[int]] = {}
        for seed, text in self.not_run.items():
            reasons.setdefault(text if text.startswith("stopped: ") else f"refused: {text}", []).append(seed)
        for seed in self.missing:
            reasons.setdefault("not finished", []).append(seed)
        if len(reasons) == 1 and not self.runs:
            return next(iter(reasons))
        return "; ".join(f"{text} (seed {', '.join(map(str, seeds))})" for text, seeds in reasons.items())

    def learning_curve(self) -> dict[float, Spread]:
        """Return the main metric by fraction of the run, the mean over seeds."""
        curves = []
        for run in self.runs:
            last = run.value("iterations") or max(run.metrics.main_model, default=0)
            curves.append(
                {step / last: value for step, value in run.metrics.main_model.items()} if last else {}
            )
        shared = set.intersection(*map(set, curves)) if curves else set()
        return {
            fraction: Spread(statistics.fmean(curve[fraction] for curve in curves))
            for fraction in sorted(shared)
        }


def metrics_by_attack(column: ComparisonColumn, leakage: Leakage | None) -> dict[str, float]:
    """Return a column's metric in one run by attack; the strongest of an attack with several targets."""
    values: dict[str, list[float]] = {}
    for attack in () if leakage is None else leakage.attacks:
        for row in attack.rows:
            if row.column == column.name and row.value is not None:
                values.setdefault(row.attack or attack.name, []).append(row.value)
    return {name: pick_strongest(column, of_attack) for name, of_attack in values.items()}


def pick_strongest(column: ComparisonColumn, values: Iterable[float]) -> float:
    return min(values) if column.lower_is_stronger else max(values)
