"""Queries of few among many nodes: the server's work grows linearly with the number of nodes."""

from __future__ import annotations

import sys
from types import FrameType

import torch

from fedstill.federation.federation import Federation
from fedstill.methods._label_histogram import LabelHistogram


class Compared(str):
    """A name that counts comparisons of names."""

    count = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.count += 1
        return str.__eq__(self, other)


class Chooses(Federation):
    """A federation for choosing nodes only."""

    collect_responses = collect_gradients = _refusal_rule = _query_limit = None  # type: ignore[assignment]


def compared(nodes: int) -> int:
    """Return the number of name comparisons and calls when some of this many nodes are selected."""
    federation = Chooses([Compared(f"node-{k}") for k in range(nodes)], {})
    histogram = LabelHistogram(
        tuple(Compared(f"node-{k}") for k in range(nodes)), torch.ones(nodes, 2), torch.ones(nodes)
    )
    calls = 0

    def called(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    Compared.count = 0
    sys.setprofile(called)
    try:
        present = histogram.present_nodes(federation)
        histogram.select(present[::-1])
        federation._select_nodes(present[1:])
    finally:
        sys.setprofile(None)
    assert len(present) == nodes
    return Compared.count + calls


def test_selection_takes_linear_time() -> None:
    assert compared(400) <= 2.2 * compared(200)
