"""What every method's server has in common, and what the library knows of a method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from fedstill.core.compute import Compute
from fedstill.data.public import Public
from fedstill.federation.contract import Answers, Federation
from fedstill.protocol.questions import NodeSetting, NodeSide
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


@dataclass(frozen=True)
class Needs:
    """What a method needs, as data; a federation that lacks it is refused before any training.

    Args:
        same_architecture: the nodes' networks and the student are equal in architecture.
        public: public data, without labels.
        public_labels: labels of it, from the task's own classes.
        split: networks that part into extractor and head.
        student_kind: a student of one of the nodes' architectures.
        trainable: nodes' networks that are not frozen as a whole, since rounds train them.
        images: inputs that a server can make: images, and not texts.
        one_label: tasks in which each input has one class.
        maps: tasks whose inputs can be made from label maps.
        vectors: tasks whose outputs are one vector an input, and not maps or images.
    """

    same_architecture: bool = False
    public: bool = False
    public_labels: bool = False
    split: bool = False
    student_kind: bool = False
    trainable: bool = False
    images: bool = False
    one_label: bool = False
    maps: bool = False
    vectors: bool = False


def refusal(needs: Needs, task: Task) -> str | None:
    """Why a method with such needs cannot learn a task, or None."""
    if needs.images and task.tokens:
        return "it works on images, and the inputs of this task are texts"
    if needs.one_label and task.kind != "class":
        return "it needs one class for each input, and this task has none"
    if needs.maps and not task.conditions:
        return "it makes images from label maps, and this task has none"
    if needs.vectors and task.kind in ("map", "image"):
        return "it needs one vector of outputs for each input, and this task has one for each pixel"
    return None


@dataclass(frozen=True)
class Ask:
    """One question as a server asks it: its name and the tensors that go down with it."""

    question: str
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """What the library knows of a method.

    Args:
        name: on the command line.
        title: in tables.
        paper: where it comes from.
        config: its frozen config dataclass.
        node_side: its part at the nodes. What leaves a node is stated there, question by question.
        server: its program at the server.
        needs: what it needs, which may depend on its config.
        central: the model it is judged by. ``student`` is trained at the server; ``virtual`` is the
            average of the nodes' models, weighed by their data, made only to evaluate and kept by
            nobody (FedMD-CG, section 3.1); ``ensemble`` asks all nodes each time; ``nodes`` has none: the
            nodes' mean.
        one_round: all that it asks, in order and known before the first answer, from its config, the public
            data and the run's seed; it raises ArgumentError where an option makes a question depend on an
            answer. None where every run does. Such questions can be carried by hand.
        later: options that change nothing at the nodes, so that they may be chosen when all answers are in.
    """

    name: str
    title: str
    paper: str
    config: type[Any]
    node_side: Callable[[Any, NodeSetting], NodeSide]
    server: Callable[[Any, ServerSetting], Server]
    needs: Callable[[Any], Needs]
    central: Literal["student", "virtual", "ensemble", "nodes"] = "student"
    one_round: Callable[[Any, Public | None, int], Sequence[Ask]] | None = None
    later: tuple[str, ...] = ()
