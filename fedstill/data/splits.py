"""Dividing examples over the nodes of a federation: what all :mod:`fedstill.data.splits` share.

A split says for each of its items, an example or a whole unit, at which node it is. So each example is at
exactly one node and none is lost, whatever the numbers drawn.

The splits: one frozen dataclass each, with its options and the way it divides.

May import ``split_base``, which has what all of them share.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from annotated_types import Interval

from fedstill.core.dataset import Column, TensorData, check_labels
from fedstill.core.errors import ArgumentError, DataError
from fedstill.core.names import number_of, plain
from fedstill.core.options import PositiveInt
from fedstill.core.registry import Registered, Registry
from fedstill.data.stratified_sampling import Ints, label_units, require_no_gaps, stratification_labels

NO_COLUMNS: Mapping[str, Column] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class SplitConfig(Registered, ABC):
    """How the training examples are divided over the nodes.

    A split is a frozen dataclass below this one; its fields are its options, and their types say what
    these may be (:mod:`fedstill.core.config_tables`). What it must bring is :meth:`divide`.

    Attributes:
        min_nodes: the least that ``nodes`` may be; 0 where the data can say how many there are.
        words: what reports say of it, with its options in braces; empty: its name and options.
    """

    under: ClassVar[str] = "split"
    default: ClassVar[str | None] = "dirichlet"
    alike: ClassVar[bool] = True  # alpha is skew and column a column in all that have them
    min_nodes: ClassVar[int] = 1
    words: ClassVar[str] = ""

    nodes: int = 5
    """Number of nodes; with name = column also 0, as many as the column has values."""

    minimum: PositiveInt = 10
    """The least number of examples a node holds."""

    findings: int = 0
    """Findings: how many of the labels a node knows; the others are unknown in its data. All nodes together
    know all labels, and neighbors share some; 0: every node knows all."""

    @abstractmethod
    def divide(self, items: SplitItems, generator: np.random.Generator) -> Ints:
        """The node of each item, ``(U,)`` int64 in 0..nodes-1; with ``nodes`` 0 in 0 up to any number.

        Nodes below ``minimum`` afterwards get random items of the largest ones. All randomness is the
        generator's.
        """

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(column := getattr(self, "column", None), str):
            object.__setattr__(self, "column", plain(column))

    def values(self, columns: Mapping[str, Column]) -> Sequence[str] | None:
        """What each node stands for, in order, where it is a value of a column (N,); None: it has no name."""
        return None

    @property
    def own(self) -> dict[str, Any]:
        """The options that not all splits have."""
        shared = {field.name for field in fields(SplitConfig)}
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in shared}

    @property
    def about(self) -> str:
        """It in a few words, for reports."""
        plain = ", ".join([self.called, *(f"{name} {value}" for name, value in self.own.items())])
        return self.words.format(**self.own) or plain


SPLITS: Registry[type[SplitConfig]] = Registry(
    "split",
    {
        "iid": "fedstill.data.splits:IID",
        "dirichlet": "fedstill.data.splits:Dirichlet",
        "balanced-dirichlet": "fedstill.data.splits:BalancedDirichlet",
        "shards": "fedstill.data.splits:Shards",
        "column": "fedstill.data.splits:ByColumn",
        "sorted": "fedstill.data.splits:Sorted",
        "positives": "fedstill.data.splits:Positives",
    },
    base=SplitConfig,
)


SplitConfig.registry = SPLITS


class SplitItems:
    """What is divided, U items: examples or, where some belong together, whole units (a patient's, say).

    Attributes:
        whole: whether they are units.
        of: the item that each of the N examples belongs to, (N,) in 0..U-1.
        sizes: examples in each, (U,).
        least: how many items a node must have: the minimum of examples, and 1 of units.
    """

    def __init__(
        self,
        targets: torch.Tensor,
        classes: int,
        columns: Mapping[str, Column],
        unit: Column | None,
        split: SplitConfig,
    ) -> None:
        self.targets, self.columns, self.unit, self.split = targets, columns, unit, split
        self._num_classes, self.are_units = classes, unit is not None
        self.item_ids: Ints = np.arange(len(targets))
        self.sizes: Ints = np.ones(len(targets), dtype=np.int64)
        if unit is not None:
            self.item_ids, self.sizes = np.unique(unit, return_inverse=True, return_counts=True)[1:]
        self.min_per_node = 1 if self.are_units else split.minimum

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def labels(self) -> Ints:
        """The class of each item, (U,): of findings and maps as
        :func:`fedstill.data.stratified_sampling.stratification_labels`, of a unit the rarest of its examples'.

        Raises:
            ArgumentError: the targets are images.
            DataError: labels outside the classes.
        """
        if self.targets.is_floating_point() and self.targets.ndim != 2:
            allowed = "iid, column or sorted, as images have no classes"
            raise ArgumentError("split.name", self.split.called, allowed)
        if self.targets.ndim == 1:
            check_labels(self.targets, self._num_classes, "split")
        labels = stratification_labels(self.targets)
        return label_units(labels, self.item_ids) if self.are_units else labels

    @property
    def num_classes(self) -> int:
        """How many classes :attr:`labels` are of, of which not all need occur."""
        numbers = self.targets.is_floating_point()
        if self.are_units or numbers:
            return int(self.labels.max()) + 1
        return self._num_classes + (self.targets.ndim == 2)

    @cached_property
    def is_positive(self) -> npt.NDArray[np.bool_]:
        """Whether an item has any finding, (U,); an ArgumentError if the targets are no findings."""
        if self.targets.ndim != 2 or self.targets.is_floating_point():
            allowed = "another one, as only findings are positive or negative"
            raise ArgumentError("split.name", self.split.called, allowed)
        some: npt.NDArray[np.bool_] = (
            np.bincount(self.item_ids, weights=(self.targets == 1).any(1).cpu().numpy()) > 0
        )
        return some

    def numeric_column(self, name: str) -> npt.NDArray[Any]:
        """A numeric column, (U,), of a unit the mean; an ArgumentError if there is none of that name.

        Texts are numbers where all are, as those of a table.
        """
        column = self._read_column(name)
        if column.dtype.kind == "U" and all(number_of(cell) is not None for cell in column.tolist()):
            column = column.astype(float)
        if column.dtype.kind not in "biuf":
            raise ArgumentError(
                "split.column", name, f"a numeric column when split.name is {self.split.called}"
            )
        return np.bincount(self.item_ids, weights=column) / self.sizes if self.are_units else column

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column of numbers or texts, (U,), of a unit the value that all its examples have.

        Raises:
            ArgumentError: there is no such column.
            DataError: it cannot be used, or parts a unit.
        """
        column = self._read_column(name)
        if self.unit is None:
            return column
        first = np.unique(self.item_ids, return_index=True)[1]
        odd = np.flatnonzero(column != column[first][self.item_ids])
        if len(odd):
            parted = str(self.unit[odd[0]])
            raise DataError(
                f"split.column {name!r}: its values part the examples of {parted!r}: allowed is one value "
                "for all of a patient's; where hospitals count patients each by itself, write the hospital "
                "into the column patient, too"
            )
        return column[first]

    def _read_column(self, name: str) -> npt.NDArray[Any]:
        if name not in self.columns:
            known = f"one of {', '.join(sorted(self.columns))}"
            none = "none, as this data has no columns (a folder's are in its cases.csv)"
            raise ArgumentError("split.column", name, known if self.columns else none)
        column = np.asarray(self.columns[name])
        if column.shape != self.item_ids.shape or column.dtype.kind not in "biufUS":
            raise DataError(
                f"column {name!r} is {column.dtype} of shape {column.shape}: "
                f"allowed are numbers or texts, one for each of the {len(self.item_ids)} examples"
            )
        require_no_gaps(name, column)
        return column


def split(
    targets: torch.Tensor,
    classes: int,
    config: SplitConfig,
    generator: np.random.Generator,
    columns: Mapping[str, Column] = NO_COLUMNS,
    unit: Column | None = None,
) -> tuple[torch.Tensor, ...]:
    """Divide N examples over K nodes; where they belong together (``unit``), whole units.

    Args:
        targets: (N,) int64 class indices, (N, C) findings, (N, H, W) maps or float images.
        classes: number of classes; not all need occur.
        config: how to divide. A node below its minimum gets random items of the largest nodes.
        generator: the only source of randomness.
        columns: by name, (N,) values.
        unit: of which patient, say, each example is, (N,): those of one are never at two nodes.

    Returns:
        K tensors of int64 indices into targets, each ascending: a partition of 0..N-1.

    Raises:
        ArgumentError: a setting that is not allowed, or that this data does not allow.
        DataError: no examples, labels outside the classes, a column that cannot be used.

    >>> from fedstill.data.splits import Shards
    >>> config = Shards(nodes=2, classes_per_node=1, minimum=1)
    >>> parts = split(torch.tensor([0, 1, 0, 1, 1]), 2, config, np.random.default_rng(0))
    >>> sorted(part.tolist() for part in parts)
    [[0, 2], [1, 3, 4]]
    """
    total = len(targets)
    if total == 0:
        raise DataError("split: there are no examples (expected one or more)")
    # Here and not where a split is made: what another split had, as 0 nodes, may be replaced a moment later.
    if config.nodes < config.min_nodes:
        raise ArgumentError("split.nodes", config.nodes, f"a whole number from {config.min_nodes} up")
    if config.min_nodes:
        _check_node_sizes(config.nodes, config.minimum, total)
    items = SplitItems(targets, classes, columns, unit, config)
    if config.nodes > len(items):
        allowed = f"at most {len(items)}, the patients or pictures, which are not parted"
        raise ArgumentError("split.nodes", config.nodes, allowed)
    owner = config.divide(items, generator)
    _check_assignment(owner, len(items), config)
    nodes = config.nodes or int(owner.max()) + 1
    _check_node_sizes(nodes, config.minimum, total)
    if items.are_units:
        owner = _top_up_units(owner, nodes, items.sizes, config.minimum, generator)[items.item_ids]
    else:
        owner = top_up(owner, nodes, config.minimum, generator)
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=nodes))
    return tuple(torch.from_numpy(part.copy()) for part in np.split(order, ends[:-1]))


def _check_node_sizes(nodes: int, minimum: int, total: int) -> None:
    if minimum > total:
        raise ArgumentError("split.minimum", minimum, f"at most {total}, as there are {total} examples")
    if nodes * minimum > total:
        raise ArgumentError(
            "split.nodes",
            nodes,
            f"at most {total // minimum}, as there are {total} examples and each node holds "
            f"at least {minimum} (split.minimum)",
        )


def _check_assignment(owner: Any, count: int, config: SplitConfig) -> None:
    sound = isinstance(owner, np.ndarray) and owner.shape == (count,) and owner.dtype.kind in "iu"
    if not sound or owner.min() < 0 or (config.nodes and owner.max() >= config.nodes):
        last = f"0..{config.nodes - 1}" if config.nodes else "0 up"
        allowed = f"one whose divide gives {count} whole numbers in {last}, the node of each item"
        raise ArgumentError("split.name", config.called, allowed)


def top_up(
    owner: Ints, nodes: int, minimum: int, generator: np.random.Generator, labels: Ints | None = None
) -> Ints:
    """Move random items from the largest nodes until each holds the minimum of items.

    With ``labels``, items of classes that the small node holds already are moved first.
    """
    owner = owner.copy()
    sizes = np.bincount(owner, minlength=nodes)
    for small in range(nodes):
        while (need := minimum - sizes[small]) > 0:
            spare = np.flatnonzero(sizes[owner] > minimum)  # items at nodes that can give some
            if labels is not None:
                known = spare[np.isin(labels[spare], labels[owner == small])]
                spare = known if len(known) else spare
            large = owner[spare][np.argmax(sizes[owner[spare]])]
            moved = generator.permutation(spare[owner[spare] == large])[: min(need, sizes[large] - minimum)]
            owner[moved] = small
            sizes[large] -= len(moved)
            sizes[small] += len(moved)
    return owner


def _top_up_units(owner: Ints, nodes: int, sizes: Ints, minimum: int, generator: np.random.Generator) -> Ints:
    """Move random units from the largest nodes until each node holds the minimum of examples."""
    owner = owner.copy()
    held = np.bincount(owner, weights=sizes, minlength=nodes)
    while held.min() < minimum:
        small, spare = held.argmin(), held[owner] - sizes >= minimum
        if not spare.any():
            least = f"{minimum} examples in whole units, and this draw has none to spare"
            raise ArgumentError("split.minimum", minimum, f"less: some node cannot have {least}")
        large = owner[spare][held[owner[spare]].argmax()]
        moved = generator.choice(np.flatnonzero(spare & (owner == large)))
        held[large] -= sizes[moved]
        held[small] += sizes[moved]
        owner[moved] = small
    return owner


# Beyond these the draws leave double precision, and nothing changes any more.
Alpha = Annotated[float, Interval(ge=1e-12, le=1e12), "a number from 1e-12 to 1e+12"]
MAX_DRAWS = 20  # how often a Dirichlet split is drawn before small nodes are topped up instead


@dataclass(frozen=True, kw_only=True)
class IID(SplitConfig):
    """At random: sizes differ by one example at most, or are as equal as whole units allow."""

    def divide(self, items: SplitItems, generator: np.random.Generator) -> Ints:
        """Drawn evenly; of units, one after another goes to the node that holds least."""
        if not items.are_units:
            return generator.permutation(np.arange(len(items)) % self.nodes)
        owner = np.empty(len(items), dtype=np.int64)
        _fill_smallest_node(owner, generator.permutation(len(items)), items.sizes, np.zeros(self.nodes))
        return owner


@dataclass(frozen=True, kw_only=True)
class Dirichlet(SplitConfig):
    """Each class in shares drawn from Dirichlet(alpha) (Hsu, Qi and Brown 2019, arXiv:1909.06335; FedIOD)."""

    words = "Dirichlet alpha {alpha:g}"

    alpha: Alpha = 0.5
    """Small is skewed (each class at few nodes), large is even."""

    def divide(self, items: SplitItems, generator: np.random.Generator) -> Ints:
        """The last node has what rounding leaves of a class. A draw with too small a node is repeated, a
        bounded number of times."""
        nodes, labels = self.nodes, items.labels
        owner = np.empty(len(items), dtype=np.int64)
        for _ in range(MAX_DRAWS):
            for label in range(items.num_classes):
                members = generator.permutation(np.flatnonzero(labels == label))
                shares = sample_dirichlet_shares(self.alpha, nodes, generator)
                ends = np.floor(np.cumsum(shares)[:-1] * len(members))  # (K-1,): the last node has the rest
                owner[members] = np.searchsorted(ends, np.arange(len(members)), side="right")
            if np.bincount(owner, minlength=nodes).min() >= items.min_per_node:
                return owner
        return top_up(owner, nodes, items.min_per_node, generator)


@dataclass(frozen=True, kw_only=True)
class BalancedDirichlet(SplitConfig):
    """Equal sizes, a node's classes in shares from Dirichlet(alpha) (FedDyn: Acar et al., ICLR 2021)."""

    words = "equal sizes, Dirichlet alpha {alpha:g}"

    alpha: Alpha = 0.5
    """Small is skewed (few classes at each node), large is even."""

    def divide(self, items: SplitItems, generator: np.random.Generator) -> Ints:
        """Who holds least takes an item of a class that it draws by its shares, of those that are left."""
        order = generator.permutation(len(items))
        piles = [order[items.labels[order] == label].tolist() for label in range(items.num_classes)]
        left = np.array([len(pile) for pile in piles])  # (classes,)
        shares = [
            sample_dirichlet_shares(self.alpha, items.num_classes, generator) for _ in range(self.nodes)
        ]
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

    def divide(self, items: SplitItems, generator: np.random.Generator) -> Ints:
        """First which node holds which classes, then which examples."""
        nodes, per_node, labels = self.nodes, self.classes_per_node, items.labels
        sizes = np.bincount(labels, minlength=items.num_classes)  # (classes,)
        present = np.flatnonzero(sizes)
        if per_node > len(present):
            allowed = f"at most {len(present)}, the classes that occur in the data"
            raise ArgumentError("split.classes_per_node", per_node, allowed)

        holds = np.zeros((nodes, len(sizes)), dtype=bool)
        for node in range(nodes):
            # The classes at the min_nodes nodes so far; one with no example left for a further node comes last.
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
        return top_up(owner, nodes, items.min_per_node, generator, labels)


@dataclass(frozen=True, kw_only=True)
class ByColumn(SplitConfig):
    """One node for each value of a column, in sorted order of the values; nothing is drawn."""

    min_nodes = 0
    words = "one for each {column}"

    column: str = ""
    """The name of the column."""

    def divide(self, items: SplitItems, generator: np.random.Generator) -> Ints:
        """By value. To move examples would belie what the column says, so a value of too few is refused."""
        values, which = np.unique(items.column(self.column), return_inverse=True)
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

    def divide(self, items: SplitItems, generator: np.random.Generator) -> Ints:
        """A stable sort, cut into parts whose sizes differ by one at most, or where units end."""
        order, owner = (
            np.argsort(items.numeric_column(self.column), kind="stable"),
            np.empty(len(items), np.int64),
        )
        if items.are_units:
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

    def divide(self, items: SplitItems, generator: np.random.Generator) -> Ints:
        """Positive items in drawn shares, as far as a node can hold them; then negative ones until all nodes
        are as large."""
        positive, sizes, most = items.is_positive, items.sizes, items.sizes.sum() / self.nodes
        wanted = sample_dirichlet_shares(self.alpha, self.nodes, generator) * sizes[positive].sum()
        excess, wanted = (wanted - most).clip(0).sum(), wanted.clip(max=most)
        room = most - wanted
        wanted += excess * room / max(room.sum(), 1e-9)  # what is too much for one goes to those with room
        owner = np.empty(len(items), dtype=np.int64)
        held = -wanted
        _fill_smallest_node(owner, generator.permutation(np.flatnonzero(positive)), sizes, held)
        held += wanted
        _fill_smallest_node(owner, generator.permutation(np.flatnonzero(~positive)), sizes, held)
        return owner


def sample_dirichlet_shares(
    alpha: float, nodes: int, generator: np.random.Generator
) -> npt.NDArray[np.float64]:
    """One draw from Dirichlet(alpha, ..., alpha), (K,) and summing to 1, for any alpha.

    In logarithms, since Gamma(alpha) draws of a small alpha are all 0: Gamma(a) is Gamma(a + 1) times
    U^(1/a), and -log U is exponential.
    """
    logs = np.log(generator.standard_gamma(alpha + 1, nodes)) - generator.standard_exponential(nodes) / alpha
    shares: npt.NDArray[np.float64] = np.exp(logs - logs.max())
    shares /= shares.sum()
    return shares


def _fill_smallest_node(owner: Ints, order: Ints, sizes: Ints, held: npt.NDArray[np.float64]) -> None:
    """Give items one after another to the node that holds least; changes ``owner`` and ``held``."""
    for index in order:
        owner[index] = held.argmin()
        held[owner[index]] += sizes[index]


def hide_labels(
    parts: Sequence[TensorData], findings: int, generator: np.random.Generator
) -> list[TensorData]:
    """Nodes that know only ``findings`` of the labels: the others become -1, unknown, in their data; 0 is
    all.

    The labels are laid on a circle in a drawn order. Node k of K knows those from place ``k C / K`` on, so
    that together they know all C and neighbors share some; a number that does not give this is refused.

    >>> part = TensorData(torch.zeros(1, 1, 4, 4), torch.ones(1, 4, dtype=torch.int64))
    >>> both = hide_labels([part, part], 3, np.random.default_rng(0))
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
