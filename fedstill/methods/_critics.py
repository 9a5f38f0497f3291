"""Critics at the nodes: what FedIOD and AsynDGAN ask them, and what is learned for an answer.

Each node trains a patch critic D_k on its own data and on what the server's generator made, and answers how
generated that looks to it. Where images are made from maps, a critic judges the pair of map and image, its
real pairs being the node's own; and the node that owns a map tells how far the image is from the real one.

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
    GeneratesFromMaps,
    ImageMapCache,
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
    """A critic at each node, which learns with each query."""

    batch: PositiveInt = 64
    """Inputs x in a query."""
    critic_width: PositiveInt = 32
    """Channels of D_k's first convolution (published: 128)."""
    critic_form: CriticForm = "two-layer"
    """What D_k looks at: patches of 10 pixels, by two strided convolutions (published for classes), or of 70,
    by Isola et al.'s patchgan (published for label maps), which wants images of 24 pixels a side or more."""
    gan: NonNegativeFloat = 1.0
    """Weight of L_gan (Eq. 2); 0: the nodes have no critics."""
    gan_form: GANForm = "bce"
    """L_gan as printed in Eq. 2, or binary cross-entropy with the generator's non-saturating form."""
    critic_lr: NonNegativeFloat = 1e-3
    """Adam's learning rate for each D_k."""
    critic_schedule: Literal["constant", "cosine"] = "constant"
    """Whether it stays, or falls on a cosine to 0 over all steps of D_k (published)."""
    critic_batch: NonNegativeInt = 0
    """Inputs of a query that D_k learns on, beside as many of the node's own; 0: all (published). A critic
    that learns privately takes all."""

    @property
    def has_critics(self) -> bool:
        """Whether there are critics at all."""
        return self.gan > 0

    @property
    def critic_steps(self) -> int:
        """How many steps D_k takes in a run."""
        return self.total_steps

    def critics(self, setting: NodeSetting) -> Critics:
        """D_k of the nodes."""
        return at.cached("critics", lambda: Critics(self, at))

    def prepare(self, nodes: Sequence[Node], setting: NodeSetting) -> None:
        """A critic for each node, where there are any."""
        self.critics(at).prepare(nodes)


def real_loss(d: torch.Tensor, form: GANForm) -> torch.Tensor:
    """What D_k loses where it looks at real data, value by value: it learns to be low there (Eq. 2)."""
    return d.sigmoid() if form == "eq2" else F.softplus(d)


def fake_loss(d: torch.Tensor, form: GANForm) -> torch.Tensor:
    """What D_k loses where it looks at what was generated, value by value: it learns to be high there."""
    return 1 - d.sigmoid() if form == "eq2" else F.softplus(-d)


def generator_gan_loss(d: torch.Tensor, form: GANForm) -> torch.Tensor:
    """What G loses for each image at each critic: ``(K, B, h, w)`` to ``(K, B)``, summed over patches.

    Descending D, as ascending 1 - D in Eq. 2; of binary cross-entropy the form that does not saturate.
    """
    return real_loss(d, form).flatten(2).sum(2)


class Critics:
    """The critics of a method's nodes, which sends x and what maps it was made from, if from any."""

    def __init__(self, config: CriticOptions, setting: NodeSetting) -> None:
        self.config, self.setting, self.task = config, setting, setting.task
        for option in ("batch", "critic_batch") if self.task.form == "rows" else ():
            if getattr(config, option, 0) == 1:  # a row is one value a channel, of which there is no variance
                allowed = "2 or more for rows of a table, as batch norm compares them"
                raise ArgumentError(f"method.{option}", 1, allowed)
        self.maps = config if isinstance(config, GeneratesFromMaps) else None
        self.map_cache = setting.cached("map cache", lambda: ImageMapCache(setting.task))
        self.judges_pairs = self.maps is not None and config.has_critics
        self.compares_images = self.maps is not None and self.maps.compares_images(self.task)

    @property
    def sends(self) -> Mapping[str, str]:
        """What goes down with x, by kind."""
        maps = {"maps": LABEL_MAPS} if self.judges_pairs else {}
        return {**maps, **({"source": SOURCES} if self.compares_images else {})}

    @property
    def releases(self) -> Mapping[str, str]:
        critic = {"critic": CRITIC} if self.config.has_critics else {}
        return {**critic, **({"difference": DIFFERENCE} if self.compares_images else {})}

    @property
    def depends_on_records(self) -> tuple[str, ...]:
        """What of an answer is computed from the records themselves."""
        return ("difference",) if self.compares_images else ()

    def prepare(self, nodes: Sequence[Node]) -> None:
        """A critic D_k for each node, with its own first weights; none where nothing needs it."""
        conditions = self.task.condition_channels if self.judges_pairs else 0
        for node in nodes if self.config.has_critics else ():
            norm: Norm = "group" if "critic" in node.private_steps else "batch"
            shape = self.task.real_images(node.data).shape[1:]
            kind = self._critic_class(tuple(shape[1:]))
            with seeded(node.seed, node.name, "critic"):
                critic = kind(shape[0] + conditions, self.config.critic_width, norm)
            node.add_module("critic", critic, partial(adam, lr=self.config.critic_lr, beta=0.5))

    def _critic_class(self, sides: tuple[int, ...]) -> Callable[[int, int, Norm], nn.Module]:
        """The network of D_k for inputs of a size.

        Raises:
            ArgumentError: the PatchGAN, for rows of a table or images that are too small.
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
        """``critic`` (G, B, h, w), after a step of D_k on x and as many of its own; ``difference`` (G, B).

        Args:
            number: of the query, which names what is drawn.
            x: ``(G, B, channels, H, W)``.
            maps: that x was made from ``(G, B, H, W)`` uint8, where critics judge pairs.
            source: whose maps those are ``(G, B, 3)`` int64, where nodes compare.
            real: what :meth:`drawn` gave, where that was done before.

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
                real = self.sample_inputs(group, number, x)["real"] if real is None else real
                self._train_step(group, real, seen.detach()[:, : real.shape[1]])
            response["critic"] = group.module("critic")(seen)
        if self.compares_images and source is not None:
            each = zip(group.nodes, x, source, strict=True)
            response["difference"] = stack_tensors([self._difference(*mine) for mine in each])
        return response

    def sample_inputs(self, group: NodeGroup, number: int, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """``real``, what D_k learns on of the node's own beside x ``(G, B, ...)``; its learning rate is set.

        A critic that learns privately draws by itself.
        """
        if not self.config.has_critics or self._trains_privately(group):
            return {}
        self._set_rates(group.nodes)
        return {
            "real": self.sample_real(group, number, min(self.config.critic_batch or x.shape[1], x.shape[1]))
        }

    @staticmethod
    def _trains_privately(group: NodeGroup) -> bool:
        return "critic" in group.nodes[0].private_steps

    def evaluate(self, group: NodeGroup, x: torch.Tensor, maps: torch.Tensor | None = None) -> torch.Tensor:
        """D_k(x) as it is, ``(G, B, h, w)``; nothing is trained."""
        return group.module("critic")(self.critic_input(x, maps))

    def critic_input(self, x: torch.Tensor, maps: torch.Tensor | None) -> torch.Tensor:
        """What critics see: the image, or map and image, ``(..., conditions + channels, H, W)``."""
        if not self.judges_pairs or maps is None:
            return x
        return torch.cat([self.task.encode_maps(maps), x], -3)

    def sample_real(self, group: NodeGroup, number: int, size: int) -> torch.Tensor:
        """x'_k as critics see them: some of each node's own, ``(G, size, ...)``."""
        if self.maps is None:
            return group.sample(size, "critic", number)[0]
        views = [with_data(node, self.map_cache.get(node.data)) for node in group.nodes]
        parts = [view.sample(size, "critic", number) for view in views]
        return self.critic_input(
            stack_tensors([part.inputs for part in parts]), stack_tensors([part.targets for part in parts])
        )

    def _set_rates(self, nodes: Sequence[Node]) -> None:
        """Each D_k's learning rate by the steps that it has taken, which its optimizer remembers."""
        for node in nodes if self.config.critic_schedule == "cosine" else ():
            group, total = node.optimizers["critic"].param_groups[0], self.config.critic_steps
            taken = group.setdefault("steps taken", 0)
            rate = cosine_lr(min(taken, total - 1), total, self.config.critic_lr, 0.0)
            set_lr(node.optimizers["critic"], rate)
            group["steps taken"] = taken + 1

    def _train_step(self, group: NodeGroup, real: torch.Tensor, fake: torch.Tensor) -> None:
        """A step of each D_k (Eq. 2), without pi_k, which would need the other nodes' sizes."""
        critic, form = group.module("critic"), self.config.gan_form
        with torch.enable_grad():
            critic.train(True)
            losses = real_loss(critic(real), form) + fake_loss(critic(fake), form)
            group.step("critic", losses.flatten(1).mean(1))

    def _private_train_step(self, node: Node, number: int, fake: torch.Tensor) -> None:
        """The same with DP-SGD (DP-CGAN): x'_k are drawn each by itself; what fakes teach is free."""
        n, batch, form = len(node.data), self.config.batch, self.config.gan_form
        dp_training.private_step(
            self._with_critic_inputs(node),
            "critic",
            node.private_steps["critic"],
            sampling_rate(n, batch),
            number,
            private_loss=lambda D, real, _: real_loss(D(real), form).flatten(1).mean(1),
            public_loss=lambda D: fake_loss(D(fake), form).mean(),
            batch=min(n, batch),
        )

    def _with_critic_inputs(self, node: Node) -> Node:
        """The node with what its critic sees for inputs, made beforehand: a step takes records one by one."""
        if self.maps is None:
            return node
        found = self.map_cache.get(node.data)
        return with_data(
            node, TensorData(self.critic_input(found.inputs, found.targets), found.targets, found.groups)
        )

    def _difference(self, node: Node, x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """How far images are from the real ones of the same maps: ``(B,)``, 0 where the map is another's."""
        assert self.maps is not None
        mine = map_order(node)
        owner, row, pose = source.long().unbind(1)
        # A row that was never told is nobody's.
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


def with_data(node: Node, data: TensorData) -> Node:
    """The node with other data in the place of its own, record by record; all else is the same."""
    view = copy.copy(node)
    view.data = data
    return view
