"""A job for FLARE: three files of JSON, and no code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedstill.core.errors import DeployError
from fedstill.federation.rules import NODE_CLASSES, SERVER_CLASSES, write_json


def write_job(
    folder: Path,
    nodes: Sequence[str],
    server: dict[str, Any],
    *,
    name: str = "fedstill",
    fewest: int = 0,
    forgive: float = 7 * 86400.0,
) -> Path:
    """A job for :mod:`fedstill.federation.flare`: three files of JSON, and no code.

    FLARE's ``CollabRecipe`` and ``FedJob`` put the source of the classes that they are given into the job,
    which makes it custom code to every site; so the files are written here.

    Args:
        folder: where to; it must not exist.
        nodes: who takes part.
        server: arguments of ``ServerProgram``.
        fewest: with how many nodes the job may start; 0 means all.
        forgive: seconds that a node may be away until FLARE ends the job; whether and how the run goes on
            without it is the run's own business.

    Returns:
        The folder.

    Raises:
        DeployError: it exists.
    """
    if folder.exists():
        raise DeployError(f"{folder} exists: a job is written to a new folder")
    app = folder / "app" / "config"
    write_json(
        folder / "meta.json",
        {
            "name": name,
            "resource_spec": {},
            "min_clients": fewest or len(nodes),
            "mandatory_clients": [] if fewest else list(nodes),
            "deploy_map": {"app": ["server", *nodes]},
        },
    )
    controller, program = SERVER_CLASSES
    write_json(
        app / "config_fed_server.json",
        {
            "format_version": 2,
            "server": {"task_request_interval": 0.5},
            "dead_client_grace_period": forgive,
            "workflows": [{"id": "controller", "path": controller, "args": {"server_obj_id": "program"}}],
            "components": [{"id": "program", "path": program, "args": server}],
            "task_data_filters": [],
            "task_result_filters": [],
        },
    )
    executor, program = NODE_CLASSES
    write_json(
        app / "config_fed_client.json",
        {
            "format_version": 2,
            "executors": [
                {"tasks": ["*"], "executor": {"path": executor, "args": {"client_obj_id": "program"}}}
            ],
            "components": [{"id": "program", "path": program, "args": {}}],
            "task_data_filters": [],
            "task_result_filters": [],
        },
    )
    return folder
