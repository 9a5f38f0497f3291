"""``fedstill node check``: a node's configuration, its faults, and the queries it would accept and refuse.

:func:`node_facts` lists a node's data, model, compute, policy, privacy and link; :func:`privacy_facts` its
mechanism, its budgets, and the queries that cannot be protected.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from fedstill import models
from fedstill.cli.console import columns, leave_faulty, plain, print_facts, print_json, print_table
from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, DataError, FedstillError, QueryRefused
from fedstill.core.startup_kit import KIT_FOLDER, StartupKit
from fedstill.core.table_schema import schema_difference
from fedstill.core.text_format import format_count, format_shape, to_printable_line
from fedstill.data import load as load_data
from fedstill.data.data_spec import DataSpec
from fedstill.data.loading import CLASSIFICATION
from fedstill.data.node_data import SOURCES
from fedstill.data.public import PublicData, load_public
from fedstill.data.stratified_sampling import limit_groups
from fedstill.data.user_data import UserFiles
from fedstill.models import carries_gradient
from fedstill.models.hugging_face import PREFIX
from fedstill.models.predictors import Predictor
from fedstill.node import folder_check, folder_log, model_setup
from fedstill.node.admission import RunFacts, hours, owner_refusals
from fedstill.node.features import CACHE
from fedstill.node.folder_check import (
    FolderCheck,
    allowed_methods,
    kit_faults,
    readable_files_warning,
    rounding_warning,
)
from fedstill.node.folder_log import TotalSpent, audit_path
from fedstill.node.model_setup import architecture_hash
from fedstill.node.node_file import NodeFile
from fedstill.node.policy import PolicyConfig
from fedstill.node.privacy_forecast import forecast, refusal_reason
from fedstill.node.protection import group_privacy_notes, needs_mechanism
from fedstill.node.run_mechanism import PrivacyMechanism, no_guarantee_reason
from fedstill.node.secure_aggregation import SUM_HISTORY_FILE, SumHistory
from fedstill.privacy.accounting import is_within_epsilon
from fedstill.privacy.budget import (
    ProtectedUnitChanged,
    epsilon_text_rounded_down,
    epsilon_text_rounded_up,
    remaining_epsilon,
)
from fedstill.privacy.events import cost_from_dict, total_cost
from fedstill.privacy.statement import make_statement
from fedstill.protocol.method import METHODS, Method, build_node_side
from fedstill.protocol.node_side import NodeSetting, NodeSide, placeholder_public
from fedstill.protocol.queries import Query
from fedstill.runs.feature_space import public_on_features
from fedstill.runs.spec import RunSpec, load

LIVE = "the run queries connected nodes repeatedly, but this node responds to files only (online = false)"


@dataclass(frozen=True)
class CheckedRun:
    """Run that a node is checked objection, as far as it is known on the node's machine."""

    target: str
    config: RunSpec
    spec: DataSpec | None
    public: PublicData | None
    note: str  # why the spec is not known


def check_node(folder: Path, run: str | None, as_json: bool) -> None:
    """Print the node's facts and faults; nothing is trained."""
    asking = load_target_run(run, load(run)) if run else None
    known = (asking.spec, asking.config.task) if asking else (None, None)
    found = folder_check.check_folder(folder, known[0], task=known[1])
    if found.file is None:
        if as_json:
            print_json({"node": None, "folder": str(folder.resolve()), "faults": found.faults})
        leave_faulty(folder, found.faults)
    summary = _node(folder, found.file, found)
    if asking is not None:
        summary["run"] = _run(folder, asking, found.file, found)
    elif not found.unreported and not found.faults:  # else which methods serve is not known, or not yet
        summary["methods"] = _methods(found.file, found)
    if as_json:
        print_json({**summary, "faults": found.faults, "not checked": found.unreported})
        if not found.faults:
            sys.exit(1 if found.unreported else 0)
    else:
        _print(plain(), summary, found)
    if found.faults:
        leave_faulty(folder, found.faults)
    if outside := _closed_hours_note(found.file):
        print(outside)
    if found.unreported:
        print(f"Not checked: {found.unreported}. Nothing else is wrong.")
        sys.exit(1)
    print("No faults.")


def _closed_hours_note(file: NodeFile) -> str:
    """Return a note if the node refuses everything at this hour; else an empty text."""
    reason = hours(RunFacts(file.policy))
    return "" if reason is None else f"At this hour the node refuses every query: {reason}."


def load_target_run(target: str, config: RunSpec) -> CheckedRun:
    """Return a run with its data spec and public data, if its data are on this machine."""
    try:
        data = load_data(config.data, config.task)
        public = load_public(config.public, data, config.task)[1]
    except DataError as error:
        return CheckedRun(target, config, _spec_of_schema(config), None, str(error))
    return CheckedRun(target, config, DataSpec.from_data(config.task, data), public, "")


def _spec_of_schema(config: RunSpec) -> DataSpec | None:
    """Return the spec of a run on tables whose schema is here, though its rows are not; else None."""
    if config.task.task_class.form != "rows" or not isinstance(config.data, UserFiles):
        return None
    try:
        schema = config.data.read_schema(Path(config.data.root or ".").expanduser() / config.data.name)
    except FedstillError:  # why its rows are not here is what is said
        return None
    return DataSpec.from_schema(config.task, schema)


def _node(folder: Path, file: NodeFile, found: FolderCheck) -> dict[str, Any]:
    facts, exposed = node_facts(folder, file, found), readable_files_warning(folder, audit_path(file, folder))
    return {
        "node": file.name,
        "folder": str(folder.resolve()),
        "facts": facts,
        "exposed": exposed,
        "rounding": rounding_warning(file.privacy),
    }


def _print(console: Console, summary: Mapping[str, Any], found: FolderCheck) -> None:
    console.print(f"node {summary['node']}, in {summary['folder']}", soft_wrap=True)
    print_facts(console, summary["facts"])
    for warning in (summary["exposed"], summary["rounding"]):
        if warning is not None:
            console.print(f"{warning}\n", soft_wrap=True)
    if "run" in summary:
        _print_run(console, summary["run"], found)
    elif "methods" in summary:
        _print_method_eligibility(console, summary["methods"])


@dataclass(frozen=True)
class _Verdict:
    """Decision of a node about a run.

    Args:
        rules: by which it would refuse some, by name.
        objection: why it cannot take part; None: no reason is known.
        mechanism: its own in the run, where all that leaves can be protected.
    """

    queries: Mapping[str, Query]
    rules: Mapping[str, str]
    objection: str | None
    mechanism: PrivacyMechanism | None


def _judge_method(
    method: Method, file: NodeFile, found: FolderCheck, asking: CheckedRun | None, folder: Path | None
) -> _Verdict:
    """Return what a node would do in a run of a method."""
    # Of the task that is named where the data do not say their spec.
    named = asking.config.task if asking else CLASSIFICATION
    spec = found.model_spec
    task = spec.make_task() if spec else named.minimal_task()
    public = asking.public if asking else None
    if asking is not None and found.features is not None:
        public = public_on_features(asking.config.public, public, found.features.model_width)
    known = public or placeholder_public(task, spec.shape if spec else ())
    sums = asking is not None and asking.config.link.secure_aggregation
    at = NodeSetting(
        task,
        file.local,
        found.compute or Compute(),
        known,
        secure_aggregation=sums,
        recalibration=None if asking is None else asking.config.student.declared_recalibration,
    )
    side = build_node_side(method, at)
    unprotected_queries, over_budget_reason, mechanism = unprotected(file, found, side, folder)
    is_differentiable = True  # as far as is known
    if found.model is not None and spec is not None:
        is_differentiable = carries_gradient(found.model, spec.shape)
    refused = owner_refusals(file, is_differentiable, side.queries)
    if sums and folder is not None and not file.policy.sums_may_differ:
        run = "to come" if mechanism is not None and mechanism.protects else ""
        refused = {**SumHistory(folder / SUM_HISTORY_FILE).weighting_conflicts(side, run), **refused}
    objection = _first_refusal(refused) or _reason_not_to_take_part(method, file, found, side.queries, asking)
    stranger = _unlisted_plugin_reason(asking.config, file) if asking else None
    if asking is not None:
        stranger = stranger or features_objection(file, asking.config)
    if asking is not None and asking.spec is not None:
        stranger = stranger or spec_objection(file, found, asking.spec)
    can = file.online or not side.queries or (method.one_round and not sums)
    objection = (
        stranger
        or objection
        or _first_refusal(unprotected_queries)
        or over_budget_reason
        or (None if can else LIVE)
    )
    return _Verdict(
        side.queries,
        {**unprotected_queries, **refused},
        objection,
        None if unprotected_queries else mechanism,
    )


def _run(folder: Path, asking: CheckedRun, file: NodeFile, found: FolderCheck) -> dict[str, Any]:
    """Return the queries of a run, and the node's decision on each."""

    note = None
    if asking.note:
        whose = "those of yours" if found.spec else "not known"
        if asking.spec is not None:
            whose = "those of its schema"
        note = f"The run's own data are not here, so shape and classes are {whose} ({asking.note})."
    verdict = _judge_method(asking.config.method, file, found, asking, folder)
    protected = verdict.mechanism is not None and verdict.mechanism.protects
    unknown = found.unreported or found.faults
    return {
        "run": asking.target,
        "method": asking.config.method.title,
        "note": note,
        "queries": [
            {
                "query": name,
                "times": query.times,
                "answers with": list(dict.fromkeys(query.released_kinds().values())),
                "refused by": verdict.rules.get(name),
            }
            for name, query in verdict.queries.items()
        ],
        "can take part": "no" if verdict.objection is not None else "not known" if unknown else "yes",
        "why not": verdict.objection,
        "payment": payment(verdict.mechanism) if protected and verdict.mechanism is not None else None,
    }


def _print_run(console: Console, run: Mapping[str, Any], found: FolderCheck) -> None:
    if run["note"]:
        console.print(f"{run['note']}\n")
    console.print(f"Queries of {run['run']} ({run['method']}), and what the node would do:")
    table = columns(None, None, None, gap=1)
    for asked in run["queries"]:
        often = f"x{asked['times']}" if asked["times"] > 1 else ""
        rule = asked["refused by"]
        kinds = ", ".join(asked["answers with"]) or "nothing"
        table.add_row(
            f"  {asked['query']}", often, f"releases {kinds}" if rule is None else f"refuses ({rule})"
        )
    console.print(table)
    if run["why not"] is not None:
        console.print(f"It cannot take part: {run['why not']}.", soft_wrap=True)
    elif found.unreported:
        console.print("It is not known if it can take part, as its data were not checked.")
    elif found.faults:
        console.print("It is not known if it can take part. Fix the faults, then check again.")
    else:
        console.print("It can take part.")
    if run["payment"] is not None:
        console.print(run["payment"], soft_wrap=True)
    console.print()


def _methods(file: NodeFile, found: FolderCheck) -> list[dict[str, str]]:
    """Return the queries of each method with default options, and the node's decisions."""
    rows = []
    for name in (*METHODS.builtin, *allowed_methods(file.policy)):
        verdict = _judge_method(METHODS[name](), file, found, None, None)
        answered = [query for query in verdict.queries if query not in verdict.rules]
        parts = [f"accepts {', '.join(answered)}"] if answered else []
        for rule in dict.fromkeys(verdict.rules.values()):
            asked = ", ".join(query for query, its in verdict.rules.items() if its == rule)
            parts.append(f"refuses {asked} ({rule})")
        if verdict.objection and not verdict.rules:
            parts = [verdict.objection]
        can = "no" if verdict.objection else "yes"
        does = "; ".join(parts) or "gets no queries"
        rows.append({"method": name, "can take part": can, "does": does})
    return rows


def _print_method_eligibility(console: Console, methods: Sequence[Mapping[str, str]]) -> None:
    console.print("In a run of each method, with its default options:")
    rows = [[*summary.values()] for summary in methods]
    print_table(console, ["method", "can take part", "what the node does"], rows, left=3)
    console.print("Shape and classes are those of the data here; name a run to check against its own.")
    console.print()


def _reason_not_to_take_part(
    method: Method,
    file: NodeFile,
    found: FolderCheck,
    queries: Mapping[str, Query],
    asking: CheckedRun | None,
) -> str | None:
    """Why a node that refuses no query cannot take part, if so."""
    needs = method.needs()
    limit, total = file.policy.max_queries, sum(query.times for query in queries.values())
    if limit and total > limit:
        return f"it allows at most {limit} queries, and the run sends {total}"
    if found.model is None or found.model_spec is None or found.compute is None:
        return None
    objection = model_setup.unfit_reason(found.model, needs, found.model_spec, found.compute)
    student = _student(asking, found.model_spec) if asking and needs.same_architecture else None
    hashes = [] if student is None else [architecture_hash(student), architecture_hash(found.model)]
    if objection is None and len(set(hashes)) > 1:
        return "its model is not of the student's architecture"
    return objection


def _unlisted_plugin_reason(config: RunSpec, file: NodeFile) -> str | None:
    """Return why a run's method or task is refused: neither built in nor named by the policy; else None."""
    for chosen in (config.method, config.task):
        if not chosen.registry.is_allowed(chosen.registered_name, file.policy.plugins):
            return f"policy.plugins does not name {chosen.registered_name}"
    return None


def _first_refusal(rules: Mapping[str, str]) -> str | None:
    """Return why a node that refuses some queries cannot take part; None if it refuses none."""
    for name, rule in rules.items():
        return f"it refuses {name} ({rule}), and the run needs it"
    return None


def _student(asking: CheckedRun, spec: DataSpec) -> nn.Module | None:
    """Return the run's student, to compare architectures; None if it cannot be built here."""
    try:
        name = asking.config.student.model
        return models.build(
            name,
            spec.shape,
            len(spec.classes),
            0,
            vocabulary=spec.vocabulary,
            mean=spec.mean,
            std=spec.std,
        )
    except FedstillError:  # a factory of the server's own
        return None


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


def features_objection(file: NodeFile, config: RunSpec) -> str | None:
    """Return how the features of a run's options differ from the node's; None: not, or in the weights alone.

    Files are not compared: a node compares them when it joins.
    """
    own, planned = file.features, config.features
    if not own or not planned:
        names = [
            f"{who} has {options.backbone}" for who, options in (("it", own), ("the run", planned)) if options
        ]
        return f"{names[0]}, and the other no features.backbone" if names else None
    is_file = own.backbone.startswith(PREFIX) or own.backbone.endswith(".onnx")
    compared = ("layer", "size", "mean", "std", "normalize", "components")
    for name in (*compared, *(() if is_file else ("backbone",))):
        if getattr(own, name) != getattr(planned, name):
            return f"its features.{name} is {getattr(own, name)!r}, and the run's {getattr(planned, name)!r}"
    return None


def unprotected(
    file: NodeFile, found: FolderCheck, side: NodeSide, folder: Path | None
) -> tuple[dict[str, str], str | None, PrivacyMechanism | None]:
    """Return the queries that the mechanism cannot protect, why no run fits the budget, and the mechanism.

    Args:
        found: what could be made of it.
        folder: the owner's, where the run is known: noise is found for it, and what it costs compared with
            what is left. None: only what is so in every run is said.
    """
    if found.data is None or found.model_spec is None or not needs_mechanism(file.privacy):
        return {}, None, None
    config, data = file.privacy, found.data
    if folder is None:
        wants = [part for part, table in config.noise_option_tables.items() if table.noise is None]
        config = config.with_noise(dict.fromkeys(wants, 1.0))
    try:
        data = data if data.groups is None else limit_groups(data, config.group_size)
        about = (file.name, config, side, file.local, len(data), found.model_spec.make_task())
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
        return folder_log.read_total_spent(file, folder)
    except FedstillError:
        return None


FEW = 20  # classes that are shown one by one


def node_facts(folder: Path, file: NodeFile, found: FolderCheck) -> dict[str, list[str]]:
    """Return lines by topic."""
    facts: dict[str, list[str]] = {}
    if found.data is not None and found.spec is not None:
        source = file.data.path if file.data.source in SOURCES else file.data.source
        facts["data"] = [f"{len(found.data)} examples, {format_shape(found.spec.shape)}, from {source}"]
        if counts := _counts(found.spec, found.data):
            facts["data"].append(counts)
    elif found.unreported:
        facts["data"] = [found.unreported.removeprefix("data ")]
    if (features := found.features) is not None:
        total = f"{features.width} of {file.features.backbone}"
        number = f"{features.components} components of {total}" if features.components else total
        backbone = f"{number}, digest {features.digest}"
        facts["features"] = [f"{backbone}; cached in {file.features.cache or CACHE}"]
    if found.model is not None:
        weights = file.model.weights or file.model.encoder_weights
        facts["model"] = [f"{file.model.name}, {_about_model(found.model, weights)}"]
    if found.compute is not None:
        facts["compute"] = [f"{found.compute.device}, {found.compute.precision}"]
    policy = file.policy
    limits = {
        "queries": policy.max_queries,
        "bytes": policy.max_bytes,
        "inputs a query": policy.max_rows,
    }
    facts["policy"] = [
        f"queries {', '.join(policy.queries) or 'none'}; "
        + ("outputs only; " if policy.outputs_only else "parameters may leave; ")
        + (", ".join(f"at most {most} {what}" for what, most in limits.items() if most) or "no limits")
    ]
    facts["policy"] += admission_facts(policy)
    if found.spec is not None and found.spec.schema:
        facts["schema"] = [schema_fact(file)]
    facts["privacy"] = privacy_facts(folder, file, found.data)
    if not file.online:
        facts["link"] = ["none: the node responds to files of queries"]
    elif not kit_faults(folder, None):
        kit = StartupKit(folder / KIT_FOLDER)
        until = f"its certificate is valid until {kit.valid_until:%Y-%m-%d}"
        authority = f"its authority is {kit.authority_fingerprint}"
        facts["link"] = [f"dials out to {kit.server_address('client')}; {until}", authority]
        if corrupted := SumHistory(folder / SUM_HISTORY_FILE).corrupted:
            most = policy.max_corrupted_sums
            then = ", and all are from now on" if 0 < most <= corrupted else ""
            facts["link"].append(
                f"responses of this node have corrupted {format_count(corrupted, 'sum')}{then} "
                f"(max_corrupted_sums: {most})"
            )
    return facts


def admission_facts(policy: PolicyConfig) -> list[str]:
    """Return a line on the runs that a node admits; empty if it admits all."""
    conditions = {
        f"runs need your approval ({policy.approve})": policy.approve != "policy",
        f"{policy.min_records} examples or more": policy.min_records,
        f"{policy.min_nodes} nodes or more": policy.min_nodes,
        f"{len(policy.allowed_servers)} servers by name": policy.allowed_servers,
        policy.hours: policy.hours,
    }
    words = "; ".join(words for words, there in conditions.items() if there)
    return [words] if words else []


def _counts(spec: DataSpec, data: TensorData) -> str:
    """Return the class counts in one line; empty if there are no classes."""
    task, classes = spec.make_task(), spec.classes
    if task.kind == "image":
        return ""
    counts = task.counts(data).tolist()
    if task.kind == "map":
        shares = (
            f"{name}: {100 * count / len(data):.3g}%" for name, count in zip(classes, counts, strict=True)
        )
        return f"{', '.join(shares)} of all pixels"
    if len(classes) > FEW:
        there = [round(count) for count in counts if count]
        least, most = min(there, default=0), max(there, default=0)
        return f"{len(there)} of {len(classes)} classes, {least} to {most} of each"
    return ", ".join(f"{name}: {count:.0f}" for name, count in zip(classes, counts, strict=True))


def _about_model(model: nn.Module, weights: str) -> str:
    if isinstance(model, Predictor):
        return f"{model.extra_repr()}: it only predicts, and nothing of it is trained"
    sizes = [parameter.numel() for parameter in model.parameters()]
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    share = "all" if trained == sum(sizes) else f"{trained:,}" if trained else "none"
    origin = f", from {weights}" if weights else ""
    return f"{sum(sizes):,} parameters{origin}, {share} trained here"
