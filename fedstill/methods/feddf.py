"""FedDF: parameters are averaged, then each average is distilled from the ensemble of all models.

Lin, Kong, Stich, Jaggi: "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS
2020, Algorithm 1, and Algorithm 3 for nodes of several architectures. Symbols are the paper's: nodes'
models x_k, data sizes n_k, unlabeled (or generated) inputs d, N distillation steps.

Parameters are averaged among equal architectures only, one student each; all received models together
teach every student.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import nn

from fedstill.core.options import NonNegativeFloat, NonNegativeInt, PositiveInt, PositiveOrInf
from fedstill.methods import (
    ArgumentError,
    Needs,
    NodeFault,
    NodeSetting,
    Query,
    Server,
    predict,
    torch_generator,
)
from fedstill.methods._averaging import Averaging
from fedstill.methods._label_histogram import CountsLabels, HistogramState, LabelHistogram
from fedstill.methods._public_data import Batch, distill, make_student_optimizer, require_public
from fedstill.models.module_utils import deep_copy, load_vector, to_vector, weighted_mean
from fedstill.node.node_group import architecture_key
from fedstill.protocol.local_config import cosine_lr, set_lr
from fedstill.tasks import Ensemble


@dataclass
class FedDFState(HistogramState):
    """What changes from round to round."""

    # One an architecture, by the first node that has it; one of them is the central student.
    students: dict[str, nn.Module] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FedDF(CountsLabels, Averaging):
    """FedDF's options."""

    title: ClassVar[str] = "FedDF"
    batch_options: ClassVar[tuple[str, ...]] = ("batch",)
    paper: ClassVar[str] = "Lin et al., NeurIPS 2020"

    steps: NonNegativeInt = 50
    """N, distillation steps a round; 0 leaves the averages as they are."""
    batch: PositiveInt = 64
    """Public inputs d a step."""
    weights: Literal["equal", "counts"] = "equal"
    """How teachers are weighed: equally, as in the paper, or by their nodes' shares of each class's examples
    (FedKD Eq. 1), which are then told."""
    ensemble: Ensemble = "logits"
    """How the teachers' answers are ensembled: logits, as in the paper, log_probs, probs,
    consensus, or one of your own."""
    tau: PositiveOrInf = 1.0
    """Temperature of the distillation; the paper's is 1, inf is the l2 limit."""
    lr: NonNegativeFloat = 1e-4
    """Adam's learning rate, falling within each round on a cosine to lr_end."""
    lr_end: NonNegativeFloat = 0.0
    """Learning rate of a round's last step."""

    def needs(self) -> Needs:
        return Needs(trainable=True, student_architecture=True, public=True)

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        """The size of a node's data (by class, if wanted), and its model after a round of training."""
        wanted = ("count_labels" if self.weights == "counts" else "count_samples", "train")
        return [query for query in super().queries(setting) if query.name in wanted]

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> FedDFState:
        """One student an architecture; the central one must be of one of them."""
        students: dict[str, nn.Module] = {}
        for names, network in server.architectures:
            mine = architecture_key(network) == architecture_key(server.student)
            students[names[0]] = server.student if mine else deep_copy(network)
        if server.student not in students.values():
            allowed = f"an architecture of the nodes: {', '.join(f'that of {name}' for name in students)}"
            raise ArgumentError("student.model", type(server.student).__name__, allowed)
        return FedDFState(students=students)

    def step(self, server: Server, state: FedDFState, t: int) -> Mapping[str, float]:
        state.histogram.fetch(server)
        taking_part = self.sample_participants(
            state.histogram.present_nodes(server.federation), server.seed, t
        )
        received: dict[str, dict[str, torch.Tensor]] = {}  # x_k (P_a,) by node, by architecture
        for (first, student), (names, _) in zip(state.students.items(), server.architectures, strict=True):
            asked = [name for name in taking_part if name in names]
            sent = {"parameters": to_vector(student), "round": t}
            responses = server.query_or_none("train", of=asked, **sent) if asked else None
            if responses is not None:  # or else its student is taught all the same
                x_k = responses["parameters"]  # (K_a, P_a)
                n = state.histogram.select(responses.nodes).sizes
                load_vector(student, weighted_mean(x_k, n))  # x_0 = sum n_k x_k / sum n_k
                received[first] = dict(zip(responses.nodes, x_k, strict=True))
        if not received:
            raise NodeFault(", ".join(taking_part), "train", "none of the nodes that were asked is left")
        return {"student": self.fuse(server, state, received, t) if self.steps else 0.0}

    def fuse(
        self, server: Server, state: FedDFState, received: Mapping[str, Mapping[str, torch.Tensor]], t: int
    ) -> float:
        """Teach every student; the distance that is left to the central one, averaged over the steps."""
        inputs = require_public(server.public).inputs
        generator = torch_generator(server.seed, "d", t)
        d = torch.randint(len(inputs), (self.steps, self.batch), generator=generator)
        # Each public input that some step uses goes once through each teacher.
        used, place = torch.unique(d, return_inverse=True)
        x = inputs[used.to(inputs.device)]
        target = self.teacher_targets(server, state, received, x)  # (U, C, ...)
        distance = partial(server.task.distillation_loss, tau=self.tau)  # KL(sigma(ensemble), sigma(student))
        found = 0.0
        for student in state.students.values():
            optimizer = make_student_optimizer(student, self.lr)
            student.eval()  # batch norm keeps the averaged statistics: public inputs are not what it is for
            batches = self.iterate_batches(optimizer, place.to(x.device), x, target)
            loss = distill(student, optimizer, batches, distance, server.compute, server.seed, "student", t)
            found = loss if student is server.student else found
        return found

    def teacher_targets(
        self,
        server: Server,
        state: FedDFState,
        received: Mapping[str, Mapping[str, torch.Tensor]],
        x: torch.Tensor,
    ) -> torch.Tensor:
        """The mean of all received models' logits, or what else their ensemble is: ``(U, C, ...)``."""
        responses: dict[str, torch.Tensor] = {}
        for first, models in received.items():
            teacher = deep_copy(state.students[first]).eval()
            for name, x_k in models.items():
                load_vector(teacher, x_k)
                responses[name] = predict(teacher, x, server.compute)
        told = state.histogram.select(list(responses))
        if self.weights == "equal":
            told = LabelHistogram.uniform(told.names, server.task.classes, x.device)
        omega = server.task.importance_weights(told.counts)  # (K, 1, C)
        return server.task.ensemble(torch.stack(list(responses.values())), omega, self.ensemble)

    def iterate_batches(
        self, optimizer: torch.optim.Optimizer, place: torch.Tensor, x: torch.Tensor, target: torch.Tensor
    ) -> Iterator[Batch]:
        """The round's batches in order, each at its learning rate."""
        for step, rows in enumerate(place):
            set_lr(optimizer, cosine_lr(step, len(place), self.lr, self.lr_end))
            yield x[rows], target[rows]
