"""Validation on a part of the training data, which is not used in training; test data are not used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core.errors import ArgumentError, DataError
from fedstill.data import DataConfig, DataSet, Digits, TensorData, make_data_config
from fedstill.data.instance_images import InstanceImage
from fedstill.data.instance_images import prepare_instance_images as nuclei_data_set
from fedstill.data.loading import UnsplitExamples, load, prepare_data_set
from fedstill.runs import offline, run
from fedstill.runs.simulation import build_simulation
from fedstill.runs.spec import load as run_config
from tests.support.errors import raises_invalid

FEW = Digits(validation=0.25, seed=3)


def prepare(
    of: np.ndarray, sites: np.ndarray, test: np.ndarray, config: DataConfig
) -> tuple[set[int], set[int], DataSet]:
    """Return the patients in training and in evaluation, and the data; inputs are patient numbers."""
    numbers = torch.from_numpy(of).float().view(-1, 1, 1, 1)
    source = UnsplitExamples(
        name="mine",
        targets=(of % 2).astype(np.int64),
        classes=("even", "odd"),
        make_tensors=lambda rows: TensorData(numbers[rows], numbers[rows]),
        split=test,
        columns={"patient": of},
        sites=sites,
        unit="patient",
    )
    data = prepare_data_set(source, config)
    train, measured = (set(part.inputs.flatten().int().tolist()) for part in (data.train, data.test))
    return train, measured, data


@given(st.integers(0, 10**6), st.floats(0.05, 0.9))
def test_validation_takes_whole_training_patients_of_each_site(seed: int, share: float) -> None:
    of = np.repeat(np.arange(24), 3)
    test = of % 4 == 0
    train, measured, data = prepare(of, of % 3, test, Digits(validation=share, seed=seed))
    parts = [train, measured, set(of[test])]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 24
    assert {p % 3 for p in train} == {p % 3 for p in measured} == {0, 1, 2}
    assert f"{len(measured)} of 18 training patients" in data.note
    for site in range(3):  # the share of the six patients of each site, at least one and not all
        assert sum(p % 3 == site for p in measured) == min(max(round(6 * share), 1), 5)


def test_site_with_one_training_patient_keeps_it() -> None:
    sites, test = np.array([0, 0, 1, 1, 1, 1]), np.array([True, False, True, False, False, False])
    train, measured, _ = prepare(np.arange(6), sites, test, FEW)
    assert 1 in train
    assert len(measured) == 1
    assert measured <= {3, 4, 5}


def test_patient_of_two_sites_is_validated_whole() -> None:
    of, sites = np.array([0, 0, 1, 2, 3, 4, 5, 6]), np.array([0, 1, 0, 0, 0, 0, 0, 0])
    for seed in range(30):
        train, measured, _ = prepare(of, sites, of == 6, Digits(validation=0.4, seed=seed))
        assert not train & measured


def test_rejects_patients_in_training_and_validation_parts() -> None:
    of, parts = np.array([0, 1, 1, 2]), np.array([0, 0, 2, 1])
    with pytest.raises(DataError, match="patient '1'"):
        prepare(of, np.zeros(4), parts, FEW)


def test_rejects_validation_without_a_site_of_two_patients() -> None:
    with raises_invalid("data.validation", 0.25, "0", "site"):
        prepare(np.arange(3), np.array([0, 1, 1]), np.array([False, False, True]), FEW)


def test_test_images_are_not_used_with_validation() -> None:
    whole, part = load(Digits(seed=3)), load(FEW)

    def known(data: object) -> set[bytes]:
        return {one.numpy().tobytes() for one in data}  # type: ignore[attr-defined]

    tested = known(whole.test.inputs)
    only_tested = tested - known(whole.train.inputs)  # some digits are equal in all pixels
    assert len(only_tested) > 300
    assert not only_tested & (known(part.train.inputs) | known(part.test.inputs))
    assert len(part.train) + len(part.test) == len(whole.train)
    assert len(known(part.train.inputs) & known(part.test.inputs)) < 5
    assert known(part.train.inputs) | known(part.test.inputs) == known(whole.train.inputs)
    assert "training examples, held out with seed 3; the test part is not used" in part.note
    assert "held out" not in whole.note


def test_note_counts_patients_not_images() -> None:
    images = [
        InstanceImage(
            np.zeros((3, 8, 8), np.uint8), np.eye(8, dtype=np.int32), f"s{n}", "", n > 7, patient=f"p{n // 2}"
        )
        for n in range(10)
    ]
    config = make_data_config("mine", patch=8, validation=0.25)
    data = nuclei_data_set(images, config, "mine", "", "organ")
    assert "evaluated on 1 of 4 training patients" in data.note
    assert len(data.test) == 2


def test_rejects_validation_with_node_data(tmp_path: Path) -> None:
    """This applies to deployed federations and offline queries."""
    message = r"invalid data\.validation = 0\.25 \(expected 0, as nodes with their own data"
    config = replace(run_config("digits-fedkd"), data=FEW)
    with pytest.raises(ArgumentError, match=message):
        run._with_kit(config, tmp_path / "kit")
    with pytest.raises(ArgumentError, match=message):
        offline.build_offline_queries(config)


def test_run_notes_validation_data() -> None:
    experiment, about = build_simulation(replace(run_config("digits-standalone"), data=FEW))
    assert about["data"]["test"] == 360
    assert any(note.startswith("evaluated on validation data") for note in experiment.notes)
    plain, _ = build_simulation(run_config("digits-standalone"))
    assert not any("validation" in note for note in plain.notes)
