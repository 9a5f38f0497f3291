"""Messages from a server arrive at a node unchanged or are refused."""

from __future__ import annotations

from typing import Any

import pytest

from fedstill.core.errors import ArgumentError
from fedstill.protocol.messages import (
    MESSAGES,
    AnswerQuery,
    ComputeGradients,
    ConfirmSurvivors,
    Envelope,
    IdentifyNode,
    JoinRun,
    LeaveRun,
    LoadCheckpoint,
    Message,
    ReceiveKeys,
    RevealMasks,
    SaveCheckpoint,
    SendKeys,
    TrainLocally,
    read_message,
)
from fedstill.protocol.secure_aggregation import SumRequest
from fedstill.protocol.wire_format import pack, unpack

CALL = SumRequest(7, ("a", "b"), True)
SAID: tuple[Message, ...] = (
    IdentifyNode(),
    JoinRun({"run": "one", "method": {"name": "fedkd"}}),
    TrainLocally(2.0),
    AnswerQuery("predict_logits", 3, True),
    AnswerQuery("predict_logits", 3, False, CALL),
    ComputeGradients(3),
    ComputeGradients(3, sum=CALL),
    SendKeys(),
    ReceiveKeys(),
    ConfirmSurvivors(7, ("a", "b")),
    RevealMasks(7, {"a": "0f"}),
    SaveCheckpoint(4),
    LoadCheckpoint(0),
    LeaveRun(),
)


@pytest.mark.parametrize("message", SAID, ids=str)
def test_message_headers_round_trip(message: Message) -> None:
    envelope = Envelope("one", "process", 5)
    header, _ = unpack(pack(message.header(envelope), {}))
    assert read_message(header) == (message, envelope)


def test_all_message_types_are_covered() -> None:
    assert {type(message) for message in SAID} == set(MESSAGES.values())


@pytest.mark.parametrize(
    ("table", "name"),
    [
        ([], "sum"),
        ({"members": ["a"]}, "sum.number"),
        ({"number": True, "members": ["a"]}, "sum.number"),
        ({"number": -1, "members": ["a"]}, "sum.number"),
        ({"number": 1, "members": "abc"}, "sum.members"),
        ({"number": 1, "members": ["a", "a"]}, "sum.members"),
        ({"number": 1, "members": ["a", 1]}, r"sum.members\[1\]"),
        ({"number": 1, "members": ["a"], "recover": 1}, "sum.recover"),
        (float("nan"), "sum"),
    ],
    ids=str,
)
def test_rejects_malformed_sum_requests(table: Any, name: str) -> None:
    header = AnswerQuery("predict_logits", 3, True).header(Envelope())
    with pytest.raises(ArgumentError, match=f"^invalid {name} = "):
        read_message({**header, "sum": table})
