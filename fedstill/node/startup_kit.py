"""The startup kit, by which a node joins a live federation: what is in it, and what is wrong with it."""

from __future__ import annotations

import importlib.util
import json
from datetime import datetime, timezone
from pathlib import Path

from fedstill.core import kit_certificates
from fedstill.core.errors import ArgumentError, FedstillError

KIT = "kit"


def faults(folder: Path, name: str | None) -> list[str]:
    """What is wrong with the startup kit, by which a node (of this name, if that is known) joins a live
    federation."""
    if importlib.util.find_spec("nvflare") is None:
        return ["NVIDIA FLARE is not installed: pip install 'fedstill[flare]'"]
    try:
        named, _ = read(folder)
    except FedstillError as error:
        return [str(error)]
    startup = folder / KIT / "startup"
    found = [
        f"{startup / file} is missing: copy the startup kit there again"
        for file in ("client.crt", "client.key", "rootCA.pem")
        if not (startup / file).is_file()
    ]
    try:
        if not found and valid_until(folder) < datetime.now(timezone.utc):
            found.append(f"{startup / 'client.crt'} has run out: ask those who run the server for a new kit")
    except FedstillError as error:
        found.append(str(error))
    if name not in (None, named):
        found.append(str(ArgumentError("name", name, f"{named!r}, as the startup kit has it")))
    return found


def valid_until(folder: Path) -> datetime:
    """When the certificate in the startup kit runs out; :class:`FedstillError` if it is none."""
    try:
        return kit_certificates.valid_until(folder / KIT)
    except ValueError as error:
        raise FedstillError(f"{folder / KIT / 'startup' / 'client.crt'} is no certificate") from error


def read(folder: Path) -> tuple[str, str]:
    """The node's name and the server's address in the startup kit.

    Raises:
        FedstillError: there is no kit in ``kit/``, or it is none of a node.
    """
    path = folder / KIT / "startup" / "fed_client.json"
    if not path.is_file():
        raise FedstillError(
            f"{folder / KIT} holds no startup kit: copy the one that you were given to there, or set "
            "online = false"
        )
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return str(table["client"]["fqsn"]), str(table["servers"][0]["service"]["target"])
    except (ValueError, LookupError, TypeError) as error:
        raise FedstillError(f"{path} is no startup kit of a node") from error
