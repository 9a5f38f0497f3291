from __future__ import annotations

import numpy as np
import pytest
import torch

from fedstill.core.dataset import TensorData, normalised


def labels(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_subset_keeps_the_asked_order_and_pairs_and_owns_its_memory() -> None:
    data = TensorData(torch.arange(3.0).view(3, 1, 1, 1), labels(10, 11, 12))
    part = data.subset(torch.tensor([2, 0]))
    assert len(part) == 2
    assert part.inputs.flatten().tolist() == [2.0, 0.0]
    assert part.targets.tolist() == [12, 10]
    part.inputs.zero_()
    assert data.inputs.flatten().tolist() == [0.0, 1.0, 2.0]


def test_normalised_by_hand() -> None:
    # 51 / 255 = 0.2, so (0.2 - 0.5) / 0.5 = -0.6; second channel: (0.2 - 0.1) / 0.25 = 0.4
    pixels = np.full((1, 2, 1, 1), 51, dtype=np.uint8)
    assert normalised(pixels, (0.5, 0.1), (0.5, 0.25)).flatten().tolist() == pytest.approx([-0.6, 0.4])
    # floats are in [0, 1] already
    floats = np.full((1, 1, 1, 1), 0.75, dtype=np.float64)
    x = normalised(floats, (0.5,), (0.5,))
    assert x.dtype == torch.float32
    assert x.item() == 0.5
