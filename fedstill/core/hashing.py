"""Fingerprints that people compare, and hash chains of logs.

A fingerprint is printed as hexadecimal digits in groups of four. A hash chain hashes each entry together with
the hash before it, which shows that no entry was changed. It cannot show that the last entries are missing.
For that a head file next to the log records the number and hash of its last entry. The head is written after
its entry, so that it is older than the log after a kill, never newer.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from fedstill.core import private_files


def fingerprint(content: bytes) -> str:
    """Return the fingerprint of a key or a certificate: the first half of its SHA-256, 32 digits.

    >>> fingerprint(bytes(32))
    '6668 7aad f862 bd77 6c8f c18b 8e9f 8e20'
    """
    return group_digits(hashlib.sha256(content).hexdigest()[:32])


def group_digits(digits: str) -> str:
    """Separate digits into groups of four."""
    return " ".join(digits[start : start + 4] for start in range(0, len(digits), 4))


def parse_fingerprint(text: str) -> str:
    """Return the digits of a fingerprint as a person wrote it, or an empty text if it is not a fingerprint.

    >>> parse_fingerprint("6668 7AAD:f862-bd77")
    '66687aadf862bd77'
    """
    digits = re.sub(r"[\s:-]", "", text).lower()
    return digits if re.fullmatch(r"[0-9a-f]+", digits) else ""


def chain_hash(previous: str, number: int, line: str) -> str:
    """Return the hash of a log entry: BLAKE2b, 256 bits, over the previous hash, its number and its line."""
    content = f"{previous} {number} {line}".encode("utf-8", "surrogateescape")
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def write_head(path: Path, number: int, hashed: str, extra: str = "") -> None:
    """Replace the head of a log.

    Args:
        path: file of the head. It keeps its content if writing fails.
        number: number of the last entry.
        hashed: hash of the last entry.
        extra: further JSON members, with a leading comma.

    Raises:
        OSError: the file cannot be written.
    """
    private_files.replace_file(path, f'{{"entry":{number},"hash":"{hashed}"{extra}}}\n'.encode())
