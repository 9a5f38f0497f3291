"""Signed files: a signature proves that no byte was changed, and which key signed the file.

The signature of ``FILE`` is in ``FILE.sig``: a few hundred bytes of JSON with the signer's public key and the
Ed25519 signature of all bytes of the file. The file is not parsed before the signature has been verified. A
key does not prove its owner's identity: its fingerprint has to be compared once over another channel, such as
the phone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.core import hashing, private_files
from fedstill.core.errors import QueryFileError
from fedstill.core.hashing import fingerprint as fingerprint
from fedstill.core.hashing import group_digits

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

ALGORITHM = "Ed25519"
KEY_BYTES, SIGNATURE_BYTES = 32, 64
MAX_SIGNATURE_FILE = 4096  # bytes of a .sig file
MAX_KEY_FILE = 16_384  # bytes of a key's file


def signature_path(path: Path) -> Path:
    """Return the path of a file's signature.

    >>> signature_path(Path("queries.safetensors")).name
    'queries.safetensors.sig'
    """
    return path.with_name(path.name + ".sig")


def load_or_create_key(path: Path) -> Ed25519PrivateKey:
    """Load the private key in a PEM file that only its owner may read; create it if it does not exist.

    The public key is written to a file with the suffix ``.pub`` in the same folder.

    Raises:
        QueryFileError: the file holds no such key, or others may read it.
    """
    _require_cryptography()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    if not path.exists():
        _make_key(path)
    if path.stat().st_mode & 0o077:
        raise QueryFileError(f"{path} can be read by others: chmod 600 {path}")
    try:
        key = serialization.load_pem_private_key(_read_key_file(path), None)
    except (ValueError, TypeError) as error:
        raise QueryFileError(f"{path} holds no private key in PEM form without a password") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise QueryFileError(f"{path} holds a key of another kind (expected {ALGORITHM})")
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    public_path = path.with_suffix(".pub")
    if not public_path.exists() or public_path.read_bytes() != public:
        private_files.replace_file(public_path, public)
    return key


def _make_key(path: Path) -> None:
    """Create a private key atomically; a key that another process creates meanwhile is kept."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    private_files.replace_file(part, Ed25519PrivateKey.generate().private_bytes(*form), sync=True)
    try:
        os.link(part, path)
    except FileExistsError:
        pass
    except OSError as error:
        raise QueryFileError(
            f"{path} cannot be made, as its disk has no hard links: {error.strerror}"
        ) from error
    finally:
        part.unlink()
    private_files.sync_folder(path.parent)


def public_key_bytes(key: Ed25519PrivateKey) -> bytes:
    """Return the public key of a private key, 32 bytes."""
    return key.public_key().public_bytes_raw()


def parse_fingerprint(text: str) -> str:
    """Return the fingerprint of a key given as a PEM file or as a typed fingerprint.

    Raises:
        QueryFileError: it is neither.

    >>> parse_fingerprint("66687AADF862BD776C8FC18B8E9F8E20")
    '6668 7aad f862 bd77 6c8f c18b 8e9f 8e20'
    """
    if len(found := hashing.parse_fingerprint(text)) == 32:
        return group_digits(found)
    if not Path(text).is_file():
        raise QueryFileError(
            f"{text!r} is no public key (expected a .pub file, or a fingerprint of 32 digits)"
        )
    return fingerprint(read_public_key(Path(text)))


def read_public_key(path: Path) -> bytes:
    """Read the public key in a PEM file, 32 bytes.

    Raises:
        QueryFileError: the file holds none.
    """
    _require_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = serialization.load_pem_public_key(_read_key_file(path))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise QueryFileError(f"{path} holds no public key in PEM form") from error
    if not isinstance(key, Ed25519PublicKey):
        raise QueryFileError(f"{path} holds a key of another kind (expected {ALGORITHM})")
    return key.public_bytes_raw()


def write(path: Path, blob: bytes, key: Ed25519PrivateKey) -> None:
    """Write a file and its signature, each atomically.

    Only their owner may read them, as nothing is encrypted. Ed25519 is deterministic: equal bytes and an
    equal key give an equal signature.
    """
    private_files.replace_file(path, blob, sync=True)
    private_files.replace_file(
        signature_path(path), _signature_file_bytes(public_key_bytes(key), key.sign(blob)), sync=True
    )


def require_same_signer(path: Path, signer: str) -> None:
    """Refuse to overwrite a file that another key has signed.

    Raises:
        QueryFileError: another key has signed it, or its signature cannot be read.
    """
    public_path = signature_path(path)
    if public_path.exists() and fingerprint(_read_signature(public_path)[0]) != signer:
        raise QueryFileError(f"{path} is signed by another key: choose another path")


def read(path: Path, signers: Collection[str] | None = None) -> tuple[bytes, str]:
    """Return the bytes of a file and the fingerprint of its signer, after verifying the signature.

    Args:
        signers: fingerprints of accepted keys; None accepts any key.

    Raises:
        QueryFileError: the file or its signature does not exist, the signature is invalid, or the key is
            unexpected.
    """
    _require_cryptography()
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if not path.is_file():
        raise QueryFileError(f"file not found: {path}")
    key, signature = _read_signature(signature_path(path))
    signer = fingerprint(key)
    if signers is not None and signer not in signers:
        raise QueryFileError(f"{path} is signed by a key that is not expected here: {signer}")
    blob = path.read_bytes()
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, blob)
    except (InvalidSignature, ValueError) as error:
        raise QueryFileError(
            f"{path} does not fit its signature: one of the two was changed, or belongs to another file"
        ) from error
    return blob, signer


def _read_signature(path: Path) -> tuple[bytes, bytes]:
    """Return public key and signature of a ``.sig`` file. Only its canonical form is accepted."""
    if not path.is_file():
        raise QueryFileError(f"{path} is missing: a file without its signature is not read")
    with path.open("rb") as file:
        text = file.read(MAX_SIGNATURE_FILE + 1)
    try:
        table = json.loads(text)
        parts = bytes.fromhex(table["key"]), bytes.fromhex(table["signature"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise QueryFileError(f"{path} is no signature that fedstill has written") from error
    if (len(parts[0]), len(parts[1])) != (KEY_BYTES, SIGNATURE_BYTES) or text != _signature_file_bytes(
        *parts
    ):
        raise QueryFileError(f"{path} is no signature that fedstill has written")
    return parts


def _signature_file_bytes(key: bytes, signature: bytes) -> bytes:
    table = {"algorithm": ALGORITHM, "key": key.hex(), "signature": signature.hex()}
    return (json.dumps(table) + "\n").encode()


def _require_cryptography() -> None:
    if importlib.util.find_spec("cryptography") is None:
        raise QueryFileError("files cannot be signed without cryptography: pip install 'fedstill[offline]'")


def _read_key_file(path: Path) -> bytes:
    if not path.is_file():
        raise QueryFileError(f"file not found: {path}")
    with path.open("rb") as file:
        return file.read(MAX_KEY_FILE)
