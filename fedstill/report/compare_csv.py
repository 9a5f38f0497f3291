"""A comparison as CSV: one row a run, and one row a method in a setting."""

from __future__ import annotations

from typing import Any

from fedstill.report import table_formats
from fedstill.report.compare_summary import ComparedSetting, Summary
from fedstill.report.compared_method import (
    ALL_TESTS,
    LOCAL,
    ComparedMethod,
    FinishedRun,
    Spread,
    pick,
    strongest,
)
from fedstill.report.privacy_section import run_guarantee

MARKS = ("standalone", "ensemble", "centralized")
WHOSE = ("", "local", *MARKS)
PAIRED = ("setting", "metric", "method", "than", "seeds", "difference", "low", "high", "told_apart")


def runs_csv(summary: Summary) -> str:
    """One row a run."""
    records = []
    for setting in summary.settings:
        for entry in setting.entries:
            given = (summary, setting, entry)
            records += [_run(*given, run.seed, "finished", run=run) for run in entry.runs]
            for seed, reason in entry.not_run.items():
                status = "stopped" if reason.startswith("stopped: ") else "refused"
                records.append(_run(*given, seed, status, reason))
            records += [_run(*given, seed, "not finished") for seed in entry.missing]
    return table_formats.as_csv(records)


def _run(
    summary: Summary,
    setting: ComparedSetting,
    entry: ComparedMethod,
    seed: int,
    status: str,
    reason: str = "",
    run: FinishedRun | None = None,
) -> dict[str, Any]:
    first, *others = (metric.key for metric in summary.metrics)
    metrics = [first, f"{LOCAL}{first}", f"{LOCAL}{first}{ALL_TESTS}"]
    columns = {**{_column(name): name for name in metrics}, **{mark: f"{mark} {first}" for mark in MARKS}}
    for other in others:
        columns |= {f"{whose}_{other}".lstrip("_"): f"{whose} {other}".strip() for whose in WHOSE}
    price = None if run is None else run_guarantee(run.result)
    traffic = [None if run is None else run.value(name) for name in ("bytes up", "bytes down", "queries")]
    up, down, queries = (None if value is None else round(value) for value in traffic)
    strong = {leak: strongest(leak, run.leakage if run else None) for leak in summary.leaks}
    return {
        **_head(setting, entry),
        "seed": seed,
        "status": status,
        "judged_by": entry.central,
        **{column: None if run is None else run.value(name) for column, name in columns.items()},
        "bytes_up": up,
        "bytes_down": down,
        "queries": queries,
        "turn": run and run.result.turn,
        "turns": run and run.result.turns,
        "seconds": run and run.result.seconds.total,
        "epsilon": price and price[0],
        "delta": price and price[1],
        **{leak.name: pick(leak, got.values()) if got else None for leak, got in strong.items()},
        "leaves": "; ".join((run.result.leaves if run else ()) or entry.leaves),
        "needs": "; ".join(entry.needs),
        "reason": reason,
        "folder": run and run.folder,
    }


def summary_csv(summary: Summary) -> str:
    """One row a method in a setting."""
    first, local, *others = summary.names()
    compared, records = summary.compared(), []
    papers = [name for name in summary.names() if name in compared or name in (first, local)]
    for setting in summary.settings:
        for entry in setting.entries:
            record: dict[str, Any] = {**_head(setting, entry), "seeds": len(entry.runs)}
            record["judged_by"] = entry.central
            for name in (first, local, f"{local}{ALL_TESTS}", *others):
                record |= _spread(_column(name), entry.spread(name))
            for name in ("bytes up", "bytes down", "queries", "seconds"):
                ours = entry.spread(name)
                record[f"{_column(name)}_mean"] = ours and ours.mean
            record["epsilon_most"], record["delta"] = entry.epsilon() or (None, None)
            for leak in summary.leaks:
                attack, got = entry.leak(leak) or ("", None)
                record |= {**_spread(leak.name, got), f"{leak.name}_attack": attack}
            record |= {"leaves": "; ".join(entry.leaves), "needs": "; ".join(entry.needs)}
            for name in papers:
                paper, column = entry.published.get(name), _column(name)
                record[f"paper_{column}"] = paper and paper.value
                record[f"paper_{column}_std"] = paper and paper.std
                record[f"paper_{column}_source"] = paper and paper.source
                record[f"{column}_gap"] = entry.gap(name)
            records.append({**record, "reason": entry.reason()})
    return table_formats.as_csv(records)


def pairs_csv(summary: Summary) -> str:
    """One row for each two methods of a setting and each figure: how far the first is above the second, its
    95 % interval over seeds, and whether that tells them apart."""
    records = []
    for setting in summary.settings:
        for metric in setting.metrics:
            for one, other, gap in setting.pairs(metric):
                low, high = (None, None) if gap.half is None else (gap.mean - gap.half, gap.mean + gap.half)
                told = (
                    setting.name,
                    metric.key,
                    one.label,
                    other.label,
                    gap.seeds,
                    gap.mean,
                    low,
                    high,
                    gap.significant,
                )
                records.append(dict(zip(PAIRED, told, strict=True)))
    return table_formats.as_csv(records, PAIRED)


def _head(setting: ComparedSetting, entry: ComparedMethod) -> dict[str, Any]:
    return {"setting": setting.name, "method": entry.label, "name": entry.method, "title": entry.title}


def _spread(column: str, spread: Spread | None) -> dict[str, Any]:
    return {f"{column}_mean": spread and spread.mean, f"{column}_std": spread and spread.std}


def _column(name: str) -> str:
    return name.replace(",", "").replace(" ", "_")
