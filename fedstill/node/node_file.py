"""Typed configuration of a node: ``node.toml``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

from fedstill.core.compute import ComputeConfig
from fedstill.core.errors import ArgumentError
from fedstill.core.options import CheckedOptions, NonNegativeInt
from fedstill.data.node_data import NodeDataConfig
from fedstill.models.backbones import Features
from fedstill.models.model_config import ModelConfig
from fedstill.node.policy import PolicyConfig
from fedstill.privacy.config import NoPrivacy, PrivacyConfig
from fedstill.protocol.local_config import LocalConfig


@dataclass(frozen=True)
class NodeModelConfig(ModelConfig):
    """The node's model, and the network that compares its images with generated ones."""

    perceptual: str = ""
    """A backbone (timm:NAME, torchvision:NAME or package.module:factory), or a .safetensors file with VGG-16
    or VGG-19 weights, named as in torchvision. Methods with a perceptual loss use its features; if empty,
    they have no such loss. Paths count from the folder of this file."""

    perceptual_weights: str = ""
    """A .safetensors file with the weights of the backbone in perceptual."""


NAME_RULE = "1 to 64 letters, digits, '-' and '_'"
PATH_OPTIONS = (
    "data.path",
    "data.schema",
    "features.weights",
    "features.cache",
    "model.weights",
    "model.encoder_weights",
    "model.perceptual",
    "model.perceptual_weights",
    "privacy.audit_log",
)


@dataclass(frozen=True, kw_only=True)
class NodeFile(CheckedOptions):
    """Configuration of one node, as its owner writes it in ``node.toml``.

    Raises:
        ArgumentError: the name has other characters, or a path cannot be one.
    """

    name: str
    """The node's name, as given with the startup kit."""

    seed: NonNegativeInt = 0
    """Seed of the first weights and of the order of training examples."""

    online: bool = True
    """Join a live federation. false: respond only to files of queries, which are carried to the node
    (`fedstill offline answer`)."""

    data: NodeDataConfig = field(default_factory=NodeDataConfig)
    """Your data. They never leave this machine."""

    features: Features = field(default_factory=Features)
    """Pretrained backbone, whose features your model takes in place of images or texts. This node loads no
    other: a run on other features is refused. Features are computed once, and cached in the folder
    `features` of this folder unless cache names another."""

    model: NodeModelConfig = field(default_factory=NodeModelConfig)
    """Your model. It never leaves this machine, unless the policy below allows parameters."""

    local: LocalConfig = field(default_factory=LocalConfig)
    """Local training of your model on your data."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """Rules for releases. No server can change them."""

    privacy: PrivacyConfig = field(default_factory=NoPrivacy)
    """Privacy mechanism and budget. Options of each mechanism: `fedstill run demo --nodes.privacy.mechanism
    NAME --help`."""

    compute: ComputeConfig = field(default_factory=ComputeConfig)
    """Device and precision."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", self.name):
            raise ArgumentError("name", self.name, NAME_RULE)
        for option in PATH_OPTIONS:
            path = str(attrgetter(option)(self))
            try:
                is_valid = "\0" not in str(Path(path).expanduser())
            except RuntimeError:  # unknown user after "~"
                is_valid = False
            if not is_valid:
                raise ArgumentError(
                    option, path, "a path without null characters; after ~ a user of this machine"
                )
