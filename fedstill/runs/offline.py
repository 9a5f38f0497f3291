"""Run by files: write a file of all queries, and train the student from the nodes' files of responses.

The files are carried by hand. Nodes respond through the same gate and audit log as in other runs
(:mod:`fedstill.federation.offline_files`), and the same loop trains the student, to equal metrics.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import reduce
from pathlib import Path
from typing import Any

from fedstill.core.config_tables import option_types
from fedstill.core.errors import ArgumentError, DataError, QueryFileError
from fedstill.core.progress import ProgressBar
from fedstill.core.run_writer import write_text
from fedstill.data.config import check_no_validation
from fedstill.federation.offline_files import (
    QUERIES,
    NodeResponses,
    Queries,
    ResponseFiles,
    read_queries,
    read_responses,
)
from fedstill.federation.response_checks import require_finite_inputs
from fedstill.federation.transport import parse_reply
from fedstill.node.replies import NodeVersions
from fedstill.protocol.method import METHODS, method_name
from fedstill.protocol.run_plan import RunPlan, public_fingerprint
from fedstill.protocol.tensor_forms import sent_query_fault
from fedstill.runs.build import check_method, prepare_server_data, run_task
from fedstill.runs.remote_run import RemoteRun
from fedstill.runs.results import write_results
from fedstill.runs.run import COMMAND, add_tracker_failure_notes, machine_and_date, require_empty_folder
from fedstill.runs.spec import RunSpec, to_dict, to_toml
from fedstill.track.trackers import TrackerGroup

FILES = "files.json"  # in the run's folder: the files that it uses
# Options that may change after the queries were sent, in addition to those that the method names. They affect
# neither the queries nor the nodes.
LATER_OPTIONS = (
    *("name", "student", "engine", "evaluation", "link.wait", "link.quorum", "link.outlier"),
    *("data.root", "data.download", "public.root", "features.weights"),  # location of the same files here
    *("features.batch", "features.cache", "features.cache_gib"),
)


def build_offline_queries(spec: RunSpec) -> Queries:
    """Return all queries of a run, without training.

    Raises:
        MethodRefused: the method needs public data, and there are none.
        ArgumentError: the method, or one of its options, needs queries after the first responses.
        DataError: a query's tensors do not fit their kinds, or are not finite.
    """
    method = spec.method
    if not method.one_round:
        allowed = [name for name, other in METHODS.importable_objects().items() if other.one_round]
        raise ArgumentError(
            "method.name",
            method_name(method),
            f"a one-round method, as files are carried only once: {', '.join(allowed)}",
        )
    if spec.student.recalibrate:
        expected = "false for files: the student's statistics are queried after all responses"
        raise ArgumentError("student.recalibrate", spec.student.recalibrate, expected)
    if spec.link.secure_aggregation:
        raise ArgumentError(
            "link.secure_aggregation", True, "false for files: nodes that are asked by files cannot meet"
        )
    check_no_validation(spec.data)
    loaded, data_spec = prepare_server_data(spec, train_needed=True)
    public, space = loaded.public, loaded.feature_space
    check_method(method, run_task(spec, loaded.data.classes), public)
    if public is not None and not method.needs().public_labels:  # labels are sent only if needed
        public = replace(public, labels=None)
    plan = RunPlan(
        QUERIES,
        to_dict(spec)["method"],
        data_spec,
        public=public_fingerprint(public),
        public_note=("", "") if public is None else (public.name, public.note),
        features=None if space is None else space.to_plan(),
    )
    queries = Queries(plan, public, tuple(method.planned_queries(public, spec.seed)))
    declared, dtype = queries.query_declarations(), loaded.data.test.inputs.dtype
    shape, output_shape = plan.model_spec.shape, plan.model_spec.output_shape
    for call in queries.calls:
        query = declared[call.query]
        fault = sent_query_fault(query, call.tensors, shape, output_shape, dtype)
        if fault is not None:
            raise DataError(f"query {call.query!r}: {fault}")
        require_finite_inputs(call.tensors, call.query)
    return queries


def train_from_files(
    spec: RunSpec,
    queries: Path,
    responses: Sequence[Path],
    out: Path,
    *,
    keys: Mapping[str, str] | None = None,
    command: str = "",
    progress: bool = False,
) -> dict[str, Any]:
    """Train the student from the nodes' files of responses; an interrupted call is resumed by repeating it.

    Args:
        spec: the run of the queries. Options that do not affect the nodes may differ.
        queries: the file of queries.
        responses: one file per node.
        out: folder of the run.
        keys: fingerprints of the nodes' keys by name; None accepts any key, and the result says so.
        command: the exact command that repeats it, for the report.
        progress: show progress.

    Returns:
        Content of ``result.json``.

    Raises:
        QueryFileError: a file has an invalid signature, or does not belong to the others.
        ArgumentError: an option differs from the one of the queries.
        RunFolderError: the folder holds other files.
    """
    given = read_queries(queries, plugins=[method_name(spec.method), spec.task.registered_name])
    _require_same_queries(spec, given, queries)
    read = [read_responses(path, given, keys) for path in responses]
    files = ResponseFiles(given, read)
    file_info = {
        "queries": {
            "sha256": given.sha256,
            "bytes": queries.stat().st_size,
            "signed_by": given.signer,
            "public_inputs": 0 if given.public is None else len(given.public),
        },
        "responses": [_describe_responses(files.files[node]) for node in files.nodes],
        "missing": [node for node in keys or () if node not in files.nodes],
    }
    listeners = TrackerGroup(spec.track, to_dict(spec))
    _open_folder(out, {**file_info, "config": to_toml(spec)})
    full_precision = replace(
        spec, link=replace(spec.link, inputs="float32", gradients="float32")
    )  # the form of files
    run = RemoteRun(full_precision, files, given.plan.run)
    run.listeners = listeners
    results = run.run(out, bars=ProgressBar(progress))
    results["engine"]["backend"] = "files"
    del results["link"], results["seconds"]["local_training"], results["seconds"]["centralized"]
    result = {**run.describe_run(), **results, "files": file_info, "command": command, **machine_and_date()}
    write_text(out / "config.toml", f"{COMMAND}{command}\n\n{to_toml(spec)}")
    write_results(run, result)
    add_tracker_failure_notes(listeners, result, out)
    return result


def check_unchanged_options(original: RunSpec, spec: RunSpec) -> None:
    """Refuse changes of options that affect queries or nodes after the queries were sent.

    Args:
        original: configuration from which the queries were built.
        spec: configuration of the training.

    Raises:
        ArgumentError: naming the first such option, and its original value.
    """
    method = spec.method
    changeable = (*LATER_OPTIONS, *(f"method.{name}" for name in method.server_only_options))
    tables = to_dict(original), to_dict(spec)
    for name in option_types(spec):
        path = name.split(".")
        before, now = (reduce(dict.__getitem__, path, table) for table in tables)
        if now != before and not any(name == each or name.startswith(f"{each}.") for each in changeable):
            raise ArgumentError(name, now, f"{before!r}, as in the queries")


def _require_same_queries(spec: RunSpec, given: Queries, path: Path) -> None:
    """Refuse a run with other queries."""
    own_queries, method = build_offline_queries(spec), spec.method
    for name, value in given.plan.method.items():
        own = own_queries.plan.method.get(name)
        if own != value and name not in method.server_only_options:
            raise ArgumentError(f"method.{name}", own, f"{value!r}, as in the queries")
    if (
        own_queries.content_digests() != given.content_digests()
        or replace(own_queries.plan, method=given.plan.method) != given.plan
    ):
        raise QueryFileError(
            f"{path} does not hold the queries of this run: data, public data or seed differ"
        )


def _describe_responses(node: NodeResponses) -> dict[str, Any]:
    """Describe a file of responses for the result."""
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


def _open_folder(out: Path, file_info: Mapping[str, Any]) -> None:
    """Create the run's folder, or check that it holds the same unfinished run."""
    path, text = out / FILES, json.dumps(file_info, indent=2) + "\n"
    if path.exists() and not (out / "result.json").exists() and path.read_text(encoding="utf-8") == text:
        return
    require_empty_folder(out)
    out.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
