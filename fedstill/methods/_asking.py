"""Asking a few nodes, where a run can go on without an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedstill.core.errors import NodeFault
from fedstill.federation.contract import Answers, Federation


def ask_those(federation: Federation, question: str, of: Sequence[str], **tensors: Any) -> Answers | None:
    """What some nodes answer; None if all of them are left out, and the run goes on with the others.

    Args:
        federation: the nodes.
        question: its name.
        of: names of the nodes to ask.
        tensors: what goes down with it.

    Raises:
        NodeFault: too few nodes are left to go on, or it is not known whose answer is wrong.
    """
    try:
        return federation.ask(question, of=of, **tensors)
    except NodeFault:
        too_few = len(federation.present) < federation.link.least(len(federation.nodes))
        if too_few or any(name in federation.present for name in of):
            raise
        return None
