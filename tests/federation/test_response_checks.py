"""Checks of responses: invalid responses are found, and the faulty node is named."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core.errors import NodeFault
from fedstill.federation.response_checks import (
    find_faults,
    invalid_dtype_fault,
    l2_norms,
    mismatched_gradient_faults,
    non_finite_faults,
    oversized_gradient_faults,
)
from fedstill.protocol.queries import Query

ASKED = Query(lambda node: {}, releases={"logits": "logits", "rate": "critic"}, name="predict")
B, C = 4, 3


def sound(seed: int, **changes: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "logits": torch.randn(B, C, generator=generator),
        "rate": torch.rand(B, generator=generator),
        **changes,
    }


def faults_of(outlier: float = 100.0, **responses: Any) -> dict[str, str]:
    return find_faults(responses, ASKED, outlier)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["logits", "rate"])
def test_finds_non_finite_tensors(wrong: float, name: str) -> None:
    bad = sound(1)
    bad[name].view(-1)[0] = wrong
    numbers = bad[name].numel()
    result = {"b": f"{name} hold NaN or infinity (1 of {numbers} numbers)"}
    both = {"a": sound(0), "b": bad}
    assert faults_of(a=sound(0), b=bad, c=sound(2)) == result
    assert non_finite_faults(both, l2_norms(both)) == result
    assert faults_of(b=bad) == result  # also without other nodes to compare with


def test_large_finite_numbers_are_valid() -> None:
    large = {"a": {"logits": torch.tensor([1e30, -3e38])}}
    assert non_finite_faults(large, l2_norms(large)) == {}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"logits": torch.zeros(B, C + 1)}, r"logits are torch.float32 of shape \(4, 4\)"),
        ({"logits": torch.zeros(B - 1, C)}, r"\(3, 3\)"),
        ({"logits": torch.zeros(B, C, dtype=torch.float64)}, "torch.float64"),
        ({"rate": torch.zeros(())}, r"shape \(\)"),
        ({"more": torch.zeros(1)}, r"responded \['logits', 'more', 'rate'\], not \['logits', 'rate'\]"),
    ],
)
def test_finds_shape_and_dtype_outliers(changes: dict[str, Any], what: str) -> None:
    faults = faults_of(a=sound(0), b=sound(1, **changes), c=sound(2))
    assert list(faults) == ["b"]
    assert re.search(what, faults["b"])


def test_finds_oversized_logits() -> None:
    ones = torch.ones(B, C)
    responses = {
        name: sound(0, logits=ones * factor) for name, factor in zip("abc", (1, 3, 1000), strict=True)
    }
    # The others' sizes are 1 and 3, their median 2: 1000 / 2.
    assert find_faults(responses, ASKED, 100.0) == {
        "c": "logits are 500 times as large as others': link.outlier 100"
    }
    assert find_faults(responses, ASKED, 499.0) == {
        "c": "logits are 500 times as large as others': link.outlier 499"
    }
    assert find_faults(responses, ASKED, 501.0) == {}
    assert find_faults(responses, ASKED, float("inf")) == {}


@pytest.mark.parametrize("kind", ["critic", "parameters"])
def test_finds_oversized_scores_and_weights(kind: str) -> None:
    query = Query(lambda node: {}, releases={"w": kind}, name="tell")
    responses = {
        name: {"w": torch.full((4,), size)} for name, size in zip("abc", (0.5, 4.0, 250.0), strict=True)
    }
    # The others' median is 2.25, so the limit is 225.
    assert list(find_faults(responses, query, 100.0)) == ["c"]
    assert find_faults(responses, query, 120.0) == {}
    # Responses near zero do not make a response of usual size an outlier.
    responses = {
        name: {"w": torch.full((4,), size)} for name, size in zip("abc", (1e-6, 1e-3, 99.0), strict=True)
    }
    assert find_faults(responses, query, 100.0) == {}
    responses["c"]["w"] *= 2
    assert list(find_faults(responses, query, 100.0)) == ["c"]
    assert find_faults({"c": responses["c"]}, query, 100.0) == {}  # no other node to compare with


def test_two_differing_nodes_stop_run() -> None:
    small, large = sound(0, logits=torch.ones(B, C)), sound(1, logits=torch.full((B, C), 1e3))
    message = "logits of b are 1e+03 times as large as those of a: link.outlier is 100"
    with pytest.raises(NodeFault, match=re.escape(message)) as caught:
        faults_of(a=small, b=large)
    assert caught.value.node == "a, b"
    with pytest.raises(NodeFault, match="unknown which"):
        # a is unusually small, not b unusually large
        faults_of(a=sound(0, logits=torch.full((B, C), 1e-9)), b=sound(1))
    assert faults_of(a=small, b=sound(1, logits=torch.full((B, C), 99.0))) == {}
    with pytest.raises(NodeFault, match="not known") as caught:
        faults_of(a=sound(0), b=sound(1, logits=torch.zeros(B, C + 1)))
    assert caught.value.node == "a, b"


def test_zero_responses_are_no_outliers() -> None:
    nothing = torch.zeros(B, C)
    assert faults_of(a=sound(0, logits=nothing), b=sound(1, logits=nothing), c=sound(2)) == {}


@given(st.integers(0, 2), st.sampled_from([float("nan"), float("inf"), 1e5]), st.integers(0, B * C - 1))
def test_names_only_faulty_node(row: int, wrong: float, index: int) -> None:
    responses = {name: sound(seed) for seed, name in enumerate("abc")}
    responses["abc"[row]]["logits"].view(-1)[index] = wrong
    assert list(find_faults(responses, ASKED, 100.0)) == ["abc"[row]]


@pytest.mark.parametrize(
    ("counts", "size", "wrong"),
    [
        ([3.0, 0.0, 7.0], 10.0, None),
        ([0.0, 0.0, 0.0], 0.0, None),
        ([33333333.0, 33333333.0, 0.0], 66666668.0, None),  # within the precision of float32
        ([3.0, 0.0, 7.0], 11.0, "counts are 10 labels of 11 examples"),
        ([-3.0, 6.0, 7.0], 10.0, "counts are not numbers from 0 up to 1e+12"),
        ([2.5, 0.5, 7.0], 10.0, None),  # fractions of pictures
        ([2.5, 0.5, 7.0], 11.0, "counts are 10 labels of 11 examples"),
        ([2e12, 0.0, 0.0], 2e12, "counts are not numbers"),
        ([1e38, 1e38, 0.0], 2e38, "counts are not numbers"),
        ([3.0, 0.0, 7.0], -10.0, "sizes are not numbers"),
    ],
)
def test_finds_inconsistent_counts(counts: list[float], size: float, wrong: str | None) -> None:
    query = Query(lambda node: {}, releases={"counts": "label counts", "sizes": "label counts"}, name="count")
    good = {"counts": torch.tensor([1.0, 2.0, 3.0]), "sizes": torch.tensor(6.0)}
    faults = find_faults(
        {"a": good, "b": {"counts": torch.tensor(counts), "sizes": torch.tensor(size)}}, query, 100.0
    )
    assert list(faults) == (["b"] if wrong else [])
    assert (wrong or "") in faults.get("b", "")


def test_sizes_without_counts_are_integers() -> None:
    kinds = {"counts": "label counts", "sizes": "data sizes"}
    query = Query(lambda node: {}, releases=kinds, name="count")
    responses = {
        "a": {"counts": torch.tensor([9.0, 4.0]), "sizes": torch.tensor(10.0)},  # some examples have both
        "b": {"counts": torch.tensor([1.0, 1.0]), "sizes": torch.tensor(9.5)},
    }
    assert find_faults(responses, query, 100.0) == {"b": "sizes are not whole numbers"}


def gradients(*sizes: float) -> dict[str, dict[str, torch.Tensor]]:
    return {name: {"d/dx": torch.full((2, 3), float(size))} for name, size in zip("abc", sizes, strict=False)}


def oversized(
    tensors: dict[str, dict[str, torch.Tensor]],
    output_gradients: dict[str, dict[str, torch.Tensor]],
    outlier: float,
) -> dict[str, str]:
    return oversized_gradient_faults(tensors, output_gradients, l2_norms(tensors), outlier, "ask")


def test_finds_oversized_gradients_only() -> None:
    output_gradients = {name: {"logits": torch.ones(2, 2)} for name in "abc"}
    # The limit is 100 x 100 times the others' median, which is 1.5.
    assert list(oversized(gradients(1, 2, 16e3), output_gradients, 100.0)) == ["c"]
    assert oversized(gradients(1, 2, 14e3), output_gradients, 100.0) == {}
    assert oversized(gradients(1, 1e-9, 2), output_gradients, 100.0) == {}
    assert oversized(gradients(0, 0, 2), output_gradients, 100.0) == {}
    assert oversized(gradients(1, 2, 1e30), output_gradients, float("inf")) == {}
    # A node with larger output gradients may return larger gradients.
    output_gradients["c"] = {"logits": torch.full((2, 2), 1e5)}
    assert oversized(gradients(1, 2, 16e3), output_gradients, 100.0) == {}
    # A node without output gradients may return as much as the others, but not more.
    output_gradients["c"] = {"logits": torch.zeros(2, 2)}
    assert oversized(gradients(1, 2, 3), output_gradients, 100.0) == {}
    assert list(oversized(gradients(1, 2, 1e30), output_gradients, 100.0)) == ["c"]
    with pytest.raises(NodeFault, match="gradients of b") as caught:
        oversized(gradients(1, 1e30), output_gradients, 100.0)
    assert caught.value.node == "a, b"


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int8])
def test_gradients_are_floating_point(dtype: torch.dtype) -> None:
    x = {"x": torch.zeros(2, 3)}
    assert mismatched_gradient_faults({"a": {"d/dx": torch.zeros(2, 3).half()}}, x) == {}
    assert list(mismatched_gradient_faults({"a": {"d/dx": torch.zeros(2, 3).to(dtype)}}, x)) == ["a"]


def test_finds_invalid_dtypes() -> None:
    ones = torch.ones(2)
    assert invalid_dtype_fault({"x": ones, "y": ones.half(), "y:scale": ones, "n": ones.long()}) is None
    for dtype in (torch.complex64, torch.float8_e4m3fn, torch.uint16):
        assert invalid_dtype_fault({"x": ones.to(dtype)}) == f"x are {dtype}"
    assert invalid_dtype_fault({"x": ones, "x:scale": ones.long()}) == "x:scale are torch.int64"
    assert invalid_dtype_fault({"x": ones, "x:scale": ones, "x:scale:scale": ones}) == (
        "x:scale:scale is the scale of a scale"
    )
