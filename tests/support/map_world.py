"""Three nodes with images and label maps, and a server over them, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.methods._discriminators import Discriminators
from fedstill.methods._label_maps import MapGenerator, map_order
from fedstill.methods._replay_training import ReplayTraining
from fedstill.methods.asyndgan import AsynDGAN, PairTraining, critic_options, generator_options
from fedstill.methods.fediod_maps import FedIODMaps
from fedstill.models import build
from fedstill.models.vgg import CONV_INDICES, OUTPUT_INDICES, VGGFeatures
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup
from fedstill.node.node_view import NodeView
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.node_side import NodeSetting
from fedstill.tasks import Task
from fedstill.tasks.reconstruction import Reconstruction
from fedstill.tasks.segmentation import Segmentation
from tests.support import small_world
from tests.support.small_world import World, changed, disagreeing, make_nodes

SHAPE = (1, 16, 16)
TASK = Segmentation(2)
OPEN = PolicyConfig(label_maps=True)
FIOD = FedIODMaps(
    steps=3,
    batch=4,
    ensemble="log_probs",
    generator=MapGenerator(width=2),
    critic=Discriminators(width=4, batch=32),
    student=ReplayTraining(steps=2, batch=6, memory=12),
)
ASYN = AsynDGAN(
    steps=2,
    batch=2,
    generator=generator_options(width=2, pixel=3.0),
    critic=critic_options(width=4),
    student=PairTraining(steps=2, batch=4),
)


def blobs(count: int, seed: int, task: Task = TASK) -> TensorData:
    """Return dark images with a bright disc and, in most, a brighter square: the foreground."""
    draw = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    middle = 6 + 4 * torch.rand(count, 2, 1, 1, generator=draw)
    body = (y - middle[:, 0]).square() + (x - middle[:, 1]).square() < 30
    square = ((y - middle[:, 0]).abs() < 2) & ((x - middle[:, 1]).abs() < 3) & (torch.rand(count, 1, 1) < 2)
    square[::4] = False
    images = -1 + 1.0 * body + 0.7 * square + 0.05 * torch.rand(count, 16, 16, generator=draw)
    images = images.unsqueeze(1).clamp(-1, 1)  # (N, 1, 16, 16)
    if task.kind == "image":
        return TensorData(task.observe(images), images)
    return TensorData(images, square.long())


def vgg(width: int = 3) -> VGGFeatures:
    """Return features with the structure of VGG-16, narrow and random."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        channels, convolutions = 3, {}
        for index in CONV_INDICES["VGG-16"]:
            layer = nn.Conv2d(channels, width, 3, padding=1, device="meta")  # samples nothing
            layer.weight = nn.Parameter(0.5 * torch.randn(width, channels, 3, 3))
            layer.bias = nn.Parameter(0.1 * torch.randn(width))
            convolutions[index], channels = layer, width
    return VGGFeatures(convolutions, OUTPUT_INDICES["VGG-16"], (0.5,), (0.5,))


def world(
    config: FedIODMaps | AsynDGAN = FIOD,
    *,
    task: Task = TASK,
    policy: PolicyConfig = OPEN,
    features: nn.Module | None = None,
    specs: tuple[str, ...] = ("unet:2", "unet:2", "unet:3"),
    stacked: bool = True,
    **options: Any,
) -> World:
    """Return three nodes with 5, 8 and 11 images, not trained."""
    config = changed(config, **options)
    models = [disagreeing(build(spec, SHAPE, task.classes, 0, index)) for index, spec in enumerate(specs)]
    nodes = make_nodes(models, policy=policy, data=lambda index: blobs(5 + 3 * index, index, task))
    student = build("unet:2", SHAPE, task.classes, 0, "student")
    given: dict[str, Any] = {"shape": SHAPE, "std": 0.5, "features": features, "task": task}
    return small_world.world(config, nodes, student, local=LocalConfig(), stacked=stacked, **given)


def view(node: Node, task: Task = TASK, features: nn.Module | None = None) -> NodeView:
    """Return the view of a node that a method's functions get."""
    return NodeView(NodeGroup([node]), NodeSetting(task, LocalConfig(), Compute(), None, features))


def sent_order(node: Node) -> torch.Tensor:
    """Return the order in which a node sends its maps."""
    return map_order(view(node))


def weights(*modules: nn.Module) -> torch.Tensor:
    """Return all weights of some networks in one vector."""
    parts = [value.detach().flatten().float() for m in modules for value in m.state_dict().values()]
    return torch.cat(parts).clone()


def everything(world: World) -> torch.Tensor:
    """Return all numbers that a run can change."""
    critics = [node.modules["critic"] for node in world.nodes if "critic" in node.modules]
    return weights(world.server.student, world.server.state.generator.G, *critics)


def up(world: World) -> Mapping[str, int]:
    """Return the bytes that left the nodes, by kind."""
    return {
        kind: sizes["up"] for kind, sizes in world.audit.traffic_totals()["by_kind"].items() if sizes["up"]
    }


RECONSTRUCTION = Reconstruction(acceleration=2, center=0.25)
