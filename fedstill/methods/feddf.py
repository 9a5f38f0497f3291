"""FedDF: parameters are averaged, then each average is distilled from the ensemble of all models.

Lin, Kong, Stich, Jaggi: "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020,
Algorithm 1, and Algorithm 3 for nodes of several architectures. Symbols are the paper's: nodes' models x_k,
data sizes n_k, unlabeled (or generated) inputs d, N distillation steps.

Parameters are averaged among equal architectures only, with one student each. All received models together
teach every student.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import nn

from fedstill.core.errors import list_names
from fedstill.core.options import NonNegativeFloat, NonNegativeInt, PositiveInt, PositiveOrInf
from fedstill.methods import (
    ArgumentError,
    LabelHistogram,
    Needs,
    NodeFault,
    NodeSetting,
    Query,
    Server,
    count_labels_query,
    fetch_sizes,
    predict,
    torch_generator,
)
from fedstill.methods._public_data import Batch, distill, make_student_optimizer, require_public
from fedstill.methods.fedavg import FedAvg, FedAvgState, sample_nodes
from fedstill.models.module_utils import deep_copy, load_vector, to_vector, weighted_mean
from fedstill.node.architectures import architecture_key
from fedstill.protocol.local_config import cosine_lr, set_lr
from fedstill.tasks import Ensemble


@dataclass
class FedDFState(FedAvgState):
    """Server state of the method."""

    histogram: LabelHistogram | None = None  # n_k by class, if the teachers' weights need it
    # One for each architecture, by its first node; one of them is the global student.
    students: dict[str, nn.Module] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FedDF(FedAvg):
    """Averages of parameters, each distilled from the ensemble of all received models (Algorithms 1, 3)."""

    title: ClassVar[str] = "FedDF"
    batch_options: ClassVar[tuple[str, ...]] = ("batch",)
    paper: ClassVar[str] = "Lin et al., NeurIPS 2020"
    query_names: ClassVar[tuple[str, ...]] = ("count_samples", "count_labels", "train")
    linear: ClassVar[bool] = False  # each x_k is a teacher

    steps: NonNegativeInt = 50
    """Distillation steps a round (N); 0 keeps the averages unchanged."""
    batch: PositiveInt = 64
    """Public inputs d in a batch."""
    weights: Literal["equal", "counts"] = "equal"
    """Weights of the teachers: equal, as in the paper, or their nodes' shares of each class's examples (FedKD
    Eq. 1), which are then released."""
    ensemble: Ensemble = "logits"
    """Combination of the teachers' logits: logits, as in the paper, log_probs, probs, consensus, a
    robust one (median and others), or a custom one."""
    tau: PositiveOrInf = 1.0
    """Temperature of the distillation; the paper's is 1, inf is the l2 limit."""
    lr: NonNegativeFloat = 1e-4
    """Adam's learning rate, falling within each round on a cosine to lr_end."""
    lr_end: NonNegativeFloat = 0.0
    """Learning rate of a round's last step."""

    def needs(self) -> Needs:
        return Needs(trainable=True, student_architecture=True, public=True)

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        """Return the queries for data sizes (by class, if needed) and for models after a round of
        training."""
        for query in super().queries(setting):
            if query.name == "train" or (query.name == "count_samples" and self.weights == "equal"):
                yield query
        if self.weights == "counts":
            yield count_labels_query(setting)

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> FedDFState:
        """Return one student for each architecture.

        Raises:
            ArgumentError: the global student has none of these architectures.
        """
        students: dict[str, nn.Module] = {}
        for names, network in server.architectures:
            mine = architecture_key(network) == architecture_key(server.student)
            students[names[0]] = server.student if mine else deep_copy(network)
        if server.student not in students.values():
            allowed = f"an architecture of the nodes: {list_names(f'that of {name}' for name in students)}"
            raise ArgumentError("student.model", type(server.student).__name__, allowed)
        histogram = LabelHistogram() if self.weights == "counts" else None
        return FedDFState(histogram=histogram, students=students)

    def step(self, server: Server, state: FedDFState, t: int) -> Mapping[str, float]:
        if state.histogram is not None:
            state.histogram.fetch(server)
            state.n = dict(zip(state.histogram.names, state.histogram.sizes.tolist(), strict=True))
        elif not state.n:
            state.n = fetch_sizes(server)
        known = [name for name in server.federation.present_sources if name in state.n]
        participants = sample_nodes(known, self.participation, server.seed, t)
        received: dict[str, dict[str, torch.Tensor]] = {}  # x_k (P_a,) by node, by architecture
        for (first, student), (names, _) in zip(state.students.items(), server.architectures, strict=True):
            queried = [name for name in participants if name in names]
            sent = {"parameters": to_vector(student), "round": t}
            responses = server.query_or_none("train", nodes=queried, **sent) if queried else None
            if responses is not None:  # without responses the student is still distilled
                x_k = responses["parameters"]  # (K_a, P_a)
                n = torch.tensor([state.n[name] for name in responses.nodes], device=x_k.device)  # (K_a,)
                load_vector(student, weighted_mean(x_k, n))  # x_0 = sum n_k x_k / sum n_k
                received[first] = dict(zip(responses.nodes, x_k, strict=True))
        if not received:
            raise NodeFault(list_names(participants), "train", "all queried nodes are excluded")
        return {"student": self.fuse(server, state, received, t) if self.steps else 0.0}

    def fuse(
        self, server: Server, state: FedDFState, received: Mapping[str, Mapping[str, torch.Tensor]], t: int
    ) -> float:
        """Distill into every student; return the global student's mean distance over the steps."""
        inputs = require_public(server.public).inputs
        generator = torch_generator(server.seed, "d", t)
        d = torch.randint(len(inputs), (self.steps, self.batch), generator=generator)
        # Each public input that some step uses goes once through each teacher.
        used, place = torch.unique(d, return_inverse=True)
        x = inputs[used.to(inputs.device)]
        target = self.teacher_targets(server, state, received, x)  # (U, C, ...)
        distance = partial(server.task.distillation_loss, tau=self.tau)  # KL(sigma(ensemble), sigma(student))
        student_loss = 0.0
        for student in state.students.values():
            optimizer = make_student_optimizer(student, self.lr)
            student.eval()  # batch norm keeps the averaged statistics, as public inputs have others
            batches = self.iterate_batches_and_set_rates(optimizer, place.to(x.device), x, target)
            loss = distill(student, optimizer, batches, distance, server.compute, server.seed, "student", t)
            student_loss = loss if student is server.student else student_loss
        return student_loss

    def teacher_targets(
        self,
        server: Server,
        state: FedDFState,
        received: Mapping[str, Mapping[str, torch.Tensor]],
        x: torch.Tensor,
    ) -> torch.Tensor:
        """Return the mean logits of all received models, or another ensemble of them: ``(U, C, ...)``."""
        responses: dict[str, torch.Tensor] = {}
        for first, models in received.items():
            teacher = deep_copy(state.students[first]).eval()
            for name, x_k in models.items():
                load_vector(teacher, x_k)
                responses[name] = predict(teacher, x, server.compute)
        if state.histogram is None:
            histogram = LabelHistogram.uniform(tuple(responses), server.task.classes, x.device)
        else:
            histogram = state.histogram.select(tuple(responses))
        omega = server.task.importance_weights(histogram.counts)  # (K, 1, C)
        return server.task.ensemble(torch.stack(list(responses.values())), omega, self.ensemble)

    def iterate_batches_and_set_rates(
        self, optimizer: torch.optim.Optimizer, place: torch.Tensor, x: torch.Tensor, target: torch.Tensor
    ) -> Iterator[Batch]:
        """Yield the round's batches in order, and set the learning rate of each."""
        for step, rows in enumerate(place):
            set_lr(optimizer, cosine_lr(step, len(place), self.lr, self.lr_end))
            yield x[rows], target[rows]
