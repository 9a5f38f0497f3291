"""How a server reaches its nodes: the contract, and one file an engine.

``contract`` is the federation as a differentiable function of what is asked (``autograd``): every engine
answers to it. ``inprocess`` has all nodes in this process, ``remote`` nodes behind a link (``carrier``,
``meter``): ``flare`` over NVIDIA FLARE, ``files`` by ``bundles`` that people carry. ``checks`` and
``replies`` decide whom a server believes. ``provision``, ``rules``, ``site``, ``component``, ``job`` and
``admin`` make and run a real federation, by FLARE's public parts.

May import node and what lies below. A newcomer adds another way to reach nodes here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedstill.federation.contract import Answers, Federation
    from fedstill.federation.inprocess import InProcess, choose, partition
    from fedstill.federation.link import LinkConfig

__all__ = [
    "Answers",
    "Federation",
    "InProcess",
    "LinkConfig",
    "choose",
    "partition",
]

_HOMES = {
    "Answers": "contract",
    "Federation": "contract",
    "InProcess": "inprocess",
    "LinkConfig": "link",
    "choose": "inprocess",
    "partition": "inprocess",
}


def __getattr__(name: str) -> Any:
    """A site's own process looks for its component here, and needs none of torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"fedstill.federation.{_HOMES[name]}"), name)
