"""Fingerprints of questions, releases and of all that came before them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch


def digest(question: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """A short fingerprint of a question: same question, names, shapes and values, same digest."""
    hashed = hashlib.blake2b(question.encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        hashed.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        hashed.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def chained(before: str, content: str) -> str:
    """A fingerprint of everything up to and including one content."""
    return hashlib.blake2b(f"{before} {content}".encode(), digest_size=16).hexdigest()
