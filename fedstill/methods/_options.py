"""Checks of options that several methods have."""

from __future__ import annotations

from fedstill.core.errors import ArgumentError


def at_least(method: object, least: int, *names: str) -> None:
    """Refuse options that are below a number.

    Raises:
        ArgumentError: naming the first one.
    """
    for name in names:
        if getattr(method, name) < least:
            raise ArgumentError(f"method.{name}", getattr(method, name), f"{least} or more")


def above_zero(method: object, *names: str) -> None:
    """Refuse options that are 0, negative or no number; inf is one.

    Raises:
        ArgumentError: naming the first one.
    """
    for name in names:
        if not getattr(method, name) > 0:
            raise ArgumentError(f"method.{name}", getattr(method, name), "above 0, or inf")
