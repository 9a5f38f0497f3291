"""Label maps as inputs of a server's generator, and their sources.

For tasks with conditions (:class:`fedstill.tasks.Task`) an image is generated from a map of one number for
each pixel. The nodes' own maps work best, as published, but are private: they leave as a release of kind
``label maps`` and are sent to all nodes with the server's queries. Maps of random shapes, or of public data,
belong to no node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fedstill.core.errors import list_names
from fedstill.core.options import CheckedOptions, NonNegativeFloat, PositiveInt
from fedstill.core.seeds import derive, torch_generator
from fedstill.data.augmentation import flip_and_rotate
from fedstill.methods import (
    ArgumentError,
    NodeFault,
    NodeSetting,
    NodeView,
    Query,
    QueryDetails,
    Server,
    TensorData,
    Tensors,
)
from fedstill.methods._input_generators import GeneratorBatch
from fedstill.models.gan import LabelMapGenerator
from fedstill.models.perceptual import perceptual_loss
from fedstill.protocol import payload_kinds
from fedstill.protocol.payload_kinds import SOURCES, PayloadKind
from fedstill.tasks import Task

NO_OWNER = -1  # owner of a map that is of no node
LABEL_MAPS = payload_kinds.LABEL_MAPS.with_opt_out(
    'with method.generator.conditions = "drawn" none is asked for'
)
DIFFERENCE = payload_kinds.DIFFERENCE.with_opt_out(
    'with method.generator.conditions = "drawn" none is compared'
)


@dataclass(frozen=True, kw_only=True)
class MapGenerator(CheckedOptions):
    """Options of a generator G of images x from label maps."""

    section: ClassVar[str] = "method.generator"

    conditions: Literal["nodes", "drawn", "public"] = "nodes"
    """Source of the maps. nodes: the nodes release theirs, as kind "label maps" (policy label_maps). drawn:
    random shapes, without any release. public: the labels of the public data.
    """
    augment: Literal["none", "mirror", "turn"] = "none"
    """Augmentation of a map before an image is generated from it: none, mirror (half the time), or turn
    (mirrored and rotated by quarter turns).
    """
    perceptual: NonNegativeFloat = 1.0
    """Weight of the distance in pretrained features between an image and the real one of the same map,
    computed at the node that owns it. It needs conditions = nodes and the features (nodes.perceptual);
    otherwise it is off.
    """
    pixel: NonNegativeFloat = 1.0
    """Weight of the mean absolute difference of the same two images. With both weights 0 none are compared.
    """
    width: PositiveInt = 64
    """Channels of the generator's first convolution (published: 64)."""
    lr: NonNegativeFloat = 1e-3
    """Adam's learning rate for the generator, falling on a cosine to lr_end."""
    lr_end: NonNegativeFloat = 1e-4
    """Learning rate of the generator's last step."""

    def compares_images(self, task: Task) -> bool:
        """Return whether nodes compare generated images with their own."""
        return (
            bool(task.condition_channels) and self.conditions == "nodes" and self.perceptual + self.pixel > 0
        )

    def sends(self, task: Task, *, is_judged: bool) -> Mapping[str, PayloadKind]:
        """Return the payload kinds of the tensors that are sent with x: its map for critics, its source for
        the node that owns it.
        """
        maps = {"maps": LABEL_MAPS} if is_judged else {}
        return {**maps, **({"source": SOURCES} if self.compares_images(task) else {})}

    def notes(self, setting: NodeSetting) -> tuple[str, ...]:
        """Return a note if the perceptual loss is off because the nodes have no pretrained features."""
        if not setting.task.condition_channels or self.perceptual == 0 or setting.perceptual is not None:
            return ()
        why = "nodes have no pretrained features: nodes.perceptual names a backbone, or a file of a VGG"
        return (f"perceptual loss is off ({why})",) if self.conditions == "nodes" else ()

    def map_query(self) -> Query:
        """Return the query for the nodes' label maps, for conditions of the nodes."""
        return Query(
            send_label_maps,
            releases={"maps": LABEL_MAPS},
            times=1,
            depends_on_records=("maps",),
            details=QueryDetails(constant=True),
        )

    # --- at a node --------------------------------------------------------------------------------------

    def pairs(self, setting: NodeSetting) -> Callable[[TensorData], TensorData]:
        """Return the function from a node's data to images and label maps."""
        return image_map_cache(setting).get

    def difference(self, node: NodeView, x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Return the distance of images from the real ones of the same maps: ``(B,)``, 0 for other owners'
        maps.

        Args:
            node: the node.
            x: images ``(B, channels, H, W)``.
            source: owner, row and pose of their maps ``(B, 3)`` int64.
        """
        check_rows("source", source, (len(x), 3))
        mine = map_order(node)
        owner, row, pose = source.long().unbind(1)
        # Ignore rows that this node did not send.
        rows = torch.nonzero((owner == owner_id(node.name)) & (row >= 0) & (row < len(mine))).flatten()
        difference = x.new_zeros(len(x))
        if not len(rows):
            return difference
        images = image_map_cache(node.setting).get(node.data).inputs
        real, generated = flip_and_rotate(images[mine[row[rows]]], pose[rows]), x[rows]
        found = self.pixel * (generated - real).abs().flatten(1).mean(1)
        if self.perceptual and node.setting.perceptual is not None:
            found = found + self.perceptual * perceptual_loss(node.setting.perceptual, generated, real)
        return difference.index_put((rows,), found)

    # --- at the server ----------------------------------------------------------------------------------

    def source(self, server: Server) -> MapSource:
        """Return the source of label maps."""
        return MapSource(self, server)

    def network(self, server: Server) -> nn.Module:
        """Return the network G."""
        conditions, channels = server.task.condition_channels, server.shape[0]
        return LabelMapGenerator(conditions, channels, self.width, server.mean, server.std)


def send_label_maps(node: NodeView) -> Tensors:
    """Return the node's maps ``(n, H, W)`` uint8. Nodes have different numbers: query one at a time."""
    return {"maps": image_map_cache(node.setting).get(node.data).targets[map_order(node)]}


def check_rows(name: str, tensor: torch.Tensor, expected: tuple[int, ...]) -> None:
    """Check that a server sent one map, or source, for each input.

    Raises:
        ArgumentError: another shape.
    """
    if tuple(tensor.shape[: len(expected)]) != expected:
        allowed = f"one for each of {expected[0]} inputs"
        raise ArgumentError(f"shape of {name}", tuple(tensor.shape), allowed)


def owner_id(name: str) -> int:
    """Return the number that stands for a node in queries to all nodes, so that no list of names is sent."""
    return derive(0, "owner of maps", name)


class ImageMapCache:
    """Cache of each node's images with their label maps, computed once by the task."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._cache: WeakKeyDictionary[TensorData, TensorData] = WeakKeyDictionary()

    def get(self, data: TensorData) -> TensorData:
        """Return images ``(N, channels, H, W)`` as inputs and maps ``(N, H, W)`` uint8 as targets."""
        found = self._cache.get(data)
        if found is None:
            maps = self.task.label_maps(data).to(data.inputs.device)
            found = self._cache[data] = TensorData(self.task.real_images(data), maps, data.groups)
        return found


def image_map_cache(setting: NodeSetting) -> ImageMapCache:
    """Return the cache of a run."""
    return setting.cached("map cache", lambda: ImageMapCache(setting.task))


def map_order(node: NodeView) -> torch.Tensor:
    """Return the order in which a node sends its maps: indices ``(n,)``, the same at each call."""
    order = torch.randperm(len(node.data), generator=node.random_generator("maps told"))  # quote
    return order.to(node.data.inputs.device)


@dataclass
class MapSource:
    """Source of label maps: of the nodes, of random shapes or of public data.

    Raises:
        ArgumentError: no public labels to take maps from, or quarter turns of images that are not square.
    """

    config: MapGenerator
    server: Server
    pool: torch.Tensor | None = None  # (M, H, W) uint8
    owner: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))  # (M,)
    row: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))  # (M,)

    def __post_init__(self) -> None:
        height, width = self.server.shape[-2:]
        if self.config.augment == "turn" and height != width:
            allowed = f"none or mirror, as images are {height} x {width}"
            raise ArgumentError("method.generator.augment", "turn", allowed)
        public = self.server.public
        if self.config.conditions == "public":
            if public is None or public.labels is None:
                allowed = "nodes or drawn, as there are no public data with labels"
                raise ArgumentError("method.generator.conditions", "public", allowed)
            maps = self.server.task.label_maps(TensorData(public.inputs, public.labels))
            self._store([(NO_OWNER, maps)])

    @property
    def is_ready(self) -> bool:
        """True if maps can be sampled; the nodes may have to be queried first."""
        return self.config.conditions == "drawn" or self.pool is not None

    def fetch(self, server: Server) -> None:
        """Query the nodes for their maps, unless that is done or not needed.

        A node that does not send them is excluded, as for any other query.
        """
        if self.is_ready:
            return
        federation, given = server.federation, []
        for name in federation.present:  # one after the other, as answers of different length do not stack
            response = server.query_or_none("send_label_maps", nodes=[name])
            if response is None:
                continue
            if wrong := self._fault_text(response["maps"][0]):
                federation.exclude(name, "send_label_maps", wrong, may_rejoin=False)
            else:
                given.append((owner_id(name), response["maps"][0]))
        if not given:
            raise NodeFault(list_names(federation.nodes), "send_label_maps", "no node has sent any map")
        self._store(given)

    def has_maps_of(self, node: str) -> bool:
        """Return whether maps of this node can be sampled: a node that was absent when they were sent has
        none."""
        return self.config.conditions != "nodes" or bool((self.owner == owner_id(node)).any())

    def sample_batch(self, count: int, *purpose: str | int, node: str | None = None) -> GeneratorBatch:
        """Return maps and the generator's input, equal for equal purposes; with ``node`` from one node
        alone."""
        draw, task = torch_generator(self.server.seed, "maps", *purpose), self.server.task
        device, (height, width) = self.server.device, self.server.shape[-2:]
        poses = {"none": 1, "mirror": 2, "turn": 8}[self.config.augment]
        owner, row = torch.full((count,), NO_OWNER), torch.zeros(count, dtype=torch.int64)
        if self.pool is None:
            maps = task.sample_maps(count, height, width, draw)
        else:
            wanted = torch.ones_like(self.owner) if node is None else self.owner == owner_id(node)
            mine = torch.nonzero(wanted).flatten()
            chosen = mine[torch.randint(len(mine), (count,), generator=draw)]
            maps, owner, row = self.pool[chosen], self.owner[chosen], self.row[chosen]
        pose = torch.randint(poses, (count,), generator=draw)
        maps = flip_and_rotate(maps.cpu(), pose).to(device)
        return GeneratorBatch(task.encode_maps(maps), maps, torch.stack([owner, row, pose], 1).to(device))

    def state_dict(self) -> dict[str, Any] | None:
        return None if self.pool is None else {"pool": self.pool, "owner": self.owner, "row": self.row}

    def load_state_dict(self, state: Mapping[str, Any] | None, device: torch.device) -> None:
        if state is not None:
            self.pool, self.owner, self.row = (state[key].cpu() for key in ("pool", "owner", "row"))

    def _fault_text(self, maps: torch.Tensor) -> str:
        """Return the fault of a node's maps, or an empty text."""
        conditions = self.server.task.condition_channels
        if maps.dtype != torch.uint8 or tuple(maps.shape[1:]) != self.server.shape[-2:] or not len(maps):
            return f"maps are {maps.dtype} {tuple(maps.shape)}"
        most = int(maps.max())
        return f"maps hold {most} (expected 0..{conditions - 1})" if most >= conditions else ""

    def _store(self, given: list[tuple[int, torch.Tensor]]) -> None:
        self.pool = torch.cat([maps.cpu() for _, maps in given])
        self.owner = torch.cat([torch.full((len(maps),), owner) for owner, maps in given])
        self.row = torch.cat([torch.arange(len(maps)) for _, maps in given])
