"""Size limits of the networks that a plan makes a node create (critics, generators).

A server sets their widths, and memory grows with the square of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fedstill.core.errors import QueryRefused
from fedstill.node.node import Node
from fedstill.protocol.payload_kinds import GENERATOR_PARAMETERS
from fedstill.protocol.queries import NodeFunction, NodeSide, Query


class _ParameterLimit(TorchFunctionMode):
    """Refuses layers beyond a number of parameters, in this thread, before they are allocated.

    All layers of torch allocate with ``torch.empty``, which is called here on the meta device first.
    """

    def __init__(self, limit: int, node: str, query: str) -> None:
        super().__init__()
        self.limit, self.node, self.query, self.created = limit, node, query, 0.0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        arguments = dict(kwargs or {})
        if func is torch.empty:
            self.created += _count_elements(*args, **arguments)
            if self.created > self.limit:
                rule = f"max_parameters: {self.limit}, and the plan's networks have more"
                raise QueryRefused(self.node, self.query, rule)
        return func(*args, **arguments)


def _count_elements(*args: Any, **given: Any) -> float:
    """Return the number of elements of a ``torch.empty`` call; inf if it overflows."""
    try:
        return torch.empty(*args, **{**given, "device": "meta"}).numel()
    except (RuntimeError, TypeError, OverflowError, ValueError):  # an overflow; its type depends on its size
        return float("inf")


def wrap_with_parameter_limit(side: NodeSide, limit: int, node: str) -> NodeSide:
    """Return a method's node side that cannot create networks of more than ``limit`` parameters; 0: no
    limit.

    The returned side refuses with :class:`QueryRefused` where networks are created: in its preparation, and
    in each query that brings one.
    """

    def limiting(query: str) -> AbstractContextManager[object]:
        return _ParameterLimit(limit, node, query) if limit else nullcontext()

    def prepare(node: Node) -> None:
        with limiting("join"):
            side.prepare(node)

    def guard(query: Query) -> NodeFunction:
        def function(*args: Any, **inputs: Any) -> Mapping[str, torch.Tensor]:
            with limiting(query.name):
                return query.function(*args, **inputs)

        return function if GENERATOR_PARAMETERS in query.sends.values() else query.function

    queries = {name: replace(declared, function=guard(declared)) for name, declared in side.queries.items()}
    return replace(side, queries=queries, prepare=prepare)
