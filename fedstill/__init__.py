"""Federated distillation: one central model from private data that stays in many places."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedstill.api import Outcome, distil
    from fedstill.compute import EngineConfig
    from fedstill.data.dataset import TensorData
    from fedstill.methods.fediod import FedIODConfig
    from fedstill.node.gate import PolicyConfig
    from fedstill.node.training import LocalConfig

__version__ = "0.1.0"
__all__ = [
    "EngineConfig",
    "FedIODConfig",
    "LocalConfig",
    "Outcome",
    "PolicyConfig",
    "TensorData",
    "distil",
]

# Imported when first used: torch takes seconds, and `fedstill --help` should not wait for it.
_HOMES = {
    "EngineConfig": "fedstill.compute",
    "FedIODConfig": "fedstill.methods.fediod",
    "LocalConfig": "fedstill.node.training",
    "Outcome": "fedstill.api",
    "PolicyConfig": "fedstill.node.gate",
    "TensorData": "fedstill.data.dataset",
    "distil": "fedstill.api",
}


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'fedstill' has no attribute {name!r}")
