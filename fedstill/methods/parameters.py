"""What methods that share parameters have in common: the same start, rounds of local training, averages.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS
2017, Algorithm 1, with the parts in which its successors differ as arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedstill.core.errors import ArgumentError
from fedstill.core.seeds import torch_generator
from fedstill.methods.counting import tell_size
from fedstill.methods.server import Server, ServerSetting
from fedstill.models.split import EXTRACTOR, HEAD
from fedstill.models.vector import load_vector, to_vector, weighted_mean
from fedstill.node import training
from fedstill.node.group import Group
from fedstill.node.training import Work
from fedstill.protocol import kinds
from fedstill.protocol.questions import NodeSetting, NodeSide, Question
from fedstill.protocol.schedule import Span

KINDS: Mapping[str, str] = {
    "": kinds.PARAMETERS,
    EXTRACTOR: kinds.EXTRACTOR_PARAMETERS,
    HEAD: kinds.HEAD_PARAMETERS,
}
MakeWork = Callable[[], Work]  # called when a round begins, with the models as the server sent them


@dataclass(frozen=True, kw_only=True)
class RoundsConfig:
    """What all methods in rounds have."""

    rounds: int = 20
    """Rounds; the local training budget (nodes.local.epochs) is divided among them."""
    participation: float = 1.0
    """Share of the nodes that take part in a round, drawn anew each round; at least one node does. Who is
    not drawn leaves out that part of its local training."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ArgumentError("method.rounds", self.rounds, "1 or more")
        if not 0 < self.participation <= 1:
            raise ArgumentError("method.participation", self.participation, "above 0, up to 1")


def finite(config: object, *names: str) -> None:
    """Refuse options that are negative or not finite.

    Raises:
        ArgumentError: naming the first one.
    """
    for name in names:
        if not 0 <= getattr(config, name) < math.inf:
            raise ArgumentError(f"method.{name}", getattr(config, name), "0 or more")


def begin(times: int = 1) -> Question:
    """The question by which all nodes take the server's first weights; nothing leaves."""

    def handler(group: Group, number: int, parameters: torch.Tensor) -> Mapping[str, torch.Tensor]:
        group.load("model", parameters)
        return {}

    return Question("begin", handler, sends={"parameters": kinds.PARAMETERS}, times=times)


def train(
    config: RoundsConfig,
    setting: NodeSetting,
    *,
    part: str = "",
    make_work: MakeWork | None = None,
    beside: str = "",
) -> Question:
    """The question of a round: take parameters w, train on your own data, give yours back.

    Args:
        config: rounds.
        setting: what a node is.
        part: what is exchanged: ``""`` the whole network, ``"extractor"`` or ``"head"``.
        make_work: makes the round's training step; None is the task's own loss.
        beside: what that step descends beside the task's own loss.
    """

    def handler(
        group: Group, number: int, parameters: torch.Tensor, round: torch.Tensor
    ) -> Mapping[str, torch.Tensor]:
        group.load("model", parameters, part)
        train_round(group, setting, int(round[0]), config.rounds, make_work and make_work())
        return {"parameters": group.vectors("model", part)}

    kind = KINDS[part]
    return Question(
        "train",
        handler,
        sends={"parameters": kind, "round": "schedule"},
        releases={"parameters": kind},
        times=config.rounds,
        reads=() if make_work is None else None,
        span=lambda sent: round_span(sent, config.rounds),
        beside=beside,
    )


def round_span(sent: Mapping[str, torch.Tensor], rounds: int, first: int = 0) -> Span:
    """The part of the local training in the round that ``sent`` names, behind ``first`` other parts."""
    t = first + int(sent["round"].flatten()[0])
    return Span(t, t + 1, first + rounds)


def train_round(
    group: Group, setting: NodeSetting, round: int, rounds: int, work: Work | None = None
) -> None:
    """One round's part of the local training of a group's models.

    The optimiser starts anew, since what it remembers belongs to weights that were replaced.
    """
    training.prepare(group.nodes, setting.local)
    span = Span(round, round + 1, rounds)
    training.train(group.nodes, setting.task, setting.local, setting.compute, span=span, work=work)
    for node in group.nodes:
        node.optimisers.pop("model", None)


def node_side(setting: NodeSetting, questions: Sequence[Question]) -> NodeSide:
    """The node side of a method whose local training happens in its rounds."""

    def rehearse(group: Group) -> None:
        """A few steps of local training, for the engine to time."""
        training.prepare(group.nodes, setting.local)
        training.train(group.nodes, setting.task, setting.local, setting.compute, steps=3)

    return NodeSide({question.name: question for question in questions}, rehearse=rehearse, first=None)


class AveragingServer(Server):
    """The server of FedAvg and of what differs from it by little.

    Args:
        config: rounds and participation.
        setting: what the server is made of.
        part: what is exchanged: ``""`` the whole network, ``"extractor"`` or ``"head"``.
    """

    def __init__(self, config: RoundsConfig, setting: ServerSetting, part: str = "") -> None:
        super().__init__(setting)
        self.rounds, self.total, self.part = config, config.rounds, part
        self.shared = self.student.get_submodule(part)
        self.sizes: dict[str, float] = {}  # n_k, by node

    def step(self) -> Mapping[str, float]:
        """One round of Algorithm 1."""
        t = self.done
        if t == 0:
            self._begin()
        w = to_vector(self.shared)  # (P,)
        known = [name for name in self.federation.present if name in self.sizes]
        taking_part = drawn(known, self.rounds.participation, self.seed, t)
        updates = self.federation.ask("train", of=taking_part, parameters=w, round=torch.tensor(t))
        n = torch.tensor([self.sizes[name] for name in updates.nodes], device=w.device)  # (K,)
        load_vector(self.shared, self.combine(w, updates["parameters"], n))
        self.done += 1
        return {"moved": (to_vector(self.shared) - w).norm().item()}

    def combine(self, w: torch.Tensor, updates: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        """The next ``w`` (P,) from the last one, the nodes' updates ``(K, P)`` and data sizes ``(K,)``."""
        return weighted_mean(updates, n)

    def state(self) -> dict[str, Any]:
        """See :class:`Server`."""
        return {**super().state(), "sizes": self.sizes}

    def load(self, state: Mapping[str, Any]) -> None:
        """See :class:`Server`."""
        super().load(state)
        self.sizes = state["sizes"]

    def _begin(self) -> None:
        """Learn the data sizes, and give all nodes the same first weights unless the first round does."""
        told = self.federation.ask("tell_size")
        self.sizes = dict(zip(told.nodes, told["sizes"].tolist(), strict=True))
        if "begin" in self.federation.questions:
            self.federation.ask("begin", parameters=to_vector(self.student))


def drawn(nodes: Sequence[str], share: float, seed: int, round: int) -> list[str]:
    """The nodes that take part in a round, in their order: max(share K, 1) of them, as FedAvg draws.

    >>> drawn(["a", "b", "c", "d"], 0.5, 0, 0) == drawn(["a", "b", "c", "d"], 0.5, 0, 0)
    True
    """
    count = max(int(share * len(nodes) + 1e-9), 1)
    order = torch.randperm(len(nodes), generator=torch_generator(seed, "taking part", round))
    return [nodes[index] for index in sorted(order[:count].tolist())]


def questions(
    config: RoundsConfig,
    setting: NodeSetting,
    *,
    part: str = "",
    make_work: MakeWork | None = None,
    beside: str = "",
) -> list[Question]:
    """All questions of a method that averages parameters."""
    shared = [tell_size(), train(config, setting, part=part, make_work=make_work, beside=beside)]
    # Where everyone gets the whole network in every round, that is a start as well.
    return shared if part == "" and config.participation == 1 else [begin(), *shared]


def trained_places(module: torch.nn.Module) -> torch.Tensor:
    """Where in a module's vector its parameters lie: ``(P,)``, true for parameters, false for buffers."""
    learned = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    places = [
        torch.full((tensor.numel(),), name in learned, device=tensor.device)
        for name, tensor in module.state_dict().items()
    ]
    return torch.cat(places)
