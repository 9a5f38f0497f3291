"""The startup kit of a site in a live federation: who the site is, where its server is, who vouches for it.

FLARE's provisioning makes it: ``startup/`` holds certificates and addresses, ``local/`` the site's own rules.
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

KIT_FOLDER = "kit"  # where a node's kit is, in its owner's folder


@dataclass(frozen=True)
class StartupKit:
    """The startup kit of a server, a node or an administrator; each part is read when it is asked for.

    Whatever is asked raises a :class:`DeployError` that names the file, where that is missing or damaged.

    Args:
        folder: of the kit.
    """

    folder: Path

    def path(self, name: str) -> Path:
        """A file of ``startup/``."""
        return self.folder / "startup" / name

    def config(self, role: str, *keys: str | int) -> Any:
        """What FLARE's settings of a role (``server``, ``client`` or ``admin``) say under these keys."""
        path = self.path(f"fed_{role}.json")
        found = _read(path)
        for depth, key in enumerate(keys, 1):
            try:
                found = found[key]
            except (LookupError, TypeError) as error:
                missing = ".".join(map(str, keys[:depth]))
                raise DeployError(f"{path} does not say {missing}: copy the startup kit anew") from error
        return found

    @property
    def name(self) -> str:
        """The node's."""
        return str(self.config("client", "client", "fqsn"))

    def server_address(self, role: str) -> str:
        """Host and port of the server."""
        return str(self.config(role, "servers", 0, "service", "target"))

    def heartbeat(self, default: float) -> float:
        """Seconds between two signs of life of a node; a kit that FLARE's tools made alone does not say."""
        path = self.folder / "local" / "fedstill.json"
        if not path.exists():
            return default
        try:
            return float(_read(path)["heartbeat"])
        except (LookupError, TypeError, ValueError) as error:
            raise DeployError(f"{path} does not say heartbeat: copy the startup kit anew") from error

    @property
    def certificate(self) -> Certificate:
        """The site's own."""
        for name in ("client.crt", "server.crt"):
            if self.path(name).exists():
                return _certificate(self.path(name))
        raise DeployError(f"{self.folder} is no startup kit: it has no certificate in startup/")

    @property
    def valid_until(self) -> datetime:
        """When that runs out."""
        return self.certificate.not_valid_after_utc

    @property
    def authority(self) -> Certificate:
        """Of the authority by which server and nodes know each other."""
        return _certificate(self.path("rootCA.pem"))

    @property
    def authority_fingerprint(self) -> str:
        """By which a node knows who asks; empty where the kit holds no authority."""
        if not self.path("rootCA.pem").is_file():
            return ""
        from cryptography.hazmat.primitives.serialization import Encoding

        return fingerprint(self.authority.public_bytes(Encoding.DER))

    def require_valid(self) -> None:
        """Refuse a kit with which nobody is let in; FLARE itself would wait for ever and say nothing.

        Raises:
            DeployError: the certificate is not in force today, or not from the authority in the same kit.
        """
        found, now = self.certificate, datetime.now(timezone.utc)
        if not is_issued_by(found, self.authority):
            raise DeployError(f"{self.folder}: its certificate is not from the authority in rootCA.pem")
        if now > found.not_valid_after_utc:
            ended = f"{found.not_valid_after_utc:%Y-%m-%d}"
            way_out = "a new kit comes from `fedstill server add`, of server and admin from `renew`"
            raise DeployError(f"{self.folder}: its certificate ran out on {ended}; {way_out}")
        if now < found.not_valid_before_utc:
            begins = f"{found.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
            way_out = "is the clock of this machine right?"
            raise DeployError(f"{self.folder}: its certificate begins at {begins}; {way_out}")


def is_issued_by(certificate: Certificate, authority: Certificate) -> bool:
    """Whether the authority signed it."""
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DeployError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DeployError(f"{path} is no JSON: copy the startup kit anew") from error


def _certificate(path: Path) -> Certificate:
    from cryptography.x509 import load_pem_x509_certificate

    try:
        return load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise DeployError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DeployError(f"{path} is no certificate") from error
