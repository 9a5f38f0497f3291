"""``fedstill privacy plan``: what a run will cost each node, as its mechanism will charge it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill.cli.arguments import ParsedArgs, number
from fedstill.cli.console import plain, print_json
from fedstill.cli.node_check_privacy_section import refusal
from fedstill.cli.privacy_plan_tables import NodePlan, PlannedNode, PlannedRun, as_json, show
from fedstill.cli.run import configured
from fedstill.core.errors import ArgumentError, FedstillError, UnknownName
from fedstill.data.stratified_sampling import limit_groups
from fedstill.node.audit_log_inspection import TotalSpent
from fedstill.node.privacy_forecast import (
    RunLength,
    charged_noise_tables,
    find_run_length,
    forecast,
    max_affordable_steps,
)
from fedstill.node.protection import group_privacy_notes, needs_mechanism
from fedstill.node.run_mechanism import PrivacyMechanism
from fedstill.privacy.events import PrivacyCost, total_cost
from fedstill.protocol.method import build_node_side

if TYPE_CHECKING:
    from fedstill.privacy.config import PrivacyConfig
    from fedstill.protocol.local_config import LocalConfig
    from fedstill.runs.config import RunConfig


def plan(args: ParsedArgs) -> None:
    """Say what a run will cost one node, or those of a simulation; a refusal is an error."""
    noise = None if (text := args.get("--noise")) is None else _parse_noise(text)
    epsilon = number("--epsilon", args.get("--epsilon"))
    steps = number("--steps", args.get("--steps"), int)
    if epsilon == math.inf and noise is not None and steps is None:
        raise ArgumentError("--epsilon", epsilon, "finite, where it says how long the run can be")
    if steps is not None and steps < 1:
        raise ArgumentError("--steps", steps, "1 or more")
    *folders, target = args.positionals
    if not folders and ((Path(target) / "node.toml").is_file() or Path(target).name == "node.toml"):
        raise ArgumentError("fedstill privacy plan", target, "NODE RUN: the run is missing")
    config, folder = configured(target, args, "run"), Path(folders[0]) if folders else None

    run, places = (
        _planned_simulated_nodes(target, config)
        if folder is None
        else _planned_owner_node(folder, target, config)
    )
    known: dict[int, NodePlan] = {}  # in a simulation nodes differ in how many records they have
    plans = []
    for place in places:
        if place.examples not in known:
            known[place.examples] = _solve_for_missing_option(run, place, epsilon, noise, steps)
        plans.append(replace(known[place.examples], place=place))
    if "--json" in args:
        print_json(as_json(run, plans))
    else:
        show(plain(), run, plans, folder)
    for one in plans:
        if (reason := refusal(one.mechanism, one.place.spent)) is not None:
            raise FedstillError(f"{one.place.name} would refuse {run.name}: {reason}")


def _parse_noise(text: str) -> float | dict[str, float]:
    """``4.0``, or ``training=4.0,critic=8``."""
    if "=" not in text:
        return float(number("--noise", text))
    levels = {}
    for item in text.split(","):
        part, _, level = item.strip().partition("=")
        levels[part] = float(number(f"--noise {part}", level))
    return levels


# --- who takes part -----------------------------------------------------------------------------------


def _planned_owner_node(path: Path, target: str, config: RunConfig) -> tuple[PlannedRun, list[PlannedNode]]:
    """One node as its owner has it."""
    from fedstill.cli.node_check import load_target_run
    from fedstill.data import node_data
    from fedstill.node import audit_log_inspection, owner_folder

    folder = path.parent if path.name == owner_folder.FILE else path
    file, asking = owner_folder.read_node_file(folder), load_target_run(target, config)
    data, spec = node_data.load_node_data(file.data, folder, asking.spec, asking.config.task)
    notes = group_privacy_notes([data], [file.privacy])
    data = data if data.groups is None else limit_groups(data, file.privacy.group_size)
    if data.groups is None and file.privacy.group_size > 1:
        raise ArgumentError("privacy.group_size", file.privacy.group_size, "1, as there is no data.group")
    run = PlannedRun(target, asking.config.method, spec, asking.public, (file.model.name,), notes)
    _require_public(run, asking.note)
    spent = audit_log_inspection.read_total_spent(file, folder)
    return run, [PlannedNode(file.name, file.privacy, file.local, len(data), spent, file.data.group)]


def _planned_simulated_nodes(target: str, config: RunConfig) -> tuple[PlannedRun, list[PlannedNode]]:
    """All nodes of a simulation, with the parts of the data that they will have."""
    from fedstill.data.data_spec import DataSpec
    from fedstill.data.loading import load
    from fedstill.runs.build import split_data

    data = load(config.data, config.task)
    parts, public = split_data(config, data)
    notes = group_privacy_notes(parts, [config.nodes.privacy] * len(parts))
    made = PlannedRun(
        target, config.method, DataSpec.from_data(config.task, data), public, config.nodes.models, notes
    )
    _require_public(made, "")
    own = (config.nodes.privacy, config.nodes.local)
    if needs_mechanism(config.nodes.privacy):  # as the run itself does then
        parts = [limit_groups(part, config.nodes.privacy.group_size) for part in parts]
    return made, [PlannedNode(f"node-{k}", *own, len(part), TotalSpent({})) for k, part in enumerate(parts)]


def _require_public(run: PlannedRun, note: str) -> None:
    if run.public is None and run.method.needs().public:
        reason = f" ({note})" if note else ""
        raise FedstillError(
            f"the privacy cost of {run.name} depends on its public data, which are not here{reason}"
        )


# --- the third of three -------------------------------------------------------------------------------


def _build_mechanism(
    run: PlannedRun, place: PlannedNode, privacy: PrivacyConfig, method: Any, local: LocalConfig
) -> PrivacyMechanism:
    """The mechanism that the node would have in the run."""
    from fedstill.core.compute import Compute
    from fedstill.protocol.queries import NodeSetting

    setting = NodeSetting(run.spec.make_task(), local, Compute(), run.public)
    side = build_node_side(method, setting)
    return PrivacyMechanism(place.name, privacy, side, local, place.examples, setting.task, group=place.group)


def _solve_for_missing_option(
    run: PlannedRun,
    place: PlannedNode,
    epsilon: float | None = None,
    noise: float | Mapping[str, float] | None = None,
    steps: int | None = None,
) -> NodePlan:
    """Give the node the one of noise, steps and epsilon that is not given."""
    privacy, method, local = place.privacy, run.method, place.local
    finds_steps = steps is None and epsilon is not None and noise is not None
    if epsilon is not None:
        privacy = replace(privacy, epsilon=epsilon)
    # With some noise everywhere: what does the run cost at all, and for how long?
    wants = [part for part, table in privacy.noise_option_tables.items() if table.noise is None]
    noisy = privacy.with_noise(dict.fromkeys(wants, 1.0))
    first = _build_mechanism(run, place, noisy, method, local)
    used = charged_noise_tables(first)
    if noise is not None:
        unknown = [part for part in wants if part in used]
        privacy = privacy.with_noise(_noise_by_part(noise, privacy, used, unknown))
        noisy = noisy.with_noise({part: privacy.noise_option_tables[part].noise or 1.0 for part in used})
    wants = [part for part in used if privacy.noise_option_tables[part].noise is None]

    length = None
    if total_cost(first.run_costs()) or steps or finds_steps:

        def price(method: Any, local: LocalConfig) -> PrivacyCost | None:
            return total_cost(_build_mechanism(run, place, noisy, method, local).run_costs())

        try:
            length = find_run_length(method, local, price)
        except FedstillError:
            if steps is not None or finds_steps:
                raise
    if length is not None and (steps is not None or finds_steps):
        steps = _longest_run_within_epsilon(run, place, privacy, length, wants) if steps is None else steps
        method, local = length.with_length(method, local, steps)
        length = replace(length, value=steps)
    mechanism = _build_mechanism(run, place, privacy, method, local)
    if mechanism.protects and method.needs().trains_on_public:  # as the run itself is refused
        allowed = "none if public data are added to its own"
        raise ArgumentError(f"privacy.mechanism of {place.name}", mechanism.name, allowed)
    limited = math.isfinite(privacy.tightest_epsilon_budget)
    cost = forecast(mechanism)
    noisy_enough = wants and limited and cost.cost is not None
    found = "steps" if finds_steps else "noise" if noisy_enough else "epsilon"
    return NodePlan(place, mechanism, cost, length, found)


def _noise_by_part(
    given: float | Mapping[str, float], privacy: PrivacyConfig, used: Sequence[str], wants: Sequence[str]
) -> dict[str, float]:
    """Noise by part, where one number is that of the one part that is in query."""
    if isinstance(given, Mapping):
        for part in given:
            if not privacy.noise_option_tables:
                allowed = f"none, as mechanism {privacy.registered_name!r} draws no noise"
                raise ArgumentError("--noise", part, allowed)
            if part not in privacy.noise_option_tables:
                raise UnknownName("part of --noise", part, list(privacy.noise_option_tables))
        return dict(given)
    meant = wants or used
    if len(meant) != 1:
        allowed = f"PART=N for {', '.join(meant)}" if meant else "none: nothing of this run takes noise"
        raise ArgumentError("--noise", given, allowed)
    return {meant[0]: given}


def _longest_run_within_epsilon(
    run: PlannedRun, place: PlannedNode, privacy: PrivacyConfig, length: RunLength, wants: Sequence[str]
) -> int:
    """The longest run within epsilon."""
    if wants:
        raise ArgumentError("--noise", ", ".join(wants), "noise for them too, or --steps in its place")

    def mechanism_of(steps: int) -> PrivacyMechanism:
        return _build_mechanism(run, place, privacy, *length.with_length(run.method, place.local, steps))

    if total_cost(mechanism_of(1).run_costs()) is None:
        raise ArgumentError("--noise", 0, "noise on everything that leaves; without it nothing is guaranteed")
    steps = max_affordable_steps(mechanism_of, privacy.epsilon)
    if not steps:
        least = f"more, or more noise: even {length.name} = 1 costs more than that at {place.name}"
        raise ArgumentError("--epsilon", privacy.epsilon, least)
    return steps
