"""Leaderboards of the benchmark suite."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from fedstill.compare.suite import SuitePart, SuiteRow, SuiteSettings, suite_parts
from fedstill.report.suite_results import leaderboard, rank_methods

TOOL = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "suite_page.py"))
PART = SuitePart(Path("p.toml"), SuiteSettings(title="p", main="main", liar="liar", minutes=1.0))


def rows(label: str, scores: list[float], setting: str = "main", **values: object) -> list[SuiteRow]:
    options = {"evaluated": "student", "releases": ("logits",), **values}
    return [
        SuiteRow(
            suite="suite-v1",
            part="p",
            setting=setting,
            label=label,
            method=label,
            seed=seed,
            config="",
            score=score,
            **options,  # type: ignore[arg-type]
        )
        for seed, score in enumerate(scores)
    ]


def test_rank_counts_significantly_better_methods() -> None:
    """Differences to the first are 1 in each seed for b (no deviation), and 3 +- 4.3 for c, by hand:

    t(2) at 97.5 % is 4.303; the differences of c are 1, 3, 5 with deviation 2, so 4.303 * 2 / sqrt(3) = 4.97.
    """
    board = rank_methods(
        [*rows("c", [79.0, 77.0, 75.0]), *rows("b", [79.0, 79.0, 79.0]), *rows("a", [80.0, 80.0, 80.0])],
        "main",
    )
    assert [(method.label, method.rank) for method in board] == [("a", 1), ("b", 2), ("c", 1)]
    behind = board[2].behind
    assert behind is not None
    assert behind.mean == pytest.approx(-3.0)
    assert behind.half_width == pytest.approx(4.968, abs=1e-3)


def test_baselines_and_bounds_are_not_ranked() -> None:
    board = rank_methods(
        [
            *rows("alone", [99.0, 99.0, 99.0], releases=(), evaluated="nodes"),
            *rows("pooled", [99.0, 99.0, 99.0], releases=("private data",)),
            *rows("few", [99.0, 99.0]),
            *rows("a", [50.0, 51.0, 52.0]),
        ],
        "main",
    )
    assert {method.label: method.rank for method in board} == {
        "a": 1,
        "alone": None,
        "pooled": None,
        "few": None,  # two seeds show no difference
    }
    assert board[0].label == "a"


def test_strongest_attack_has_highest_mean_over_seeds() -> None:
    values = [{"membership_auc: loss": 90.0, "membership_auc: LiRA": 60.0}, {"membership_auc: loss": 20.0}]
    values[1]["membership_auc: LiRA"] = 62.0
    (method,) = rank_methods(
        [rows("a", [50.0, 50.0], attacks=value)[seed] for seed, value in enumerate(values)], "main"
    )
    assert method.strongest_attack("main", "membership_auc") == pytest.approx(61.0)
    assert method.strongest_attack("main", "membership_auc", "lower") == pytest.approx(55.0)
    assert method.strongest_attack("main", "responses_auc") is None


def test_leaderboard_has_gap_and_refusals() -> None:
    refused = SuiteRow(
        suite="suite-v1",
        part="p",
        setting="liar",
        label="a",
        method="a",
        seed=0,
        config="",
        not_run="refused: x",
    )
    table = leaderboard(PART, [*rows("a", [80.0, 80.0], ensemble=82.5, teachers=40.0), refused])
    cells = dict(
        zip(
            [column.header for column in table.columns],
            [cell.value for cell in table.rows[0].cells],
            strict=True,
        )
    )
    assert (cells["main"], cells["gap"], cells["teachers"]) == ("80.0 ± 0.0", "-2.5", "40.0 ± 0.0")
    assert cells["one liar"] == "refused"


def test_page_and_schema_are_those_of_rows() -> None:
    text = TOOL["PAGE"].read_text(encoding="utf-8")
    assert text == TOOL["with_leaderboards"](text, suite_parts()), "run python tools/suite_page.py"
    assert TOOL["SCHEMA"].read_text(encoding="utf-8") == TOOL["schema_text"](), (
        "run python tools/suite_page.py"
    )
