"""A job for FLARE: three files of JSON, and no code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedstill.federation.flare_permissions import NODE_CLASSES, SERVER_CLASSES, write_json

# Seconds of absence until FLARE ends a job: how a run goes on is the run's own business.
FORGIVE = 7 * 86400.0
# Seconds within which each node's process for a job must be there; FLARE's 60 are few on two cores.
BEGIN = 180
UNFILTERED: dict[str, Any] = {"format_version": 2, "task_data_filters": [], "task_result_filters": []}


def write_job(folder: Path, nodes: Sequence[str], server: dict[str, Any], name: str = "fedstill") -> Path:
    """A job for :mod:`fedstill.federation.flare`, which begins once all its nodes are there; its folder.

    FLARE's ``CollabRecipe`` and ``FedJob`` put the source of the classes that they are given into the job,
    which makes it custom code to every site; so the files are written here. ``server`` are the arguments of
    ``ServerProgram``.
    """
    everyone = {"min_clients": len(nodes), "mandatory_clients": list(nodes)}
    deploy = {"name": name, "resource_spec": {}, "deploy_map": {"app": ["server", *nodes]}}
    write_json(folder / "meta.json", {**deploy, **everyone})
    (controller, program), app = SERVER_CLASSES, folder / "app" / "config"
    carrying = {"server_obj_id": "program", "sync_task_timeout": BEGIN}
    at_server = {
        **UNFILTERED,
        "server": {"task_request_interval": 0.5},
        "dead_client_grace_period": FORGIVE,
        "workflows": [{"id": "controller", "path": controller, "args": carrying}],
        "components": [{"id": "program", "path": program, "args": server}],
    }
    write_json(app / "config_fed_server.json", at_server)
    executor, program = NODE_CLASSES
    carried = {"path": executor, "args": {"client_obj_id": "program"}}
    at_node = {
        **UNFILTERED,
        "executors": [{"tasks": ["*"], "executor": carried}],
        "components": [{"id": "program", "path": program, "args": {}}],
    }
    write_json(app / "config_fed_client.json", at_node)
    return folder
