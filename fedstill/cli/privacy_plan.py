"""``fedstill privacy plan``: what a run will cost each node, as its mechanism will charge it.

:func:`print_plan` computes the costs, :func:`show` prints them in 80 columns, and :func:`advice` recommends
options of DP-SGD from recorded runs and the number of records only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from fedstill.cli.arguments import Call, read_words
from fedstill.cli.audit import events
from fedstill.cli.console import plain, print_facts, print_json, print_table
from fedstill.cli.node_check import features_objection, load_target_run, refusal
from fedstill.cli.run import configured
from fedstill.core.compute import Compute
from fedstill.core.errors import ArgumentError, FedstillError, UnknownName
from fedstill.data import node_data
from fedstill.data.data_spec import DataSpec
from fedstill.data.loading import load
from fedstill.data.public import PublicData
from fedstill.data.stratified_sampling import limit_groups
from fedstill.node import folder_log, owner_folder
from fedstill.node.audit_entries import RESPONSE
from fedstill.node.features import own_features
from fedstill.node.folder_log import TotalSpent
from fedstill.node.privacy_forecast import (
    MAX_STEPS,
    Forecast,
    RunLength,
    charged_noise_tables,
    find_run_length,
    forecast,
    max_affordable_steps,
    round_noise_up,
)
from fedstill.node.protection import group_privacy_notes, needs_mechanism
from fedstill.node.run_mechanism import PrivacyMechanism
from fedstill.privacy.accounting import compute_epsilon
from fedstill.privacy.budget import epsilon_text_rounded_down, epsilon_text_rounded_up
from fedstill.privacy.config import PrivacyConfig
from fedstill.privacy.events import PrivacyCost, cost_from_dict, cost_to_dict, total_cost
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import build_node_side
from fedstill.protocol.node_side import NodeSetting
from fedstill.protocol.recalibration import Recalibration
from fedstill.runs.build import prepare_data
from fedstill.runs.feature_space import public_on_features
from fedstill.runs.spec import RunSpec
from fedstill.tasks import TaskConfig


def print_plan(
    target: str,
    folder: Path | None,
    epsilon: float | None,
    noise_text: str | None,
    steps: int | None,
    as_json: bool,
    call: Call,
) -> None:
    """Print what a run will cost one node, or those of a simulation; a refusal is an error."""
    noise = None if noise_text is None else _parse_noise(noise_text)
    if epsilon == math.inf and noise is not None and steps is None:
        raise ArgumentError("--epsilon", epsilon, "finite, where it says how long the run can be")
    if folder is None and ((Path(target) / "node.toml").is_file() or Path(target).name == "node.toml"):
        raise ArgumentError("fedstill privacy plan", target, "NODE RUN: the run is missing")
    config = configured(target, call, "run")

    run, nodes = (
        _planned_simulated_nodes(target, config)
        if folder is None
        else _planned_owner_node(folder, target, config)
    )
    known: dict[int, NodePlan] = {}  # in a simulation nodes differ in how many records they have
    plans = []
    for node in nodes:
        if node.examples not in known:
            known[node.examples] = _solve_for_missing_option(run, node, epsilon, noise, steps)
        plans.append(replace(known[node.examples], node=node))
    if as_json:
        print_json(plan_record(run, plans))
    else:
        show(plain(), run, plans, folder)
    for one in plans:
        if (reason := refusal(one.mechanism, one.node.spent)) is not None:
            raise FedstillError(f"{one.node.name} would refuse {run.name}: {reason}")


def _parse_noise(text: str) -> float | dict[str, float]:
    """``4.0``, or ``training=4.0,critic=8``."""
    if "=" not in text:
        return float(read_words(float, [text], "--noise"))
    levels = {}
    for item in text.split(","):
        part, _, level = item.strip().partition("=")
        levels[part] = float(read_words(float, [level], f"--noise {part}"))
    return levels


# --- who takes part -----------------------------------------------------------------------------------


def _planned_owner_node(path: Path, target: str, config: RunSpec) -> tuple[PlannedRun, list[PlannedNode]]:
    folder = path.parent if path.name == owner_folder.FILE else path
    file, asking = owner_folder.read_node_file(folder), load_target_run(target, config)
    data, spec = node_data.load_node_data(file.data, folder, asking.spec, asking.config.task)
    notes = group_privacy_notes([data], [file.privacy])
    data = data if data.groups is None else limit_groups(data, file.privacy.group_size)
    if data.groups is None and file.privacy.group_size > 1:
        raise ArgumentError("privacy.group_size", file.privacy.group_size, "1, as there is no data.group")
    public = asking.public
    if (reason := features_objection(file, config)) is not None:
        raise FedstillError(f"{file.name} would refuse {target}: {reason}")
    if file.features:
        width = own_features(file, folder, spec).model_width
        spec, public = spec.on_features(width), public_on_features(config.public, public, width)
    student = asking.config.student
    run = PlannedRun(
        target,
        asking.config.method,
        spec,
        public,
        (file.model.name,),
        notes,
        student.declared_recalibration,
    )
    _require_public(run, asking.note)
    spent = folder_log.read_total_spent(file, folder)
    return run, [PlannedNode(file.name, file.privacy, file.local, len(data), spent, file.data.group)]


def _planned_simulated_nodes(target: str, config: RunSpec) -> tuple[PlannedRun, list[PlannedNode]]:
    """All nodes of a simulation, with the parts of the data that they will have."""
    data = load(config.data, config.task)
    loaded = prepare_data(config, data, placeholder=True)
    parts, space = loaded.parts, loaded.feature_space
    notes = group_privacy_notes(parts, [config.nodes.privacy] * len(parts))
    spec = DataSpec.from_data(config.task, data)
    if space is not None:
        spec = spec.on_features(space.width)
    recalibration = config.student.declared_recalibration
    made = PlannedRun(target, config.method, spec, loaded.public, config.nodes.models, notes, recalibration)
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
    run: PlannedRun, node: PlannedNode, privacy: PrivacyConfig, method: Any, local: LocalConfig
) -> PrivacyMechanism:
    """The mechanism that the node would have in the run."""
    task = run.spec.make_task()
    setting = NodeSetting(task, local, Compute(), run.public, recalibration=run.recalibration)
    side = build_node_side(method, setting)
    return PrivacyMechanism(node.name, privacy, side, local, node.examples, setting.task, group=node.group)


def _solve_for_missing_option(
    run: PlannedRun,
    node: PlannedNode,
    epsilon: float | None = None,
    noise: float | Mapping[str, float] | None = None,
    steps: int | None = None,
) -> NodePlan:
    """Give the node the one of noise, steps and epsilon that is not given."""
    privacy, method, local = node.privacy, run.method, node.local
    finds_steps = steps is None and epsilon is not None and noise is not None
    if epsilon is not None:
        privacy = replace(privacy, epsilon=epsilon)
    # With some noise everywhere: what does the run cost at all, and for how long?
    wants = [part for part, table in privacy.noise_option_tables.items() if table.noise is None]
    noisy = privacy.with_noise(dict.fromkeys(wants, 1.0))
    first = _build_mechanism(run, node, noisy, method, local)
    used = charged_noise_tables(first)
    if noise is not None:
        unknown = [part for part in wants if part in used]
        privacy = privacy.with_noise(_noise_by_part(noise, privacy, used, unknown))
        noisy = noisy.with_noise({part: privacy.noise_option_tables[part].noise or 1.0 for part in used})
    wants = [part for part in used if privacy.noise_option_tables[part].noise is None]

    length = None
    if total_cost(first.run_costs()) or steps or finds_steps:

        def price(method: Any, local: LocalConfig) -> PrivacyCost | None:
            return total_cost(_build_mechanism(run, node, noisy, method, local).run_costs())

        try:
            length = find_run_length(method, local, price)
        except FedstillError:
            if steps is not None or finds_steps:
                raise
    if length is not None and (steps is not None or finds_steps):
        steps = _longest_run_within_epsilon(run, node, privacy, length, wants) if steps is None else steps
        method, local = length.with_length(method, local, steps)
        length = replace(length, value=steps)
    mechanism = _build_mechanism(run, node, privacy, method, local)
    if mechanism.protects and method.needs().trains_on_public:  # as the run itself is refused
        allowed = "none if public data are added to its own"
        raise ArgumentError(f"privacy.mechanism of {node.name}", mechanism.name, allowed)
    limited = math.isfinite(privacy.tightest_epsilon_budget)
    cost = forecast(mechanism)
    noisy_enough = wants and limited and cost.cost is not None
    found = "steps" if finds_steps else "noise" if noisy_enough else "epsilon"
    return NodePlan(node, mechanism, cost, length, found)


def _noise_by_part(
    given: float | Mapping[str, float], privacy: PrivacyConfig, used: Sequence[str], wants: Sequence[str]
) -> dict[str, float]:
    """Noise by part, where one number is that of the one part that is in query."""
    if isinstance(given, Mapping):
        for part in given:
            if not privacy.protects:
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
    run: PlannedRun, node: PlannedNode, privacy: PrivacyConfig, length: RunLength, wants: Sequence[str]
) -> int:
    if wants:
        raise ArgumentError("--noise", ", ".join(wants), "noise for them too, or --steps in its place")

    def mechanism_of(steps: int) -> PrivacyMechanism:
        return _build_mechanism(run, node, privacy, *length.with_length(run.method, node.local, steps))

    if total_cost(mechanism_of(1).run_costs()) is None:
        raise ArgumentError("--noise", 0, "noise on everything that leaves; without it nothing is guaranteed")
    steps = max_affordable_steps(mechanism_of, privacy.epsilon)
    if not steps:
        least = f"more, or more noise: even {length.name} = 1 costs more than that at {node.name}"
        raise ArgumentError("--epsilon", privacy.epsilon, least)
    return steps


@dataclass(frozen=True)
class PlannedRun:
    """A run, as far as its cost depends on it."""

    name: str
    method: Any
    spec: DataSpec
    public: PublicData | None
    models: tuple[str, ...] = ()  # of the nodes, where they are known
    notes: tuple[str, ...] = ()  # on its unit of privacy: that records belong together, and epsilon is of one
    recalibration: Recalibration | None = None  # of its student


@dataclass(frozen=True)
class PlannedNode:
    """A node that the run is planned for."""

    name: str
    privacy: PrivacyConfig
    local: LocalConfig
    examples: int  # its records, without those that a limit of groups leaves out
    spent: TotalSpent
    group: str = ""


@dataclass(frozen=True)
class NodePlan:
    """Plan of one node."""

    node: PlannedNode
    mechanism: PrivacyMechanism  # of the run as planned
    cost: Forecast
    length: RunLength | None  # option that sets the length of the run; None: the cost does not depend on it
    found: str  # the third of noise, steps and epsilon

    @property
    def unlike(self) -> bool:
        """Return whether earlier releases were charged for another unit, so that costs cannot be added."""
        return bool(self.node.spent.units - {self.mechanism.unit})


def show(console: Console, run: PlannedRun, plans: Sequence[NodePlan], folder: Path | None) -> None:
    """Print what was found for the one node of a folder, or for those of a simulation."""
    most = _most_limiting_plan(plans)
    console.print(f"{run.name} ({run.method.title}), before anything is trained")
    print_facts(console, _facts(run, plans, most))
    if len(plans) > 1:
        _print_nodes(console, plans)
    _print_lines(console, most)
    print_facts(console, _budget_facts(most))
    if all(refusal(plan.mechanism, plan.node.spent) is None for plan in plans):
        _print_levels(console, plans, folder)


def plan_record(run: PlannedRun, plans: Sequence[NodePlan]) -> dict[str, Any]:
    """Return the plan as JSON has it."""
    most = _most_limiting_plan(plans)
    return {
        "run": run.name,
        "method": run.method.title,
        "facts": _facts(run, plans, most),
        "nodes": [
            {
                "node": plan.node.name,
                "records": plan.node.examples,
                "noise": {
                    part: plan.mechanism.noise_levels[part] for part in charged_noise_tables(plan.mechanism)
                },
                "length": None if plan.length is None else {plan.length.name: plan.length.value},
                "epsilon": {"pld": plan.cost.pld, "rdp": plan.cost.rdp},
                "refused": refusal(plan.mechanism, plan.node.spent),
            }
            for plan in plans
        ],
        "of": most.node.name,
        "delta": most.mechanism.config.delta,
        "queries": _lines(most),
        "budgets": _budgets(most),
        "noise to fix": _new_levels(plans),
    }


def _most_limiting_plan(plans: Sequence[NodePlan]) -> NodePlan:
    """Return the plan of the node with the highest cost, or with the fewest steps."""
    most = max(plans, key=lambda plan: math.inf if plan.cost.pld is None else plan.cost.pld)
    if most.found == "steps":
        most = min(plans, key=lambda plan: plan.length.value if plan.length is not None else math.inf)
    return most


def _facts(run: PlannedRun, plans: Sequence[NodePlan], most: NodePlan) -> dict[str, str | Sequence[str]]:
    """Return mechanism, length and the result."""
    config, statement = most.mechanism.config, most.mechanism.statement()
    if not most.mechanism.protects:
        facts: dict[str, str | Sequence[str]] = {
            "mechanism": "none: releases leave as they are, without any guarantee"
        }
    else:
        facts = {
            "mechanism": f"{config.registered_name}; noise from {config.randomness} randomness",
            "unit": statement.unit,
            **({"but": "; ".join(run.notes)} if run.notes else {}),
            "delta": f"{config.delta:g}",
        }
        length = "" if most.length is None else most.length.name
        if most.length is not None:
            facts["length"] = f"{length} {most.length.value:.10g}{_steps_note(plans)}"
        facts["found"] = {
            "noise": f"noise chosen for epsilon <= {min(config.epsilon, config.total_budget[0]):g}",
            "steps": f"{length} chosen for epsilon <= {config.epsilon:g}",
            "epsilon": "epsilon computed from noise and length",
        }[most.found]
        is_recorded = run.spec.form == "images" and MODEL not in run.models
        if "model" in config.dp_trained and most.cost.pld and is_recorded:
            records = sum(plan.node.examples for plan in plans) // len(plans)  # as they were recorded
            if advised := advice(run.spec.task, records, round(most.cost.pld, 1)):
                facts["advice"] = advised
        facts |= config.facts({part: max(_levels(plans, part)) for part in config.noise_option_tables})
    return facts


def _levels(plans: Sequence[NodePlan], part: str) -> list[float]:
    return [plan.mechanism.noise_levels[part] for plan in plans]


def _steps_note(plans: Sequence[NodePlan]) -> str:
    lengths = {plan.length.value for plan in plans if plan.length is not None}
    if min(lengths) == MAX_STEPS:
        return " or more"
    return "" if len(lengths) == 1 else f", within every node's budget; one allows {max(lengths):.10g}"


def _print_nodes(console: Console, plans: Sequence[NodePlan]) -> None:
    parts = charged_noise_tables(plans[0].mechanism)
    rows = [
        [
            plan.node.name,
            f"{plan.node.examples:,}",
            *(f"{plan.mechanism.noise_levels[part]:.4g}" for part in parts),
            *([f"{plan.length.value:.10g}"] if plan.length is not None and plan.found == "steps" else []),
            epsilon_text_rounded_up(plan.cost.pld),
            "" if plan.cost.rdp is None else epsilon_text_rounded_up(plan.cost.rdp),
        ]
        for plan in plans
    ]
    steps = ["steps"] if plans[0].found == "steps" and plans[0].length is not None else []
    print_table(console, ["node", "records", *parts, *steps, "PLD", "RDP"], rows, left=1)
    _explain(
        console,
        {
            **dict.fromkeys(parts, "noise multiplier of the options with this name"),
            **dict.fromkeys(steps, "longest run within the budget"),
            "PLD, RDP": "epsilon spent by the run, by each accountant; both are upper bounds",
        },
    )


def _explain(console: Console, columns: Mapping[str, str]) -> None:
    """Print a line on each column of a table."""
    print_facts(console, {f"{column}:": text for column, text in columns.items()})


def _print_lines(console: Console, plan: NodePlan) -> None:
    console.print(f"privacy cost of {plan.node.name}, {plan.node.examples:,} records, by query")
    rows = []
    for line in _lines(plan):
        times, charge, alone = line["times"], line["events"], line["epsilon"]
        free = "free (covered by training)" if _is_covered_by_training(plan, line) else "free"
        cost_text = "no guarantee" if charge is None else "\n".join(events(charge)) or free
        often = "any" if times is None else f"{times:,}"  # as a method that does not say how often
        each = " each" if times is None and charge else ""
        what = line["query"] if line["part"] == RESPONSE else f"{line['query']}, {line['part']}"
        noise = "-" if line["for"] in ("other", "nothing") else line["for"]
        rows.append([what, noise, cost_text, often, f"{epsilon_text_rounded_up(alone)}{each}"])
    print_table(console, ["query", "noise", "charge", "times", "epsilon"], rows, left=3)
    _explain(
        console,
        {
            "noise": "options of the mechanism whose noise protects the query; -: no noise",
            "charge": "privacy cost of one release or training step",
            "times": "how often it is charged in the run",
            "epsilon": "epsilon of this query alone; the values do not add up to the run's",
        },
    )


def _is_covered_by_training(plan: NodePlan, line: Mapping[str, Any]) -> bool:
    """Return whether a query releases outputs of a model whose training with DP-SGD is charged."""
    query = plan.mechanism.side.queries.get(line["query"])
    return "model" in plan.mechanism.config.dp_trained and query is not None and bool(query.released_kinds())


def _lines(plan: NodePlan) -> list[dict[str, Any]]:
    """Return each release with its epsilon alone: of all times, or of one if their number is unknown."""
    config, rows = plan.mechanism.config, []
    for line in plan.cost.lines:
        charge = alone = None
        if line.cost is not None:
            charge = cost_to_dict(line.cost)
            times = PrivacyCost({event: count * max(line.times, 1) for event, count in line.cost.items()})
            alone = compute_epsilon(times, config.delta, config.accountant)
        rows.append(_line(line.label, line.charged_to, charge, line.times, alone, line.part))
    charged = {line.label for line in plan.cost.lines}
    for name, query in plan.mechanism.side.queries.items():
        if name not in charged:
            rows.append(_line(name, "nothing", {}, query.times, 0.0))
    return rows


def _line(
    what: str,
    charged_to: str,
    charge: Mapping[str, int] | None,
    times: int,
    alone: float | None,
    part: str = RESPONSE,
) -> dict[str, Any]:
    row = {"query": what, "part": part, "for": charged_to, "events": charge}
    return {**row, "times": times or None, "epsilon": alone}


def _budgets(plan: NodePlan) -> dict[str, Any]:
    """Return the cost of the run and the remaining budgets. None: no guarantee, no budget, or an unreadable
    audit log."""
    config, cost, node = plan.mechanism.config, plan.cost, plan.node
    before = after = None
    if node.spent.fault is None and not node.spent.no_guarantee and not plan.unlike:
        spent = cost_from_dict(node.spent.events)
        before = compute_epsilon(spent, config.total_budget[1], config.accountant)
        if cost.cost is not None:
            after = compute_epsilon(spent + cost.cost, config.total_budget[1], config.accountant)
    return {
        "epsilon_pld": cost.pld,
        "epsilon_rdp": cost.rdp,
        "and_each_time": [name for name, asked in plan.mechanism.side.queries.items() if not asked.times],
        "of_the_run": _budget(config.epsilon, config.delta, 0.0, cost.epsilon_by(config.accountant)),
        "of_the_data": _budget(*config.total_budget, before, after),
        "refused": refusal(plan.mechanism, node.spent),
    }


def _budget(most: float, delta: float, before: float | None, after: float | None) -> dict[str, float | None]:
    left = None if math.isinf(most) or after is None else max(0.0, most - after)
    return {
        "epsilon": most,
        "delta": delta,
        "epsilon_before": before,
        "epsilon_after": after,
        "epsilon_left": left,
    }


def _budget_facts(plan: NodePlan) -> dict[str, str | Sequence[str]]:
    """The same in words."""
    budgets, refused = _budgets(plan), ""
    if budgets["refused"] is not None:
        refused = f"REFUSED: {budgets['refused']}"
    if plan.cost.cost is None:
        return {"whole run": f"no guarantee, and {refused}" if refused else "no guarantee"}
    lines = [
        f"epsilon {epsilon_text_rounded_up(budgets['epsilon_pld'])} (PLD), "
        f"{epsilon_text_rounded_up(budgets['epsilon_rdp'])} (RDP)"
    ]
    if endless := budgets["and_each_time"]:
        lines.append(f"and the charge of {', '.join(endless)} each time, as long as the budget allows")
    facts: dict[str, str | Sequence[str]] = {
        "whole run": lines,
        "of the run": _remaining_budget_text(budgets["of_the_run"]),
    }
    spent = plan.node.spent
    unknown = spent.fault is not None or ((spent.no_guarantee or plan.unlike) and refused)
    facts["of the data"] = refused if unknown else _remaining_budget_text(budgets["of_the_data"])
    return facts


def _remaining_budget_text(budget: Mapping[str, Any]) -> str:
    """Return the rest of a budget after the run, in words."""
    most, reached = budget["epsilon"], budget["epsilon_after"]
    earlier = (
        f"{epsilon_text_rounded_up(budget['epsilon_before'])} spent before, "
        if budget["epsilon_before"]
        else ""
    )
    if math.isinf(most) or reached is None:
        return f"no budget; {earlier}{epsilon_text_rounded_up(reached)} after it" if earlier else "no budget"
    kept = (
        f"budget {most:g} at delta {budget['delta']:g}: {earlier}{epsilon_text_rounded_up(reached)} after it"
    )
    return (
        f"{kept}, so it is REFUSED"
        if reached > most
        else f"{kept}, {epsilon_text_rounded_down(budget['epsilon_left'])} left"
    )


def _new_levels(plans: Sequence[NodePlan]) -> dict[str, float]:
    """The noise that was found, by part, rounded up."""
    found = {}
    given = plans[0].node.privacy.noise_option_tables
    for part in charged_noise_tables(plans[0].mechanism):
        table, most = plans[0].mechanism.config.noise_option_tables[part], max(_levels(plans, part))
        if most > 0 and (table.noise is None or table.noise != given[part].noise):
            found[part] = round_noise_up(most)
    return found


def _print_levels(console: Console, plans: Sequence[NodePlan], folder: Path | None) -> None:
    """The noise that was found, as the owner can write it down."""
    found = _new_levels(plans)
    if not found:
        return
    section = "privacy" if folder is not None else "nodes.privacy"
    where = "node.toml" if folder is not None else "the run's file, enough for every node"
    console.print(f"To fix this noise, write into {where}:")
    for part, level in found.items():
        console.print(f"  [{section}.{part}]")
        console.print(f"  noise = {level:g}")


MODEL = "random-conv:64"


@dataclass(frozen=True)
class RecordedAccuracy:
    """Accuracy of FedKD's student in runs with a preset's options, in percent, mean of three seeds: by the
    average records of a node and the epsilon of a run."""

    data: str
    preset: str
    percent: Mapping[int, Mapping[float, float]]


# From fewer records to more; docs/benchmarks/privacy.md has their spread, and a test holds these to it.
RECORDED = (
    RecordedAccuracy(  # experiments/privacy_curves.toml and privacy_digits_linear.toml
        "digits",
        "digits-fedkd-private",
        {
            58: {1.0: 29.1, 3.0: 54.9, 8.0: 75.8},
            115: {1.0: 48.6, 3.0: 81.7, 8.0: 88.9},
            230: {1.0: 72.1, 3.0: 87.3, 8.0: 90.3},
        },
    ),
    RecordedAccuracy(  # experiments/privacy_fashion_linear.toml
        "Fashion-MNIST",
        "fashion-fedkd-private",
        {2000: {3.5: 81.4}, 11400: {3.5: 86.3, 8.0: 86.5}},
    ),
)


def advice(task: TaskConfig, records: int, epsilon: float) -> Sequence[str]:
    """Return lines that recommend model and options, with the expected accuracy; for classes of images.

    A node is held against the nearest row of :data:`RECORDED` that has no more records than it has, and of
    the first where all have more: more records and a larger epsilon do no harm.
    """
    if (task.task_class.form, task.task_class.kind) != ("images", "class"):
        return []
    below = [each for each in RECORDED if min(each.percent) <= records]
    nearest = below[-1] if below else RECORDED[0]
    least = max((count for count in nearest.percent if count <= records), default=min(nearest.percent))
    reached = nearest.percent[least]
    budgets = [each for each in reached if each <= epsilon]
    spent = max(budgets, default=min(reached))
    word = "about" if below and budgets else "less than"
    expected = f"{word} {reached[spent]:.0f} % on {nearest.data}"
    return [
        f"{MODEL}, a linear model on fixed features (docs/privacy-mechanisms.md),",
        f"with nodes.local and nodes.privacy as in {nearest.preset}",
        f"with {records:,} records and epsilon {epsilon:.4g}: {expected},",
        f"as measured with {least:,} records a node at epsilon {spent:g}",
    ]
