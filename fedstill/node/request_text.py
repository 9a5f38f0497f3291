"""What a node's owner reads of a run that asks for approval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedstill.core.compute import Compute
from fedstill.core.config_tables import read_table
from fedstill.core.hashing import grouped
from fedstill.core.table_schema import Schema
from fedstill.core.text_format import clip, counted, human_bytes
from fedstill.data.input_spec import InputSpec
from fedstill.node.node_file import NodeFile
from fedstill.node.owner_folder import refused_queries
from fedstill.node.requests import ApprovalRequest
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import METHODS, build_node_side
from fedstill.protocol.queries import NodeSetting, placeholder_public


def describe_request(request: ApprovalRequest) -> dict[str, str | list[str]]:
    """What is to be known of a request, in lines by what they are about."""
    about, table = request.requested, request.requested.table
    method, spec, public = dict(table["method"]), table["spec"], table["public"]
    planned_queries = []
    for name, asked in about.queries.items():
        often = counted(asked["times"], "time") if asked["times"] else "as often as the server likes"
        rows = f", up to {asked['rows']} inputs" if asked["rows"] else ""
        size = f", up to {human_bytes(asked['bytes'])} each" if asked["bytes"] else ""
        leaves = ", ".join(dict.fromkeys(asked["releases"].values())) or "nothing"
        planned_queries.append(f"{name}: {often}{rows}; {leaves} leave{size}")
    most = about.max_queries
    queries = counted(most, "query") if most else "queries not limited by the plan"
    left = human_bytes(about.max_bytes) if about.max_bytes else "bytes not limited by the plan"
    student, least = table["student"] or "to be chosen", table["min_nodes"]
    goes_on = (
        f"goes on with {counted(least, 'node')} or more" if least else "does not say with how many nodes"
    )
    shape = " x ".join(map(str, spec["shape"]))
    schema = read_table(Schema, spec["schema"])
    classes = clip(", ".join(map(clip, spec["classes"])), 2000)
    columns = [f"{clip(each.name)}: {clip(each.allowed)}" for each in schema.columns]
    learned = f"; learned is {clip(schema.target)}" if schema else ""
    shared = f"{clip(public['name'])}, {public['inputs']} inputs, {public['fingerprint']}"
    return {
        "state": request.state,
        "run": f"{request.run}, asked {request.requested_at}",
        "server": request.server_name,
        "method": clip(
            ", ".join([str(method.pop("name")), *(f"{n} = {v}" for n, v in method.items())]), 2000
        ),
        "asks": planned_queries,
        "at most": f"{queries}, {left}",
        "inputs": f"{spec['task']['name']}, {len(spec['classes'])} classes, {shape}{learned}",
        **({"columns": columns} if schema else {"classes": classes}),
        "public": shared if public["fingerprint"] else "none",
        "seen by it": "sums of all nodes' answers" if table["secure_aggregation"] else "each node's answers",
        "server says": f"student {student}; {goes_on}",
    }


def always_refused_queries(request: ApprovalRequest, file: NodeFile) -> dict[str, str]:
    """The rules of ``node.toml`` by which some of what was asked is refused whatever its owner approves, by
    query; what its budgets or its model refuse is not among them."""
    table = request.requested.table
    spec, method = read_table(InputSpec, table["spec"], "spec."), dict(table["method"])
    config = read_table(METHODS[method.pop("name")], method, "method.")
    task = spec.make_task()
    setting = NodeSetting(
        task,
        LocalConfig(),
        Compute(),
        placeholder_public(task, spec.shape),
        secure_aggregation=bool(table["secure_aggregation"]),
    )
    return refused_queries(file, True, build_node_side(config, setting).queries)


def describe_log_line(line: Mapping[str, Any]) -> str:
    """What a line of the security log is about, and why it was written."""
    about = " ".join(str(line[name]) for name in ("run", "query") if line.get(name))
    if line.get("server"):
        about = f"{about} of {line['server']}"
    sha256 = grouped(str(line.get("description", ""))[:16])
    return "; ".join(clip(part) for part in (about, str(line["why"]), sha256) if part)
