"""Sums in a ring: decoded weighted means differ from exact ones by at most half a rounding step per node."""

from __future__ import annotations

from fractions import Fraction
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.core.errors import DataError, NodeFault
from fedstill.protocol.payload_kinds import GRADIENTS, LABEL_COUNTS, LOGITS
from fedstill.protocol.secure_aggregation import (
    FRACTION_BITS,
    KEY_BYTES,
    add_contributions,
    contribution_faults,
    decode_sums,
    derive_key,
    encode_strings,
    from_ring,
    mask_sign,
    mask_tensor,
    sum_contributions,
    to_ring,
)

NUMBERS = st.floats(-1e4, 1e4, width=32)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(NUMBERS, st.integers(1, 10_000)), min_size=3, max_size=9))
def test_decoded_weighted_mean_stays_within_error_bound(held: list[tuple[float, int]]) -> None:
    kinds: dict[str, Any] = {"z": LOGITS, "z:weight": LABEL_COUNTS}
    each = [
        sum_contributions({"z": torch.tensor([[x]])}, kinds, {"z": "size"}, {"size": torch.tensor(float(n))})
        for x, n in held
    ]

    values, weights = decode_sums(add_contributions(each), kinds)

    n = sum(n for _, n in held)
    mean = sum(x * n for x, n in held) / n
    bound = (
        len(held) * 2.0 ** -(FRACTION_BITS + 1) / n
        + 2.0**-24 * abs(mean)
        + 1e-9 * max(abs(x) for x, _ in held)
    )
    assert abs(float(values["z"]) - mean) <= bound
    assert float(weights["z"]) == n


def test_class_without_records_has_the_lowest_mean_and_weight_one() -> None:
    kinds: dict[str, Any] = {"z": LOGITS, "z:weight": LABEL_COUNTS}
    counts = [torch.tensor([3.0, 1.0, 0.0]), torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.0])]
    z = [torch.tensor([[4.0, 2.0, 3.0]]), torch.tensor([[8.0, 9.0, 6.0]]), torch.tensor([[5.0, 5.0, 9.0]])]

    values, weights = decode_sums(
        add_contributions(
            [
                sum_contributions({"z": mine}, kinds, {"z": "counts"}, {"counts": own})
                for mine, own in zip(z, counts, strict=True)
            ]
        ),
        kinds,
    )

    assert values["z"].tolist() == [[5.0, 2.0, 2.0]]
    assert weights["z"].tolist() == [[4.0, 1.0, 1.0]]  # gradients are divided by these weights


def test_weighted_sums_contain_no_second_sum() -> None:
    """Weighted sums of low-precision responses (trees, int8) do not also reveal unweighted sums.

    A weight of n + e would put sum n z into the high digits and e sum z into the low ones.
    """
    kinds: dict[str, Any] = {"z": LOGITS, "z:weight": LABEL_COUNTS}
    counts = [torch.tensor([37.0]), torch.tensor([58.0]), torch.tensor([0.0])]

    def added(*z: float) -> torch.Tensor:
        each = [
            sum_contributions({"z": torch.tensor([[own]])}, kinds, {"z": "counts"}, {"counts": held})
            for own, held in zip(z, counts, strict=True)
        ]
        return add_contributions(each)["z"]

    # 37 x + 58 y is equal for both, x + y + z differs.
    assert torch.equal(added(1.0, 2.0, 3.0), added(1.0 + 58 / 8, 2.0 - 37 / 8, -5.0))


def test_gradients_are_encoded_with_smaller_steps() -> None:
    small = torch.tensor([[2.0**-35]])
    (read, _) = decode_sums(sum_contributions({"g": small}, {"g": GRADIENTS}, {}, {}), {"g": GRADIENTS})
    assert torch.equal(read["g"], small)
    assert from_ring(to_ring(small)).item() == 0


@settings(max_examples=50, deadline=None)
@given(st.integers(-(2**90), 2**90), st.integers(0, 40))
def test_large_values_wrap_around(value: int, shift: int) -> None:
    """Refusing them would reveal the response of one node."""
    held = torch.tensor([float(value) / 2.0**shift])
    whole = round(float(held) * 2.0**FRACTION_BITS)
    wrapped = (whole + 2**63) % 2**64 - 2**63
    assert to_ring(held).item() == wrapped
    for wrong in (float("nan"), float("inf"), float("-inf")):
        with pytest.raises(DataError, match="NaN"):
            to_ring(torch.tensor([1.0, wrong]))


def test_a_sum_wraps_around_and_back() -> None:
    top = torch.tensor([2**63 - 1])
    assert torch.equal(
        add_contributions([{"x": top}, {"x": torch.tensor([9])}, {"x": -top}])["x"], torch.tensor([9])
    )


def test_names_nodes_with_invalid_contributions() -> None:
    good, float_ = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3)
    faults = contribution_faults(
        {"a": {"z": good}, "b": {"y": good}, "c": {"z": float_}, "d": {"z": good[:1]}, "e": {"z": good}},
        ["z"],
    )

    assert set(faults) == {"b", "c", "d"}
    assert "expected ['z']" in faults["b"]
    assert "64-bit integers" in faults["c"]
    assert "shape" in faults["d"]
    with pytest.raises(NodeFault, match="a, b"):
        contribution_faults({"a": {"z": good}, "b": {"z": good[:1]}}, ["z"])


STEPS = st.integers(-(2**52), 2**52)  # multiples of 2^-32 that are exact in float64


@settings(max_examples=100, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=9), st.randoms(use_true_random=False))
def test_sum_of_encoded_numbers_is_exact_in_any_order(steps: list[int], random: Random) -> None:
    encoded = [to_ring(torch.tensor([step / 2.0**FRACTION_BITS], dtype=torch.float64)) for step in steps]
    random.shuffle(encoded)

    total = add_contributions([{"x": each} for each in encoded])["x"]

    assert total.item() == sum(steps)
    assert from_ring(total).item() == sum(steps) / 2.0**FRACTION_BITS


@settings(max_examples=100, deadline=None)
@given(st.floats(-(2.0**30), 2.0**30), st.integers(8, FRACTION_BITS))
def test_encoding_rounds_to_the_nearest_step(value: float, bits: int) -> None:
    number = torch.tensor([value], dtype=torch.float64)

    decoded = from_ring(to_ring(number, bits), bits).item()

    assert abs(Fraction(decoded) - Fraction(value)) <= Fraction(1, 2 ** (bits + 1))
    assert torch.equal(to_ring(torch.tensor([decoded], dtype=torch.float64), bits), to_ring(number, bits))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20),
    st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES),
    st.integers(0, 2**32),
)
def test_adding_and_subtracting_a_mask_changes_no_bit(numbers: list[int], key: bytes, index: int) -> None:
    """This includes the ends of the ring, where sums wrap around."""
    ring = torch.tensor(numbers)
    masked = ring + mask_sign("a", "b") * mask_tensor(key, index, ring.shape)
    assert torch.equal(masked + mask_sign("b", "a") * mask_tensor(key, index, ring.shape), ring)


@given(st.lists(st.text(), max_size=4), st.lists(st.text(), max_size=4))
def test_contexts_of_masks_are_equal_for_equal_words_only(one: list[str], other: list[str]) -> None:
    """Two contexts with one encoding would let a server use one mask for two responses."""
    assert (encode_strings(*one) == encode_strings(*other)) == (one == other)
    if one != other:
        secret = bytes(KEY_BYTES)
        assert derive_key(secret, encode_strings(*one)) != derive_key(secret, encode_strings(*other))
