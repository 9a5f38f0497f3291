"""Methods by name: each one file with its config, what its nodes answer and what its server does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from fedstill.errors import ArgumentError
from fedstill.federation.contract import Answers
from fedstill.methods.fediod import FedIODConfig, FedIODServer, node_side
from fedstill.node.questions import NodeSide


class Server(Protocol):
    """A method's program at the server, as a run drives it: step by step, and stopped between two."""

    student: nn.Module
    done: int  # steps

    def step(self) -> Mapping[str, float]: ...
    def ensemble(self, answers: Answers) -> torch.Tensor: ...
    def imagine(self, count: int) -> torch.Tensor: ...
    def state(self) -> dict[str, Any]: ...
    def load(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Method:
    """What the library knows of a method.

    Args:
        name: on the command line.
        title: in tables.
        paper: where it comes from.
        config: its frozen config dataclass.
        node_side: its part at the nodes, from config, task and seed.
        server: its program at the server.
        leaves: what leaves a node, in words.
    """

    name: str
    title: str
    paper: str
    config: type[Any]
    node_side: Callable[..., NodeSide]
    server: Callable[..., Server]
    leaves: str


METHODS: Mapping[str, Method] = {
    "fediod": Method(
        name="fediod",
        title="FedIOD",
        paper="Gong et al., AAAI 2024",
        config=FedIODConfig,
        node_side=node_side,
        server=FedIODServer,
        leaves="label counts, logits, critic values, gradients with respect to generated inputs",
    ),
}


def method_of(config: object) -> Method:
    """The method that a config object belongs to.

    Raises:
        ArgumentError: none.
    """
    for method in METHODS.values():
        if type(config) is method.config:
            return method
    allowed = ", ".join(method.config.__name__ for method in METHODS.values())
    raise ArgumentError("method", config, f"one of {allowed}")
