"""What is to be paid, part by part."""

from __future__ import annotations

from fedstill.privacy.events import Price

Bill = dict[str, Price | None]
"""Prices by what they are for; None where something has no guarantee."""


def add(bill: Bill, name: str, price: Price | None) -> None:
    """Put a price on a bill; what has no guarantee stays without.

    >>> from fedstill.privacy.events import Event
    >>> bill = Bill(counts=Price({Event("laplace", 10.0): 1}))
    >>> add(bill, "counts", Price({Event("laplace", 10.0): 2}))
    >>> bill["counts"].total()
    3
    """
    before = bill.get(name, Price())
    bill[name] = None if price is None or before is None else before + price


def total(bill: Bill) -> Price | None:
    """All of a bill; None if a part of it has no guarantee."""
    whole = Price()
    for price in bill.values():
        if price is None:
            return None
        whole += price
    return whole
