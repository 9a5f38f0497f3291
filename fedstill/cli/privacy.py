"""``fedstill privacy``: plan epsilon before training, convert noise to epsilon, audit the mechanisms."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Interval

from fedstill.cli.arguments import AsJson, CalledAs, UsageError, group
from fedstill.cli.console import print_json
from fedstill.core.errors import ArgumentError, FedstillError, UnknownName
from fedstill.core.name_normalization import parse_cli_number
from fedstill.core.options import NonNegativeInt, PositiveInt
from fedstill.core.text_format import format_seconds, json_text

if TYPE_CHECKING:
    from fedstill.attacks.mechanism_audits import AuditFinding
    from fedstill.privacy.config import Accountant
    from fedstill.privacy.events import PrivacyCost


Delta = Annotated[float, Interval(ge=0, lt=1)]

commands = group(
    "privacy",
    "Plan epsilon before training, convert noise to epsilon, and audit the mechanisms.",
)


@commands.command
def plan(
    *places: str,
    epsilon: float | None = None,
    noise: str | None = None,
    steps: PositiveInt | None = None,
    as_json: AsJson = False,
    call: CalledAs,
) -> None:
    """Compute the epsilon that a run will cost each node. Trains nothing.

    example: fedstill privacy plan digits-fedkd-private --epsilon 3

    Two of epsilon, noise and steps determine the third. Options of `fedstill run`
    change the run (--help-all lists all). The exit code is 2 if a node would
    refuse the run.

    Args:
        places: [NODE] RUN: a node's folder (default: all nodes of a simulation), and a preset or FILE.toml
        epsilon: privacy budget of the run
        noise: noise multiplier; PART=N,PART=N for several parts (training, critic, pate, gradients, outputs)
        steps: length of the run: steps, rounds or predictions of the method, or local epochs
    """
    if not places:
        raise UsageError("fedstill privacy plan", missing="RUN")
    if places[2:]:
        raise UsageError("fedstill privacy plan", extra=places[2])
    from fedstill.cli.privacy_plan import print_plan

    print_plan(places[-1], Path(places[0]) if places[1:] else None, epsilon, noise, steps, as_json, call)


@commands.command
def cost(*events: str, delta: Delta = 1e-5, as_json: AsJson = False) -> None:
    """Convert noisy releases to epsilon.

    example: fedstill privacy cost "gaussian(1.0, rate=0.01)" 1000

    Args:
        events: EVENT [TIMES] ...: noise of a release, also "laplace(50.0)", and how many times
        delta: delta (default: 1e-5)
    """
    if not events:
        raise UsageError("fedstill privacy cost", missing="EVENT")
    from fedstill.privacy.accounting import compute_epsilon
    from fedstill.privacy.budget import epsilon_text_rounded_up
    from fedstill.privacy.events import Event, PrivacyCost

    total: PrivacyCost = PrivacyCost()
    queue = list(events)
    while queue:
        event, times = Event.parse(queue.pop(0)), 1
        if queue and "(" not in queue[0]:
            times = _parse_times(queue.pop(0))
        total[event] += times
    names: tuple[Accountant, ...] = ("pld", "rdp")
    costs = {name: compute_epsilon(total, delta, name) for name in names}
    if as_json:
        named = {str(event): times for event, times in total.items()}
        print_json({"events": named, "delta": delta, "epsilon": costs})
        return
    for event, times in total.items():
        print(f"{event} x {times}")
    print(
        f"epsilon {epsilon_text_rounded_up(costs['pld'])} (PLD), "
        f"{epsilon_text_rounded_up(costs['rdp'])} (RDP) at delta {delta:g}"
    )


def _parse_times(text: str) -> int:
    """Return how often an event is charged."""
    times = parse_cli_number(int, text)
    if times is None or times < 1:
        raise ArgumentError("TIMES", text, "1 or more")
    return int(times)


END = """\
claimed   epsilon by the node's own audit log, an upper bound
shown     epsilon that the attack proves at least, whatever the noise is like
as noise  the same if the noise is of the kind that is claimed; above the claim it refutes it, too
All at delta {delta:g}, each lower bound at {confidence:.0%}. One below the claim proves nothing: the
mechanism is sound, or the attack weak."""


@commands.command
def audit(
    *,
    mechanism: str | None = None,
    seed: NonNegativeInt = 0,
    out: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Attack each mechanism on neighboring data sets, and compare a lower bound with its epsilon.

    example: fedstill privacy audit --mechanism dp-sgd

    A lower bound above the claimed epsilon is a fault, and the exit code is 2.

    Args:
        mechanism: counts, dp-sgd, critic, pate or noisy-outputs (default: all, a few minutes)
        seed: seed of data and noise (default: 0)
        out: write the results as JSON
    """
    name = mechanism

    from fedstill.attacks.mechanism_audits import AUDITS

    if name is not None and name not in AUDITS:
        raise UnknownName("mechanism", name, list(AUDITS))
    found = []
    for one in [audit for key in AUDITS if name in (None, key) for audit in AUDITS[key]]:
        found.append(one(seed))
        if not as_json:
            _print(found[-1], first=len(found) == 1)
    record = _as_json(found, seed)
    if as_json:
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
