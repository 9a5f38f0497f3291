"""A run by files: all its queries, and the student and report that the nodes' answers give.

What carries a file from the one to the other is people's affair. The same node side, gate and audit log
answer as in a live run (:mod:`fedstill.federation.offline_node`), and the same loop learns, to the same
figures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import reduce
from pathlib import Path
from typing import Any

from fedstill.core.config_tables import option_types
from fedstill.core.errors import ArgumentError, BundleError
from fedstill.core.progress import ProgressBar
from fedstill.core.run_writer import write_text
from fedstill.data.config import check_no_validation
from fedstill.data.input_spec import InputSpec
from fedstill.data.loading import load
from fedstill.data.public import PublicData, load_public
from fedstill.federation.offline_files import QUERIES, NodeResponses, Queries, read_queries, read_responses
from fedstill.federation.offline_link import ResponseFiles
from fedstill.federation.replies import parse_reply
from fedstill.node.replies import NodeVersions
from fedstill.protocol.method import METHODS, method_name
from fedstill.protocol.run_plan import RunPlan, public_fingerprint
from fedstill.runs.config import RunConfig, to_dict, to_toml
from fedstill.runs.remote_run import RemoteRun
from fedstill.runs.run import COMMAND, check_folder, machine_and_date, note_failures
from fedstill.runs.setting import check_method
from fedstill.track.tracker_group import TrackerGroup

BEGUN = "files.json"  # in the run's folder: of which files it is
# Options that may be chosen when all answers are in, beside those that the method names: whatever is here
# changes neither what was asked nor what the nodes did.
LATER = (
    *("name", "student", "engine", "evaluation", "link.wait", "link.quorum", "link.outlier"),
    *("data.root", "data.download", "public.root"),  # where the same data lie on this machine
)


def make(config: RunConfig) -> Queries:
    """All that a run will ask; nothing is trained and nobody is asked.

    Raises:
        MethodRefused: the method needs public data, and there are none.
        ArgumentError: a method or an option of it that asks again after the first answers.
    """
    method = config.method
    if not method.one_round:
        allowed = [name for name, other in METHODS.importable().items() if other.one_round]
        raise ArgumentError(
            "method.name",
            method_name(method),
            f"one that asks all at once, as files are carried once: {', '.join(allowed)}",
        )
    if config.link.secure_aggregation:
        raise ArgumentError(
            "link.secure_aggregation", True, "false for files: nodes that are asked by files cannot meet"
        )
    check_no_validation(config.data)
    data = load(config.data, config.task)
    _, public = load_public(config.public, data, config.task)
    spec = InputSpec.from_data(config.task, data)
    check_method(method, spec.make_task(), public)
    if public is not None and not method.needs().public_labels:  # labels go nowhere without need
        public = PublicData(public.name, public.inputs, None, public.note)
    plan = RunPlan(
        QUERIES,
        to_dict(config)["method"],
        spec,
        public=public_fingerprint(public),
        public_note=("", "") if public is None else (public.name, public.note),
    )
    return Queries(plan, public, tuple(method.planned_queries(public, config.seed)))


def distil(
    config: RunConfig,
    queries: Path,
    responses: Sequence[Path],
    out: Path,
    *,
    keys: Mapping[str, str] | None = None,
    command: str = "",
    progress: bool = False,
) -> dict[str, Any]:
    """Student and report from the nodes' answers; whoever was stopped does it again, and it goes on.

    Args:
        config: the run whose queries these are. Options that change nothing at the nodes may be others.
        responses: one file a node.
        keys: fingerprints of the nodes' keys by name; None takes any, and the result says so.
        command: the exact command that repeats it, for the report.

    Returns:
        What ``result.json`` holds.

    Raises:
        BundleError: a file cannot be believed, or does not belong to the others.
        ArgumentError: an option is not the one that the nodes were asked with.
        RunFolderError: the folder holds something else.
    """
    given = read_queries(queries, methods=[method_name(config.method)], tasks=[config.task.registered_name])
    _same_queries(config, given, queries)
    read = [read_responses(path, given, keys) for path in responses]
    files = ResponseFiles(given, read)
    told = {
        "queries": {
            "sha256": given.sha256,
            "bytes": queries.stat().st_size,
            "signed_by": given.signer,
            "public_inputs": 0 if given.public is None else len(given.public),
        },
        "answers": [_about(files.files[node]) for node in files.nodes],
        "missing": [node for node in keys or () if node not in files.nodes],
    }
    listeners = TrackerGroup(config.track, to_dict(config))
    _take_up(out, {**told, "config": to_toml(config)})
    whole = replace(config, link=replace(config.link, inputs="float32", gradients="float32"))  # as in files
    run = RemoteRun(whole, files, given.plan.run)
    run.listeners = listeners
    results = run.run(out, bars=ProgressBar(progress))
    results["engine"]["name"] = "files"
    del results["link"], results["seconds"]["local_training"], results["seconds"]["centralized"]
    result = {**run.about(), **results, "files": told, "command": command, **machine_and_date()}
    write_text(out / "config.toml", f"{COMMAND}{command}\n\n{to_toml(config)}")
    run.finish(result)
    note_failures(listeners, result, out)
    return result


def check_later(asked: RunConfig, config: RunConfig) -> None:
    """Refuse options that queries were asked with, or that only nodes have, once the queries are out.

    Args:
        asked: the run as the queries were made from it.
        config: the run as it is to learn from the answers.

    Raises:
        ArgumentError: naming the first such option, and what it was.
    """
    method = config.method
    free = (*LATER, *(f"method.{name}" for name in method.server_only_options))
    tables = to_dict(asked), to_dict(config)
    for name in option_types(config):
        path = name.split(".")
        before, now = (reduce(dict.__getitem__, path, table) for table in tables)
        if now != before and not any(name == each or name.startswith(f"{each}.") for each in free):
            raise ArgumentError(name, now, f"{before!r}, which the queries were made with")


def _same_queries(config: RunConfig, given: Queries, path: Path) -> None:
    """Refuse a run that would have asked something else."""
    mine, method = make(config), config.method
    for name, value in given.plan.method.items():
        own = mine.plan.method.get(name)
        if own != value and name not in method.server_only_options:
            raise ArgumentError(f"method.{name}", own, f"{value!r}, which the nodes were asked with")
    if mine.contents() != given.contents() or replace(mine.plan, method=given.plan.method) != given.plan:
        raise BundleError(
            f"{path} does not hold what this run asks: its data, public data or seed are others"
        )


def _about(node: NodeResponses) -> dict[str, Any]:
    """What a result says of one file of answers."""
    return {
        "node": node.header.node,
        "sha256": node.sha256,
        "bytes": node.path.stat().st_size,
        "signed_by": node.signer,
        "key_known": node.trusted,
        "asker_known": node.header.key_verified,
        "policy": asdict(node.header.policy),
        "noise": node.replies.mechanisms(),
        "versions": dict(parse_reply(NodeVersions, node.replies.versions).versions),
    }


def _take_up(out: Path, told: Mapping[str, Any]) -> None:
    """Make the run's folder, or find in it the same run, not finished yet."""
    path, text = out / BEGUN, json.dumps(told, indent=2) + "\n"
    if path.exists() and not (out / "result.json").exists() and path.read_text(encoding="utf-8") == text:
        return
    check_folder(out)
    out.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
