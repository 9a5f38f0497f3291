"""CSV files of a comparison: one row per run, per method and setting, and per pair of methods."""

from __future__ import annotations

from typing import Any

from fedstill.report import table_formats
from fedstill.report.compare_summary import ComparedSetting, ComparisonSummary
from fedstill.report.compared_method import (
    ALL_TESTS_SUFFIX,
    LOCAL_PREFIX,
    ComparedMethod,
    FinishedRun,
    Spread,
    metrics_by_attack,
    pick_strongest,
)
from fedstill.report.privacy_section import run_guarantee

REFERENCES = ("standalone", "ensemble", "centralized")
MODELS = ("", "local", *REFERENCES)
PAIR_COLUMNS = (
    "setting", "metric", "method", "other_method", "seeds", "difference", "ci_low", "ci_high", "significant",
)  # fmt: skip


def runs_csv(summary: ComparisonSummary) -> str:
    """Return one row per run."""
    records = []
    for setting in summary.settings:
        for entry in setting.entries:
            context = (summary, setting, entry)
            records += [_run_record(*context, run.seed, "finished", run=run) for run in entry.runs]
            for seed, reason in entry.not_run.items():
                status = "stopped" if reason.startswith("stopped: ") else "refused"
                records.append(_run_record(*context, seed, status, reason))
            records += [_run_record(*context, seed, "not finished") for seed in entry.missing]
    return table_formats.as_csv(records)


def _run_record(
    summary: ComparisonSummary,
    setting: ComparedSetting,
    entry: ComparedMethod,
    seed: int,
    status: str,
    reason: str = "",
    run: FinishedRun | None = None,
) -> dict[str, Any]:
    main, *others = (metric.key for metric in summary.metrics)
    metrics = [main, f"{LOCAL_PREFIX}{main}", f"{LOCAL_PREFIX}{main}{ALL_TESTS_SUFFIX}"]
    columns = {
        **{_column(name): name for name in metrics},
        **{reference: f"{reference} {main}" for reference in REFERENCES},
    }
    for other in others:
        columns |= {f"{model}_{other}".lstrip("_"): f"{model} {other}".strip() for model in MODELS}
    guarantee = None if run is None else run_guarantee(run.result)
    traffic = [None if run is None else run.value(name) for name in ("bytes up", "bytes down", "queries")]
    up, down, queries = (None if value is None else round(value) for value in traffic)
    leakage = {
        column: metrics_by_attack(column, run.leakage if run else None) for column in summary.leakage_columns
    }
    return {
        **_method_record(setting, entry),
        "seed": seed,
        "status": status,
        "evaluated_model": entry.evaluated_model,
        **{column: None if run is None else run.value(name) for column, name in columns.items()},
        "bytes_up": up,
        "bytes_down": down,
        "queries": queries,
        "iteration_unit": run and run.result.iteration_unit,
        "iterations": run and run.result.iterations,
        "seconds": run and run.result.seconds.total,
        "epsilon": guarantee and guarantee[0],
        "delta": guarantee and guarantee[1],
        **{
            column.name: pick_strongest(column, by_attack.values()) if by_attack else None
            for column, by_attack in leakage.items()
        },
        "releases": "; ".join((run.result.releases if run else ()) or entry.releases),
        "needs": "; ".join(entry.needs),
        "reason": reason,
        "folder": run and run.folder,
    }


def summary_csv(summary: ComparisonSummary) -> str:
    """Return one row per method and setting, with means and standard deviations over seeds."""
    main, local, *others = summary.metric_names()
    published, records = summary.published_metrics(), []
    papers = [name for name in summary.metric_names() if name in published or name in (main, local)]
    for setting in summary.settings:
        for entry in setting.entries:
            record: dict[str, Any] = {**_method_record(setting, entry), "seeds": len(entry.runs)}
            record["evaluated_model"] = entry.evaluated_model
            for name in (main, local, f"{local}{ALL_TESTS_SUFFIX}", *others):
                record |= _spread_record(_column(name), entry.spread(name))
            for name in ("bytes up", "bytes down", "queries", "seconds"):
                spread = entry.spread(name)
                record[f"{_column(name)}_mean"] = spread and spread.mean
            record["epsilon_max"], record["delta"] = entry.privacy_bound() or (None, None)
            for column in summary.leakage_columns:
                attack, leakage = entry.strongest_attack_and_value(column) or ("", None)
                record |= {**_spread_record(column.name, leakage), f"{column.name}_attack": attack}
            record |= {"releases": "; ".join(entry.releases), "needs": "; ".join(entry.needs)}
            for name in papers:
                paper, column_name = entry.published.get(name), _column(name)
                record[f"paper_{column_name}"] = paper and paper.value
                record[f"paper_{column_name}_std"] = paper and paper.std
                record[f"paper_{column_name}_source"] = paper and paper.source
                record[f"{column_name}_gap"] = entry.paper_gap(name)
            records.append({**record, "reason": entry.missing_reason()})
    return table_formats.as_csv(records)


def pairwise_differences_csv(summary: ComparisonSummary) -> str:
    """Return one row per setting, metric and pair of methods.

    A row has the paired difference, first minus second, its 95% interval over seeds, and whether the methods
    are significantly different.
    """
    records = []
    for setting in summary.settings:
        for metric in setting.metrics:
            for first, second, difference in setting.pairs(metric):
                mean, half_width = difference.mean, difference.half_width
                low, high = (None, None) if half_width is None else (mean - half_width, mean + half_width)
                values = (
                    setting.name,
                    metric.key,
                    first.label,
                    second.label,
                    difference.seeds,
                    mean,
                    low,
                    high,
                    difference.significant,
                )
                records.append(dict(zip(PAIR_COLUMNS, values, strict=True)))
    return table_formats.as_csv(records, PAIR_COLUMNS)


def _method_record(setting: ComparedSetting, entry: ComparedMethod) -> dict[str, Any]:
    return {"setting": setting.name, "method": entry.label, "name": entry.method, "title": entry.title}


def _spread_record(column: str, spread: Spread | None) -> dict[str, Any]:
    return {f"{column}_mean": spread and spread.mean, f"{column}_std": spread and spread.std}


def _column(name: str) -> str:
    return name.replace(",", "").replace(" ", "_")
