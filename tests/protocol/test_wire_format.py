"""Wire format: tensors as bytes, compared with the safetensors library; messages; and rounding.

Malformed bytes and messages are refused; the error of compressed tensors is bounded.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from fedstill.core.errors import ArgumentError, DataError
from fedstill.federation.link_config import LinkConfig
from fedstill.protocol.wire_format import (
    DTYPES,
    LENGTH_BYTES,
    METADATA,
    WireConfig,
    WireDtype,
    decode_header,
    decode_tensors,
    decompress,
    encode_tensors,
    pack,
    tensor_bytes,
    unpack,
    wire_kind,
)

SHAPES = st.lists(st.integers(0, 4), max_size=4)
NUMBERS = torch.arange(1024, dtype=torch.uint8).remainder(2)  # bytes that are valid in every dtype


def made(dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    return NUMBERS.repeat(8)[:count].view(dtype).reshape(shape)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    def raw(tensor: torch.Tensor) -> list[int]:
        values: list[int] = tensor.reshape(-1).view(torch.uint8).tolist()
        return values

    decoded = [{name: (t.dtype, t.shape, raw(t)) for name, t in each.items()} for each in (one, other)]
    return decoded[0] == decoded[1]


@given(st.dictionaries(st.text(max_size=5), st.tuples(st.sampled_from(list(DTYPES.values())), SHAPES)))
def test_round_trips_with_safetensors_library(
    decoded: dict[str, tuple[torch.dtype, list[int]]],
) -> None:
    tensors = {name: made(dtype, shape) for name, (dtype, shape) in decoded.items() if name != METADATA}
    blob, theirs = encode_tensors(tensors, {"note": "x"}), save(tensors, metadata={"note": "x"})
    assert same(load(blob), tensors)
    assert same(decode_tensors(theirs, decode_header(theirs)), tensors)
    assert same(decode_tensors(blob, decode_header(blob)), tensors)
    begins = {name: decode_header(blob)[name]["data_offsets"][0] for name in tensors}
    assert all(begin % tensors[name].element_size() == 0 for name, begin in begins.items())


def test_non_contiguous_tensors_are_written_in_order() -> None:
    x = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    for each in (x, x[:, 1:], x[..., ::2], torch.ones(()).expand(3, 2), torch.ones(()).expand(1), x[:0]):
        dense = torch.empty(each.shape).copy_(each)
        assert encode_tensors({"x": each}, {}) == encode_tensors({"x": dense}, {})


def test_any_nonzero_byte_is_true() -> None:
    blob = encode_tensors({"x": torch.tensor([True, False])}, {})
    decoded = decode_tensors(blob[:-2] + b"\x07\x00", decode_header(blob))["x"]
    assert decoded.view(torch.uint8).tolist() == [1, 0]


def blob_of(header: Any, data: bytes = bytes(8)) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(LENGTH_BYTES, "little") + text + data


def part(begin: Any, end: Any, dtype: str = "F32", shape: Any = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_accepts_adjacent_and_empty_tensors() -> None:
    halves = {"a": part(0, 4, shape=[1]), "b": part(4, 8, shape=[1]), "none": part(8, 8, shape=[0, 3])}
    assert {name: tuple(t.shape) for name, t in decode_tensors(blob_of(halves), halves).items()} == {
        "a": (1,), "b": (1,), "none": (0, 3)
    }  # fmt: skip


@pytest.mark.parametrize(
    "header",
    [
        {},  # eight bytes that no tensor covers
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
def test_rejects_missing_and_overlapping_tensors(header: dict[str, Any]) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        decode_tensors(blob_of(header), header)


@pytest.mark.parametrize("blob", [b"", bytes(8), b"\xff" * 8 + b"{}", blob_of([]), blob_of("x")])
def test_rejects_missing_header(blob: bytes) -> None:
    with pytest.raises(ValueError, match=r"cut short|not a table"):
        decode_header(blob)


KINDS = {"x": "inputs"}
WIRE_DTYPES: tuple[Any, ...] = ("float16", "int8")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
DTYPES = (torch.float32, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool)


@st.composite
def tensors(draw: Any, dtypes: tuple[torch.dtype, ...] = DTYPES) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    return (torch.randn(shape, generator=generator) * 10).to(draw(st.sampled_from(dtypes)))


# --- messages -----------------------------------------------------------------------------------------


@given(
    st.dictionaries(st.text(), JSON, max_size=4),
    st.dictionaries(st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"), tensors()),
)
def test_message_round_trips(header: dict[str, Any], named: dict[str, torch.Tensor]) -> None:
    message = pack(header, named)
    decoded, unpacked = unpack(message)
    assert decoded == header
    assert unpacked.keys() == named.keys()
    for name, tensor in named.items():
        assert unpacked[name].dtype == tensor.dtype
        assert torch.equal(unpacked[name], tensor)
    assert pack(header, dict(reversed(named.items()))) == message  # equal messages have equal bytes


def test_channels_last_layout_round_trips() -> None:
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    _, tensors = unpack(pack({}, {"x": x, "y": x.contiguous(), "half": x[:, :2]}))
    assert tensors["x"].stride() == x.stride()
    assert tensors["y"].is_contiguous()
    assert torch.equal(tensors["half"], x[:, :2])


def test_unpacked_tensors_are_aligned() -> None:
    """The alignment of tensors decides which kernels torch uses, and so the last digits of metrics."""
    named = {f"x{size}": torch.ones(size, 1, 1, 1) for size in range(1, 20)}
    assert {tensor.data_ptr() % 64 for tensor in unpack(pack({}, named))[1].values()} == {0}


def test_unpacked_message_has_no_graph() -> None:
    x = torch.ones(2, requires_grad=True)
    assert not unpack(pack({}, {"x": x * 2}))[1]["x"].requires_grad


@given(st.binary(max_size=200))
def test_rejects_bytes_that_are_not_a_message(garbage: bytes) -> None:
    with pytest.raises(DataError, match="not a message"):
        unpack(garbage)


WHOLE = pack({"operation": "answer_query", "number": 3}, {"x": torch.arange(6.0).view(2, 3)})


@pytest.mark.parametrize("length", [*range(0, len(WHOLE), 7), len(WHOLE) - 1])
def test_rejects_truncated_message(length: int) -> None:
    with pytest.raises(DataError):
        unpack(WHOLE[:length])


@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
def test_changed_byte_is_refused_or_changes_only_its_value(index: int, by: int) -> None:
    changed = bytearray(WHOLE)
    changed[index] = (changed[index] + by) % 256
    try:
        header, named = unpack(bytes(changed))
    except DataError:
        return
    assert isinstance(header, dict)
    assert all(isinstance(tensor, torch.Tensor) for tensor in named.values())


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"fedstill": "no JSON"},
        {"fedstill": "[]"},
        {"fedstill": "{}"},
        {"fedstill": json.dumps({"fedstill": [], "strides": {}})},
        {"fedstill": json.dumps({"fedstill": {}, "strides": []})},
        {"fedstill": json.dumps({"fedstill": {}, "strides": {"x": 3}})},
        {"fedstill": "[" * 100_000},
    ],
)
def test_rejects_safetensors_file_with_another_header(metadata: dict[str, str]) -> None:
    with pytest.raises(DataError):
        unpack(save({"x": torch.zeros(1, 1, 1, 1)}, metadata=metadata))


@pytest.mark.parametrize("shape", [[0, 2**62, 2**62], [2**63, 0], [2**40, 2**40, 0, 2**40]])
def test_rejects_shape_larger_than_memory(shape: list[int]) -> None:
    """A tensor without elements, which safetensors accepts."""
    decoded = json.dumps({"fedstill": {}, "strides": {}})
    of_x = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    header = json.dumps({"__metadata__": {"fedstill": decoded}, "x": of_x}).encode()
    with pytest.raises(DataError, match="not a message"):
        unpack(len(header).to_bytes(8, "little") + header)


@pytest.mark.parametrize("message", [None, {}, 5, "text", bytearray(WHOLE)])
def test_rejects_messages_that_are_not_bytes(message: Any) -> None:
    with pytest.raises(DataError, match="expected bytes"):
        unpack(message)


# --- compression --------------------------------------------------------------------------------------


def test_int8_by_hand() -> None:
    x = torch.tensor([[1.27, -0.504, 0.0], [0.0, 0.0, 0.0], [-254.0, 3.0, 127.0]])
    sent = WireConfig(inputs="int8").compress({"x": x}, KINDS)
    assert sent["x"].dtype == torch.int8
    assert sent["x"].tolist() == [[127, -50, 0], [0, 0, 0], [-127, 2, 64]]  # 1.5 and 63.5 round to even
    torch.testing.assert_close(sent["x:scale"][[0, 2]], torch.tensor([0.01, 2.0]))
    assert tensor_bytes(sent["x"]) == 9
    torch.testing.assert_close(
        decompress(sent)["x"], torch.tensor([[1.27, -0.5, 0.0], [0.0, 0.0, 0.0], [-254.0, 4.0, 128.0]])
    )


@given(tensors(dtypes=(torch.float32,)).filter(lambda x: x.ndim > 0), st.sampled_from(WIRE_DTYPES))
def test_rounding_is_bounded_by_each_rows_largest_number(x: torch.Tensor, dtype: WireDtype) -> None:
    sent = WireConfig(inputs=dtype).compress({"x": x}, KINDS)
    restored = decompress(sent)["x"]
    assert restored.dtype == torch.float32
    assert restored.shape == x.shape
    if x.numel():
        top = x.abs().reshape(len(x), -1).amax(1).view(-1, *(1,) * (x.ndim - 1))
        # Half of one of 254 steps, or half a unit in the last place of a mantissa of eleven bits.
        assert bool(((restored - x).abs() <= top * (0.5 / 127 if dtype == "int8" else 2**-11) * 1.0001).all())


@pytest.mark.parametrize("dtype", WIRE_DTYPES)
@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1.0, 1e30])
def test_gradients_of_any_size_survive(dtype: WireDtype, scale: float) -> None:
    x = torch.tensor([[0.5, -1.0]]) * scale
    restored = decompress(WireConfig(gradients=dtype).compress({"g": x}, {"g": "gradients"}))["g"]
    torch.testing.assert_close(restored, x, rtol=0.01, atol=0)


@pytest.mark.parametrize("dtype", WIRE_DTYPES)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_stay_non_finite(dtype: WireDtype, wrong: float) -> None:
    x = torch.tensor([[1.0, wrong], [1.0, 2.0]])
    restored = decompress(WireConfig(inputs=dtype).compress({"x": x}, KINDS))["x"]
    assert not torch.isfinite(restored[0]).all()
    assert torch.isfinite(restored[1]).all()


def test_only_inputs_and_gradients_are_rounded() -> None:
    wire = WireConfig("int8", "float16")
    named = {
        "z": torch.randn(2, 2),
        "x": torch.randn(2, 2),
        "g": torch.randn(2, 2),
        "n": torch.tensor([1, 2]),
    }
    sent = wire.compress(named, {"z": "logits", "x": "inputs", "g": "gradients", "n": "inputs"})
    assert {name: tensor.dtype for name, tensor in sent.items()} == {
        "z": torch.float32,
        "x": torch.int8,
        "x:scale": torch.float32,
        "g": torch.float16,
        "g:scale": torch.float32,
        "n": torch.int64,
    }
    assert torch.equal(sent["z"], named["z"])
    assert decompress(sent).keys() == named.keys()


def test_scale_has_kind_of_its_tensor() -> None:
    assert wire_kind("x:scale", KINDS) == wire_kind("x", KINDS) == "inputs"
    with pytest.raises(KeyError):
        wire_kind("y", KINDS)


@pytest.mark.parametrize(
    "named",
    [
        {"x:scale": torch.ones(2)},
        {"x": torch.ones(2, 3), "x:scale": torch.ones(3)},
        {"x": torch.ones(2, 3), "x:scale": torch.ones(2, 1)},
        {"x": torch.ones(2, 3), "x:scale": torch.ones(())},
        {"x": torch.ones(()), "x:scale": torch.ones(2)},
    ],
)
def test_rejects_scales_of_wrong_shape(named: dict[str, torch.Tensor]) -> None:
    with pytest.raises(DataError, match="came with"):
        decompress(named)


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(2, 3).to(dtype)
        for dtype in (torch.float8_e5m2, torch.bool, torch.uint8, torch.uint16, torch.bfloat16, torch.float32)
    ],
    ids=lambda x: str(x.dtype),
)
def test_only_compressed_tensors_have_scales(x: torch.Tensor) -> None:
    with pytest.raises(DataError, match=r"scales .*torch\.int8 .*torch\.float16"):
        decompress({"x": x, "x:scale": torch.ones(2)})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.float8_e5m2, torch.int64])
def test_scales_are_float32(dtype: torch.dtype) -> None:
    with pytest.raises(DataError, match="with scales"):
        decompress({"x": torch.ones(2, 3).to(torch.int8), "x:scale": torch.ones(2).to(dtype)})


# --- config -------------------------------------------------------------------------------------------


def test_default_link_config() -> None:
    link = LinkConfig()
    assert (link.inputs, link.gradients, link.wait, link.quorum) == ("float32", "float32", 600.0, 1.0)
    assert [link.min_nodes(nodes) for nodes in (1, 3, 10)] == [1, 3, 10]


@pytest.mark.parametrize(
    ("quorum", "nodes", "least"),
    [(0.5, 2, 1), (0.5, 3, 2), (0.6, 5, 3), (0.7, 10, 7), (0.01, 3, 1), (2 / 3, 3, 2), (1.0, 7, 7)],
)
def test_a_quorum_is_a_share_rounded_up(quorum: float, nodes: int, least: int) -> None:
    assert LinkConfig(quorum=quorum).min_nodes(nodes) == least


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("wait", 0.0),
        ("wait", float("nan")),
        ("quorum", 0.0),
        ("quorum", 1.1),
        ("quorum", float("nan")),
        ("outlier", 1.0),
        ("outlier", float("nan")),
        ("inputs", "float8"),
        ("gradients", "bfloat16"),
    ],
)
def test_rejects_invalid_link_options(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=name):
        LinkConfig(**{name: value})
