"""What a question takes from a handler: a part a node, of the form that was declared."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedstill.core.errors import ArgumentError
from fedstill.protocol.kinds import LOGITS
from fedstill.protocol.questions import Question
from fedstill.protocol.wire_format import from_text

TWO = Question(
    "ask",
    lambda group, number, **_: {},
    {},
    {"z": LOGITS, "some": LOGITS, "told": LOGITS},
    ragged=("some",),
    values=("told",),
)


def test_each_node_has_its_part() -> None:
    z, some = torch.zeros(2, 3), [torch.zeros(1), torch.zeros(4)]
    given = TWO.give({"z": z, "some": some, "told": [{"a": 1}, "hello"]}, 2)
    assert given["z"] is z
    assert given["some"] == some
    assert [from_text(text) for text in given["told"]] == [{"a": 1}, "hello"]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (
            {"z": torch.zeros(3, 3)},
            r"z of question ask is .a tensor \(3, 3\).: allowed is a tensor \(2, ",
        ),
        ({"z": torch.zeros(())}, r"a tensor \(\)"),
        ({"z": [torch.zeros(3)] * 2}, "a list of 2': .* where ragged or values name it"),
        ({"some": [torch.zeros(3)]}, "some of question ask is 'a list of 1': allowed is a list of 2 tensors"),
        ({"some": [1.0, 2.0]}, "allowed is a list of 2 tensors, one a node"),
        ({"some": torch.zeros(2, 3)}, r"a tensor \(2, 3\)': allowed is a list of 2 tensors"),
        ({"told": {"a": 1}}, "told of question ask is 'a dict': allowed is a list of 2 values"),
        ({"told": "hello"}, "'a str': allowed is a list of 2 values"),
        ({"told": [1, 2, 3]}, "'a list of 3': allowed is a list of 2 values"),
    ],
)
def test_what_is_no_part_a_node_is_refused(part: dict[str, Any], said: str) -> None:
    """Cut or shifted, it would be another node's, or a piece of a node's own."""
    with pytest.raises(ArgumentError, match=said):
        TWO.give(part, 2)
