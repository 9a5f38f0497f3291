"""A part of training to choose options by: nobody of it is trained on, nobody of the test part is seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstill.data.config import DataConfig
from fedstill.data.loaders import load
from fedstill.data.nuclei import Picture
from fedstill.data.nuclei import data_set as nuclei_data_set
from fedstill.data.validation import set_aside
from fedstill.errors import ArgumentError

FEW = DataConfig(validation=0.25, seed=3)


@given(st.integers(0, 10**6), st.floats(0.05, 0.9))
def test_whole_patients_of_each_site_and_none_of_the_test_part(seed: int, share: float) -> None:
    of = np.repeat(np.arange(24), 3)
    sites, test = of % 3, of % 4 == 0
    labels = (of % 2).astype(np.int64)
    config = DataConfig(validation=share, seed=seed)
    train, measured, note = set_aside(test, labels, of, sites, config, "patients")
    parts = [set(of[train]), set(of[measured]), set(of[test])]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 24
    assert {p % 3 for p in parts[0]} == {p % 3 for p in parts[1]} == {0, 1, 2}
    assert f"{len(parts[1])} of 18 training patients" in note
    for site in range(3):  # the share of each site's six, at least one and never all
        assert sum(p % 3 == site for p in parts[1]) == min(max(round(6 * share), 1), 5)


def test_a_site_with_one_training_patient_keeps_it() -> None:
    of, sites = np.arange(6), np.array([0, 0, 1, 1, 1, 1])
    test = np.array([True, False, True, False, False, False])
    train, measured, _ = set_aside(test, np.zeros(6, dtype=np.int64), of, sites, FEW, "patients")
    assert train[1]
    assert measured.sum() == 1
    assert sites[measured] == 1


def test_without_a_site_of_two_it_is_refused() -> None:
    rows = np.arange(2)
    with pytest.raises(ArgumentError, match=r"data.validation is 0.25: allowed is 0, as no site has two"):
        set_aside(np.zeros(2, dtype=bool), rows, rows, rows, FEW, "patients")


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_shares_out_of_range(share: float) -> None:
    with pytest.raises(ArgumentError, match=r"data\.validation"):
        load(DataConfig(validation=share))


def test_the_test_images_of_digits_are_neither_trained_on_nor_measured_on() -> None:
    whole, part = load(DataConfig(seed=3)), load(FEW)

    def known(data: object) -> set[bytes]:
        return {one.numpy().tobytes() for one in data}  # type: ignore[attr-defined]

    tested = known(whole.test.inputs)
    assert not tested & (known(part.train.inputs) | known(part.test.inputs)) - known(whole.train.inputs)
    assert len(part.train) + len(part.test) == len(whole.train)
    assert known(part.train.inputs) | known(part.test.inputs) == known(whole.train.inputs)
    assert "training examples, set aside with seed 3; the test part is not used" in part.note
    assert "set aside" not in whole.note


def test_the_seed_draws_them() -> None:
    first, again, other = (load(replace(FEW, seed=seed)).test.inputs for seed in (3, 3, 4))
    assert first.equal(again)
    assert not first.equal(other)


def test_a_limit_draws_from_what_is_left() -> None:
    limited, whole = load(replace(FEW, train_limit=50)), load(FEW)
    assert len(limited.train) == 50
    assert limited.test.inputs.equal(whole.test.inputs)


def test_pictures_stay_whole_and_the_official_test_part_is_not_used() -> None:
    pictures = [
        Picture(
            np.full((3, 12, 12), 10 * number, np.uint8),
            np.pad(np.ones((4, 4), np.int32), 4),
            f"slide{number}",
            "ab"[number % 2],
            number > 5,
        )
        for number in range(8)
    ]
    config = DataConfig(name="mine", patch=8, validation=0.34)
    data = nuclei_data_set(pictures, config, "mine", "", "organ")
    assert data.test.cases is not None
    measured = {data.test.cases.names[case] for case in data.test.cases.present()}
    trained = set(data.columns["slide"].tolist())
    assert len(measured) == 2
    assert len(trained) == 4
    assert measured | trained == {f"slide{number}" for number in range(6)}


def test_patients_of_a_csv_of_cases(tmp_path: Path) -> None:
    """The path through :mod:`fedstill.data.assembled`."""
    from fedstill.data.assembled import Source, data_set
    from fedstill.tasks import TaskConfig
    from tests.data.test_medical import shown, slices

    plain, some = (
        data_set(
            Source(slices(), "mine"), DataConfig(name="mine", validation=share), TaskConfig("segmentation")
        )
        for share in (0.0, 0.4)
    )
    assert shown(some.train) | shown(some.test) == shown(plain.train)
    assert not shown(some.train) & shown(some.test)
    assert len(shown(some.test)) == 3  # of the sites' two or three each, one
