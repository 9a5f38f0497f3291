"""Fingerprints as people read them out to each other: hexadecimal digits in groups of four.

Hashes of a log's entries, each over the one before, and a head that says how far the log had come.

Hashes show that nothing was changed, and cannot show that the end is gone: a head beside the log does. It is
written after the entry that it tells of, so that a kill at any moment leaves it older, never newer.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from fedstill.core import private_files


def fingerprint(content: bytes) -> str:
    """Of a key or a certificate: the first half of its SHA-256, 32 digits.

    >>> fingerprint(bytes(32))
    '6668 7aad f862 bd77 6c8f c18b 8e9f 8e20'
    """
    return group_digits(hashlib.sha256(content).hexdigest()[:32])


def group_digits(digits: str) -> str:
    """Digits in groups of four."""
    return " ".join(digits[place : place + 4] for place in range(0, len(digits), 4))


def parse_fingerprint(text: str) -> str:
    """The digits of a fingerprint as somebody wrote it down; empty where it is none.

    >>> parse_fingerprint("6668 7AAD:f862-bd77")
    '66687aadf862bd77'
    """
    found = re.sub(r"[\s:-]", "", text).lower()
    return found if re.fullmatch(r"[0-9a-f]+", found) else ""


def chain_hash(previous: str, number: int, line: str) -> str:
    """The hash of an entry: BLAKE2b, 256 bits, over the hash before it, its number and its line."""
    told = f"{previous} {number} {line}".encode("utf-8", "surrogateescape")
    return hashlib.blake2b(told, digest_size=32).hexdigest()


def write_head(path: Path, number: int, hashed: str, extra: str = "") -> None:
    """Put a new head in the place of the one in a file, which stays where that fails (OSError); with ``extra``
    of what a log's head tells, as JSON."""
    private_files.replace_file(path, f'{{"entry":{number},"hash":"{hashed}"{extra}}}\n'.encode())


def read_head(path: Path) -> tuple[int, str] | None:
    """Number and hash in a head, or None if there is no file; OSError or ValueError where it is none."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        number, hashed = told["entry"], told["hash"]
    except FileNotFoundError:
        return None
    except (LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"it is none: {error!r}") from error
    if type(number) is not int or number < 0 or not isinstance(hashed, str):
        raise ValueError("its entry has no number or no hash that an entry could have")
    return number, hashed
