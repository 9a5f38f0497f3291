"""Permissions of jobs at each site, independent of its startup kit: no foreign code, four classes by name.

Custom code is not allowed. A job may name two classes of fedstill and the two classes of FLARE that run them.
Only the owner of a site may shut it down or read its files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstill.core.errors import DeployError
from fedstill.core.startup_kit import StartupKit

# The classes that a job may name at the server and at a node: FLARE's runtime and fedstill's program.
SERVER_CLASSES = (
    "nvflare.collab.runtime.controller.CollabController",
    "fedstill.runs.flare.ServerProgram",
)
NODE_CLASSES = (
    "nvflare.collab.runtime.executor.CollabExecutor",
    "fedstill.federation.flare.NodeProgram",
)

HEARTBEAT_TIMEOUT = 10.0  # seconds that a node waits for the server's reply to a heartbeat

# FLARE's settings of gRPC, with pings: without these, a connection that a firewall or router has dropped
# seems alive to both ends for a quarter of an hour.
_MAX_MESSAGE = 2**31 - 1
_GRPC = {
    "max_workers": 100,
    "options": [
        ["grpc.max_send_message_length", _MAX_MESSAGE],
        ["grpc.max_receive_message_length", _MAX_MESSAGE],
        ["grpc.keepalive_time_ms", 20_000],
        ["grpc.keepalive_timeout_ms", 10_000],
        ["grpc.http2.ping_timeout_ms", 10_000],
        ["grpc.keepalive_permit_without_calls", 1],
        ["grpc.http2.max_pings_without_data", 0],
        ["grpc.http2.min_ping_interval_without_data_ms", 5_000],
        ["grpc.http2.min_recv_ping_interval_without_data_ms", 5_000],
    ],
}

# Rights of the admin kit. Anything else is refused, and so is custom code, on every site.
_SERVER_RIGHTS = {
    "project_admin": {
        "submit_job": "any",
        "manage_job": "any",
        "download_job": "any",
        "view": "any",
        "operate": "any",
        "app_command": "any",  # progress of a run
        "clone_job": "none",
        "shell_commands": "none",
        "byoc": "none",
    }
}
_NODE_RIGHTS = {
    "project_admin": {
        "submit_job": "any",
        "manage_job": "any",  # to abort it
        "view": "any",
        "operate": "none",
        "shell_commands": "none",
        "byoc": "none",
    }
}


_CLIENT_SECTIONS = {"format_version", "servers", "client", "require_signed_jobs"}  # of fed_client.json
_NODE_COMPONENTS = (  # of FLARE's client, which its jobs need to start
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
    """Write an indented JSON file; create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_server_permissions(kit: Path, dead_after: float) -> None:
    """Write FLARE's permissions and resources of the server.

    Args:
        kit: folder of the server's startup kit.
        dead_after: seconds without a heartbeat until a node counts as gone.
    """
    write_json(kit / "local" / "comm_config.json", {"grpc": _GRPC})
    write_json(kit / "local" / "authorization.json", {"format_version": "1.0", "permissions": _SERVER_RIGHTS})
    resources = json.loads((kit / "local" / "resources.json.default").read_text())
    resources["class_allow_list"] = list(SERVER_CLASSES)
    resources["servers"][0] |= {"heart_beat_timeout": dead_after, "shutdown_period": 1.0}
    resources["components"] = [item for item in resources["components"] if item["id"] != "log_receiver"]
    write_json(kit / "local" / "resources.json", resources)


def write_node_permissions(kit: Path, *parts: Mapping[str, Any]) -> None:
    """Write FLARE's permissions and resources of a node, which replace those of the kit.

    Args:
        kit: folder of the node's startup kit.
        parts: further components.
    """
    rules = {
        "format_version": 2,
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": list(NODE_CLASSES),
        "allow_log_streaming": False,
        "client": {"retry_timeout": 30, "compression": "Gzip"},
        "components": [*_NODE_COMPONENTS, *parts],
    }
    write_json(kit / "local" / "authorization.json", {"format_version": "1.0", "permissions": _NODE_RIGHTS})
    write_json(kit / "local" / "resources.json", rules)
    # The kit's own file could name drivers to import.
    write_json(kit / "local" / "comm_config.json", {"grpc": _GRPC})


def require_minimal_kit(kit: StartupKit) -> None:
    """Refuse a node's kit that contains more than the node's identity and the server's address.

    FLARE would import code in ``local/custom``, pass tasks through the filters in ``local/privacy.json``, and
    create the classes that further sections of ``fed_client.json`` name.

    Raises:
        DeployError: the kit contains or names code.
    """
    for name in ("custom", "privacy.json"):
        path = kit.folder / "local" / name
        if path.exists():
            raise DeployError(
                f"{path}: a node accepts no code or filters in its kit; remove it, and ask where it came from"
            )
    unknown = sorted(set(kit.flare_setting("client")) - _CLIENT_SECTIONS)
    if unknown:
        allowed = ", ".join(sorted(_CLIENT_SECTIONS))
        raise DeployError(f"{kit.path('fed_client.json')} has {', '.join(unknown)} (expected {allowed})")
