"""What an owner says of a node, as a typed configuration: ``node.toml``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from fedstill.core.errors import ArgumentError
from fedstill.core.options import CheckedOptions, NonNegativeInt
from fedstill.data.node_data import NodeDataConfig
from fedstill.models.model_config import ModelConfig
from fedstill.node.policy import PolicyConfig
from fedstill.privacy.config import NoPrivacy, PrivacyConfig
from fedstill.protocol.local_config import LocalConfig


@dataclass(frozen=True)
class NodeModelConfig(ModelConfig):
    """Which model a node has, and what its methods may see by."""

    perceptual: str = ""
    """A .safetensors file of VGG-16 or VGG-19 weights, named as torchvision names them, from the folder of
    this file: for methods that compare generated images with your own by its features; if empty, they do
    not."""


NAME_RULE = "1 to 64 letters, digits, '-' and '_'"
PATH_OPTIONS = ("data.path", "data.schema", "model.weights", "model.perceptual", "privacy.audit_log")


@dataclass(frozen=True)
class ComputeConfig(CheckedOptions):
    """What a node computes on."""

    section: ClassVar[str] = "compute"

    device: str = "cpu"
    """A torch device, for example cpu or cuda."""

    precision: Literal["float32", "bfloat16", "auto"] = "auto"
    """bfloat16 is faster where the processor computes in it and the network gains from it (auto finds out),
    with other last digits."""

    channels_last: bool = True
    """Keep images with channels last in memory, which is faster for convolutions."""

    threads: Annotated[int, Ge(0), "0 (torch's own choice) or more"] = 0
    """CPU threads; 0 leaves it to torch."""


@dataclass(frozen=True, kw_only=True)
class NodeFile(CheckedOptions):
    """What an owner says of a node: ``node.toml``."""

    name: str
    """The node's name, as it was given with the startup kit."""

    seed: NonNegativeInt = 0
    """Of first weights and of the order of training examples."""

    online: bool = True
    """This node joins a live federation; false: it only answers files of queries, which are carried to it
    (`fedstill offline answer`)."""

    data: NodeDataConfig = field(default_factory=NodeDataConfig)
    """Your data. They never leave this machine."""

    model: NodeModelConfig = field(default_factory=NodeModelConfig)
    """Your model. It never leaves this machine, unless the policy below allows parameters."""

    local: LocalConfig = field(default_factory=LocalConfig)
    """How your model learns from your data."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """What may leave this machine. Nothing else does, whatever a server asks."""

    privacy: PrivacyConfig = field(default_factory=NoPrivacy)
    """How your records are protected, and how much of their privacy may be spent. What each mechanism can be
    told: `fedstill run demo --nodes.privacy.mechanism NAME --help`."""

    compute: ComputeConfig = field(default_factory=ComputeConfig)
    """What this machine computes on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", self.name):
            raise ArgumentError("name", self.name, NAME_RULE)
        for option in PATH_OPTIONS:
            path = str(attrgetter(option)(self))
            try:
                is_valid = "\0" not in str(Path(path).expanduser())
            except RuntimeError:  # there is no such user
                is_valid = False
            if not is_valid:
                raise ArgumentError(
                    option, path, "a path without zero characters, after ~ a user of this machine"
                )
