"""Handler outputs that a query accepts: one part per node, of the declared kind."""

from __future__ import annotations

from typing import Any

import pytest

from fedstill.protocol.node_side import NodeSide
from fedstill.protocol.payload_kinds import CRITIC, DATA_SIZES, LABEL_COUNTS, LOGITS, PayloadKind
from fedstill.protocol.queries import Query, QueryDetails
from tests.support.errors import raises_invalid
from tests.support.small_world import SETTING


@pytest.mark.parametrize("records", [-5, 0.5, float("nan")])
def test_rejects_invalid_step_records(records: Any) -> None:
    with raises_invalid("step_records of query ask", records):
        Query(lambda node: {}, name="ask", details=QueryDetails(step_records=records))


# --- sums ----------------------------------------------------------------------------------------------


def summing(name: str = "ask", kind: PayloadKind = LOGITS, how: Any = "size", **further: Any) -> Query:
    releases = {"z": kind, **{part: of for part, (of, _) in further.items()}}
    sums = {"z": how, **{part: by for part, (_, by) in further.items()}}
    return Query(lambda node, **_: {}, releases=releases, sums=sums, name=name)


@pytest.mark.parametrize(
    "second", [(LOGITS, "size"), (CRITIC, "mean"), (PayloadKind("features", category="records"), "sum")]
)
def test_rejects_two_statistics_in_one_sum(second: tuple[PayloadKind, str]) -> None:
    with raises_invalid("sums of query ask", ["z", "second"]):
        summing(second=second)


def test_counts_and_sizes_are_summed_together() -> None:
    assert summing(kind=LABEL_COUNTS, how="sum", sizes=(DATA_SIZES, "sum")).weighting is None


@pytest.mark.parametrize("other", [summing("other", how="mean"), summing("other", CRITIC)])
def test_rejects_two_weightings_of_outputs(other: Query) -> None:
    with raises_invalid("sums of query other"):
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
    with raises_invalid("sums of query other"):
        NodeSide({"ask": first, "other": summing("other", entropies)}, SETTING, sum_source="my_lab")
