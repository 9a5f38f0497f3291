"""Critics at the nodes, for FedIOD and AsynDGAN.

Each node trains a patch critic D_k on its own data against generated inputs, and returns the critic's values
for these. Where images are generated from label maps, a critic judges pairs of map and image, and the node
that owns a map returns the distance of the image from the real one.

FedIOD Eq. 2; Chang et al., "Synthetic Learning", CVPR 2020, Eq. 2 and 3 (AsynDGAN).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from fedstill.core.options import NonNegativeFloat, NonNegativeInt, PositiveInt
from fedstill.data.augmentation import flip_and_rotate
from fedstill.methods import (
    ArgumentError,
    Method,
    Node,
    NodeGroup,
    NodeSetting,
    TensorData,
    adam,
    cosine_lr,
    seeded,
    set_lr,
    stack_tensors,
)
from fedstill.methods._label_maps import (
    DIFFERENCE,
    LABEL_MAPS,
    ImageMapCache,
    MapGeneratorOptions,
    map_order,
    owner_id,
)
from fedstill.models import PatchCritic
from fedstill.models.critics import Norm, PatchGAN
from fedstill.models.generators import TableCritic
from fedstill.models.vgg import perceptual_loss
from fedstill.node import dp_training
from fedstill.privacy.dpsgd import sampling_rate
from fedstill.protocol.payload_kinds import CRITIC, SOURCES

GANForm = Literal["eq2", "bce"]
CriticForm = Literal["two-layer", "patchgan"]


@dataclass(frozen=True, kw_only=True)
class CriticOptions(Method):
    """Options of a critic at each node, which takes one training step in each query."""

    batch: PositiveInt = 64
    """Inputs x in a query."""
    critic_width: PositiveInt = 32
    """Channels of the first convolution of each critic D_k (published: 128)."""
    critic_form: CriticForm = "two-layer"
    """Architecture of the critics: two strided convolutions with a receptive field of 10 pixels (published
    for classes), or Isola et al.'s patchgan with 70 pixels (published for label maps), for images of 24
    pixels a side or more.
    """
    gan: NonNegativeFloat = 1.0
    """Weight of L_gan (Eq. 2); 0: the nodes have no critics."""
    gan_form: GANForm = "bce"
    """Loss of the critics: L_gan as printed in Eq. 2, or binary cross-entropy (generator: non-saturating)."""
    critic_lr: NonNegativeFloat = 1e-3
    """Adam's learning rate for each critic D_k."""
    critic_schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate of the critics: constant, or a cosine to 0 over all its steps (published)."""
    critic_batch: NonNegativeInt = 0
    """Generated inputs of a query that D_k trains on, with as many of the node's own; 0: all (published). A
    critic that trains privately takes all.
    """

    @property
    def has_critics(self) -> bool:
        """True if the nodes have critics."""
        return self.gan > 0

    @property
    def critic_steps(self) -> int:
        """Number of training steps of D_k in a run."""
        return self.total_steps

    def make_critics(self, setting: NodeSetting) -> Critics:
        """Return the critics of the nodes."""
        return setting.cached("critics", lambda: Critics(self, setting))

    def prepare(self, nodes: Sequence[Node], setting: NodeSetting) -> None:
        """Add a critic to each node, if the method has critics."""
        self.make_critics(setting).prepare(nodes)


def real_loss(d: torch.Tensor, form: GANForm) -> torch.Tensor:
    """Return the loss of D_k on real data for each value: D_k learns to be low there (Eq. 2)."""
    return d.sigmoid() if form == "eq2" else F.softplus(d)


def fake_loss(d: torch.Tensor, form: GANForm) -> torch.Tensor:
    """Return the loss of D_k on generated inputs for each value: D_k learns to be high there."""
    return 1 - d.sigmoid() if form == "eq2" else F.softplus(-d)


def generator_gan_loss(d: torch.Tensor, form: GANForm) -> torch.Tensor:
    """Return the loss of G for each image at each critic: ``(K, B, h, w)`` to ``(K, B)``, summed over
    patches.

    It descends D, as Eq. 2 ascends 1 - D; of binary cross-entropy it is the non-saturating form.
    """
    return real_loss(d, form).flatten(2).sum(2)


class Critics:
    """Critics of all nodes of a method that sends x and, if x is generated from maps, those maps."""

    def __init__(self, config: CriticOptions, setting: NodeSetting) -> None:
        self.config, self.setting, self.task = config, setting, setting.task
        for option in ("batch", "critic_batch") if self.task.form == "rows" else ():
            if getattr(config, option, 0) == 1:  # a row has one value for each channel, hence no variance
                allowed = "2 or more for rows of a table, as batch norm compares them"
                raise ArgumentError(f"method.{option}", 1, allowed)
        self.maps = config if isinstance(config, MapGeneratorOptions) else None
        self.map_cache = setting.cached("map cache", lambda: ImageMapCache(setting.task))
        self.judges_pairs = self.maps is not None and config.has_critics
        self.compares_images = self.maps is not None and self.maps.compares_images(self.task)

    @property
    def sends(self) -> Mapping[str, str]:
        """Payload kinds of the tensors that are sent with x."""
        maps = {"maps": LABEL_MAPS} if self.judges_pairs else {}
        return {**maps, **({"source": SOURCES} if self.compares_images else {})}

    @property
    def releases(self) -> Mapping[str, str]:
        critic = {"critic": CRITIC} if self.config.has_critics else {}
        return {**critic, **({"difference": DIFFERENCE} if self.compares_images else {})}

    @property
    def depends_on_records(self) -> tuple[str, ...]:
        """Tensors of the response that are computed from the records directly."""
        return ("difference",) if self.compares_images else ()

    def prepare(self, nodes: Sequence[Node]) -> None:
        """Add a critic D_k with its own initial weights to each node, if there are critics."""
        conditions = self.task.condition_channels if self.judges_pairs else 0
        for node in nodes if self.config.has_critics else ():
            norm: Norm = "group" if "critic" in node.dp_sgd_parameters else "batch"
            shape = self.task.real_images(node.data).shape[1:]
            kind = self._critic_class(tuple(shape[1:]))
            with seeded(node.seed, node.name, "critic"):
                critic = kind(shape[0] + conditions, self.config.critic_width, norm)
            node.add_module("critic", critic, partial(adam, lr=self.config.critic_lr, beta=0.5))

    def _critic_class(self, sides: tuple[int, ...]) -> Callable[[int, int, Norm], nn.Module]:
        """Return the network class of D_k for inputs of a size.

        Raises:
            ArgumentError: PatchGAN for rows of a table or for images that are too small.
        """
        if self.config.critic_form == "patchgan":
            if self.task.form == "rows" or min(sides) < PatchGAN.min_side:
                allowed = f"two-layer, but for images of {PatchGAN.min_side} pixels a side or more"
                raise ArgumentError("method.critic_form", "patchgan", allowed)
            return PatchGAN
        return TableCritic if self.task.form == "rows" else PatchCritic

    def train_and_score(
        self,
        group: NodeGroup,
        number: int,
        x: torch.Tensor,
        maps: torch.Tensor | None = None,
        source: torch.Tensor | None = None,
        real: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Take a step of D_k on x and as many own examples, and return ``critic`` (G, B, h, w).

        With compared images also ``difference`` (G, B).

        Args:
            group: the nodes.
            number: number of the query, which names the random streams.
            x: ``(G, B, channels, H, W)``.
            maps: label maps of x ``(G, B, H, W)`` uint8, if critics judge pairs.
            source: owners of these maps ``(G, B, 3)`` int64, if nodes compare images.
            real: result of :meth:`sample_real_and_set_rates`, if it was called before.

        Raises:
            ArgumentError: not one map, or source, for each input.
        """
        form, response = tuple(x.shape[:2]), {}
        for name, about, wanted in (("maps", maps, form), ("source", source, (*form, 3))):
            if about is not None and tuple(about.shape[: len(wanted)]) != wanted:
                allowed = f"one for each of {form[1]} inputs"
                raise ArgumentError(f"shape of {name}", tuple(about.shape[1:]), allowed)
        if self.config.has_critics:
            seen = self.critic_input(x, maps)
            if self._trains_privately(group):
                self._set_rates(group.nodes)
                self._private_train_step(group.nodes[0], number, seen[0].detach())
            else:
                real = self.sample_real_and_set_rates(group, number, x)["real"] if real is None else real
                self._train_step(group, real, seen.detach()[:, : real.shape[1]])
            response["critic"] = group.module("critic")(seen)
        if self.compares_images and source is not None:
            each = zip(group.nodes, x, source, strict=True)
            response["difference"] = stack_tensors([self._distance_from_real(*mine) for mine in each])
        return response

    def sample_real_and_set_rates(
        self, group: NodeGroup, number: int, x: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return ``real``, the own examples that D_k trains on with x ``(G, B, ...)``, and set its learning
        rate.

        A critic that trains privately samples by itself.
        """
        if not self.config.has_critics or self._trains_privately(group):
            return {}
        self._set_rates(group.nodes)
        return {
            "real": self.sample_real(group, number, min(self.config.critic_batch or x.shape[1], x.shape[1]))
        }

    @staticmethod
    def _trains_privately(group: NodeGroup) -> bool:
        return "critic" in group.nodes[0].dp_sgd_parameters

    def evaluate(self, group: NodeGroup, x: torch.Tensor, maps: torch.Tensor | None = None) -> torch.Tensor:
        """Return D_k(x) ``(G, B, h, w)`` without training."""
        return group.module("critic")(self.critic_input(x, maps))

    def critic_input(self, x: torch.Tensor, maps: torch.Tensor | None) -> torch.Tensor:
        """Return the critics' input: the image, or map and image ``(..., conditions + channels, H, W)``."""
        if not self.judges_pairs or maps is None:
            return x
        return torch.cat([self.task.encode_maps(maps), x], -3)

    def sample_real(self, group: NodeGroup, number: int, size: int) -> torch.Tensor:
        """Return x'_k, a sample of each node's own data as critic input, ``(G, size, ...)``."""
        if self.maps is None:
            return group.sample_batch(size, "critic", number)[0]
        views = [copy_with_data(node, self.map_cache.get(node.data)) for node in group.nodes]
        parts = [view.sample_batch(size, "critic", number) for view in views]
        return self.critic_input(
            stack_tensors([part.inputs for part in parts]), stack_tensors([part.targets for part in parts])
        )

    def _set_rates(self, nodes: Sequence[Node]) -> None:
        """Set each D_k's learning rate by its number of steps, which its optimizer stores."""
        for node in nodes if self.config.critic_schedule == "cosine" else ():
            group, total = node.optimizers["critic"].param_groups[0], self.config.critic_steps
            taken = group.setdefault("steps taken", 0)
            rate = cosine_lr(min(taken, total - 1), total, self.config.critic_lr, 0.0)
            set_lr(node.optimizers["critic"], rate)
            group["steps taken"] = taken + 1

    def _train_step(self, group: NodeGroup, real: torch.Tensor, fake: torch.Tensor) -> None:
        """Take a step of each D_k (Eq. 2), without pi_k, which would need the other nodes' sizes."""
        critic, form = group.module("critic"), self.config.gan_form
        with torch.enable_grad():
            critic.train(True)
            losses = real_loss(critic(real), form) + fake_loss(critic(fake), form)
            group.step("critic", losses.flatten(1).mean(1))

    def _private_train_step(self, node: Node, number: int, fake: torch.Tensor) -> None:
        """Take a DP-SGD step (DP-CGAN): x'_k are sampled record by record; the loss on generated inputs is
        free."""
        n, batch, form = len(node.data), self.config.batch, self.config.gan_form
        dp_training.private_step(
            self._copy_with_critic_inputs(node),
            "critic",
            node.dp_sgd_parameters["critic"],
            sampling_rate(n, batch),
            number,
            private_loss=lambda D, real, _: real_loss(D(real), form).flatten(1).mean(1),
            public_loss=lambda D: fake_loss(D(fake), form).mean(),
            batch=min(n, batch),
        )

    def _copy_with_critic_inputs(self, node: Node) -> Node:
        """Return the node with critic inputs as data, computed in advance, since DP-SGD takes records one by
        one."""
        if self.maps is None:
            return node
        found = self.map_cache.get(node.data)
        return copy_with_data(
            node, TensorData(self.critic_input(found.inputs, found.targets), found.targets, found.groups)
        )

    def _distance_from_real(self, node: Node, x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Return the distance of images from the real ones of the same maps: ``(B,)``, 0 for other owners'
        maps."""
        assert self.maps is not None
        mine = map_order(node)
        owner, row, pose = source.long().unbind(1)
        # Ignore rows that this node did not send.
        rows = torch.nonzero((owner == owner_id(node.name)) & (row >= 0) & (row < len(mine))).flatten()
        difference = x.new_zeros(len(x))
        if not len(rows):
            return difference
        real = flip_and_rotate(self.map_cache.get(node.data).inputs[mine[row[rows]]], pose[rows])
        made = x[rows]
        found = self.maps.pixel * (made - real).abs().flatten(1).mean(1)
        if self.maps.perceptual and self.setting.perceptual is not None:
            found = found + self.maps.perceptual * perceptual_loss(self.setting.perceptual, made, real)
        return difference.index_put((rows,), found)


def copy_with_data(node: Node, data: TensorData) -> Node:
    """Return a copy of the node with other data, record by record."""
    view = copy.copy(node)
    view.data = data
    return view
