"""Dividing examples: over the nodes of a federation, or into two parts that look alike.

Every way of dividing fills one array ``owner`` (N,), the node of each example. So each example
is at exactly one node and none is lost, whatever the numbers drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from fedstill.data.dataset import Column, check_labels
from fedstill.errors import ArgumentError, DataError

How = Literal["iid", "dirichlet", "shards", "column", "sorted"]
Ints = npt.NDArray[np.int64]

DRAWS = 20  # how often a Dirichlet split is drawn before small nodes are topped up instead
ALPHAS = (1e-12, 1e12)  # beyond these the draws leave double precision, and nothing changes any more
NO_COLUMNS: Mapping[str, Column] = MappingProxyType({})


@dataclass(frozen=True)
class SplitConfig:
    """How the training examples are divided over the nodes."""

    how: How = "dirichlet"
    """iid: at random, equal sizes. dirichlet: each class in shares drawn from Dirichlet(alpha).
    shards: a few classes per node. column: one node per value of a column. sorted: by a numeric
    column, cut into equal parts."""

    nodes: int = 5
    """Number of nodes; with how = column also 0, as many as the column has values."""

    alpha: float = 0.5
    """dirichlet: small is skewed (each class at few nodes), large is even."""

    classes_per_node: int = 2
    """shards: how many classes a node holds."""

    column: str = ""
    """column, sorted: the name of the column."""

    minimum: int = 10
    """The least number of examples a node holds."""


def split(
    targets: torch.Tensor,
    classes: int,
    config: SplitConfig,
    generator: np.random.Generator,
    columns: Mapping[str, Column] = NO_COLUMNS,
) -> tuple[torch.Tensor, ...]:
    """Divide N examples over K nodes.

    * ``iid``: a random division; sizes differ by one at most.
    * ``dirichlet``: for each class, the nodes' shares are drawn from Dirichlet(alpha) (Hsu, Qi
      and Brown 2019, arXiv:1909.06335; used by FedIOD), the last node takes what rounding
      leaves. A draw that leaves a node below ``minimum`` is repeated, a bounded number of
      times; then such nodes are topped up with random examples of the largest nodes.
    * ``shards``: each node holds ``classes_per_node`` classes, each class is at as equal a number
      of nodes as can be and is shared equally among them. A node holds *more* classes where
      nodes * classes_per_node is less than the classes present, and where only examples of other
      classes can bring it to ``minimum``; it holds *fewer* where a class has fewer examples than
      nodes that should hold it.
    * ``column``: one node per distinct value, in sorted order of the values.
    * ``sorted``: a stable sort by the numeric column, cut into parts whose sizes differ by one
      at most.

    Args:
        targets: (N,) int64 class indices; ``iid``, ``column`` and ``sorted`` only count them, so
            any (N, ...) will do.
        classes: number of classes; not all need occur.
        config: how to divide.
        generator: the only source of randomness; ``column`` and ``sorted`` draw nothing.
        columns: by name, (N,) values.

    Returns:
        K tensors of int64 indices into targets, each ascending: a partition of 0..N-1.

    Raises:
        ArgumentError: a setting that is not allowed, or that this data does not allow.
        DataError: no examples, labels outside the classes, a column of another length or of unusable values.

    >>> config = SplitConfig(how="shards", nodes=2, classes_per_node=1, minimum=1)
    >>> parts = split(torch.tensor([0, 1, 0, 1, 1]), 2, config, np.random.default_rng(0))
    >>> sorted(part.tolist() for part in parts)
    [[0, 2], [1, 3, 4]]
    """
    _check_config(config)
    total = len(targets)
    if total == 0:
        raise DataError("split: there are no examples: allowed is one or more")
    if config.how == "column":
        owner, nodes = _by_value(_column(columns, config, total), config)
        return _parts(owner, nodes)

    nodes = config.nodes
    if nodes * config.minimum > total:
        raise ArgumentError(
            "split.nodes",
            nodes,
            f"at most {total // config.minimum}, as there are {total} examples and each node holds "
            f"at least {config.minimum} (split.minimum)",
        )
    if config.how == "iid":
        return _parts(generator.permutation(np.arange(total) % nodes), nodes)
    if config.how == "sorted":
        return _parts(_by_order(_column(columns, config, total), config), nodes)

    check_labels(targets, classes, "split")
    labels: Ints = targets.cpu().numpy()
    if config.how == "shards":
        return _parts(_shards(labels, classes, config, generator), nodes)
    return _parts(_dirichlet(labels, classes, config, generator), nodes)


def stratified(labels: npt.NDArray[Any], count: int, generator: np.random.Generator) -> Ints:
    """``count`` random examples in which each class has the share that it has among all.

    Each class gets its exact share rounded down; what is left goes, one each, to the classes
    with the largest remainders (ties at random).

    Args:
        labels: (N,) class of each example.
        count: 0..N.
        generator: the only source of randomness.

    Returns:
        (count,) ascending indices into labels.

    Raises:
        ArgumentError: count is not in 0..N.

    >>> labels = np.array([0] * 6 + [1] * 3)
    >>> labels[stratified(labels, 3, np.random.default_rng(0))].tolist()
    [0, 0, 1]
    """
    total = len(labels)
    if not 0 <= count <= total:
        raise ArgumentError("count", count, f"a whole number in 0..{total}")
    kinds, sizes = np.unique(labels, return_counts=True)
    quota, remainder = sizes * count // max(total, 1), sizes * count % max(total, 1)
    ranking = np.lexsort((generator.random(len(kinds)), -remainder))
    quota[ranking[: count - quota.sum()]] += 1
    chosen = [
        generator.permutation(np.flatnonzero(labels == kind))[:share]
        for kind, share in zip(kinds, quota, strict=True)
    ]
    return np.sort(np.concatenate([np.empty(0, dtype=np.int64), *chosen]))


def _check_config(config: SplitConfig) -> None:
    low, high = ALPHAS
    if config.how not in get_args(How):
        raise ArgumentError("split.how", config.how, f"one of {', '.join(get_args(How))}")
    least = 0 if config.how == "column" else 1
    if config.nodes < least:
        zero = " (0: as many as the column has values)" if least == 0 else ""
        raise ArgumentError("split.nodes", config.nodes, f"a whole number from {least} up{zero}")
    if config.minimum < 1:
        raise ArgumentError("split.minimum", config.minimum, "a whole number from 1 up")
    if config.how == "dirichlet" and not (math.isfinite(config.alpha) and low <= config.alpha <= high):
        raise ArgumentError("split.alpha", config.alpha, f"a number from {low:g} to {high:g}")
    if config.how == "shards" and config.classes_per_node < 1:
        raise ArgumentError("split.classes_per_node", config.classes_per_node, "a whole number from 1 up")


def _parts(owner: Ints, nodes: int) -> tuple[torch.Tensor, ...]:
    """The examples of each node, from the node of each example."""
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=nodes))
    return tuple(torch.from_numpy(part.copy()) for part in np.split(order, ends[:-1]))


def _dirichlet(labels: Ints, classes: int, config: SplitConfig, generator: np.random.Generator) -> Ints:
    nodes = config.nodes
    owner = np.empty(len(labels), dtype=np.int64)
    for _ in range(DRAWS):
        for label in range(classes):
            examples = generator.permutation(np.flatnonzero(labels == label))
            shares = _dirichlet_shares(config.alpha, nodes, generator)
            ends = np.floor(np.cumsum(shares)[:-1] * len(examples))  # (K-1,): the last node has the rest
            owner[examples] = np.searchsorted(ends, np.arange(len(examples)), side="right")
        if np.bincount(owner, minlength=nodes).min() >= config.minimum:
            return owner
    return _topped_up(owner, nodes, config.minimum, generator)


def _dirichlet_shares(alpha: float, nodes: int, generator: np.random.Generator) -> npt.NDArray[np.float64]:
    """One draw from Dirichlet(alpha, ..., alpha), (K,) and summing to 1, for any alpha.

    The usual way divides Gamma(alpha) draws by their sum, and for small alpha they are all 0.
    In logarithms nothing is lost: Gamma(a) is Gamma(a + 1) times U^(1/a), and -log U is
    exponential.
    """
    logs = np.log(generator.standard_gamma(alpha + 1, nodes)) - generator.standard_exponential(nodes) / alpha
    shares: npt.NDArray[np.float64] = np.exp(logs - logs.max())
    shares /= shares.sum()
    return shares


def _shards(labels: Ints, classes: int, config: SplitConfig, generator: np.random.Generator) -> Ints:
    nodes, per_node = config.nodes, config.classes_per_node
    sizes = np.bincount(labels, minlength=classes)  # (classes,)
    present = np.flatnonzero(sizes)
    if per_node > len(present):
        raise ArgumentError(
            "split.classes_per_node", per_node, f"at most {len(present)}, the classes that occur in the data"
        )

    holds = np.zeros((nodes, classes), dtype=bool)
    for node in range(nodes):
        # The classes at the fewest nodes so far; one with no example left for a further node comes last.
        used = holds.sum(axis=0)[present]
        ranking = np.lexsort((generator.random(len(present)), used, used >= sizes[present]))
        holds[node, present[ranking[:per_node]]] = True
    for label in present[~holds[:, present].any(axis=0)]:  # too few nodes for all classes
        ranking = np.lexsort((generator.random(nodes), holds.sum(axis=1)))
        holds[ranking[0], label] = True

    owner = np.empty(len(labels), dtype=np.int64)
    for label in present:
        holders = generator.permutation(np.flatnonzero(holds[:, label]))
        owner[generator.permutation(np.flatnonzero(labels == label))] = np.resize(holders, sizes[label])
    return _topped_up(owner, nodes, config.minimum, generator, labels)


def _topped_up(
    owner: Ints, nodes: int, minimum: int, generator: np.random.Generator, labels: Ints | None = None
) -> Ints:
    """Move random examples from the largest nodes until each node holds the minimum.

    With ``labels``, examples of classes that the small node holds already are moved first.
    There must be ``nodes * minimum`` examples: then some node can spare one while another
    lacks one, and each step ends the need of the small node or the surplus of a large one.
    """
    owner = owner.copy()
    sizes = np.bincount(owner, minlength=nodes)
    for small in range(nodes):
        while (need := minimum - sizes[small]) > 0:
            spare = np.flatnonzero(sizes[owner] > minimum)  # examples at nodes that can give some
            if labels is not None:
                known = spare[np.isin(labels[spare], labels[owner == small])]
                spare = known if len(known) else spare
            large = owner[spare][np.argmax(sizes[owner[spare]])]
            moved = generator.permutation(spare[owner[spare] == large])[: min(need, sizes[large] - minimum)]
            owner[moved] = small
            sizes[large] -= len(moved)
            sizes[small] += len(moved)
    return owner


def _column(columns: Mapping[str, Column], config: SplitConfig, total: int) -> Column:
    if config.column not in columns:
        known = f"one of {', '.join(sorted(columns))}" if columns else "none, as this data has no columns"
        raise ArgumentError("split.column", config.column, known)
    column = np.asarray(columns[config.column])
    if column.shape != (total,) or column.dtype.kind not in "biufUS":
        raise DataError(
            f"column {config.column!r} is {column.dtype} of shape {column.shape}: "
            f"allowed are numbers or texts, one for each of the {total} examples"
        )
    if column.dtype.kind == "f" and np.isnan(column).any():
        raise DataError(f"column {config.column!r} is NaN for {int(np.isnan(column).sum())} examples")
    return column


def _by_value(column: Column, config: SplitConfig) -> tuple[Ints, int]:
    values, owner, sizes = np.unique(column, return_inverse=True, return_counts=True)
    if config.nodes not in (0, len(values)):
        raise ArgumentError(
            "split.nodes",
            config.nodes,
            f"{len(values)}, the number of values of column {config.column!r}, or 0 for as many as that",
        )
    if sizes.min() < config.minimum:
        # To move examples between sites would belie what the column says.
        rare = f"value {str(values[sizes.argmin()])!r} of column {config.column!r} has {sizes.min()} examples"
        raise ArgumentError("split.minimum", config.minimum, f"at most {sizes.min()}, as {rare}")
    return owner.astype(np.int64), len(values)


def _by_order(column: Column, config: SplitConfig) -> Ints:
    if column.dtype.kind not in "biuf":
        raise ArgumentError("split.column", config.column, "a numeric column when split.how is sorted")
    owner = np.empty(len(column), dtype=np.int64)
    owner[np.argsort(column, kind="stable")] = np.arange(len(column)) * config.nodes // len(column)
    return owner
