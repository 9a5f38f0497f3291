"""Pretrained backbones: frozen networks that turn images or texts into features, and heads on top of them.

:class:`Features` holds the options, :func:`load_backbone` returns the :class:`Backbone`. It contains the
conversion of a run's inputs into those of the pretrained network (:class:`PixelConversion`) and pools the
network's output to one vector per example. :class:`ScaledHead` normalizes these vectors and applies a head,
and :class:`BackboneWithHead` is the complete model, from pixels or token ids to logits.

Nothing is downloaded, and no pickled object is read: weights are local files. The name of a backbone may come
from the file of another person's student, so a name that timm would look up on a hub is refused.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import nn

from fedstill.core.errors import ArgumentError, FedstillError, ModelError
from fedstill.core.options import CheckedOptions, NonNegativeInt, PositiveInt
from fedstill.core.registry import USER_CODE_ERRORS, Registry, first_line, is_object_path
from fedstill.core.seeds import seeded
from fedstill.core.text_format import format_shape
from fedstill.models.hugging_face import PADDING, PREFIX, import_transformers, load_encoder, swap_padding
from fedstill.models.image_classifiers import RandomConv, Scattering, UnitNorm
from fedstill.models.principal_components import LEAST_DEVIATION, MIN_FEATURE_STD
from fedstill.models.weights_file import digest_weights, lacking_weights_error, read_weights

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NETWORK_NAME = re.compile(r"[A-Za-z0-9_.]+")  # in timm and torchvision; others may name a hub
DESCRIPTIVE_KEYS = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}
HEAD_NAMES = ("fc", "classifier", "heads", "head")  # of torchvision's networks
EXPECTED = (
    "timm:NAME, torchvision:NAME, hf:FOLDER, a .onnx file, random-conv, scattering, or package.module:factory"
)
ONNX_GRAPH = "fedstill::OnnxGraph"  # domain and name of the node that stands for an OnnxEncoder
BACKBONE_KINDS = ("timm", "torchvision", "hf", "random-conv", "scattering")  # that import no custom code
BACKBONES: Registry[Any] = Registry("backbone", {}, call_signature="shape")


@dataclass(frozen=True)
class Features(CheckedOptions):
    """Features of a pretrained backbone in place of images or texts. The models of a run are then heads.

    Example:
        >>> Features("random-conv").normalize
        'none'
    """

    section: ClassVar[str] = "features"

    backbone: str = ""
    """timm:NAME or torchvision:NAME, a network of these libraries; hf:FOLDER, a Hugging Face model in a local
    folder; a .onnx file; random-conv or scattering, which need no weights (random-conv:32 has 32 filters); or
    package.module:factory, a custom factory that receives the shape of an input and returns a torch module.
    Empty: models take the data themselves."""

    weights: str = ""
    """A local .safetensors file of weights. Needed for timm and torchvision."""

    size: NonNegativeInt = 0
    """Height and width to which images are resized; 0: as the data are."""

    layer: str = ""
    """Name of the submodule whose output are the features, as in named_modules(). Empty: the last features.
    Maps and sequences are averaged to one vector, those of a text over its tokens."""

    mean: tuple[float, ...] = ()
    """Mean of the pixels that the backbone expects, per channel, of pixels from 0 to 1. Empty: its own, or
    that of the data."""

    std: tuple[float, ...] = ()
    """Standard deviation of the pixels that the backbone expects, per channel. Empty: its own, or that of the
    data."""

    normalize: Literal["none", "example", "backbone", "public"] = "none"
    """Normalization of features. example: each vector to mean 0 and variance 1. backbone: each feature by its
    moments under the backbone's last batch normalization, which needs no data. public: each feature by its
    moments on the public data. Private data are never used."""

    components: NonNegativeInt = 0
    """Number of principal components of the features that models take in place of all features; 0: all. Those
    of the largest variance on the public data, and of variance 1 there. Needs normalize = "public", whose
    mean and deviation they replace. Fewer inputs need fewer parameters, and so less noise under dp-sgd."""

    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the backbone. auto: bfloat16 if the device computes in it, else float32."""

    batch: PositiveInt = 64
    """Examples in a forward pass of the backbone."""

    cache: str = ""
    """Folder of the computed features. Empty: fedstill/features in the user's cache folder."""

    cache_gib: Annotated[float, Ge(0), "0 (no cache) or more"] = 20.0
    """Maximum size of the cache in GiB; 0: no cache. The features used least recently are deleted first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.components and self.normalize != "public":
            expected = '0, or features.normalize = "public", by whose data they are computed'
            raise ArgumentError("features.components", self.components, expected)

    def __bool__(self) -> bool:
        return bool(self.backbone)

    def model_width(self, width: int) -> int:
        """Return the number of features that models take, of ``width`` features of the backbone.

        Raises:
            ArgumentError: there are fewer features than components.

        >>> Features("random-conv", normalize="public", components=8).model_width(128)
        8
        """
        if self.components > width:
            expected = f"0 to {width}, the number of features of {self.backbone}"
            raise ArgumentError("features.components", self.components, expected)
        return self.components or width

    @property
    def is_custom(self) -> bool:
        """True if the backbone is a custom factory, whose code is imported."""
        return not self.backbone.endswith(".onnx") and self.backbone.partition(":")[0] not in BACKBONE_KINDS

    def in_folder(self, folder: Path) -> Features:
        """Return the options with absolute paths, which count from a folder.

        >>> Features("timm:resnet18", weights="w.safetensors").in_folder(Path("/data")).weights
        '/data/w.safetensors'
        """

        def absolute(path: str) -> str:
            return str(folder.absolute() / Path(path).expanduser()) if path else ""

        backbone = self.backbone
        if backbone.startswith(PREFIX):
            backbone = PREFIX + absolute(backbone.removeprefix(PREFIX))
        elif backbone.endswith(".onnx"):
            backbone = absolute(backbone)
        return replace(self, backbone=backbone, weights=absolute(self.weights), cache=absolute(self.cache))


@dataclass(frozen=True)
class RawInputs:
    """Inputs of a backbone, as the data of a run are.

    Args:
        shape: ``(C, H, W)`` of an image or ``(L,)`` of a text.
        mean: mean of the normalization ``(pixel - mean) / std`` of pixels in 0..1, per channel.
        std: standard deviation of the normalization.
        vocabulary: number of token ids, for texts.
    """

    shape: tuple[int, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    vocabulary: int = 0


class PixelConversion(nn.Module):
    """Convert normalized images of a run to the inputs of a backbone: resize, and normalize as it expects.

    Args:
        raw: the images as the data of the run are.
        channels: channels that the backbone expects; gray images are repeated.
        size: height and width that the backbone receives; 0: unchanged.
        mean: mean that the backbone expects, per channel; empty: that of the data.
        std: standard deviation that it expects.
    """

    data_mean: torch.Tensor
    data_std: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor

    def __init__(
        self, raw: RawInputs, channels: int, size: int, mean: tuple[float, ...], std: tuple[float, ...]
    ) -> None:
        super().__init__()
        own = raw.shape[0]
        if own not in (1, channels):
            raise ArgumentError("features.backbone", f"{channels} channels", f"{own}, as the images have")
        data_mean, data_std = raw.mean or (0.5,) * own, raw.std or (0.5,) * own
        self.channels, self.size = channels, (size, size) if size else raw.shape[1:]
        self.resizes, self.shrinks = self.size != raw.shape[1:], min(self.size) < min(raw.shape[1:])
        tensors = {"data_mean": data_mean, "data_std": data_std, "mean": mean, "std": std}
        for name, values in tensors.items():
            values = values or (data_mean if name == "mean" else data_std)
            if len(values) not in (1, own, channels):
                raise ArgumentError(f"features.{name}", list(values), f"one value per channel, {channels}")
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``(B, C, H, W)`` to ``(B, channels, size, size)``."""
        pixels = x * self.data_std + self.data_mean
        if pixels.shape[1] != self.channels:
            pixels = pixels.expand(-1, self.channels, -1, -1)
        if self.resizes:
            pixels = F.interpolate(
                pixels, self.size, mode="bilinear", align_corners=False, antialias=self.shrinks
            )
        return (pixels - self.mean) / self.std


class SentenceEncoder(nn.Module):
    """Encoder of the Hugging Face library that maps token ids ``(B, L)``, padded with 0, to features.

    The features are the mean of the last hidden states over the tokens, as sentence encoders have it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.padding = model, int(getattr(model.config, "pad_token_id", None) or PADDING)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return features ``(B, F)``."""
        states: torch.Tensor = self.model(
            input_ids=swap_padding(ids, self.padding),
            attention_mask=self._attended(ids).long(),
            return_dict=True,
        ).last_hidden_state
        return self.average(states, ids)

    def average(self, states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the mean ``(B, F)`` of hidden states ``(B, L, F)`` over the tokens, without padding."""
        weights = self._attended(ids).to(states.dtype).unsqueeze(2)
        return (states * weights).sum(1) / weights.sum(1)

    def _attended(self, ids: torch.Tensor) -> torch.Tensor:
        # Always attend to the first token: a softmax over no token is undefined.
        return (ids != PADDING).index_fill(1, torch.zeros(1, dtype=torch.int64, device=ids.device), True)


class LayerOutput(nn.Module):
    """Output of a submodule of a network; of a text, the mean of a sequence over its tokens."""

    def __init__(self, network: nn.Module, layer: str) -> None:
        super().__init__()
        self.network, self._output = network, torch.zeros(0)
        known = dict(network.named_modules())
        if layer not in known:
            shown = ", ".join([name for name in known if name][-4:])
            expected = f"a submodule of the backbone, such as {shown}" if shown else "none with this backbone"
            raise ArgumentError("features.layer", layer, expected)
        known[layer].register_forward_hook(self._keep_output)

    def _keep_output(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._output = output[0] if isinstance(output, tuple) else output  # of some Hugging Face layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the submodule's output for an input of the network."""
        self.network(x)
        output, self._output = self._output, torch.zeros(0)
        if isinstance(self.network, SentenceEncoder) and output.ndim == 3:
            return self.network.average(output, x)
        return output


class ImageEncoder(nn.Module):
    """Encoder of the Hugging Face library that maps pixels ``(B, C, H, W)`` to hidden states."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states."""
        states: torch.Tensor = self.model(pixel_values=x, return_dict=True).last_hidden_state
        return states


class OnnxEncoder(nn.Module):
    """ONNX graph whose first output are the features. It computes on the CPU.

    Args:
        session: session of onnxruntime with the graph.
        graph: the content of its file.
    """

    def __init__(self, session: Any, graph: bytes) -> None:
        super().__init__()
        self.session, self.input_name = session, session.get_inputs()[0].name
        self.graph = graph
        self.output_shape: tuple[int, ...] = ()  # of one input, once it is known

    def __deepcopy__(self, memo: Any) -> OnnxEncoder:
        copied = OnnxEncoder(self.session, self.graph)  # sessions cannot be copied, and have no state
        copied.output_shape = self.output_shape
        return copied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the graph's first output; in an export to ONNX, a node that stands for the graph."""
        if torch.compiler.is_exporting():
            shape = (x.shape[0], *self.output_shape)
            node: torch.Tensor = torch.onnx.ops.symbolic(
                ONNX_GRAPH, (x,), {}, dtype=torch.float32, shape=shape, version=1
            )
            return node
        output = self.session.run(None, {self.input_name: x.detach().cpu().numpy()})[0]
        self.output_shape = output.shape[1:]
        return torch.from_numpy(output).to(x.device)


class Backbone(nn.Module):
    """Frozen network that maps a run's inputs to features ``(B, F)`` float32.

    Args:
        conversion: from the run's inputs to those of the network.
        network: the pretrained network.
        raw: the run's inputs.
        precision: precision of the network.
        identity: name of the network and its preprocessing, part of the digest.

    Attributes:
        identity: name of the network and its preprocessing.
        width: F, the number of features.
        digest: hash of weights, architecture and preprocessing. Equal digests mean equal features, up to
            rounding. The code of a custom factory is not a part of it.
    """

    def __init__(
        self,
        conversion: nn.Module,
        network: nn.Module,
        raw: RawInputs,
        precision: Literal["float32", "bfloat16"],
        identity: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.conversion, self.network, self.raw, self.precision = conversion, network, raw, precision
        self.identity = dict(identity)
        self.digest = digest_weights(network, {**identity, **asdict(raw)})
        if precision == "bfloat16":
            network.to(torch.bfloat16)
        if len(raw.shape) == 3:
            _to_channels_last(network)  # half the time on a CPU
        self.requires_grad_(False).eval()
        self.width = self._measured_width()

    def _fixed_size_text(self) -> str:
        """Return the size that an ONNX graph takes alone; empty: it takes others, or is no graph."""
        encoder = self.network.network if isinstance(self.network, LayerOutput) else self.network
        if not isinstance(encoder, OnnxEncoder):
            return ""
        size = encoder.session.get_inputs()[0].shape[1:]
        is_fixed = all(isinstance(side, int) for side in size)
        return f", as this graph takes {format_shape(tuple(size))}" if is_fixed else ""

    @property
    def takes_shorter_texts(self) -> bool:
        """True if token ids may be fewer than those of the run, so that padding need not be computed."""
        encoder = self.network.network if isinstance(self.network, LayerOutput) else self.network
        return isinstance(encoder, SentenceEncoder)

    def train(self, mode: bool = True) -> Backbone:
        """Stay in evaluation mode, in which batch normalization has fixed statistics."""
        super().train(False)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features of inputs ``(B, ...)``."""
        converted = self.conversion(x)
        if self.precision == "bfloat16" and converted.is_floating_point():
            converted = converted.bfloat16()
        return pool(self.network(converted)).float()

    def _measured_width(self) -> int:
        shape = (2, *self.raw.shape)
        x = torch.ones(shape, dtype=torch.int64) if self.raw.vocabulary else torch.zeros(shape)
        resized = x.shape[1:]
        try:
            with torch.no_grad():
                resized = self.conversion(x).shape[1:]
                features = self(x)
        except FedstillError:
            raise
        except Exception as error:  # errors of any library
            expected = "a backbone for such images, or another features.size" + self._fixed_size_text()
            if self.raw.vocabulary:
                expected = "a backbone for texts, or fewer tokens: data.length"
            raise ModelError(
                f"backbone: cannot take inputs of {format_shape(resized)}: "
                f"{type(error).__name__}: {first_line(error)} (expected {expected})"
            ) from error
        if features.ndim != 2 or len(features) != 2:
            raise ModelError(f"backbone: returns {tuple(features.shape)} for 2 inputs (expected (2, F))")
        return int(features.shape[1])


def _to_channels_last(network: Any) -> None:
    network.to(memory_format=torch.channels_last)  # an argument that the library's types lack


def pool(output: Any) -> torch.Tensor:
    """Return one vector per example: maps ``(B, C, H, W)`` and sequences ``(B, L, C)`` are averaged.

    >>> pool(torch.ones(2, 5, 4, 4)).shape, pool(torch.ones(2, 4, 5)).shape
    (torch.Size([2, 5]), torch.Size([2, 5]))
    """
    if not isinstance(output, torch.Tensor):
        raise ModelError(
            f"backbone: returns a {type(output).__name__} (expected a tensor; see features.layer)"
        )
    if output.ndim == 3:
        return output.mean(1)
    return output.mean((2, 3)) if output.ndim == 4 else output.flatten(1)


# --- heads --------------------------------------------------------------------------------------------------


class FeatureScale(nn.Module):
    """Normalization of features ``(B, F)``.

    Args:
        per_example: normalize each vector to mean 0 and variance 1.
        mean: mean of each feature ``(F,)``; None: not subtracted.
        std: standard deviation of each feature ``(F,)``.
        projection: in place of ``std``, the projection ``(F, M)`` of centered features to M components
            (:func:`~fedstill.models.principal_components.whitening_projection`).
    """

    mean: torch.Tensor
    std: torch.Tensor
    projection: torch.Tensor

    def __init__(
        self,
        per_example: bool = False,
        mean: torch.Tensor | None = None,
        std: torch.Tensor | None = None,
        projection: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.per_example, self.is_centered = per_example, mean is not None
        self.is_projected = projection is not None
        if mean is not None:
            self.register_buffer("mean", mean.float())
        if projection is not None:
            self.register_buffer("projection", projection.float())
        elif std is not None:
            self.register_buffer("std", std.float().clamp_min(MIN_FEATURE_STD))

    def forward(self, f: torch.Tensor) -> torch.Tensor:
        """Return the normalized features, or the components ``(B, M)``."""
        if self.is_projected:
            return (f - self.mean) @ self.projection
        if self.is_centered:
            return (f - self.mean) / self.std
        return F.layer_norm(f, f.shape[1:]) if self.per_example else f


def make_scale(
    normalize: str, backbone: Backbone, moments: Mapping[str, torch.Tensor] | None
) -> FeatureScale:
    """Return the normalization ``features.normalize``.

    Args:
        normalize: the option.
        backbone: the backbone.
        moments: for ``"public"``, moments of the features of public data, named like the arguments of
            :class:`FeatureScale`: ``mean`` and either ``std`` or ``projection``.

    Raises:
        ArgumentError: there are no moments, or the backbone has no batch normalization.
    """
    if normalize == "backbone":
        return FeatureScale(False, *batch_norm_moments(backbone))
    if normalize != "public":
        return FeatureScale(normalize == "example")
    if moments is None:
        expected = "none, example or backbone, as there are no public data of the form of the private data"
        raise ArgumentError("features.normalize", "public", expected)
    return FeatureScale(False, **moments)


def empty_scale(options: Features, width: int) -> FeatureScale:
    """Return a normalization of ``width`` features whose moments are yet to be loaded.

    Raises:
        ArgumentError: there are fewer features than ``features.components``.
    """
    if options.components:
        projection = torch.zeros(width, options.model_width(width))
        return FeatureScale(False, torch.zeros(width), projection=projection)
    if options.normalize in ("backbone", "public"):
        return FeatureScale(False, torch.zeros(width), torch.ones(width))
    return FeatureScale(options.normalize == "example")


class ScaledHead(nn.Module):
    """Head on features that are normalized first."""

    def __init__(self, scale: FeatureScale, head: nn.Module) -> None:
        super().__init__()
        self.scale, self.head = scale, head

    def forward(self, f: torch.Tensor) -> torch.Tensor:
        """Map features ``(B, F)`` to logits."""
        logits: torch.Tensor = self.head(self.scale(f))
        return logits


class BackboneWithHead(nn.Module):
    """Complete model: from a run's inputs (normalized images, token ids) to logits."""

    def __init__(self, backbone: Backbone, head: ScaledHead) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map inputs ``(B, ...)`` to logits."""
        logits: torch.Tensor = self.head(self.backbone(x))
        return logits

    def as_float32(self) -> BackboneWithHead:
        """Compute in float32 from now on, as exported models do."""
        self.backbone.precision = "float32"
        return self.float()


def batch_norm_moments(backbone: Backbone) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and standard deviation ``(F,)`` of features under the backbone's last batch normalization.

    Batch normalization gives channel c the mean beta_c and the deviation gamma_c on the data of the
    pretraining. The activation that follows it is averaged over a normal distribution of these moments. The
    deviation is that at one position: the deviation of an average over positions is smaller by about the same
    factor for all channels.

    Raises:
        ArgumentError: the last normalization does not produce the features.
    """
    modules: list[Any] = list(backbone.network.modules())
    norms = [at for at, module in enumerate(modules) if isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d)]
    norm = modules[norms[-1]] if norms else None
    if norm is None or norm.num_features != backbone.width or norm.weight is None:
        expected = "none, example or public, as the features do not follow a batch normalization"
        raise ArgumentError("features.normalize", "backbone", expected)
    activation = getattr(norm, "act", None)
    if activation is None:
        following: Any = modules[norms[-1] + 1] if norms[-1] + 1 < len(modules) else None
        is_activation = type(following).__module__ == "torch.nn.modules.activation"
        activation = following if is_activation else nn.Identity()
    quantiles = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    z = math.sqrt(2) * torch.erfinv(2 * quantiles - 1)  # a standard normal distribution
    values = norm.bias.double().unsqueeze(1) + norm.weight.double().abs().unsqueeze(1) * z  # (F, 1000)
    outputs = activation(values.clone())
    return outputs.mean(1).float(), raise_small_deviations(outputs.std(1)).float()


def raise_small_deviations(std: torch.Tensor) -> torch.Tensor:
    """Return standard deviations ``(F,)`` of which none is below a tenth of the root mean square of all.

    A feature that is nearly constant on the data of these deviations may vary on others, and would then be
    scaled up beyond all others.

    >>> raise_small_deviations(torch.tensor([2.0, 2.0, 2.0, 0.0]))  # root mean square: the root of 3
    tensor([2.0000, 2.0000, 2.0000, 0.1732])
    """
    return std.clamp_min(LEAST_DEVIATION * std.square().mean().sqrt())


# --- loading ------------------------------------------------------------------------------------------------


def load_backbone(options: Features, raw: RawInputs, device: str = "cpu") -> Backbone:
    """Return the backbone that the options name, on the CPU and in evaluation mode.

    Args:
        options: the options; ``backbone`` is not empty.
        raw: the inputs as the data of the run are.
        device: device on which it will compute, which decides ``precision = "auto"``.

    Raises:
        ArgumentError: an unknown backbone, a missing library, a file that does not exist, or inputs that are
            neither images nor texts.
        ModelError: the network cannot be built, the weights do not fit, or it does not take the inputs.

    Example:
        >>> backbone = load_backbone(Features("random-conv:8"), RawInputs((1, 8, 8)))
        >>> backbone(torch.zeros(3, 1, 8, 8)).shape
        torch.Size([3, 128])
    """
    if not raw.vocabulary and len(raw.shape) != 3:
        expected = f"none for inputs of shape {raw.shape}, which are neither images nor texts"
        raise ArgumentError("features.backbone", options.backbone, expected)
    network, conversion, name = _network(options, raw)
    if not isinstance(conversion, PixelConversion):
        for option, value in (("size", options.size), ("mean", options.mean), ("std", options.std)):
            if value:  # it would have no effect
                raise ArgumentError(f"features.{option}", value, f"none with {options.backbone}")
    if options.weights:
        _load_weights(network, options)
    if options.layer:
        network = LayerOutput(network, options.layer)
    precision = options.precision if options.precision != "auto" else _native_precision(device)
    if isinstance(network, OnnxEncoder) or options.backbone.startswith(("random-conv", "scattering")):
        if options.precision == "bfloat16":
            raise ArgumentError("features.precision", "bfloat16", f"float32 or auto, with {options.backbone}")
        precision = "float32"
    pixels = {key: buffer.flatten().tolist() for key, buffer in conversion.named_buffers()}
    identity = {"name": name, "layer": options.layer, "pixels": pixels}
    identity["size"] = list(getattr(conversion, "size", ()))
    return Backbone(conversion, network, raw, precision, identity)


def _network(options: Features, raw: RawInputs) -> tuple[nn.Module, nn.Module, str]:
    """Return the network, the conversion of its inputs, and a name that does not depend on the machine."""
    spec = options.backbone
    kind, _, name = spec.partition(":")
    if spec.endswith(".onnx"):
        _require_images(spec, raw)
        graph, source = _load_onnx(spec)
        return graph, _conversion(options, raw), source
    if kind in ("random-conv", "scattering"):
        return _fixed_filters(kind, name, raw), nn.Identity(), spec
    if kind in ("timm", "torchvision") and name and not options.weights and NETWORK_NAME.fullmatch(name):
        raise ArgumentError("features.weights", "", f"a local file of weights for {spec}")
    if kind == "hf" and name:
        return _load_hugging_face(name, options, raw)
    if is_trainable_kind(spec):
        network, channels, mean, std = load_untrained(spec, raw)
        return (
            network,
            nn.Identity() if raw.vocabulary else _conversion(options, raw, channels, mean, std),
            spec,
        )
    raise ArgumentError("features.backbone", spec, EXPECTED)


def is_trainable_kind(spec: str) -> bool:
    """Return whether a backbone is a torch module that can be trained: of timm, torchvision or a factory.

    >>> is_trainable_kind("timm:resnet18"), is_trainable_kind("lite0.onnx"), is_trainable_kind("hf:folder")
    (True, False, False)
    """
    kind, _, name = spec.partition(":")
    is_custom = kind not in BACKBONE_KINDS and is_object_path(spec)
    return bool(name) and (kind in ("timm", "torchvision") or is_custom)


def load_untrained(spec: str, raw: RawInputs) -> tuple[nn.Module, int, tuple[float, ...], tuple[float, ...]]:
    """Return a network of timm, of torchvision or of a custom factory, with initial weights.

    Args:
        spec: see :func:`is_trainable_kind`.
        raw: the inputs as the data of the run are.

    Returns:
        The network, its channels, and the mean and standard deviation of the pixels that it expects. For a
        custom factory these are unknown: 0 and empty.

    Raises:
        ArgumentError: the name may be one of a hub, or there is no such network.
        ModelError: the network cannot be built.
    """
    kind, _, name = spec.partition(":")
    if kind in ("timm", "torchvision"):
        _require_images(spec, raw)
        if not NETWORK_NAME.fullmatch(name):
            raise ArgumentError("features.backbone", spec, f"{kind}:NAME of letters, digits, _ and .")
        return _load_timm(name) if kind == "timm" else _load_torchvision(name)
    try:
        network = BACKBONES[spec](raw.shape)
    except FedstillError:
        raise
    except Exception as error:  # errors of any library
        raise ModelError(f"backbone {spec!r} cannot be built: {first_line(error)}") from error
    if not isinstance(network, nn.Module):
        found = type(network).__name__
        raise ModelError(f"backbone {spec!r} returns a {found} (expected a torch.nn.Module)")
    return network, 0, (), ()


def _require_images(spec: str, raw: RawInputs) -> None:
    if raw.vocabulary or len(raw.shape) != 3:
        raise ArgumentError("features.backbone", spec, "hf:FOLDER or package.module:factory for these inputs")


def _conversion(
    options: Features,
    raw: RawInputs,
    channels: int = 0,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
) -> PixelConversion:
    channels = channels or (len(options.mean) if len(options.mean) > 1 else raw.shape[0])
    return PixelConversion(raw, channels, options.size, options.mean or mean, options.std or std)


def _fixed_filters(kind: str, width: str, raw: RawInputs) -> nn.Module:
    _require_images(kind, raw)
    if width and not (width.isdigit() and int(width)):
        raise ArgumentError("features.backbone", f"{kind}:{width}", f"{kind}:WIDTH, an integer >= 1")
    sized = {"width": int(width)} if width else {}
    network: Any = RandomConv if kind == "random-conv" else Scattering
    with seeded(0, "backbone"):  # the same filters for all nodes
        layers = list(network(raw.shape, 2, **sized))[:-1]
    return nn.Sequential(*(layer for layer in layers if not isinstance(layer, UnitNorm)))


def _load_timm(name: str) -> tuple[nn.Module, int, tuple[float, ...], tuple[float, ...]]:
    """Return a network of timm with initial weights, its channels, mean and standard deviation."""
    with _installed(f"timm:{name}", "vision"):
        timm = importlib.import_module("timm")
    try:
        network: Any = timm.create_model(name, pretrained=False, num_classes=0)
    except USER_CODE_ERRORS as error:  # such as an unknown name
        raise ModelError(f"backbone timm:{name} cannot be loaded: {first_line(error)}") from error
    config = network.pretrained_cfg
    return network, config["input_size"][0], tuple(config["mean"]), tuple(config["std"])


def _load_torchvision(name: str) -> tuple[nn.Module, int, tuple[float, ...], tuple[float, ...]]:
    """Return a classifier of torchvision without its head, as :func:`_load_timm` does.

    Networks for detection and segmentation would download the weights of their own backbone.
    """
    with _installed(f"torchvision:{name}", "vision"):
        models = importlib.import_module("torchvision").models
    if name not in models.list_models(module=models):
        raise ArgumentError("features.backbone", f"torchvision:{name}", "a classifier of torchvision.models")
    try:
        network: Any = models.get_model(name, weights=None)
    except USER_CODE_ERRORS as error:
        raise ModelError(f"backbone torchvision:{name} cannot be loaded: {first_line(error)}") from error
    for head in HEAD_NAMES:
        if hasattr(network, head):
            setattr(network, head, nn.Identity())
    return network, 3, IMAGENET_MEAN, IMAGENET_STD


def _load_hugging_face(where: str, options: Features, raw: RawInputs) -> tuple[nn.Module, nn.Module, str]:
    folder, spec = Path(where).expanduser(), f"hf:{where}"
    if not (folder / "config.json").is_file():
        raise ArgumentError("features.backbone", spec, "hf:FOLDER, a local folder with config.json")
    library = import_transformers("features.backbone", spec)
    model = load_encoder(library, folder, spec)
    kind, input_name = ("texts", "input_ids") if raw.vocabulary else ("images", "pixel_values")
    if model.main_input_name != input_name:
        raise ArgumentError("features.backbone", spec, f"a model of {kind}")
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = {key: value for key, value in described.items() if key not in DESCRIPTIVE_KEYS}
    name = f"hf:{type(model).__name__} {json.dumps(config, sort_keys=True)}"  # with heads, activation, ...
    if raw.vocabulary:
        known = int(getattr(model.config, "vocab_size", 0) or 0)
        if known < raw.vocabulary:
            expected = f"data.vocabulary = {spec!r}, as the backbone has {known} tokens"
            raise ArgumentError("features.backbone", spec, expected)
        return SentenceEncoder(model), nn.Identity(), name
    mean, std = IMAGENET_MEAN, IMAGENET_STD
    preprocessor = folder / "preprocessor_config.json"
    if preprocessor.is_file():
        pixels = json.loads(preprocessor.read_text(encoding="utf-8"))
        mean, std = tuple(pixels.get("image_mean", mean)), tuple(pixels.get("image_std", std))
    channels = int(getattr(model.config, "num_channels", 3))
    return ImageEncoder(model), _conversion(options, raw, channels, mean, std), name


def _load_onnx(path: str) -> tuple[OnnxEncoder, str]:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ArgumentError("features.backbone", path, "an existing .onnx file")
    with _installed(path, "onnx"):
        runtime, onnx = importlib.import_module("onnxruntime"), importlib.import_module("onnx")
    content = file.read_bytes()
    try:
        has_external_data = _has_external_data(onnx.ModelProto.FromString(content))
    except Exception as error:  # of protobuf, which is not imported here
        raise ModelError(f"backbone {path} cannot be loaded: {first_line(error)}") from error
    if has_external_data:  # of which the digest would not depend
        raise ModelError(f"backbone {path}: has weights in other files (expected all in this file)")
    try:
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions have no common base
        raise ModelError(f"backbone {path} cannot be loaded: {first_line(error)}") from error
    return OnnxEncoder(session, content), f"onnx:{hashlib.sha256(content).hexdigest()}"


def _has_external_data(part: Any) -> bool:
    """Return whether a message of an ONNX file, or one within it, has its data in another file."""
    if type(part).__name__ == "TensorProto":
        return bool(part.data_location)  # 0: in this file
    for _, value in part.ListFields():
        inner = [value] if hasattr(value, "ListFields") else value
        is_message = isinstance(inner, list) or hasattr(inner, "add")  # one, or a list of several
        if is_message and any(map(_has_external_data, inner)):
            return True
    return False


@contextmanager
def _installed(backbone: str, extra: str) -> Iterator[None]:
    """Refuse a backbone whose library is not installed, or does not fit the installed torch."""
    try:
        yield
    except ModuleNotFoundError as error:
        expected = f"{error.name} to be installed: pip install 'fedstill[{extra}]'"
        raise ArgumentError("features.backbone", backbone, expected) from error
    except USER_CODE_ERRORS as error:  # such as torchvision of another build of torch
        raise ModelError(
            f"backbone {backbone}: its library cannot be imported: {first_line(error)}"
        ) from error


def _load_weights(network: nn.Module, options: Features) -> None:
    """Load weights from a local file into a network.

    Raises:
        ArgumentError: there is no such file, or the backbone has no weights to replace.
        ModelError: the file is not a safetensors file, or does not fit.
    """
    file = Path(options.weights).expanduser()
    fixed = options.backbone.startswith(("random-conv", "scattering"))
    if fixed or isinstance(network, OnnxEncoder):
        raise ArgumentError("features.weights", options.weights, f"none with {options.backbone}")
    load_network_weights(network, file, options.backbone, "features.weights")


def load_network_weights(network: nn.Module, file: Path, backbone: str, option: str) -> None:
    """Load a safetensors file into a network. The file may also hold other tensors, as of a head.

    Args:
        network: the network.
        file: the file.
        backbone: name of the network, for errors.
        option: option that names the file, for errors.

    Raises:
        ArgumentError: there is no such file.
        ModelError: the file is not a safetensors file, or does not fit.
    """
    if not file.is_file():
        raise ArgumentError(option, str(file), "an existing file")
    loaded = read_weights(file, option)
    own = network.state_dict()
    missing = [name for name in own if name not in loaded or loaded[name].shape != own[name].shape]
    if missing:
        raise lacking_weights_error(file, missing, backbone)
    network.load_state_dict({name: loaded[name] for name in own})


def _native_precision(device: str) -> Literal["float32", "bfloat16"]:
    """Return bfloat16 if the device has instructions for it; elsewhere it is slower than float32."""
    if device.startswith("cuda"):
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    is_native = device == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "bfloat16" if is_native else "float32"
