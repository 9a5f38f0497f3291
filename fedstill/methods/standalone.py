"""Standalone: every node trains alone and nothing is shared. Baseline of every comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedstill.protocol.method import Method


@dataclass(frozen=True)
class Standalone(Method):
    """Standalone training, with the nodes' options."""

    title: ClassVar[str] = "Standalone"
    paper: ClassVar[str] = "local training only"
    evaluated_model: ClassVar[Literal["nodes"]] = "nodes"
