"""``fedstill privacy cost``: epsilon of noisy releases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedstill.cli.arguments import ParsedArgs, number
from fedstill.cli.console import print_json

if TYPE_CHECKING:
    from fedstill.privacy.config import Accountant
    from fedstill.privacy.events import PrivacyCost


def cost(args: ParsedArgs) -> None:
    delta = number("--delta", args.get("--delta") or "1e-5")

    from fedstill.privacy.accounting import compute_epsilon
    from fedstill.privacy.budget import epsilon_text_rounded_up
    from fedstill.privacy.events import Event, PrivacyCost

    total: PrivacyCost = PrivacyCost()
    queue = list(args.positionals)
    while queue:
        event, times = Event.parse(queue.pop(0)), 1
        if queue and "(" not in queue[0]:
            times = number("TIMES", queue.pop(0), int, lambda value: value >= 1, "1 or more")
        total[event] += times
    names: tuple[Accountant, ...] = ("pld", "rdp")
    costs = {name: compute_epsilon(total, delta, name) for name in names}
    if "--json" in args:
        events = {str(event): times for event, times in total.items()}
        print_json({"events": events, "delta": delta, "epsilon": costs})
        return
    for event, times in total.items():
        print(f"{event} x {times}")
    print(
        f"epsilon {epsilon_text_rounded_up(costs['pld'])} (PLD), "
        f"{epsilon_text_rounded_up(costs['rdp'])} (RDP) at delta {delta:g}"
    )
