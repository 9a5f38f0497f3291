"""Stratified sampling of examples, and of units that are never divided, such as the slices of a patient.

A *unit* is a value of a metadata column. Units have labels of their own, so that sampling keeps shares. As
*groups* of a node's data, units are protected as one record, and their sizes are limited.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedstill.core.dataset import Column, TensorData
from fedstill.core.errors import ArgumentError, DataError
from fedstill.core.name_normalization import (
    similar_name_pairs,
    spelling_difference,
    strip_decimal_zeros,
    to_name,
)
from fedstill.core.seeds import derive
from fedstill.core.table_schema import EMPTY_CELLS

Ints = npt.NDArray[np.int64]
QUANTILES = 5  # strata of numbers, by size


def stratification_labels(targets: torch.Tensor) -> Ints:
    """Return one label ``(N,)`` per example, by which examples are sampled or divided.

    Classes are their own labels. Findings ``(N, C)`` give 1 + the rarest finding of the example, 0 if it has
    none (FedKD: "the most infrequent one"). Maps ``(N, H, W)`` give the largest class above 0. Numbers ``(N,
    1)`` give their quintile. Images give 0.

    >>> stratification_labels(torch.tensor([[1, 0, 0], [1, 0, 1], [0, -1, 0]])).tolist()
    [1, 3, 0]
    >>> stratification_labels(torch.tensor([[[0, 2], [0, 2]], [[0, 0], [0, 0]]])).tolist()
    [2, 0]
    >>> stratification_labels(torch.tensor([[5.0], [1.0], [9.0], [2.0], [7.0], [3.0]])).tolist()
    [2, 0, 4, 0, 3, 1]
    """
    if targets.is_floating_point():
        if targets.ndim == 2:
            rank = targets[:, 0].argsort(stable=True).argsort(stable=True)
            fifths: Ints = (rank * QUANTILES // len(targets)).cpu().numpy()
            return fifths
        return np.zeros(len(targets), dtype=np.int64)
    if targets.ndim == 1:
        labels: Ints = targets.cpu().numpy()
        return labels
    if targets.ndim == 2:
        positive = (targets == 1).cpu().numpy()  # (N, C)
        rarity = np.argsort(positive.sum(0), kind="stable")  # rarest first
        sorted_positive = positive[:, rarity]
        return np.where(sorted_positive.any(1), rarity[sorted_positive.argmax(1)] + 1, 0).astype(np.int64)
    areas = torch.stack(
        [(targets == k).flatten(1).sum(1) for k in range(1, int(targets.max()) + 1)]
        or [torch.zeros(len(targets), dtype=torch.int64)]
    )  # (classes above 0, N)
    largest_area, class_index = areas.max(0)
    largest: Ints = torch.where(largest_area > 0, class_index + 1, 0).cpu().numpy()
    return largest


def label_units(labels: Ints, unit_ids: Ints) -> Ints:
    """Return a label per unit: the label of its examples that is rarest among all examples.

    >>> label_units(np.array([0, 0, 0, 1, 0]), np.array([0, 0, 1, 1, 2])).tolist()  # labels, and units from 0
    [0, 1, 0]
    """
    values, inverse, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.lexsort((values[inverse], sizes[inverse], unit_ids))  # by unit, the rarest label first
    first = np.unique(unit_ids[order], return_index=True)[1]
    chosen: Ints = labels[order[first]]
    return chosen


def add_site_strata(labels: Ints, columns: Mapping[str, Column]) -> Ints:
    """Return labels ``(N,)`` that also distinguish the column ``site``, if there is one."""
    if "site" not in columns:
        return labels
    sites = np.unique(columns["site"], return_inverse=True)[1]
    combined: Ints = np.unique(np.stack([labels, sites]), axis=1, return_inverse=True)[1].reshape(-1)
    return combined


def stratified_sample(labels: npt.NDArray[Any], count: int, generator: np.random.Generator) -> Ints:
    """Sample ``count`` of N examples with the class shares of all; return ascending indices.

    Each class gets its exact share, rounded down. The rest goes to the classes with the largest remainders
    (ties at random).

    Args:
        labels: ``(N,)``.
        count: 0 to N.

    >>> labels = np.array([0] * 6 + [1] * 3)
    >>> labels[stratified_sample(labels, 3, np.random.default_rng(0))].tolist()
    [0, 0, 1]
    """
    total = len(labels)
    classes, sizes = np.unique(labels, return_counts=True)
    counts, remainder = sizes * count // max(total, 1), sizes * count % max(total, 1)
    ranking = np.lexsort((generator.random(len(classes)), -remainder))
    counts[ranking[: count - counts.sum()]] += 1
    chosen = [
        generator.permutation(np.flatnonzero(labels == each_class))[:share]
        for each_class, share in zip(classes, counts, strict=True)
    ]
    return np.sort(np.concatenate([np.empty(0, dtype=np.int64), *chosen]))


def sample_whole_units(
    labels: npt.NDArray[Any], units: Column, count: int, generator: np.random.Generator
) -> Ints:
    """Sample whole units with at most ``count`` examples in total, at least one unit; return indices.

    Units are put in an order of which each prefix has nearly the label shares of all units, and taken while
    they fit.

    Args:
        labels: ``(N,)``.
        units: unit of each example, ``(N,)``.

    >>> patients = np.array(["a", "a", "b", "b", "b", "c"])
    >>> rows = sample_whole_units(np.zeros(6, dtype=int), patients, 4, np.random.default_rng(0))
    >>> taken = patients[rows].tolist()
    >>> all(taken.count(name) in (0, list(patients).count(name)) for name in "abc") and 1 <= len(taken) <= 4
    True
    """
    unit_ids, sizes = np.unique(units, return_inverse=True, return_counts=True)[1:]
    unit_labels = label_units(labels, unit_ids)  # (U,)
    position = np.empty(len(sizes))
    for label in np.unique(unit_labels):
        members = generator.permutation(np.flatnonzero(unit_labels == label))
        position[members] = (np.arange(len(members)) + generator.random()) / len(members)
    order = np.argsort(position, kind="stable")
    count_that_fits = max(int(np.searchsorted(np.cumsum(sizes[order]), count, side="right")), 1)
    return np.flatnonzero(np.isin(unit_ids, order[:count_that_fits]))


def sample_units_per_site(
    labels: Ints, units: Column, sites: Column | None, share: float, generator: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Sample a share of the units of each site, at least one and never all; return a mask ``(N,)``.

    Within a site, labels keep their shares as far as whole units allow. A unit of several sites is sampled
    with all its examples, and counts at each of them. Without ``sites`` there is one site.

    Raises:
        ArgumentError: a site has only one unit.
    """
    site_of = np.zeros(len(labels), dtype=np.int64) if sites is None else sites
    sampled = units[:0]
    for site in np.unique(site_of):
        rows = np.flatnonzero(site_of == site)
        names, unit_ids = np.unique(units[rows], return_inverse=True)
        if len(names) < 2:
            raise ArgumentError("data.sites", str(site), "sites of two or more patients or slides each")
        already_sampled = np.isin(names, sampled)  # at a previous site
        missing = min(max(round(len(names) * share), 1), len(names) - 1) - int(already_sampled.sum())
        if missing > 0:
            candidates = np.flatnonzero(~already_sampled)
            candidate_labels = label_units(labels[rows], unit_ids)[candidates]
            chosen_candidates = candidates[
                sample_whole_units(candidate_labels, np.arange(len(candidates)), missing, generator)
            ]
            sampled = np.concatenate([sampled, names[chosen_candidates]])
    is_sampled: npt.NDArray[np.bool_] = np.isin(units, sampled)
    return is_sampled


def require_no_gaps(name: str, column: Column, source: str = "") -> None:
    """Check that a metadata column has no empty cells, which would count as one value.

    Raises:
        DataError: names the first example without a value.

    >>> require_no_gaps("patient", np.array(["a", ""]))
    Traceback (most recent call last):
    ...
    fedstill.core.errors.DataError: column 'patient' is empty for 1 of 2 examples, the first is example 1
    """
    if column.dtype.kind == "f":
        is_empty = np.isnan(column)
    else:
        is_empty = np.array(
            [to_name(name).lower() in EMPTY_CELLS for name in column.tolist()], dtype=np.bool_
        )
    if is_empty.any():
        problem = f"column {name!r} is empty for {int(is_empty.sum())} of {len(column)} examples"
        message = f"{source}: {problem}" if source else problem
        raise DataError(f"{message}, the first is example {int(np.flatnonzero(is_empty)[0])}")


def require_unit_names(name: str, column: Column, source: str = "") -> None:
    """Check that a column of units (such as patients) has no gaps and no two spellings of one name.

    Names that differ only by case, width or number format would count as two people, which would corrupt the
    test split and the privacy guarantee.

    Raises:
        DataError: see :func:`require_no_gaps`; or names two such spellings.

    >>> require_unit_names("patient", np.array(["P1", "p1", "p2"]))
    Traceback (most recent call last):
    ...
    fedstill.core.errors.DataError: column 'patient' has 'P1' and 'p1', which differ by case only ...
    """
    require_no_gaps(name, column, source)
    if column.dtype.kind in "biuf":
        return
    if pairs := similar_name_pairs(to_name(value) for value in np.unique(column).tolist()):
        first, second = pairs[0]
        problem = f"column {name!r} has {first!a} and {second!a}"
        expected = "one spelling per name, and clearly different names"
        message = f"{source}: {problem}" if source else problem
        raise DataError(
            f"{message}, which differ by {spelling_difference(first, second)} only (expected {expected})"
        )


def reject_misspelled_columns(columns: Iterable[str], source: str) -> None:
    """Refuse columns whose name is nearly ``patient`` or ``split``, as they would be ignored.

    Raises:
        DataError: a name differs from these only by case or width.
    """
    for column in columns:
        for known in ("patient", "split"):
            if kind := spelling_difference(column, known):
                problem = f"column {column!a} differs from {known!r} by {kind} only, and would be ignored"
                raise DataError(f"{source}: {problem} (expected {known!r}, or another name)")


def hash_groups(names: Iterable[object]) -> torch.Tensor:
    """Return group numbers ``(N,)`` int64, by hashing names.

    A hash does not depend on other groups. Numbers and texts of the same value get the same hash, as a file
    may store names as 7, 7.0 or "7".

    >>> a, b, c = hash_groups(["a", "b", "a"])
    >>> bool(a == c), bool(a == b), bool(hash_groups(["b"]) == b)
    (True, False, True)
    >>> len(set(hash_groups([7, 7.0, "7", "7.0"]).tolist()))
    1
    >>> len(set(hash_groups(["7", "07", 2**60, 2**60 + 1])))
    4
    """
    texts = (strip_decimal_zeros(to_name(name)) for name in names)
    return torch.tensor([derive(0, "group", text) for text in texts], dtype=torch.int64)


def limit_groups(data: TensorData, max_size: int) -> TensorData:
    """Keep the first ``max_size`` examples of each group; 1 makes each example its own unit.

    Raises:
        ArgumentError: ``max_size`` is below 1, or above 1 without groups.

    >>> groups = torch.tensor([7, 7, 3, 7])
    >>> limit_groups(TensorData(torch.zeros(4, 1, 4, 4), torch.arange(4), groups), 2).targets
    tensor([0, 1, 2])
    """
    if max_size == 1:
        return data
    if max_size < 1 or data.groups is None:
        expected = "1 or more" if max_size < 1 else "1, unless data.group names a column of groups"
        raise ArgumentError("privacy.group_size", max_size, expected)
    group_counts: Counter[int] = Counter()
    rows = []
    for index, group in enumerate(data.groups.tolist()):
        group_counts[group] += 1
        if group_counts[group] <= max_size:
            rows.append(index)
    return data.subset(torch.tensor(rows, device=data.inputs.device))


def largest_group_size(data: TensorData) -> int:
    """Return the size of the largest group; 1 without groups.

    >>> largest_group_size(TensorData(torch.zeros(4, 1, 4, 4), torch.arange(4), torch.tensor([7, 7, 3, 7])))
    3
    """
    return 1 if data.groups is None else max(Counter(data.groups.tolist()).values(), default=1)
