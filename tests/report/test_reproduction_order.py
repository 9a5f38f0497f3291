"""Pairs of methods in the paper's order, and those that seeds tell apart: worked out by hand."""

from __future__ import annotations

import pytest

from fedstill.compare.reproduction import ReproducedFigure
from fedstill.report.reproduction_order import Order, in_order
from fedstill.runs.config import PaperFigure


def paper(**values: float) -> list[PaperFigure]:
    return [PaperFigure(method=name, value=value, source="x") for name, value in values.items()]


def seeds(method: str, *values: float) -> ReproducedFigure:
    return ReproducedFigure("", method, "accuracy", dict(enumerate(values)))


def test_a_pair_is_told_apart_by_paired_differences_over_seeds() -> None:
    # Seeds move both alike: differences 1.0, 1.2, 0.8 have the interval 1.0 +- 4.303 * 0.2 / sqrt(3).
    steady = [seeds("a", 70.0, 80.0, 90.0), seeds("b", 69.0, 78.8, 89.2)]
    assert in_order(steady, paper(a=2.0, b=1.0), 3) == Order(1, 1, 1, 1)
    assert in_order(steady, paper(a=1.0, b=2.0), 3) == Order(1, 0, 1, 0)
    # The same means, but 1.0, 3.0, -1.0: 1.0 +- 5.0.
    loose = [seeds("a", 70.0, 80.0, 90.0), seeds("b", 69.0, 77.0, 91.0)]
    assert in_order(loose, paper(a=2.0, b=1.0), 3) == Order(1, 1, 0, 0)


def test_one_seed_tells_nothing_apart() -> None:
    assert in_order([seeds("a", 99.0), seeds("b", 1.0)], paper(a=2.0, b=1.0), 1) == Order(1, 1, 0, 0)


@pytest.mark.parametrize(("other", "told"), [(97.1, 1), (97.4, 0)])
def test_where_only_means_were_kept_they_are_compared_unpaired(other: float, told: int) -> None:
    # 2.776 (t of 4 degrees of freedom) times sqrt((1 + 1.69) / 3) is 2.629.
    rows = [
        ReproducedFigure("", "a", "accuracy", mean=100.0, std=1.0),
        ReproducedFigure("", "b", "accuracy", mean=other, std=1.3),
    ]
    assert in_order(rows, paper(a=2.0, b=1.0), 3) == Order(1, 1, told, told)


def test_a_mean_of_fewer_seeds_than_the_record_has_counts_as_such() -> None:
    # Three seeds each: 2.776 * sqrt(2 / 3) is 2.27. Two of one: 3.182 * sqrt(1 / 2 + 1 / 3) is 2.90.
    rows = [
        ReproducedFigure("", "a", "accuracy", mean=100.0, std=1.0),
        ReproducedFigure("", "b", "accuracy", mean=97.5, std=1.0),
    ]
    assert in_order(rows, paper(a=2.0, b=1.0), 3).told == 1
    rows[1] = ReproducedFigure("", "b", "accuracy", mean=97.5, std=1.0, count=2)
    assert in_order(rows, paper(a=2.0, b=1.0), 3).told == 0
    rows[1] = ReproducedFigure("", "b", "accuracy", mean=50.0, std=1.0, count=1)
    assert in_order(rows, paper(a=2.0, b=1.0), 3).told == 0


def test_what_has_no_deviation_is_not_told_apart_and_other_seeds_are_compared_unpaired() -> None:
    sure = [
        ReproducedFigure("", "a", "gigabytes", mean=2.0),
        ReproducedFigure("", "b", "gigabytes", mean=1.0),
    ]
    published = [
        PaperFigure(method=m, figure="gigabytes", value=v, source="x") for m, v in (("a", 2.0), ("b", 1.0))
    ]
    assert in_order(sure, published, 3) == Order(1, 1, 0, 0)
    # Two seeds of one and three of the other: of 0.0 and 2.0 and of 10, 11, 12; pooled variance 4 / 3.
    apart = [
        ReproducedFigure("", "a", "accuracy", {0: 0.0, 1: 2.0}),
        ReproducedFigure("", "b", "accuracy", {0: 10.0, 1: 11.0, 2: 12.0}),
    ]
    assert in_order(apart, paper(a=2.0, b=1.0), 3) == Order(1, 0, 1, 0)
    apart[0] = ReproducedFigure("", "a", "accuracy", {0: 0.0})
    assert in_order(apart, paper(a=2.0, b=1.0), 3) == Order(1, 0, 0, 0)


def test_settings_and_figures_are_not_mixed_and_level_pairs_not_counted() -> None:
    rows = [
        ReproducedFigure("one", "a", "accuracy", {0: 9.0}),
        ReproducedFigure("two", "b", "accuracy", {0: 1.0}),
        ReproducedFigure("one", "b", "gigabytes", {0: 1.0}),
        ReproducedFigure("one", "c", "accuracy", {0: 5.0}),
    ]
    assert in_order(rows, paper(a=2.0, b=1.0, c=2.0), 1) == Order(0, 0, 0, 0)
