"""Agreement with the paper's ranking and significance of pairs, computed by hand."""

from __future__ import annotations

from fedstill.compare.reproduction import ReproducedMetric
from fedstill.report.comparison_tables import RankingAgreement, compare_ranking
from fedstill.runs.spec import PaperMetric


def paper(**values: float) -> list[PaperMetric]:
    return [PaperMetric(method=name, value=value, source="x") for name, value in values.items()]


def seeds(method: str, *values: float) -> ReproducedMetric:
    return ReproducedMetric("", method, "accuracy", dict(enumerate(values)))


def test_pair_is_significant_by_paired_difference_over_seeds() -> None:
    # Seeds move both alike: differences 1.0, 1.2, 0.8 have the interval 1.0 +- 4.303 * 0.2 / sqrt(3).
    steady = [seeds("a", 70.0, 80.0, 90.0), seeds("b", 69.0, 78.8, 89.2)]
    assert compare_ranking(steady, paper(a=2.0, b=1.0)) == RankingAgreement(1, 1, 1, 1)
    assert compare_ranking(steady, paper(a=1.0, b=2.0)) == RankingAgreement(1, 0, 1, 0)
    # The same means, but 1.0, 3.0, -1.0: 1.0 +- 5.0.
    loose = [seeds("a", 70.0, 80.0, 90.0), seeds("b", 69.0, 77.0, 91.0)]
    assert compare_ranking(loose, paper(a=2.0, b=1.0)) == RankingAgreement(1, 1, 0, 0)


def test_one_seed_is_not_significant() -> None:
    assert compare_ranking([seeds("a", 99.0), seeds("b", 1.0)], paper(a=2.0, b=1.0)) == RankingAgreement(
        1, 1, 0, 0
    )


def test_methods_are_compared_on_common_seeds() -> None:
    # Of the seeds 0 to 2 a is above b by 1.0, 1.2, 0.8; by b's fourth, which a lacks, it would not be.
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
