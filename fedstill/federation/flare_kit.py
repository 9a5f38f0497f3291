"""What a startup kit states of its site: where its parts are, whose server it goes to, how often it is heard.

A site is the server or a node of a federation, on this machine, with FLARE's kit in its folder;
:mod:`fedstill.federation.flare_site` is its process.
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from pathlib import Path

from fedstill.core.errors import DeployError
from fedstill.federation.provision import HEARTBEAT

SERVER, CLIENT = "server", "client"  # the roles, as FLARE calls them


@dataclass(frozen=True)
class Site:
    """Where the parts of a site are.

    Args:
        role: ``SERVER`` or ``CLIENT``.
        folder: the owner's folder: of a node the one with node.toml, of a server the federation's.
    """

    role: str
    folder: Path

    @property
    def kit(self) -> Path:
        """The startup kit."""
        return self.folder / ("server" if self.role == SERVER else "kit")

    @property
    def pid(self) -> Path:
        """The file that is locked as long as the site runs, and holds the number of its process."""
        return self.folder / ("server.pid" if self.role == SERVER else "node.pid")

    @property
    def log(self) -> Path:
        """What the site did, one line each."""
        return self.folder / ("server.log" if self.role == SERVER else "node.log")


def server(folder: Path) -> Site:
    """The server of the federation in this folder.

    Raises:
        DeployError: there is none.
    """
    return _site(Site(SERVER, folder.resolve()), "fed_server.json", "make one with `fedstill server init`")


def node(folder: Path) -> Site:
    """The node in its owner's folder.

    Raises:
        DeployError: it has no kit.
    """
    hint = f"put the startup kit that you were given into {folder / 'kit'}"
    return _site(Site(CLIENT, folder.resolve()), "fed_client.json", hint)


def _site(site: Site, config: str, hint: str) -> Site:
    if not (site.kit / "startup" / config).is_file():
        raise DeployError(f"{site.folder} has no startup kit in {site.kit.name}/: {hint}")
    return site


def target(site: Site) -> str:
    """Host and port of the server, as the kit names them."""
    config = json.loads((site.kit / "startup" / f"fed_{site.role}.json").read_text())
    return str(config["servers"][0]["service"]["target"])


def heartbeat(site: Site) -> float:
    """Seconds between two signs of life of a node."""
    try:
        seconds: float = json.loads((site.kit / "local" / "fedstill.json").read_text())["heartbeat"]
    except FileNotFoundError:  # a kit that FLARE's tools made alone
        return HEARTBEAT
    return seconds


def reaches(address: str) -> bool:
    """Whether anybody accepts a connection at ``host:port``; that it is the server is for TLS to tell."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=5.0):
            return True
    except OSError:
        return False


def check_port(site: Site) -> None:
    """Refuse to start a server whose port is taken: FLARE itself would try for ever, and say nothing.

    Raises:
        DeployError: it is taken, or not for us to open.
    """
    if site.role != SERVER:
        return
    host, _, port = target(site).rpartition(":")
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what waits to be forgotten is free
            probe.bind(("127.0.0.1" if host == "localhost" or host.startswith("127.") else "", int(port)))
    except OSError as error:
        raise DeployError(f"port {port} of this machine cannot be opened: {error.strerror}") from error
