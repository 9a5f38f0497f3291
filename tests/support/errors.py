"""Context managers that expect errors by attributes: the invalid option, or the rule that refuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import ANY

import pytest

from fedstill.core.errors import ArgumentError, QueryRefused


def require_in_order(text: str, parts: Sequence[str]) -> None:
    """Assert that a text contains all parts in this order."""
    rest = text
    for part in parts:
        _, found, rest = rest.partition(part)
        assert found, f"no {part!r} in {text!r}"


@contextmanager
def raises_invalid(name: str, value: object = ANY, *expected: str) -> Iterator[None]:
    """Expect an :class:`ArgumentError`.

    Args:
        name: the invalid option or argument.
        value: its value.
        expected: values, numbers and names that the expectation must contain, in this order.
    """
    with pytest.raises(ArgumentError) as caught:
        yield
    error = caught.value
    assert (error.name, error.value) == (name, value), error
    require_in_order(error.expected, expected)


@contextmanager
def raises_refused(rule: str, *parts: str, query: str = ANY, node: str = ANY) -> Iterator[None]:
    """Expect a :class:`QueryRefused`.

    Args:
        rule: the rule that refuses, or its beginning.
        parts: numbers and names that the rest of the rule must contain, in this order.
        query: the refused query.
        node: the node that refuses.
    """
    with pytest.raises(QueryRefused) as caught:
        yield
    error = caught.value
    assert error.rule.startswith(rule), error
    assert (error.query, error.node) == (query, node), error
    require_in_order(error.rule.removeprefix(rule), parts)
