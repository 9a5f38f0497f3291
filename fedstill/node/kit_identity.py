"""A node's identity from its startup kit: it signs the node's claims and verifies those of others.

The authority whose certificate is in every kit of a federation decides who may use a name: each node has a
certificate for its own name, and the key to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.core.errors import DeployError, NodeDataError
from fedstill.core.startup_kit import StartupKit, is_issued_by

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

MAX_CARD_BYTES = 20_000


class KitIdentity:
    """Certificate, key and authority of a node's startup kit.

    Raises:
        OwnDataError: the folder holds no such kit.
    """

    def __init__(self, kit: Path) -> None:
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        startup = StartupKit(kit)
        try:
            self._pem = startup.path("client.crt").read_bytes()
            self._key = load_pem_private_key(startup.path("client.key").read_bytes(), None)
            self._authority = startup.authority
            self._servers = {str(server["identity"]) for server in startup.flare_setting("client", "servers")}
        except (DeployError, OSError, ValueError, TypeError, LookupError) as error:
            raise NodeDataError(f"{kit} holds no certificate, key and authority: {error}") from error

    def sign(self, claim: bytes, value: bytes) -> bytes:
        """Return a card: a value, this node's certificate, and its signature of the claim."""
        from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
        from cryptography.hazmat.primitives.hashes import SHA256

        if isinstance(self._key, rsa.RSAPrivateKey):
            signature = self._key.sign(claim, padding.PKCS1v15(), SHA256())
        elif isinstance(self._key, ec.EllipticCurvePrivateKey):
            signature = self._key.sign(claim, ec.ECDSA(SHA256()))
        else:
            raise NodeDataError("the kit's key is neither RSA nor elliptic-curve")
        card = {"value": value.hex(), "certificate": self._pem.decode(), "signature": signature.hex()}
        return json.dumps(card).encode()

    def verify(self, card: bytes, name: str, claim: Callable[[bytes], bytes]) -> bytes:
        """Return the value of a card signed by the node of this name.

        Args:
            card: the received card.
            name: the expected node.
            claim: returns the claim that must have been signed, given the value.

        Raises:
            ValueError: it is not a card, or the signature is not valid.
        """
        from cryptography import x509

        if len(card) > MAX_CARD_BYTES:
            raise ValueError(f"it has {len(card)} bytes (expected {MAX_CARD_BYTES} or less)")
        try:
            fields = json.loads(card)
            value, signature = bytes.fromhex(fields["value"]), bytes.fromhex(fields["signature"])
            certificate = x509.load_pem_x509_certificate(fields["certificate"].encode())
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError("it is not a card") from error
        self._require_issued(certificate, name)
        _verify(certificate, signature, claim(value))
        return value

    def _require_issued(self, certificate: Certificate, name: str) -> None:
        from cryptography.x509.oid import NameOID

        if not is_issued_by(certificate, self._authority):
            raise ValueError("its certificate was not issued by this federation's authority")
        if (
            not certificate.not_valid_before_utc
            <= datetime.now(timezone.utc)
            <= certificate.not_valid_after_utc
        ):
            raise ValueError("its certificate has expired")
        names = [
            attribute.value for attribute in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        ]
        if names != [name]:
            raise ValueError(f"its certificate names {names}")
        # The authority signs these as well, and the server holds both.
        if name in self._servers or certificate.subject.get_attributes_for_oid(NameOID.UNSTRUCTURED_NAME):
            raise ValueError("its certificate is a server's or an administrator's, not a node's")


def _verify(certificate: Certificate, signature: bytes, claim: bytes) -> None:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
    from cryptography.hazmat.primitives.hashes import SHA256

    public = certificate.public_key()
    try:
        if isinstance(public, rsa.RSAPublicKey):
            public.verify(signature, claim, padding.PKCS1v15(), SHA256())
        elif isinstance(public, ec.EllipticCurvePublicKey):
            public.verify(signature, claim, ec.ECDSA(SHA256()))
        else:
            raise ValueError("its key is neither RSA nor elliptic-curve")
    except InvalidSignature as error:
        raise ValueError("its signature does not match its certificate") from error
