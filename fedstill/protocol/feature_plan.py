"""Features of a run, as the server declares them to its nodes: the backbone's digest and its preprocessing.

A node loads the backbone of its own ``node.toml`` and compares. The plan names no file, so a server cannot
make a node load anything.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from fedstill.core.errors import ArgumentError
from fedstill.core.text_format import format_shape
from fedstill.models.backbones import Backbone, Features


@dataclass(frozen=True)
class FeaturePlan:
    """Features that the models of a run take in place of its inputs.

    Args:
        backbone: name of the network, equal on all machines.
        layer: submodule whose output are the features; empty: the last features.
        size: height and width that the network receives; empty for texts and fixed filters.
        mean, std: normalization of pixels that the network expects, per channel.
        normalize: normalization of the features, as ``features.normalize``.
        components: M, the number of components that the models take in place of all features; 0: all.
        precision: precision of the network.
        width: F, the number of features of the network.
        digest: hash of weights, architecture and preprocessing.

    Raises:
        ArgumentError: invalid values.
    """

    backbone: str
    layer: str
    size: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    normalize: Literal["none", "example", "backbone", "public"]
    components: int
    precision: Literal["float32", "bfloat16"]
    width: int
    digest: str

    def __post_init__(self) -> None:
        for name in ("backbone", "layer"):
            if not re.fullmatch(r"[ -~]{0,200}", getattr(self, name)):
                raise ArgumentError(f"features.{name}", getattr(self, name), "up to 200 ASCII characters")
        if len(self.size) not in (0, 2):
            raise ArgumentError("features.size", self.size, "height and width, or none")
        for name in ("mean", "std"):
            values = getattr(self, name)
            if len(values) > 64 or not all(map(math.isfinite, values)):
                raise ArgumentError(f"features.{name}", values, "finite numbers, one per channel")
        if not 1 <= self.width < 2**31:
            raise ArgumentError("features.width", self.width, "1 or more, below 2**31")
        most = self.width if self.normalize == "public" else 0
        if not 0 <= self.components <= most:
            expected = f"0 to {most}, with {self.width} features and normalize = {self.normalize}"
            raise ArgumentError("features.components", self.components, expected)
        if not re.fullmatch(r"[0-9a-f]{32}", self.digest):
            raise ArgumentError("features.digest", self.digest, "32 hexadecimal digits")

    @property
    def model_width(self) -> int:
        """Number of features that the models take."""
        return self.components or self.width

    @classmethod
    def from_backbone(cls, backbone: Backbone, options: Features) -> FeaturePlan:
        """Return the plan of a run on the features of a backbone, normalized as the options say.

        Raises:
            ArgumentError: the backbone has fewer features than ``features.components``.
        """
        identity = backbone.identity
        pixels = {name: tuple(identity["pixels"].get(name, ())) for name in ("mean", "std")}
        return cls(
            backbone=re.sub(r"[^ -~]", "?", identity["name"].partition(" ")[0])[:200],
            layer=identity["layer"],
            size=tuple(identity["size"]),
            **pixels,
            normalize=options.normalize,
            components=options.components,
            precision=backbone.precision,
            width=backbone.width,
            digest=backbone.digest,
        )

    def difference(self, own: FeaturePlan) -> str | None:
        """Return the first option in which a node's features differ, with the run's value, or None.

        The node's value is not in the text, which the server gets.

        >>> from dataclasses import replace
        >>> plan = FeaturePlan("timm:x", "", (64, 64), (0.5,), (0.5,), "none", 0, "float32", 8, "0" * 32)
        >>> plan.difference(replace(plan, size=(32, 32), digest="1" * 32))
        'features.size (in the run 64 x 64)'
        >>> plan.difference(replace(plan, digest="1" * 32))
        'features.weights (other weights, or another architecture)'
        """
        values = {
            "backbone": self.backbone,
            "layer": self.layer or "empty",
            "size": format_shape(self.size),
            "mean": list(self.mean),
            "std": list(self.std),
            "normalize": self.normalize,
            "components": self.components,
            "precision": self.precision,
        }
        for name, value in values.items():
            if getattr(self, name) != getattr(own, name):
                return f"features.{name} (in the run {value})"
        return None if self == own else "features.weights (other weights, or another architecture)"
