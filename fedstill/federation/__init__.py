"""How a server reaches its nodes: the contract, and one file an engine.

``contract`` is the federation as a differentiable function of what is asked: every engine answers to it.
``inprocess`` has all nodes in this process, ``remote`` nodes behind a link, ``flare`` one over NVIDIA
FLARE, ``bundles`` files that people carry. ``checks`` and ``replies`` decide whom a server believes;
``provision``, ``site`` and ``admin`` make and run a real federation.

May import node and what lies below. A newcomer adds another way to reach nodes here.
"""

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
