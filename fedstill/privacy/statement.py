"""Privacy statements: a node's guarantee before a run, and a result's summary of all nodes after it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fedstill.core import timing
from fedstill.core.options import CheckedOptions, Fraction
from fedstill.privacy.accounting import compute_epsilon
from fedstill.privacy.config import MECHANISMS, POISSON, Accountant, PrivacyConfig
from fedstill.privacy.events import cost_from_dict

NO_GUARANTEE = "no guarantee"


@dataclass(frozen=True)
class PrivacyStatement(CheckedOptions):
    """Privacy guarantee of a node in a run, as it may be sent to the server.

    Args:
        mechanism: registered name.
        says: description of the mechanism.
        unit: protected unit.
        delta: of every epsilon of the node.
        budget: largest epsilon that the run may cost; None: no budget.
        accountant: "pld" or "rdp".
        randomness: description of the generator of all noise.
        noise: noise levels by option table.
        rules: protection of each tensor that may be released, one line each.
        assumes: assumptions of the guarantee.
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
    config: PrivacyConfig,
    levels: Mapping[str, float],
    rules: Sequence[str],
    *,
    has_groups: bool = False,
    plugin: str = "",
) -> PrivacyStatement:
    """Return the statement of a node.

    Args:
        config: mechanism of the node's owner.
        levels: calibrated noise levels by option table.
        rules: protection of each tensor, one line each.
        has_groups: groups are declared, so that several records may belong together although each one is
            protected by itself.
        plugin: name of the run's method, if it is a plug-in.
    """
    if not config.protects:
        return PrivacyStatement(
            budget=None if math.isinf(config.epsilon) else config.epsilon, rules=tuple(rules)
        )
    size, name = config.group_size, config.registered_name
    group = "one training record of this node" if size == 1 else f"all records of one group, {size} at most"
    trains_privately = any(levels.get(table) for table in config.dp_trained.values())
    return PrivacyStatement(
        mechanism=name,
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
            *(() if name in MECHANISMS.builtin else (PLUGIN_MECHANISM_TEXT.format(name=name),)),
            *((PLUGIN_METHOD_TEXT.format(name=plugin),) if plugin else ()),
            *((ROUNDING_TEXT,) if trains_privately and not config.isolate_rounding else ()),
            *((NON_ADAPTIVE,) if config.accountant == "pld" else ()),
            STOPPING_TEXT.format(
                budget=f"epsilon {config.epsilon:g}" if math.isfinite(config.epsilon) else "none is set"
            ),
            *((PER_RECORD_ONLY,) if has_groups and size == 1 else ()),
        ),
    )


RANDOMNESS_TEXTS = {
    "seeded": "a fast generator with 32 bits of seed, for simulations: its noise can be computed and removed",
    "secure": "a cryptographic generator (SHAKE-256), keyed with the node's secret",
}
NON_ADAPTIVE = (
    "queries are chosen in advance, or all noise is Gaussian without sampling (accountant pld); if a server "
    "chooses queries from earlier responses, budgets hold under accountant rdp"
)
ROUNDING_TEXT = (
    "rounding in one example's gradient does not depend on the others of its batch "
    "(privacy.isolate_rounding = false); a server that chooses a network's parameters could amplify it"
)
# Privacy filter theorems cover a budget, not the epsilon spent when a server that watches it chooses to stop.
STOPPING_TEXT = (
    "the epsilon spent holds if the number of queries does not depend on the responses; the budget holds "
    "whenever a server stops: {budget}"
)
PER_RECORD_ONLY = (
    "it protects one record: a person with several records, such as a patient, is protected less, because "
    "privacy.group_size is 1"
)
MAX_COUNT_PER_RUN = 2**63  # of one event
COMPOSE_SECONDS = 120.0  # for the costs of one node, which it reports itself
COMPOSE_TIMEOUT_TEXT = (
    f"no epsilon was computed: the costs that it reports take more than {COMPOSE_SECONDS:g} s to compose"
)
PLUGIN_MECHANISM_TEXT = "as the plug-in {name} claims of its own mechanism: nothing here proves its costs"
PLUGIN_METHOD_TEXT = (
    "as the method {name}, a plug-in, declares: which tensors of its responses depend on records, and that "
    "one record moves its counts and sums no further than their payload kind says"
)


def summarize_privacy(
    statements: Mapping[str, PrivacyStatement], spent: Mapping[str, tuple[Mapping[str, int], int]]
) -> dict[str, Any]:
    """Summarize the privacy of a result, for each node and for all of them.

    Args:
        statements: by node; a node without one has sent none.
        spent: cost of each node's releases: events as text with their counts, and the number of releases
            without a guarantee.

    Returns:
        ``guarantee`` (True if every node has one, else None), ``text`` and ``nodes``: for each node its
            statement's fields, ``epsilon`` at ``delta`` (None: no guarantee), ``left`` of its budget and
            ``events``.
    """
    nodes = []
    for name, (events, unprotected) in spent.items():
        statement = statements.get(name, PrivacyStatement())
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
        text = _largest_epsilons_text(nodes)
    elif any(node["guarantee"] for node in nodes):
        names = ", ".join(node["name"] for node in nodes if not node["guarantee"])
        text = f"no guarantee for {names}"
    return {"guarantee": all_protected or None, "text": text, "nodes": nodes}


def _node_epsilon(statement: PrivacyStatement, events: Mapping[str, int]) -> float | None:
    """Epsilon of a node's releases; None if the costs that it reports take too long to compose."""
    try:
        with timing.time_limit(COMPOSE_SECONDS, lambda: TimeoutError(COMPOSE_TIMEOUT_TEXT)):
            return compute_epsilon(
                cost_from_dict(events, MAX_COUNT_PER_RUN), statement.delta, statement.accountant
            )
    except TimeoutError:
        return None


def _assumptions(statement: PrivacyStatement, events: Mapping[str, int]) -> list[str]:
    """Assumptions that apply to the charged events; without sampled events, those of Poisson sampling do
    not.
    """
    is_sampled = not events or any(event.rate < 1 for event in cost_from_dict(events, MAX_COUNT_PER_RUN))
    return [line for line in statement.assumes if is_sampled or line != POISSON]


def _largest_epsilons_text(nodes: Sequence[Mapping[str, Any]]) -> str:
    """Largest epsilon of each kind of guarantee; kinds are not comparable with each other."""
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
    """Format an epsilon with three digits, rounded up, so that it stays a bound.

    >>> [format_epsilon_bound(value) for value in (3.2101, 20.0, 0.04, 1234.5)]
    ['3.22', '20', '0.04', '1240']
    """
    if value <= 0 or not math.isfinite(value):
        return f"{value:g}"
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / step - 1e-9) * step:.6g}"
