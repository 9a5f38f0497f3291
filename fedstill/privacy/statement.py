"""What is said of a node's protection: by the node before a run, and by a result after it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fedstill.core import timing
from fedstill.core.options import Checked, Fraction
from fedstill.core.registry import OURS
from fedstill.privacy.accounting import compute_epsilon
from fedstill.privacy.config import MECHANISMS, POISSON, Accountant, PrivacyConfig
from fedstill.privacy.events import cost_from_dict

NO_GUARANTEE = "no guarantee"


@dataclass(frozen=True)
class Statement(Checked):
    """How a node protects its records in a run, as it may tell the server.

    Args:
        unit: what the guarantee is about.
        delta: of every epsilon that is said of the node.
        budget: the largest epsilon that the run may cost; None is no budget.
        rules: what is done to each tensor that may leave, one line each.
        assumes: on what the guarantee rests.
    """

    mechanism: str = "none"
    says: str = ""
    unit: str = ""
    delta: Fraction = 1e-5
    budget: float | None = None
    accountant: Accountant = "pld"
    randomness: str = ""
    noise: Mapping[str, float] = field(default_factory=dict)
    rules: tuple[str, ...] = ()
    assumes: tuple[str, ...] = ()


def make_statement(
    config: PrivacyConfig, levels: Mapping[str, float], rules: Sequence[str], *, has_groups: bool = False
) -> Statement:
    """What an owner's config, with the levels of noise that it came to, is told as.

    ``several``: groups are declared, so that records may belong together, and each is protected by itself.
    """
    if not config.protects:
        return Statement(budget=None if math.isinf(config.epsilon) else config.epsilon, rules=tuple(rules))
    size, origin = config.group_size, MECHANISMS.origin(config.called)
    group = "one training record of this node" if size == 1 else f"all records of one group, {size} at most"
    return Statement(
        mechanism=config.called,
        says=config.about,
        unit=f"{group}, added or removed",
        delta=config.delta,
        budget=None if math.isinf(config.epsilon) else config.epsilon,
        accountant=config.accountant,
        randomness=RANDOMNESS_TEXTS[config.randomness],
        noise={name: level for name, level in levels.items() if level},
        rules=tuple(rules),
        assumes=(
            *config.assumes,
            *(() if origin == OURS else (THIRD_PARTY_TEXT.format(origin=origin),)),
            *((NON_ADAPTIVE,) if config.accountant == "pld" else ()),
            STOPPING_TEXT.format(
                budget=f"epsilon {config.epsilon:g}" if math.isfinite(config.epsilon) else "none is set"
            ),
            *((PER_RECORD_ONLY,) if has_groups and size == 1 else ()),
        ),
    )


RANDOMNESS_TEXTS = {
    "seeded": "a fast generator with 32 bits of seed, for simulations: its noise can be found and taken away",
    "secure": "a cryptographic generator (SHAKE-256), keyed with the node's secret",
}
NON_ADAPTIVE = (
    "what is charged is chosen beforehand, or is all Gaussian noise without sampling (accountant pld); where "
    "a server chooses what to ask next by what it was told, budgets hold by accountant rdp"
)
# Theorems of filters cover a budget, not what was spent when a server that watched it fall chose to stop.
STOPPING_TEXT = (
    "what was spent holds where how much was asked does not follow from the answers; whenever a server chose "
    "to stop, the budget holds: {budget}"
)
PER_RECORD_ONLY = (
    "it is of one record alone: who has several here, as a patient may, is protected less, since "
    "privacy.group_size is 1"
)
MAX_COUNT_PER_RUN = 2**63  # times of an event over a run
COMPOSE_SECONDS = 120.0  # seconds for the prices of one node, which are its own word
COMPOSE_TIMEOUT_TEXT = (
    f"no epsilon was worked out: the prices that it told take more than {COMPOSE_SECONDS:g} s to compose"
)
THIRD_PARTY_TEXT = "what {origin} says of its own mechanism: nothing here proves that it keeps to its prices"


def summarize_privacy(
    statements: Mapping[str, Statement], spent: Mapping[str, tuple[Mapping[str, int], int]]
) -> dict[str, Any]:
    """What a result says of privacy: for each node and for all of them.

    Args:
        statements: by node; a node without one has said nothing.
        spent: by node, what its releases cost: events as text and how often, and how many had no price.

    Returns:
        ``guarantee`` (whether every node has one), ``text`` and ``nodes``, each with ``epsilon`` at ``delta``
        (None: no guarantee), ``left`` of its budget and all that its statement says.
    """
    nodes = []
    for name, (events, unprotected) in spent.items():
        statement = statements.get(name, Statement())
        protected = statement.mechanism != "none" and not unprotected and bool(events)
        epsilon = _node_epsilon(statement, events) if protected else None
        timed_out, protected = protected and epsilon is None, epsilon is not None
        remaining = (
            None if statement.budget is None or epsilon is None else max(statement.budget - epsilon, 0.0)
        )
        row = {
            "name": name,
            "guarantee": protected,
            "epsilon": epsilon,
            "left": remaining,
            "events": dict(events),
        }
        row["assumes"] = _assumptions(statement, events)
        if timed_out:
            row["rules"] = [*statement.rules, COMPOSE_TIMEOUT_TEXT]
        nodes.append({**asdict(statement), **row, "releases_without_guarantee": unprotected})
    all_protected = bool(nodes) and all(node["guarantee"] for node in nodes)
    text = NO_GUARANTEE
    if all_protected:
        text = _summary_text(nodes)
    elif any(node["guarantee"] for node in nodes):
        names = ", ".join(node["name"] for node in nodes if not node["guarantee"])
        text = f"no guarantee for {names}"
    return {"guarantee": all_protected or None, "text": text, "nodes": nodes}


def _node_epsilon(statement: Statement, events: Mapping[str, int]) -> float | None:
    """What a node's releases cost; None where it tells prices that take too long to compose."""
    try:
        with timing.within(COMPOSE_SECONDS, lambda: TimeoutError(COMPOSE_TIMEOUT_TEXT)):
            return compute_epsilon(
                cost_from_dict(events, MAX_COUNT_PER_RUN), statement.delta, statement.accountant
            )
    except TimeoutError:
        return None


def _assumptions(statement: Statement, events: Mapping[str, int]) -> list[str]:
    """What a guarantee rests on, by what was paid: where each step takes all records, nothing is drawn."""
    is_sampled = not events or any(event.rate < 1 for event in cost_from_dict(events, MAX_COUNT_PER_RUN))
    return [line for line in statement.assumes if is_sampled or line != POISSON]


def _summary_text(nodes: Sequence[Mapping[str, Any]]) -> str:
    """The largest epsilon of each kind of guarantee: of one kind it says nothing about another."""
    by_guarantee: dict[tuple[float, str, str], dict[str, float]] = {}
    for node in nodes:
        kind = node["delta"], node["unit"], node["mechanism"]
        by_guarantee.setdefault(kind, {})[node["name"]] = node["epsilon"]
    parts = []
    for (delta, unit, mechanism), costs in by_guarantee.items():
        names = f"{', '.join(costs)}: " if len(by_guarantee) > 1 else ""
        max_epsilon = format_epsilon_bound(max(costs.values()))
        parts.append(f"{names}epsilon {max_epsilon} at delta {delta:g}, for {unit} (mechanism {mechanism})")
    return "; ".join(parts)


def format_epsilon_bound(value: float) -> str:
    """An epsilon to three digits, rounded up, so that it stays a bound.

    >>> format_epsilon_bound(3.2101), format_epsilon_bound(20.0), format_epsilon_bound(0.04), format_epsilon_bound(1234.5)
    ('3.22', '20', '0.04', '1240')
    """
    if value <= 0 or not math.isfinite(value):
        return f"{value:g}"
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / step - 1e-9) * step:.6g}"
