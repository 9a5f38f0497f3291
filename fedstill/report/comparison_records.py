"""A comparison with the records of its runs, and notes for the reader.

Every metric is that of the last round on data that no node saw. Standard deviations are the sample's (n - 1);
one seed has none. An attack's metric is that of the strongest attack: of the attacks on a row's runs, the one
with the highest mean over seeds (the lowest for a p-value).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedstill.attacks.attack import ComparisonColumn, Leakage
from fedstill.attacks.attack_runner import LeakageConfig
from fedstill.compare import comparison_runner
from fedstill.compare.comparison import SHARED, Comparison, ComparisonRun, released_kinds
from fedstill.compare.method_forms import MethodForm, form_rank, form_sentences
from fedstill.core.text_format import (
    format_count,
    join_names,
)
from fedstill.federation.adversaries import Adversary, Malicious, NoAdversary
from fedstill.privacy.statement import NO_GUARANTEE, format_epsilon_bound
from fedstill.protocol.method import method_name
from fedstill.protocol.payload_kinds import PRIVATE_DATA
from fedstill.report.records import (
    ACCURACY,
    ENSEMBLE,
    LOCAL,
    MAIN,
    MAIN_MODELS,
    OWN_SHARE,
    RUN,
    MetricsLog,
    Record,
    Result,
    RunFiles,
    find_record,
    weakest_guarantee,
)
from fedstill.report.statistics import (
    MIN_SEEDS,
    Resamples,
    RunScore,
    SeedDifference,
    Spread,
    compare_paired_runs,
)
from fedstill.report.tables import format_value_without_unit, lowercase_title
from fedstill.runs.spec import PaperMetric, RunSpec
from fedstill.tasks.task import Metric

# --- one method in one setting --------------------------------------------------------------------------


LOCAL_PREFIX, ALL_TESTS_SUFFIX = "local ", ", all tests"  # before and after the key of a metric


def record_name(record: Record, main_metric: str) -> str | None:
    """Return the name of a record in tables and published metrics; None for a single node, site or attack.

    The name is the cost, the metric's key for the main model, or the key after "local", "standalone",
    "ensemble" or "centralized". "local KEY" of the main metric is over each node's own share of the test
    data, "local KEY, all tests" over all test data.

    >>> record_name(Record(model=LOCAL, metric="accuracy", site=OWN_SHARE, value=90.0), "accuracy")
    'local accuracy'
    >>> record_name(Record(model=LOCAL, metric="accuracy", value=90.0), "accuracy")
    'local accuracy, all tests'
    """
    if record.node or record.finding or record.attack or record.site not in ("", OWN_SHARE):
        return None
    if record.model in (MAIN, RUN):
        return record.metric
    is_over_all_tests = record.model == LOCAL and record.metric == main_metric and record.site != OWN_SHARE
    return f"{record.model} {record.metric}" + (ALL_TESTS_SUFFIX if is_over_all_tests else "")


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

    @cached_property
    def records(self) -> list[Record]:
        """Records of the run's result and of the attacks on it."""
        records = [replace(record, seed=self.seed) for record in self.result.records]
        for attack in () if self.leakage is None else self.leakage.attacks:
            for row in attack.rows:
                if row.column and row.value is not None:
                    record = Record(
                        seed=self.seed,
                        model=row.target,
                        attack=row.attack or attack.name,
                        metric=row.column,
                        value=row.value,
                        interval=row.interval,
                    )
                    records.append(record)
        return records

    @cached_property
    def _value_by_name(self) -> Mapping[str | None, float]:
        return {record_name(record, self.result.metric.key): record.value for record in self.records}

    def value(self, name: str) -> float | None:
        """Return a value of the run by its :func:`record_name`; None if it was not measured."""
        return self._value_by_name.get(name)


@dataclass(frozen=True)
class ComparedMethod:
    """One method in one setting of a comparison.

    Args:
        number: its number in figures, from 1.
        label: its name in the comparison.
        method: its registered name.
        config: configuration of its run with the first seed.
        title: its title, such as "FedIOD".
        evaluated_model: kind of model that it is evaluated by: student, virtual, ensemble or nodes.
        releases: payload kinds that leave a node.
        needs: requirements of the method, in words.
        runs: its finished runs.
        not_run: reasons of refused or stopped runs, by seed.
        missing: seeds of unfinished runs.
        published: the paper's metrics, by name.
        form: whether it runs as printed, as its published code, or in fedstill's form; None: not named.
    """

    number: int
    label: str
    method: str
    config: RunSpec
    title: str
    evaluated_model: str
    releases: tuple[str, ...]
    needs: tuple[str, ...]
    runs: tuple[FinishedRun, ...] = ()
    not_run: Mapping[int, str] = field(default_factory=dict)
    missing: tuple[int, ...] = ()
    published: Mapping[str, PaperMetric] = field(default_factory=dict)
    form: MethodForm | None = None

    @property
    def budget(self) -> float:
        """Privacy budget (epsilon) of a run at each node."""
        return self.config.nodes.privacy.epsilon

    @property
    def metric(self) -> str:
        """Key of the main metric."""
        return self.config.task.metrics[0].key

    @property
    def form_title(self) -> str:
        """Form of the method in words; empty if it is not named."""
        return "" if self.form is None else self.form.title

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
            record = find_record(self.runs[0].records, LOCAL, metric)
            spread = Spread(spread.mean, None if record is None else record.std)
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
        return weakest_guarantee([run.result.guarantee for run in self.runs])

    def epsilon_text(self) -> str:
        """Return the epsilon, "no guarantee", or "nothing released" in words."""
        bound = self.privacy_bound()
        if all(run.value("bytes up") == 0 for run in self.runs):
            return "nothing released"
        return NO_GUARANTEE if bound is None else format_epsilon_bound(bound[0])

    def strongest_attack_and_value(self, column: ComparisonColumn) -> tuple[str, Spread] | None:
        """Return name and metric of the strongest attack over seeds; None if a run has no such metric."""
        by_run = [metrics_by_attack(column, run.records) for run in self.runs]
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


def metrics_by_attack(column: ComparisonColumn, records: Iterable[Record]) -> dict[str, float]:
    """Return a column's metric in one run by attack; the strongest of an attack with several targets."""
    values: dict[str, list[float]] = {}
    for record in records:
        if record.attack and record.metric == column.name:
            values.setdefault(record.attack, []).append(record.value)
    return {name: pick_strongest(column, of_attack) for name, of_attack in values.items()}


def pick_strongest(column: ComparisonColumn, values: Iterable[float]) -> float:
    return min(values) if column.lower_is_stronger else max(values)


# --- settings and the comparison ------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranking:
    """Method with the best mean among methods with the same kind of evaluated model.

    Args:
        metric: compared metric.
        first: the method.
        differences: the other methods, best first, with the paired difference of ``first`` to each.
    """

    metric: Metric
    first: ComparedMethod
    differences: Sequence[tuple[ComparedMethod, SeedDifference]]

    @property
    def rivals(self) -> list[tuple[ComparedMethod, SeedDifference]]:
        """Methods that the first one is not significantly better than.

        Differences are over the seeds that both have; means over all seeds of each may be in another order.
        """
        return [
            (other, difference)
            for other, difference in self.differences
            if not difference.favors_first(self.metric.better)
        ]

    def verdict(self) -> str:
        """Return a sentence on the significance of the differences."""
        title, first = self.metric.title, self.first
        if any(difference.half_width is None for _, difference in self.differences):
            return f"{title}: only one seed, so no significance test."
        if self.rivals:
            rivals = {other.name: f"{other.name} ({self._text(gap)})" for other, gap in self.rivals}
            names = join_names(list(rivals.values()))
            few = f" Two seeds are too few: use {MIN_SEEDS} or more." if len(first.runs) == 2 else ""
            return f"{title}: {first.name} is not significantly better than {names}.{few}"
        closest, difference = min(self.differences, key=self._advantage)
        return (
            f"{title}: {first.name} is significantly better than all other methods; the smallest "
            f"difference is {self._text(difference)}, to {closest.name}."
        )

    def _advantage(self, pair: tuple[ComparedMethod, SeedDifference]) -> float:
        return self._sign * pair[1].mean

    @property
    def _sign(self) -> int:
        return 1 if self.metric.better == "higher" else -1

    def _text(self, difference: SeedDifference) -> str:
        """Return the advantage of the first method with its 95% interval."""
        advantage, half_width = self._sign * difference.mean, difference.half_width or 0.0
        # Adding 0.0 turns -0.0 into 0.0.
        mean, low, high = (
            format_value_without_unit(self.metric, round(end, self.metric.digits) + 0.0)
            for end in (advantage, advantage - half_width, advantage + half_width)
        )
        return f"{mean} [{low}, {high}]"


@dataclass(frozen=True)
class Decomposition:
    """Main metric of one method from the nodes' models over their ensemble to the student.

    Args:
        entry: the method.
        teachers: mean of the nodes' own models on all test data.
        ensemble: the teachers' ensemble, the upper bound of a student that only imitates it.
        student: the student.
        gain: ensemble minus teachers, over seeds.
        gap: student minus ensemble, over seeds.
    """

    entry: ComparedMethod
    teachers: Spread
    ensemble: Spread
    student: Spread
    gain: SeedDifference
    gap: SeedDifference


@dataclass(frozen=True)
class ComparedSetting:
    """One setting of a comparison with its methods: by form, then in the order of the comparison's file."""

    name: str
    context: str
    entries: tuple[ComparedMethod, ...]
    metrics: tuple[Metric, ...] = (ACCURACY,)  # of the task

    @property
    def configs(self) -> list[RunSpec]:
        """Configurations of the methods."""
        return [entry.config for entry in self.entries]

    @property
    def conditions(self) -> list[RunSpec]:
        """Configurations of the methods, without malicious nodes."""
        return [replace(config, adversary=NoAdversary()) for config in self.configs]

    @property
    def adversary(self) -> Adversary:
        """Adversary of all methods; none if methods have different ones."""
        first, *others = [config.adversary for config in self.configs]
        return first if all(adversary == first for adversary in others) else NoAdversary()

    def differs_only_in_malicious_nodes(self, other: ComparedSetting) -> bool:
        """Return whether both settings differ in nothing but the number of nodes of one adversary."""
        one, another = self.adversary, other.adversary
        if isinstance(one, Malicious) and isinstance(another, Malicious):
            another = replace(another, nodes=one.nodes)
        return one == another and self.conditions == other.conditions

    @property
    def metric(self) -> Metric:
        """Main metric of the task."""
        return self.metrics[0]

    def rankings(self, metric: Metric) -> list[Ranking]:
        """Return the method with the best mean and its differences to the others, by kind of model."""
        return [
            Ranking(
                metric,
                first,
                [(other, self.paired_difference(first, other, metric)) for other in others],
            )
            for first, *others in self.ranked_by_model_kind(metric)
        ]

    def significantly_best_labels(self, metric: Metric) -> set[str]:
        """Return labels of methods significantly better than all others with the same kind of model."""
        return {ranking.first.label for ranking in self.rankings(metric) if not ranking.rivals}

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
        return compare_paired_runs(self._scores(first, metric), self._scores(second, metric))

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

    @cached_property
    def decompositions(self) -> list[Decomposition]:
        """Parts of the main metric of each method with a student and an ensemble of teachers."""
        key = self.metric.key
        found = []
        for entry in self.entries:
            values = (f"{LOCAL_PREFIX}{key}{ALL_TESTS_SUFFIX}", f"{ENSEMBLE} {key}", key)
            teachers, ensemble, student = map(entry.spread, values)
            if entry.evaluated_model != "student" or not (teachers and ensemble and student):
                continue
            by_model = [
                {run.seed: RunScore(value) for run in entry.runs if (value := run.value(name)) is not None}
                for name in values
            ]
            gain, gap = (compare_paired_runs(after, before) for before, after in itertools.pairwise(by_model))
            found.append(Decomposition(entry, teachers, ensemble, student, gain, gap))
        return found

    def verdicts(self) -> list[str]:
        """Return a sentence on significant differences of the main metric for each kind of model."""
        return list(dict.fromkeys(ranking.verdict() for ranking in self.rankings(self.metric)))


@dataclass(frozen=True)
class MethodCurve:
    """Curve of one method: its number, its name, and its main metric by epsilon, fraction of the run, ..."""

    number: int
    name: str
    values: Mapping[float, Spread]


@dataclass(frozen=True)
class AdversaryCurves:
    """Main metric of methods by the number of malicious nodes.

    Args:
        adversary: what these nodes do.
        conditions: name of the setting with the fewest malicious nodes.
        curves: one for each method with values.
    """

    adversary: str
    conditions: str
    curves: tuple[MethodCurve, ...]

    @property
    def counts(self) -> list[int]:
        """Numbers of malicious nodes in ascending order."""
        return sorted({int(count) for curve in self.curves for count in curve.values})


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
    def records(self) -> list[Record]:
        """Records of all runs, with the names of their settings and methods."""
        return [
            replace(record, setting=setting.name, method=entry.label)
            for setting in self.settings
            for entry in setting.entries
            for run in entry.runs
            for record in run.records
        ]

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

    def adversary_curves(self) -> list[AdversaryCurves]:
        """Return the main metric by number of malicious nodes, in settings that are equal otherwise.

        The values at 0 are of the equal setting without malicious nodes. Empty for less than two numbers.
        """
        groups: list[list[ComparedSetting]] = []
        for setting in self.settings:
            group = next((one for one in groups if setting.differs_only_in_malicious_nodes(one[0])), None)
            if group is not None:
                group.append(setting)
            elif setting.adversary.count:
                groups.append([setting])
        found = []
        for group in groups:
            honest = [one for one in self.settings if one.configs == group[0].conditions]
            by_count = {one.adversary.count: one for one in honest + group}
            counts = sorted(by_count)
            curves = []
            for entries in zip(*(by_count[count].entries for count in counts), strict=True):
                spreads = {
                    float(count): spread
                    for count, entry in zip(counts, entries, strict=True)
                    if (spread := entry.spread(entry.metric)) is not None
                }
                if spreads:
                    curves.append(MethodCurve(entries[0].number, entries[0].name, spreads))
            name = group[0].adversary.registered_name
            result = AdversaryCurves(name, by_count[counts[0]].name, tuple(curves))
            found += [result] if len(result.counts) > 1 else []
        return found

    def privacy_sentence(self) -> str:
        """Return a sentence on the runs with a formal privacy guarantee."""
        runs = [run for entry in self.entries for run in entry.runs if run.value("bytes up")]
        guaranteed = sum(run.result.guarantee is not None for run in runs)
        if guaranteed == 0:
            return "There is no formal privacy guarantee."
        if guaranteed == len(runs):
            return "All runs have a formal privacy guarantee (see epsilon)."
        have = "has" if guaranteed == 1 else "have"
        return (
            f"{guaranteed} of {len(runs)} runs with releases {have} a formal privacy guarantee (see epsilon)."
        )


# --- reading a comparison -------------------------------------------------------------------------------


def summarize(out: Path, comparison: Comparison) -> ComparisonSummary:
    """Read the runs of a comparison and return their summary.

    Args:
        out: folder of the comparison.
        comparison: its content.

    Raises:
        RunFolderError: a file of a run is broken.
    """
    settings = tuple(_read_setting(out, comparison, name) for name in comparison.settings)
    entries = [entry for setting in settings for entry in setting.entries]
    notes, leakage_columns = _notes(comparison, settings), tuple[ComparisonColumn, ...]()
    if comparison.leakage is not None:
        attacked = [setting for setting in settings if comparison.is_attacked(setting.name)]
        notes += _attack_notes(attacked, comparison_runner.read_not_attacked(out))
        leakage_columns = LeakageConfig.from_table(comparison.leakage).comparison_columns
    return ComparisonSummary(
        name=comparison.name,
        about=comparison.about,
        seeds=comparison.seeds,
        settings=settings,
        notes=tuple(notes),
        published=tuple(dict.fromkeys(paper for entry in entries for paper in entry.published.values())),
        command=comparison_runner.read_command(out),
        leakage=comparison.leakage is not None,
        leakage_columns=leakage_columns,
    )


def _read_setting(out: Path, comparison: Comparison, name: str) -> ComparedSetting:
    reasons = comparison_runner.read_not_run(out)
    entries = tuple(
        sorted(
            (
                _read_method(out, comparison, name, number, label, reasons)
                for number, label in enumerate(comparison.methods, start=1)
            ),
            key=lambda entry: form_rank(entry.form),
        )
    )
    text = _data_and_training_text(comparison, name, entries)
    return ComparedSetting(name, text, entries, entries[0].config.task.metrics)


def _read_method(
    out: Path, comparison: Comparison, setting: str, number: int, label: str, reasons: Mapping[str, str]
) -> ComparedMethod:
    config = comparison.run_config(ComparisonRun(setting, label, comparison.seeds[0]))
    method, metrics = config.method, config.task.metrics
    runs, not_run, missing = [], {}, []
    for seed in comparison.seeds:
        folder = ComparisonRun(setting, label, seed).folder
        if folder in reasons:
            not_run[seed] = reasons[folder]
        elif (out / folder / "result.json").exists():
            files, config_of_attacks = RunFiles.read(out / folder), comparison.leakage
            leakage = (
                None
                if config_of_attacks is None
                else comparison_runner.read_attack(out / folder, config_of_attacks)
            )
            runs.append(
                FinishedRun(seed, folder, files.result, files.metrics, leakage, files.resampled_metric)
            )
        else:
            missing.append(seed)
    names = [f"{prefix}{metric.key}" for metric in metrics for prefix in ("", LOCAL_PREFIX)]
    published = {name: comparison.published(setting, label, name) for name in names}
    return ComparedMethod(
        number=number,
        label=label,
        method=method_name(method),
        config=config,
        title=method.title if "title" in vars(type(method)) else label,  # an inherited title does not count
        evaluated_model=method.evaluated_model,
        releases=released_kinds(config),
        needs=describe_requirements(vars(method.needs())),
        runs=tuple(runs),
        not_run=not_run,
        missing=tuple(missing),
        published={name: paper for name, paper in published.items() if paper is not None},
        form=comparison.forms.get(label),
    )


def _data_and_training_text(comparison: Comparison, setting: str, entries: Sequence[ComparedMethod]) -> str:
    """Return data, split, networks and local training in one line."""
    # Take the options from a method without run options of its own, if there is one.
    label = min(comparison.methods, key=lambda name: "nodes" in comparison.runs.get(name, {}))
    config = comparison.run_config(ComparisonRun(setting, label, comparison.seeds[0]))
    data, split, local = config.data, config.split, config.nodes.local
    batch = f"batch {local.batch}"
    # A split by a column has as many nodes as the column has values, which only the runs record.
    recorded = (run.result.split.nodes for entry in entries for run in entry.runs)
    count = split.nodes or next(filter(None, recorded), None)
    nodes = f"{count} nodes, " if count else ""
    parts = [
        f"{data.title or data.registered_name}, {nodes}{split.about}",
        f"networks {', '.join(config.nodes.models)}, student {config.student.model}",
        f"local training: {format_count(local.epochs, 'epoch')} in total, {local.optimizer}, "
        f"learning rate {local.lr:g}, {batch}",
    ]
    results = [run.result for entry in entries for run in entry.runs]
    notes = dict.fromkeys([*(result.data.note for result in results), *map(_public_data_text, results)])
    return "; ".join([*parts, *filter(None, notes)])


def _public_data_text(result: Result) -> str | None:
    name = result.public.name
    if name is None:
        return None
    count, note = result.public.examples, result.public.note
    size = "" if count is None else f", {count:,} examples"
    return f"public data: {name}{size}" + ("" if note is None else f" ({note})")


def _notes(comparison: Comparison, settings: Sequence[ComparedSetting]) -> list[str]:
    count = len(comparison.seeds)
    over = (
        "one seed, so no standard deviation"
        if count == 1
        else f"mean \u00b1 sample standard deviation over {count} seeds"
    )
    too_few_seeds = (
        "With one seed no difference is significant, so nothing is bold."
        if count == 1
        else "With one or two seeds nothing is bold."
    )
    entries = [entry for setting in settings for entry in setting.entries]
    metrics = {metric.key: metric for setting in settings for metric in setting.metrics}
    titles = {setting.metric.title: None for setting in settings}
    notes = [
        f"{join_names(list(titles))} {'is' if len(titles) == 1 else 'are'} in percent, after the last "
        "round, on "
        f"test data that no node saw ({over}).",
        "For one seed, all methods have the same split, initial weights from the same random stream, the "
        "same "
        "local optimizer, batch size and number of local epochs. Local data are shuffled. Batch norm "
        "statistics "
        "are part of a model: they are sent and averaged together with its parameters.",
        f"Bold: the {'highest' if len(metrics) == 1 else 'best'} mean among methods with the same kind of "
        "evaluated model, if it is significantly better than all others (paired 95% CI, in brackets). The "
        "CI is "
        f"over seeds and, for the main metric, over test cases. {too_few_seeds} "
        "Methods "
        "whose nodes release their data are never bold. Methods are in the order of the comparison's file.",
    ]
    if comparison.forms:
        notes.append(
            "Rows are grouped by form: as the method's paper prints it, as its published code runs it, or "
            "fedstill's own."
        )
        names = {entry.label: entry.name for entry in entries}
        notes += form_sentences({names[label]: form for label, form in comparison.forms.items()})
    if any(entry.spread_is_over_nodes for entry in entries):
        notes.append("With one seed, deviations of local models are over the nodes.")
    in_tables = [metric for metric in metrics.values() if metric.in_summary or metric.title in titles]
    lower = [metric.title for metric in in_tables if metric.better == "lower"]
    if lower:
        notes.append(f"Lower is better: {', '.join(lower)}.")
    if not comparison.sets_policy:
        notes.append(
            "The policy of the nodes allows outputs only. Methods that need more run under a policy that "
            "allows "
            "it, which data owners would have to accept."
        )
    kinds = {entry.evaluated_model for entry in entries}
    notes += [
        f"{MAIN_MODELS[kind][0].capitalize()}: {MAIN_MODELS[kind][1]}."
        for kind in MAIN_MODELS
        if kind in kinds
    ]
    if "ensemble" in kinds:
        notes.append(
            "An ensemble queries all nodes for every input at inference. Its bytes do not include these "
            "queries."
        )
    notes.append(
        f"Local {lowercase_title(settings[0].metric.title)} is the mean over the nodes' local models at "
        "the end, "
        "each on its own random share of the test data (FedMD-CG, section 3.1). The values on all test "
        "data are "
        "in the CSV file."
    )
    deltas = {bound[1] for entry in entries if (bound := entry.privacy_bound()) is not None}
    if deltas:
        notes.append(
            "Epsilon: privacy cost of a run for each record (or group of records) of a node, the maximum "
            "over nodes "
            f"and seeds, rounded up, at delta {', '.join(f'{delta:g}' for delta in sorted(deltas))}. It "
            "does not "
            "include the cost of choosing hyperparameters on private data."
        )
    methods_of_note: dict[str, dict[str, None]] = {}
    for entry in entries:
        for run in entry.runs:
            for note in run.result.note_sentences:
                methods_of_note.setdefault(note, {})[entry.name] = None
    notes += [f"{join_names(list(names))}: {note}" for note, names in methods_of_note.items()]
    for label, table in comparison.runs.items():
        keys = ", ".join(_dotted_option_lines(table))
        # Privacy options differ by design, since comparisons are made over privacy budgets.
        nodes = {key: value for key, value in table.get("nodes", {}).items() if key != "privacy"}
        if nodes or any(key in SHARED for key in table if key != "nodes"):
            notes.append(f"Unequal conditions: {label} has other run options ({keys}).")
        elif keys:
            notes.append(f"{label} has its own run options: {keys}.")
    if comparison.note:
        notes.append(comparison.note)
    if comparison.changed:
        notes.append(f"Options from the command line: {', '.join(comparison.changed)}.")
        if comparison.paper:
            notes.append("Published metrics are for the setting without these options.")
    return notes


def _attack_notes(settings: Sequence[ComparedSetting], reasons: Mapping[str, str]) -> list[str]:
    notes, pending = [], []
    for setting in settings:
        for entry in setting.entries:
            for run in entry.runs:
                name = ", ".join(part for part in (entry.name, setting.name, f"seed {run.seed}") if part)
                if run.folder in reasons:
                    notes.append(f"{name}: not attacked: {reasons[run.folder]}.")
                elif run.leakage is None:
                    pending.append(name)
                elif run.leakage.audit:
                    mismatch = run.leakage.audit
                    notes.append(
                        f"{name}: the attacked repetition differs from the run of the folder: {mismatch}."
                    )
    if pending:
        notes.append(f"Not yet attacked with the options of this comparison: {'; '.join(pending)}.")
    return notes


def _dotted_option_lines(table: Mapping[str, Any], prefix: str = "") -> list[str]:
    options = []
    for key, value in table.items():
        if isinstance(value, Mapping):
            options += _dotted_option_lines(value, f"{prefix}{key}.")
        else:
            options.append(f"{prefix}{key} = {value}")
    return options


NEED_TITLES: Mapping[str, str] = {
    "same_architecture": "same architecture",
    "public": "public data",
    "public_labels": "labels of the public data",
    "split_models": "extractor and head",
    "student_architecture": "student like a node's model",
}


def describe_requirements(needs: Mapping[str, object]) -> tuple[str, ...]:
    """Return a method's requirements in words."""
    return tuple(title for key, title in NEED_TITLES.items() if needs.get(key) is True)
