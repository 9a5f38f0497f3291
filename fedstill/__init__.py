"""Federated distillation: one central model from private data that stays in many places."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedstill.core.version import __version__

if TYPE_CHECKING:
    from fedstill.api import Outcome, distil
    from fedstill.core.compute import EngineConfig
    from fedstill.core.dataset import TensorData
    from fedstill.federation.link import LinkConfig
    from fedstill.methods.asyndgan import AsynDGANConfig
    from fedstill.methods.centralised import CentralisedConfig
    from fedstill.methods.ensemble import EnsembleConfig
    from fedstill.methods.fedad import FedADConfig
    from fedstill.methods.fedavg import FedAvgConfig
    from fedstill.methods.fedavgm import FedAvgMConfig
    from fedstill.methods.fedcg import FedCGConfig
    from fedstill.methods.feddf import FedDFConfig
    from fedstill.methods.fedgen import FedGENConfig
    from fedstill.methods.fediod import FedIODConfig
    from fedstill.methods.fedkd import FedKDConfig
    from fedstill.methods.fedmd import FedMDConfig
    from fedstill.methods.fedmd_cg import FedMDCGConfig
    from fedstill.methods.fedper import FedPerConfig
    from fedstill.methods.fedprox import FedProxConfig
    from fedstill.methods.fl_mrcm import FLMRCMConfig
    from fedstill.methods.lg_fedavg import LGFedAvgConfig
    from fedstill.methods.public_only import PublicOnlyConfig
    from fedstill.methods.standalone import StandaloneConfig
    from fedstill.node.policy import PolicyConfig
    from fedstill.privacy.config import (
        GradientsConfig,
        OutputsConfig,
        PateConfig,
        PrivacyConfig,
        StepsConfig,
    )
    from fedstill.protocol.schedule import LocalConfig
    from fedstill.tasks.config import TaskConfig

__all__ = [
    "AsynDGANConfig",
    "CentralisedConfig",
    "EngineConfig",
    "EnsembleConfig",
    "FLMRCMConfig",
    "FedADConfig",
    "FedAvgConfig",
    "FedAvgMConfig",
    "FedCGConfig",
    "FedDFConfig",
    "FedGENConfig",
    "FedIODConfig",
    "FedKDConfig",
    "FedMDCGConfig",
    "FedMDConfig",
    "FedPerConfig",
    "FedProxConfig",
    "GradientsConfig",
    "LGFedAvgConfig",
    "LinkConfig",
    "LocalConfig",
    "Outcome",
    "OutputsConfig",
    "PateConfig",
    "PolicyConfig",
    "PrivacyConfig",
    "PublicOnlyConfig",
    "StandaloneConfig",
    "StepsConfig",
    "TaskConfig",
    "TensorData",
    "__version__",
    "distil",
]

# Imported when first used: torch takes seconds, and `fedstill --help` should not wait for it.
_HOMES = {
    "AsynDGANConfig": "fedstill.methods.asyndgan",
    "CentralisedConfig": "fedstill.methods.centralised",
    "EngineConfig": "fedstill.core.compute",
    "EnsembleConfig": "fedstill.methods.ensemble",
    "FLMRCMConfig": "fedstill.methods.fl_mrcm",
    "FedADConfig": "fedstill.methods.fedad",
    "FedAvgConfig": "fedstill.methods.fedavg",
    "FedAvgMConfig": "fedstill.methods.fedavgm",
    "FedCGConfig": "fedstill.methods.fedcg",
    "FedDFConfig": "fedstill.methods.feddf",
    "FedGENConfig": "fedstill.methods.fedgen",
    "FedIODConfig": "fedstill.methods.fediod",
    "FedKDConfig": "fedstill.methods.fedkd",
    "FedMDCGConfig": "fedstill.methods.fedmd_cg",
    "FedMDConfig": "fedstill.methods.fedmd",
    "FedPerConfig": "fedstill.methods.fedper",
    "FedProxConfig": "fedstill.methods.fedprox",
    "GradientsConfig": "fedstill.privacy.config",
    "LGFedAvgConfig": "fedstill.methods.lg_fedavg",
    "LinkConfig": "fedstill.federation.link",
    "LocalConfig": "fedstill.node.training",
    "Outcome": "fedstill.api",
    "OutputsConfig": "fedstill.privacy.config",
    "PateConfig": "fedstill.privacy.config",
    "PolicyConfig": "fedstill.node.gate",
    "PrivacyConfig": "fedstill.privacy.config",
    "PublicOnlyConfig": "fedstill.methods.public_only",
    "StandaloneConfig": "fedstill.methods.standalone",
    "StepsConfig": "fedstill.privacy.config",
    "TaskConfig": "fedstill.tasks.config",
    "TensorData": "fedstill.core.dataset",
    "distil": "fedstill.api",
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'fedstill' has no attribute {name!r}")
