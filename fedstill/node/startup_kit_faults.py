"""Faults of a node's startup kit, with which it joins a live federation."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from fedstill.core.errors import ArgumentError, DeployError
from fedstill.core.startup_kit import KIT_FOLDER, StartupKit
from fedstill.node.admission import RunFacts, allowed_servers
from fedstill.node.policy import PolicyConfig


def server_faults(policy: PolicyConfig, authority: str) -> list[str]:
    """Return the fault of a policy that admits no run of the kit's own server; empty if it does."""
    if allowed_servers(RunFacts(policy, authority)) is None:
        return []
    expected = f"a list with {authority}, the authority of the startup kit, or an empty one"
    return [str(ArgumentError("policy.allowed_servers", list(policy.allowed_servers), expected))]


def kit_faults(folder: Path, name: str | None) -> list[str]:
    """Return the faults of the kit in a node's folder; the node's name, if known, must be the kit's."""
    if importlib.util.find_spec("nvflare") is None:
        return ["NVIDIA FLARE is not installed: pip install 'fedstill[flare]'"]
    kit = StartupKit(folder / KIT_FOLDER)
    if not kit.path("fed_client.json").is_file():
        advice = "copy yours there, or set online = false"
        return [f"{kit.folder} holds no startup kit: {advice}"]
    files = [kit.path(file) for file in ("client.crt", "client.key", "rootCA.pem")]
    faults = [f"{path} is missing: copy the startup kit there again" for path in files if not path.is_file()]
    try:
        if not faults:
            kit.require_valid()
        kit.server_address("client")
        if name not in (None, kit.node_name):
            faults.append(str(ArgumentError("name", name, f"{kit.node_name!r}, as the startup kit has it")))
    except DeployError as error:
        faults.append(str(error))
    return faults
