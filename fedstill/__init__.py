"""Federated distillation: train one model from private data that stays with its owners.

Start with :func:`fedstill.distil` (your own modules and data), :func:`fedstill.run_preset` (a preset or TOML
file), :func:`fedstill.compare_methods` (several methods) and :func:`fedstill.load` (the student of a run).

Packages, from the top. Each may import the packages below it (``make test`` checks that). The docstring of
its ``__init__`` describes its modules:

- ``cli``: the command line; ``api``: the Python API, with its ``datasets`` and ``outcome``
- ``report``: reports, tables and figures of runs; ``compare``: many runs on equal terms
- ``attacks``: privacy attacks on runs
- ``student``: load, predict, evaluate and export the student of a run
- ``runs``: from a configuration to a folder of results
- ``methods``: one file per method
- ``federation``: communication between server and nodes
- ``node``: private data, local training, the gate and the audit log
- ``privacy``: mechanisms, accounting, budgets; ``protocol``: queries and messages between server and nodes
- ``data``, ``models``, ``tasks``: data sets, networks, and losses with metrics
- ``track``: experiment trackers
- ``core``: errors, seeds, configuration, files
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedstill.core.version import __version__ as __version__

if TYPE_CHECKING:  # the same names for tools that read types
    from fedstill import datasets as datasets
    from fedstill import figures as figures
    from fedstill import models as models
    from fedstill.api import compare_methods as compare_methods
    from fedstill.api import distil as distil
    from fedstill.api import run_preset as run_preset
    from fedstill.core.compute import EngineConfig as EngineConfig
    from fedstill.core.dataset import TensorData as TensorData
    from fedstill.core.errors import FedstillError as FedstillError
    from fedstill.core.table_schema import SchemaColumn as SchemaColumn
    from fedstill.core.table_schema import TableSchema as TableSchema
    from fedstill.federation.link_config import LinkConfig as LinkConfig
    from fedstill.methods._discriminators import Discriminators as Discriminators
    from fedstill.methods._feature_generators import FeatureGeneratorOptions as FeatureGeneratorOptions
    from fedstill.methods._feature_generators import ServerTraining as ServerTraining
    from fedstill.methods._input_generators import InputGenerator as InputGenerator
    from fedstill.methods._input_generators import LabelGenerator as LabelGenerator
    from fedstill.methods._label_maps import MapGenerator as MapGenerator
    from fedstill.methods._public_data import StudentTraining as StudentTraining
    from fedstill.methods._replay_training import ReplayTraining as ReplayTraining
    from fedstill.methods.asyndgan import AsynDGAN as AsynDGAN
    from fedstill.methods.asyndgan import PairTraining as PairTraining
    from fedstill.methods.centralized import Centralized as Centralized
    from fedstill.methods.co_boosting import CoBoosting as CoBoosting
    from fedstill.methods.co_dream import CoDream as CoDream
    from fedstill.methods.column_sums import ColumnSums as ColumnSums
    from fedstill.methods.dense import DENSE as DENSE
    from fedstill.methods.dsfl import DSFL as DSFL
    from fedstill.methods.ensemble import NodeEnsemble as NodeEnsemble
    from fedstill.methods.fd import FD as FD
    from fedstill.methods.fedad import FedAD as FedAD
    from fedstill.methods.fedavg import FedAvg as FedAvg
    from fedstill.methods.fedavgm import FedAvgM as FedAvgM
    from fedstill.methods.fedcg import FedCG as FedCG
    from fedstill.methods.fedcgs import FedCGS as FedCGS
    from fedstill.methods.feddf import FedDF as FedDF
    from fedstill.methods.fedftg import FedFTG as FedFTG
    from fedstill.methods.fedgen import FedGEN as FedGEN
    from fedstill.methods.fedhydra import FedHydra as FedHydra
    from fedstill.methods.fediod import FedIOD as FedIOD
    from fedstill.methods.fediod_maps import FedIODMaps as FedIODMaps
    from fedstill.methods.fedkd import FedKD as FedKD
    from fedstill.methods.fedmd import FedMD as FedMD
    from fedstill.methods.fedmd_cg import FedMDCG as FedMDCG
    from fedstill.methods.fedper import FedPer as FedPer
    from fedstill.methods.fedpft import FedPFT as FedPFT
    from fedstill.methods.fedproto import FedProto as FedProto
    from fedstill.methods.fedprox import FedProx as FedProx
    from fedstill.methods.fedsd2c import FedSD2C as FedSD2C
    from fedstill.methods.fedtgp import FedTGP as FedTGP
    from fedstill.methods.fedzge import FedZGE as FedZGE
    from fedstill.methods.fens import FENS as FENS
    from fedstill.methods.fl_mrcm import FLMRCM as FLMRCM
    from fedstill.methods.lg_fedavg import LGFedAvg as LGFedAvg
    from fedstill.methods.public_only import PublicOnly as PublicOnly
    from fedstill.methods.standalone import Standalone as Standalone
    from fedstill.models.backbones import Features as Features
    from fedstill.models.model_config import CustomModel as CustomModel
    from fedstill.node.policy import PolicyConfig as PolicyConfig
    from fedstill.outcome import Compared as Compared
    from fedstill.outcome import Outcome as Outcome
    from fedstill.privacy.config import DPTrainingConfig as DPTrainingConfig
    from fedstill.privacy.config import GradientsConfig as GradientsConfig
    from fedstill.privacy.config import NoPrivacy as NoPrivacy
    from fedstill.privacy.config import PrivacyConfig as PrivacyConfig
    from fedstill.privacy.config import SumsConfig as SumsConfig
    from fedstill.privacy.dpsgd import DPSGD as DPSGD
    from fedstill.privacy.noisy_outputs import NoisyOutputs as NoisyOutputs
    from fedstill.privacy.noisy_outputs import OutputsConfig as OutputsConfig
    from fedstill.privacy.pate import PATE as PATE
    from fedstill.privacy.pate import PateConfig as PateConfig
    from fedstill.protocol.local_config import LocalConfig as LocalConfig
    from fedstill.report.statistics import CaseDifference as CaseDifference
    from fedstill.report.statistics import SeedDifference as SeedDifference
    from fedstill.report.statistics import paired_difference as paired_difference
    from fedstill.report.statistics import seed_difference as seed_difference
    from fedstill.runs.method_check import check_method as check_method
    from fedstill.student.student_model import StudentModel as StudentModel
    from fedstill.student.student_model import load as load
    from fedstill.tasks.instances import InstancesConfig as InstancesConfig
    from fedstill.tasks.reconstruction import ReconstructionConfig as ReconstructionConfig
    from fedstill.tasks.segmentation import SegmentationConfig as SegmentationConfig
    from fedstill.tasks.task import TaskConfig as TaskConfig

# Public names by module. They are imported at first use, as torch takes seconds to import and
# `fedstill --help` does not need it.
_PUBLIC_NAMES = {
    "api": "compare_methods distil run_preset",
    "core.compute": "EngineConfig",
    "core.dataset": "TensorData",
    "core.errors": "FedstillError",
    "core.table_schema": "TableSchema SchemaColumn",
    "federation.link_config": "LinkConfig",
    "methods._discriminators": "Discriminators",
    "methods._feature_generators": "FeatureGeneratorOptions ServerTraining",
    "methods._input_generators": "InputGenerator LabelGenerator",
    "methods._label_maps": "MapGenerator",
    "methods._public_data": "StudentTraining",
    "methods._replay_training": "ReplayTraining",
    "methods.asyndgan": "AsynDGAN PairTraining",
    "methods.centralized": "Centralized",
    "methods.co_boosting": "CoBoosting",
    "methods.co_dream": "CoDream",
    "methods.column_sums": "ColumnSums",
    "methods.dense": "DENSE",
    "methods.dsfl": "DSFL",
    "methods.ensemble": "NodeEnsemble",
    "methods.fd": "FD",
    "methods.fedad": "FedAD",
    "methods.fedavg": "FedAvg",
    "methods.fedavgm": "FedAvgM",
    "methods.fedcg": "FedCG",
    "methods.fedcgs": "FedCGS",
    "methods.feddf": "FedDF",
    "methods.fedftg": "FedFTG",
    "methods.fedgen": "FedGEN",
    "methods.fedhydra": "FedHydra",
    "methods.fediod": "FedIOD",
    "methods.fediod_maps": "FedIODMaps",
    "methods.fedkd": "FedKD",
    "methods.fedmd": "FedMD",
    "methods.fedmd_cg": "FedMDCG",
    "methods.fedper": "FedPer",
    "methods.fedproto": "FedProto",
    "methods.fedpft": "FedPFT",
    "methods.fedprox": "FedProx",
    "methods.fedsd2c": "FedSD2C",
    "methods.fedtgp": "FedTGP",
    "methods.fedzge": "FedZGE",
    "methods.fens": "FENS",
    "methods.fl_mrcm": "FLMRCM",
    "methods.lg_fedavg": "LGFedAvg",
    "methods.public_only": "PublicOnly",
    "methods.standalone": "Standalone",
    "models.backbones": "Features",
    "models.model_config": "CustomModel",
    "node.policy": "PolicyConfig",
    "outcome": "Compared Outcome",
    "privacy.config": "GradientsConfig NoPrivacy PrivacyConfig DPTrainingConfig SumsConfig",
    "privacy.dpsgd": "DPSGD",
    "privacy.noisy_outputs": "NoisyOutputs OutputsConfig",
    "privacy.pate": "PATE PateConfig",
    "protocol.local_config": "LocalConfig",
    "report.statistics": "CaseDifference SeedDifference paired_difference seed_difference",
    "runs.method_check": "check_method",
    "student.student_model": "StudentModel load",
    "tasks.task": "TaskConfig",
    "tasks.instances": "InstancesConfig",
    "tasks.reconstruction": "ReconstructionConfig",
    "tasks.segmentation": "SegmentationConfig",
}
_MODULE_OF = {name: f"fedstill.{module}" for module, names in _PUBLIC_NAMES.items() for name in names.split()}
_SUBMODULES = ("datasets", "figures", "models")
__all__ = sorted([*_MODULE_OF, "__version__"])


def __dir__() -> list[str]:
    return [*__all__, *_SUBMODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"fedstill.{name}")
    raise AttributeError(f"module 'fedstill' has no attribute {name!r}")
