"""How a server reaches its nodes: the contract, and one file an engine."""

from fedstill.core.compute import Compute, EngineConfig
from fedstill.federation.contract import Answers, Federation
from fedstill.federation.inprocess import InProcess, choose, partition
from fedstill.federation.link import LinkConfig

__all__ = [
    "Answers",
    "Compute",
    "EngineConfig",
    "Federation",
    "InProcess",
    "LinkConfig",
    "choose",
    "partition",
]
