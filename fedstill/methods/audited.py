"""The method whose questions an audit of a gate asks: among all, they can tell the most of one record."""

from __future__ import annotations

from fedstill.methods.fediod import FedIOD
from fedstill.protocol.method import Method


def audited(rows: int, critics: bool) -> Method:
    """Scores that gradients are pulled back through, label counts and, if wanted, critics that learn.

    Args:
        rows: inputs of a question, 1 or more.
        critics: whether a node has one, which takes a step on its records for each answer.
    """
    return FedIOD(gan=float(critics), critic_width=4, batch=rows, steps=1)
