"""A method declares its questions: it marks the functions that answer them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar

import torch

from fedstill.protocol.questions import CLOSED, Handler, NodeSetting, Question

F = TypeVar("F", bound=Callable[..., Any])
DECLARED = "__question__"  # the attribute of a function that a question marks


def question(**declaration: Any) -> Callable[[F], F]:
    """Marks a function of a method as what nodes answer to a question of its name.

    The function is called at the nodes as ``function(method, nodes, **inputs)``, where ``nodes`` is a
    :class:`~fedstill.node.node_group.Group` and inputs and answers have its nodes first, ``(G, ...)``; a
    tensor without dimensions arrives as a number.

    Args:
        declaration: the fields of :class:`Question`, but for its name and handler. Each may also be a
            function of the method and what it finds at the nodes (:class:`NodeSetting`), since options decide
            of much.
            ``closed`` says that nothing that a subclass of the method could change has a part in the answer.
            ``span``, ``finish`` and ``draws`` are functions of the method and of what they are given in a
            :class:`Question`; ``draws`` gets the nodes, as the marked function does. ``when`` says whether
            the question is asked at all, ``name`` what it is called, if not as the function.
    """
    known = {part.name for part in fields(Question)} | {"when", "name", "closed"}
    unknown = sorted(set(declaration) - known)
    if unknown:
        raise TypeError(f"a question has no {', '.join(unknown)}")

    def mark(function: F) -> F:
        setattr(function, DECLARED, declaration)
        return function

    return mark


def declared(method: Any, at: NodeSetting) -> list[Question]:
    """The questions that a method's functions are marked as, in the order in which they stand."""
    marked = _marked(type(method))
    found = (_question(name, function, parts, method, at) for name, (function, parts) in marked.items())
    return [question for question in found if question is not None]


def names(method: type) -> frozenset[str]:
    """The names of all questions that a method's functions are marked as, whatever its options."""
    return frozenset(parts.get("name", name) for name, (_, parts) in _marked(method).items())


def _marked(method: type) -> dict[str, tuple[Callable[..., Any], Mapping[str, Any]]]:
    marked: dict[str, tuple[Callable[..., Any], Mapping[str, Any]]] = {}
    for kind in reversed(method.__mro__):
        for name, function in vars(kind).items():
            if hasattr(function, DECLARED):
                marked[name] = function, getattr(function, DECLARED)
            elif name in marked:  # answered in another way, of which nothing is said
                less = {"reads": None, "closed": False, "draws": None, "records": False}
                marked[name] = function, {**marked[name][1], **less}
    return marked


def _question(
    name: str, function: Callable[..., Any], parts: Mapping[str, Any], method: Any, at: NodeSetting
) -> Question | None:
    when = parts.get("when")
    if when is not None and not when(method, at):
        return None
    values: dict[str, Any] = {}
    for key, value in parts.items():
        if key in ("span", "finish"):
            values[key] = value if value is None else partial(value, method)
        elif key not in ("when", "name", "draws") and (key != "sums" or at.sums):
            values[key] = value(method, at) if callable(value) else value

    def answering(function: Callable[..., Any]) -> Handler:
        def handler(group: Any, number: int, **inputs: Any) -> Mapping[str, torch.Tensor]:
            answer: Mapping[str, torch.Tensor] = function(method, group.knowing(at, number), **inputs)
            return answer

        return handler

    handler = answering(function)
    if parts.get("draws") is not None:
        values["draws"] = answering(parts["draws"])
    if not (_ours(type(method)) or name in vars(type(method))):
        values["records"] = False  # helpers of a subclass may draw, or look at values
    closed = values.pop("closed", False)
    if closed and _ours(function):
        CLOSED.add(handler)
    return Question(parts.get("name", name), handler, **values)


def _ours(thing: Any) -> bool:
    module: str = thing.__module__
    return module.partition(".")[0] == "fedstill"
