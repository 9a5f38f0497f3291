"""How far a record is in the paper's order: over all pairs of methods, and over those told apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from fedstill.compare.reproduction import ReproducedMetric
from fedstill.report.significance import paired_t_interval
from fedstill.runs.config import PaperMetric


@dataclass(frozen=True)
class Order:
    """Pairs of methods with published figures in one setting; those that the paper has level are not counted.

    Args:
        pairs: how many there are.
        alike: of these, how many our means order as the paper does.
        told: of all, those whose difference has a 95 % interval over seeds on one side of 0.
        told_alike: of these, how many are in the paper's order.
    """

    pairs: int
    alike: int
    told: int
    told_alike: int

    def __str__(self) -> str:
        """As a cell of a table."""
        clear = f"{self.told_alike} of {self.told}" if self.told else "none"
        return f"{self.alike} of {self.pairs}; told apart: {clear}"


def compare_order(rows: Sequence[ReproducedMetric], published: Sequence[PaperMetric]) -> Order:
    """The order of a record. Two methods are compared seed by seed, on those that both have.

    >>> theirs = [PaperMetric(method=m, value=v, source="x") for m, v in (("a", 3.0), ("b", 2.0), ("c", 1.0))]
    >>> ours = {"a": (9.0, 9.2, 9.1), "b": (7.0, 7.1, 7.3), "c": (8.0, 5.0, 9.0)}
    >>> rows = [ReproducedFigure("", m, "accuracy", dict(enumerate(of))) for m, of in ours.items()]
    >>> print(compare_order(rows, theirs))
    2 of 3; told apart: 1 of 1
    """
    groups: dict[tuple[str, str], list[tuple[float, ReproducedMetric]]] = {}
    for row in rows:
        for paper in published:
            if (paper.method, paper.metric) == (row.method, row.metric) and paper.setting in (
                "",
                row.setting,
            ):
                groups.setdefault((row.setting, row.metric), []).append((paper.value, row))
    found = [
        (theirs > other, paired_t_interval([ours.values[seed] - others.values[seed] for seed in shared]))
        for group in groups.values()
        for (theirs, ours), (other, others) in combinations(group, 2)
        if theirs != other and (shared := ours.values.keys() & others.values.keys())
    ]
    alike = [gap.mean > 0 if above else gap.mean < 0 for above, gap in found]
    told = [gap.significant for _, gap in found]
    return Order(len(found), sum(alike), sum(told), sum(map(bool.__and__, alike, told)))
