"""A job for FLARE: three files of JSON, and no code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedstill.federation.flare_permissions import NODE_CLASSES, SERVER_CLASSES, write_json

# Seconds without a node until FLARE ends a job. Long, as the run itself handles missing nodes.
MAX_ABSENCE = 7 * 86400.0
# Seconds within which each node's process for a job must start; FLARE's default of 60 is short on two cores.
START_TIMEOUT = 180
UNFILTERED: dict[str, Any] = {"format_version": 2, "task_data_filters": [], "task_result_filters": []}


def write_job(folder: Path, nodes: Sequence[str], server: dict[str, Any], name: str = "fedstill") -> Path:
    """Write a job for :mod:`fedstill.federation.flare` into a folder and return the folder.

    The job begins once all its nodes are connected. FLARE's ``CollabRecipe`` and ``FedJob`` are not used, as
    they copy the source of classes into the job, which makes it custom code that sites refuse.

    Args:
        folder: of the job.
        nodes: names of the nodes that take part.
        server: arguments of :class:`~fedstill.runs.flare.ServerProgram`.
        name: of the job.
    """
    everyone = {"min_clients": len(nodes), "mandatory_clients": list(nodes)}
    deploy = {"name": name, "resource_spec": {}, "deploy_map": {"app": ["server", *nodes]}}
    write_json(folder / "meta.json", {**deploy, **everyone})
    (controller, program), app = SERVER_CLASSES, folder / "app" / "config"
    controller_args = {"server_obj_id": "program", "sync_task_timeout": START_TIMEOUT}
    at_server = {
        **UNFILTERED,
        "server": {"task_request_interval": 0.5},
        "dead_client_grace_period": MAX_ABSENCE,
        "workflows": [{"id": "controller", "path": controller, "args": controller_args}],
        "components": [{"id": "program", "path": program, "args": server}],
    }
    write_json(app / "config_fed_server.json", at_server)
    executor, program = NODE_CLASSES
    executor_config = {"path": executor, "args": {"client_obj_id": "program"}}
    at_node = {
        **UNFILTERED,
        "executors": [{"tasks": ["*"], "executor": executor_config}],
        "components": [{"id": "program", "path": program, "args": {}}],
    }
    write_json(app / "config_fed_client.json", at_node)
    return folder
