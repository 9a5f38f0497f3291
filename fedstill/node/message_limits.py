"""Limits of time, memory and rows for one message at a node."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from fedstill.core import timing
from fedstill.core.errors import MemoryLimitExceeded, QueryRefused
from fedstill.node import memory_limits

logger = logging.getLogger("fedstill.node")

JOIN = "join"


@contextmanager
def enforce_limits(node: str, query: str, seconds: int = 0) -> Iterator[None]:
    """Refuse a computation that takes more than ``seconds`` (0: no limit), or more memory than there is.

    Raises:
        QueryRefused: with the policy's rule. A server may know which of its own requests was too large, but
            not the amount of data or memory.
    """
    refusal = QueryRefused(node, query, f"max_seconds: {seconds}, and it takes longer")
    try:
        with timing.time_limit(seconds, lambda: refusal):
            yield
    except Exception as error:
        if isinstance(error, QueryRefused) or not (
            isinstance(error, MemoryLimitExceeded) or memory_limits.is_out_of_memory(error)
        ):
            raise
        subject = error.what if isinstance(error, MemoryLimitExceeded) else "it"
        if query == JOIN:  # the size of the parts would reveal the number of records
            logger.error("refused by max_memory: %s", error)
            subject = "the run"
        rule = f"max_memory: {subject} would take more than the node's owner allows"
        raise QueryRefused(node, query, rule) from error
