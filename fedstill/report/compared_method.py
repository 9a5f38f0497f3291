"""Entry: one method of a comparison in one setting, its runs' figures with mean and deviation over seeds.

Every figure is that of the last round on data that no node saw. Standard deviations are the sample's (n - 1),
and one seed alone has none. A figure of attacks is that of the strongest attack: of those that were tried on
a row's runs, the one with the highest mean over seeds (of a p-value: the lowest).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedstill.attacks.leakage import Leakage, LeakageColumn
from fedstill.privacy.statement import NO_GUARANTEE, format_epsilon_bound
from fedstill.report.privacy_section import most, run_guarantee
from fedstill.report.result import OverNodes, Result
from fedstill.report.run_files import MetricsLog
from fedstill.report.significance import Draws

if TYPE_CHECKING:
    from fedstill.runs.config import PaperMetric


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
        """Of values, or None where one is missing: no mean over fewer seeds than the others have."""
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return None
        return cls(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)

    def text(self, digits: int = 1) -> str:
        """ "93.0 ± 3.6": without a unit."""
        return f"{self.mean:.{digits}f}" + ("" if self.std is None else f" \u00b1 {self.std:.{digits}f}")


TRAFFIC: Mapping[str, Callable[[Result], float | None]] = {
    "bytes up": lambda result: result.bytes.up,
    "bytes down": lambda result: result.bytes.down,
    "queries": lambda result: result.queries,
    "turns": lambda result: result.turns,
    "seconds": lambda result: result.seconds.total,
}
LOCAL, ALL_TESTS = "local ", ", all tests"  # around the key of a figure


@dataclass(frozen=True)
class FinishedRun:
    """One finished run: what its files say."""

    seed: int
    folder: str
    result: Result
    metrics: MetricsLog
    leakage: Leakage | None = None  # what attacks with the comparison's options got
    resamples: Draws | None = None  # what it is judged by in each draw of test cases

    @property
    def tested(self) -> int | None:
        """How many test cases were drawn from."""
        kept = self.result.intervals
        return None if kept is None else kept.cases

    def value(self, name: str) -> float | None:
        """One of :data:`TRAFFIC`; or by a figure's key, of the central model; or by "local <key>", of the
        nodes' own models (of what they are judged by, each on its share of the test data); or by "local
        <key>, all tests", "standalone <key>", "ensemble <key>", "centralized <key>".
        """
        if name in TRAFFIC:
            return TRAFFIC[name](self.result)
        whose, _, key = name.removesuffix(ALL_TESTS).rpartition(" ")
        result = self.result
        if not whose:
            return result.metric_values.get(key)
        if whose in ("local", "standalone"):
            on_shares = whose == "local" and key == result.metric.key and not name.endswith(ALL_TESTS)
            metrics = result.local if whose == "local" else result.standalone
            return metrics.get("share" if on_shares else key, OverNodes()).mean
        return (result.ensemble if whose == "ensemble" else result.centralized).get(key)


@dataclass(frozen=True)
class ComparedMethod:
    """One method in one setting."""

    place: int  # its number, from 1 up
    label: str
    method: str
    title: str
    central: str
    leaves: tuple[str, ...]
    needs: tuple[str, ...]
    runs: tuple[FinishedRun, ...] = ()
    not_run: Mapping[int, str] = field(default_factory=dict)  # reasons by seed
    missing: tuple[int, ...] = ()  # seeds whose runs are not finished
    published: Mapping[str, PaperMetric] = field(default_factory=dict)  # by figure
    budget: float = math.inf  # epsilon that a run may cost each node
    metric: str = "accuracy"  # the key of what its models are judged by

    @property
    def name(self) -> str:
        """As people write it; where a method stands here more than once, as the comparison calls it."""
        return self.title if self.label in (self.method, self.method.rpartition(":")[2]) else self.label

    def spread(self, metric: str) -> Spread | None:
        """A figure over seeds."""
        return Spread.of([run.value(metric) for run in self.runs])

    def has(self, metric: str) -> bool:
        """Whether any run has a figure."""
        return any(run.value(metric) is not None for run in self.runs)

    def shown(self, metric: str, digits: int = 1) -> str | None:
        """A figure over seeds, as tables have it; of one seed a nodes' mean has its deviation over them."""
        ours = self.spread(metric)
        if ours is not None and self.spread_is_over_nodes and not metric.startswith(LOCAL):
            ours = Spread(ours.mean, self.runs[0].result.local.get(metric, OverNodes()).std)
        return None if ours is None else ours.text(digits)

    @property
    def spread_is_over_nodes(self) -> bool:
        """Whether what stands behind the sign is no deviation over seeds."""
        return self.central == "nodes" and len(self.runs) == 1

    def gap(self, metric: str) -> float | None:
        """Ours minus the paper's."""
        ours, paper = self.spread(metric), self.published.get(metric)
        return None if ours is None or paper is None else ours.mean - paper.value

    def epsilon(self) -> tuple[float, float] | None:
        """An epsilon and a delta that hold at each node in each run; None if one has no guarantee."""
        return most([run_guarantee(run.result) for run in self.runs])

    def price(self) -> str:
        """That epsilon, or "no guarantee", or that nothing left the nodes."""
        kept = self.epsilon()
        if all(run.value("bytes up") == 0 for run in self.runs):
            return "nothing left"
        return NO_GUARANTEE if kept is None else format_epsilon_bound(kept[0])

    def leak(self, column: LeakageColumn) -> tuple[str, Spread] | None:
        """A figure of the strongest attack over seeds, with its name; None where a run has none."""
        tried = [strongest(column, run.leakage) for run in self.runs]
        means = {name: Spread.of([each.get(name) for each in tried]) for name in (tried[0] if tried else ())}
        known = {name: spread for name, spread in means.items() if spread is not None}
        if not known:
            return None
        chosen = pick(column, [spread.mean for spread in known.values()])
        return next((name, spread) for name, spread in known.items() if spread.mean == chosen)

    def traffic(self) -> float | None:
        """Bytes up and down of a whole run, all nodes, the mean over seeds."""
        up, down = self.spread("bytes up"), self.spread("bytes down")
        return None if up is None or down is None else up.mean + down.mean

    def reason(self) -> str:
        """Why runs are lacking, in one line; empty where none is."""
        reasons: dict[str, list[int]] = {}
        for seed, text in self.not_run.items():
            reasons.setdefault(text if text.startswith("stopped: ") else f"refused: {text}", []).append(seed)
        for seed in self.missing:
            reasons.setdefault("not finished", []).append(seed)
        if len(reasons) == 1 and not self.runs:
            return next(iter(reasons))
        return "; ".join(f"{text} (seed {', '.join(map(str, seeds))})" for text, seeds in reasons.items())

    def curve(self) -> dict[float, Spread]:
        """What models are judged by over the share of the run that is done, the mean over seeds."""
        lines = []
        for run in self.runs:
            last = run.value("turns") or max(run.metrics.central, default=0)
            lines.append({step / last: value for step, value in run.metrics.central.items()} if last else {})
        shared = set.intersection(*map(set, lines)) if lines else set()
        return {share: Spread(statistics.fmean(line[share] for line in lines)) for share in sorted(shared)}


def strongest(column: LeakageColumn, found: Leakage | None) -> dict[str, float]:
    """A column's figures in one run, by attack: of several targets the one of which it got most."""
    told: dict[str, list[float]] = {}
    for attack in () if found is None else found.attacks:
        for row in attack.rows:
            if row.column == column.name and row.value is not None:
                told.setdefault(row.attack or attack.name, []).append(row.value)
    return {name: pick(column, values) for name, values in told.items()}


def pick(column: LeakageColumn, values: Iterable[float]) -> float:
    return min(values) if column.lower_is_stronger else max(values)
