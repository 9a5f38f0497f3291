"""``fedstill privacy``: what a run will cost, what prices mean, and whether the mechanisms hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedstill.cli.arguments import Given, dispatch, number
from fedstill.cli.console import print_json

if TYPE_CHECKING:
    from fedstill.privacy.config import Accountant
    from fedstill.privacy.events import Price

HELP = """\
What a run costs its nodes' records, as epsilon at delta.

usage:
  fedstill privacy plan [NODE] RUN [--epsilon E] [--noise N] [--steps N] [--json] [--OPTION VALUE ...]
                                             what a run will cost a node, before anything is trained. NODE is
                                             its folder or node.toml, RUN a run's .toml or a preset; without
                                             NODE for every node of a simulation ([nodes.privacy]). Exits
                                             with 2 if a node would refuse it
  fedstill privacy price EVENT [TIMES] ... [--delta D] [--json]
                                             epsilon of such noise, so many times; EVENT is
                                             "gaussian(1.0, rate=0.01)" or "laplace(50.0)"
  fedstill privacy audit [--mechanism NAME] [--seed N] [--out FILE] [--json]
                                             attacks on real nodes by somebody who knows all records but one:
                                             what they prove that each mechanism costs, beside what its
                                             audit log says. A lower bound above the claim is a fault, and the
                                             command ends with 2

options of `plan`: two of noise, steps and epsilon give the third. What is not given here is as in the files;
noise that is given nowhere is found from epsilon.
  --epsilon E     the most that the run may cost
  --noise N       noise, where the node has one part without; else PART=N,PART=N for training, critic, pate,
                  gradients, outputs
  --steps N       how long the run is: the method's steps, rounds or predictions, or local epochs or
                  least_steps, the first that makes it dearer. With --epsilon and --noise it is what is found
  --OPTION VALUE  as of `fedstill run`
options of `price`:
  --delta D       delta (default: 1e-5)
options of `audit`:
  --mechanism NAME  one of counts, dp-sgd, critic, pate, noisy-outputs; else all of them, a few minutes
  --seed N        of data and noise (default: 0)
  --out FILE      write what was found, as JSON
"""


def main(words: list[str]) -> None:
    """``fedstill privacy ...``."""
    afar = {"plan": "fedstill.cli.privacy_plan:plan", "audit": "fedstill.cli.privacy_audit:audit"}
    dispatch("privacy", words, HELP, {**afar, "price": _price})


def _price(given: Given) -> None:
    delta = number("--delta", given.get("--delta") or "1e-5")

    from fedstill.privacy.accounting import epsilon
    from fedstill.privacy.budget import up
    from fedstill.privacy.events import Event, Price

    price: Price = Price()
    queue = list(given.places)
    while queue:
        event, times = Event.parse(queue.pop(0)), 1
        if queue and "(" not in queue[0]:
            times = number("TIMES", queue.pop(0), int, lambda value: value >= 1, "1 or more")
        price[event] += times
    names: tuple[Accountant, ...] = ("pld", "rdp")
    costs = {name: epsilon(price, delta, name) for name in names}
    if "--json" in given:
        events = {str(event): times for event, times in price.items()}
        print_json({"events": events, "delta": delta, "epsilon": costs})
        return
    for event, times in price.items():
        print(f"{event} x {times}")
    print(f"epsilon {up(costs['pld'])} (PLD), {up(costs['rdp'])} (RDP) at delta {delta:g}")
