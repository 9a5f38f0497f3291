"""Checks of a method's declarations: what a subclass changes is not promised by its base class."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial, wraps
from typing import Any

from fedstill.protocol.node_side import NodeSetting
from fedstill.protocol.queries import Query


def with_declaring_class(
    kind: type, queries: Callable[[Any, NodeSetting], Iterable[Query]]
) -> Callable[[Any, NodeSetting], Iterable[Query]]:
    """Return the ``queries`` of a class with :attr:`Query.declared_in` set in each declaration of its own."""

    @wraps(queries)
    def declare(method: Any, setting: NodeSetting) -> Iterable[Query]:
        for query in queries(method, setting):
            if query.declared_in is None:  # otherwise a base class's, from super().queries(setting)
                object.__setattr__(query, "declared_in", kind)
            yield query

    return declare


def checked_declarations(method: Any, queries: Iterable[Query], setting: NodeSetting) -> list[Query]:
    """Return a method's queries without promises that a subclass may break, and without unused sums.

    A subclass that overrides the function of a query, but not its declaration, inherits the declaration of
    another function. Its response may depend on anything, so that no mechanism can protect it. A custom
    subclass may override a function that the query's function calls, and that reads values: its inherited
    queries are not captured as CUDA graphs.
    """
    classes = type(method).__mro__
    is_custom = type(method).__module__.partition(".")[0] != "fedstill"

    checked = []
    for declared in queries:
        defined = _defining_class(declared.function, method)
        if defined is not None:
            if declared.declared_in in classes and defined < classes.index(declared.declared_in):
                declared = replace(declared, depends_on_records=None, stackable=False)
            if is_custom and defined > 0:
                declared = replace(declared, details=replace(declared.details, reads_values=True))
        checked.append(declared if setting.secure_aggregation else replace(declared, sums={}))
    return checked


def _defining_class(function: Any, method: Any) -> int | None:
    """Return the index of the first class of a method that holds a query's function; None: no class does.

    Compared by identity, as an override may have another name, or be wrapped. A function of the method that
    no class holds, such as that of a ``partialmethod``, counts as the method's own class's.
    """
    while isinstance(function, partial):
        function = function.func
    is_bound = getattr(function, "__self__", None) is method
    plain = getattr(function, "__func__", function)
    for index, kind in enumerate(type(method).__mro__):
        if any(getattr(value, "__func__", value) is plain for value in vars(kind).values()):
            return index
    return 0 if is_bound else None
