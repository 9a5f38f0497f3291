"""Tensors as bytes: what the library of the form reads and writes, and what is none."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from fedstill.protocol.tensor_bytes import DTYPES, LENGTH, METADATA, header_of, tensors_of, to_bytes

SHAPES = st.lists(st.integers(0, 4), max_size=4)
NUMBERS = torch.arange(1024, dtype=torch.uint8).remainder(2)  # of every dtype numbers that are some


def made(dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    return NUMBERS.repeat(8)[:count].view(dtype).reshape(shape)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    def raw(tensor: torch.Tensor) -> list[int]:
        found: list[int] = tensor.reshape(-1).view(torch.uint8).tolist()
        return found

    told = [{name: (t.dtype, t.shape, raw(t)) for name, t in each.items()} for each in (one, other)]
    return told[0] == told[1]


@given(st.dictionaries(st.text(max_size=5), st.tuples(st.sampled_from(list(DTYPES.values())), SHAPES)))
def test_the_library_reads_what_is_written_and_writes_what_is_read(
    told: dict[str, tuple[torch.dtype, list[int]]],
) -> None:
    tensors = {name: made(dtype, shape) for name, (dtype, shape) in told.items() if name != METADATA}
    blob, theirs = to_bytes(tensors, {"note": "x"}), save(tensors, metadata={"note": "x"})
    assert same(load(blob), tensors)
    assert same(tensors_of(theirs, header_of(theirs)), tensors)
    assert same(tensors_of(blob, header_of(blob)), tensors)
    begins = {name: header_of(blob)[name]["data_offsets"][0] for name in tensors}
    assert all(begin % tensors[name].element_size() == 0 for name, begin in begins.items())


def test_what_lies_otherwise_in_memory_is_written_in_order() -> None:
    x = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    for each in (x, x[:, 1:], x[..., ::2], torch.ones(()).expand(3, 2), torch.ones(()).expand(1), x[:0]):
        dense = torch.empty(each.shape).copy_(each)
        assert to_bytes({"x": each}, {}) == to_bytes({"x": dense}, {})


def test_other_bytes_than_0_and_1_are_true() -> None:
    blob = to_bytes({"x": torch.tensor([True, False])}, {})
    found = tensors_of(blob[:-2] + b"\x07\x00", header_of(blob))["x"]
    assert found.view(torch.uint8).tolist() == [1, 0]


def blob_of(header: Any, data: bytes = bytes(8)) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(LENGTH, "little") + text + data


def part(begin: Any, end: Any, dtype: str = "F32", shape: Any = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_bytes_of_which_each_is_a_tensors_are_read() -> None:
    halves = {"a": part(0, 4, shape=[1]), "b": part(4, 8, shape=[1]), "none": part(8, 8, shape=[0, 3])}
    assert {name: tuple(t.shape) for name, t in tensors_of(blob_of(halves), halves).items()} == {
        "a": (1,), "b": (1,), "none": (0, 3)
    }  # fmt: skip


@pytest.mark.parametrize(
    "header",
    [
        {},  # eight bytes that are nobody's
        {"x": part(0, 4, shape=[1])},
        {"x": part(4, 8, shape=[1])},
        {"x": part(0, 8), "y": part(0, 8)},
        {"x": part(0, 4, shape=[1]), "y": part(5, 8, "I8", [3])},
        {"x": part(0, 16, shape=[4])},
        {"x": part(0, 8, shape=[3])},
        {"x": part(0, 8, shape=[-1, -2])},
        {"x": part(0, 8, shape=[True, 2])},
        {"x": part(0, 8, shape=[2.0])},
        {"x": part(0.0, 8)},
        {"x": part(0, 8, "F33")},
        {"x": part(0, 8, shape="2")},
        {"x": part(0, 8, shape=None)},
        {"x": part("0", 8)},
        {"x": {"dtype": "F32", "shape": [2]}},
        {"x": [0, 8]},
        {"x": part(0, 8), "y": part(8, 8, shape=[0, 2**61, 2])},
    ],
)
def test_what_is_not_all_there_or_there_twice_is_refused(header: dict[str, Any]) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        tensors_of(blob_of(header), header)


@pytest.mark.parametrize("blob", [b"", bytes(8), b"\xff" * 8 + b"{}", blob_of([]), blob_of("x")])
def test_what_has_no_header_is_refused(blob: bytes) -> None:
    with pytest.raises(ValueError, match=r"cut short|no table"):
        header_of(blob)
