"""Signed files: a changed byte, a missing signature or a foreign key is reported before parsing."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path

import pytest

from fedstill.core.errors import QueryFileError
from fedstill.federation import signed_files

pytest.importorskip("cryptography")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    signed_files.write(
        tmp_path / "file", b"what was said", signed_files.load_or_create_key(tmp_path / "a.key")
    )
    return tmp_path / "file"


def test_creates_private_and_public_key_once(tmp_path: Path) -> None:
    key = signed_files.public_key_bytes(signed_files.load_or_create_key(tmp_path / "a.key"))
    assert (tmp_path / "a.key").stat().st_mode & 0o777 == 0o600
    assert signed_files.public_key_bytes(signed_files.load_or_create_key(tmp_path / "a.key")) == key
    assert signed_files.read_public_key(tmp_path / "a.pub") == key
    assert signed_files.public_key_bytes(signed_files.load_or_create_key(tmp_path / "b.key")) != key
    assert len(signed_files.fingerprint(key).replace(" ", "")) == 32


def test_creates_key_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            signed_files.load_or_create_key(tmp_path / "a.key")
    assert not (tmp_path / "a.key").exists()
    link = os.link

    def slower(part: Path, path: Path) -> None:
        """Simulate another process that creates a key at the same time."""
        (tmp_path / "b.key").rename(path)
        link(part, path)

    theirs = signed_files.public_key_bytes(signed_files.load_or_create_key(tmp_path / "b.key"))
    monkeypatch.setattr(os, "link", slower)
    assert signed_files.public_key_bytes(signed_files.load_or_create_key(tmp_path / "a.key")) == theirs


def test_replaces_stale_public_key(tmp_path: Path) -> None:
    keys = {
        name: signed_files.public_key_bytes(signed_files.load_or_create_key(tmp_path / f"{name}.key"))
        for name in "ab"
    }
    mine, other = tmp_path / "a.pub", tmp_path / "b.pub"
    swapped = other.read_bytes(), mine.read_bytes()
    mine.write_bytes(swapped[0])
    other.write_bytes(swapped[1])
    for name, key in keys.items():
        signed_files.load_or_create_key(tmp_path / f"{name}.key")
        assert signed_files.read_public_key(tmp_path / f"{name}.pub") == key


def test_rejects_key_readable_by_others(tmp_path: Path) -> None:
    signed_files.load_or_create_key(tmp_path / "a.key")
    (tmp_path / "a.key").chmod(0o644)
    with pytest.raises(QueryFileError, match="chmod 600"):
        signed_files.load_or_create_key(tmp_path / "a.key")


@pytest.mark.parametrize(
    "text", [b"", b"nothing", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"]
)
def test_rejects_files_without_key(tmp_path: Path, text: bytes) -> None:
    for name in ("a.key", "a.pub"):
        (tmp_path / name).write_bytes(text)
        (tmp_path / name).chmod(0o600)
    with pytest.raises(QueryFileError, match="private key"):
        signed_files.load_or_create_key(tmp_path / "a.key")
    with pytest.raises(QueryFileError, match="public key"):
        signed_files.read_public_key(tmp_path / "a.pub")


def test_reads_signed_file_of_expected_key(file: Path) -> None:
    mine = signed_files.parse_fingerprint(str(file.with_name("a.pub")))
    assert signed_files.read(file) == (b"what was said", mine)
    assert signed_files.read(file, [mine]) == (b"what was said", mine)
    other = signed_files.fingerprint(
        signed_files.public_key_bytes(signed_files.load_or_create_key(file.with_name("b.key")))
    )
    with pytest.raises(QueryFileError, match=r"not expected here: .{39}$"):
        signed_files.read(file, [other])
    with pytest.raises(QueryFileError, match="not expected"):
        signed_files.read(file, [])


def test_parses_fingerprint_or_key_file(file: Path) -> None:
    mine = signed_files.fingerprint(signed_files.read_public_key(file.with_name("a.pub")))
    for spoken in (mine, mine.upper(), mine.replace(" ", ""), mine.replace(" ", "-")):
        assert signed_files.parse_fingerprint(spoken) == mine
    for wrong in (mine[:-1], "g" + mine[1:], "", str(file.with_name("c.pub"))):
        with pytest.raises(QueryFileError, match="public key"):
            signed_files.parse_fingerprint(wrong)


def test_rejects_any_changed_bit(file: Path) -> None:
    """Any changed bit of the file or its signature, which has a unique form: no capitals, no other spaces."""
    signature = signed_files.signature_path(file)
    for path, size in ((file, 13), (signature, 245)):
        whole = path.read_bytes()
        assert len(whole) == size
        taken = []
        for bit in range(8 * size):
            blob = bytearray(whole)
            blob[bit // 8] ^= 1 << bit % 8
            path.write_bytes(blob)
            with contextlib.suppress(QueryFileError):
                signed_files.read(file)
                taken.append(bit)
        path.write_bytes(whole)
        assert not taken, path
    signed_files.read(file)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "null", "[" * 4000, '{"algorithm": "none", "key": "", "signature": ""}',
     '{"algorithm": "Ed25519", "key": 3, "signature": "zz"}', "x" * 10_000],
)  # fmt: skip
def test_rejects_malformed_signatures(file: Path, text: str) -> None:
    signed_files.signature_path(file).write_text(text)
    with pytest.raises(QueryFileError, match="no signature"):
        signed_files.read(file)


def test_reports_missing_files(file: Path) -> None:
    signed_files.signature_path(file).unlink()
    with pytest.raises(QueryFileError, match=r"file\.sig is missing"):
        signed_files.read(file)
    file.unlink()
    with pytest.raises(QueryFileError, match="not found"):
        signed_files.read(file)


def test_openssl_verifies_signature(file: Path, tmp_path: Path) -> None:
    """So that the signature can be verified without fedstill."""
    table = json.loads(signed_files.signature_path(file).read_text())
    (tmp_path / "raw").write_bytes(bytes.fromhex(table["signature"]))
    try:
        done = subprocess.run(
            ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", "a.pub",
             "-rawin", "-in", "file", "-sigfile", "raw"],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        pytest.skip("no openssl here")
    if "rawin" in done.stderr:
        pytest.skip("this openssl is too old")
    assert "Verified Successfully" in done.stdout, done.stderr
