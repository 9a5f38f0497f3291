"""Draws with shares kept; and of examples that belong together, all slices of a patient say, never parted.

A *unit* is one value of such a column. A label of its own says how units are drawn with shares kept. As
*groups* of a node's data they are protected as one, and so limited in number.
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
from fedstill.core.names import alike, difference, name_of, without_point
from fedstill.core.seeds import derive
from fedstill.core.table_schema import EMPTY

Ints = npt.NDArray[np.int64]
QUANTILES = 5  # parts of numbers, by size


def stratification_labels(targets: torch.Tensor) -> Ints:
    """One label an example, to draw or divide examples by: ``(N,)``.

    Of findings ``(N, C)`` one more than the rarest finding of the example, 0 where it has none (FedKD: "the
    most infrequent one"); of maps ``(N, H, W)`` the largest class above 0; of numbers ``(N, 1)`` the fifth of
    them that it is in; of images, which have no classes, 0.

    >>> stratification_labels(torch.tensor([[1, 0, 0], [1, 0, 1], [0, -1, 0]])).tolist()
    [1, 3, 0]
    >>> stratification_labels(torch.tensor([[[0, 2], [0, 2]], [[0, 0], [0, 0]]])).tolist()
    [2, 0]
    >>> stratification_labels(torch.tensor([[5.0], [1.0], [9.0], [2.0], [7.0], [3.0]])).tolist()
    [2, 0, 4, 0, 3, 1]
    """
    if targets.is_floating_point():
        if targets.ndim == 2:
            place = targets[:, 0].argsort(stable=True).argsort(stable=True)
            fifths: Ints = (place * QUANTILES // len(targets)).cpu().numpy()
            return fifths
        return np.zeros(len(targets), dtype=np.int64)
    if targets.ndim == 1:
        plain: Ints = targets.cpu().numpy()
        return plain
    if targets.ndim == 2:
        positive = (targets == 1).cpu().numpy()  # (N, C)
        rarity = np.argsort(positive.sum(0), kind="stable")  # rarest first
        found = positive[:, rarity]
        return np.where(found.any(1), rarity[found.argmax(1)] + 1, 0).astype(np.int64)
    areas = torch.stack(
        [(targets == k).flatten(1).sum(1) for k in range(1, int(targets.max()) + 1)]
        or [torch.zeros(len(targets), dtype=torch.int64)]
    )  # (classes above 0, N)
    most, which = areas.max(0)
    largest: Ints = torch.where(most > 0, which + 1, 0).cpu().numpy()
    return largest


def label_units(labels: Ints, of: Ints) -> Ints:
    """The label of each unit: of those that its examples have, the one that the fewest examples have.

    >>> label_units(np.array([0, 0, 0, 1, 0]), np.array([0, 0, 1, 1, 2])).tolist()  # labels, and units from 0
    [0, 1, 0]
    """
    kinds, place, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.lexsort((kinds[place], sizes[place], of))  # by unit, the rarest label first
    first = np.unique(of[order], return_index=True)[1]
    chosen: Ints = labels[order[first]]
    return chosen


def add_site_strata(labels: Ints, columns: Mapping[str, Column]) -> Ints:
    """Labels that also tell sites apart, so that what is drawn keeps the sites' shares too: ``(N,)``."""
    if "site" not in columns:
        return labels
    sites = np.unique(columns["site"], return_inverse=True)[1]
    combined: Ints = np.unique(np.stack([labels, sites]), axis=1, return_inverse=True)[1].reshape(-1)
    return combined


def stratified_sample(labels: npt.NDArray[Any], count: int, generator: np.random.Generator) -> Ints:
    """``count`` random examples of N, ascending, in which each class has the share that it has among all.

    Each class gets its exact share rounded down; what is left goes, one each, to the classes with the largest
    remainders (ties at random).

    >>> labels = np.array([0] * 6 + [1] * 3)
    >>> labels[stratified_sample(labels, 3, np.random.default_rng(0))].tolist()
    [0, 0, 1]
    """
    total = len(labels)
    kinds, sizes = np.unique(labels, return_counts=True)
    quota, remainder = sizes * count // max(total, 1), sizes * count % max(total, 1)
    ranking = np.lexsort((generator.random(len(kinds)), -remainder))
    quota[ranking[: count - quota.sum()]] += 1
    chosen = [
        generator.permutation(np.flatnonzero(labels == kind))[:share]
        for kind, share in zip(kinds, quota, strict=True)
    ]
    return np.sort(np.concatenate([np.empty(0, dtype=np.int64), *chosen]))


def sample_whole_units(
    labels: npt.NDArray[Any], unit: Column, count: int, generator: np.random.Generator
) -> Ints:
    """Random whole units of together at most ``count`` examples, labels' shares kept; one unit at least.

    Units come in an order each beginning of which has the labels (N,) in nearly the shares they have among
    all units, and are taken while they fit; ``unit`` (N,) says of which each example is.

    >>> patients = np.array(["a", "a", "b", "b", "b", "c"])
    >>> taken = patients[sample_whole_units(np.zeros(6, dtype=int), patients, 4, np.random.default_rng(0))].tolist()
    >>> all(taken.count(name) in (0, list(patients).count(name)) for name in "abc") and 1 <= len(taken) <= 4
    True
    """
    of, sizes = np.unique(unit, return_inverse=True, return_counts=True)[1:]
    kinds = label_units(labels, of)  # (U,)
    place = np.empty(len(sizes))
    for kind in np.unique(kinds):
        members = generator.permutation(np.flatnonzero(kinds == kind))
        place[members] = (np.arange(len(members)) + generator.random()) / len(members)
    order = np.argsort(place, kind="stable")
    fits = max(int(np.searchsorted(np.cumsum(sizes[order]), count, side="right")), 1)
    return np.flatnonzero(np.isin(of, order[:fits]))


def sample_units_per_site(
    labels: Ints, unit: Column, sites: Column | None, share: float, generator: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """A share of the units of each site, at least one of each and never all: which examples, ``(N,)``.

    Within a site the units' labels keep their shares as far as whole units allow. A unit of several sites is
    drawn with all of its examples, and counts at each of them. Without ``sites`` all are from one place; a
    site with one unit is refused.
    """
    where = np.zeros(len(labels), dtype=np.int64) if sites is None else sites
    drawn = unit[:0]
    for site in np.unique(where):
        rows = np.flatnonzero(where == site)
        names, of = np.unique(unit[rows], return_inverse=True)
        if len(names) < 2:
            raise ArgumentError("data.sites", str(site), "sites of two or more patients or pictures each")
        known = np.isin(names, drawn)  # at a site before
        wanted = min(max(round(len(names) * share), 1), len(names) - 1) - int(known.sum())
        if wanted > 0:
            left = np.flatnonzero(~known)
            kinds = label_units(labels[rows], of)[left]
            taken = left[sample_whole_units(kinds, np.arange(len(left)), wanted, generator)]
            drawn = np.concatenate([drawn, names[taken]])
    chosen: npt.NDArray[np.bool_] = np.isin(unit, drawn)
    return chosen


def require_no_gaps(name: str, column: Column, what: str = "") -> None:
    """Refuse a column (of whose each example is, say) with gaps: all that are empty would count as one.

    Raises:
        DataError: naming the first example without a value.

    >>> require_no_gaps("patient", np.array(["a", ""]))
    Traceback (most recent call last):
    ...
    fedstill.core.errors.DataError: column 'patient' is empty for 1 of 2 examples, the first is example 1
    """
    if column.dtype.kind == "f":
        gaps = np.isnan(column)
    else:
        gaps = np.array([name_of(name).lower() in EMPTY for name in column.tolist()], dtype=np.bool_)
    if gaps.any():
        found = f"column {name!r} is empty for {int(gaps.sum())} of {len(column)} examples"
        where = f"{what}: {found}" if what else found
        raise DataError(f"{where}, the first is example {int(np.flatnonzero(gaps)[0])}")


def require_unit_names(name: str, column: Column, what: str = "") -> None:
    """Refuse a column of whose each example is that has gaps, or names that may be one person's twice.

    Two names that differ by case, by width or by the form of a number alone would count as two people if they
    are one's: training and test part, and what privacy protects, would be wrong.

    Raises:
        DataError: as :func:`require_no_gaps`; or naming two such names.

    >>> require_unit_names("patient", np.array(["P1", "p1", "p2"]))
    Traceback (most recent call last):
    ...
    fedstill.core.errors.DataError: column 'patient' has 'P1' and 'p1', which differ by case alone: ...
    """
    require_no_gaps(name, column, what)
    if column.dtype.kind in "biuf":
        return
    if pairs := alike(name_of(value) for value in np.unique(column).tolist()):
        one, other = pairs[0]
        found = f"column {name!r} has {one!a} and {other!a}"
        allowed = "allowed is one spelling for each of them, and more than that between two of them"
        where = f"{what}: {found}" if what else found
        raise DataError(f"{where}, which differ by {difference(one, other)} alone: {allowed}")


def reject_misspelled_columns(columns: Iterable[str], what: str) -> None:
    """Refuse a column that is not heeded, though its name is nearly one that would be.

    Raises:
        DataError: a name that differs from ``patient`` or ``split`` by case or width alone.
    """
    for column in columns:
        for heeded in ("patient", "split"):
            if how := difference(column, heeded):
                told = f"column {column!a} differs from {heeded!r} by {how} alone, and is not heeded"
                raise DataError(f"{what}: {told} (expected {heeded!r}, or another name)")


def hash_groups(names: Iterable[object]) -> torch.Tensor:
    """Names as numbers, ``(N,)`` int64: hashes, so that a group's number depends on no other group.

    A file's names are whole numbers, or with others numbers with a point, or with others again texts: of one
    group they give one number.

    >>> a, b, c = hash_groups(["a", "b", "a"])
    >>> bool(a == c), bool(a == b), bool(hash_groups(["b"]) == b)
    (True, False, True)
    >>> len(set(hash_groups([7, 7.0, "7", "7.0"]).tolist())), len(set(hash_groups(["7", "07", 2**60, 2**60 + 1])))
    (1, 4)
    """
    texts = (without_point(name_of(name)) for name in names)
    return torch.tensor([derive(0, "group", text) for text in texts], dtype=torch.int64)


def limit_groups(data: TensorData, most: int) -> TensorData:
    """At most ``most`` examples of each group, the first ones in order; of 1 each example is its own unit.

    An ArgumentError refuses a limit above 1 where no groups are known, or one below 1.

    >>> groups = torch.tensor([7, 7, 3, 7])
    >>> limit_groups(TensorData(torch.zeros(4, 1, 4, 4), torch.arange(4), groups), 2).targets
    tensor([0, 1, 2])
    """
    if most == 1:
        return data
    if most < 1 or data.groups is None:
        allowed = "1 or more" if most < 1 else "1, unless data.group says whose each example is"
        raise ArgumentError("privacy.group_size", most, allowed)
    seen: Counter[int] = Counter()
    kept = []
    for index, group in enumerate(data.groups.tolist()):
        seen[group] += 1
        if seen[group] <= most:
            kept.append(index)
    return data.subset(torch.tensor(kept, device=data.inputs.device))


def largest_group_size(data: TensorData) -> int:
    """How many examples the largest group has; 1 where nobody says whose they are.

    >>> largest_group_size(TensorData(torch.zeros(4, 1, 4, 4), torch.arange(4), torch.tensor([7, 7, 3, 7])))
    3
    """
    return 1 if data.groups is None else max(Counter(data.groups.tolist()).values(), default=1)
