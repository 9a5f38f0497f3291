"""Summary of a comparison: its settings and methods, their significant differences, and metrics of tables."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedstill.attacks.attack_results import ComparisonColumn
from fedstill.core.text_format import join_names
from fedstill.protocol.payload_kinds import PRIVATE_DATA
from fedstill.report.compared_method import LOCAL_PREFIX, ComparedMethod, Spread
from fedstill.report.metric_text import format_value_without_unit, lowercase_title
from fedstill.report.privacy_section import run_guarantee
from fedstill.report.result import ACCURACY
from fedstill.report.significance import MIN_SEEDS, RunScore, SeedDifference, compare_paired_runs
from fedstill.tasks.task import Metric

if TYPE_CHECKING:
    from fedstill.runs.spec import PaperMetric


@dataclass(frozen=True)
class ComparedSetting:
    """One setting of a comparison with its methods, in the order of the comparison's file."""

    name: str
    context: str
    entries: tuple[ComparedMethod, ...]
    metrics: tuple[Metric, ...] = (ACCURACY,)  # of the task

    @property
    def metric(self) -> Metric:
        """Main metric of the task."""
        return self.metrics[0]

    def significantly_best_labels(self, metric: Metric) -> set[str]:
        """Return labels of methods significantly better than all others with the same kind of model."""

        def is_better(first: ComparedMethod, second: ComparedMethod) -> bool:
            # Over the seeds that both have; means over all seeds of each may be in the other order.
            difference = self.paired_difference(first, second, metric)
            return difference.significant and _advantage(metric, difference) > 0

        ranked = self.ranked_by_model_kind(metric)
        return {first.label for first, *others in ranked if all(is_better(first, other) for other in others)}

    def ranked_by_model_kind(self, metric: Metric) -> list[list[ComparedMethod]]:
        """Return methods by kind of evaluated model, best mean first; only kinds with two or more methods.

        Methods whose nodes release their data are upper bounds and are not ranked.
        """
        sign = 1 if metric.better == "higher" else -1
        by_kind: dict[str, list[tuple[float, ComparedMethod]]] = {}
        for entry in self.entries:
            spread = entry.spread(metric.key)
            if spread is not None and PRIVATE_DATA not in entry.releases:
                by_kind.setdefault(entry.evaluated_model, []).append((sign * spread.mean, entry))
        lists = [sorted(scored, key=lambda pair: -pair[0]) for scored in by_kind.values() if len(scored) > 1]
        return [[entry for _, entry in scored] for scored in lists]

    def paired_difference(
        self, first: ComparedMethod, second: ComparedMethod, metric: Metric
    ) -> SeedDifference:
        """Return the paired difference of two methods over the seeds that both have."""
        first_scores, second_scores = (self._scores(entry, metric) for entry in (first, second))
        return compare_paired_runs(
            [(first_scores[seed], second_scores[seed]) for seed in first_scores if seed in second_scores]
        )

    def pairs(self, metric: Metric) -> list[tuple[ComparedMethod, ComparedMethod, SeedDifference]]:
        """Return all pairs of methods that have the metric, in the table's order, with their differences."""
        differences = [
            (first, second, self.paired_difference(first, second, metric))
            for first, second in itertools.combinations(self.entries, 2)
        ]
        return [(first, second, difference) for first, second, difference in differences if difference.seeds]

    def _scores(self, entry: ComparedMethod, metric: Metric) -> dict[int, RunScore]:
        is_main = metric.key == self.metric.key
        return {
            run.seed: RunScore(value, run.resamples if is_main else None, run.resampled_case_count)
            for run in entry.runs
            if (value := run.value(metric.key)) is not None
        }

    def verdicts(self) -> list[str]:
        """Return a sentence on significant differences of the main metric for each kind of model."""
        metric, sentences = self.metric, []
        for first, *others in self.ranked_by_model_kind(metric):
            differences = {other.name: self.paired_difference(first, other, metric) for other in others}
            not_significant = {
                name: difference
                for name, difference in differences.items()
                if not (difference.significant and _advantage(metric, difference) > 0)
            }
            if any(difference.half_width is None for difference in differences.values()):
                sentences.append(f"{metric.title}: only one seed, so no significance test.")
            elif not_significant:
                names = join_names(
                    [f"{name} ({_advantage_text(metric, gap)})" for name, gap in not_significant.items()]
                )
                few = f" Two seeds are too few: use {MIN_SEEDS} or more." if len(first.runs) == 2 else ""
                sentences.append(
                    f"{metric.title}: {first.name} is not significantly better than {names}.{few}"
                )
            else:
                name, difference = min(differences.items(), key=lambda item: _advantage(metric, item[1]))
                sentences.append(
                    f"{metric.title}: {first.name} is significantly better than all other methods; the "
                    "smallest "
                    f"difference is {_advantage_text(metric, difference)}, to {name}."
                )
        return list(dict.fromkeys(sentences))


def _advantage(metric: Metric, difference: SeedDifference) -> float:
    """Return the difference with the sign that is positive if the first method is better."""
    return difference.mean if metric.better == "higher" else -difference.mean


def _advantage_text(metric: Metric, difference: SeedDifference) -> str:
    """Return the advantage of the first method with its 95% interval."""
    advantage, half_width = _advantage(metric, difference), difference.half_width or 0.0
    # Adding 0.0 turns -0.0 into 0.0.
    mean, low, high = (
        format_value_without_unit(metric, round(x, metric.digits) + 0.0)
        for x in (advantage, advantage - half_width, advantage + half_width)
    )
    return f"{mean} [{low}, {high}]"


@dataclass(frozen=True)
class MethodCurve:
    """Curve of one method: its number, its name, and its main metric by epsilon or by fraction of the run."""

    number: int
    name: str
    values: Mapping[float, Spread]


@dataclass(frozen=True)
class ComparisonSummary:
    """A comparison with the metrics of its runs.

    Args:
        name: name of the comparison.
        about: its title in words; may be empty.
        seeds: its seeds.
        settings: its settings with their methods.
        notes: notes for the reader.
        published: the paper's metrics that tables show.
        command: command to repeat it.
        leakage: whether its runs are attacked.
        leakage_columns: metrics of the attacks.
    """

    name: str
    about: str
    seeds: tuple[int, ...]
    settings: tuple[ComparedSetting, ...]
    notes: tuple[str, ...]
    published: tuple[PaperMetric, ...]
    command: str
    leakage: bool = False
    leakage_columns: tuple[ComparisonColumn, ...] = ()

    @property
    def entries(self) -> list[ComparedMethod]:
        """Methods of all settings."""
        return [entry for setting in self.settings for entry in setting.entries]

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Metrics of all settings' tasks; the main metric of the first setting is first."""
        return tuple({metric.key: metric for setting in self.settings for metric in setting.metrics}.values())

    @property
    def metric(self) -> Metric:
        """Main metric of the first setting."""
        return self.metrics[0]

    def metric_named(self, name: str) -> Metric:
        """Return the metric of a name such as "local accuracy"."""
        return next(metric for metric in self.metrics if metric.key == name.removeprefix(LOCAL_PREFIX))

    def title_of(self, name: str) -> str:
        """Return a metric's title as written within a sentence, as "local accuracy" or "HD95"."""
        title = lowercase_title(self.metric_named(name).title)
        return f"{LOCAL_PREFIX}{title}" if name.startswith(LOCAL_PREFIX) else title

    def metric_names(self) -> list[str]:
        """Return names of all metrics: of the main model, and with "local" of the nodes' local models."""
        main, *others = (metric.key for metric in self.metrics)
        return [main, f"{LOCAL_PREFIX}{main}", *others, *(f"{LOCAL_PREFIX}{key}" for key in others)]

    def shown_metrics(self) -> list[str]:
        """Return names of the metrics in tables: main metric, its local form, and others that any run has."""
        main, local, *_ = self.metric_names()
        others = [metric.key for metric in self.metrics[1:] if metric.in_summary]
        return [main, local, *(key for key in others if any(entry.has(key) for entry in self.entries))]

    def published_metrics(self) -> list[str]:
        """Return names of metrics that a paper reports for some row."""
        return [
            name for name in self.metric_names() if any(name in entry.published for entry in self.entries)
        ]

    @property
    def has_epsilon(self) -> bool:
        """True if any method has a privacy guarantee."""
        return any(entry.privacy_bound() is not None for entry in self.entries)

    def budget_curves(self) -> list[MethodCurve]:
        """Return each method's main metric by privacy budget; empty unless all settings' budgets differ."""
        curves = []
        for entries in zip(*(setting.entries for setting in self.settings), strict=True):
            if len(entries) < 2 or len({entry.budget for entry in entries}) < len(entries):
                return []
            spreads = {entry.budget: entry.spread(entry.metric) for entry in entries}
            known = {
                epsilon: spread for epsilon in sorted(spreads) if (spread := spreads[epsilon]) is not None
            }
            curves.append(MethodCurve(entries[0].number, entries[0].name, known))
        return curves if any(curve.values for curve in curves) else []

    def privacy_sentence(self) -> str:
        """Return a sentence on the runs with a formal privacy guarantee."""
        runs = [run for entry in self.entries for run in entry.runs if run.value("bytes up")]
        guaranteed = sum(run_guarantee(run.result) is not None for run in runs)
        if guaranteed == 0:
            return "There is no formal privacy guarantee."
        if guaranteed == len(runs):
            return "All runs have a formal privacy guarantee (see epsilon)."
        have = "has" if guaranteed == 1 else "have"
        return (
            f"{guaranteed} of {len(runs)} runs with releases {have} a formal privacy guarantee (see epsilon)."
        )
