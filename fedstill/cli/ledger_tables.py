"""What ``fedstill ledger show`` prints of a ledger, in 80 columns: its rows, and what they add up to."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from fedstill.core.errors import ArgumentError

if TYPE_CHECKING:
    from rich.console import Console

    from fedstill.node.account import Account, Spent
    from fedstill.privacy.config import Accountant, PrivacyConfig

MANY = 6  # prices that are shown of all that was paid
UNRELEASED = ("settled", "kept")  # parts of rows with which nothing left


def print_rows(console: Console, rows: list[dict[str, Any]], count: int) -> None:
    """One table of releases, and one of the rules that they name by letter: there are few of these."""
    from rich.table import Table

    from fedstill.node.account import DATA
    from fedstill.node.chain import SETTLED

    told = dict.fromkeys(row["rule"] for row in rows if row["part"] != SETTLED)
    rules = {rule: _letters(number) for number, rule in enumerate(told)}
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("row", justify="right", no_wrap=True, header_style="bold")
    table.add_column("when (UTC)", width=10, header_style="bold")
    named = any(row["node"] != DATA for row in rows)  # a simulation's ledger has several nodes
    table.add_column("run, node" if named else "run", max_width=15, overflow="fold", header_style="bold")
    table.add_column("what left", max_width=22, overflow="fold", header_style="bold")
    table.add_column("rule", no_wrap=True, header_style="bold")
    table.add_column("price", overflow="fold", header_style="bold")
    for row in rows:
        when = str(row["at"])[:19].replace("T", "\n")
        run = _short(row["run"])
        to = run if row["node"] == DATA else f"{run}\n{row['node']}"
        letters = "" if row["part"] == SETTLED else rules[row["rule"]]
        table.add_row(str(row["row"]), when, to, _what(row), letters, priced(row, "\n"))
    console.print()
    console.print(table)
    for first, last in _gaps([row["row"] for row in rows]):
        which = f"Row {first} is" if first == last else f"Rows {first} to {last} are"
        console.print(f"{which} lost, and their numbers are not used again.")
    if len(rows) < count:
        console.print(f"These are the last {len(rows)} of {count} rows; --last 0 shows all.")
    legend = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    legend.add_column("rule", no_wrap=True, header_style="bold")
    legend.add_column("what is done before it leaves", header_style="bold")
    for rule, letters in rules.items():
        legend.add_row(letters, rule)
    console.print()
    console.print(legend)
    console.print()


def _gaps(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """The first and the last number of each stretch that is not there.

    >>> _gaps([1, 2, 5, 6, 8])
    [(3, 4), (7, 7)]
    """
    pairs = pairwise(numbers)
    return [(before + 1, after - 1) for before, after in pairs if after > before + 1]


def _short(run: str) -> str:
    """A run's name as it fits a row; the totals have it whole.

    >>> _short("spring"), _short("0123456789abcdef0123456789abcdef")
    ('spring', '01234567…')
    """
    return run if len(run) <= 15 else f"{run[:8]}…"


def _letters(number: int) -> str:
    """A, B, ..., Z, AA, AB, ...

    >>> _letters(0), _letters(25), _letters(26)
    ('A', 'Z', 'AA')
    """
    return (_letters(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def _what(row: Mapping[str, Any]) -> str:
    from fedstill.core.words import human_bytes

    if row["part"] == "settled":
        return f"settled by the owner: {row['rule']}"
    if row["part"] == "kept":
        return f"{row['question']} kept,\nto leave again"
    kinds = ", ".join(f"{kind} {human_bytes(size)}" for kind, size in row["up"].items())
    asked = f"{row['question']} {row['number']}, {row['part']}" if row["number"] >= 0 else row["question"]
    return f"{asked}\n{kinds or 'nothing'}"


def priced(row: Mapping[str, Any], between: str = ", ") -> str:
    """What one row cost, in words."""
    parts = events(row["price"])
    if row["bare"]:
        parts.append("no guarantee" if row["bare"] == 1 else f"no guarantee, {row['bare']} times")
    return between.join(parts) or "free"


def events(price: Mapping[str, int]) -> list[str]:
    """Events and how often each, numbers to four digits."""
    short = [re.sub(r"\d+\.\d+(e-?\d+)?", lambda found: f"{float(found[0]):.4g}", event) for event in price]
    return [
        event if times == 1 else f"{times} x {event}"
        for event, times in zip(short, price.values(), strict=True)
    ]


def print_totals(
    console: Console,
    account: Account,
    rows: list[dict[str, Any]],
    delta: float,
    privacy: PrivacyConfig | None,
) -> None:
    """One table of what each run, and all runs of a node, have cost at delta.

    Args:
        console: where to.
        account: with the rows.
        rows: all of them.
        delta: of the epsilons that are shown; budgets have their own.
        privacy: the owner's: by which accountant, and what is left of its budgets. None: neither is known.
    """
    from rich.table import Table

    from fedstill.node.account import DATA

    limited = privacy is not None and math.isfinite(min(privacy.epsilon, privacy.over_all[0]))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    heads = ["whose", "run", "releases", "without\nguarantee", f"epsilon at\ndelta {delta:g}"]
    for place, head in enumerate([*heads, "left"] if limited else heads):
        justify: Literal["left", "right"] = "left" if place < 2 else "right"
        table.add_column(head, justify=justify, overflow="fold", header_style="bold")
    paid: list[str] = []
    accountant: Accountant = "pld" if privacy is None else privacy.accountant
    for node in dict.fromkeys(row["node"] for row in rows if row["run"]):
        budgets = privacy if limited and node == DATA else None
        left = [row["run"] for row in rows if row["node"] == node and row["part"] not in UNRELEASED]
        runs = list(dict.fromkeys(row["run"] for row in rows if row["node"] == node and row["run"]))
        for run in runs:
            spent = account.spent(node, run)
            said = _epsilon(spent.run, spent.bare_run, delta, accountant)
            kept = _kept(budgets, False, spent.run, spent.bare_run)
            table.add_row(node, run, str(left.count(run)), str(spent.bare_run), said, kept)
        total: Spent = account.spent(node, runs[-1])
        if len(runs) > 1 or budgets is not None:
            said = _epsilon(total.total, total.bare_total, delta, accountant)
            kept = _kept(budgets, True, total.total, total.bare_total)
            table.add_row(node, "all runs", str(len(left)), str(total.bare_total), said, kept)
        prices = events(total.total)
        more = f" and {len(prices) - MANY} other prices" if len(prices) > MANY else ""
        paid.append(f"Paid in all for {node}: {', '.join(prices[:MANY]) or 'nothing'}{more}.")
    console.print(table)
    if privacy is not None and limited:
        console.print(f"Budgets, by {accountant.upper()}: {_budgets(privacy)}.")
    for line in paid:
        console.print(line)


def _budgets(privacy: PrivacyConfig) -> str:
    """What a node's owner allows, in words."""
    both = (("a run", privacy.epsilon, privacy.delta), ("all runs on these data", *privacy.over_all))
    return "; ".join(
        f"{what} has " + (f"epsilon {most:g} at delta {at:g}" if math.isfinite(most) else "none")
        for what, most, at in both
    )


def _kept(privacy: PrivacyConfig | None, over_all: bool, spent: Mapping[str, int], bare: int) -> str:
    """What is left of a run's budget or of that of all runs, rounded down; nothing where there are none."""
    from fedstill.privacy.budget import Budget
    from fedstill.privacy.events import from_text

    if privacy is None:
        return ""
    most, delta = privacy.over_all if over_all else (privacy.epsilon, privacy.delta)
    if math.isinf(most):
        return "no budget"
    try:
        left = 0.0 if bare else Budget(most, delta, privacy.accountant).left(from_text(spent))
    except ArgumentError:  # an edited row
        return "not known"
    return f"{math.floor(1000 * left) / 1000:g}"


def _epsilon(spent: Mapping[str, int], bare: int, delta: float, accountant: Accountant) -> str:
    """An epsilon, rounded up; none where something left without a guarantee."""
    from fedstill.privacy.accounting import epsilon
    from fedstill.privacy.events import from_text

    if bare:
        return "no guarantee"
    try:
        value = epsilon(from_text(spent), delta, accountant)
    except ArgumentError:  # an edited row
        return "not known"
    return f"{math.ceil(1000 * value) / 1000:g}" if math.isfinite(value) else "inf"
