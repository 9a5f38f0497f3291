"""Inputs that a server's generator makes, for people to look at and for a student to learn from."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fedstill.methods._noise import Wish
from fedstill.methods.server import Server
from fedstill.protocol.method import Method


class Imagines(Method):
    """A method whose state has a ``source`` of noise or maps, and a ``generator`` G of inputs."""

    def imagine(self, server: Server, state: Any, count: int) -> torch.Tensor | None:
        """Inputs as G makes them now, of the same noise or maps each time: ``(count, C, H, W)``."""
        return made(state.generator, state.source.draw(count, "imagine")) if state.source.ready else None

    def imagined_from(self, server: Server, state: Any, count: int) -> torch.Tensor | None:
        """The maps ``(count, H, W)`` uint8 of :meth:`imagine`, where there are any."""
        return state.source.draw(count, "imagine").maps if state.source.ready else None


def made(generator: nn.Module, w: Wish) -> torch.Tensor:
    """G(w) ``(B, C, H, W)`` in float32; G does not learn from it."""
    generator.eval()
    with torch.no_grad():
        x: torch.Tensor = generator(*w.told).float()
    generator.train()
    return x
