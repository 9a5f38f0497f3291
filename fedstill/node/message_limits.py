"""Limits of time, memory and rows for one message at a node."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch

from fedstill.core import timing
from fedstill.core.errors import MemoryLimitExceeded, QueryRefused
from fedstill.data.data_spec import DataSpec, require_memory
from fedstill.data.public import PublicData
from fedstill.node import memory_limits
from fedstill.node.node import Node
from fedstill.protocol.payload_kinds import INDICES, INPUTS, LABEL_COUNTS, LOGITS, SCHEDULE
from fedstill.protocol.queries import Query
from fedstill.protocol.wire_format import Tensors, tensor_bytes
from fedstill.tasks import Task

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


class QuerySizeLimits:
    """Limits of one node's queries in ``limit`` bytes of memory; 0 is no limit."""

    def __init__(self, node: Node, public: PublicData | None, spec: DataSpec, limit: int) -> None:
        self._node, self._public, self._spec, self._limit = node, public, spec, limit

    def require(self, query: Query, tensors: Tensors) -> None:
        """Refuse a query that is too large or does not fit the run.

        Raises:
            QueryRefused: rows outside the public data, or tensors of another shape than the run's.
            TooLarge: more inputs at once than the memory limit allows.
        """
        self._require_shapes(query, tensors)
        row_count = 0 if self._public is None else len(self._public)
        indices = [name for name, kind in query.sends.items() if kind == INDICES]
        for name in indices:
            rows = tensors[name]
            # Two numbers may be a range with an exclusive end, which may equal the number of rows.
            end = row_count if len(rows) == 2 and bool(rows[0] <= rows[1]) else row_count - 1
            if rows.numel() and not (row_count and 0 <= int(rows.min()) <= int(rows.max()) <= end):
                rule = f"rows: the server sent {name} with rows outside the {row_count} of the public data"
                raise QueryRefused(self._node.name, query.name, rule)
        input_count = max([0, *(len(tensors[name]) for name, kind in query.sends.items() if kind == INPUTS)])
        if input_count and self._limit:
            need = input_count * self._bytes_per_input
            require_memory(f"a query about {input_count} inputs at once", need, self._limit)
        row_total = sum(tensors[name].numel() for name in indices)
        if row_total and self._public is not None:  # a row may occur several times, and is copied each time
            bytes_per_row = tensor_bytes(self._public.inputs[0]) + 2 * 4 * math.prod(self._spec.output_shape)
            require_memory(
                f"a query about {row_total} public inputs at once", row_total * bytes_per_row, self._limit
            )

    def _require_shapes(self, query: Query, tensors: Tensors) -> None:
        """Refuse counts, logits and schedules that do not fit the run, using its plan only."""
        indices = next((tensors[name] for name, kind in query.sends.items() if kind == INDICES), None)
        for name, kind in query.sends.items():
            tensor, rule = tensors[name], None
            expected: tuple[int, ...] | None = None
            if kind == LABEL_COUNTS:
                expected = (self._task.classes,)
            elif kind == LOGITS and indices is not None:  # one row per index
                expected = (len(indices), *self._spec.output_shape)
            elif kind == SCHEDULE and int(tensor) < 0:
                rule = f"schedule: the server sent {name} = {int(tensor)} (expected a number from 0)"
            if expected is not None and (tensor.dtype != torch.float32 or tuple(tensor.shape) != expected):
                received = f"{tensor.dtype} {tuple(tensor.shape)}"
                rule = f"tensors: the server sent {name}: {received} (expected float32 {expected})"
            if rule is not None:
                raise QueryRefused(self._node.name, query.name, rule)

    @cached_property
    def _task(self) -> Task:
        return self._spec.make_task()

    @cached_property
    def _bytes_per_input(self) -> int:
        """Bytes that the node's networks keep for one input of a query."""
        shape, modules = tuple(self._node.data.inputs.shape[1:]), self._node.modules
        form = self._spec.task.task_class.form
        total = memory_limits.bytes_per_input(modules["model"], shape, form)
        weight = next(modules["critic"].parameters()) if "critic" in modules else None
        if weight is not None and weight.ndim == 4:  # it also trains on as many real inputs
            total += 2 * memory_limits.bytes_per_input(modules["critic"], (weight.shape[1], *shape[1:]))
        elif weight is not None and weight.ndim == 2:  # table rows
            total += 2 * memory_limits.bytes_per_input(modules["critic"], shape, form)
        return total
