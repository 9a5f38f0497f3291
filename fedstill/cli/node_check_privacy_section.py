"""Privacy part of ``fedstill node check``: mechanism, budgets, and queries that cannot be protected."""

from __future__ import annotations

import math
from pathlib import Path

from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, FedstillError, QueryRefused
from fedstill.core.table_schema import schema_difference
from fedstill.core.text_format import to_printable_line
from fedstill.data.data_spec import DataSpec
from fedstill.data.stratified_sampling import limit_groups
from fedstill.node import audit_log_inspection
from fedstill.node.audit_log_inspection import TotalSpent
from fedstill.node.node_file import NodeFile
from fedstill.node.owner_folder import FolderCheck
from fedstill.node.privacy_forecast import forecast, refusal_reason
from fedstill.node.protection import group_privacy_notes, needs_mechanism
from fedstill.node.run_mechanism import PrivacyMechanism, no_guarantee_reason
from fedstill.privacy.accounting import is_within_epsilon
from fedstill.privacy.budget import (
    ProtectedUnitChanged,
    epsilon_text_rounded_down,
    epsilon_text_rounded_up,
    remaining_epsilon,
)
from fedstill.privacy.events import cost_from_dict, total_cost
from fedstill.privacy.statement import make_statement
from fedstill.protocol.queries import NodeSide


def privacy_facts(folder: Path, file: NodeFile, data: TensorData | None) -> list[str]:
    """Return lines on mechanism, unit and remaining budget."""
    config, lines = file.privacy, []
    if not config.protects:
        lines.append("none: releases have no noise and no guarantee")
    else:
        unit = make_statement(config, {}, ()).unit
        lines.append(f"{config.registered_name}, {config.randomness} randomness; for {unit}")
    if data is not None:
        lines += group_privacy_notes([data], [config])
    for what, most, delta in (
        ("a run", config.epsilon, config.delta),
        ("all runs on these data", *config.total_budget),
    ):
        if math.isfinite(most):
            lines.append(f"budget of {what}: epsilon {most:g} at delta {delta:g}")
    balance = _spent(file, folder)
    if balance is not None and balance.fault is not None:
        lines.append(f"nothing can be charged: {balance.fault}")
    elif balance is not None and balance.units - {config.unit(file.data.group)}:
        lines.append("earlier charges protect another unit than privacy.group_size and data.group say now")
    elif balance is not None and math.isfinite(config.total_budget[0]):
        left = remaining_epsilon(config, balance.events, balance.no_guarantee, all_runs=True)
        lines[-1] += f", of which {epsilon_text_rounded_down(left)} is left"
    if math.isfinite(config.epsilon) and math.isinf(config.total_budget[0]):
        again = f"the server names runs, and each may cost {config.epsilon:g} again"
        lines.append(f"no budget of all runs on these data (privacy.total_epsilon is inf): {again}")
    if config.protects and config.accountant == "pld" and math.isfinite(config.tightest_epsilon_budget):
        lines.append(
            "accountant pld: a budget may be exceeded by some delta if the server chooses queries by earlier "
            "responses; rdp holds then, too"
        )
    if config.protects and file.policy.approve == "policy" and not (file.data.classes or file.data.schema):
        why = "runs of other classes are refused (data.classes names the only ones)"
        lines.append(f"a server can learn at no privacy cost which classes are here: {why}")
    return lines


def schema_fact(file: NodeFile) -> str:
    """Return which schemas a node with table data accepts."""
    if file.data.schema:
        return f"that of {file.data.schema} alone: a run of any other is refused before data are looked at"
    if file.policy.approve != "policy":
        return "any that a run has, once you have approved it"
    learned = "by one range after another a server learns a column's least and largest value"
    return f"any that a run has: {learned} (data.schema names the only one)"


def spec_objection(file: NodeFile, found: FolderCheck, spec: DataSpec) -> str | None:
    """Return how a run's schema or classes differ from the only ones that the owner allows; else None."""
    if file.data.classes and file.data.classes != spec.classes:
        named = ", ".join(map(to_printable_line, spec.classes))
        return f"its classes are not those of data.classes, in their order: {named}"
    differs = schema_difference(found.schema, spec.schema) if found.schema else ""
    return f"its schema is not that of {file.data.schema}: other {differs}" if differs else None


def unprotected(
    file: NodeFile, found: FolderCheck, side: NodeSide, folder: Path | None
) -> tuple[dict[str, str], str | None, PrivacyMechanism | None]:
    """Return the queries that the mechanism cannot protect, why no run fits the budget, and the mechanism.

    Args:
        found: what could be made of it.
        folder: the owner's, where the run is known: noise is found for it, and what it costs compared with
            what is left. None: only what is so in every run is said.
    """
    if found.data is None or found.spec is None or not needs_mechanism(file.privacy):
        return {}, None, None
    config, data = file.privacy, found.data
    if folder is None:
        wants = [part for part, table in config.noise_option_tables.items() if table.noise is None]
        config = config.with_noise(dict.fromkeys(wants, 1.0))
    try:
        data = data if data.groups is None else limit_groups(data, config.group_size)
        about = (file.name, config, side, file.local, len(data), found.spec.make_task())
        mechanism = PrivacyMechanism(*about, group=file.data.group)
    except QueryRefused as error:
        return {error.query: error.rule}, None, None
    except ArgumentError as error:
        return {}, str(error), None
    rules = {name: no_guarantee_reason(mechanism, query) for name, query in side.queries.items()}
    bare = {name: rule for name, rule in rules.items() if rule is not None}
    if folder is None:
        against = refusal_reason(mechanism, file.privacy)
    else:
        against = refusal(mechanism, _spent(file, folder))
    return bare, None if bare and folder is None else against, mechanism


def payment(mechanism: PrivacyMechanism) -> str:
    """Return the privacy cost of a run by the owner's accountant."""
    cost, config = forecast(mechanism), mechanism.config
    if cost.cost is None:
        if refusal_reason(mechanism) is not None:
            return "Privacy cost: none, as the node would refuse the run (see `fedstill privacy plan`)."
        return "Privacy cost: no guarantee and no epsilon, as some releases have no noise."
    reached = (
        f"epsilon {epsilon_text_rounded_up(cost.epsilon_by(config.accountant))} ({config.accountant.upper()})"
    )
    return f"Privacy cost: {reached} at delta {config.delta:g} (by query: `fedstill privacy plan`)."


def refusal(mechanism: PrivacyMechanism, spent: TotalSpent | None) -> str | None:
    """Why a node would refuse a run as its mechanism charges it, or None.

    Args:
        spent: what its data have cost so far; None: not known, and the run is held against its own budget.
    """
    config, price = mechanism.config, total_cost(mechanism.run_costs())
    so_far = TotalSpent({}) if spent is None else spent
    if so_far.fault is not None:
        return f"nothing can be charged: {so_far.fault}"
    if price is None:
        return refusal_reason(mechanism)
    most, delta = config.total_budget
    if so_far.units - {mechanism.unit} and math.isfinite(most):
        return str(ProtectedUnitChanged(most, delta))
    if so_far.no_guarantee and math.isfinite(most):
        return "nothing is left of the budget, as earlier releases had no guarantee"
    if not is_within_epsilon(price, config.epsilon, config.delta, config.accountant):
        return f"it costs more than the budget of a run, epsilon {config.epsilon:g} at delta {config.delta:g}"
    if spent is not None and not is_within_epsilon(
        cost_from_dict(spent.events) + price, most, delta, config.accountant
    ):
        return f"it costs more than is left of the data's budget, epsilon {most:g} at delta {delta:g}"
    return None


def _spent(file: NodeFile, folder: Path) -> TotalSpent | None:
    """Return the audit log's balance; None if it cannot be read, which is reported as a fault."""
    try:
        return audit_log_inspection.read_total_spent(file, folder)
    except FedstillError:
        return None
