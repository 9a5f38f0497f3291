"""What each site lets a job do, whoever made its startup kit: no code of others, and four classes by name.

The right to custom code is given to nobody, and a job may name two classes of fedstill and the two of FLARE
that carry them. Nobody but the owner of a site may shut it down or read its files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstill.core.errors import DeployError
from fedstill.core.startup_kit import StartupKit

# The classes that a job may name, at the server and at a node: what carries calls, and what answers them.
SERVER_CLASSES = (
    "nvflare.collab.runtime.controller.CollabController",
    "fedstill.runs.flare.ServerProgram",
)
NODE_CLASSES = (
    "nvflare.collab.runtime.executor.CollabExecutor",
    "fedstill.federation.flare.NodeProgram",
)

ANSWER_WITHIN = 10.0  # seconds that a node waits for the server's answer to one, until it tries again

# FLARE's settings of gRPC, and pings: without these, a connection that a firewall or a dead router has
# forgotten looks well to both ends for a quarter of an hour.
_LARGEST = 2**31 - 1
_GRPC = {
    "max_workers": 100,
    "options": [
        ["grpc.max_send_message_length", _LARGEST],
        ["grpc.max_receive_message_length", _LARGEST],
        ["grpc.keepalive_time_ms", 20_000],
        ["grpc.keepalive_timeout_ms", 10_000],
        ["grpc.http2.ping_timeout_ms", 10_000],
        ["grpc.keepalive_permit_without_calls", 1],
        ["grpc.http2.max_pings_without_data", 0],
        ["grpc.http2.min_ping_interval_without_data_ms", 5_000],
        ["grpc.http2.min_recv_ping_interval_without_data_ms", 5_000],
    ],
}

# What a person with the admin kit may do. What is not named is refused, so is custom code, on every site.
_AT_SERVER = {
    "project_admin": {
        "submit_job": "any",
        "manage_job": "any",
        "download_job": "any",
        "view": "any",
        "operate": "any",
        "app_command": "any",  # how far a run is
        "clone_job": "none",
        "shell_commands": "none",
        "byoc": "none",
    }
}
_AT_NODE = {
    "project_admin": {
        "submit_job": "any",
        "manage_job": "any",  # to abort it
        "view": "any",
        "operate": "none",
        "shell_commands": "none",
        "byoc": "none",
    }
}


_OF_CLIENT = {"format_version", "servers", "client", "require_signed_jobs"}  # sections of fed_client.json
_PARTS_AT_NODE = (  # of FLARE's client: what its jobs need to start
    {
        "id": "resource_manager",
        "path": "nvflare.app_common.resource_managers.gpu_resource_manager.GPUResourceManager",
        "args": {"num_of_gpus": 0, "mem_per_gpu_in_GiB": 0, "expiration_period": 300},
    },
    {
        "id": "resource_consumer",
        "path": "nvflare.app_common.resource_consumers.gpu_resource_consumer.GPUResourceConsumer",
        "args": {},
    },
    {
        "id": "process_launcher",
        "path": "nvflare.app_common.job_launcher.client_process_launcher.ClientProcessJobLauncher",
        "args": {},
    },
)


def write_json(path: Path, value: object) -> None:
    """A file of JSON that people can read, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_server_rules(kit: Path, dead_after: float) -> None:
    """Write what FLARE may do at the server; ``dead_after`` are seconds without a sign of life until a
    node is gone."""
    write_json(kit / "local" / "comm_config.json", {"grpc": _GRPC})
    write_json(kit / "local" / "authorization.json", {"format_version": "1.0", "permissions": _AT_SERVER})
    resources = json.loads((kit / "local" / "resources.json.default").read_text())
    resources["class_allow_list"] = list(SERVER_CLASSES)
    resources["servers"][0] |= {"heart_beat_timeout": dead_after, "shutdown_period": 1.0}
    resources["components"] = [item for item in resources["components"] if item["id"] != "log_receiver"]
    write_json(kit / "local" / "resources.json", resources)


def write_node_rules(kit: Path, *parts: Mapping[str, Any]) -> None:
    """Write what FLARE may do at a node, with further ``parts`` of ours: whoever made the kit, these rules
    are the node's own."""
    rules = {
        "format_version": 2,
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": list(NODE_CLASSES),
        "allow_log_streaming": False,
        "client": {"retry_timeout": 30, "compression": "Gzip"},
        "components": [*_PARTS_AT_NODE, *parts],
    }
    write_json(kit / "local" / "authorization.json", {"format_version": "1.0", "permissions": _AT_NODE})
    write_json(kit / "local" / "resources.json", rules)
    # A kit's own could name drivers to import.
    write_json(kit / "local" / "comm_config.json", {"grpc": _GRPC})


def check_node_kit(kit: StartupKit) -> None:
    """Refuse a node's kit that brings more than who it is and where the server is.

    FLARE would import what lies in ``local/custom``, pass tasks through the filters in
    ``local/privacy.json``, and make the classes that further sections of ``fed_client.json`` name.

    Raises:
        DeployError: it holds code, or names some.
    """
    for name in ("custom", "privacy.json"):
        path = kit.folder / "local" / name
        if path.exists():
            told = "a node takes no code or filters from whoever made its kit"
            raise DeployError(f"{path}: {told}; remove it, and ask where it came from")
    more = sorted(set(kit.config("client")) - _OF_CLIENT)
    if more:
        allowed = ", ".join(sorted(_OF_CLIENT))
        raise DeployError(f"{kit.path('fed_client.json')} has {', '.join(more)} (expected {allowed})")
