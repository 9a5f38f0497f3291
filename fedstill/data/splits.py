"""Dividing examples: over the nodes of a federation, or into two parts that look alike.

Every way of dividing fills one array ``owner`` (N,), the node of each example. So each example
is at exactly one node and none is lost, whatever the numbers drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch

from fedstill.core.dataset import Column, check_labels
from fedstill.core.errors import ArgumentError, DataError
from fedstill.data.concealed import conceal
from fedstill.data.config import How, SplitConfig
from fedstill.data.draws import dirichlet, level, positives, shards, whole_topped_up
from fedstill.data.units import Ints, labels_of, unit_labels

__all__ = ["Ints", "SplitConfig", "conceal", "split", "stratified"]


ALPHAS = (1e-12, 1e12)  # beyond these the draws leave double precision, and nothing changes any more
NO_COLUMNS: Mapping[str, Column] = MappingProxyType({})


def split(
    targets: torch.Tensor,
    classes: int,
    config: SplitConfig,
    generator: np.random.Generator,
    columns: Mapping[str, Column] = NO_COLUMNS,
    unit: Column | None = None,
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
    * ``positives``: for findings, sizes are equal and the examples that have a finding are shared out by
      one draw from Dirichlet(alpha) (FedKD, Table 4), as far as a node can hold them.

    Where examples belong together (``unit``), whole units are divided: sizes are then as equal as units
    allow, ``sorted`` goes by a unit's mean, and a unit's class is the rarest one of its examples.

    Args:
        targets: (N,) int64 class indices; findings and maps are divided by their rarest finding and largest
            class (:func:`fedstill.data.units.labels_of`).
        classes: number of classes; not all need occur.
        config: how to divide.
        generator: the only source of randomness; ``column`` and ``sorted`` draw nothing.
        columns: by name, (N,) values.
        unit: of which patient, say, each example is, (N,): those of one are never at two nodes.

    Returns:
        K tensors of int64 indices into targets, each ascending: a partition of 0..N-1.

    Raises:
        ArgumentError: a setting that is not allowed, or that this data does not allow.
        DataError: no examples, labels outside the classes, a column of another length or of unusable values,
            a column whose values part a unit.

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
        _check_whole(owner, unit, config)
        return _parts(owner, nodes)

    nodes = config.nodes
    if nodes * config.minimum > total:
        raise ArgumentError(
            "split.nodes",
            nodes,
            f"at most {total // config.minimum}, as there are {total} examples and each node holds "
            f"at least {config.minimum} (split.minimum)",
        )
    if config.how in ("dirichlet", "shards") and targets.is_floating_point():
        raise ArgumentError("split.how", config.how, "iid, column or sorted, as images have no classes")
    if config.how == "positives" and targets.ndim != 2:
        raise ArgumentError("split.how", config.how, "another one, as only findings are positive or negative")
    if unit is not None:
        return _parts(_of_units(targets, config, generator, columns, unit), nodes)
    if config.how == "iid":
        return _parts(generator.permutation(np.arange(total) % nodes), nodes)
    if config.how == "sorted":
        return _parts(_by_order(_column(columns, config, total), config), nodes)
    if config.how == "positives":
        ones = np.ones(total, dtype=np.int64)
        return _parts(positives((targets == 1).any(1).cpu().numpy(), ones, config, generator), nodes)

    if targets.ndim == 1:
        check_labels(targets, classes, "split")
    labels, classes = labels_of(targets), classes + (targets.ndim == 2)
    if config.how == "shards":
        return _parts(shards(labels, classes, config, generator), nodes)
    return _parts(dirichlet(labels, classes, config, generator), nodes)


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
        only = "is for split.how = column only" if least else "as many as the column has values"
        raise ArgumentError("split.nodes", config.nodes, f"a whole number from {least} up (0: {only})")
    if config.minimum < 1:
        raise ArgumentError("split.minimum", config.minimum, "a whole number from 1 up")
    drawn = config.how in ("dirichlet", "positives")
    if drawn and not (math.isfinite(config.alpha) and low <= config.alpha <= high):
        raise ArgumentError("split.alpha", config.alpha, f"a number from {low:g} to {high:g}")
    if config.how == "shards" and config.classes_per_node < 1:
        raise ArgumentError("split.classes_per_node", config.classes_per_node, "a whole number from 1 up")


def _parts(owner: Ints, nodes: int) -> tuple[torch.Tensor, ...]:
    """The examples of each node, from the node of each example."""
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=nodes))
    return tuple(torch.from_numpy(part.copy()) for part in np.split(order, ends[:-1]))


# --- whole units ------------------------------------------------------------------------------------


def _check_whole(owner: Ints, unit: Column | None, config: SplitConfig) -> None:
    if unit is None:
        return
    of = np.unique(unit, return_inverse=True)[1]
    pairs = np.unique(np.stack([of, owner]), axis=1)[0]  # each unit once for each node that has some of it
    parted = pairs[1:][pairs[1:] == pairs[:-1]]
    if len(parted):
        name = str(unit[of == parted[0]][0])
        raise DataError(f"split.column {config.column!r}: its values part the examples of {name!r}")


def _of_units(
    targets: torch.Tensor,
    config: SplitConfig,
    generator: np.random.Generator,
    columns: Mapping[str, Column],
    unit: Column,
) -> Ints:
    """The node of each example, the same for all of a unit: ``(N,)``."""
    of, sizes = np.unique(unit, return_inverse=True, return_counts=True)[1:]  # (N,), (U,)
    units, nodes = len(sizes), config.nodes
    owner: Ints = np.empty(units, dtype=np.int64)
    if nodes > units:
        raise ArgumentError(
            "split.nodes", nodes, f"at most {units}, the patients or pictures, which are not parted"
        )
    if config.how == "iid":
        level(owner, generator.permutation(units), sizes, np.zeros(nodes))
    elif config.how == "sorted":
        column = _column(columns, config, len(of))
        _by_order(column, config)  # refuses texts
        order = np.argsort(np.bincount(of, weights=column) / sizes, kind="stable")
        middles = np.cumsum(sizes[order]) - sizes[order] / 2
        owner[order] = (middles * nodes / sizes.sum()).astype(np.int64)
    elif config.how == "positives":
        some = np.bincount(of, weights=(targets == 1).any(1).cpu().numpy()) > 0
        owner = positives(some, sizes, config, generator)
    else:
        labels = unit_labels(labels_of(targets), of)
        one = replace(config, minimum=1)
        divide = shards if config.how == "shards" else dirichlet
        owner = divide(labels, int(labels.max()) + 1, one, generator)
    return whole_topped_up(owner, sizes, config, generator)[of]


# --- columns ----------------------------------------------------------------------------------------


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
