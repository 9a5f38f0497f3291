"""Partitioners: how the training examples are divided over the nodes.

A split assigns each item (an example, or a whole unit such as a patient) to one node. So each example is at
exactly one node, and none is lost. Each split is a frozen dataclass, with its options as fields, and one
method :meth:`SplitConfig.divide`.
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
from fedstill.core.name_normalization import normalize_name, parse_number
from fedstill.core.options import PositiveInt
from fedstill.core.registry import Registrable, Registry
from fedstill.data.stratified_sampling import Ints, label_units, require_no_gaps, stratification_labels

NO_COLUMNS: Mapping[str, Column] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class SplitConfig(Registrable, ABC):
    """Base class of splits: how the training examples are divided over the nodes.

    A split is a frozen dataclass; its fields are its options, whose types restrict their values
    (:mod:`fedstill.core.config_tables`). It implements :meth:`divide`.

    Attributes:
        min_nodes: lower bound of ``nodes``; 0 if the data can determine their number.
        about_template: description for reports, with options in braces; empty: name and options.

    Example::

        @dataclass(frozen=True, kw_only=True)
        class RoundRobin(SplitConfig):
            def divide(self, items, generator):
                return np.arange(len(items)) % self.nodes
    """

    section: ClassVar[str] = "split"
    default: ClassVar[str | None] = "dirichlet"
    same_meaning: ClassVar[bool] = True  # options of one name have one meaning in all splits
    min_nodes: ClassVar[int] = 1
    about_template: ClassVar[str] = ""

    nodes: int = 5
    """Number of nodes; with name = column also 0: as many as the column has values."""

    minimum: PositiveInt = 10
    """Minimum number of examples per node."""

    findings: int = 0
    """Findings (multi-label): how many of the labels a node knows; the others are unknown in its data.
    Together, the nodes know all labels, and neighbors share some; 0: every node knows all.
    """

    @abstractmethod
    def divide(self, items: SplitItems, generator: np.random.Generator) -> Ints:
        """Return the node of each item: ``(U,)`` int64 in 0..nodes-1.

        If ``nodes`` is 0, any numbers from 0 are allowed. Afterwards, nodes below ``minimum`` get random
        items of the largest nodes. All randomness must come from the generator.
        """

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(column := getattr(self, "column", None), str):
            object.__setattr__(self, "column", normalize_name(column))

    def distinct_node_values(self, columns: Mapping[str, Column]) -> Sequence[str] | None:
        """Return the column value that each node stands for, in node order; None if nodes have no such value.

        Args:
            columns: ``(N,)`` by name.
        """
        return None

    @property
    def specific_options(self) -> dict[str, Any]:
        """Options that not all splits have."""
        shared = {field.name for field in fields(SplitConfig)}
        names = [option.name for option in fields(self) if option.name not in shared]
        return {name: getattr(self, name) for name in names}

    @property
    def about(self) -> str:
        """Short description for reports."""
        default = ", ".join(
            [self.registered_name, *(f"{name} {value}" for name, value in self.specific_options.items())]
        )
        return self.about_template.format(**self.specific_options) or default


SPLITS: Registry[type[SplitConfig]] = Registry(
    "split",
    {
        "iid": "fedstill.data.partitioners:IID",
        "dirichlet": "fedstill.data.partitioners:Dirichlet",
        "balanced-dirichlet": "fedstill.data.partitioners:BalancedDirichlet",
        "shards": "fedstill.data.partitioners:Shards",
        "column": "fedstill.data.partitioners:ByColumn",
        "sorted": "fedstill.data.partitioners:SortedByColumn",
        "positives": "fedstill.data.partitioners:Positives",
    },
    base=SplitConfig,
)
SplitConfig.registry = SPLITS


class SplitItems:
    """U items to divide: examples, or whole units (such as patients) if some examples belong together.

    Attributes:
        are_units: True if items are units.
        item_ids: item of each of the N examples, ``(N,)`` in 0..U-1.
        sizes: number of examples of each item, ``(U,)``.
        min_per_node: minimum number of items per node: the minimum of examples, or 1 of units.
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
        """Class of each item, ``(U,)``.

        See :func:`fedstill.data.stratified_sampling.stratification_labels` for findings and maps. A unit has
        the rarest class of its examples.

        Raises:
            ArgumentError: the targets are images.
            DataError: labels are outside the classes.
        """
        if self.targets.is_floating_point() and self.targets.ndim != 2:
            expected = "iid, column or sorted, as images have no classes"
            raise ArgumentError("split.name", self.split.registered_name, expected)
        if self.targets.ndim == 1:
            check_labels(self.targets, self._num_classes, "split")
        labels = stratification_labels(self.targets)
        return label_units(labels, self.item_ids) if self.are_units else labels

    @property
    def num_classes(self) -> int:
        """Number of classes of :attr:`labels`, not all of which must occur."""
        are_numbers = self.targets.is_floating_point()
        if self.are_units or are_numbers:
            return int(self.labels.max()) + 1
        return self._num_classes + (self.targets.ndim == 2)

    @cached_property
    def is_positive(self) -> npt.NDArray[np.bool_]:
        """True for items with any finding, ``(U,)``.

        Raises:
            ArgumentError: the targets are not findings.
        """
        if self.targets.ndim != 2 or self.targets.is_floating_point():
            expected = "another one, as only findings are positive or negative"
            raise ArgumentError("split.name", self.split.registered_name, expected)
        any_positive: npt.NDArray[np.bool_] = (
            np.bincount(self.item_ids, weights=(self.targets == 1).any(1).cpu().numpy()) > 0
        )
        return any_positive

    def numeric_column(self, name: str) -> npt.NDArray[Any]:
        """Return a numeric column, ``(U,)``; of a unit the mean. Texts are converted if all are numbers.

        Raises:
            ArgumentError: there is no such column, or it is not numeric.
        """
        column = self._read_column(name)
        if column.dtype.kind == "U" and all(parse_number(cell) is not None for cell in column.tolist()):
            column = column.astype(float)
        if column.dtype.kind not in "biuf":
            raise ArgumentError(
                "split.column", name, f"a numeric column when split.name is {self.split.registered_name}"
            )
        return np.bincount(self.item_ids, weights=column) / self.sizes if self.are_units else column

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return a column of numbers or texts, ``(U,)``.

        Raises:
            ArgumentError: there is no such column.
            DataError: it cannot be used, or has several values for one unit.
        """
        column = self._read_column(name)
        if self.unit is None:
            return column
        first_examples = np.unique(self.item_ids, return_index=True)[1]
        differing = np.flatnonzero(column != column[first_examples][self.item_ids])
        if len(differing):
            unit_name = str(self.unit[differing[0]])
            raise DataError(
                f"split.column {name!r} has several values for the examples of {unit_name!r} (expected one "
                "value per patient; if hospitals number patients separately, prefix patient by hospital)"
            )
        return column[first_examples]

    def _read_column(self, name: str) -> npt.NDArray[Any]:
        if name not in self.columns:
            expected = f"one of {', '.join(sorted(self.columns))}"
            no_columns = "none, as this data has no columns (a folder's are in its cases.csv)"
            raise ArgumentError("split.column", name, expected if self.columns else no_columns)
        column = np.asarray(self.columns[name])
        if column.shape != self.item_ids.shape or column.dtype.kind not in "biufUS":
            raise DataError(
                f"column {name!r} is {column.dtype} of shape {column.shape} "
                f"(expected numbers or texts, one for each of the {len(self.item_ids)} examples)"
            )
        require_no_gaps(name, column)
        return column


# --- dividing -----------------------------------------------------------------------------------------------


def split(
    targets: torch.Tensor,
    classes: int,
    config: SplitConfig,
    generator: np.random.Generator,
    columns: Mapping[str, Column] = NO_COLUMNS,
    unit: Column | None = None,
) -> tuple[torch.Tensor, ...]:
    """Divide N examples over K nodes, keeping units whole.

    Args:
        targets: class indices (N,) int64, findings (N, C), maps (N, H, W), or float images.
        classes: number of classes, not all of which must occur.
        config: the split. A node below its minimum gets random items of the largest nodes.
        generator: the only source of randomness.
        columns: metadata (N,) by name.
        unit: unit of each example (such as its patient), (N,); no unit is divided between nodes. None: no
            units.

    Returns:
        K tensors of ascending int64 indices into targets: a partition of 0..N-1.

    Raises:
        ArgumentError: an option has an invalid value, or one that these data do not allow.
        DataError: there are no examples, labels are outside the classes, or a column cannot be used.

    >>> from fedstill.data.partitioners import Shards
    >>> config = Shards(nodes=2, classes_per_node=1, minimum=1)
    >>> parts = split(torch.tensor([0, 1, 0, 1, 1]), 2, config, np.random.default_rng(0))
    >>> sorted(part.tolist() for part in parts)
    [[0, 2], [1, 3, 4]]
    """
    count = len(targets)
    if count == 0:
        raise DataError("split: there are no examples (expected one or more)")
    # Not checked in the constructor, where options of another split (such as 0 nodes) may still be replaced.
    if config.nodes < config.min_nodes:
        raise ArgumentError("split.nodes", config.nodes, f"an integer from {config.min_nodes} up")
    if config.min_nodes:
        _check_node_sizes(config.nodes, config.minimum, count)
    items = SplitItems(targets, classes, columns, unit, config)
    if config.nodes > len(items):
        expected = f"at most {len(items)}, the number of patients or slides, which are not divided"
        raise ArgumentError("split.nodes", config.nodes, expected)
    assignment = config.divide(items, generator)
    _check_assignment(assignment, len(items), config)
    nodes = config.nodes or int(assignment.max()) + 1
    _check_node_sizes(nodes, config.minimum, count)
    if items.are_units:
        assignment = _top_up_units(assignment, nodes, items.sizes, config.minimum, generator)[items.item_ids]
    else:
        assignment = top_up(assignment, nodes, config.minimum, generator)
    sorted_examples = np.argsort(assignment, kind="stable")
    boundaries = np.cumsum(np.bincount(assignment, minlength=nodes))
    return tuple(torch.from_numpy(part.copy()) for part in np.split(sorted_examples, boundaries[:-1]))


def _check_node_sizes(nodes: int, minimum: int, count: int) -> None:
    if minimum > count:
        raise ArgumentError("split.minimum", minimum, f"at most {count}, as there are {count} examples")
    if nodes * minimum > count:
        raise ArgumentError(
            "split.nodes",
            nodes,
            f"at most {count // minimum}, as there are {count} examples and each node holds "
            f"at least {minimum} (split.minimum)",
        )


def _check_assignment(assignment: Any, count: int, config: SplitConfig) -> None:
    is_valid = (
        isinstance(assignment, np.ndarray) and assignment.shape == (count,) and assignment.dtype.kind in "iu"
    )
    if not is_valid or assignment.min() < 0 or (config.nodes and assignment.max() >= config.nodes):
        node_range = f"0..{config.nodes - 1}" if config.nodes else "0 up"
        expected = f"one whose divide gives {count} integers in {node_range}, the node of each item"
        raise ArgumentError("split.name", config.registered_name, expected)


def top_up(
    assignment: Ints, nodes: int, minimum: int, generator: np.random.Generator, labels: Ints | None = None
) -> Ints:
    """Move random items from the largest nodes until each node has the minimum number of items.

    With ``labels``, items of classes that the small node has already are moved first.
    """
    assignment = assignment.copy()
    sizes = np.bincount(assignment, minlength=nodes)
    for small_node in range(nodes):
        while (missing := minimum - sizes[small_node]) > 0:
            movable = np.flatnonzero(sizes[assignment] > minimum)  # items of nodes above the minimum
            if labels is not None:
                same_class = movable[np.isin(labels[movable], labels[assignment == small_node])]
                movable = same_class if len(same_class) else movable
            large_node = assignment[movable][np.argmax(sizes[assignment[movable]])]
            moved = generator.permutation(movable[assignment[movable] == large_node])[
                : min(missing, sizes[large_node] - minimum)
            ]
            assignment[moved] = small_node
            sizes[large_node] -= len(moved)
            sizes[small_node] += len(moved)
    return assignment


def _top_up_units(
    assignment: Ints, nodes: int, sizes: Ints, minimum: int, generator: np.random.Generator
) -> Ints:
    """Move random units from the largest nodes until each node has the minimum number of examples."""
    assignment = assignment.copy()
    counts = np.bincount(assignment, weights=sizes, minlength=nodes)
    while counts.min() < minimum:
        small_node, movable = counts.argmin(), counts[assignment] - sizes >= minimum
        if not movable.any():
            expected = f"less, as a node cannot get {minimum} examples in whole units"
            raise ArgumentError("split.minimum", minimum, expected)
        large_node = assignment[movable][counts[assignment[movable]].argmax()]
        moved = generator.choice(np.flatnonzero(movable & (assignment == large_node)))
        counts[large_node] -= sizes[moved]
        counts[small_node] += sizes[moved]
        assignment[moved] = small_node
    return assignment


def hide_labels(
    parts: Sequence[TensorData], findings: int, generator: np.random.Generator
) -> list[TensorData]:
    """Let each node know only ``findings`` labels; the others become -1 (unknown) in its data. 0: all.

    Labels are put on a circle in random order. Node k of K knows those from position ``k C / K`` on, so that
    together the nodes know all C labels, and neighbors share some.

    Raises:
        ArgumentError: the targets are not findings, or ``findings`` is too small or too large.

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
    min_findings = min(math.ceil(labels / nodes) + 1, labels)
    if not min_findings <= findings <= labels:
        expected = f"from {min_findings} to {labels}" if min_findings < labels else str(labels)
        raise ArgumentError(
            "split.findings",
            findings,
            f"{expected}, so that {nodes} nodes know all {labels} labels and overlap; or set "
            "split.findings 0 (all)",
        )
    label_order = generator.permutation(labels)
    masked = []
    for node, part in enumerate(parts):
        positions = (node * labels // nodes + np.arange(findings)) % labels
        hidden = torch.from_numpy(np.setdiff1d(label_order, label_order[positions]))
        targets = part.targets.clone()
        targets[:, hidden] = -1
        masked.append(replace(part, targets=targets))
    return masked


# --- the splits ---------------------------------------------------------------------------------------------

# Beyond these, samples leave double precision and no longer change.
Alpha = Annotated[float, Interval(ge=1e-12, le=1e12), "a number from 1e-12 to 1e+12"]
MAX_DRAWS = 20  # of a Dirichlet split, before small nodes are topped up instead


@dataclass(frozen=True, kw_only=True)
class IID(SplitConfig):
    """Random split: sizes differ by at most one example, or are as equal as whole units allow.

    >>> labels = torch.arange(300) % 3
    >>> parts = split(labels, 3, IID(nodes=3), np.random.default_rng(0))
    >>> [torch.bincount(labels[part], minlength=3).tolist() for part in parts]
    [[33, 34, 33], [33, 32, 35], [34, 34, 32]]
    """

    def divide(self, items: SplitItems, generator: np.random.Generator) -> Ints:
        """Assign items at random; each unit goes to the node with the fewest examples."""
        if not items.are_units:
            return generator.permutation(np.arange(len(items)) % self.nodes)
        assignment = np.empty(len(items), dtype=np.int64)
        _fill_smallest_node(assignment, generator.permutation(len(items)), items.sizes, np.zeros(self.nodes))
        return assignment


@dataclass(frozen=True, kw_only=True)
class Dirichlet(SplitConfig):
    """Label skew: each class is divided in shares sampled from Dirichlet(alpha).

    Source: Hsu, Qi and Brown 2019, arXiv:1909.06335; used by FedIOD.

    >>> labels = torch.arange(300) % 3
    >>> parts = split(labels, 3, Dirichlet(nodes=3, alpha=0.1), np.random.default_rng(0))
    >>> [torch.bincount(labels[part], minlength=3).tolist() for part in parts]
    [[0, 0, 13], [91, 100, 0], [9, 0, 87]]
    """

    about_template = "Dirichlet alpha {alpha:g}"

    alpha: Alpha = 0.5
    """Small: skewed, each class at few nodes; large: even."""

    def divide(self, items: SplitItems, generator: np.random.Generator) -> Ints:
        """Assign each class by sampled shares; the last node gets the remainder.

        Sampling is repeated, up to MAX_DRAWS times, while a node is too small.
        """
        nodes, labels = self.nodes, items.labels
        assignment = np.empty(len(items), dtype=np.int64)
        for _ in range(MAX_DRAWS):
            for label in range(items.num_classes):
                members = generator.permutation(np.flatnonzero(labels == label))
                shares = sample_dirichlet_shares(self.alpha, nodes, generator)
                # (K-1,): the last node gets the rest
                boundaries = np.floor(np.cumsum(shares)[:-1] * len(members))
                assignment[members] = np.searchsorted(boundaries, np.arange(len(members)), side="right")
            if np.bincount(assignment, minlength=nodes).min() >= items.min_per_node:
                return assignment
        return top_up(assignment, nodes, items.min_per_node, generator)


@dataclass(frozen=True, kw_only=True)
class BalancedDirichlet(SplitConfig):
    """Nodes of equal sizes, whose class shares are sampled from Dirichlet(alpha).

    Source: FedDyn (Acar et al., ICLR 2021).

    >>> labels = torch.arange(300) % 3
    >>> parts = split(labels, 3, BalancedDirichlet(nodes=3, alpha=0.1), np.random.default_rng(0))
    >>> [torch.bincount(labels[part], minlength=3).tolist() for part in parts]
    [[48, 4, 48], [0, 96, 4], [52, 0, 48]]
    """

    about_template = "equal sizes, Dirichlet alpha {alpha:g}"

    alpha: Alpha = 0.5
    """Small: skewed, few classes at each node; large: even."""

    def divide(self, items: SplitItems, generator: np.random.Generator) -> Ints:
        """Let the smallest node take an item of a remaining class, sampled by its shares."""
        order = generator.permutation(len(items))
        items_by_label = [order[items.labels[order] == label].tolist() for label in range(items.num_classes)]
        remaining = np.array([len(class_items) for class_items in items_by_label])  # (classes,)
        shares = [
            sample_dirichlet_shares(self.alpha, items.num_classes, generator) for _ in range(self.nodes)
        ]
        counts = np.zeros(self.nodes)
        assignment = np.empty(len(items), dtype=np.int64)
        for uniform in generator.random(len(items)):
            node = counts.argmin()
            weights = shares[node] * (remaining > 0)
            # If none of its classes remain, it takes any other class.
            cumulative = np.cumsum(weights if weights.any() else remaining)
            label = np.searchsorted(cumulative / cumulative[-1], uniform, side="right")
            item = items_by_label[label].pop()
            remaining[label] -= 1
            assignment[item] = node
            counts[node] += items.sizes[item]
        return assignment


@dataclass(frozen=True, kw_only=True)
class Shards(SplitConfig):
    """A few classes per node; each class is at about equally many nodes and shared equally by them.

    A node has *more* classes if nodes * classes_per_node is less than the number of classes, or if only other
    classes can bring it to ``minimum``. It has *fewer* if a class has fewer examples than nodes that should
    hold it.

    >>> labels = torch.arange(300) % 3
    >>> parts = split(labels, 3, Shards(nodes=3, classes_per_node=1), np.random.default_rng(0))
    >>> [torch.bincount(labels[part], minlength=3).tolist() for part in parts]
    [[0, 0, 100], [100, 0, 0], [0, 100, 0]]
    """

    about_template = "{classes_per_node} classes a node"

    classes_per_node: PositiveInt = 2
    """Number of classes per node."""

    def divide(self, items: SplitItems, generator: np.random.Generator) -> Ints:
        """Select the classes of each node, then divide the examples of each class."""
        nodes, per_node, labels = self.nodes, self.classes_per_node, items.labels
        sizes = np.bincount(labels, minlength=items.num_classes)  # (classes,)
        present = np.flatnonzero(sizes)
        if per_node > len(present):
            expected = f"at most {len(present)}, the classes that occur in the data"
            raise ArgumentError("split.classes_per_node", per_node, expected)

        has_class = np.zeros((nodes, len(sizes)), dtype=bool)
        for node in range(nodes):
            # Classes at the fewest nodes so far come first, classes without further examples last.
            node_counts = has_class.sum(axis=0)[present]
            order = np.lexsort((generator.random(len(present)), node_counts, node_counts >= sizes[present]))
            has_class[node, present[order[:per_node]]] = True
        for label in present[~has_class[:, present].any(axis=0)]:  # too few nodes for all classes
            order = np.lexsort((generator.random(nodes), has_class.sum(axis=1)))
            has_class[order[0], label] = True

        assignment = np.empty(len(items), dtype=np.int64)
        for label in present:
            holders = generator.permutation(np.flatnonzero(has_class[:, label]))
            assignment[generator.permutation(np.flatnonzero(labels == label))] = np.resize(
                holders, sizes[label]
            )
        return top_up(assignment, nodes, items.min_per_node, generator, labels)


@dataclass(frozen=True, kw_only=True)
class ByColumn(SplitConfig):
    """One node per value of a metadata column, in sorted order of the values; not random.

    >>> site = np.array(["a", "b", "a", "c"])
    >>> config = ByColumn(nodes=0, column="site", minimum=1)
    >>> parts = split(torch.zeros(4, dtype=torch.int64), 1, config, np.random.default_rng(0), {"site": site})
    >>> [part.tolist() for part in parts]
    [[0, 2], [1], [3]]
    """

    min_nodes = 0
    about_template = "one for each {column}"

    column: str = ""
    """Name of the column."""

    def divide(self, items: SplitItems, generator: np.random.Generator) -> Ints:
        """Assign items by value.

        Values with too few examples are refused, as moving examples would falsify the column.
        """
        values, value_index = np.unique(items.column(self.column), return_inverse=True)
        assignment: Ints = value_index.astype(np.int64)
        sizes = np.bincount(assignment, weights=items.sizes).astype(np.int64)
        if self.nodes not in (0, len(values)):
            expected = f"{len(values)}, the number of values of column {self.column!r}"
            raise ArgumentError("split.nodes", self.nodes, f"{expected}, or 0 for as many as that")
        if sizes.min() < self.minimum:
            smallest = sizes.min()
            reason = (
                f"value {str(values[sizes.argmin()])!r} of column {self.column!r} has {smallest} examples"
            )
            raise ArgumentError("split.minimum", self.minimum, f"at most {smallest}, as {reason}")
        return assignment

    def distinct_node_values(self, columns: Mapping[str, Column]) -> Sequence[str]:
        """Return the values of the column, sorted."""
        return [str(value) for value in np.unique(columns[self.column]).tolist()]


@dataclass(frozen=True, kw_only=True)
class SortedByColumn(SplitConfig):
    """Equal parts of the examples sorted by a numeric column (units by their mean); not random.

    >>> age = np.array([70, 20, 50, 30])
    >>> config = SortedByColumn(nodes=2, column="age", minimum=1)
    >>> parts = split(torch.zeros(4, dtype=torch.int64), 1, config, np.random.default_rng(0), {"age": age})
    >>> [part.tolist() for part in parts]
    [[1, 3], [0, 2]]
    """

    about_template = "by {column}"

    column: str = ""
    """Name of the column."""

    def divide(self, items: SplitItems, generator: np.random.Generator) -> Ints:
        """Sort items (stable), and cut them into equal parts.

        Sizes differ by at most one, or parts end at the ends of units.
        """
        order = np.argsort(items.numeric_column(self.column), kind="stable")
        assignment = np.empty(len(items), np.int64)
        if items.are_units:
            sizes = items.sizes[order]
            midpoints = np.cumsum(sizes) - sizes / 2
            assignment[order] = (midpoints * self.nodes / sizes.sum()).astype(np.int64)
        else:
            assignment[order] = np.arange(len(items)) * self.nodes // len(items)
        return assignment


@dataclass(frozen=True, kw_only=True)
class Positives(SplitConfig):
    """Findings: nodes of equal sizes; examples with findings in shares from Dirichlet(alpha).

    Source: FedKD, Table 4.

    >>> findings = (torch.arange(300)[:, None] % torch.tensor([3, 5]) == 0).long()
    >>> parts = split(findings, 2, Positives(nodes=3), np.random.default_rng(0))
    >>> [(len(part), int(findings[part].any(1).sum())) for part in parts]
    [(100, 61), (100, 79), (100, 0)]
    """

    alpha: Alpha = 0.5
    """Small: skewed, findings at few nodes; large: even."""

    def divide(self, items: SplitItems, generator: np.random.Generator) -> Ints:
        """Assign positive items by sampled shares, up to the size of a node; then fill up with negative
        items.
        """
        positive, sizes, capacity = items.is_positive, items.sizes, items.sizes.sum() / self.nodes
        positives = sample_dirichlet_shares(self.alpha, self.nodes, generator) * sizes[positive].sum()
        surplus, positives = (positives - capacity).clip(0).sum(), positives.clip(max=capacity)
        spare = capacity - positives
        positives += surplus * spare / max(spare.sum(), 1e-9)  # the surplus goes to nodes with spare capacity
        assignment = np.empty(len(items), dtype=np.int64)
        counts = -positives
        _fill_smallest_node(assignment, generator.permutation(np.flatnonzero(positive)), sizes, counts)
        counts += positives
        _fill_smallest_node(assignment, generator.permutation(np.flatnonzero(~positive)), sizes, counts)
        return assignment


def sample_dirichlet_shares(
    alpha: float, nodes: int, generator: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Sample from Dirichlet(alpha, ..., alpha): ``(K,)``, summing to 1, for any alpha.

    Computed with logarithms, since Gamma(alpha) samples of a small alpha underflow to 0: Gamma(a) is Gamma(a
    + 1) times U^(1/a), and -log U is exponential.
    """
    logs = np.log(generator.standard_gamma(alpha + 1, nodes)) - generator.standard_exponential(nodes) / alpha
    shares: npt.NDArray[np.float64] = np.exp(logs - logs.max())
    shares /= shares.sum()
    return shares


def _fill_smallest_node(assignment: Ints, items: Ints, sizes: Ints, counts: npt.NDArray[np.float64]) -> None:
    """Give items one by one to the smallest node; changes ``assignment`` and ``counts``."""
    for index in items:
        assignment[index] = counts.argmin()
        counts[assignment[index]] += sizes[index]
