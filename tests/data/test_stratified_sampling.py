"""Patients are sampled and divided as a whole, for all sizes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core.config_tables import read_table
from fedstill.core.dataset import DataSet, TensorData
from fedstill.core.errors import ArgumentError, DataError
from fedstill.data.data_spec import DataSpec
from fedstill.data.node_data import NodeDataConfig, load_node_data
from fedstill.data.partitioners import (
    IID,
    SPLITS,
    ByColumn,
    Dirichlet,
    Positives,
    SplitConfig,
    hide_labels,
    split,
)
from fedstill.data.public import PublicConfig, hold_out
from fedstill.data.stratified_sampling import (
    hash_groups,
    limit_groups,
    sample_units_per_site,
    sample_whole_units,
    stratification_labels,
)
from fedstill.tasks.classification import ClassificationConfig
from tests.support.errors import raises_invalid


def findings(patients: int, seed: int) -> tuple[torch.Tensor, np.ndarray]:
    """Return targets (N, 4) and patients with 1 to 6 images each, shuffled."""
    rng = np.random.default_rng(seed)
    patient = np.repeat(np.arange(patients), rng.integers(1, 7, patients))
    rng.shuffle(patient)
    return torch.from_numpy((rng.random((len(patient), 4)) < 0.2).astype(np.int64)), patient


@given(st.integers(0, 10**6), st.floats(0.1, 0.9))
def test_patient_of_two_sites_is_sampled_whole(seed: int, share: float) -> None:
    patient = np.arange(30) % 10
    site = np.arange(30) % 3  # each patient has images of all three sites
    sampled = sample_units_per_site(
        np.zeros(30, dtype=np.int64), patient, site, share, np.random.default_rng(seed)
    )
    assert len(set(patient[sampled])) == min(max(round(10 * share), 1), 9), (
        "a patient is sampled once for all sites"
    )
    assert not set(patient[sampled]) & set(patient[~sampled])


def shares_patients(patient: np.ndarray, parts: list[np.ndarray]) -> bool:
    """Return whether a patient is in two of the parts."""
    sets = [set(patient[part].tolist()) for part in parts]
    return sum(map(len, sets)) > len(set().union(*sets))


# Samples


@given(st.integers(2, 40), st.integers(0, 10**6), st.floats(0.05, 0.95))
def test_sampled_units_are_whole_and_within_the_count(patients: int, seed: int, share: float) -> None:
    targets, patient = findings(patients, seed)
    count = max(round(share * len(patient)), 1)
    rows = sample_whole_units(stratification_labels(targets), patient, count, np.random.default_rng(seed))
    remaining = np.setdiff1d(np.arange(len(patient)), rows)
    assert not shares_patients(patient, [rows, remaining])
    assert len(rows) <= count or len(np.unique(patient[rows])) == 1
    assert len(rows) >= 1
    assert rows.tolist() == sorted(set(rows.tolist()))


def test_whole_units_keep_label_shares() -> None:
    labels = np.repeat([0, 1], [300, 100])
    rows = sample_whole_units(labels, np.arange(400) // 2, 100, np.random.default_rng(0))
    assert np.bincount(labels[rows]).tolist() == pytest.approx([75, 25], abs=2)


@given(st.integers(0, 10**6), st.floats(0.01, 0.99))
def test_each_site_has_patients_in_both_parts(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 9, 4)  # number of patients of each site
    of = np.repeat(np.arange(sizes.sum()), 3)
    sites = np.repeat(np.repeat(["a", "b", "c", "d"], sizes), 3)
    test = sample_units_per_site(np.zeros(len(of), dtype=np.int64), of, sites, share, rng)
    assert not shares_patients(of, [np.flatnonzero(test), np.flatnonzero(~test)])
    for site, size in zip("abcd", sizes, strict=True):
        sampled = len(np.unique(of[test & (sites == site)]))
        assert sampled == min(max(round(size * share), 1), size - 1)


def test_rejects_sites_with_one_patient() -> None:
    with raises_invalid("data.sites", "b", "two or more"):
        sample_units_per_site(
            np.zeros(4, int), np.array([0, 1, 2, 2]), np.array(list("aabb")), 0.5, np.random.default_rng(0)
        )


# Nodes


@given(
    st.sampled_from(["iid", "dirichlet", "balanced-dirichlet", "shards", "sorted", "positives"]),
    st.integers(1, 5),
    st.integers(0, 10**6),
)
def test_no_patient_is_at_two_nodes(split_name: str, nodes: int, seed: int) -> None:
    targets, patient = findings(40, seed)
    skewed = {"alpha": 0.3}
    options = {
        "shards": {"classes_per_node": 1},
        "sorted": {"column": "age"},
        "dirichlet": skewed,
        "balanced-dirichlet": skewed,
        "positives": skewed,
    }
    config = SPLITS[split_name](nodes=nodes, minimum=2, **options.get(split_name, {}))
    ages = {"age": np.random.default_rng(seed).random(len(patient))}
    parts = split(targets, 4, config, np.random.default_rng(seed), ages, patient)
    assert sorted(torch.cat(parts).tolist()) == list(range(len(patient)))
    assert not shares_patients(patient, [part.numpy() for part in parts])
    assert min(map(len, parts)) >= 2
    again = split(targets, 4, config, np.random.default_rng(seed), ages, patient)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))


def test_unit_splits_have_nearly_equal_sizes() -> None:
    targets, patient = findings(200, 1)
    for split_name in ("iid", "positives", "balanced-dirichlet"):
        parts = split(
            targets,
            4,
            read_table(SplitConfig, {"name": split_name, "nodes": 5}),
            np.random.default_rng(0),
            {},
            patient,
        )
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 6  # at most the images of one patient


def test_positives_split_skews_findings_not_sizes() -> None:
    rng = np.random.default_rng(0)
    targets = torch.from_numpy((rng.random((3000, 3)) < 0.1).astype(np.int64))
    positive = (targets == 1).any(1)

    def shares(alpha: float) -> list[float]:
        config = Positives(nodes=5, alpha=alpha)
        parts = split(targets, 3, config, np.random.default_rng(0))
        assert [len(part) for part in parts] == pytest.approx([600] * 5, abs=1)
        return [positive[part].float().mean().item() for part in parts]

    even, skewed = shares(1e6), shares(0.1)
    assert max(even) - min(even) < 0.02
    assert max(skewed) > 0.6 > 0.02 > min(skewed)


@pytest.mark.parametrize(
    ("targets", "config", "unit", "message"),
    [
        (torch.zeros(40).long(), Positives(nodes=2), None, "only findings"),
        (torch.rand(40, 1, 4, 4), Dirichlet(nodes=2), None, "images have no classes"),
        (torch.zeros(100).long(), IID(nodes=3), np.repeat([0, 1], 50), "at most 2"),
        (torch.zeros(20).long(), IID(nodes=2, minimum=5), np.array([0] * 19 + [1]), r"split\.minimum"),
    ],
)
def test_rejects_targets_that_a_split_cannot_divide(
    targets: torch.Tensor, config: SplitConfig, unit: np.ndarray | None, message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        split(targets, 1, config, np.random.default_rng(0), {}, unit)


def test_rejects_columns_that_divide_a_patient() -> None:
    patient, targets = np.array(["p", "p", "q"]), torch.zeros(3, dtype=torch.int64)
    config = ByColumn(nodes=0, column="slice", minimum=1)
    columns = {"slice": np.array([1, 2, 1]), "site": np.array(["a", "a", "b"])}
    with pytest.raises(DataError, match=r"'slice'.* 'p' .*one value"):
        split(targets, 1, config, np.random.default_rng(0), columns, patient)
    by_site = ByColumn(nodes=0, column="site", minimum=1)
    parts = split(targets, 1, by_site, np.random.default_rng(0), columns, patient)
    assert [part.tolist() for part in parts] == [[0, 1], [2]]


# Unknown findings


@given(st.integers(1, 7), st.integers(2, 14), st.integers(0, 10**6))
def test_nodes_together_know_all_findings(nodes: int, labels: int, seed: int) -> None:
    lowest = min(-(-labels // nodes) + 1, labels)
    part = TensorData(torch.zeros(2, 1, 4, 4), torch.ones(2, labels, dtype=torch.int64))
    for count in (lowest, labels):
        parts = hide_labels([part] * nodes, count, np.random.default_rng(seed))
        known = [set(torch.nonzero(one.targets[0] == 1).flatten().tolist()) for one in parts]
        assert all(len(one) == count for one in known)
        assert all(torch.equal(one.targets[0], one.targets[1]) for one in parts)
        assert set().union(*known) == set(range(labels))
        assert all(a & b for a, b in zip(known, known[1:] + known[:1], strict=True))
    assert (part.targets == 1).all()  # the original is unchanged


def test_rejects_findings_that_leave_gaps() -> None:
    part = TensorData(torch.zeros(2, 1, 4, 4), torch.ones(2, 14, dtype=torch.int64))
    with raises_invalid("split.findings", 3, "from 4 to 14", "or set split.findings 0 (all"):
        hide_labels([part] * 5, 3, np.random.default_rng(0))
    assert hide_labels([part], 0, np.random.default_rng(0))[0] is part
    classes = TensorData(torch.zeros(2, 1, 4, 4), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ArgumentError, match=r"invalid split\.findings = 4 \(expected 0"):
        hide_labels([classes], 4, np.random.default_rng(0))


# Public data


def test_rejects_holding_out_of_one_patient() -> None:
    part = TensorData(torch.zeros(4, 1, 4, 4), torch.zeros(4, dtype=torch.int64))
    columns = {"patient": np.array(["p"] * 4)}
    data = DataSet("one", part, part, ("a", "b"), (0.5,), (0.5,), columns=columns, group_column="patient")
    with raises_invalid("public.share", 0.5, "one patient"):
        hold_out(PublicConfig("held-out", share=0.5), data)


SPEC = DataSpec(ClassificationConfig(), ("cat", "dog"), (1, 4, 4), (0.5,), (0.5,))
PATIENTS = ["ann", "bob", "ann", "eve"]
IMAGES = np.arange(4 * 16, dtype=np.uint8).reshape(4, 4, 4)


def made(groups: torch.Tensor | None) -> TensorData:
    n = 5 if groups is None else len(groups)
    return TensorData(torch.zeros(n, 1, 4, 4), torch.arange(n), groups)


def write_npz(folder: Path, group: str, **arrays: Any) -> NodeDataConfig:
    np.savez(folder / "mine.npz", images=IMAGES, labels=[0, 1, 1, 0], **arrays)
    return NodeDataConfig(path="mine.npz", group=group)


# --- read -----------------------------------------------------------------------------------------


def test_csv_groups_are_not_pixels_and_are_optional(tmp_path: Path) -> None:
    header = ",".join(["patient", "label", *(f"p{i}" for i in range(16))])
    rows = [
        ",".join([f" {name}", label, *map(str, image.flatten())])
        for name, label, image in zip(PATIENTS, ("cat", "dog", "dog", "cat"), IMAGES, strict=True)
    ]
    (tmp_path / "mine.csv").write_text("\n".join([header, *rows]), encoding="utf-8")
    data, _ = load_node_data(NodeDataConfig(source="csv", path="mine.csv", group="patient"), tmp_path, SPEC)
    assert data.groups is not None
    assert data.groups.tolist() == hash_groups(PATIENTS).tolist()
    assert data.inputs.shape == (4, 1, 4, 4)
    torch.testing.assert_close(data.inputs[3, 0, 3, 3].item(), 63 / 255 * 2 - 1)


def test_rejects_unknown_group_columns(tmp_path: Path) -> None:
    with raises_invalid("data.group", "ward", "patient"):
        load_node_data(write_npz(tmp_path, "ward", patient=PATIENTS), tmp_path, SPEC)
    (tmp_path / "mine.csv").write_text("label,p0\ncat,1\n", encoding="utf-8")
    with pytest.raises(ArgumentError, match=r"data.group = 'ward'"):
        load_node_data(NodeDataConfig(source="csv", path="mine.csv", group="ward"), tmp_path, SPEC)


# --- groups -----------------------------------------------------------------------------------------


def test_subset_and_to_keep_groups() -> None:
    data = made(torch.tensor([5, 6, 5, 8, 9]))
    part = data.subset(torch.tensor([3, 0]))
    assert part.groups is not None
    assert part.groups.tolist() == [8, 5]
    moved = data.to("meta").groups
    assert moved is not None
    assert moved.device.type == "meta"
    assert made(None).subset(torch.tensor([0])).groups is None
    assert made(None).to("cpu").groups is None


# --- limits -----------------------------------------------------------------------------------------


@given(groups=st.lists(st.integers(-3, 3), min_size=1, max_size=30), most=st.integers(2, 5))
def test_limit_keeps_the_first_examples_of_each_group(groups: list[int], most: int) -> None:
    limited = limit_groups(made(torch.tensor(groups)), most)
    before: Counter[int] = Counter()
    expected = []
    for index, group in enumerate(groups):
        if before[group] < most:
            expected.append(index)
        before[group] += 1
    assert limited.targets.tolist() == expected
    assert limited.groups is not None
    assert max(Counter(limited.groups.tolist()).values()) <= most


def test_rejects_invalid_group_limits() -> None:
    with raises_invalid("privacy.group_size", 3, "1", "data.group"):
        limit_groups(made(None), 3)
    with raises_invalid("privacy.group_size", 0, "1 or more"):
        limit_groups(made(torch.tensor([5])), 0)
