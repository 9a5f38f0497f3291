"""Checkpoints: round trips, and crashes that leave the previous file intact."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from torch import nn

from fedstill.core import checkpoint as state_module
from fedstill.core.checkpoint import load_state, save_state


def equal(a: Any, b: Any) -> bool:
    """Return whether types and values are equal, tensors by value, dtype and shape."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def round_trip(value: Any, folder: Path) -> Any:
    save_state(folder / "state", value)
    return load_state(folder / "state")


@pytest.mark.parametrize(
    "value",
    [
        {"tensor": "a dict whose key looks like the format's own", "dict": [["list", 1]]},
        [torch.tensor(3.5), torch.zeros(0, 3), torch.arange(6).view(2, 3), torch.tensor([True, False])],
        [torch.ones(2, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.uint8)],
        {"not contiguous": torch.arange(6).view(2, 3).T, "a view": torch.arange(9)[2:4]},
    ],
)
def test_nested_states_round_trip(value: Any, tmp_path: Path) -> None:
    assert equal(round_trip(value, tmp_path), value)


KEYS = st.one_of(st.text(max_size=4), st.integers(-5, 5))
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False),
        st.text(max_size=5),
        st.lists(st.floats(width=32, allow_nan=False), max_size=3).map(torch.tensor),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
    ),
    max_leaves=8,
)


@given(VALUES)
def test_any_nested_state_round_trips(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    assert equal(round_trip(value, tmp_path_factory.getbasetemp()), value)


def test_shared_tensors_are_loaded_separately(tmp_path: Path) -> None:
    shared = torch.arange(4.0)
    back = round_trip({"all": shared, "part": shared[1:3]}, tmp_path)
    back["all"][1] = 9
    assert back["part"].tolist() == [1, 2]


def test_optimizer_resumes_from_saved_state(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        return model, torch.optim.Adam(model.parameters(), 0.1, betas=(0.5, 0.999))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.arange(6.0).view(2, 3)).square().sum().backward()
        optimizer.step()

    model, optimizer = made()
    step(model, optimizer)
    state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
    save_state(tmp_path / "state", state)
    step(model, optimizer)

    again, its_optimizer = made()
    state = load_state(tmp_path / "state")
    again.load_state_dict(state["model"])
    its_optimizer.load_state_dict(state["optimizer"])
    step(again, its_optimizer)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("value", [{1, 2}, object(), {"deep": [{"er": b"bytes"}]}])
def test_rejects_unsupported_values_and_keeps_old_file(value: Any, tmp_path: Path) -> None:
    save_state(tmp_path / "state", {"old": 1})
    with pytest.raises(TypeError, match=r"set|object|bytes"):
        save_state(tmp_path / "state", value)
    assert load_state(tmp_path / "state") == {"old": 1}


def test_crash_before_replace_keeps_old_file_and_next_save_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    save_state(tmp_path / "state", {"old": 1})
    with monkeypatch.context() as patch:
        patch.setattr(state_module.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            save_state(tmp_path / "state", {"new": 2})
    assert load_state(tmp_path / "state") == {"old": 1}
    save_state(tmp_path / "state", {"new": 2})
    assert load_state(tmp_path / "state") == {"new": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_full_disk_raises_its_error_and_keeps_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.safetensors"
    save_state(path, {"step": 1})

    def full(*given: Any, **more: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(state_module, "save_file", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*state\.safetensors'$") as caught:
        save_state(path, {"step": 2})
    assert caught.value.errno == errno.ENOSPC
    assert load_state(path) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_file_contains_no_pickle(tmp_path: Path) -> None:
    save_state(tmp_path / "state", {"a": (1, torch.ones(1))})
    raw = (tmp_path / "state").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert set(header) == {"__metadata__", "0"}
    assert len(raw) == 8 + int.from_bytes(raw[:8], "little") + 4
