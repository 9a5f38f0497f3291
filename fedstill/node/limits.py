"""What one message may cost a node in time and memory: whatever passes its owner's limits is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fedstill.core import deadline
from fedstill.core.errors import QuestionRefused, TooLarge
from fedstill.node.memory import ran_out


@contextmanager
def limited(node: str, question: str, seconds: int = 0) -> Iterator[None]:
    """Refuse what is computed here once it takes too long, or more memory than there is.

    Args:
        node: its name.
        question: what is computed, for the refusal.
        seconds: policy ``most_seconds``; 0 is no limit.

    Raises:
        QuestionRefused: naming the policy's rule. A server may know what of its own was too large, and not
            how much data or memory there are.
    """
    late = QuestionRefused(node, question, f"most_seconds: {seconds}, and it takes longer")
    try:
        with deadline.within(seconds, lambda: late):
            yield
    except Exception as error:
        if isinstance(error, QuestionRefused) or not (isinstance(error, TooLarge) or ran_out(error)):
            raise
        what = error.what if isinstance(error, TooLarge) else "it"
        rule = f"most_memory: {what} would take more than the node's owner allows"
        raise QuestionRefused(node, question, rule) from error
