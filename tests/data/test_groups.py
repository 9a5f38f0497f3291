"""Whose each example is: read from where the owner keeps it, kept by all that parts data, and limited."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.data.private import load
from fedstill.data.private_config import PrivateConfig
from fedstill.data.spec import InputSpec
from fedstill.data.units import limit_groups, numbered
from fedstill.tasks.classification import ClassificationConfig

SPEC = InputSpec(ClassificationConfig(), ("cat", "dog"), (1, 4, 4), (0.5,), (0.5,))
PATIENTS = ["ann", "bob", "ann", "eve"]
IMAGES = np.arange(4 * 16, dtype=np.uint8).reshape(4, 4, 4)


def made(groups: torch.Tensor | None) -> TensorData:
    n = 5 if groups is None else len(groups)
    return TensorData(torch.zeros(n, 1, 4, 4), torch.arange(n), groups)


def npz(folder: Path, group: str, **arrays: Any) -> PrivateConfig:
    np.savez(folder / "mine.npz", images=IMAGES, labels=[0, 1, 1, 0], **arrays)
    return PrivateConfig(path="mine.npz", group=group)


# --- read -----------------------------------------------------------------------------------------


def test_groups_of_a_csv_are_neither_pixels_nor_needed(tmp_path: Path) -> None:
    header = ",".join(["patient", "label", *(f"p{i}" for i in range(16))])
    rows = [
        ",".join([f" {name}", label, *map(str, image.flatten())])
        for name, label, image in zip(PATIENTS, ("cat", "dog", "dog", "cat"), IMAGES, strict=True)
    ]
    (tmp_path / "mine.csv").write_text("\n".join([header, *rows]), encoding="utf-8")
    data, _ = load(PrivateConfig(source="csv", path="mine.csv", group="patient"), tmp_path, SPEC)
    assert data.groups is not None
    assert data.groups.tolist() == numbered(PATIENTS).tolist()
    assert data.inputs.shape == (4, 1, 4, 4)
    torch.testing.assert_close(data.inputs[3, 0, 3, 3].item(), 63 / 255 * 2 - 1)


def test_a_column_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"data.group is 'ward': .* one value an example: patient"):
        load(npz(tmp_path, "ward", patient=PATIENTS), tmp_path, SPEC)
    (tmp_path / "mine.csv").write_text("label,p0\ncat,1\n", encoding="utf-8")
    with pytest.raises(ArgumentError, match=r"data.group is 'ward'"):
        load(PrivateConfig(source="csv", path="mine.csv", group="ward"), tmp_path, SPEC)


# --- kept -----------------------------------------------------------------------------------------


def test_subsets_and_moves_keep_groups() -> None:
    data = made(torch.tensor([5, 6, 5, 8, 9]))
    part = data.subset(torch.tensor([3, 0]))
    assert part.groups is not None
    assert part.groups.tolist() == [8, 5]
    moved = data.to("meta").groups
    assert moved is not None
    assert moved.device.type == "meta"
    assert made(None).subset(torch.tensor([0])).groups is None
    assert made(None).to("cpu").groups is None


# --- limited --------------------------------------------------------------------------------------


@given(groups=st.lists(st.integers(-3, 3), min_size=1, max_size=30), most=st.integers(2, 5))
def test_a_limit_keeps_the_first_of_each_group(groups: list[int], most: int) -> None:
    kept = limit_groups(made(torch.tensor(groups)), most)
    before: Counter[int] = Counter()
    expected = []
    for index, group in enumerate(groups):
        if before[group] < most:
            expected.append(index)
        before[group] += 1
    assert kept.targets.tolist() == expected
    assert kept.groups is not None
    assert max(Counter(kept.groups.tolist()).values()) <= most


def test_limits_that_cannot_be_kept() -> None:
    with pytest.raises(ArgumentError, match=r"privacy.group_size is 3: allowed is 1, unless data.group says"):
        limit_groups(made(None), 3)
    with pytest.raises(ArgumentError, match=r"privacy.group_size is 0: allowed is 1 or more"):
        limit_groups(made(torch.tensor([5])), 0)
