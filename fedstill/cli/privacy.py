"""``fedstill privacy``: what a run will cost, what prices mean, and whether the mechanisms hold."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fedstill.cli.main import _take
from fedstill.core.errors import ArgumentError, UnknownName

if TYPE_CHECKING:
    from fedstill.privacy.config import Accountant
    from fedstill.privacy.events import Price

HELP = """\
What a run costs its nodes' records, as epsilon at delta.

usage:
  fedstill privacy plan NODE RUN [--OPTION VALUE ...]
                                             what a run will cost a node, before anything is trained. NODE is
                                             its folder or node.toml, RUN a run's .toml or a preset, OPTION
                                             as of `fedstill run`; exits with 2 if the node would refuse it
  fedstill privacy plan RUN [--OPTION VALUE ...]
                                             the same for every node of a simulation ([nodes.privacy])
  fedstill privacy price EVENT [TIMES] ...   epsilon of such noise, so many times; EVENT is
                                             "gaussian(1.0, rate=0.01)" or "laplace(50.0)"
  fedstill privacy audit                     attack every mechanism, and compare what is found with what is
                                             claimed; `fedstill privacy audit --help` says more

options of `plan`: two of noise, steps and epsilon give the third. What is not given here is as in the files;
noise that is given nowhere is found from epsilon.
  --epsilon E     the most that the run may cost
  --noise N       noise, where the node has one part without; else PART=N,PART=N for training, critic, pate,
                  gradients, outputs
  --steps N       how long the run is: the method's steps, rounds or predictions, or local epochs or
                  least_steps, the first that makes it dearer. With --epsilon and --noise it is what is found
options of `price`:
  --delta D       delta (default: 1e-5)
"""


def main(words: list[str]) -> None:
    """Do what the words after ``fedstill privacy`` say.

    Raises:
        FedstillError: they say nothing that can be done.
    """
    commands = {
        "plan": _afar("privacy_plan", "plan"),
        "price": _price,
        "audit": _afar("privacy_audit", "audit"),
    }
    asked = any(word in ("-h", "--help") for word in words)
    if not words or (asked and words[0] != "audit"):
        print(HELP, end="")
    elif words[0] not in commands:
        raise UnknownName("command", f"privacy {words[0]}", [f"privacy {name}" for name in commands])
    else:
        commands[words[0]](words[1:])


def _afar(file: str, function: str) -> Callable[[list[str]], None]:
    """A command with a file of its own, imported when it is called."""

    def command(words: list[str]) -> None:
        getattr(importlib.import_module(f"fedstill.cli.{file}"), function)(words)

    return command


def refuse_options(words: Sequence[str], known: Sequence[str]) -> None:
    """Refuse what looks like an option, once all that are known are taken.

    Raises:
        UnknownName: naming the first one.
    """
    for word in words:
        if word.startswith("--"):
            raise UnknownName("option", word.partition("=")[0], known)


def number(option: str, text: str, kind: Callable[[str], Any] = float) -> Any:
    """What an option says, as a number.

    Raises:
        ArgumentError: it is none.
    """
    try:
        return kind(text)
    except ValueError as error:
        raise ArgumentError(option, text, "a number" if kind is float else "a whole number") from error


# --- price --------------------------------------------------------------------------------------------


def _price(words: list[str]) -> None:
    given, words = _take("--delta", words)
    refuse_options(words, ["--delta"])
    delta = number("--delta", "1e-5" if given is None else given)

    from fedstill.privacy.accounting import epsilon
    from fedstill.privacy.events import Event, Price

    price: Price = Price()
    queue = list(words)
    while queue:
        event, times = Event.parse(queue.pop(0)), 1
        if queue and "(" not in queue[0]:
            times = number("TIMES", queue.pop(0), int)
            if times < 1:
                raise ArgumentError("TIMES", times, "1 or more")
        price[event] += times
    if not price:
        raise ArgumentError("fedstill privacy price", "", 'an event, as "gaussian(1.0, rate=0.01)"')
    names: tuple[Accountant, ...] = ("pld", "rdp")
    costs = {name: epsilon(price, delta, name) for name in names}
    for event, times in price.items():
        print(f"{event} x {times}")
    print(f"epsilon {up(costs['pld'])} (PLD), {up(costs['rdp'])} (RDP) at delta {delta:g}")


def up(value: float | None) -> str:
    """An epsilon, rounded up; None is no guarantee."""
    if value is None:
        return "no guarantee"
    return f"{math.ceil(1000 * value) / 1000:g}" if math.isfinite(value) else "inf"
