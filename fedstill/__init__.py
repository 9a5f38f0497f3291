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
    from fedstill.methods.asyndgan import AsynDGAN
    from fedstill.methods.centralised import Centralised
    from fedstill.methods.ensemble import NodeEnsemble
    from fedstill.methods.fedad import FedAD
    from fedstill.methods.fedavg import FedAvg
    from fedstill.methods.fedavgm import FedAvgM
    from fedstill.methods.fedcg import FedCG
    from fedstill.methods.feddf import FedDF
    from fedstill.methods.fedgen import FedGEN
    from fedstill.methods.fediod import FedIOD
    from fedstill.methods.fediod_maps import FedIODMaps
    from fedstill.methods.fedkd import FedKD
    from fedstill.methods.fedmd import FedMD
    from fedstill.methods.fedmd_cg import FedMDCG
    from fedstill.methods.fedper import FedPer
    from fedstill.methods.fedprox import FedProx
    from fedstill.methods.fl_mrcm import FLMRCM
    from fedstill.methods.lg_fedavg import LGFedAvg
    from fedstill.methods.public_only import PublicOnly
    from fedstill.methods.standalone import Standalone
    from fedstill.node.policy import PolicyConfig
    from fedstill.privacy.config import GradientsConfig, NoPrivacy, PrivacyConfig, StepsConfig
    from fedstill.privacy.dpsgd import DPSGD
    from fedstill.privacy.noisy_outputs import NoisyOutputs, OutputsConfig
    from fedstill.privacy.pate import PATE, PateConfig
    from fedstill.protocol.schedule import LocalConfig
    from fedstill.tasks.config import TaskConfig
    from fedstill.tasks.instances import InstancesConfig
    from fedstill.tasks.reconstruction import ReconstructionConfig
    from fedstill.tasks.segmentation import SegmentationConfig

__all__ = [
    "DPSGD",
    "FLMRCM",
    "PATE",
    "AsynDGAN",
    "Centralised",
    "EngineConfig",
    "FedAD",
    "FedAvg",
    "FedAvgM",
    "FedCG",
    "FedDF",
    "FedGEN",
    "FedIOD",
    "FedIODMaps",
    "FedKD",
    "FedMD",
    "FedMDCG",
    "FedPer",
    "FedProx",
    "GradientsConfig",
    "InstancesConfig",
    "LGFedAvg",
    "LinkConfig",
    "LocalConfig",
    "NoPrivacy",
    "NodeEnsemble",
    "NoisyOutputs",
    "Outcome",
    "OutputsConfig",
    "PateConfig",
    "PolicyConfig",
    "PrivacyConfig",
    "PublicOnly",
    "ReconstructionConfig",
    "SegmentationConfig",
    "Standalone",
    "StepsConfig",
    "TaskConfig",
    "TensorData",
    "__version__",
    "distil",
]

# Imported when first used: torch takes seconds, and `fedstill --help` should not wait for it.
_HOMES = {
    "AsynDGAN": "fedstill.methods.asyndgan",
    "Centralised": "fedstill.methods.centralised",
    "DPSGD": "fedstill.privacy.dpsgd",
    "EngineConfig": "fedstill.core.compute",
    "NodeEnsemble": "fedstill.methods.ensemble",
    "FLMRCM": "fedstill.methods.fl_mrcm",
    "FedAD": "fedstill.methods.fedad",
    "FedAvg": "fedstill.methods.fedavg",
    "FedAvgM": "fedstill.methods.fedavgm",
    "FedCG": "fedstill.methods.fedcg",
    "FedDF": "fedstill.methods.feddf",
    "FedGEN": "fedstill.methods.fedgen",
    "FedIOD": "fedstill.methods.fediod",
    "FedIODMaps": "fedstill.methods.fediod_maps",
    "FedKD": "fedstill.methods.fedkd",
    "FedMDCG": "fedstill.methods.fedmd_cg",
    "FedMD": "fedstill.methods.fedmd",
    "FedPer": "fedstill.methods.fedper",
    "FedProx": "fedstill.methods.fedprox",
    "GradientsConfig": "fedstill.privacy.config",
    "InstancesConfig": "fedstill.tasks.instances",
    "LGFedAvg": "fedstill.methods.lg_fedavg",
    "LinkConfig": "fedstill.federation.link",
    "LocalConfig": "fedstill.protocol.schedule",
    "NoPrivacy": "fedstill.privacy.config",
    "NoisyOutputs": "fedstill.privacy.noisy_outputs",
    "Outcome": "fedstill.api",
    "OutputsConfig": "fedstill.privacy.noisy_outputs",
    "PATE": "fedstill.privacy.pate",
    "PateConfig": "fedstill.privacy.pate",
    "PolicyConfig": "fedstill.node.policy",
    "PrivacyConfig": "fedstill.privacy.config",
    "PublicOnly": "fedstill.methods.public_only",
    "ReconstructionConfig": "fedstill.tasks.reconstruction",
    "SegmentationConfig": "fedstill.tasks.segmentation",
    "Standalone": "fedstill.methods.standalone",
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
