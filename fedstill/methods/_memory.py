"""The server's answer memory: inputs it asked about and what the nodes, ensembled, answered."""

from __future__ import annotations

from typing import Any

import torch


class AnswerMemory:
    """The last ``size`` inputs with their targets; a ring, so adding costs one copy.

    Args:
        size: inputs kept at most.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.added = 0
        self._inputs: torch.Tensor | None = None
        self._targets: torch.Tensor | None = None

    def __len__(self) -> int:
        return min(self.added, self.size)

    def add(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Remember ``inputs`` (B, ...) with ``targets`` (B, ...), in place of the oldest."""
        self._inputs = self._room(self._inputs, inputs)
        self._targets = self._room(self._targets, targets)
        slots = (self.added + torch.arange(len(inputs), device=inputs.device)) % self.size
        self._inputs[slots] = inputs
        self._targets[slots] = targets
        self.added += len(inputs)

    def sample(self, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """``count`` remembered pairs, with replacement; or all, each once, if they are no more than that.

        Raises:
            LookupError: nothing is remembered yet.
        """
        if self._inputs is None or self._targets is None:
            raise LookupError("the answer memory is empty: ask the nodes first")
        if count >= len(self):
            return self._inputs[: len(self)], self._targets[: len(self)]
        chosen = torch.randint(len(self), (count,), generator=generator).to(self._inputs.device)
        return self._inputs[chosen], self._targets[chosen]

    def state(self) -> dict[str, Any]:
        """Its content, for a run to go on."""
        used = len(self)
        inputs = None if self._inputs is None else self._inputs[:used]
        targets = None if self._targets is None else self._targets[:used]
        return {"added": self.added, "inputs": inputs, "targets": targets}

    def load(self, state: dict[str, Any], device: torch.device) -> None:
        """Take up a remembered content."""
        self.added = state["added"]
        self._inputs = None if state["inputs"] is None else state["inputs"].to(device)
        self._targets = None if state["targets"] is None else state["targets"].to(device)

    def _room(self, kept: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        """Memory grows by doubling up to its size: a short run does not pay for a long one's."""
        wanted = min(self.size, self.added + len(new))
        if kept is not None and len(kept) >= wanted:
            return kept
        length = min(self.size, max(wanted, 2 * (0 if kept is None else len(kept))))
        grown = new.new_empty((length, *new.shape[1:]))
        if kept is not None:
            grown[: len(kept)] = kept
        return grown
