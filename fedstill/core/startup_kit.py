"""Startup kit of a party in a deployed federation: its name, its server, its certificates.

NVIDIA FLARE's provisioning creates it: ``startup/`` holds certificates and addresses, ``local/`` the party's
own rules.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill.core.errors import DeployError
from fedstill.core.hashing import fingerprint

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

KIT_FOLDER = "kit"  # subfolder of the owner's folder


@dataclass(frozen=True)
class StartupKit:
    """Startup kit of a server, a node or an administrator. Files are read on access.

    Every method raises a :class:`DeployError` with the name of a file that is missing or damaged.

    Args:
        folder: folder of the kit.
    """

    folder: Path

    def path(self, name: str) -> Path:
        """Return the path of a file in ``startup/``."""
        return self.folder / "startup" / name

    def flare_setting(self, role: str, *keys: str | int) -> Any:
        """Return FLARE's setting at a path of keys, for a role (``server``, ``client`` or ``admin``)."""
        path = self.path(f"fed_{role}.json")
        content = _read_json(path)
        for depth, key in enumerate(keys, 1):
            try:
                content = content[key]
            except (LookupError, TypeError) as error:
                missing = ".".join(map(str, keys[:depth]))
                raise DeployError(f"{path} has no {missing}: copy the startup kit again") from error
        return content

    @property
    def node_name(self) -> str:
        """Name of the node."""
        return str(self.flare_setting("client", "client", "fqsn"))

    def server_address(self, role: str) -> str:
        """Return host and port of the server."""
        return str(self.flare_setting(role, "servers", 0, "service", "target"))

    def heartbeat(self, default: float) -> float:
        """Return seconds between heartbeats of a node, or ``default`` for a kit of FLARE's own tools."""
        path = self.folder / "local" / "fedstill.json"
        if not path.exists():
            return default
        try:
            return float(_read_json(path)["heartbeat"])
        except (LookupError, TypeError, ValueError) as error:
            raise DeployError(f"{path} has no heartbeat: copy the startup kit again") from error

    @property
    def certificate(self) -> Certificate:
        """Certificate of the party."""
        for name in ("client.crt", "server.crt"):
            if self.path(name).exists():
                return _certificate(self.path(name))
        raise DeployError(f"{self.folder} is not a startup kit: it has no certificate in startup/")

    @property
    def valid_until(self) -> datetime:
        """End of validity of the certificate."""
        return self.certificate.not_valid_after_utc

    @property
    def authority(self) -> Certificate:
        """Certificate of the authority that both server and nodes trust."""
        return _certificate(self.path("rootCA.pem"))

    @property
    def authority_fingerprint(self) -> str:
        """Fingerprint of the authority; empty if the kit has no authority."""
        if not self.path("rootCA.pem").is_file():
            return ""
        from cryptography.hazmat.primitives.serialization import Encoding

        return fingerprint(self.authority.public_bytes(Encoding.DER))

    def require_valid(self) -> None:
        """Refuse a kit that the server would reject. FLARE itself would wait for ever without a message.

        Raises:
            DeployError: the certificate is not valid today, or not issued by the authority in the kit.
        """
        certificate, now = self.certificate, datetime.now(timezone.utc)
        if not is_issued_by(certificate, self.authority):
            raise DeployError(f"{self.folder}: its certificate was not issued by the authority in rootCA.pem")
        if now > certificate.not_valid_after_utc:
            expired = f"{certificate.not_valid_after_utc:%Y-%m-%d}"
            advice = (
                "create a new kit by `fedstill server add`, for server and admin by `fedstill server renew`"
            )
            raise DeployError(f"{self.folder}: its certificate expired on {expired}; {advice}")
        if now < certificate.not_valid_before_utc:
            start = f"{certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
            advice = "check the clock of this machine"
            raise DeployError(f"{self.folder}: its certificate is valid from {start}; {advice}")


def is_issued_by(certificate: Certificate, authority: Certificate) -> bool:
    """Return whether the authority signed the certificate."""
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DeployError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DeployError(f"{path} is not JSON: copy the startup kit again") from error


def _certificate(path: Path) -> Certificate:
    from cryptography.x509 import load_pem_x509_certificate

    try:
        return load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise DeployError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DeployError(f"{path} is not a certificate") from error
