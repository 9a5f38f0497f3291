"""What tells architectures apart: layers, their options and their tensors; never their weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedstill.node.model_setup import architecture_hash


class Own(nn.Module):
    """A layer that says nothing of its tensors."""

    def __init__(self, width: int, kind: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))
        self.register_buffer("seen", torch.zeros(1, dtype=kind))


@pytest.mark.parametrize("other", [Own(4), Own(3, torch.float64), nn.Linear(3, 3)])
def test_architecture_key_ignores_learned_values(other: nn.Module) -> None:
    assert architecture_hash(Own(3)) == architecture_hash(Own(3)) != architecture_hash(other)
