"""FedSD2C: nodes release a few images distilled from their own, and the student trains on them.

Zhang, Liu, Wang: "One-shot Federated Learning via Synthetic Distiller-Distillate Communication", NeurIPS
2024, arXiv:2412.05186. Node i has data (X_t, Y_t) and a trained model, whose features are h_i. It

1. selects a core-set X_s: of each class the ``ipc`` images with the most V-information for the node's model,
   which are those with the lowest cross-entropy;
2. perturbs each with the Fourier amplitudes of another image x* of the class, (1 - lambda) A(x) + lambda
   A(x*), and keeps its phases;
3. optimizes the result z until mean h_i(z) is near mean h_i(x) of the core-set, class by class (L_syn), and
   releases z with the outputs of its model.

The paper optimizes z in the latent space of a pretrained autoencoder D, with D(z) in place of z here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Interval
from torch import nn

from fedstill.core.optimizers import Adam
from fedstill.core.options import NonNegativeInt, PositiveFloat, PositiveInt, PositiveOrInf
from fedstill.methods import (
    ArgumentError,
    Method,
    Needs,
    NodeSetting,
    NodeView,
    PayloadKind,
    PublicData,
    Query,
    QueryCall,
    QueryDetails,
    Responses,
    Server,
    Tensors,
    cosine_lr,
    predict,
    set_lr,
)
from fedstill.methods._public_data import StudentTraining, distill, iterate_batches
from fedstill.models.extractor_head import EXTRACTOR

DISTILLATES = PayloadKind(
    "distillates",
    "images made from a node's own images of each class, which may resemble these, with its model's outputs",
)


@dataclass
class FedSD2CState:
    """Server state besides the student; without distillates before the first step."""

    optimizer: torch.optim.Optimizer  # the student's
    images: torch.Tensor | None = None  # (N, C, H, W), of all nodes
    outputs: torch.Tensor | None = None  # (N, classes)


@dataclass(frozen=True, kw_only=True)
class FedSD2C(Method):
    """Training of a student on images that nodes distil from their own."""

    title: ClassVar[str] = "FedSD2C"
    paper: ClassVar[str] = "Zhang et al., NeurIPS 2024"
    query_names: ClassVar[tuple[str, ...]] = ("distil_core_set",)
    unit: ClassVar[Literal["epoch"]] = "epoch"
    one_round: ClassVar[bool] = True
    batch_options: ClassVar[tuple[str, ...]] = ("student.batch",)
    server_only_options: ClassVar[tuple[str, ...]] = ("tau", "student")

    ipc: PositiveInt = 10
    """Images of each class that a node releases (published: 50), if it has more than that of the class."""
    lam: Annotated[float, Interval(ge=0, le=1)] = 0.8
    """Share (lambda) of another image's Fourier amplitudes. 0: none, so images start as the node's own."""
    image_steps: NonNegativeInt = 50
    """Steps of the optimization of the images (T_syn). 0: perturbed images are released."""
    image_lr: PositiveFloat = 0.1
    """Adam's learning rate for images, falling to 0 on a cosine, in units of the normalized inputs."""
    tau: PositiveOrInf = 1.0
    """Temperature of the distillation."""

    student: StudentTraining = field(default_factory=partial(StudentTraining, epochs=100))
    """The training of the student on the distillates."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.student.require_epochs()

    @property
    def total_steps(self) -> int:
        return self.student.epochs

    def needs(self) -> Needs:
        return Needs(images=True, single_label=True, split_models=True)

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        yield Query(
            self.distil_core_set,
            releases=dict.fromkeys(("distillates", "soft_labels", "present"), DISTILLATES),
            times=1,  # without depends_on_records: no mechanism protects images made from single records
            details=QueryDetails(constant=True),
        )

    # --- at a node --------------------------------------------------------------------------------------

    def distil_core_set(self, node: NodeView) -> Tensors:
        """Return the distillates of all classes.

        Returns:
            distillates ``(C * ipc, ...)`` class by class, soft_labels ``(C * ipc, C)``: the outputs of the
            node's model for them, and present ``(C,)``: 1 for classes with distillates, else 0. Others have
            zeros.
        """
        with node.setting.compute.in_float32():  # Adam would amplify the rounding of bfloat16
            distillates, soft_labels, present = node.separately(self.distil)
        return {"distillates": distillates, "soft_labels": soft_labels, "present": present}

    def distil(self, node: NodeView) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        model, x, y, C = node.network().eval(), node.data.inputs, node.data.targets, node.task.classes
        compute = node.setting.compute.as_float32
        z = x.new_zeros(C, self.ipc, *x.shape[1:])
        present = [c for c in range(C) if (y == c).sum() > self.ipc]
        cross_entropy = F.cross_entropy(predict(model, x, compute), y, reduction="none")  # (N,)
        for c in present:
            core, others = self.select(cross_entropy, y == c)
            perturbed = mix_amplitudes(x[core], x[others], self.lam)
            z[c] = self.optimize(model.get_submodule(EXTRACTOR), perturbed, x[core], pixel_range(x))
        z = z.flatten(0, 1)  # (C * ipc, ...)
        is_present = torch.zeros(C, device=x.device)
        is_present[present] = 1
        outputs = predict(model, z, compute) * is_present.repeat_interleave(self.ipc).unsqueeze(1)
        return z, outputs, is_present

    def select(
        self, cross_entropy: torch.Tensor, of_class: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of the core-set, and as many of the class's other images, most uncertain first.

        Args:
            cross_entropy: of each of the node's images ``(N,)``.
            of_class: mask of the class ``(N,)``.
        """
        (rows,) = of_class.nonzero(as_tuple=True)
        rows = rows[cross_entropy[rows].argsort(stable=True)]  # the most V-information first
        core, rest = rows[: self.ipc], rows[self.ipc :].flip(0)
        return core, rest.repeat(-(-len(core) // len(rest)))[: len(core)]

    def optimize(
        self, h: nn.Module, z: torch.Tensor, x: torch.Tensor, bounds: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Return images z ``(ipc, ...)`` after descent of L_syn = || mean_j h(z_j) - mean_j h(x_j) ||_2."""
        low, high = bounds
        with torch.enable_grad():
            z = torch.clamp(z, low, high).detach().requires_grad_()
            target = h(x).mean(0).detach()
            adam = Adam([z], self.image_lr, betas=(0.5, 0.9))
            for step in range(self.image_steps):
                set_lr(adam, cosine_lr(step, self.image_steps, self.image_lr, 0.0))
                (z.grad,) = torch.autograd.grad((h(z).mean(0) - target).norm(), z)
                adam.step()
                with torch.no_grad():
                    z.clamp_(low, high)
        return z.detach()

    # --- at the server ----------------------------------------------------------------------------------

    def planned_queries(self, public: PublicData | None, seed: int) -> Sequence[QueryCall]:
        return (QueryCall("distil_core_set"),)

    def init_state(self, server: Server) -> FedSD2CState:
        return FedSD2CState(self.student.make_optimizer(server.student))

    def step(self, server: Server, state: FedSD2CState, t: int) -> Mapping[str, float]:
        """Train the student on all distillates once; they are fetched in the first step."""
        if state.images is None or state.outputs is None:
            state.images, state.outputs = self.collect(server.query("distil_core_set"))
        self.student.set_lr(state.optimizer, t, self.total_steps)
        batches = iterate_batches(
            state.images, state.outputs, self.student.batch, server.seed, "distillates' order", t
        )
        distance = partial(server.task.distillation_loss, tau=self.tau)
        student = server.student.train()
        loss = distill(student, state.optimizer, batches, distance, server.compute, server.seed, "student", t)
        return {"student": loss}

    def collect(self, responses: Responses) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images and outputs ``(N, ...)`` of all nodes and classes with distillates.

        Raises:
            ArgumentError: there are none.
        """
        rows = responses["present"].repeat_interleave(self.ipc, 1) > 0  # (K, C * ipc)
        if not rows.any():
            raise ArgumentError("method.ipc", self.ipc, "less than some node's number of images of a class")
        return responses["distillates"][rows], responses["soft_labels"][rows]


def mix_amplitudes(x: torch.Tensor, other: torch.Tensor, lam: float) -> torch.Tensor:
    """Return images with the phases of x and the amplitudes (1 - lam) A(x) + lam A(other), ``(B, C, H, W)``.

    >>> x, other = torch.tensor([[[[1.0, 1.0]]]]), torch.tensor([[[[3.0, 3.0]]]])
    >>> mix_amplitudes(x, other, 0.5)
    tensor([[[[2., 2.]]]])
    """
    of_x, of_other = torch.fft.fft2(x), torch.fft.fft2(other)
    amplitude = (1 - lam) * of_x.abs() + lam * of_other.abs()
    mixed: torch.Tensor = torch.fft.ifft2(torch.polar(amplitude, of_x.angle())).real
    return mixed


def pixel_range(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and greatest value of images ``(N, C, H, W)``, ``(C, 1, 1)`` each."""
    return x.amin((0, 2, 3)).view(-1, 1, 1), x.amax((0, 2, 3)).view(-1, 1, 1)
