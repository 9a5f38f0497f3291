"""What ``fedstill node check`` says of a node's privacy: how it is protected, and what it can answer."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedstill.data.groups import limit_groups
from fedstill.errors import ArgumentError, FedstillError, QuestionRefused
from fedstill.node import owner
from fedstill.node.guard import PARTS, Guard, total, unpriced
from fedstill.node.owner import Examined, NodeFile
from fedstill.node.protect import wanted
from fedstill.node.questions import NodeSide
from fedstill.privacy.accounting import within
from fedstill.privacy.budget import Budget
from fedstill.privacy.events import from_text
from fedstill.privacy.statement import state


def privacy_facts(folder: Path, found: Examined) -> list[str]:
    """How the records are protected, and what is left of their budget, in lines."""
    if found.file is None:
        return []
    config, lines = found.file.privacy, []
    if config.mechanism == "none":
        lines.append("none: answers leave as they are, without any guarantee")
    else:
        lines.append(f"{config.mechanism}, {config.randomness} randomness; for {state(config, {}, ()).unit}")
    for what, most, delta in (
        ("a run", config.epsilon, config.delta),
        ("the data", config.total_epsilon, config.total_delta),
    ):
        if math.isfinite(most):
            lines.append(f"budget of {what}: epsilon {most:g} at delta {delta:g}")
    try:
        told = owner.spent(found.file, folder)
        budget = Budget(config.total_epsilon, config.total_delta, config.accountant)
        if math.isfinite(config.total_epsilon) and told.trouble is None:
            left = 0.0 if told.bare else budget.left(from_text(told.events))
            lines[-1] += f", of which {math.floor(1000 * left) / 1000:g} is left"
    except FedstillError:  # a fault, and told as one
        pass
    return lines


def unprotected(
    found: Examined, side: NodeSide, folder: Path | None
) -> tuple[dict[str, str], str | None, Guard | None]:
    """Which questions the owner's mechanism cannot protect, why no run can be paid for, and its guard.

    Args:
        found: the node.
        side: what the method asks it.
        folder: the owner's, where the run is known: noise is found for it, and what it costs compared with
            what is left. None: only what is so in every run is said.
    """
    file = found.file
    if file is None or found.data is None or found.form is None or not wanted(file.privacy):
        return {}, None, None
    config, data = file.privacy, found.data
    if folder is None:
        parts: dict[str, Any] = {
            part: replace(getattr(config, part), noise=1.0)
            for part in PARTS
            if getattr(config, part).noise is None
        }
        config = replace(config, **parts)
    try:
        data = data if data.groups is None else limit_groups(data, config.group_size)
        guard = Guard(file.name, config, side, file.local, len(data), len(found.form.classes))
    except QuestionRefused as error:
        return {error.question: error.rule}, None, None
    except ArgumentError as error:
        return {}, str(error), None
    rules = {name: unpriced(guard, question) for name, question in side.questions.items()}
    bare = {name: rule for name, rule in rules.items() if rule is not None}
    return bare, None if folder is None else _dear(guard, file, folder), guard


def _dear(guard: Guard, file: NodeFile, folder: Path) -> str | None:
    """Why a run costs more than its owner allows, or None."""
    config, price = guard.config, total(guard.schedule())
    if price is None:
        return None
    if not within(price, config.epsilon, config.delta, config.accountant):
        return f"the run costs more than privacy.epsilon = {config.epsilon:g}"
    try:
        told = owner.spent(file, folder)
    except FedstillError:  # a fault, and told as one
        return None
    if math.isinf(config.total_epsilon):
        return None
    if told.bare:
        return "privacy.total_epsilon is set, and releases without guarantee have left"
    after = from_text(told.events) + price
    if not within(after, config.total_epsilon, config.total_delta, config.accountant):
        return f"the run costs more than is left of privacy.total_epsilon = {config.total_epsilon:g}"
    return None
