"""Texts for a node's owner about a run that waits for approval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedstill.core.compute import Compute
from fedstill.core.config_tables import flatten, read_table
from fedstill.core.hashing import group_digits
from fedstill.core.table_schema import Schema
from fedstill.core.text_format import format_bytes, format_count, to_printable_line
from fedstill.data.data_spec import DataSpec
from fedstill.node.node_file import NodeFile
from fedstill.node.owner_folder import rules_by_refused_query
from fedstill.node.requests import ApprovalRequest
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import METHODS, build_node_side
from fedstill.protocol.queries import NodeSetting, placeholder_public


def describe_request(request: ApprovalRequest) -> dict[str, str | list[str]]:
    """Return the facts of a request as texts by topic."""
    description, run = request.run_description, request.run_description.table
    method, spec, public = dict(run["method"]), run["spec"], run["public"]
    planned_queries = []
    for name, planned in description.queries.items():
        times = format_count(planned["times"], "time") if planned["times"] else "any number of times"
        rows = f", up to {planned['rows']} inputs" if planned["rows"] else ""
        size = f", up to {format_bytes(planned['bytes'])} each" if planned["bytes"] else ""
        kinds = ", ".join(dict.fromkeys(planned["releases"].values())) or "nothing"
        planned_queries.append(f"{name}: {times}{rows}; {kinds} leave{size}")
    max_queries = description.max_queries
    queries = format_count(max_queries, "query") if max_queries else "queries not limited by the plan"
    bytes_text = (
        format_bytes(description.max_bytes) if description.max_bytes else "bytes not limited by the plan"
    )
    student, min_nodes = run["student"] or "to be chosen", run["min_nodes"]
    quorum = (
        f"continues with {format_count(min_nodes, 'node')} or more"
        if min_nodes
        else "does not state the number of nodes"
    )
    shape = " x ".join(map(str, spec["shape"]))
    schema = read_table(Schema, spec["schema"])
    classes = to_printable_line(", ".join(map(to_printable_line, spec["classes"])), 2000)
    columns = [
        f"{to_printable_line(column.name)}: {to_printable_line(column.allowed_values)}"
        for column in schema.columns
    ]
    target_text = f"; target {to_printable_line(schema.target)}" if schema else ""
    public_text = f"{to_printable_line(public['name'])}, {public['inputs']} inputs, {public['fingerprint']}"
    return {
        "state": request.state,
        "run": f"{request.run}, requested {request.requested_at}",
        "server": request.server_name,
        "method": to_printable_line(
            ", ".join([str(method.pop("name")), *(f"{n} = {v}" for n, v in flatten(method).items())]), 2000
        ),
        "asks": planned_queries,
        "at most": f"{queries}, {bytes_text}",
        "inputs": f"{spec['task']['name']}, {len(spec['classes'])} classes, {shape}{target_text}",
        **({"columns": columns} if schema else {"classes": classes}),
        "public": public_text if public["fingerprint"] else "none",
        "seen by it": "sums of all nodes' responses (secure aggregation, experimental)"
        if run["secure_aggregation"]
        else "each node's responses",
        "server says": f"student {student}; {quorum}",
    }


def always_refused_queries(request: ApprovalRequest, file: NodeFile) -> dict[str, str]:
    """Return the queries that ``node.toml`` refuses despite an approval, and their rules; without refusals
    by budget or model.
    """
    table = request.run_description.table
    spec, method = read_table(DataSpec, table["spec"], "spec."), dict(table["method"])
    config = read_table(METHODS[method.pop("name")], method, "method.")
    task = spec.make_task()
    setting = NodeSetting(
        task,
        LocalConfig(),
        Compute(),
        placeholder_public(task, spec.shape),
        secure_aggregation=bool(table["secure_aggregation"]),
    )
    return rules_by_refused_query(file, True, build_node_side(config, setting).queries)


def describe_security_event(event: Mapping[str, Any]) -> str:
    """Return subject and reason of a security event."""
    subject = " ".join(str(event[name]) for name in ("run", "query", "number") if name in event)
    if event.get("server"):
        subject = f"{subject} of {event['server']}"
    sha256 = group_digits(str(event.get("description", ""))[:16])
    return "; ".join(to_printable_line(part) for part in (subject, str(event["reason"]), sha256) if part)
