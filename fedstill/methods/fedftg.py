"""FedFTG: parameters are averaged, then a generator of hard samples fine-tunes each average.

Zhang, Shen, Ding, Tao, Duan: "Fine-tuning Global Model via Data-Free Knowledge Distillation for Non-IID
Federated Learning", CVPR 2022. Symbols are those of the paper's overview figure and of the authors' code: the
global model D, the nodes' models D_k of the sampled nodes S_t, the generator G, pseudo data x = G(z, y) from
noise z and a label y ~ p_t(y), losses L_md (model discrepancy), L_cls (fidelity) and L_dis (diversity), and
the class-level weights alpha_k^y. With n_k^y examples of class y at node k:

    p_t(y) ~ sum_k n_k^y                       customized label sampling
    alpha_k^y = n_k^y / sum_i n_i^y            class-level ensemble
    min_D max_G  L_md - lambda_cls L_cls - lambda_dis L_dis      hard sample mining
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from annotated_types import Ge

from fedstill.core.options import NonNegativeFloat, NonNegativeInt, PositiveInt
from fedstill.methods import (
    LabelHistogram,
    Needs,
    NodeSetting,
    Query,
    Server,
    cosine_lr,
    count_labels_query,
    set_lr,
)
from fedstill.methods._feature_generators import diversity_loss, kl, sample_noise_and_labels, stack_uploads
from fedstill.methods._input_generators import GeneratorBatch, GeneratorTraining, LabelGenerator
from fedstill.methods._public_data import distill, make_student_optimizer
from fedstill.methods.fedavg import FedAvg, sample_nodes
from fedstill.models.gan import append_one_hot
from fedstill.models.module_utils import load_vector, to_vector, weighted_mean
from fedstill.node.stacked_modules import StackedModules


@dataclass
class FedFTGState:
    """Server state besides the global model D."""

    generator: GeneratorTraining  # G
    histogram: LabelHistogram = field(default_factory=LabelHistogram)  # n_k^y and n_k


@dataclass(frozen=True, kw_only=True)
class FedFTG(FedAvg):
    """Averages of parameters, each fine-tuned on hard samples of a generator."""

    title: ClassVar[str] = "FedFTG"
    paper: ClassVar[str] = "Zhang et al., CVPR 2022"
    query_names: ClassVar[tuple[str, ...]] = ("count_labels", "train")
    batch_options: ClassVar[tuple[str, ...]] = ("batch",)
    linear: ClassVar[bool] = False  # each D_k is a teacher

    steps: NonNegativeInt = 10
    """Batches of noise and labels in each round; 0 keeps the averages unchanged."""
    batch: Annotated[int, Ge(2)] = 64
    """Pseudo data x in a batch."""
    generator_steps: PositiveInt = 1
    """Steps of G on each batch of noise and labels."""
    student_steps: PositiveInt = 5
    """Steps of D on each batch of noise and labels."""
    fidelity: NonNegativeFloat = 1.0
    """Weight of the cross-entropy of the nodes' models with the labels in G's loss (lambda_cls)."""
    diversity: NonNegativeFloat = 1.0
    """Weight of the diversity loss in G's loss (lambda_dis)."""
    lr: NonNegativeFloat = 1e-4
    """Adam's learning rate for D, falling over the rounds on a cosine to lr_end."""
    lr_end: NonNegativeFloat = 1e-4
    """Learning rate of D in the last round."""

    generator: LabelGenerator = field(default_factory=LabelGenerator)
    """The generator G."""

    def needs(self) -> Needs:
        return Needs(trainable=True, same_architecture=True, generates_inputs=True, single_label=True)

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        """Return the queries for label counts, once, and for models after a round of training."""
        yield count_labels_query(setting)
        yield from (query for query in super().queries(setting) if query.name == "train")

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> FedFTGState:
        return FedFTGState(GeneratorTraining(self.generator, server))

    def step(self, server: Server, state: FedFTGState, t: int) -> Mapping[str, float]:
        """Run one round of FedAvg, then fine-tune the average; return the losses of the last batch."""
        D, histogram = server.student, state.histogram
        histogram.fetch(server)
        known = histogram.present_nodes(server.federation)
        S_t = sample_nodes(known, self.participation, server.seed, t)
        updates = server.query("train", nodes=S_t, parameters=to_vector(D), round=t)
        responding = histogram.select(updates.nodes)
        load_vector(D, weighted_mean(updates["parameters"], responding.sizes))  # sum_k n_k w_k / sum_k n_k
        D_k = stack_uploads(D, updates["parameters"])
        return self.finetune(server, state.generator, D_k, responding.counts, t)

    def finetune(
        self, server: Server, G: GeneratorTraining, D_k: StackedModules, n_y: torch.Tensor, t: int
    ) -> Mapping[str, float]:
        """Train G and D in turn on batches of noise and labels.

        Args:
            server: the server, whose student is D.
            G: the generator.
            D_k: the nodes' models.
            n_y: the nodes' numbers of examples of each class ``(K, C)``.
            t: the round.
        """
        D, task, K = server.student.eval(), server.task, len(n_y)  # batch norm keeps averaged statistics
        optimizer = make_student_optimizer(D, self.lr)
        set_lr(optimizer, cosine_lr(t, self.rounds, self.lr, self.lr_end))
        G.set_lr(t, self.rounds)
        losses, L_md = torch.zeros(3), 0.0
        for index in range(self.steps):
            seed = (server.seed, t, index)
            z, y = sample_noise_and_labels(server.compute, n_y, self.batch, G.source.size, *seed)  # y ~ p_t
            batch = GeneratorBatch(append_one_hot(z, y, task.classes), labels=y)
            alpha = task.importance_weights(n_y).squeeze(1)[:, y]  # alpha_k^y  (K, B)
            for step in range(self.generator_steps):
                with server.compute.step(server.seed, "generator", t, index, step):
                    x = G(batch)  # (B, ...)
                    d_k, d = D_k(x.expand(K, *x.shape)), D(x).float()  # (K, B, C), (B, C)
                    losses = generator_losses(alpha, d_k, d, x, z, y)
                G.step(-losses[0] + self.fidelity * losses[1] + self.diversity * losses[2])
            x = G.evaluate(batch)
            with torch.no_grad(), server.compute.autocast():
                d_k = D_k(x.expand(K, *x.shape))
            L_md = distill(
                D,
                optimizer,
                [(x, d_k)] * self.student_steps,
                partial(model_discrepancy, alpha),
                server.compute,
                server.seed,
                "student",
                t,
                index,
            )
        return {"student": L_md, "recognized": losses[1].item(), "diversity": losses[2].item()}

    def preview_samples(self, server: Server, state: FedFTGState, count: int) -> torch.Tensor | None:
        return state.generator.preview_samples(count)


def model_discrepancy(alpha: torch.Tensor, d: torch.Tensor, d_k: torch.Tensor) -> torch.Tensor:
    """Return L_md = sum_k alpha_k^y KL(D_k(x) || D(x)) of each input: ``(B,)``.

    Args:
        alpha: weight of each node for each input's label ``(K, B)``.
        d: logits of the global model ``(B, C)``.
        d_k: logits of the nodes' models ``(K, B, C)``.
    """
    return (alpha * kl(d_k, d)).sum(0)


def generator_losses(
    alpha: torch.Tensor,
    d_k: torch.Tensor,
    d: torch.Tensor,
    x: torch.Tensor,
    z: torch.Tensor,
    y: torch.Tensor,
) -> torch.Tensor:
    """Return L_md, L_cls and L_dis, means over a batch: ``(3,)``.

    Args:
        alpha: weight of each node for each input's label ``(K, B)``.
        d_k: logits of the nodes' models ``(K, B, C)``.
        d: logits of the global model ``(B, C)``.
        x: pseudo data ``(B, ...)``.
        z: their noise ``(B, q)``.
        y: their labels ``(B,)``.
    """
    L_md = model_discrepancy(alpha, d, d_k).mean()
    wrong = F.cross_entropy(d_k.flatten(0, 1), y.repeat(len(d_k)), reduction="none").view_as(alpha)
    L_cls = (alpha * wrong).sum(0).mean()
    L_dis = diversity_loss("div0", x.flatten(1), z, F.one_hot(y))
    return torch.stack([L_md, L_cls, L_dis])
