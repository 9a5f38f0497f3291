"""A site: the server or a node of a federation on this machine, with FLARE's startup kit in its folder.

:mod:`fedstill.federation.flare_site` runs its process.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from fedstill.core.errors import DeployError
from fedstill.core.startup_kit import KIT_FOLDER, StartupKit
from fedstill.federation.provision import HEARTBEAT

SERVER, CLIENT = "server", "client"  # the roles, as FLARE calls them


@dataclass(frozen=True)
class Site:
    """Paths and settings of a site.

    Args:
        role: ``SERVER`` or ``CLIENT``.
        folder: the owner's folder: of a node the one with node.toml, of a server the federation's.
    """

    role: str
    folder: Path

    @property
    def kit(self) -> StartupKit:
        """FLARE's startup kit of the site."""
        return StartupKit(self.folder / ("server" if self.role == SERVER else KIT_FOLDER))

    @property
    def target(self) -> str:
        """Host and port of the server, from the kit."""
        return self.kit.server_address(self.role)

    @property
    def heartbeat(self) -> float:
        """Seconds between two heartbeats of a node."""
        return self.kit.heartbeat(HEARTBEAT)

    @property
    def pid_file(self) -> Path:
        """File with the number of the site's process, locked while it runs."""
        return self.folder / ("server.pid" if self.role == SERVER else "node.pid")

    @property
    def log_file(self) -> Path:
        """Log file of the site."""
        return self.folder / ("server.log" if self.role == SERVER else "node.log")


def server(folder: Path) -> Site:
    """Return the server of the federation in a folder.

    Raises:
        DeployError: there is none.
    """
    return _require_kit_file(
        Site(SERVER, folder.resolve()), "fed_server.json", "make one with `fedstill server init`"
    )


def node(folder: Path) -> Site:
    """Return the node in its owner's folder.

    Raises:
        DeployError: there is no such folder, or it has no kit.
    """
    if not folder.is_dir():
        raise DeployError(f"there is no folder {folder}: `fedstill node init {folder}` makes one")
    hint = f"put the startup kit that you were given into {folder / KIT_FOLDER}"
    return _require_kit_file(Site(CLIENT, folder.resolve()), "fed_client.json", hint)


def _require_kit_file(site: Site, config: str, hint: str) -> Site:
    if not site.kit.path(config).is_file():
        raise DeployError(f"{site.folder} has no startup kit in {site.kit.folder.name}/: {hint}")
    return site


def is_reachable(address: str) -> bool:
    """Return whether ``host:port`` accepts a connection; TLS verifies later that it is the server."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=5.0):
            return True
    except OSError:
        return False


def require_free_port(site: Site) -> None:
    """Refuse to start a server whose port is taken, as FLARE would retry for ever without a message.

    Raises:
        DeployError: the port is taken, or this process may not open it.
    """
    if site.role != SERVER:
        return
    host, _, port = site.target.rpartition(":")
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
            probe.bind(("127.0.0.1" if host == "localhost" or host.startswith("127.") else "", int(port)))
    except OSError as error:
        raise DeployError(f"port {port} of this machine cannot be opened: {error.strerror}") from error
