"""What ``fedstill audit show`` prints, in 80 columns: a log's entries, and what they add up to."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from fedstill.core.errors import ArgumentError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from fedstill.node.audit import AuditLog
    from fedstill.privacy.config import Accountant, PrivacyConfig

MANY = 6  # prices that are shown of all that was paid


def print_entries(console: Console, entries: list[dict[str, Any]], count: int) -> None:
    """One table of what happened, and one of the rules that it names by letter: there are few of these."""
    from fedstill.node.entries import DATA, REFUSED, SETTLED

    told = dict.fromkeys(entry["rule"] for entry in entries if entry["part"] not in (SETTLED, REFUSED))
    rules = {rule: _letters(number) for number, rule in enumerate(told)}
    table = _table()
    table.add_column("entry", justify="right", no_wrap=True, header_style="bold")
    table.add_column("when (UTC)", width=10, header_style="bold")
    named = any(entry["payer"] != DATA for entry in entries)  # a simulation's log has several nodes
    table.add_column("run, node" if named else "run", max_width=15, overflow="fold", header_style="bold")
    table.add_column("what left", max_width=22, overflow="fold", header_style="bold")
    table.add_column("rule", no_wrap=True, header_style="bold")
    table.add_column("price", overflow="fold", header_style="bold")
    for entry in entries:
        when = str(entry["at"])[:19].replace("T", "\n")
        run = entry["run"] if len(entry["run"]) <= 15 else f"{entry['run'][:8]}…"  # the totals have it whole
        to = run if entry["payer"] == DATA else f"{run}\n{entry['payer']}"
        letters, price = rules.get(entry["rule"], ""), "" if entry["part"] == REFUSED else priced(entry, "\n")
        table.add_row(str(entry["entry"]), when, to, _what(entry), letters, price)
    console.print()
    console.print(table)
    for before, after in pairwise(entry["entry"] for entry in entries):
        if after > before + 1:
            one, more = f"Entry {before + 1} is", f"Entries {before + 1} to {after - 1} are"
            lost = one if after == before + 2 else more
            console.print(f"{lost} lost, and their numbers are not used again.")
    if len(entries) < count:
        console.print(f"These are the last {len(entries)} of {count} entries; --last 0 shows all.")
    legend = _table()
    legend.add_column("rule", no_wrap=True, header_style="bold")
    legend.add_column("what is done before it leaves", header_style="bold")
    for rule, letters in rules.items():
        legend.add_row(letters, rule)
    console.print()
    console.print(legend)
    _explain(console, {kind for entry in entries for kind in entry["up"]})
    console.print()


def _explain(console: Console, kinds: set[str]) -> None:
    """What the questions and the kinds are that entries name."""
    from fedstill.protocol.kinds import kind_named

    console.print(
        "What left is named by the method's question, its number and its part: the answer, or the gradient "
        "that the server asked back through it. In it are, by kind:"
    )
    for kind in sorted(kinds):
        console.print(f"  {kind}: {kind_named(kind).says or 'not declared by any method here'}")


def _table() -> Table:
    from rich.table import Table

    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)


def _letters(number: int) -> str:
    """A, B, ..., Z, AA, AB, ...

    >>> _letters(0), _letters(25), _letters(26)
    ('A', 'Z', 'AA')
    """
    return (_letters(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def _what(entry: Mapping[str, Any]) -> str:
    from fedstill.core.words import human_bytes
    from fedstill.node.entries import KEPT, REFUSED, SETTLED

    asked = f"{entry['question']} {entry['number']}" if entry["number"] >= 0 else entry["question"]
    if entry["part"] == SETTLED:
        return f"settled by the owner: {entry['rule']}"
    if entry["part"] == REFUSED:
        return f"{asked}, refused: {entry['rule']}"
    if entry["part"] == KEPT:
        return f"{entry['question']} kept,\nto leave again"
    kinds = ", ".join(f"{kind} {human_bytes(size)}" for kind, size in sorted(entry["up"].items()))
    asked = asked if asked == entry["part"] else f"{asked}, {entry['part']}"
    return f"{asked}\n{kinds or 'nothing'}"


def priced(entry: Mapping[str, Any], between: str = ", ") -> str:
    """What one entry cost, in words."""
    parts = events(entry["price"])
    if entry["bare"]:
        parts.append("no guarantee" if entry["bare"] == 1 else f"no guarantee, {entry['bare']} times")
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
    audit: AuditLog,
    entries: list[dict[str, Any]],
    delta: float,
    privacy: PrivacyConfig | None,
) -> None:
    """One table of what each run, and all runs of a payer, have cost at delta.

    Args:
        console: where to.
        audit: with the entries.
        entries: all of them.
        delta: of the epsilons that are shown; budgets have their own.
        privacy: the owner's: by which accountant, and what is left of its budgets. None: neither is known.
    """
    from fedstill.node.entries import ALL, DATA, RELEASES

    limited = privacy is not None and math.isfinite(min(privacy.epsilon, privacy.over_all[0]))
    table = _table()
    heads = ["whose", "run", "releases", "without\nguarantee", f"epsilon at\ndelta {delta:g}"]
    for place, head in enumerate([*heads, "left"] if limited else heads):
        justify: Literal["left", "right"] = "left" if place < 2 else "right"
        table.add_column(head, justify=justify, overflow="fold", header_style="bold")
    accountant: Accountant = "pld" if privacy is None else privacy.accountant
    left = Counter((entry["payer"], entry["run"]) for entry in entries if entry["part"] in RELEASES)
    runs: dict[str, list[str]] = {}
    for payer, run in audit.sums.spent:
        if run != ALL:
            runs.setdefault(payer, []).append(run)
    paid: list[str] = []
    for payer, names in runs.items():
        budgets = privacy if limited and payer == DATA else None
        for run in names if len(names) == 1 and budgets is None else [*names, ALL]:
            spent = audit.spent(payer, run)
            price, bare = (spent.run, spent.bare_run) if run else (spent.total, spent.bare_total)
            count = left[payer, run] if run else sum(left[payer, name] for name in names)
            said = _epsilon(price, bare, delta, accountant)
            kept = _kept(budgets, not run, price, bare)
            table.add_row(payer, run or "all runs", str(count), str(bare), said, kept)
        prices = events(audit.spent(payer, ALL).total)
        more = f" and {len(prices) - MANY} other prices" if len(prices) > MANY else ""
        paid.append(f"Paid in all for {payer}: {', '.join(prices[:MANY]) or 'nothing'}{more}.")
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
    except ArgumentError:  # an edited entry
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
    except ArgumentError:  # an edited entry
        return "not known"
    return f"{math.ceil(1000 * value) / 1000:g}" if math.isfinite(value) else "inf"
