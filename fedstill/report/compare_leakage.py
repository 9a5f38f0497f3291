"""What attacks got from the runs of a comparison: the figures that its tables have of leakage.json.

Each figure is that of the strongest attack: of those that were tried on a row's runs, the one with the
highest mean over seeds (of a p-value: the lowest). Nothing here calls a method safe.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from fedstill.attacks.found import Leakage
from fedstill.attacks.rows import Column


def best(column: Column, runs: Sequence[Leakage | None]) -> tuple[str, list[float]] | None:
    """The strongest attack of those tried on all runs, with its values; None where there is none."""
    tried = [{} if found is None else _values(column, found) for found in runs]
    shared = [name for name in tried[0] if all(name in each for each in tried)] if tried else []
    means = {name: math.fsum(each[name] for each in tried) / len(tried) for name in shared}
    if not means:
        return None
    chosen = _strongest(column, means.values())
    name = next(name for name in shared if means[name] == chosen)
    return name, [each[name] for each in tried]


def _values(column: Column, found: Leakage) -> dict[str, float]:
    """A column's figures in one run, by attack: of several targets the one of which it got most."""
    told: dict[str, list[float]] = {}
    for attack in found.attacks:
        for row in attack.rows:
            if row.column == column.name and row.value is not None:
                told.setdefault(row.attack or attack.name, []).append(row.value)
    return {name: _strongest(column, values) for name, values in told.items()}


def _strongest(column: Column, values: Iterable[float]) -> float:
    return min(values) if column.lowest else max(values)


def notes(columns: Sequence[Column]) -> tuple[str, str]:
    """How to read the figures of these columns."""
    return (
        "An attack that gets little shows that this attack, at this strength, got little; it shows nothing "
        "of stronger ones. Nothing here is called safe.",
        "Each of these figures is of the strongest attack of those tried (the highest mean over seeds). "
        + "".join(f"{column.says} " for column in columns if column.says)
        + "The best of several attacks lies a little above guessing by chance, and one run's figure has an "
        "interval, in its report: marks that are close to each other, or to the dashed line, are not told "
        "apart.",
    )


def strength(found: Leakage) -> str:
    """The attacks that were tried, and how strong they were, in one line."""
    parts = [attack.strength for attack in found.attacks]
    return f"Tried: {'; '.join(parts)}." if parts else "Nothing was tried."
