"""Summary: settings of a comparison, what may be told of their methods' order, and what stands in tables."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedstill.attacks.leakage import LeakageColumn
from fedstill.core.text_format import join_names
from fedstill.protocol.payload_kinds import PRIVATE_DATA
from fedstill.report.compared_method import LOCAL, ComparedMethod, Spread
from fedstill.report.metric_text import format_value, lowercase_title
from fedstill.report.privacy_section import run_guarantee
from fedstill.report.result import ACCURACY
from fedstill.report.significance import RunScore, SeedDifference, compare_paired_runs
from fedstill.tasks.task import Metric

if TYPE_CHECKING:
    from fedstill.runs.config import PaperMetric


@dataclass(frozen=True)
class ComparedSetting:
    """One setting of a comparison: its methods, in the order in which they were given."""

    name: str
    context: str
    entries: tuple[ComparedMethod, ...]
    metrics: tuple[Metric, ...] = (ACCURACY,)  # of its task

    @property
    def metric(self) -> Metric:
        """What its models are judged by."""
        return self.metrics[0]

    def best(self, metric: Metric) -> set[str]:
        """Labels that are above all others judged by the same kind of model, by more than chance explains."""

        def ahead(first: ComparedMethod, second: ComparedMethod) -> bool:
            # Seeds that both have may say the opposite of all seeds that each has.
            gap = self.above(first, second, metric)
            return gap.significant and _ahead(metric, gap) > 0

        ranked = self.ranked(metric)
        return {first.label for first, *others in ranked if all(ahead(first, other) for other in others)}

    def ranked(self, metric: Metric) -> list[list[ComparedMethod]]:
        """Those judged by the same kind of model, by their means, the best first; of each kind two or more.

        Where the data themselves leave the nodes there is no federation, but a mark to reach.
        """
        sign = 1 if metric.better == "higher" else -1
        kinds: dict[str, list[tuple[float, ComparedMethod]]] = {}
        for entry in self.entries:
            ours = entry.spread(metric.key)
            if ours is not None and PRIVATE_DATA not in entry.leaves:
                kinds.setdefault(entry.central, []).append((sign * ours.mean, entry))
        lists = [sorted(alike, key=lambda each: -each[0]) for alike in kinds.values() if len(alike) > 1]
        return [[entry for _, entry in alike] for alike in lists]

    def above(self, first: ComparedMethod, second: ComparedMethod, metric: Metric) -> SeedDifference:
        """The paired difference of two methods that have the figure, over the seeds that both have."""
        ours, theirs = (self._reached(entry, metric) for entry in (first, second))
        return compare_paired_runs([(ours[seed], theirs[seed]) for seed in ours if seed in theirs])

    def pairs(self, metric: Metric) -> list[tuple[ComparedMethod, ComparedMethod, SeedDifference]]:
        """Each two methods that have the figure, in the table's order, and the difference of the first."""
        both = itertools.combinations(self.entries, 2)
        gaps = [(one, other, self.above(one, other, metric)) for one, other in both]
        return [(one, other, gap) for one, other, gap in gaps if gap.seeds]

    def _reached(self, entry: ComparedMethod, metric: Metric) -> dict[int, RunScore]:
        """What each run of a method has, by seed."""
        judged = metric.key == self.metric.key
        return {
            run.seed: RunScore(told, run.resamples if judged else None, run.tested)
            for run in entry.runs
            if (told := run.value(metric.key)) is not None
        }

    def verdicts(self) -> list[str]:
        """What may be said of the order of methods by what they are judged by: a sentence for each kind."""
        metric, told = self.metric, []
        for first, *others in self.ranked(metric):
            found = {other.name: self.above(first, other, metric) for other in others}
            level = {
                name: each
                for name, each in found.items()
                if not (each.significant and _ahead(metric, each) > 0)
            }
            if any(each.half is None for each in found.values()):
                told.append(f"{metric.title}: one seed alone, so no order is told.")
            elif level:
                gaps = join_names([f"{name} ({_gap(metric, each)})" for name, each in level.items()])
                few = " Two seeds tell little: three are the least." if len(first.runs) == 2 else ""
                told.append(f"{metric.title}: {first.name} is level with {gaps}.{few}")
            else:
                name, each = min(found.items(), key=lambda item: _ahead(metric, item[1]))
                how = "above" if metric.better == "higher" else "better than"
                told.append(f"{metric.title}: {first.name} is first, {_gap(metric, each)} {how} {name}.")
        return list(dict.fromkeys(told))


def _ahead(metric: Metric, each: SeedDifference) -> float:
    """By how much the first is better; where the other is, over the seeds of both, below 0."""
    return each.mean if metric.better == "higher" else -each.mean


def _gap(metric: Metric, each: SeedDifference) -> str:
    """By how much the first is better, and the 95 % interval of that."""
    ahead, half = _ahead(metric, each), each.half or 0.0
    # No zero has a sign.
    mean, low, high = (
        format_value(metric, round(x, metric.digits) + 0.0) for x in (ahead, ahead - half, ahead + half)
    )
    return f"{mean} [{low}, {high}]"


@dataclass(frozen=True)
class MethodCurve:
    """One method's line: its number, its name, what it reaches by epsilon, or by the share of its run."""

    place: int
    name: str
    reached: Mapping[float, Spread]


@dataclass(frozen=True)
class Summary:
    """A comparison with its figures."""

    name: str
    about: str
    seeds: tuple[int, ...]
    settings: tuple[ComparedSetting, ...]
    notes: tuple[str, ...]
    published: tuple[PaperMetric, ...]  # those that stand in the table
    command: str
    leakage: bool = False  # whether runs were to be attacked
    leaks: tuple[LeakageColumn, ...] = ()  # the figures of those attacks

    @property
    def entries(self) -> list[ComparedMethod]:
        """Of all settings."""
        return [entry for setting in self.settings for entry in setting.entries]

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Of all settings' tasks; what models of the first setting are judged by first."""
        return tuple({metric.key: metric for setting in self.settings for metric in setting.metrics}.values())

    @property
    def metric(self) -> Metric:
        """What models are judged by."""
        return self.metrics[0]

    def metric_named(self, name: str) -> Metric:
        """The figure that a name such as "local accuracy" is about."""
        return next(metric for metric in self.metrics if metric.key == name.removeprefix(LOCAL))

    def called(self, name: str) -> str:
        """A figure in a sentence: "local accuracy", "HD95"."""
        title = lowercase_title(self.metric_named(name).title)
        return f"{LOCAL}{title}" if name.startswith(LOCAL) else title

    def names(self) -> list[str]:
        """Of the figures that papers publish: of the central model, then "local" ones of the nodes' own."""
        first, *others = (metric.key for metric in self.metrics)
        return [first, f"{LOCAL}{first}", *others, *(f"{LOCAL}{key}" for key in others)]

    def shown(self) -> list[str]:
        """Those in tables: of the central model what any run has, and of the nodes' own the first."""
        first, local, *_ = self.names()
        others = [metric.key for metric in self.metrics[1:] if metric.in_summary]
        return [first, local, *(key for key in others if any(entry.has(key) for entry in self.entries))]

    def compared(self) -> list[str]:
        """Those that a paper has for some row."""
        return [name for name in self.names() if any(name in entry.published for entry in self.entries)]

    @property
    def priced(self) -> bool:
        """Whether any row has a guarantee of privacy."""
        return any(entry.epsilon() is not None for entry in self.entries)

    def budgets(self) -> list[MethodCurve]:
        """What each method reaches under each budget; none unless settings differ in it, each from each."""
        lines = []
        for entries in zip(*(setting.entries for setting in self.settings), strict=True):
            if len(entries) < 2 or len({entry.budget for entry in entries}) < len(entries):
                return []
            found = {entry.budget: entry.spread(entry.metric) for entry in entries}
            reached = {epsilon: found[epsilon] for epsilon in sorted(found)}
            known = {epsilon: spread for epsilon, spread in reached.items() if spread is not None}
            lines.append(MethodCurve(entries[0].place, entries[0].name, known))
        return lines if any(line.reached for line in lines) else []

    def privacy(self) -> str:
        """Which runs have a formal guarantee of privacy."""
        runs = [run for entry in self.entries for run in entry.runs if run.value("bytes up")]
        kept = sum(run_guarantee(run.result) is not None for run in runs)
        if kept == 0:
            return "There is no formal guarantee of privacy."
        if kept == len(runs):
            return "What left the nodes has a formal guarantee of privacy in every run: see epsilon."
        have = f"{kept} {'has' if kept == 1 else 'have'} a formal guarantee of privacy (see epsilon)"
        return f"Of {len(runs)} runs in which anything left the nodes {have}, the others none."
