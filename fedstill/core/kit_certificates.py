"""Certificates in the startup kit of a site."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.core.errors import DeployError
from fedstill.core.fingerprints import fingerprint

if TYPE_CHECKING:
    from cryptography import x509


def valid_until(kit: Path) -> datetime:
    """When the certificate of a kit runs out.

    Raises:
        DeployError: the folder is no startup kit.
    """
    return certificate(kit).not_valid_after_utc


def certificate(kit: Path) -> x509.Certificate:
    from cryptography import x509

    for name in ("client.crt", "server.crt"):
        path = kit / "startup" / name
        if path.exists():
            return x509.load_pem_x509_certificate(path.read_bytes())
    raise DeployError(f"{kit} is no startup kit: it has no certificate in startup/")


def authority(kit: Path) -> str:
    """The fingerprint of the authority in a kit, by whose certificates server and nodes know each other;
    empty where there is none.

    Raises:
        DeployError: what is there is no certificate.
    """
    path = kit / "startup" / "rootCA.pem"
    if not path.is_file():
        return ""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise DeployError(f"{path} is no certificate") from error
    return fingerprint(found.public_bytes(Encoding.DER))
