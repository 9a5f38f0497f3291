"""A method, as server and nodes know it: its options, its part at the nodes and its program at the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from fedstill.core.errors import ArgumentError
from fedstill.core.registry import Registry
from fedstill.data.public import Public
from fedstill.protocol.questions import NodeSetting, NodeSide
from fedstill.tasks import Task


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
        server: its program at the server (:class:`fedstill.methods.server.Server`), from config and setting.
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
    server: Callable[[Any, Any], Any]
    needs: Callable[[Any], Needs]
    central: Literal["student", "virtual", "ensemble", "nodes"] = "student"
    one_round: Callable[[Any, Public | None, int], Sequence[Ask]] | None = None
    later: tuple[str, ...] = ()


METHODS: Registry[Method] = Registry(
    "method",
    {
        "standalone": "fedstill.methods.standalone:METHOD",
        "centralised": "fedstill.methods.centralised:METHOD",
        "public-only": "fedstill.methods.public_only:METHOD",
        "ensemble": "fedstill.methods.ensemble:METHOD",
        "fediod": "fedstill.methods.fediod:METHOD",
        "asyndgan": "fedstill.methods.asyndgan:METHOD",
        "fedkd": "fedstill.methods.fedkd:METHOD",
        "fedmd-cg": "fedstill.methods.fedmd_cg:METHOD",
        "fedavg": "fedstill.methods.fedavg:METHOD",
        "fedprox": "fedstill.methods.fedprox:METHOD",
        "fedavgm": "fedstill.methods.fedavgm:METHOD",
        "feddf": "fedstill.methods.feddf:METHOD",
        "fedmd": "fedstill.methods.fedmd:METHOD",
        "fedgen": "fedstill.methods.fedgen:METHOD",
        "fedper": "fedstill.methods.fedper:METHOD",
        "lg-fedavg": "fedstill.methods.lg_fedavg:METHOD",
        "fedcg": "fedstill.methods.fedcg:METHOD",
        "fl-mrcm": "fedstill.methods.fl_mrcm:METHOD",
        "fedad": "fedstill.methods.fedad:METHOD",
    },
    Method,
)


def method_of(config: object) -> Method:
    """The method that a config object belongs to.

    Raises:
        ArgumentError: none.
    """
    return METHODS[method_name(config)]


def method_name(config: object) -> str:
    """The name under which the method of a config object was asked for.

    Raises:
        ArgumentError: it belongs to none.
    """
    for name in METHODS.known():
        if type(config) is METHODS[name].config:
            return name
    allowed = ", ".join(METHODS[name].config.__name__ for name in METHODS.own)
    raise ArgumentError("method", config, f"one of {allowed}")
