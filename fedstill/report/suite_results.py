"""Rows of the benchmark suite from finished runs, and leaderboards of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedstill.compare.comparison import Comparison, ComparisonRun
from fedstill.compare.method_forms import FORM_TITLES
from fedstill.compare.suite import SUITE, SuitePart, SuiteRow, config_fingerprint
from fedstill.core.text_format import format_bytes, format_count
from fedstill.protocol.payload_kinds import PRIVATE_DATA
from fedstill.report.comparison_records import (
    ALL_TESTS_SUFFIX,
    LOCAL_PREFIX,
    ComparedMethod,
    FinishedRun,
    summarize,
)
from fedstill.report.records import ENSEMBLE, MAIN, OWN_SHARE
from fedstill.report.statistics import MIN_SEEDS, RunScore, SeedDifference, Spread, compare_paired_runs
from fedstill.report.tables import NO_VALUE, Cell, Column, Row, Table

ROUND = 4  # decimals of a row's metrics


def collect_rows(part: SuitePart, plan: Comparison, folder: Path) -> list[SuiteRow]:
    """Return a row for each finished, refused or stopped run.

    Args:
        part: the part of the suite.
        plan: its comparison, perhaps with other methods.
        folder: folder of the comparison.

    Raises:
        RunFolderError: a file of a run is broken.
    """
    rows = []
    for setting in summarize(folder, plan).settings:
        for entry in setting.entries:
            spec = plan.run_config(ComparisonRun(setting.name, entry.label, plan.seeds[0]))
            config = config_fingerprint(spec)
            rows += [_finished_row(part, setting.name, entry, config, run) for run in entry.runs]
            rows += [
                _row(part, setting.name, entry, config, seed, not_run=reason)
                for seed, reason in entry.not_run.items()
            ]
    return rows


def _row(
    part: SuitePart, setting: str, entry: ComparedMethod, config: str, seed: int, **values: object
) -> SuiteRow:
    return SuiteRow(
        suite=SUITE,
        part=part.name,
        setting=setting,
        label=entry.label,
        method=entry.method,
        form="" if entry.form is None else entry.form.form,
        seed=seed,
        config=config,
        metric=entry.metric,
        evaluated=entry.evaluated_model,
        releases=entry.releases,
        **values,  # type: ignore[arg-type]  # checked by SuiteRow
    )


def _finished_row(
    part: SuitePart, setting: str, entry: ComparedMethod, config: str, run: FinishedRun
) -> SuiteRow:
    key, bound = entry.metric, run.result.guarantee
    sites = [
        record.value
        for record in run.records
        if (record.model, record.metric) == (MAIN, key) and record.site not in ("", OWN_SHARE)
    ]
    measured = {
        "score": run.value(key),
        "teachers": run.value(f"{LOCAL_PREFIX}{key}{ALL_TESTS_SUFFIX}"),
        "ensemble": run.value(f"{ENSEMBLE} {key}"),
        "worst_site": min(sites, default=None),
        "bytes_up": run.value("bytes up"),
        "bytes_down": run.value("bytes down"),
        "queries": run.value("queries"),
        "seconds": run.value("seconds"),
        "epsilon": None if bound is None else bound[0],
    }
    attacks = {
        f"{record.metric}: {record.attack}": round(record.value, ROUND)
        for record in run.records
        if record.attack
    }
    return _row(
        part,
        setting,
        entry,
        config,
        run.seed,
        fedstill=run.result.fedstill or "",
        date=(run.result.date or "")[:10],
        delta=None if bound is None else bound[1],
        attacks=attacks,
        **{name: None if value is None else round(value, ROUND) for name, value in measured.items()},
    )


# --- leaderboards -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankedMethod:
    """One method of a leaderboard.

    Args:
        label: name of the row.
        by_setting: its rows by setting and seed.
        rank: 1 plus the number of ranked methods that are significantly better in the main setting. None:
            not ranked, as it trains no model of all nodes, pools their data, or has too few seeds.
        behind: difference to the method with the best mean in the main setting.
    """

    label: str
    by_setting: Mapping[str, Mapping[int, SuiteRow]]
    rank: int | None = None
    behind: SeedDifference | None = None

    @cached_property
    def any_row(self) -> SuiteRow:
        return next(row for rows in self.by_setting.values() for row in rows.values())

    def spread(self, setting: str, name: str = "score") -> Spread | None:
        """Return mean and deviation of a value over the seeds of a setting."""
        return Spread.of([getattr(row, name) for row in self.by_setting.get(setting, {}).values()])

    def strongest_attack(self, setting: str, metric: str, better: str = "higher") -> float | None:
        """Return the mean over seeds of a metric of the strongest attack.

        Args:
            setting: the setting.
            metric: key of the metric.
            better: whether a higher or a lower value is that of a stronger attack.
        """
        rows = [row for row in self.by_setting.get(setting, {}).values() if row.score is not None]
        names = {name for row in rows for name in row.attacks if name.startswith(f"{metric}: ")}
        spreads = [Spread.of([row.attacks.get(name) for row in rows]) for name in names]
        means = [spread.mean for spread in spreads if spread is not None]
        return (max if better == "higher" else min)(means, default=None)

    def not_run(self, setting: str) -> str:
        """Return why the method did not run in a setting; empty if it did."""
        rows = self.by_setting.get(setting, {}).values()
        return next((row.not_run for row in rows if row.not_run), "")


def rank_methods(rows: Sequence[SuiteRow], setting: str) -> list[RankedMethod]:
    """Return the methods of a part: ranked ones by the mean in a setting, best first, then the others.

    A method is significantly better than another if the paired 95% interval of their difference over seeds
    (:func:`.compare_paired_runs`) is above zero. Equal ranks are ties.

    Args:
        rows: rows of a part.
        setting: the setting of the ranking.
    """
    by_label: dict[str, dict[str, dict[int, SuiteRow]]] = {}
    for row in rows:
        by_label.setdefault(row.label, {}).setdefault(row.setting, {})[row.seed] = row
    methods = [RankedMethod(label, by_setting) for label, by_setting in by_label.items()]
    scores = {
        method.label: {
            seed: RunScore(row.score)
            for seed, row in method.by_setting.get(setting, {}).items()
            if row.score is not None
        }
        for method in methods
    }
    trained = [method for method in methods if scores[method.label] and _is_ranked(method.any_row)]
    seeds = max((set(scores[method.label]) for method in trained), key=len, default=set[int]())
    ranked = [method for method in trained if len(seeds & set(scores[method.label])) >= MIN_SEEDS]
    ranked.sort(key=lambda method: -_mean(scores[method.label]))
    board = [
        RankedMethod(
            method.label,
            method.by_setting,
            1 + sum(_is_better(scores[other.label], scores[method.label]) for other in ranked),
            compare_paired_runs(scores[method.label], scores[ranked[0].label]),
        )
        for method in ranked
    ]
    return [*board, *(method for method in methods if method not in ranked)]


def _is_ranked(row: SuiteRow) -> bool:
    """Return whether a method trains one model without the nodes' data."""
    return bool(row.releases) and PRIVATE_DATA not in row.releases and row.evaluated in ("student", "virtual")


def _mean(scores: Mapping[int, RunScore]) -> float:
    return sum(score.value for score in scores.values()) / len(scores)


def _is_better(first: Mapping[int, RunScore], second: Mapping[int, RunScore]) -> bool:
    return first is not second and compare_paired_runs(first, second).favors_first("higher")


def leaderboard(part: SuitePart, rows: Sequence[SuiteRow]) -> Table:
    """Return the table of a part: one row a method, and the columns that any of them has.

    Args:
        part: the part.
        rows: its rows.
    """
    about = part.settings
    methods = rank_methods(rows, about.main)
    others = dict.fromkeys(row.setting for row in rows)
    extra = [name for name in others if name not in (about.main, about.liar, about.epsilon)]
    columns = [
        "rank",
        about.main,
        "behind the first",
        "teachers",
        "ensemble",
        "gap",
        *extra,
        *(["one liar"] if about.liar else []),
        *(["epsilon"] if about.epsilon else []),
        "bytes up",
        "queries",
        "seconds",
        "student AUC",
        "responses AUC",
        "class shares off by",
    ]
    cells = [_cells(method, part, extra) for method in methods]
    measured = [index for index in range(len(columns)) if any(row[index].value != NO_VALUE for row in cells)]
    board = [
        Row(method.label, [row[index] for index in measured])
        for method, row in zip(methods, cells, strict=True)
    ]
    return Table("", "method", [Column(columns[index], "") for index in measured], board)


def _cells(method: RankedMethod, part: SuitePart, extra: Sequence[str]) -> list[Cell]:
    about = part.settings
    main, behind = method.spread(about.main), method.behind
    ensemble = method.spread(about.main, "ensemble")
    is_student = method.any_row.evaluated == "student"
    gap = main.mean - ensemble.mean if is_student and main is not None and ensemble is not None else None
    up, queries = method.spread(about.main, "bytes_up"), method.spread(about.main, "queries")
    seconds = method.spread(about.main, "seconds")
    auc, responses = (
        method.strongest_attack(about.main, name) for name in ("membership_auc", "responses_auc")
    )
    shares = method.strongest_attack(about.main, "label_shares_error", "lower")
    texts = [
        None if method.rank is None else str(method.rank),
        _score(method, about.main),
        None
        if behind is None or behind.half_width is None
        else f"{behind.mean:+.1f} ± {behind.half_width:.1f}",
        _text(method.spread(about.main, "teachers")),
        _text(ensemble),
        None if gap is None else f"{gap:+.1f}",
        *(_score(method, name) for name in extra),
        *([_score(method, about.liar)] if about.liar else []),
        *([_score(method, about.epsilon)] if about.epsilon else []),
        None if up is None else format_bytes(round(up.mean)),
        None if queries is None else f"{queries.mean:.0f}",
        None if seconds is None else f"{seconds.mean:.1f}",
        None if auc is None else f"{auc:.1f}",
        None if responses is None else f"{responses:.1f}",
        None if shares is None else f"{shares:.1f}",
    ]
    return [Cell(NO_VALUE if text is None else text) for text in texts]


def _text(spread: Spread | None) -> str | None:
    return None if spread is None else spread.text()


def _score(method: RankedMethod, setting: str) -> str | None:
    """Return mean and deviation over the finished seeds, with their number if others did not finish."""
    rows = list(method.by_setting.get(setting, {}).values())
    scores = [row.score for row in rows if row.score is not None]
    spread = Spread.of(scores)
    if spread is None:
        reason = method.not_run(setting)
        return ("stopped" if reason.startswith("stopped: ") else "refused") if reason else None
    return spread.text() + (f" ({len(scores)} of {len(rows)})" if len(scores) < len(rows) else "")


def leaderboard_notes(part: SuitePart, rows: Sequence[SuiteRow]) -> list[str]:
    """Return what a reader needs to know of a leaderboard, one sentence an entry."""
    seeds = {row.seed for row in rows}
    forms = {row.label: FORM_TITLES[row.form] for row in rows if row.form}
    grouped: dict[str, list[str]] = {}
    for label, form in forms.items():
        grouped.setdefault(form, []).append(label)
    not_run: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if row.not_run:
            not_run.setdefault((row.label, row.not_run), {})[row.setting] = None
    return [
        f"{part.settings.title}; {format_count(len(seeds), 'seed')}; mean ± standard deviation over seeds, "
        "on test data that no node saw.",
        "Rank: 1 plus the number of ranked methods that are significantly better (paired 95% interval over "
        f"seeds, at least {MIN_SEEDS}). Equal ranks are ties. Students and averages are ranked together. "
        "Intervals do not include the choice of test cases, and are not corrected for the number of pairs.",
        "Behind the first: difference to the best mean, with its 95% interval. Gap: student minus ensemble.",
        *(f"{form[:1].upper()}{form[1:]}: {', '.join(labels)}." for form, labels in grouped.items()),
        *(
            f"{label}, not run in {'; '.join(settings)}: {reason}"
            for (label, reason), settings in not_run.items()
        ),
    ]
