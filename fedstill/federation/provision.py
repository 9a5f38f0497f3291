"""Startup kits: who may take part in a federation, and what each site lets a job do.

NVIDIA FLARE's own tools make the certificates and kits (:mod:`nvflare.lighter`). On top of them this
module writes each site's rules, so that a job can bring no code: the right to custom code is given to
nobody, and a job may name four classes only, two of fedstill and the two of FLARE that carry them.
Nobody but the owner of a site may shut it down or read its files.

Layout of a federation's folder, which belongs to whoever runs the server:

    server/         kit of the server
    nodes/NAME/     kit of a node: hand it over, then delete it here
    admin/          kit of the person who starts runs
    provision/      the root certificate authority: its key lets in whom it signs, so keep it secret
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import socket
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fedstill.core.certificates import certificate
from fedstill.core.errors import ArgumentError, DeployError

# The classes that a job may name, at the server and at a node: what carries calls, and what answers them.
SERVER_CLASSES = (
    "nvflare.collab.runtime.controller.CollabController",
    "fedstill.runs.flare.ServerProgram",
)
NODE_CLASSES = (
    "nvflare.collab.runtime.executor.CollabExecutor",
    "fedstill.federation.flare.NodeProgram",
)

ADMIN = "admin@federation.local"  # FLARE wants the form of an e-mail address; nothing is ever sent there
ROOT_DAYS = 3650  # the authority outlives the certificates it signs: they are for 360 days, fixed by FLARE

FEDERATION = "provision/federation.json"  # in a federation's folder
HEARTBEAT = 4.0  # seconds between two signs of life of a node; FLARE counts in steps of 2
DEAD_AFTER = 30.0  # seconds without one until the server counts a node as gone
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


def require_flare() -> None:
    """Say in one line how to install FLARE, where it is missing.

    Raises:
        DeployError: nvflare is not installed.
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
    """Make the kits of a new federation.

    Args:
        folder: where to, see the layout above; it must be new or empty.
        host: name or IPv4 address by which the nodes reach the server.
        nodes: their names, one kit each.
        name: of the federation.
        port: the one port that the server opens; None takes a free one of this machine.
        heartbeat: seconds between two signs of life of a node, in steps of 2.
        dead_after: seconds without one until the server counts a node as gone.

    Returns:
        The server's port.

    Raises:
        ArgumentError: a name or number that cannot be used.
        DeployError: the folder is not empty, or FLARE refuses.
    """
    require_flare()
    _check(host, nodes, name, port)
    if not 2 <= heartbeat < dead_after:
        raise ArgumentError("heartbeat", heartbeat, f"2 or more, and less than dead_after, {dead_after:g}")
    if folder.exists() and any(folder.iterdir()):
        raise DeployError(f"{folder} is not empty: a federation is made in a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    port = port or free_port()
    federation = {"name": name, "host": host, "port": port, "heartbeat": heartbeat, "dead_after": dead_after}
    write_json(folder / FEDERATION, {**federation, "nodes": list(nodes)})
    made = _make(folder, nodes, admin=True)
    _take(made / _server_name(host), folder / "server")
    _take(made / ADMIN, folder / "admin")
    _server_rules(folder / "server", dead_after)
    _hand_out(folder, made, nodes, heartbeat)
    return port


def add(folder: Path, nodes: Sequence[str]) -> None:
    """Kits for more nodes, or with new certificates for old ones; the server may go on running.

    Raises:
        ArgumentError: a name that cannot be used.
        DeployError: no federation was made in this folder, a kit is still there, or FLARE refuses.
    """
    require_flare()
    federation = read_federation(folder)
    _check(federation["host"], nodes, federation["name"], federation["port"])
    there = {path.name.lower() for path in (folder / "nodes").glob("*")}
    for node in nodes:
        if node.lower() in there:
            raise DeployError(f"{folder / 'nodes' / node} is there already: hand it over, or delete it first")
    _hand_out(folder, _make(folder, nodes, admin=False), nodes, federation["heartbeat"])
    known = dict.fromkeys([*federation.get("nodes", ()), *nodes])  # a federation of long ago had no list
    write_json(folder / FEDERATION, {**federation, "nodes": list(known)})


def renew(folder: Path) -> None:
    """New certificates for the server and the admin, in their kits; the server takes its own when it starts.

    Raises:
        DeployError: no federation was made in this folder, or FLARE refuses.
    """
    require_flare()
    federation = read_federation(folder)
    server = _server_name(federation["host"])
    _forget_keys(folder, federation["name"], [server, ADMIN])
    made = _make(folder, [], admin=True)
    for participant, kit in ((server, folder / "server"), (ADMIN, folder / "admin")):
        for suffix in ("*.crt", "*.key"):
            for path in (made / participant / "startup").glob(suffix):
                shutil.move(path, kit / "startup" / path.name)
    shutil.rmtree(made)


def read_federation(folder: Path) -> dict[str, Any]:
    """Name, host, port, times and names of the nodes of the federation in this folder.

    Raises:
        DeployError: there is none.
    """
    try:
        federation: dict[str, Any] = json.loads((folder / FEDERATION).read_text())
    except (OSError, ValueError) as error:
        raise DeployError(f"{folder} holds no federation: make one with `fedstill server init`") from error
    return federation


def revoked(folder: Path) -> list[str]:
    """Names that the server of the federation in this folder lets in no more."""
    path = folder / "server" / "disabled_clients.json"
    names: list[str] = json.loads(path.read_text())["disabled_clients"] if path.exists() else []
    return names


def write_node_rules(kit: Path, *parts: Mapping[str, Any]) -> None:
    """Write what FLARE may do at a node: whoever made the kit, these rules are the node's own.

    Args:
        kit: of the node.
        parts: further components of ours.
    """
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
    write_json(
        kit / "local" / "comm_config.json", {"grpc": _GRPC}
    )  # a kit's own could name drivers to import


def check_node_kit(kit: Path) -> None:
    """Refuse a node's kit that brings more than who it is and where the server is.

    FLARE would import what lies in ``local/custom``, pass tasks through the filters in
    ``local/privacy.json``, and make the classes that further sections of ``fed_client.json`` name.

    Raises:
        DeployError: it holds code, or names some.
    """
    for name in ("custom", "privacy.json"):
        if (kit / "local" / name).exists():
            told = "a node takes no code or filters from whoever made its kit"
            raise DeployError(f"{kit / 'local' / name}: {told}; remove it, and ask where it came from")
    more = sorted(set(json.loads((kit / "startup" / "fed_client.json").read_text())) - _OF_CLIENT)
    if more:
        path, allowed = kit / "startup" / "fed_client.json", ", ".join(sorted(_OF_CLIENT))
        raise DeployError(f"{path} has {', '.join(more)}: allowed are {allowed}")


def check_kit(kit: Path) -> None:
    """Refuse a kit with which nobody is let in; FLARE itself would wait for ever and say nothing.

    Raises:
        DeployError: the certificate is not in force today, or not from the authority in the same kit.
    """
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    found = certificate(kit)
    authority = x509.load_pem_x509_certificate((kit / "startup" / "rootCA.pem").read_bytes())
    try:
        found.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError) as error:
        raise DeployError(f"{kit}: its certificate is not from the authority in rootCA.pem") from error
    now = datetime.now(timezone.utc)
    if now > found.not_valid_after_utc:
        ended = f"{found.not_valid_after_utc:%Y-%m-%d}"
        way_out = "`fedstill server add` makes a new one for a node, `renew` for server and admin"
        raise DeployError(f"{kit}: its certificate ran out on {ended}; {way_out}")
    if now < found.not_valid_before_utc:
        begins = f"{found.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
        raise DeployError(f"{kit}: its certificate begins at {begins}; is the clock of this machine right?")


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


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port


def _check(host: str, nodes: Sequence[str], name: str, port: int | None) -> None:
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", host):
        raise ArgumentError("host", host, "a host name or an IPv4 address, without port")
    if not nodes:
        raise ArgumentError("nodes", "", "one name or more")
    for node in nodes:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}", node) or node.lower() == "server":
            raise ArgumentError(
                "node", node, "1 to 64 letters, digits, - and _, not - at first, and not 'server'"
            )
        if node.lower() == _server_name(host).lower():
            raise ArgumentError("node", node, "another name than the server's host")
    if len({node.lower() for node in nodes}) < len(nodes):  # on some disks their folders are one
        raise ArgumentError("nodes", " ".join(nodes), "each name once, in whichever case")
    if not re.fullmatch(r"[A-Za-z0-9_]{1,64}", name):
        raise ArgumentError("name", name, "1 to 64 letters, digits and _")
    if port is not None and not 1 <= port <= 65535:
        raise ArgumentError("port", port, "1 to 65535")


def _server_name(host: str) -> str:
    return host[:63]  # FLARE's: the common name of a certificate is no longer


def _make(folder: Path, nodes: Sequence[str], *, admin: bool) -> Path:
    """Run FLARE's builders; the folder with one kit for each participant."""
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
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        context = Provisioner(str(folder / "provision"), builders).provision(project)
    made = context.get(CtxKey.CURRENT_PROD_DIR)
    if made is None or context.get(CtxKey.BUILD_ERROR):
        raise DeployError(f"FLARE could not make the kits: {_last_line(said.getvalue())}")
    _forget_keys(folder, name, nodes)
    return Path(made)


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "it does not say why")


def _forget_keys(folder: Path, name: str, nodes: Sequence[str]) -> None:
    """Remove private keys from what FLARE remembers: a node's key is in its kit, and nowhere else."""
    path = folder / "provision" / name / "state" / "cert.json"
    state = json.loads(path.read_text())
    write_json(path, {key: value for key, value in state.items() if key not in nodes})
    path.chmod(0o600)


def _hand_out(folder: Path, made: Path, nodes: Sequence[str], heartbeat: float) -> None:
    for node in nodes:
        kit = folder / "nodes" / node
        _take(made / node, kit)
        _node_rules(kit, heartbeat)
    shutil.rmtree(made)  # of a server's kit made again beside new nodes: nobody needs it


def _take(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(source, target)
    write_json(target / "local" / "comm_config.json", {"grpc": _GRPC})
    for script in (target / "startup").glob("*.sh"):
        script.unlink()  # they would start a site with FLARE's own settings, and again whenever it ended
    (target / "readme.txt").unlink(missing_ok=True)
    target.chmod(0o700)


def _server_rules(kit: Path, dead_after: float) -> None:
    write_json(kit / "local" / "authorization.json", {"format_version": "1.0", "permissions": _AT_SERVER})
    resources = json.loads((kit / "local" / "resources.json.default").read_text())
    resources["class_allow_list"] = list(SERVER_CLASSES)
    resources["servers"][0] |= {"heart_beat_timeout": dead_after, "shutdown_period": 1.0}
    resources["components"] = [item for item in resources["components"] if item["id"] != "log_receiver"]
    write_json(kit / "local" / "resources.json", resources)


def _node_rules(kit: Path, heartbeat: float) -> None:
    write_node_rules(kit)
    write_json(kit / "local" / "fedstill.json", {"heartbeat": heartbeat})
    config = json.loads((kit / "startup" / "fed_client.json").read_text())
    config["client"]["maint_msg_timeout"] = ANSWER_WITHIN
    write_json(kit / "startup" / "fed_client.json", config)


def write_json(path: Path, value: object) -> None:
    """A file of JSON that people can read, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")
