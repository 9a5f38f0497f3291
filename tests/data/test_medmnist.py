"""MedMNIST's own files: three parts, each of which stays what its authors made it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstill.core.errors import DataError
from fedstill.data import load, named, private
from fedstill.data.private_config import PrivateConfig
from fedstill.tasks.multi_label import MultiLabelConfig

SIZES = {"train": 12, "val": 4, "test": 6}
START = {"train": 0, "val": 100, "test": 200}


def saved(path: Path, labels: int = 1, **changes: Any) -> Path:
    """Image i of a part is of one colour, which tells part and number; MedMNIST's labels have two axes."""
    arrays: dict[str, Any] = {}
    for part, count in SIZES.items():
        number = (START[part] + np.arange(count)).astype(np.uint8)
        arrays[f"{part}_images"] = np.broadcast_to(number[:, None, None, None], (count, 28, 28, 3))
        arrays[f"{part}_labels"] = np.stack([(number + k) % 2 for k in range(labels)], axis=1)
    arrays.update(changes)
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def numbers(data: Any) -> list[int]:
    return [round(float(x) * 127.5 + 127.5) for x in data.inputs[:, 0, 0, 0]]


def test_parts_are_the_authors_and_validation_is_their_own(tmp_path: Path) -> None:
    path = str(saved(tmp_path / "pathmnist.npz"))
    data = load(named(path))
    assert (data.name, data.classes, data.train.inputs.shape[1:]) == ("pathmnist", ("0", "1"), (3, 28, 28))
    assert (numbers(data.train), numbers(data.test)) == (list(range(12)), list(range(200, 206)))
    assert data.train.targets.tolist() == [n % 2 for n in range(12)]
    assert data.note == "its own validation part of 4 is not used"
    chosen = load(named(path, validation=0.1))
    assert (numbers(chosen.train), numbers(chosen.test)) == (list(range(12)), list(range(100, 104)))
    assert chosen.note == "measured on 4 of its own validation part; the test part is not used"


def test_several_labels_are_findings_and_grey_images_have_one_channel(tmp_path: Path) -> None:
    grey = {f"{part}_images": np.zeros((count, 28, 28), np.uint8) for part, count in SIZES.items()}
    data = load(named(str(saved(tmp_path / "chestmnist.npz", labels=3, **grey))), MultiLabelConfig())
    assert data.train.inputs.shape == (12, 1, 28, 28)
    assert data.test.targets[:2].tolist() == [[0, 1, 0], [1, 0, 1]]


def test_a_node_has_the_training_part_alone(tmp_path: Path) -> None:
    saved(tmp_path / "data.npz")
    data, spec = private.load(PrivateConfig(), tmp_path)
    assert (numbers(data), spec.shape) == (list(range(12)), (3, 28, 28))


def test_a_part_that_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no array 'val_labels', only test_images"):
        load(named(str(saved(tmp_path / "part.npz", val_labels=None))))
