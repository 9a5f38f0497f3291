"""Answers that no sound node gives are found, and the node is named."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstill.federation.checks import faults, not_finite
from fedstill.node.questions import Question

ASKED = Question("predict", lambda group, number: {}, releases={"logits": "logits", "rate": "critic"})
B, C = 4, 3


def sound(seed: int, **changes: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "logits": torch.randn(B, C, generator=generator),
        "rate": torch.rand(B, generator=generator),
        **changes,
    }


def found(outlier: float = 100.0, **answers: Any) -> dict[str, str]:
    return faults(answers, ASKED, outlier)


def test_sound_answers_have_no_faults() -> None:
    assert found(a=sound(0), b=sound(1), c=sound(2)) == {}
    assert found(a=sound(0)) == {}


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["logits", "rate"])
def test_what_is_not_finite_is_found(wrong: float, name: str) -> None:
    bad = sound(1)
    bad[name].view(-1)[0] = wrong
    numbers = bad[name].numel()
    told = {"b": f"{name} hold NaN or infinity (1 of {numbers} numbers)"}
    assert found(a=sound(0), b=bad, c=sound(2)) == told
    assert not_finite({"a": sound(0), "b": bad}) == told
    assert found(b=bad) == told  # also where nobody is there to compare with


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"logits": torch.zeros(B, C + 1)}, r"logits are torch.float32 of shape \(4, 4\)"),
        ({"logits": torch.zeros(B - 1, C)}, r"\(3, 3\)"),
        ({"logits": torch.zeros(B, C, dtype=torch.float64)}, "torch.float64"),
        ({"rate": torch.zeros(())}, r"shape \(\)"),
        ({"more": torch.zeros(1)}, r"answered \['logits', 'more', 'rate'\], not \['logits', 'rate'\]"),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_another_form_than_the_others_is_found(changes: dict[str, Any], what: str, place: int) -> None:
    answers = [sound(seed, **(changes if seed == place else {})) for seed in range(3)]
    told = found(**dict(zip("abc", answers, strict=True)))
    assert list(told) == ["abc"[place]]
    assert re.search(what, told["abc"[place]])


def test_a_part_that_is_missing_is_found() -> None:
    assert found(a=sound(0), b={"logits": torch.zeros(B, C)}, c={}) == {
        "b": "answered ['logits'], not ['logits', 'rate']",
        "c": "answered nothing, not ['logits', 'rate']",
    }


def test_far_too_large_logits_are_found_by_the_others_median() -> None:
    ones = torch.ones(B, C)
    answers = {name: sound(0, logits=ones * factor) for name, factor in zip("abc", (1, 3, 1000), strict=True)}
    # The others' sizes are 1 and 3, their median 2: 1000 / 2.
    assert faults(answers, ASKED, 100.0) == {
        "c": "logits are 500 times as large as others': link.outlier 100"
    }
    assert faults(answers, ASKED, 499.0) == {
        "c": "logits are 500 times as large as others': link.outlier 499"
    }
    assert faults(answers, ASKED, 501.0) == {}
    assert faults(answers, ASKED, float("inf")) == {}


def test_only_logits_are_compared_in_size() -> None:
    assert found(a=sound(0), b=sound(1, rate=torch.full((B,), 1e6)), c=sound(2)) == {}


def test_of_two_nodes_the_larger_one_is_the_outlier() -> None:
    assert list(found(a=sound(0, logits=torch.ones(B, C)), b=sound(1, logits=torch.full((B, C), 1e3)))) == [
        "b"
    ]


def test_nodes_that_say_nothing_make_no_outlier_of_one_that_does() -> None:
    nothing = torch.zeros(B, C)
    assert found(a=sound(0, logits=nothing), b=sound(1, logits=nothing), c=sound(2)) == {}


def test_whole_numbers_are_finite() -> None:
    asked = Question("tell", lambda group, number: {}, releases={"n": "data sizes"})
    assert faults({"a": {"n": torch.tensor([1])}, "b": {"n": torch.tensor([2])}}, asked, 100.0) == {}


@given(st.integers(0, 2), st.sampled_from([float("nan"), float("inf"), 1e5]), st.integers(0, B * C - 1))
def test_one_wrong_number_anywhere_names_its_node_alone(row: int, wrong: float, place: int) -> None:
    answers = {name: sound(seed) for seed, name in enumerate("abc")}
    answers["abc"[row]]["logits"].view(-1)[place] = wrong
    assert list(faults(answers, ASKED, 100.0)) == ["abc"[row]]
