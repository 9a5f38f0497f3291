"""Privacy cost of a run at a node, computed before any training, in the same way as it will be charged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from fedstill.core.errors import FedstillError
from fedstill.node.audit_entries import RESPONSE
from fedstill.node.run_mechanism import PrivacyMechanism, no_guarantee_reason
from fedstill.privacy.accounting import compute_epsilon, max_steps
from fedstill.privacy.config import Accountant, PrivacyConfig
from fedstill.privacy.events import PrivacyCost, total_cost
from fedstill.protocol.local_config import LocalConfig

TRAINING = "local training"
EPOCHS, MIN_STEPS = "local.epochs", "local.min_steps"
MAX_STEPS = 1_000_000


@dataclass(frozen=True)
class CostLine:
    """One source of cost.

    Args:
        label: name of the query, or local training.
        charged_to: part of the node's protection whose noise covers it.
        times: number of repetitions.
        cost: cost of one repetition; None: no guarantee.
        part: released part of the query.
    """

    label: str
    charged_to: str
    times: int
    cost: PrivacyCost | None
    part: str = RESPONSE


@dataclass(frozen=True)
class Forecast:
    """Maximum cost of a run at a node; None if something has no guarantee.

    Args:
        lines: the sources of cost.
        cost: total cost.
        pld: epsilon of the composition.
        rdp: epsilon by the Rényi bound, as a check.
    """

    lines: tuple[CostLine, ...]
    cost: PrivacyCost | None
    pld: float | None
    rdp: float | None

    def epsilon_by(self, accountant: Accountant) -> float | None:
        """Return epsilon as the budget's accountant computes it."""
        return self.rdp if accountant == "rdp" else self.pld


def forecast(mechanism: PrivacyMechanism) -> Forecast:
    """Return the maximum cost of a mechanism's run, as its method declares it.

    Training is charged with the first release that depends on it: without queries nothing is charged.
    """
    if not mechanism.side.queries:
        return Forecast((), PrivacyCost(), 0.0, 0.0)
    cost, delta = total_cost(mechanism.run_costs()), mechanism.config.delta
    if cost is None or not mechanism.protects:
        return Forecast(tuple(cost_lines(mechanism)), None, None, None)
    epsilons = compute_epsilon(cost, delta), compute_epsilon(cost, delta, "rdp")
    return Forecast(tuple(cost_lines(mechanism)), cost, *epsilons)


def refusal_reason(mechanism: PrivacyMechanism, config: PrivacyConfig | None = None) -> str | None:
    """Return the reason why a node with a budget would refuse part of its run, whatever remains of it; or
    None.

    Args:
        mechanism: the node's mechanism.
        config: the owner's options, if the mechanism has placeholder noise instead of calibrated levels.
    """
    config, queries = config or mechanism.config, mechanism.side.queries
    if not queries or math.isinf(config.tightest_epsilon_budget):
        return None
    for query in queries.values():
        if (rule := no_guarantee_reason(mechanism, query)) is not None:
            return f"{query.name}: {rule}"
    supposed, planned = mechanism.with_placeholder_noise().run_costs(), mechanism.run_costs()
    for part in charged_noise_tables(mechanism):
        if config.noise_option_tables[part].noise is None and not supposed.get(part):
            unlimited = ", ".join(name for name, declared in queries.items() if not declared.times)
            reason = (
                f"the number of queries {unlimited} is not known, so noise cannot be calibrated to epsilon"
            )
            return f"privacy.{part}.noise is none, and {reason}: give a number"
    for part, table in config.noise_option_tables.items():
        if table.noise == 0 and planned.get(part, PrivacyCost()) is None:
            return f"privacy.{part}.noise is 0, and a budget is set: without noise there is no guarantee"
    if total_cost(planned) is None:
        return "a budget is set, and without noise on all releases there is no guarantee"
    return None


def charged_noise_tables(mechanism: PrivacyMechanism) -> list[str]:
    """Return the parts of a protection that a run is charged to, with the placeholder noise."""
    supposed = mechanism.with_placeholder_noise()
    parts = {part for part, cost in supposed.run_costs().items() if cost}
    for query in mechanism.side.queries.values():  # also if the number of repetitions is unknown
        parts |= {option for _, option, cost in supposed.single_query_costs(query) if cost}
    return [part for part in mechanism.config.noise_option_tables if part in parts]


def cost_lines(mechanism: PrivacyMechanism) -> Iterator[CostLine]:
    """Yield the sources of cost in a mechanism's run, without free ones."""
    training = mechanism.run_costs().get(mechanism.training, PrivacyCost())
    if training is None or training:
        # Rounds divide the same steps among their queries.
        times = 1 if training is None else sum(training.values())
        yield CostLine(
            TRAINING, mechanism.training, times, None if training is None else PrivacyCost(list(training))
        )
    for query in mechanism.side.queries.values():
        for part, option, cost in mechanism.single_query_costs(query):
            if cost is None or cost:
                yield CostLine(query.name, option, query.times, cost, part)


@dataclass(frozen=True)
class RunLength:
    """Option that makes a run longer: of its method (with a dot in its name), or of local training."""

    name: str
    value: float

    def with_length(self, method: Any, local: LocalConfig, length: int) -> tuple[Any, LocalConfig]:
        """Return options of method and local training with another length."""
        if self.name == EPOCHS:
            return method, replace(local, epochs=float(length))
        if self.name == MIN_STEPS:
            return method, replace(local, min_steps=length)
        return replace(method, **{self.name.removeprefix("method."): length}), local


def find_run_length(
    method: Any, local: LocalConfig, run_cost: Callable[[Any, LocalConfig], PrivacyCost | None]
) -> RunLength:
    """Return the first option for which a longer run costs more.

    Raises:
        FedstillError: there is none.
    """
    names = [name for name in method.length_options if hasattr(method, name)]
    options = [RunLength(f"method.{name}", getattr(method, name)) for name in names]
    options += [
        RunLength(EPOCHS, local.epochs),
        RunLength(MIN_STEPS, local.min_steps),
    ]  # the latter applies if epochs are short
    current = run_cost(method, local)
    for option in options:
        if run_cost(*option.with_length(method, local, 2 * math.ceil(option.value) + 1)) != current:
            return option
    option_names = ", ".join(option.name for option in options)
    message = f"this run costs the same for all values of {option_names}"
    raise FedstillError(f"{message}: leave --steps out, or one of --epsilon and --noise")


def max_affordable_steps(mechanism_of: Callable[[int], PrivacyMechanism], max_epsilon: float) -> int:
    """Return the length of the longest run with epsilon at most ``max_epsilon``; 0 if there is none.

    Args:
        mechanism_of: returns the mechanism of a run of a length.
        max_epsilon: limit of epsilon.
    """

    def run_cost(steps: int) -> PrivacyCost:
        return (total_cost(mechanism_of(steps).run_costs()) or PrivacyCost()) if steps else PrivacyCost()

    config = mechanism_of(1).config
    return max_steps(run_cost, max_epsilon, config.delta, config.accountant, MAX_STEPS)


def round_noise_up(level: float) -> float:
    """Round a noise level up to four digits.

    >>> round_noise_up(4.08014), round_noise_up(1547.139), round_noise_up(0.5)
    (4.081, 1548.0, 0.5)
    """
    digits = 3 - math.floor(math.log10(level))
    return round(math.ceil(round(level * 10.0**digits, 6)) / 10.0**digits, max(digits, 0))
