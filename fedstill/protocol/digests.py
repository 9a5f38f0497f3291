"""Fingerprints of queries, releases and of all that came before them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def digest(query: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """A short fingerprint of a query: same query, names, shapes and values, same digest."""
    hashed = hashlib.blake2b(digest_size=16)
    for piece in _pieces([query], tensors):
        hashed.update(piece)
    return hashed.hexdigest()


def fingerprint(tensors: Mapping[str, torch.Tensor], *words: str) -> str:
    """One of 256 bits, for where somebody who chooses tensors and words must not find two alike."""
    hashed = hashlib.sha256()
    for piece in _pieces(list(words), tensors):
        hashed.update(piece)
    return hashed.hexdigest()


def chain_digest(before: str, content: str) -> str:
    """A fingerprint of everything up to and including one content."""
    return hashlib.blake2b(f"{before} {content}".encode(), digest_size=16).hexdigest()


def keyed_digest(secret: int, content: str) -> str:
    """A fingerprint that nobody without the secret can make: by a plain one of records, which a backup or an
    audit log may show, anybody could try out what they are."""
    key = hashlib.blake2b(str(secret).encode(), digest_size=32).digest()
    return hashlib.blake2b(content.encode(), key=key, digest_size=16).hexdigest()


def _pieces(words: list[str], tensors: Mapping[str, torch.Tensor]) -> Iterator[Any]:
    """Words and tensors as bytes, of which no two give the same: each part says first how long it is."""
    yield _told(words)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        yield _told([name, str(tensor.dtype), *tensor.shape])
        yield tensor.view(-1).view(torch.uint8).numpy().data


def _told(words: list[Any]) -> bytes:
    text = json.dumps(words).encode()
    return len(text).to_bytes(8, "little") + text
