"""What every method's server has in common, and what the library knows of a method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from fedstill.core.compute import Compute
from fedstill.data.public import Public
from fedstill.federation.contract import Answers, Federation
from fedstill.protocol.schedule import LocalConfig
from fedstill.tasks import Task


@dataclass(frozen=True)
class ServerSetting:
    """What a method's server is made of.

    Args:
        federation: the nodes.
        student: the central network, on the device. Under ``Needs.split`` a ``Split``.
        task: losses, ensemble, metrics.
        shape: ``(C, H, W)`` of an input, or ``(L,)`` of a text.
        mean, std: the data's declared normalisation, per channel.
        compute: device and precision.
        seed: of everything drawn at the server.
        local: how nodes train, for methods that divide that budget into rounds.
        public: public data, or None.
        kinds: the nodes' names by architecture, one tuple an architecture, with a network of it in its
            first state; for methods that keep one student an architecture.
    """

    federation: Federation
    student: nn.Module
    task: Task
    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    compute: Compute
    seed: int
    local: LocalConfig
    public: Public | None = None
    kinds: tuple[tuple[tuple[str, ...], nn.Module], ...] = ()


class Server(ABC):
    """A method's program at the server, as a run drives it: turn by turn, and stopped between two.

    Args:
        setting: what it is made of.

    Raises:
        QuestionRefused: a node would not answer a question that the method needs.
    """

    turn: ClassVar[Literal["step", "epoch", "round"]] = "round"
    """What one call of :meth:`step` is, in reports."""
    total: int
    """Turns of a whole run."""

    def __init__(self, setting: ServerSetting) -> None:
        setting.federation.require(tuple(setting.federation.questions))
        self.federation, self.task, self.compute = setting.federation, setting.task, setting.compute
        self.seed, self.student = setting.seed, setting.student
        self.done = 0  # turns

    @abstractmethod
    def step(self) -> Mapping[str, float]:
        """One turn; counts :attr:`done` up by one and gives its losses."""

    def ensemble(self, answers: Answers) -> torch.Tensor | None:
        """The nodes' answers about some inputs as one, ``(B, classes)``; None where the method has none."""
        return None

    def imagine(self, count: int) -> torch.Tensor | None:
        """Inputs ``(count, C, H, W)`` that the server has made, the same each time; None if it makes none."""
        return None

    def imagined_from(self, count: int) -> torch.Tensor | None:
        """The maps ``(count, H, W)`` uint8 that :meth:`imagine` makes its inputs from; None: from none."""
        return None

    def state(self) -> dict[str, Any]:
        """What the server must remember to go on; methods add their own."""
        return {
            "done": self.done,
            "federation": self.federation.state(),
            "student": dict(self.student.state_dict()),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a remembered state."""
        self.done = state["done"]
        self.federation.load(state["federation"])
        self.student.load_state_dict(state["student"])
