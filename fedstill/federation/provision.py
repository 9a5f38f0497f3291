"""Startup kits, which define the participants of a federation.

NVIDIA FLARE's own tools create certificates and kits (:mod:`nvflare.lighter`). Each site's permissions are
then added (:mod:`fedstill.federation.provision`).

Layout of a federation's folder, which belongs to the person who runs the server:

    server/         kit of the server
    nodes/NAME/     kit of a node: hand it over, then delete it here
    admin/          kit of the person who starts runs
    server.toml     what a run may use at the server (:mod:`fedstill.federation.server_rules`)
    provision/      the root certificate authority: its key admits any node, so keep it secret
"""

from __future__ import annotations

import contextlib
import io
import ipaddress
import json
import re
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.core import private_files
from fedstill.core.config_tables import commented_toml
from fedstill.core.errors import ArgumentError, DeployError
from fedstill.core.startup_kit import StartupKit

ADMIN = "admin@federation.local"  # FLARE requires the form of an e-mail address; nothing is sent to it
ROOT_DAYS = 3650  # validity of the root certificate; FLARE signs the others for 360 days

FEDERATION = "provision/federation.json"  # in a federation's folder
HOSTS = "a host name or an IPv4 address, without port"
HEARTBEAT = 4.0  # seconds between two heartbeats of a node; FLARE rounds to multiples of 2
DEAD_AFTER = 30.0  # seconds without a heartbeat until the server counts a node as gone


def require_flare() -> None:
    """Check that FLARE is installed.

    Raises:
        DeployError: nvflare is not installed. The message says how to install it.
    """
    try:
        import nvflare  # noqa: F401
    except ImportError as error:
        raise DeployError("NVIDIA FLARE is not installed: pip install 'fedstill[flare]'") from error


def provision(
    folder: Path,
    host: str,
    nodes: Sequence[str],
    *,
    name: str = "fedstill",
    port: int | None = None,
    heartbeat: float = HEARTBEAT,
    dead_after: float = DEAD_AFTER,
) -> int:
    """Create the kits of a new federation.

    Args:
        folder: target folder, see the layout above; it must be new or empty.
        host: name or IPv4 address by which the nodes reach the server.
        nodes: names of the nodes, one kit each.
        name: of the federation.
        port: the port of the server; None takes a free one of this machine.
        heartbeat: seconds between two heartbeats of a node, a multiple of 2.
        dead_after: seconds without a heartbeat until the server counts a node as gone.

    Returns:
        The server's port.

    Raises:
        ArgumentError: a name or number is invalid.
        DeployError: the folder is not empty, or FLARE fails.
    """
    from fedstill.federation import server_rules  # imports torch, which a site's process does not need

    require_flare()
    _check_arguments(host, nodes, name, port)
    if not 2 <= heartbeat < dead_after:
        raise ArgumentError("heartbeat", heartbeat, f"2 or more, and less than dead_after, {dead_after:g}")
    if folder.exists() and any(folder.iterdir()):
        raise DeployError(f"{folder} is not empty: choose a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    port = port or free_port()
    federation = {"name": name, "host": host, "port": port, "heartbeat": heartbeat, "dead_after": dead_after}
    write_json(folder / FEDERATION, {**federation, "nodes": list(nodes)})
    (folder / server_rules.FILE).write_text(commented_toml(server_rules.ServerRules()), encoding="utf-8")
    built = _build_kits(folder, nodes, admin=True)
    _install_kit(built / _server_name(host), folder / "server")
    _install_kit(built / ADMIN, folder / "admin")
    write_server_permissions(folder / "server", dead_after)
    _write_node_kits(folder, built, nodes, heartbeat)
    return port


def add_nodes(folder: Path, nodes: Sequence[str]) -> None:
    """Create kits for more nodes, or new certificates for existing ones. The server may keep running.

    Raises:
        ArgumentError: a name is invalid.
        DeployError: the folder contains no federation, a kit exists already, or FLARE fails.
    """
    require_flare()
    federation = read_federation(folder)
    _check_arguments(federation["host"], nodes, federation["name"], federation["port"])
    existing = {path.name.lower(): path for path in (folder / "nodes").glob("*")}
    for node in nodes:
        if (kit := existing.get(node.lower())) is not None:
            raise DeployError(f"{kit} exists already: hand it over, or delete it first")
    _write_node_kits(folder, _build_kits(folder, nodes, admin=False), nodes, federation["heartbeat"])
    known = dict.fromkeys([*federation["nodes"], *nodes])
    write_json(folder / FEDERATION, {**federation, "nodes": list(known)})


def renew_certificates(folder: Path) -> None:
    """Create new certificates for the server and the admin, in their kits; the server loads its own at its
    start.

    Raises:
        DeployError: the folder contains no federation, or FLARE fails.
    """
    require_flare()
    federation = read_federation(folder)
    server = _server_name(federation["host"])
    _forget_keys(folder, federation["name"], [server, ADMIN])
    built = _build_kits(folder, [], admin=True)
    for participant, kit in ((server, folder / "server"), (ADMIN, folder / "admin")):
        for suffix in ("*.crt", "*.key"):
            for path in (built / participant / "startup").glob(suffix):
                shutil.move(path, kit / "startup" / path.name)
    shutil.rmtree(built)


def read_federation(folder: Path) -> dict[str, Any]:
    """Return name, host, port, timeouts and node names of the federation in a folder.

    Raises:
        DeployError: the folder contains no federation.
    """
    try:
        federation: dict[str, Any] = json.loads((folder / FEDERATION).read_text())
    except (OSError, ValueError) as error:
        raise DeployError(f"{folder} holds no federation: make one with `fedstill server init`") from error
    return federation


def revoked_nodes(folder: Path) -> list[str]:
    """Return the names of revoked nodes of the federation in a folder."""
    path = folder / "server" / "disabled_clients.json"
    names: list[str] = json.loads(path.read_text())["disabled_clients"] if path.exists() else []
    return names


def free_port() -> int:
    """Return a port that is currently free."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port


def _check_arguments(host: str, nodes: Sequence[str], name: str, port: int | None) -> None:
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", host):
        raise ArgumentError("host", host, HOSTS)
    if re.fullmatch(r"[0-9.]+", host):
        try:
            ipaddress.IPv4Address(host)
        except ValueError as error:
            raise ArgumentError("host", host, HOSTS) from error
    if not nodes:
        raise ArgumentError("nodes", "", "one name or more")
    for node in nodes:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}", node) or node.lower() == "server":
            raise ArgumentError(
                "node", node, "1 to 64 letters, digits, - and _, not starting with -, and not 'server'"
            )
        if node.lower() == _server_name(host).lower():
            raise ArgumentError("node", node, "another name than the server's host")
    if len({node.lower() for node in nodes}) < len(nodes):  # some file systems ignore case
        raise ArgumentError("nodes", " ".join(nodes), "each name once, ignoring case")
    if not re.fullmatch(r"[A-Za-z0-9_]{1,64}", name):
        raise ArgumentError("name", name, "1 to 64 letters, digits and _")
    if port is not None and not 1 <= port <= 65535:
        raise ArgumentError("port", port, "1 to 65535")


def _server_name(host: str) -> str:
    return host[:63]  # longest common name of a certificate


def _build_kits(folder: Path, nodes: Sequence[str], *, admin: bool) -> Path:
    """Run FLARE's builders and return the folder with one kit for each participant."""
    from nvflare.lighter.constants import CtxKey
    from nvflare.lighter.entity import Project
    from nvflare.lighter.impl.cert import CertBuilder
    from nvflare.lighter.impl.static_file import StaticFileBuilder
    from nvflare.lighter.impl.workspace import WorkspaceBuilder
    from nvflare.lighter.provisioner import Provisioner

    federation = read_federation(folder)
    name, host, port = federation["name"], federation["host"], federation["port"]
    project = Project(name, "")
    project.set_server(host, name, {"fed_learn_port": port, "default_host": host})
    for node in nodes:
        project.add_client(node, node.replace("-", "_"), {})
    if admin:
        project.add_admin(ADMIN, name, {"role": "project_admin"})
    builders = [
        WorkspaceBuilder(),
        StaticFileBuilder(config_folder="config", scheme="grpc", require_signed_jobs=True),
        CertBuilder(root_valid_days=ROOT_DAYS),
    ]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        context = Provisioner(str(folder / "provision"), builders).provision(project)
    built = context.get(CtxKey.CURRENT_PROD_DIR)
    if built is None or context.get(CtxKey.BUILD_ERROR):
        raise DeployError(f"FLARE could not create the kits: {_last_line(output.getvalue())}")
    _forget_keys(folder, name, nodes)
    return Path(built)


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "unknown reason")


def _forget_keys(folder: Path, name: str, nodes: Sequence[str]) -> None:
    """Delete nodes' private keys from FLARE's state, so that a node's key is in its kit only."""
    path = folder / "provision" / name / "state" / "cert.json"
    state = json.loads(path.read_text())
    kept = {key: value for key, value in state.items() if key not in nodes}
    # Atomically, as the authority's own key is stored only here.
    private_files.replace_file(path, (json.dumps(kept, indent=2) + "\n").encode(), sync=True)


def _write_node_kits(folder: Path, built: Path, nodes: Sequence[str], heartbeat: float) -> None:
    for node in nodes:
        kit = folder / "nodes" / node
        _install_kit(built / node, kit)
        write_node_permissions(kit)
        write_json(kit / "local" / "fedstill.json", {"heartbeat": heartbeat})
        config = json.loads((kit / "startup" / "fed_client.json").read_text())
        config["client"]["maint_msg_timeout"] = HEARTBEAT_TIMEOUT
        write_json(kit / "startup" / "fed_client.json", config)
    shutil.rmtree(built)  # it also has an unneeded new kit of the server


def _install_kit(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(source, target)
    for script in (target / "startup").glob("*.sh"):
        script.unlink()  # it would start the site with FLARE's own settings, and restart it
    (target / "readme.txt").unlink(missing_ok=True)
    target.chmod(0o700)


# --- permissions of jobs at each site -------------------------------------------------------------------

# The classes that a job may name at the server and at a node: FLARE's runtime and fedstill's program.
SERVER_CLASSES = (
    "nvflare.collab.runtime.controller.CollabController",
    "fedstill.runs.flare_server.ServerProgram",
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
