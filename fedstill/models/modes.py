"""Puts a network into training or evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """A network in training mode, or in evaluation mode; afterwards it is in the one that it was in.

    >>> norm = nn.BatchNorm1d(1)
    >>> with in_mode(norm, False):
    ...     print(norm.training)
    False
    >>> norm.training
    True
    """
    before = model.training
    model.train(training)
    try:
        yield
    finally:
        model.train(before)
