"""Startup kits as far as they prove who a node is: an authority, and certificates that it has signed."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

NOW = datetime.now(timezone.utc)


class Authority:
    """Signs certificates, and writes kits."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = self._sign("root", self._key.public_key(), "root", 1)

    def write(
        self, folder: Path, name: str, days: int = 1, *, with_rsa: bool = False, role: str = ""
    ) -> None:
        """A kit in a node's folder, in the name of a node."""
        startup = folder / "kit" / "startup"
        startup.mkdir(parents=True, exist_ok=True)
        key = rsa.generate_private_key(65537, 2048) if with_rsa else ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(name, key.public_key(), "root", days, role)
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (startup / "client.key").write_bytes(private)
        (startup / "client.crt").write_bytes(certificate.public_bytes(Encoding.PEM))
        (startup / "rootCA.pem").write_bytes(self._certificate.public_bytes(Encoding.PEM))
        (startup / "fed_client.json").write_text(json.dumps({"servers": [{"identity": "server"}]}))

    def _sign(
        self,
        name: str,
        public: ec.EllipticCurvePublicKey | rsa.RSAPublicKey,
        issuer: str,
        days: int,
        role: str = "",
    ) -> x509.Certificate:
        named = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, each)]) for each in (name, issuer)]
        if role:
            named[0] = x509.Name([*named[0], x509.NameAttribute(NameOID.UNSTRUCTURED_NAME, role)])
        builder = x509.CertificateBuilder().subject_name(named[0]).issuer_name(named[1]).public_key(public)
        until = NOW + timedelta(days=days)
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(
            until - timedelta(days=9)
        )
        return builder.not_valid_after(until).sign(self._key, SHA256())
