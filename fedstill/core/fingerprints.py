"""Fingerprints as people read them out to each other: hexadecimal digits in groups of four."""

from __future__ import annotations

import hashlib
import re


def fingerprint(content: bytes) -> str:
    """Of a key or a certificate: the first half of its SHA-256, 32 digits.

    >>> fingerprint(bytes(32))
    '6668 7aad f862 bd77 6c8f c18b 8e9f 8e20'
    """
    return grouped(hashlib.sha256(content).hexdigest()[:32])


def grouped(digits: str) -> str:
    """Digits in groups of four."""
    return " ".join(digits[place : place + 4] for place in range(0, len(digits), 4))


def digits(text: str) -> str:
    """The digits of a fingerprint as somebody wrote it down; empty where it is none.

    >>> digits("6668 7AAD:f862-bd77")
    '66687aadf862bd77'
    """
    found = re.sub(r"[\s:-]", "", text).lower()
    return found if re.fullmatch(r"[0-9a-f]+", found) else ""
