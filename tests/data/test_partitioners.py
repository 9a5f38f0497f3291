from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.core.config_tables import read_table
from fedstill.core.errors import ArgumentError, DataError
from fedstill.data.partitioners import SPLITS, SplitConfig, sample_dirichlet_shares, split, top_up
from fedstill.data.stratified_sampling import stratified_sample


def labels_of_sizes(*sizes: int, seed: int = 0) -> torch.Tensor:
    """Return labels with the given number of examples per class, in random order."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return torch.from_numpy(np.random.default_rng(seed).permutation(labels))


def divide(labels: torch.Tensor, classes: int, seed: int = 0, **settings: Any) -> tuple[torch.Tensor, ...]:
    columns = settings.pop("columns", {})
    config = read_table(SplitConfig, settings, "split.")
    return split(labels, classes, config, np.random.default_rng(seed), columns)


def as_lists(parts: Sequence[torch.Tensor]) -> list[list[int]]:
    return [part.tolist() for part in parts]


def part_sizes(parts: Sequence[torch.Tensor]) -> list[int]:
    return [len(part) for part in parts]


def classes_per_part(parts: Sequence[torch.Tensor], labels: torch.Tensor) -> list[set[int]]:
    return [set(labels[part].tolist()) for part in parts]


# All splits


@settings(deadline=None, max_examples=150)
@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any),
    split_name=st.sampled_from(["iid", "dirichlet", "balanced-dirichlet", "shards", "sorted"]),
    log_alpha=st.floats(-12, 12),
    draw=st.data(),
    seed=st.integers(0, 2**32),
)
def test_parts_are_a_partition(
    counts: list[int], split_name: Any, log_alpha: float, draw: st.DataObject, seed: int
) -> None:
    labels, total = labels_of_sizes(*counts), sum(counts)
    minimum = draw.draw(st.integers(1, min(total, 12)))
    nodes = draw.draw(st.integers(1, total // minimum))
    per_node = draw.draw(st.integers(1, int(np.count_nonzero(counts))))
    options = {
        "dirichlet": {"alpha": 10**log_alpha},
        "balanced-dirichlet": {"alpha": 10**log_alpha},
        "shards": {"classes_per_node": per_node},
        "sorted": {"column": "age"},
    }
    config = SPLITS[split_name](nodes=nodes, minimum=minimum, **options.get(split_name, {}))
    columns = {"age": np.random.default_rng(seed).normal(size=total)}
    parts = split(labels, len(counts), config, np.random.default_rng(seed), columns)

    assert len(parts) == nodes
    assert sorted(torch.cat(parts).tolist()) == list(range(total))
    assert min(part_sizes(parts)) >= minimum
    assert all(part.dtype == torch.int64 and part.tolist() == sorted(part.tolist()) for part in parts)
    again = split(labels, len(counts), config, np.random.default_rng(seed), columns)
    assert as_lists(again) == as_lists(parts)


@pytest.mark.parametrize("split_name", ["iid", "dirichlet", "balanced-dirichlet", "shards"])
def test_seed_changes_the_split(split_name: str) -> None:
    labels = labels_of_sizes(50, 50, 50, 50)
    assert as_lists(divide(labels, 4, seed=1, name=split_name)) != as_lists(
        divide(labels, 4, seed=2, name=split_name)
    )


@pytest.mark.parametrize(
    ("split_name", "options"),
    [
        ("iid", {}),
        ("dirichlet", {"alpha": 1e6}),
        ("balanced-dirichlet", {}),
        ("shards", {"classes_per_node": 1}),
    ],
)
def test_examples_are_shuffled(split_name: str, options: dict[str, Any]) -> None:
    # Without shuffling, the examples of a class at a node would be contiguous.
    labels = torch.zeros(1000, dtype=torch.int64)
    for part in divide(labels, 1, name=split_name, nodes=2, **options):
        assert int((part.diff() > 1).sum()) > 100


# iid


def test_iid_sizes_differ_by_one_at_most() -> None:
    assert sorted(part_sizes(divide(labels_of_sizes(7, 4), 2, name="iid", nodes=3, minimum=3))) == [3, 4, 4]


def test_iid_and_column_accept_targets_of_any_shape() -> None:
    masks = torch.zeros(6, 8, 8, dtype=torch.int64)
    assert part_sizes(divide(masks, 2, name="iid", nodes=3, minimum=2)) == [2, 2, 2]
    site = {"site": np.array([1, 0, 0, 1, 1, 1])}
    parts = divide(masks, 2, name="column", nodes=2, minimum=2, column="site", columns=site)
    assert as_lists(parts) == [[1, 2], [0, 3, 4, 5]]


# Dirichlet


def test_large_alpha_is_even() -> None:
    # 10 examples, shares of a third: cuts at floor(3.33) = 3 and floor(6.67) = 6.
    assert part_sizes(divide(labels_of_sizes(10), 1, name="dirichlet", nodes=3, alpha=1e12, minimum=1)) == [
        3,
        3,
        4,
    ]


def test_small_alpha_gives_each_class_to_one_node() -> None:
    labels = labels_of_sizes(*[20] * 40)
    for alpha in (1e-12, 1e-6):
        parts = divide(labels, 40, name="dirichlet", nodes=3, alpha=alpha)
        class_counts = classes_per_part(parts, labels)
        assert sum(len(h) for h in class_counts) == 40  # each class is at one node
        assert all(class_counts)


def test_nodes_below_the_minimum_are_topped_up_from_the_largest() -> None:
    # One class and a tiny alpha: one node gets all 100 examples, and sampling again does not help.
    parts = divide(labels_of_sizes(100), 1, name="dirichlet", nodes=3, alpha=1e-6, minimum=10)
    assert sorted(part_sizes(parts)) == [10, 10, 80]


def test_sufficient_sample_is_not_topped_up() -> None:
    # Dirichlet(1) is sampled until both nodes have at least 20 of 100 examples. If examples were moved
    # instead, the smaller node would have exactly 20.
    lowest = [
        min(
            part_sizes(
                divide(labels_of_sizes(100), 1, seed, name="dirichlet", nodes=2, alpha=1.0, minimum=20)
            )
        )
        for seed in range(30)
    ]
    assert min(lowest) >= 20
    assert lowest.count(20) < 5


def test_balanced_nodes_take_classes_by_their_shares() -> None:
    # With a tiny alpha, each node prefers one class. If both prefer the same one, they share it.
    labels, result = labels_of_sizes(10, 10), set()
    for seed in range(20):
        parts = divide(labels, 2, seed, name="balanced-dirichlet", nodes=2, alpha=1e-6)
        assert part_sizes(parts) == [10, 10]
        result.add(tuple(sorted(int(labels[part].sum()) for part in parts)))
    assert result == {(0, 10), (5, 5)}


def test_balanced_nodes_take_remaining_classes() -> None:
    for seed in range(300):
        assert (
            sum(
                part_sizes(
                    divide(
                        labels_of_sizes(*[30] * 10), 10, seed, name="balanced-dirichlet", nodes=10, alpha=1e-3
                    )
                )
            )
            == 300
        )


def test_alpha_skews_balanced_nodes() -> None:
    labels = labels_of_sizes(*[100] * 10)
    largest = {}
    for alpha in (0.1, 1.0, 1e6):
        parts = divide(labels, 10, name="balanced-dirichlet", nodes=10, alpha=alpha)
        assert part_sizes(parts) == [100] * 10
        largest[alpha] = float(np.mean([np.bincount(labels[part], minlength=10).max() for part in parts]))
    assert largest[0.1] > 1.5 * largest[1.0] > 2 * largest[1e6]
    assert largest[1e6] < 20  # the largest count of ten classes in an even sample


@pytest.mark.parametrize("alpha", [0.01, 0.5, 3.0])
def test_shares_have_mean_and_variance_of_dirichlet(alpha: float) -> None:
    generator, nodes = np.random.default_rng(0), 4
    shares = np.stack([sample_dirichlet_shares(alpha, nodes, generator) for _ in range(8000)])
    assert np.allclose(shares.sum(axis=1), 1)
    assert np.allclose(shares.mean(axis=0), 1 / nodes, atol=0.02)
    # Var of one share: (K - 1) / (K^2 (K alpha + 1))
    variance = (nodes - 1) / (nodes**2 * (nodes * alpha + 1))
    assert np.allclose(shares.var(axis=0), variance, rtol=0.08)


# Shards


def test_shards_share_classes_equally() -> None:
    labels = labels_of_sizes(*[100] * 10)
    parts = divide(labels, 10, name="shards", nodes=10, classes_per_node=2)
    for label in range(10):
        counts = [int((labels[part] == label).sum()) for part in parts]
        assert sorted(counts)[-2:] == [50, 50]
        assert sum(counts) == 100


@settings(deadline=None, max_examples=60)
@given(classes=st.integers(1, 8), nodes=st.integers(1, 12), seed=st.integers(0, 999), draw=st.data())
def test_shards_have_the_documented_class_counts(
    classes: int, nodes: int, seed: int, draw: st.DataObject
) -> None:
    per_node = draw.draw(st.integers(1, classes))
    labels = labels_of_sizes(*draw.draw(st.lists(st.integers(12, 30), min_size=classes, max_size=classes)))
    parts = divide(labels, classes, seed, name="shards", nodes=nodes, classes_per_node=per_node, minimum=1)
    class_counts = classes_per_part(parts, labels)
    if nodes * per_node >= classes:
        assert [len(h) for h in class_counts] == [per_node] * nodes
        holders = [sum(label in h for h in class_counts) for label in range(classes)]
        assert max(holders) - min(holders) <= 1
    else:  # more classes than slots: as few additional ones as possible
        assert sum(len(h) for h in class_counts) == classes
        assert max(len(h) for h in class_counts) == -(-classes // nodes)


@pytest.mark.parametrize("seed", range(8))
def test_shards_replace_rare_classes(seed: int) -> None:
    # The class with one example is at one node only; the other classes fill the remaining slots.
    labels = labels_of_sizes(1, 50, 50)
    parts = divide(labels, 3, seed, name="shards", nodes=3, classes_per_node=2)
    assert [len(h) for h in classes_per_part(parts, labels)] == [2, 2, 2]


def test_top_up_prefers_known_classes() -> None:
    labels = np.repeat([0, 0, 1], [2, 20, 30])
    owner = np.repeat([0, 1, 2], [2, 20, 30])
    known = top_up(owner, 3, 5, np.random.default_rng(0), labels)
    assert np.bincount(known).tolist() == [5, 17, 30]  # not from node 2, although it is larger
    assert set(labels[known == 0]) == {0}
    assert np.bincount(top_up(owner, 3, 5, np.random.default_rng(0))).tolist() == [5, 20, 27]


# Column and sorted


def test_column_gives_one_node_per_value() -> None:
    site = np.array(["b", "a", "c", "a", "b", "b"])
    for nodes in (0, 3):
        parts = divide(
            labels_of_sizes(6),
            1,
            name="column",
            nodes=nodes,
            column="site",
            minimum=1,
            columns={"site": site},
        )
        assert as_lists(parts) == [[1, 3], [0, 4, 5], [2]]


def test_sorted_matches_an_example() -> None:
    # In order of age: 1, 3, 4, 2, 0; five in two parts: three and two.
    age = {"age": np.array([5.0, 1.0, 4.0, 2.0, 3.0])}
    parts = divide(labels_of_sizes(5), 1, name="sorted", nodes=2, column="age", minimum=2, columns=age)
    assert as_lists(parts) == [[1, 3, 4], [0, 2]]


def test_sorted_is_stable() -> None:
    age = {"age": np.array([1, 0] * 20)}
    parts = divide(labels_of_sizes(40), 1, name="sorted", nodes=4, column="age", columns=age)
    assert parts[0].tolist() == list(range(1, 20, 2))
    assert parts[3].tolist() == list(range(20, 40, 2))


# Errors


@pytest.mark.parametrize(
    ("settings", "name", "words"),
    [
        ({"name": "even"}, "split", "iid, dirichlet, balanced-dirichlet, shards"),
        ({"name": "iid", "alpha": 1.0}, "split.alpha", "none.* split 'iid' has no such option"),
        ({"nodes": 0}, "split.nodes", "from 1 up"),
        ({"name": "column", "column": "site", "nodes": -1}, "split.nodes", "from 0 up"),
        ({"minimum": 0}, "split.minimum", "1 or more"),
        ({"alpha": float("nan")}, "split.alpha", "a number"),
        ({"name": "shards", "classes_per_node": 0}, "split.classes_per_node", "1 or more"),
        ({"name": "shards", "classes_per_node": 4}, "split.classes_per_node", "at most 3"),
        ({"nodes": 7}, "split.nodes", "at most 6, as there are 60 examples .* 10"),
        ({"minimum": 61}, "split.minimum", "at most 60, as there are 60 examples"),
        ({"name": "column", "column": "place"}, "split.column", "one of age, site"),
        ({"name": "sorted", "column": "site"}, "split.column", "numeric"),
        ({"name": "column", "column": "site", "nodes": 3}, "split.nodes", "2, the number of values .*'site'"),
        (
            {"name": "column", "column": "site", "nodes": 2, "minimum": 21},
            "split.minimum",
            "at most 20, as value 'b' .* 20 examples",
        ),
    ],
)
def test_rejects_invalid_options(settings: dict[str, Any], name: str, words: str) -> None:
    columns = {"site": np.array(["a"] * 40 + ["b"] * 20), "age": np.arange(60)}
    with pytest.raises(ArgumentError, match=words) as caught:
        divide(labels_of_sizes(30, 20, 10), 3, columns=columns, **settings)
    assert caught.value.name == name


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (np.zeros(3), r"shape \(3,\)"),
        (np.array([None] * 60), "object"),
        (np.array([np.nan] * 2 + [0.0] * 58), "empty for 2 of 60 examples"),
    ],
)
@pytest.mark.parametrize("split_name", ["column", "sorted"])
def test_rejects_unusable_columns(split_name: str, column: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        divide(labels_of_sizes(60), 1, name=split_name, column="c", columns={"c": column})


def test_rejects_labels_outside_the_classes_and_no_examples() -> None:
    with pytest.raises(DataError, match="label 2"):
        divide(labels_of_sizes(30, 30, 30), 2, name="shards", minimum=1)
    with pytest.raises(DataError, match="no examples"):
        divide(torch.empty(0, dtype=torch.int64), 2, name="iid")


# Stratified samples


@given(
    counts=st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any),
    part=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_stratified_counts_are_within_one_of_exact_shares(counts: list[int], part: float, seed: int) -> None:
    labels, total = labels_of_sizes(*counts).numpy(), sum(counts)
    count = round(part * total)
    chosen = stratified_sample(labels, count, np.random.default_rng(seed))
    assert len(set(chosen.tolist())) == count
    got = np.bincount(labels[chosen], minlength=len(counts))
    assert (np.abs(got - np.array(counts) * count / total) < 1).all()


def test_stratified_breaks_ties_at_random() -> None:
    labels = labels_of_sizes(10, 10, 10, 10).numpy()
    one = [labels[stratified_sample(labels, 1, np.random.default_rng(seed))].item() for seed in range(40)]
    assert set(one) == {0, 1, 2, 3}
