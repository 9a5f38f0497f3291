"""What ``fedstill node check`` says of a node's privacy: how it is protected, and what it can answer."""

from __future__ import annotations

import math
from pathlib import Path

from fedstill.cli.privacy import up
from fedstill.core.errors import ArgumentError, FedstillError, QuestionRefused
from fedstill.data.groups import limit_groups
from fedstill.node import own_audit
from fedstill.node.mechanism import Mechanism, unpriced
from fedstill.node.node_file import NodeFile
from fedstill.node.owner import Examined
from fedstill.node.planning import forecast, objection
from fedstill.node.protect import unit_notes, wanted
from fedstill.privacy.accounting import within
from fedstill.privacy.bill import total
from fedstill.privacy.budget import Budget
from fedstill.privacy.events import from_text
from fedstill.privacy.statement import state
from fedstill.protocol.questions import NodeSide


def privacy_facts(folder: Path, found: Examined) -> list[str]:
    """How the records are protected, and what is left of their budget, in lines."""
    if found.file is None:
        return []
    config, lines = found.file.privacy, []
    if not config.protects:
        lines.append("none: answers leave as they are, without any guarantee")
    else:
        lines.append(f"{config.called}, {config.randomness} randomness; for {state(config, {}, ()).unit}")
    if found.data is not None:
        lines += unit_notes([found.data], [config])
    for what, most, delta in (
        ("a run", config.epsilon, config.delta),
        ("all runs on these data", *config.over_all),
    ):
        if math.isfinite(most):
            lines.append(f"budget of {what}: epsilon {most:g} at delta {delta:g}")
    try:
        told, trouble = own_audit.spent(found.file, folder)
        budget = Budget(*config.over_all, config.accountant)
        if math.isfinite(budget.epsilon) and trouble is None:
            left = 0.0 if told.bare_total else budget.left(from_text(told.total))
            lines[-1] += f", of which {math.floor(1000 * left) / 1000:g} is left"
        elif trouble is not None:
            lines.append(f"nothing can be charged: {trouble}")
    except FedstillError:  # a fault, and told as one
        pass
    if math.isfinite(config.epsilon) and math.isinf(config.over_all[0]):
        again = f"the server names runs, and each may cost {config.epsilon:g} anew"
        lines.append(f"no budget of all runs on these data (privacy.total_epsilon is inf): {again}")
    return lines


def unprotected(
    found: Examined, side: NodeSide, folder: Path | None
) -> tuple[dict[str, str], str | None, Mechanism | None]:
    """Which questions the owner's mechanism cannot protect, why no run can be paid for, and that mechanism.

    Args:
        found: the node.
        side: what the method asks it.
        folder: the owner's, where the run is known: noise is found for it, and what it costs compared with
            what is left. None: only what is so in every run is said.
    """
    file = found.file
    if file is None or found.data is None or found.spec is None or not wanted(file.privacy):
        return {}, None, None
    config, data = file.privacy, found.data
    if folder is None:
        wants = [part for part, table in config.parts.items() if table.noise is None]
        config = config.with_noise(dict.fromkeys(wants, 1.0))
    try:
        data = data if data.groups is None else limit_groups(data, config.group_size)
        mechanism = Mechanism(file.name, config, side, file.local, len(data), found.spec.make_task())
    except QuestionRefused as error:
        return {error.question: error.rule}, None, None
    except ArgumentError as error:
        return {}, str(error), None
    rules = {name: unpriced(mechanism, question) for name, question in side.questions.items()}
    bare = {name: rule for name, rule in rules.items() if rule is not None}
    against = objection(mechanism, file.privacy) if folder is None else _dear(mechanism, file, folder)
    return bare, None if bare and folder is None else against, mechanism


def payment(mechanism: Mechanism) -> str:
    """What a run would cost, by the owner's accountant."""
    cost, config = forecast(mechanism), mechanism.config
    if cost.price is None:
        if objection(mechanism) is not None:
            return "It would pay nothing, since it would refuse: `fedstill privacy plan` says what."
        return "Without noise on all that leaves nothing is guaranteed, and no epsilon is known."
    reached = f"epsilon {up(cost.by(config.accountant))} ({config.accountant.upper()})"
    return f"It would pay {reached} at delta {config.delta:g}: `fedstill privacy plan` says for what."


def _dear(mechanism: Mechanism, file: NodeFile, folder: Path) -> str | None:
    """Why a run costs more than its owner allows, or None."""
    config, price = mechanism.config, total(mechanism.schedule())
    if price is None:
        return objection(mechanism)
    if not within(price, config.epsilon, config.delta, config.accountant):
        return f"the run costs more than privacy.epsilon = {config.epsilon:g}"
    try:
        told, trouble = own_audit.spent(file, folder)
    except FedstillError:  # a fault, and told as one
        return None
    if trouble is not None:
        return f"nothing can be charged: {trouble}"
    most, delta = config.over_all
    if math.isinf(most):
        return None
    name = "epsilon" if config.total_epsilon is None else "total_epsilon"
    if told.bare_total:
        return f"privacy.{name} is set, and releases without guarantee have left"
    if not within(from_text(told.total) + price, most, delta, config.accountant):
        return f"the run costs more than is left of privacy.{name} = {most:g} for all runs on these data"
    return None
