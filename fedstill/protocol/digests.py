"""Hashes of named tensors (queries, releases, weights, data) and of histories of queries."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch


def digest(query: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a 128-bit hash of a query, or of other tensors under a label: equal for equal names, shapes and
    values.
    """
    hashed = hashlib.blake2b(digest_size=16)
    for piece in _encode([query], tensors):
        hashed.update(piece)
    return hashed.hexdigest()


def sha256_digest(tensors: Mapping[str, torch.Tensor], *words: str) -> str:
    """Return a 256-bit hash of tensors and words, for inputs that an attacker can choose."""
    hashed = hashlib.sha256()
    for piece in _encode(list(words), tensors):
        hashed.update(piece)
    return hashed.hexdigest()


def chain_digest(previous: str, content: str) -> str:
    """Return a hash of a history: of the previous history's hash and the next content."""
    return hashlib.blake2b(f"{previous} {content}".encode(), digest_size=16).hexdigest()


def keyed_digest(secret: int, content: str) -> str:
    """Return a hash of a content that cannot be computed without the secret.

    Backups and audit logs may contain it. From an unkeyed hash of records anyone could test guesses of them.
    """
    key = hashlib.blake2b(str(secret).encode(), digest_size=32).digest()
    return hashlib.blake2b(content.encode(), key=key, digest_size=16).hexdigest()


def _encode(words: list[str], tensors: Mapping[str, torch.Tensor]) -> Iterator[Any]:
    """Yield words and tensors as bytes with their lengths, so that no two inputs give the same bytes."""
    yield _length_prefixed(*words)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        yield _length_prefixed(name, str(tensor.dtype), *tensor.shape)
        yield tensor.view(-1).view(torch.uint8).numpy().data


@lru_cache(maxsize=64)
def _length_prefixed(*words: str | int) -> bytes:
    text = json.dumps(words).encode()
    return len(text).to_bytes(8, "little") + text
