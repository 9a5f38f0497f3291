"""``fedstill privacy cost`` and ``audit``: epsilon of noisy releases, and attacks on every mechanism.

``fedstill privacy plan`` has a module of its own, :mod:`fedstill.cli.privacy_plan`, which imports torch.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fedstill.cli.arguments import ParsedArgs, number
from fedstill.cli.console import print_json
from fedstill.core.errors import FedstillError, UnknownName
from fedstill.core.text_format import format_seconds, json_text

if TYPE_CHECKING:
    from fedstill.attacks.mechanism_audits import AuditFinding
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


END = """\
claimed   epsilon by the node's own audit log, an upper bound
shown     epsilon that the attack proves at least, whatever the noise is like
as noise  the same if the noise is of the kind that is claimed; above the claim it refutes it, too
All at delta {delta:g}, each lower bound at {confidence:.0%}. One below the claim proves nothing: the
mechanism is sound, or the attack weak."""


def audit(args: ParsedArgs) -> None:
    """Attack one mechanism, or all of them; a claim that is refuted is an error."""
    name, out = args.get("--mechanism"), args.path("--out")
    seed = number("--seed", args.get("--seed") or "0", int, lambda n: n >= 0, "an integer from 0 up")

    from fedstill.attacks.mechanism_audits import AUDITS

    if name is not None and name not in AUDITS:
        raise UnknownName("mechanism", name, list(AUDITS))
    found = []
    for one in [audit for key in AUDITS if name in (None, key) for audit in AUDITS[key]]:
        found.append(one(seed))
        if "--json" not in args:
            _print(found[-1], first=len(found) == 1)
    record = _as_json(found, seed)
    if "--json" in args:
        print_json(record)
    else:
        _say(found)
    if out is not None:
        out.write_text(json_text(record) + "\n", encoding="utf-8")
    refuted = [f"{finding.mechanism} ({finding.target})" for finding in found if finding.refuted]
    if refuted:
        raise FedstillError(f"claims that are refuted: {', '.join(refuted)}")


def _print(finding: AuditFinding, *, first: bool) -> None:
    """A row as soon as it is known: the next may take a minute."""
    if first:
        head = ("mechanism", "what was attacked", "claimed", "shown", "as noise", "runs", "s")
        print("{:<13} {:<33} {:>7} {:>6} {:>8} {:>4} {:>3}".format(*head))
    same_noise = "-" if finding.same_noise_lower_bound is None else f"{finding.same_noise_lower_bound:.2f}"
    print(
        f"{finding.mechanism:<13} {finding.target:<33} {finding.claimed_epsilon:>7.2f} "
        f"{finding.epsilon_lower_bound:>6.2f} "
        f"{same_noise:>8} {finding.runs:>4} {finding.seconds:>3.0f}"
        + (" REFUTED" if finding.refuted else ""),
        flush=True,
    )


def _say(found: list[AuditFinding]) -> None:
    from fedstill.attacks.mechanism_audits import DELTA
    from fedstill.privacy.epsilon_lower_bounds import CONFIDENCE

    print(f"\n{END.format(delta=DELTA, confidence=CONFIDENCE)}")
    print(f"{format_seconds(sum(finding.seconds for finding in found))} in all.")


def _as_json(found: list[AuditFinding], seed: int) -> dict[str, Any]:
    """Return the findings with machine and date, as JSON has them."""
    import os
    import platform
    from datetime import date

    import torch

    from fedstill.attacks.mechanism_audits import DELTA
    from fedstill.privacy.epsilon_lower_bounds import CONFIDENCE

    return {
        "seed": seed,
        "delta": DELTA,
        "confidence": CONFIDENCE,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "findings": [asdict(finding) for finding in found],
    }
