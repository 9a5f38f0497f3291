"""One question as it reached a node, with a fingerprint of all that its answer follows from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedstill.protocol.digests import chained


@dataclass(frozen=True)
class Asked:
    """One question as it reached the node."""

    number: int
    question: str
    content: str  # digest of the tensors that came with it
    after: str  # fingerprint of all that the node had answered before: its answer depends on that, too
    down: Mapping[str, int]  # bytes by kind
    origin: str = ""  # fingerprint of what it had learned privately before the first question
    learned: str = ""  # and of what it has learned privately for this one

    @property
    def past(self) -> str:
        """A fingerprint of all that its answer follows from, and so of what comes after it."""
        return chained(self.after, f"{self.number} {self.content} {self.learned}")
