"""Agreement of a reproduction with the paper's ranking, over all and over significant pairs of methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from fedstill.compare.reproduction import ReproducedMetric
from fedstill.report.significance import paired_t_interval
from fedstill.runs.spec import PaperMetric


@dataclass(frozen=True)
class RankingAgreement:
    """Pairs of methods with published metrics in one setting; pairs that are equal in the paper do not count.

    Args:
        pairs: number of pairs.
        same_order: pairs that our means order as the paper does.
        significant: pairs whose 95% interval over seeds excludes 0.
        significant_same_order: significant pairs in the paper's order.
    """

    pairs: int
    same_order: int
    significant: int
    significant_same_order: int

    def __str__(self) -> str:
        """Return a cell of a table."""
        significant = f"{self.significant_same_order} of {self.significant}" if self.significant else "none"
        return f"{self.same_order} of {self.pairs}; significantly different: {significant}"


def compare_ranking(rows: Sequence[ReproducedMetric], published: Sequence[PaperMetric]) -> RankingAgreement:
    """Compare the ranking of methods with the paper's, pair by pair, over the seeds that both methods have.

    >>> papers = [PaperMetric(method=m, value=v, source="x") for m, v in (("a", 3.0), ("b", 2.0), ("c", 1.0))]
    >>> values = {"a": (9.0, 9.2, 9.1), "b": (7.0, 7.1, 7.3), "c": (8.0, 5.0, 9.0)}
    >>> rows = [ReproducedMetric("", m, "accuracy", dict(enumerate(v))) for m, v in values.items()]
    >>> print(compare_ranking(rows, papers))
    2 of 3; significantly different: 1 of 1
    """
    groups: dict[tuple[str, str], list[tuple[float, ReproducedMetric]]] = {}
    for row in rows:
        for paper in published:
            if (paper.method, paper.metric) == (row.method, row.metric) and paper.setting in (
                "",
                row.setting,
            ):
                groups.setdefault((row.setting, row.metric), []).append((paper.value, row))
    differences = [
        (
            first_paper > second_paper,
            paired_t_interval([first.values[seed] - second.values[seed] for seed in shared]),
        )
        for group in groups.values()
        for (first_paper, first), (second_paper, second) in combinations(group, 2)
        if first_paper != second_paper and (shared := first.values.keys() & second.values.keys())
    ]
    same_order = [gap.mean > 0 if is_above else gap.mean < 0 for is_above, gap in differences]
    significant = [gap.significant for _, gap in differences]
    both = sum(map(bool.__and__, same_order, significant))
    return RankingAgreement(len(differences), sum(same_order), sum(significant), both)
