"""Outputs that a query accepts from a handler: a part for each node, of the declared form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedstill.core.errors import ArgumentError
from fedstill.protocol.payload_kinds import CRITIC, DATA_SIZES, LABEL_COUNTS, LOGITS, PayloadKind
from fedstill.protocol.queries import NodeSide, Query, QueryDetails
from fedstill.protocol.wire_format import json_from_tensor
from tests.support.small_world import SETTING

TWO = Query(
    lambda node, **_: {},
    releases={"z": LOGITS, "some": LOGITS, "words": LOGITS},
    name="ask",
    details=QueryDetails(ragged=("some",), json_values=("words",)),
)


def test_ragged_and_json_responses_have_one_part_per_node() -> None:
    z, some = torch.zeros(2, 3), [torch.zeros(1), torch.zeros(4)]
    given = TWO.encode_response({"z": z, "some": some, "words": [{"a": 1}, "hello"]}, 2)
    assert given["z"] is z
    assert given["some"] == some
    assert [json_from_tensor(text) for text in given["words"]] == [{"a": 1}, "hello"]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            {"z": torch.zeros(3, 3)},
            r"invalid z of query ask = .a tensor \(3, 3\). \(expected a tensor \(2, ",
        ),
        ({"z": torch.zeros(())}, r"a tensor \(\)"),
        ({"z": [torch.zeros(3)] * 2}, "'a list of 2' .* if ragged or json_values names it"),
        (
            {"some": [torch.zeros(3)]},
            r"invalid some of query ask = 'a list of 1' \(expected a list of 2 tensors",
        ),
        ({"some": [1.0, 2.0]}, "expected a list of 2 tensors, one for each node"),
        ({"some": torch.zeros(2, 3)}, r"a tensor \(2, 3\)' \(expected a list of 2 tensors"),
        ({"words": {"a": 1}}, r"invalid words of query ask = 'a dict' \(expected a list of 2 values"),
        ({"words": "hello"}, r"'a str' \(expected a list of 2 values"),
        ({"words": [1, 2, 3]}, r"'a list of 3' \(expected a list of 2 values"),
    ],
)
def test_rejects_responses_without_one_part_per_node(part: dict[str, Any], message: str) -> None:
    """Cut or shifted, it would be another node's, or a piece of a node's own."""
    with pytest.raises(ArgumentError, match=message):
        TWO.encode_response(part, 2)


# --- sums ----------------------------------------------------------------------------------------------


def summing(name: str = "ask", kind: PayloadKind = LOGITS, how: Any = "size", **further: Any) -> Query:
    releases = {"z": kind, **{part: of for part, (of, _) in further.items()}}
    sums = {"z": how, **{part: by for part, (_, by) in further.items()}}
    return Query(lambda node, **_: {}, releases=releases, sums=sums, name=name)


@pytest.mark.parametrize(
    "second", [(LOGITS, "size"), (CRITIC, "mean"), (PayloadKind("features", category="records"), "sum")]
)
def test_rejects_two_statistics_in_one_sum(second: tuple[PayloadKind, str]) -> None:
    with pytest.raises(ArgumentError, match=r"sums of query ask = \['z', 'second'\]"):
        summing(second=second)


def test_counts_and_sizes_are_summed_together() -> None:
    assert summing(kind=LABEL_COUNTS, how="sum", sizes=(DATA_SIZES, "sum")).weighting is None


@pytest.mark.parametrize("other", [summing("other", how="mean"), summing("other", CRITIC)])
def test_rejects_two_weightings_of_outputs(other: Query) -> None:
    with pytest.raises(ArgumentError, match="sums of query other"):
        NodeSide({"ask": summing(), "other": other}, SETTING)


def test_weightings_name_statistic_weighting_and_noise() -> None:
    side = NodeSide({"ask": summing()}, SETTING, sum_source="log_probs")
    assert side.weightings("ask") == {"outputs": "logits of log_probs by size"}
    assert side.weightings("ask", "one") == {"outputs": "logits of log_probs by size of run 'one'"}


def test_plug_in_sums_one_statistic_only() -> None:
    logits, entropies = (
        PayloadKind("logits", category="scores"),
        PayloadKind("entropies", category="responses"),
    )
    first = summing("ask", logits)
    assert NodeSide({"ask": first, "again": summing("again", logits)}, SETTING, sum_source="my_lab").sums
    with pytest.raises(ArgumentError, match="sums of query other"):
        NodeSide({"ask": first, "other": summing("other", entropies)}, SETTING, sum_source="my_lab")
