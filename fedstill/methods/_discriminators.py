"""Discriminators D_k ("critics") at the nodes, for FedIOD and AsynDGAN.

Each node trains a patch critic D_k on its own data against generated inputs, and returns the critic's values
for these. Where images are generated from label maps, a critic judges pairs of map and image.

FedIOD Eq. 2; Chang et al., "Synthetic Learning", CVPR 2020, Eq. 2 and 3 (AsynDGAN).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from fedstill.core.options import CheckedOptions, NonNegativeFloat, NonNegativeInt, PositiveInt
from fedstill.methods import ArgumentError, Node, NodeView, TensorData, adam, cosine_lr, seeded
from fedstill.models import PatchCritic
from fedstill.models.gan import Norm, PatchGAN, TableCritic
from fedstill.tasks import Task

GANLoss = Literal["eq2", "bce"]
Pairs = Callable[[TensorData], TensorData]  # own data to images and their label maps


@dataclass(frozen=True, kw_only=True)
class Discriminators(CheckedOptions):
    """Options of a critic at each node, which takes one training step in each query."""

    section: ClassVar[str] = "method.critic"

    width: PositiveInt = 32
    """Channels of the first convolution of each critic D_k (published: 128)."""
    form: Literal["two-layer", "patchgan"] = "two-layer"
    """Architecture of the critics: two strided convolutions with a receptive field of 10 pixels (published
    for classes), or Isola et al.'s patchgan with 70 pixels (published for label maps), for images of 24
    pixels a side or more.
    """
    loss: GANLoss = "bce"
    """Adversarial loss: L_gan as printed in Eq. 2 (eq2), or binary cross-entropy with the generator's
    non-saturating form (bce).
    """
    lr: NonNegativeFloat = 1e-3
    """Adam's learning rate for each critic."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Schedule of the critics' learning rate: constant, or a cosine to 0 over all its steps (published)."""
    batch: NonNegativeInt = 0
    """Generated inputs of a query that a critic trains on, with as many of the node's own; 0: all
    (published). A critic that trains privately takes all.
    """

    def add_to(self, node: Node, task: Task, steps: int, *, judges_pairs: bool = False) -> None:
        """Add a critic D_k with initial weights of its own to a node.

        Args:
            node: the node.
            task: the task.
            steps: number of training steps of D_k in a run.
            judges_pairs: whether it sees pairs of label map and image.

        Raises:
            ArgumentError: PatchGAN for rows of a table, or for images that are too small.
        """
        channels, *sides = task.real_images(node.data).shape[1:]
        norm: Norm = "group" if "critic" in node.dp_sgd_parameters else "batch"
        with seeded(node.seed, node.name, "critic"):
            network = self._network_class(task, tuple(sides))
            critic = network(channels + task.condition_channels * judges_pairs, self.width, norm)
        rate = partial(_cosine_to_zero, steps=steps, lr=self.lr) if self.schedule == "cosine" else None
        node.add_module("critic", critic, partial(adam, lr=self.lr, beta=0.5), rate)

    def _network_class(self, task: Task, sides: tuple[int, ...]) -> Callable[[int, int, Norm], nn.Module]:
        if self.form == "patchgan":
            if task.form == "rows" or min(sides) < PatchGAN.min_side:
                allowed = f"two-layer, but for images of {PatchGAN.min_side} pixels a side or more"
                raise ArgumentError("method.critic.form", "patchgan", allowed)
            return PatchGAN
        return TableCritic if task.form == "rows" else PatchCritic

    def check_table_batches(self, task: Task, batch: int) -> None:
        """Check batches of rows of a table: a row has one value for each channel, hence no variance.

        Raises:
            ArgumentError: a batch of one row.
        """
        for name, size in (("method.batch", batch), ("method.critic.batch", self.batch)):
            if task.form == "rows" and size == 1:
                allowed = "2 or more for rows of a table, as batch norm compares them"
                raise ArgumentError(name, 1, allowed)

    # --- at a node --------------------------------------------------------------------------------------

    def train_step(
        self, node: NodeView, fake: torch.Tensor, private_batch: int, pairs: Pairs | None = None
    ) -> None:
        """Take a step of D_k on generated inputs and as many own ones (Eq. 2), without pi_k.

        The weight pi_k would need the other nodes' sizes.

        Args:
            node: the node.
            fake: generated inputs as the critic sees them, ``(B, channels, H, W)``.
            private_batch: mean number of own inputs in a step of a critic that trains privately.
            pairs: returns the node's images and label maps, for a critic of pairs.
        """
        D = node.module("critic")
        if node.trains_privately("critic"):  # DP-CGAN: x'_k are sampled record by record; fakes are free
            node.private_step(
                "critic",
                lambda D, real, _: self.real_loss(D(real)).flatten(1).mean(1),
                lambda D: self.fake_loss(D(fake)).mean(),
                batch=private_batch,
                data=partial(critic_inputs, node.task, pairs),
            )
            return
        real = sample_real(node, min(self.batch or len(fake), len(fake)), pairs)  # x'_k
        with torch.enable_grad():
            D.train(True)
            losses = self.real_loss(D(real)) + self.fake_loss(D(fake[: len(real)]))
            node.step("critic", losses)

    # --- losses -----------------------------------------------------------------------------------------

    def real_loss(self, d: torch.Tensor) -> torch.Tensor:
        """Return the loss of D_k on real data for each value: D_k learns to be low there (Eq. 2)."""
        return d.sigmoid() if self.loss == "eq2" else F.softplus(d)

    def fake_loss(self, d: torch.Tensor) -> torch.Tensor:
        """Return the loss of D_k on generated inputs for each value: D_k learns to be high there."""
        return 1 - d.sigmoid() if self.loss == "eq2" else F.softplus(-d)

    def generator_loss(self, d: torch.Tensor) -> torch.Tensor:
        """Return the loss of G for each image at each critic: ``(K, B, h, w)`` to ``(K, B)``, summed over
        patches.

        It descends D, as Eq. 2 ascends 1 - D; of binary cross-entropy it is the non-saturating form.
        """
        return self.real_loss(d).flatten(2).sum(2)


def sample_real(node: NodeView, size: int, pairs: Pairs | None = None) -> torch.Tensor:
    """Return x'_k, a sample of the node's own data as the critic sees them, ``(size, ...)``."""
    inputs, maps = node.sample(size, "critic", data=pairs)
    return inputs if pairs is None else join_pairs(node.task, inputs, maps)


def join_pairs(task: Task, x: torch.Tensor, maps: torch.Tensor) -> torch.Tensor:
    """Return pairs of label map and image, ``(B, conditions + channels, H, W)``."""
    return torch.cat([task.encode_maps(maps), x], -3)


def critic_inputs(task: Task, pairs: Pairs | None, data: TensorData) -> TensorData:
    """Return a node's data as the critic sees them, for DP-SGD, which samples them record by record."""
    if pairs is None:
        return data
    found = pairs(data)
    return TensorData(join_pairs(task, found.inputs, found.targets), found.targets, found.groups)


def _cosine_to_zero(taken: int, steps: int, lr: float) -> float:
    return cosine_lr(min(taken, steps - 1), steps, lr, 0.0)
