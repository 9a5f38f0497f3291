"""Files that carry a signature: whoever reads one knows that no byte has changed, and whose key signed it.

Beside ``FILE`` lies ``FILE.sig``: a few hundred bytes of JSON with the signer's public key and the Ed25519
signature of all bytes of the file. Nothing of the file itself is parsed before that has been verified. A key
alone says nothing about who holds it: its fingerprint has to be compared, once, by another way, as the phone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.core import private_files
from fedstill.core.errors import BundleError
from fedstill.core.hashing import digits, grouped
from fedstill.core.hashing import fingerprint as fingerprint

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

ALGORITHM = "Ed25519"
KEY_BYTES, SIGNATURE_BYTES = 32, 64
MOST_SIGNATURE = 4096  # bytes of a .sig file
MOST_PEM = 16_384  # bytes of a key's file


def signature_path(path: Path) -> Path:
    """Where the signature of a file lies.

    >>> signature_path(Path("queries.safetensors")).name
    'queries.safetensors.sig'
    """
    return path.with_name(path.name + ".sig")


def own_key(path: Path) -> Ed25519PrivateKey:
    """The private key in a PEM file that only its owner may read; made at first use.

    The public key is written beside it, as ``.pub``, for the others.

    Raises:
        BundleError: the file holds no such key, or others may read it.
    """
    _require()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    if not path.exists():
        _make_key(path)
    if path.stat().st_mode & 0o077:
        raise BundleError(f"{path} can be read by others: chmod 600 {path}")
    try:
        key = serialization.load_pem_private_key(_small(path), None)
    except (ValueError, TypeError) as error:
        raise BundleError(f"{path} holds no private key in PEM form without a password") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise BundleError(f"{path} holds a key of another kind (expected {ALGORITHM})")
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    beside = path.with_suffix(".pub")
    if not beside.exists() or beside.read_bytes() != public:
        private_files.replace(beside, public)
    return key


def _make_key(path: Path) -> None:
    """A new private key, whole or not at all; one that another process makes meanwhile stays."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    private_files.replace(part, Ed25519PrivateKey.generate().private_bytes(*form), sync=True)
    try:
        os.link(part, path)
    except FileExistsError:
        pass
    except OSError as error:
        raise BundleError(
            f"{path} cannot be made, as its disk has no hard links: {error.strerror}"
        ) from error
    finally:
        part.unlink()
    private_files.sync_folder(path.parent)


def public_of(key: Ed25519PrivateKey) -> bytes:
    """The public key of a private one, 32 bytes."""
    return key.public_key().public_bytes_raw()


def expected(text: str) -> str:
    """The fingerprint of a key that someone names: by its PEM file, or as it was read out over the phone.

    Raises:
        BundleError: it is neither.

    >>> expected("66687AADF862BD776C8FC18B8E9F8E20")
    '6668 7aad f862 bd77 6c8f c18b 8e9f 8e20'
    """
    if len(found := digits(text)) == 32:
        return grouped(found)
    if not Path(text).is_file():
        raise BundleError(f"{text!r} is no public key (expected a .pub file, or a fingerprint of 32 digits)")
    return fingerprint(read_public(Path(text)))


def read_public(path: Path) -> bytes:
    """The public key in a PEM file, 32 bytes.

    Raises:
        BundleError: there is none.
    """
    _require()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = serialization.load_pem_public_key(_small(path))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise BundleError(f"{path} holds no public key in PEM form") from error
    if not isinstance(key, Ed25519PublicKey):
        raise BundleError(f"{path} holds a key of another kind (expected {ALGORITHM})")
    return key.public_bytes_raw()


def write(path: Path, blob: bytes, key: Ed25519PrivateKey) -> None:
    """Write a file and its signature, each in one move: whoever is stopped in between leaves no half file.
    They are their owner's alone, to be handed on by hand: nothing in them is encrypted.

    Ed25519 draws nothing: the same bytes and the same key give the same signature.
    """
    private_files.replace(path, blob, sync=True)
    private_files.replace(signature_path(path), _encoded(public_of(key), key.sign(blob)), sync=True)


def require_own(path: Path, signer: str) -> None:
    """Refuse to write over a file that another key has signed.

    Raises:
        BundleError: one has, or nobody can tell.
    """
    beside = signature_path(path)
    if beside.exists() and fingerprint(_read_signature(beside)[0]) != signer:
        raise BundleError(f"{path} is signed by another key than this one's: choose another place")


def read(path: Path, signers: Collection[str] | None = None) -> tuple[bytes, str]:
    """The bytes of a file, and the fingerprint of the key that signed it, once its signature is found good.

    Args:
        signers: fingerprints of the keys of which one must have signed; None is any key.

    Raises:
        BundleError: there is no such file or no signature, the signature is not one of these bytes, or it is
            of a key that is not expected.
    """
    _require()
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if not path.is_file():
        raise BundleError(f"{path}: there is no such file")
    key, signature = _read_signature(signature_path(path))
    signer = fingerprint(key)
    if signers is not None and signer not in signers:
        raise BundleError(f"{path} is signed by a key that is not expected here: {signer}")
    blob = path.read_bytes()
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, blob)
    except (InvalidSignature, ValueError) as error:
        raise BundleError(
            f"{path} does not fit its signature: one of the two was changed, or belongs to another file"
        ) from error
    return blob, signer


def _read_signature(path: Path) -> tuple[bytes, bytes]:
    """Public key and signature in a ``.sig`` file, which has one form: no other bytes say the same."""
    if not path.is_file():
        raise BundleError(f"{path} is missing: a file without its signature is not read")
    with path.open("rb") as file:
        text = file.read(MOST_SIGNATURE + 1)
    try:
        table = json.loads(text)
        parts = bytes.fromhex(table["key"]), bytes.fromhex(table["signature"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise BundleError(f"{path} is no signature that fedstill has written") from error
    if (len(parts[0]), len(parts[1])) != (KEY_BYTES, SIGNATURE_BYTES) or text != _encoded(*parts):
        raise BundleError(f"{path} is no signature that fedstill has written")
    return parts


def _encoded(key: bytes, signature: bytes) -> bytes:
    table = {"algorithm": ALGORITHM, "key": key.hex(), "signature": signature.hex()}
    return (json.dumps(table) + "\n").encode()


def _require() -> None:
    if importlib.util.find_spec("cryptography") is None:
        raise BundleError("files cannot be signed without cryptography: pip install 'fedstill[offline]'")


def _small(path: Path) -> bytes:
    if not path.is_file():
        raise BundleError(f"{path}: there is no such file")
    with path.open("rb") as file:
        return file.read(MOST_PEM)
