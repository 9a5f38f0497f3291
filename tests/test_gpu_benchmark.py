"""The GPU benchmark: its estimates by hand, and detection of differences between devices."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import gpu

    yield gpu
    for name in ("gpu", "step_time"):
        sys.modules.pop(name)


def test_operations_and_bytes_of_a_layer_by_hand(gpu: Any) -> None:
    """One product forward, and one backward for weights or inputs: 2 * 5 * 4 * 3 operations each."""
    layer, x = nn.Linear(4, 3, bias=False), torch.ones(5, 4)
    for learns in (True, False):
        assert gpu.cost(layer, x, learns).flop == 2 * 120
    assert gpu.cost(layer, x, True).bytes >= 4 * (5 * 4 + 4 * 3 + 5 * 3)
    assert gpu.cost(layer, x, True).times(3).flop == 720


def test_estimate_of_two_cards_by_hand(gpu: Any) -> None:
    rows = gpu.estimate(gpu.Chosen(nodes=2, batch=4, width=8))
    assert [row["card"] for row in rows] == ["H100 SXM", "H200"] * 2
    first, second = rows[:2]
    assert first["launches"] == second["launches"] == first["kernels"] * gpu.LAUNCH
    assert first["memory, float32"] / second["memory, float32"] == pytest.approx(4.8 / 3.35)
    assert first["arithmetic, bfloat16"] == first["flop"] / 989e12


@pytest.mark.slow
def test_detects_method_that_differs_on_device(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original, names = gpu.trained, list[str]()

    def trained(name: str, engine: Any) -> tuple[torch.Tensor, torch.Tensor]:
        before, after = original(name, engine)
        names.append(name)
        changed = (
            names.count("fedavg") == 4 and name == "fedavg"
        )  # two runs on the CPU, then two on the device
        return before, before + (after - before) * (0.9 if changed else 1.0)

    monkeypatch.setattr(gpu, "trained", trained)
    monkeypatch.setattr(
        gpu.METHODS, "builtin", {name: gpu.METHODS.builtin[name] for name in ("fedavg", "standalone")}
    )
    rows = gpu.check(gpu.Chosen(device="cpu"))
    assert [(row["method"], row["engine"]) for row in rows if not row["equal"]] == [("fedavg", "stacked")]
