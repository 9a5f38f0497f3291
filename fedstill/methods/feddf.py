"""FedDF: parameters are averaged, then each average is distilled from the ensemble of all models.

Lin, Kong, Stich, Jaggi: "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS
2020, Algorithm 1, and Algorithm 3 for nodes of several architectures. Symbols are the paper's: nodes'
models x_k, data sizes n_k, unlabelled (or generated) inputs d, N distillation steps.

Parameters are averaged among equal architectures only, one student each; all received models together
teach every student.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from fedstill.core.choices import check_choices
from fedstill.core.errors import ArgumentError
from fedstill.core.seeds import torch_generator
from fedstill.methods import parameters
from fedstill.methods.counting import count_labels, tell_size
from fedstill.methods.parameters import RoundsConfig, drawn, finite
from fedstill.methods.public import distil, known, optimiser_of
from fedstill.methods.server import Server, ServerSetting
from fedstill.models.vector import load_vector, to_vector, weighted_mean
from fedstill.node.group import signature
from fedstill.node.training import predict
from fedstill.protocol.method import Method, Needs
from fedstill.protocol.questions import NodeSetting, NodeSide
from fedstill.protocol.schedule import cosine, set_lr
from fedstill.tasks import Ensemble


@dataclass(frozen=True, kw_only=True)
class FedDFConfig(RoundsConfig):
    """FedDF's options."""

    name: ClassVar[str] = "feddf"

    steps: int = 50
    """N, distillation steps a round; 0 leaves the averages as they are."""
    batch: int = 64
    """Public inputs d a step."""
    weights: Literal["equal", "counts"] = "equal"
    """How teachers are weighed: equally, as in the paper, or by their nodes' shares of each class's examples
    (FedKD Eq. 1), which are then told."""
    ensemble: Ensemble = "logits"
    """How the teachers' answers are ensembled: logits, as in the paper, log_probs, probs, or consensus."""
    tau: float = 1.0
    """Temperature of the distillation; the paper's is 1, inf is the l2 limit."""
    lr: float = 1e-4
    """Adam's learning rate, falling within each round on a cosine to lr_end."""
    lr_end: float = 0.0
    """Learning rate of a round's last step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, "method")
        if self.steps < 0:
            raise ArgumentError("method.steps", self.steps, "0 or more")
        if self.batch < 1:
            raise ArgumentError("method.batch", self.batch, "1 or more")
        finite(self, "lr", "lr_end")
        if not self.tau > 0:
            raise ArgumentError("method.tau", self.tau, "above 0, or inf")


def node_side(config: FedDFConfig, setting: NodeSetting) -> NodeSide:
    """What a node answers: its data's size (by class, if wanted), and its model after a round of training."""
    told = count_labels(setting.task) if config.weights == "counts" else tell_size()
    return parameters.node_side(setting, [told, parameters.train(config, setting)])


class FedDFServer(Server):
    """Rounds of averaging and distillation.

    The central model is the student of its own architecture; :attr:`students` holds those of the others
    too, in the order of ``setting.kinds``.

    Args:
        config: FedDF's options.
        setting: what the server is made of.

    Raises:
        ArgumentError: the student is of none of the nodes' architectures.
    """

    def __init__(self, config: FedDFConfig, setting: ServerSetting) -> None:
        super().__init__(setting)
        self.config, self.total = config, config.rounds
        self.public = known(setting.public)
        own = [signature(network) == signature(self.student) for _, network in setting.kinds]
        if not any(own):
            allowed = ", ".join(f"that of {names[0]}" for names, _ in setting.kinds)
            raise ArgumentError(
                "student.model", type(self.student).__name__, f"an architecture of the nodes: {allowed}"
            )
        self.names = [names for names, _ in setting.kinds]  # of the nodes of each architecture
        self.students: list[nn.Module] = [
            self.student if mine else copy.deepcopy(network)
            for mine, (_, network) in zip(own, setting.kinds, strict=True)
        ]
        self.sizes: dict[str, float] = {}  # n_k, by node
        self.counts: dict[str, list[float]] = {}  # its examples of each class

    def step(self) -> Mapping[str, float]:
        """One round of Algorithm 1 (of Algorithm 3, with several architectures)."""
        t = self.done
        if not self.sizes:
            self._begin()
        known = [name for name in self.federation.present if name in self.sizes]
        taking_part = drawn(known, self.config.participation, self.seed, t)
        received: list[torch.Tensor] = []  # x_k of each architecture's nodes, (K_a, P_a)
        teachers: list[str] = []  # their names
        for student, names in zip(self.students, self.names, strict=True):
            asked = [name for name in taking_part if name in names]
            if not asked:  # its student is taught all the same
                received.append(to_vector(student).new_empty(0, 0))
                continue
            round = torch.tensor(t)
            answers = self.federation.ask("train", of=asked, parameters=to_vector(student), round=round)
            n = torch.tensor([self.sizes[name] for name in answers.nodes], device=self.compute.device)
            received.append(answers["parameters"])
            teachers += answers.nodes
            load_vector(student, weighted_mean(answers["parameters"], n))  # x_0 = sum n_k x_k / sum n_k
        loss = self._distil(t, received, teachers) if self.config.steps else 0.0
        self.done += 1
        return {"student": loss}

    def state(self) -> dict[str, Any]:
        """See :class:`Server`."""
        students = [dict(student.state_dict()) for student in self.students]
        return {**super().state(), "sizes": self.sizes, "counts": self.counts, "students": students}

    def load(self, state: Mapping[str, Any]) -> None:
        """See :class:`Server`."""
        super().load(state)
        self.sizes, self.counts = state["sizes"], state["counts"]
        for student, values in zip(self.students, state["students"], strict=True):
            student.load_state_dict(values)

    def _begin(self) -> None:
        """Learn how many examples the nodes hold."""
        counting = self.config.weights == "counts"
        told = self.federation.ask("count_labels" if counting else "tell_size")
        self.sizes = dict(zip(told.nodes, told["sizes"].tolist(), strict=True))
        if counting:
            self.counts = dict(zip(told.nodes, told["counts"].tolist(), strict=True))

    def _distil(self, t: int, received: list[torch.Tensor], teachers: list[str]) -> float:
        """Teach every student; the distance that is left to the central one, averaged over the steps."""
        config, inputs = self.config, self.public.inputs
        shape = (config.steps, config.batch)
        d = torch.randint(len(inputs), shape, generator=torch_generator(self.seed, "d", t))
        # Each public input that some step uses goes once through each teacher.
        used, place = torch.unique(d, return_inverse=True)
        x = inputs[used.to(inputs.device)]
        target = self._taught(received, teachers, x)  # (U, C, ...)
        losses = []
        for student in self.students:
            optimiser = optimiser_of(student, config.lr)
            student.eval()  # batch norm keeps the averaged statistics: public inputs are not what it is for
            batches = self._batches(optimiser, place.to(x.device), x, target)
            loss = distil(student, optimiser, batches, self._distance, self.compute, self.seed, "student", t)
            losses.append(loss)
        return next(loss for loss, one in zip(losses, self.students, strict=True) if one is self.student)

    def _taught(self, received: list[torch.Tensor], teachers: list[str], x: torch.Tensor) -> torch.Tensor:
        """The mean of all received models' logits, or what else their ensemble is: ``(U, C, ...)``."""
        answers = []
        for student, vectors in zip(self.students, received, strict=True):
            teacher = copy.deepcopy(student).eval()
            for vector in vectors:
                load_vector(teacher, vector)
                answers.append(predict(teacher, x, self.compute))
        each = [self.counts.get(name, [1.0] * self.task.classes) for name in teachers]
        weights = self.task.importance(torch.tensor(each, device=x.device))  # (K, 1, C)
        return self.task.ensemble(torch.stack(answers), weights, self.config.ensemble)

    def _batches(
        self, optimiser: torch.optim.Optimizer, place: torch.Tensor, x: torch.Tensor, target: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The round's batches in order, each at its learning rate."""
        for step, rows in enumerate(place):
            set_lr(optimiser, cosine(step, len(place), self.config.lr, self.config.lr_end))
            yield x[rows], target[rows]

    def _distance(self, student: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """KL(sigma(the teachers' ensembled logits), sigma(the student's)): ``(B,)``."""
        return self.task.distance(student, target, self.config.tau)


METHOD = Method(
    name="feddf",
    title="FedDF",
    paper="Lin et al., NeurIPS 2020",
    config=FedDFConfig,
    node_side=node_side,
    server=FedDFServer,
    needs=lambda config: Needs(trainable=True, student_kind=True, public=True),
)
