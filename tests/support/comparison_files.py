"""Handmade folders of runs to compare."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from fedstill.compare import comparison as compare
from fedstill.compare.comparison import Comparison
from fedstill.core.run_writer import write_text
from fedstill.report.comparison_records import ComparisonSummary
from fedstill.report.terminal import print_comparison
from fedstill.runs.spec import PaperMetric

# Accuracies 80, 84, 88: mean 84, sample deviation 4. Bytes up 1000, 1000, 4000: mean 2000.
FEDAVG = [(80.0, 70.0, 1000, 500), (84.0, 72.0, 1000, 500), (88.0, 74.0, 4000, 500)]
FEDIOD = [(87.0, 60.0, 30_000, 10_000), (91.0, 60.0, 30_000, 10_000), (95.0, 60.0, 30_000, 10_000)]
ALONE = [(60.0, 60.0, 0, 0), (61.0, 61.0, 0, 0), (65.0, 65.0, 0, 0)]


QUICK: Mapping[str, Any] = {
    "split.nodes": 2,
    "data.train_limit": 200,
    "nodes.local.epochs": 1.0,
    "engine.threads": 1,
    "evaluation.every": 1,
}


def a_result(accuracy: float, local: float, up: int, down: int, rounds: int) -> dict[str, Any]:
    return {
        "accuracy": accuracy,
        "student": {"accuracy": accuracy},
        "local": {"accuracy": {"mean": local + 0.5}, "share": {"mean": local}},
        "standalone": None,
        "ensemble": {"accuracy": 95.0},
        "centralized": {"accuracy": None},
        "bytes": {"up": up, "down": down},
        "queries": 41,
        "iteration_unit": "round",
        "iterations": rounds,
        "seconds": {"total": 12.5},
        "data": {"note": "made up for a test"},
        "releases": ["data sizes", "parameters"],
    }


def a_run(out: Path, folder: str, metrics: tuple[float, float, int, int], curve: dict[int, float]) -> None:
    (out / folder).mkdir(parents=True)
    result = a_result(*metrics, rounds=max(curve, default=0))
    (out / folder / "result.json").write_text(json.dumps(result))
    lines = [{"phase": "distillation", "step": step, "accuracy": value} for step, value in curve.items()]
    (out / folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


PAPER = (
    PaperMetric(method="fedavg", value=82.5, std=0.7, source="A & B 2020, Table 3"),
    PaperMetric(method="fedavg", metric="local accuracy", value=75.0, source="A & B 2020, Table 4"),
    PaperMetric(method="fediod", value=10.0, source="elsewhere", setting="another"),
)


def a_plan(**changes: Any) -> Comparison:
    table = {
        "methods": ["standalone", "fedavg", "fediod", "few"],
        "seeds": 3,
        "options": {"few": {"name": "fediod", "steps": 20}},
        "runs": {"few": {"split": {"nodes": 3}}},
        "settings": [{"name": "50% skew_ed", "split": {"alpha": 0.1}}, {"name": "another"}],
        "paper": [vars(metric) for metric in PAPER],
    }
    return compare._build_comparison({**table, **changes}, "mine", {})


def write_runs_to_compare(folder: Path) -> Path:
    """Write a comparison: two settings; in the first, three methods finished and one was refused."""
    write_text(folder / "compare.toml", f"# Made by: fedstill compare <mine>.toml\n\n{a_plan().to_toml()}")
    first = "50-skew_ed"
    for seed in range(3):
        a_run(folder, f"{first}/standalone-seed{seed}", ALONE[seed], {})
        a_run(folder, f"{first}/fedavg-seed{seed}", FEDAVG[seed], {10: 40.0 + seed, 20: FEDAVG[seed][0]})
        a_run(folder, f"{first}/fediod-seed{seed}", FEDIOD[seed], {100: 50.0, 400: FEDIOD[seed][0]})
    refused = {f"{first}/few-seed{seed}": "few cannot run: node-1: <no> & never" for seed in range(3)}
    write_text(folder / "not_run.json", json.dumps(refused))
    return folder


def method_table_lines(text: str) -> list[str]:
    """Return the lines of a Markdown text's tables of methods, without those of teachers and students."""
    blocks = [block.splitlines() for block in text.split("\n\n")]
    return [line for block in blocks if block[0].startswith("| method | evaluated model") for line in block]


def records(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(StringIO(path.read_text(encoding="utf-8"))))


def printed(summary: ComparisonSummary, width: int) -> str:
    """Return the terminal's text; no line is wider than the terminal or truncated."""
    out = StringIO()
    print_comparison(summary, Console(file=out, width=width, color_system=None))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    return text


def run_rows(out: Path, name: str = "compare.csv") -> list[dict[str, str]]:
    return list(csv.DictReader(StringIO((out / name).read_text(encoding="utf-8"))))


def rows_without_seconds(out: Path) -> list[dict[str, str]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in run_rows(out)]
