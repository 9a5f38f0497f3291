"""The splits: one frozen dataclass each, with its options and the way it divides.

May import ``split_base``, which has what all of them share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
from annotated_types import Interval

from fedstill.core.checked import PositiveInt
from fedstill.core.dataset import Column, TensorData
from fedstill.core.errors import ArgumentError
from fedstill.data.split_base import Items, SplitConfig, topped_up
from fedstill.data.stratified_sampling import Ints

# Beyond these the draws leave double precision, and nothing changes any more.
Alpha = Annotated[float, Interval(ge=1e-12, le=1e12), "a number from 1e-12 to 1e+12"]
DRAWS = 20  # how often a Dirichlet split is drawn before small nodes are topped up instead


@dataclass(frozen=True, kw_only=True)
class IID(SplitConfig):
    """At random: sizes differ by one example at most, or are as equal as whole units allow."""

    def divide(self, items: Items, generator: np.random.Generator) -> Ints:
        """Drawn evenly; of units, one after another goes to the node that holds least."""
        if not items.whole:
            return generator.permutation(np.arange(len(items)) % self.nodes)
        owner = np.empty(len(items), dtype=np.int64)
        _level(owner, generator.permutation(len(items)), items.sizes, np.zeros(self.nodes))
        return owner


@dataclass(frozen=True, kw_only=True)
class Dirichlet(SplitConfig):
    """Each class in shares drawn from Dirichlet(alpha) (Hsu, Qi and Brown 2019, arXiv:1909.06335; FedIOD)."""

    words = "Dirichlet alpha {alpha:g}"

    alpha: Alpha = 0.5
    """Small is skewed (each class at few nodes), large is even."""

    def divide(self, items: Items, generator: np.random.Generator) -> Ints:
        """The last node has what rounding leaves of a class. A draw with too small a node is repeated, a
        bounded number of times."""
        nodes, labels = self.nodes, items.labels
        owner = np.empty(len(items), dtype=np.int64)
        for _ in range(DRAWS):
            for label in range(items.classes):
                members = generator.permutation(np.flatnonzero(labels == label))
                shares = dirichlet_shares(self.alpha, nodes, generator)
                ends = np.floor(np.cumsum(shares)[:-1] * len(members))  # (K-1,): the last node has the rest
                owner[members] = np.searchsorted(ends, np.arange(len(members)), side="right")
            if np.bincount(owner, minlength=nodes).min() >= items.least:
                return owner
        return topped_up(owner, nodes, items.least, generator)


@dataclass(frozen=True, kw_only=True)
class BalancedDirichlet(SplitConfig):
    """Equal sizes, a node's classes in shares from Dirichlet(alpha) (FedDyn: Acar et al., ICLR 2021)."""

    words = "equal sizes, Dirichlet alpha {alpha:g}"

    alpha: Alpha = 0.5
    """Small is skewed (few classes at each node), large is even."""

    def divide(self, items: Items, generator: np.random.Generator) -> Ints:
        """Who holds least takes an item of a class that it draws by its shares, of those that are left."""
        order = generator.permutation(len(items))
        piles = [order[items.labels[order] == label].tolist() for label in range(items.classes)]
        left = np.array([len(pile) for pile in piles])  # (classes,)
        shares = [dirichlet_shares(self.alpha, items.classes, generator) for _ in range(self.nodes)]
        held = np.zeros(self.nodes)
        owner = np.empty(len(items), dtype=np.int64)
        for drawn in generator.random(len(items)):
            node = held.argmin()
            weights = shares[node] * (left > 0)
            # Of what it would hold nothing may be left; then it takes what comes.
            ends = np.cumsum(weights if weights.any() else left)
            label = np.searchsorted(ends / ends[-1], drawn, side="right")
            item = piles[label].pop()
            left[label] -= 1
            owner[item] = node
            held[node] += items.sizes[item]
        return owner


@dataclass(frozen=True, kw_only=True)
class Shards(SplitConfig):
    """A few classes a node, each class at as equal a number of nodes as can be and shared equally by them.

    A node holds *more* classes where nodes * classes_per_node is less than the classes present, and where
    only examples of other classes can bring it to ``minimum``; it holds *fewer* where a class has fewer
    examples than nodes that should hold it.
    """

    words = "{classes_per_node} classes a node"

    classes_per_node: PositiveInt = 2
    """How many classes a node holds."""

    def divide(self, items: Items, generator: np.random.Generator) -> Ints:
        """First which node holds which classes, then which examples."""
        nodes, per_node, labels = self.nodes, self.classes_per_node, items.labels
        sizes = np.bincount(labels, minlength=items.classes)  # (classes,)
        present = np.flatnonzero(sizes)
        if per_node > len(present):
            allowed = f"at most {len(present)}, the classes that occur in the data"
            raise ArgumentError("split.classes_per_node", per_node, allowed)

        holds = np.zeros((nodes, len(sizes)), dtype=bool)
        for node in range(nodes):
            # The classes at the fewest nodes so far; one with no example left for a further node comes last.
            used = holds.sum(axis=0)[present]
            ranking = np.lexsort((generator.random(len(present)), used, used >= sizes[present]))
            holds[node, present[ranking[:per_node]]] = True
        for label in present[~holds[:, present].any(axis=0)]:  # too few nodes for all classes
            ranking = np.lexsort((generator.random(nodes), holds.sum(axis=1)))
            holds[ranking[0], label] = True

        owner = np.empty(len(items), dtype=np.int64)
        for label in present:
            holders = generator.permutation(np.flatnonzero(holds[:, label]))
            owner[generator.permutation(np.flatnonzero(labels == label))] = np.resize(holders, sizes[label])
        return topped_up(owner, nodes, items.least, generator, labels)


@dataclass(frozen=True, kw_only=True)
class ByColumn(SplitConfig):
    """One node for each value of a column, in sorted order of the values; nothing is drawn."""

    fewest = 0
    words = "one for each {column}"

    column: str = ""
    """The name of the column."""

    def divide(self, items: Items, generator: np.random.Generator) -> Ints:
        """By value. To move examples would belie what the column says, so a value of too few is refused."""
        values, which = np.unique(items.values(self.column), return_inverse=True)
        owner: Ints = which.astype(np.int64)
        sizes = np.bincount(owner, weights=items.sizes).astype(np.int64)
        if self.nodes not in (0, len(values)):
            many = f"{len(values)}, the number of values of column {self.column!r}"
            raise ArgumentError("split.nodes", self.nodes, f"{many}, or 0 for as many as that")
        if sizes.min() < self.minimum:
            least = sizes.min()
            rare = f"value {str(values[sizes.argmin()])!r} of column {self.column!r} has {least} examples"
            raise ArgumentError("split.minimum", self.minimum, f"at most {least}, as {rare}")
        return owner

    def values(self, columns: Mapping[str, Column]) -> Sequence[str]:
        """The column's values."""
        return [str(value) for value in np.unique(columns[self.column]).tolist()]


@dataclass(frozen=True, kw_only=True)
class Sorted(SplitConfig):
    """By a numeric column, of units by its mean, cut into equal parts; nothing is drawn."""

    words = "by {column}"

    column: str = ""
    """The name of the column."""

    def divide(self, items: Items, generator: np.random.Generator) -> Ints:
        """A stable sort, cut into parts whose sizes differ by one at most, or where units end."""
        order, owner = np.argsort(items.numbers(self.column), kind="stable"), np.empty(len(items), np.int64)
        if items.whole:
            sizes = items.sizes[order]
            middles = np.cumsum(sizes) - sizes / 2
            owner[order] = (middles * self.nodes / sizes.sum()).astype(np.int64)
        else:
            owner[order] = np.arange(len(items)) * self.nodes // len(items)
        return owner


@dataclass(frozen=True, kw_only=True)
class Positives(SplitConfig):
    """Findings: equal sizes, but examples that have one in shares from Dirichlet(alpha) (FedKD, Table 4)."""

    alpha: Alpha = 0.5
    """Small is skewed (findings at few nodes), large is even."""

    def divide(self, items: Items, generator: np.random.Generator) -> Ints:
        """Positive items in drawn shares, as far as a node can hold them; then negative ones until all nodes
        are as large."""
        positive, sizes, most = items.positive, items.sizes, items.sizes.sum() / self.nodes
        wanted = dirichlet_shares(self.alpha, self.nodes, generator) * sizes[positive].sum()
        excess, wanted = (wanted - most).clip(0).sum(), wanted.clip(max=most)
        room = most - wanted
        wanted += excess * room / max(room.sum(), 1e-9)  # what is too much for one goes to those with room
        owner = np.empty(len(items), dtype=np.int64)
        held = -wanted
        _level(owner, generator.permutation(np.flatnonzero(positive)), sizes, held)
        held += wanted
        _level(owner, generator.permutation(np.flatnonzero(~positive)), sizes, held)
        return owner


def dirichlet_shares(alpha: float, nodes: int, generator: np.random.Generator) -> npt.NDArray[np.float64]:
    """One draw from Dirichlet(alpha, ..., alpha), (K,) and summing to 1, for any alpha.

    In logarithms, since Gamma(alpha) draws of a small alpha are all 0: Gamma(a) is Gamma(a + 1) times
    U^(1/a), and -log U is exponential.
    """
    logs = np.log(generator.standard_gamma(alpha + 1, nodes)) - generator.standard_exponential(nodes) / alpha
    shares: npt.NDArray[np.float64] = np.exp(logs - logs.max())
    shares /= shares.sum()
    return shares


def _level(owner: Ints, order: Ints, sizes: Ints, held: npt.NDArray[np.float64]) -> None:
    """Give items one after another to the node that holds least; changes ``owner`` and ``held``."""
    for index in order:
        owner[index] = held.argmin()
        held[owner[index]] += sizes[index]


def conceal(parts: Sequence[TensorData], findings: int, generator: np.random.Generator) -> list[TensorData]:
    """Nodes that know only ``findings`` of the labels: the others become -1, unknown, in their data; 0 is
    all.

    The labels are laid on a circle in a drawn order. Node k of K knows those from place ``k C / K`` on, so
    that together they know all C and neighbours share some; a number that does not give this is refused.

    >>> part = TensorData(torch.zeros(1, 1, 4, 4), torch.ones(1, 4, dtype=torch.int64))
    >>> both = conceal([part, part], 3, np.random.default_rng(0))
    >>> [part.targets.tolist() for part in both]
    [[[1, 1, 1, -1]], [[-1, 1, 1, 1]]]
    """
    if findings == 0:
        return list(parts)
    if any(part.targets.ndim != 2 or part.targets.is_floating_point() for part in parts):
        raise ArgumentError("split.findings", findings, "0, as only findings can be unknown")
    labels, nodes = parts[0].targets.shape[1], len(parts)
    least = min(math.ceil(labels / nodes) + 1, labels)
    if not least <= findings <= labels:
        some = f"from {least} to {labels}" if least < labels else str(labels)
        raise ArgumentError(
            "split.findings",
            findings,
            f"{some}, with which {nodes} nodes know all {labels} labels and overlap; or set "
            "split.findings 0 (all)",
        )
    circle = generator.permutation(labels)
    known = []
    for node, part in enumerate(parts):
        places = (node * labels // nodes + np.arange(findings)) % labels
        unknown = torch.from_numpy(np.setdiff1d(circle, circle[places]))
        targets = part.targets.clone()
        targets[:, unknown] = -1
        known.append(replace(part, targets=targets))
    return known
