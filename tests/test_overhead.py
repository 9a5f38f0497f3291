"""Overhead of the library per query, measured by counts; it must not increase."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest

from fedstill.node.node_group import NodeGroup


@pytest.fixture
def overhead(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import overhead

    yield overhead
    sys.modules.pop("overhead")


def test_query_overhead_is_bounded(overhead: Any) -> None:
    """Counts of ``python benchmarks/overhead.py`` on 2026-12-01, plus 10 % for other Python versions."""
    counts = overhead.counts_a_node()
    assert counts.calls <= 1.1 * 398, "Python function calls per additional node"
    assert counts.operations <= 1.1 * 27, "torch operations per additional node"
    assert counts.copied <= 0.05, "copied bytes per additional node, relative to the query"


def test_query_takes_one_transaction_for_responses_and_one_for_gradients(overhead: Any) -> None:
    assert [overhead.count(nodes).transactions for nodes in (1, 5)] == [2, 2]


def test_counts_calls_operations_and_copies(overhead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that copies its query and calls two more functions changes all three counts."""
    group = NodeGroup
    before, sample = overhead.count(2), group.module

    def copying(self: Any, role: str) -> Any:
        module = sample(self, role)
        return [module, overhead.torch.zeros(8, 1, 28, 28).clone()][0]

    monkeypatch.setattr(group, "module", copying)
    after = overhead.count(2)
    assert after.operations - before.operations == 2 * 2  # zeros and clone, at two nodes
    assert after.copied - before.copied == 2
    assert after.calls - before.calls == 2


def test_ignores_garbage_collector_calls(overhead: Any) -> None:
    """Other packages, for example hypothesis, register garbage collector callbacks in Python."""
    quiet, thresholds = overhead.count(2), gc.get_threshold()

    def noisy(phase: str, about: dict[str, int]) -> None: ...

    gc.callbacks.append(noisy)
    gc.set_threshold(5)
    try:
        assert overhead.count(2) == quiet
        assert gc.isenabled()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(noisy)
