"""What a gate does to a release before it leaves: bound it, add noise, and name the price.

Pure functions of tensors and generators; the gate does the writing. Today there is one mechanism,
the one that does nothing and promises nothing; private ones take its place through this protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch


class Mechanism(Protocol):
    """How releases of one node are protected."""

    name: str

    def bound(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Limit how far one training record can move the release."""
        ...

    def noise(
        self, tensors: Mapping[str, torch.Tensor], generator: torch.Generator
    ) -> Mapping[str, torch.Tensor]:
        """Add randomness to the bounded release."""
        ...

    def price(self, question: str, tensors: Mapping[str, torch.Tensor]) -> float | None:
        """Epsilon of this release, or None where nothing is guaranteed."""
        ...


class NoMechanism:
    """Releases leave as they are. No guarantee: the price is None, not 0."""

    name = "none"

    def bound(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The tensors themselves."""
        return tensors

    def noise(
        self, tensors: Mapping[str, torch.Tensor], generator: torch.Generator
    ) -> Mapping[str, torch.Tensor]:
        """The tensors themselves."""
        return tensors

    def price(self, question: str, tensors: Mapping[str, torch.Tensor]) -> float | None:
        """None: no guarantee."""
        return None
