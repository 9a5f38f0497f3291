"""``fedstill node check``: a node's configuration, its faults, and the queries it would accept and refuse."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fedstill.cli.arguments import ParsedArgs
from fedstill.cli.console import columns, plain, print_facts, print_json, print_table
from fedstill.core.errors import DataError, FedstillError

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn

    from fedstill.data.data_spec import DataSpec
    from fedstill.data.public import PublicData
    from fedstill.node.node_file import NodeFile
    from fedstill.node.owner_folder import FolderCheck
    from fedstill.node.run_mechanism import PrivacyMechanism
    from fedstill.protocol.method import Method
    from fedstill.protocol.queries import Query
    from fedstill.runs.config import RunConfig

LIVE = "the run queries connected nodes repeatedly, but this node responds to files only (online = false)"


@dataclass(frozen=True)
class CheckedRun:
    """Run that a node is checked objection, as far as it is known on the node's machine."""

    target: str
    config: RunConfig
    spec: DataSpec | None
    public: PublicData | None
    note: str  # why the spec is not known


def check(args: ParsedArgs) -> None:
    """Print the node's facts and faults; nothing is trained."""
    folder = Path(args.positionals[0])

    from fedstill.node import owner_folder
    from fedstill.runs.config import load

    asking = load_target_run(args.positionals[1], load(args.positionals[1])) if args.positionals[1:] else None
    known = (asking.spec, asking.config.task) if asking else (None, None)
    found = owner_folder.check_folder(folder, known[0], task=known[1])
    if found.file is None:
        if "--json" in args:
            print_json({"node": None, "folder": str(folder.resolve()), "faults": found.faults})
        leave_faulty(folder, found.faults)
    summary = _node(folder, found.file, found)
    if asking is not None:
        summary["run"] = _run(folder, asking, found.file, found)
    elif not found.unreported and not found.faults:  # else which methods serve is not known, or not yet
        summary["methods"] = _methods(found.file, found)
    if "--json" in args:
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
    from fedstill.core.errors import QueryRefused
    from fedstill.node.admission import require_hour

    try:
        require_hour(file.name, file.policy, "join")
    except QueryRefused as refusal:
        return f"At this hour the node refuses every query: {refusal.rule}."
    return ""


def leave_faulty(folder: Path, faults: Sequence[str]) -> NoReturn:
    """Exit with the faults of a node."""
    if len(faults) == 1:
        raise FedstillError(faults[0])
    print(f"fedstill: {len(faults)} faults in {folder}:", file=sys.stderr)
    for fault in faults:
        print(f"  {' '.join(fault.split())}", file=sys.stderr)
    sys.exit(2)


def load_target_run(target: str, config: RunConfig) -> CheckedRun:
    """Return a run with its data spec and public data, if its data are on this machine."""
    from fedstill.data import load as load_data
    from fedstill.data.data_spec import DataSpec
    from fedstill.data.public import load_public

    try:
        data = load_data(config.data, config.task)
        public = load_public(config.public, data, config.task)[1]
    except DataError as error:
        return CheckedRun(target, config, _spec_of_schema(config), None, str(error))
    return CheckedRun(target, config, DataSpec.from_data(config.task, data), public, "")


def _spec_of_schema(config: RunConfig) -> DataSpec | None:
    """Return the spec of a run on tables whose schema is here, though its rows are not; else None."""
    from fedstill.data.data_spec import DataSpec
    from fedstill.data.user_data import UserFiles

    if config.task.task_class.form != "rows" or not isinstance(config.data, UserFiles):
        return None
    try:
        schema = config.data.read_schema(Path(config.data.root or ".").expanduser() / config.data.name)
    except FedstillError:  # why its rows are not here is what is said
        return None
    return DataSpec.from_schema(config.task, schema)


def _node(folder: Path, file: NodeFile, found: FolderCheck) -> dict[str, Any]:
    from fedstill.cli.node_facts import node_facts
    from fedstill.node.audit_log_inspection import audit_path
    from fedstill.node.permission_check import readable_files_warning

    facts, exposed = node_facts(folder, file, found), readable_files_warning(folder, audit_path(file, folder))
    return {"node": file.name, "folder": str(folder.resolve()), "facts": facts, "exposed": exposed}


def _print(console: Console, summary: Mapping[str, Any], found: FolderCheck) -> None:
    console.print(f"node {summary['node']}, in {summary['folder']}", soft_wrap=True)
    print_facts(console, summary["facts"])
    if summary["exposed"] is not None:
        console.print(f"{summary['exposed']}\n", soft_wrap=True)
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
    from fedstill.cli.node_check_privacy_section import spec_objection, unprotected
    from fedstill.core.compute import Compute
    from fedstill.data.loading import CLASSIFICATION
    from fedstill.models import carries_gradient
    from fedstill.node import owner_folder
    from fedstill.node.sum_history import SUM_HISTORY_FILE, SumHistory
    from fedstill.protocol.method import build_node_side
    from fedstill.protocol.queries import NodeSetting, placeholder_public

    # Of the task that is named where the data do not say their spec.
    named = asking.config.task if asking else CLASSIFICATION
    task = found.spec.make_task() if found.spec else named.minimal_task()
    known = (asking.public if asking else None) or placeholder_public(
        task, found.spec.shape if found.spec else ()
    )
    sums = asking is not None and asking.config.link.secure_aggregation
    at = NodeSetting(task, file.local, found.compute or Compute(), known, secure_aggregation=sums)
    side = build_node_side(method, at)
    unprotected_queries, over_budget_reason, mechanism = unprotected(file, found, side, folder)
    is_differentiable = True  # as far as is known
    if found.model is not None and found.spec is not None:
        is_differentiable = carries_gradient(found.model, found.spec.shape)
    refused = owner_folder.rules_by_refused_query(file, is_differentiable, side.queries)
    if sums and folder is not None and not file.policy.sums_may_differ:
        run = "to come" if mechanism is not None and mechanism.protects else ""
        refused = {**SumHistory(folder / SUM_HISTORY_FILE).weighting_conflicts(side, run), **refused}
    objection = _first_refusal(refused) or _reason_not_to_take_part(method, file, found, side.queries, asking)
    stranger = _unlisted_plugin_reason(asking.config, file) if asking else None
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
    from fedstill.cli.node_check_privacy_section import payment

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
    from fedstill.node.policy_faults import allowed_methods
    from fedstill.protocol.method import METHODS

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
    from fedstill.node import owner_model
    from fedstill.node.model_setup import architecture_hash

    needs = method.needs()
    limit, total = file.policy.max_queries, sum(query.times for query in queries.values())
    if limit and total > limit:
        return f"it allows at most {limit} queries, and the run sends {total}"
    if found.model is None or found.spec is None or found.compute is None:
        return None
    objection = owner_model.unfit_reason(found.model, needs, found.spec, found.compute)
    student = _student(asking, found.spec) if asking and needs.same_architecture else None
    hashes = [] if student is None else [architecture_hash(student), architecture_hash(found.model)]
    if objection is None and len(set(hashes)) > 1:
        return "its model is not of the student's architecture"
    return objection


def _unlisted_plugin_reason(config: RunConfig, file: NodeFile) -> str | None:
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
    from fedstill import models

    try:
        name = asking.config.student.model
        return models.build(name, spec.shape, len(spec.classes), 0, vocabulary=spec.vocabulary)
    except FedstillError:  # a factory of the server's own
        return None
