"""Paired differences of methods over seeds, of models over cases, and agreement with a published ranking."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from fedstill.compare.reproduction import ReproducedMetric
from fedstill.core.errors import ArgumentError
from fedstill.report.comparison_tables import RankingAgreement, compare_ranking
from fedstill.report.statistics import CaseDifference, paired_difference, seed_difference
from fedstill.runs.spec import PaperMetric
from tests.support.errors import raises_invalid


def a_run(folder: Path, cases: dict[str, Any] | None) -> str:
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps({"dice": 50.0, "metric": "dice", "cases": cases}))
    return str(folder)


def case_scores(*central: float | None, **others: Any) -> dict[str, Any]:
    return {"names": [f"p{index}" for index in range(len(central))], "global_model": list(central), **others}


def test_variation_between_cases_cancels_in_differences(tmp_path: Path) -> None:
    """Patients differ by 80 points, models by 2 or 4 per patient: only the latter affects the interval."""
    first = a_run(tmp_path / "a", case_scores(10.0, 50.0, 90.0, 30.0))
    second = a_run(tmp_path / "b", case_scores(8.0, 46.0, 88.0, 26.0))
    difference = paired_difference([first], [second])
    # Means of four samples of {2, 4}: 2 with probability 1/16 at either end, so the 2.5th percentile is the
    # end.
    assert difference == CaseDifference(3.0, 2.0, 4.0, 4)
    assert str(difference) == "+3.0 [+2.0, +4.0] over 4 cases"
    back = paired_difference([second], [first])
    assert (back.mean, back.low, back.high) == (-3.0, -4.0, -2.0)


def test_seeds_are_averaged_and_cases_without_score_excluded(tmp_path: Path) -> None:
    seeds = [
        a_run(tmp_path / "a", case_scores(10.0, 20.0, None)),
        a_run(tmp_path / "b", case_scores(14.0, 24.0, 1.0)),
    ]
    other = a_run(tmp_path / "c", case_scores(11.0, 21.0, 2.0))
    assert paired_difference(seeds, [other]) == CaseDifference(1.0, 1.0, 1.0, 2)


def test_compares_two_models_of_one_run(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a", case_scores(10.0, 20.0, ensemble=[11.0, 21.0]))
    assert paired_difference([run], [run], second_model="ensemble").mean == -1.0
    with pytest.raises(ArgumentError, match="centralized"):
        paired_difference([run], [run], first_model="centralized")


def test_seed_difference_pairs_runs_by_seed(tmp_path: Path) -> None:
    def run(name: str, seed: int, reached: float) -> Path:
        folder = Path(a_run(tmp_path / f"{name}{seed}", None))
        record = {
            "metric": "accuracy",
            "accuracy": reached,
            "seed": seed,
            "metrics": [{"key": "accuracy", "title": "Accuracy"}],
        }
        (folder / "result.json").write_text(json.dumps(record))
        return folder

    # Seeds change both by 20 points; the differences 1.0, 1.2, 0.8 have 1.0 +- 4.303 * 0.2 / sqrt(3).
    first = [run("a", seed, reached) for seed, reached in enumerate((70.0, 80.0, 90.0))]
    second = [run("b", seed, reached) for seed, reached in enumerate((69.0, 78.8, 89.2))]
    difference = seed_difference(first, second[::-1])
    assert (difference.mean, difference.half_width, difference.significant) == (
        pytest.approx(1.0),
        pytest.approx(0.497, abs=1e-3),
        True,
    )
    assert str(difference) == "+1.0 ± 0.5 over 3 seeds"
    assert not seed_difference(first[:2], second[:2]).significant, "two seeds may agree by chance"
    for ours, theirs, allowed in (
        (first, second[:2], "seeds 0, 1, 2"),
        ([], [], "as in first"),
        ([first[0], first[0]], second[:1], "different seeds"),
    ):
        with pytest.raises(ArgumentError, match=allowed):
            seed_difference(ours, theirs)
    with raises_invalid("folder", ANY, "seed_difference"):
        paired_difference([first[0]], [second[0]])


def test_rejects_runs_that_cannot_be_paired(tmp_path: Path) -> None:
    run, other = (
        a_run(tmp_path / "a", case_scores(1.0, 2.0)),
        a_run(tmp_path / "b", case_scores(1.0, 2.0, 3.0)),
    )
    bare = a_run(tmp_path / "c", None)
    unsaid = a_run(tmp_path / "d", case_scores(None, None))
    for first, second, allowed in (
        ([run], [other], "2 cases"),
        ([run, other], [run], "2 cases"),
        ([run], [bare], "by case"),
        ([unsaid], [run], "a score for"),
        ([], [run], "at least one run"),
    ):
        with pytest.raises(ArgumentError, match=allowed):
            paired_difference(first, second)


# --- agreement with the paper's ranking and significance of pairs, computed by hand ------------------


def paper(**values: float) -> list[PaperMetric]:
    return [PaperMetric(method=name, value=value, source="x") for name, value in values.items()]


def seeds(method: str, *values: float) -> ReproducedMetric:
    return ReproducedMetric("", method, "accuracy", dict(enumerate(values)))


def test_pair_is_significant_by_paired_difference_over_seeds() -> None:
    # Seeds change both equally: differences 1.0, 1.2, 0.8 have the interval 1.0 +- 4.303 * 0.2 / sqrt(3).
    steady = [seeds("a", 70.0, 80.0, 90.0), seeds("b", 69.0, 78.8, 89.2)]
    assert compare_ranking(steady, paper(a=2.0, b=1.0)) == RankingAgreement(1, 1, 1, 1)
    assert compare_ranking(steady, paper(a=1.0, b=2.0)) == RankingAgreement(1, 0, 1, 0)
    # The same means with differences 1.0, 3.0, -1.0: 1.0 +- 5.0.
    loose = [seeds("a", 70.0, 80.0, 90.0), seeds("b", 69.0, 77.0, 91.0)]
    assert compare_ranking(loose, paper(a=2.0, b=1.0)) == RankingAgreement(1, 1, 0, 0)


def test_one_seed_is_not_significant() -> None:
    assert compare_ranking([seeds("a", 99.0), seeds("b", 1.0)], paper(a=2.0, b=1.0)) == RankingAgreement(
        1, 1, 0, 0
    )


def test_methods_are_compared_on_common_seeds() -> None:
    # On seeds 0 to 2, a is above b by 1.0, 1.2, 0.8; b's fourth seed, which a lacks, would change this.
    rows = [seeds("a", 70.0, 80.0, 90.0), seeds("b", 69.0, 78.8, 89.2, 200.0)]
    assert compare_ranking(rows, paper(a=2.0, b=1.0)) == RankingAgreement(1, 1, 1, 1)
    strangers = [rows[0], ReproducedMetric("", "b", "accuracy", {7: 1.0})]
    assert compare_ranking(strangers, paper(a=2.0, b=1.0)) == RankingAgreement(0, 0, 0, 0)


def test_pairs_share_setting_and_metric_and_differ_in_paper() -> None:
    rows = [
        ReproducedMetric("one", "a", "accuracy", {0: 9.0}),
        ReproducedMetric("two", "b", "accuracy", {0: 1.0}),
        ReproducedMetric("one", "b", "gigabytes", {0: 1.0}),
        ReproducedMetric("one", "c", "accuracy", {0: 5.0}),
    ]
    assert compare_ranking(rows, paper(a=2.0, b=1.0, c=2.0)) == RankingAgreement(0, 0, 0, 0)
