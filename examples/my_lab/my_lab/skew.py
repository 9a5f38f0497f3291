"""Quantity skew: all nodes have all classes, but some have many examples and others few.

Li, Diao, Chen, He: "Federated Learning on Non-IID Data Silos: An Experimental Study", ICDE 2022, section 4,
samples the shares from a Dirichlet distribution. Here they follow a power law, equal in every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Interval

from fedstill.data import SplitConfig, SplitItems


@dataclass(frozen=True, kw_only=True)
class QuantitySkew(SplitConfig):
    """Random partition with shares k ** -``power`` for node k = 1, 2, ..."""

    power: Annotated[float, Interval(ge=0, le=10)] = 1.0
    """0: equal shares. 1: the second node has half as many examples as the first, the third a third."""

    def divide(self, items: SplitItems, generator: np.random.Generator) -> np.ndarray:
        shares = np.arange(1.0, self.nodes + 1) ** -self.power  # (K,)
        ends = np.cumsum(shares) / shares.sum() * items.sizes.sum()
        order = generator.permutation(len(items))
        middles = (
            np.cumsum(items.sizes[order]) - items.sizes[order] / 2
        )  # position of each item's middle, by examples
        owner = np.empty(len(items), dtype=np.int64)
        owner[order] = np.searchsorted(ends[:-1], middles)
        return owner
