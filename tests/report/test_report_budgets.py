"""Table and figure of accuracy against epsilon in a comparison."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fedstill.compare import comparison as compare
from fedstill.compare.comparison import Comparison
from fedstill.report.comparison_page import render_comparison_page, write_comparison
from fedstill.report.comparison_records import MethodCurve, summarize
from fedstill.report.comparison_tables import comparison_markdown
from fedstill.report.statistics import Spread
from tests.support.comparison_files import a_run
from tests.support.result_files import Page


def a_comparison(tmp_path: Path, settings: str) -> tuple[Path, Comparison]:
    """Return folder and plan of FedAvg with two seeds in settings "low" and "high"; only "high" has run."""
    file = tmp_path / "mine.toml"
    file.write_text(f'methods = ["fedavg"]\nseeds = 2\n{settings}', encoding="utf-8")
    plan, out = compare.read_comparison(file), tmp_path / "out"
    for seed, accuracy in ((0, 70.0), (1, 74.0)):
        a_run(out, f"high/fedavg-seed{seed}", (accuracy, 60.0, 10, 10), {1: accuracy})
    (out / compare.COMPARISON_FILE).write_text(f"# Made by: it\n\n{plan.to_toml()}")
    return out, plan


BY_EPSILON = """
[base.nodes.privacy]
mechanism = "dp-sgd"
[[settings]]
name = "low"
nodes = { privacy = { epsilon = 1.5 } }
[[settings]]
name = "high"
nodes = { privacy = { epsilon = inf } }
"""


def test_comparison_over_budgets_has_epsilon_table(tmp_path: Path) -> None:
    out, plan = a_comparison(tmp_path, BY_EPSILON)
    summary = summarize(out, plan)
    assert summary.budget_curves() == [
        MethodCurve(1, "FedAvg", {math.inf: Spread(72.0, pytest.approx(8**0.5))})
    ]
    assert comparison_markdown(summary).splitlines()[:3] == [
        "| method | epsilon \u221e |",
        "|---|---|",
        "| FedAvg | 72.0 \u00b1 2.8 |",
    ]
    page = write_comparison(out, plan).read_text(encoding="utf-8")
    assert page == render_comparison_page(summary)
    Page(page)  # well formed
    assert page.count("<h2>Accuracy against epsilon</h2>") == 1
    assert page.count('aria-label="Accuracy against epsilon. FedAvg: \u221e 72.0%."') == 3  # widths


BY_ALPHA = """
[[settings]]
name = "low"
split = { alpha = 0.1 }
[[settings]]
name = "high"
split = { alpha = 1.0 }
"""
TWICE = f"""{BY_EPSILON}
[[settings]]
name = "low, alpha 3"
split = {{ alpha = 3.0 }}
nodes = {{ privacy = {{ epsilon = 1.5 }} }}
"""


@pytest.mark.parametrize("settings", [BY_ALPHA, TWICE])
def test_other_comparisons_have_no_epsilon_table(tmp_path: Path, settings: str) -> None:
    """Settings differ in another option, or two share an epsilon."""
    out, plan = a_comparison(tmp_path, settings)
    summary = summarize(out, plan)
    assert summary.budget_curves() == []
    assert "Accuracy against epsilon" not in render_comparison_page(summary)
    assert not comparison_markdown(summary).startswith("| method | epsilon")
