"""Public data: inputs that the server and every node have, and that are nobody's secret.

Three sources: a share of the training examples that no node gets, another data set brought into the
private data's form, or images generated from noise, for which no data are needed at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from fedstill.core.dataset import DataSet, TensorData
from fedstill.core.errors import ArgumentError, DataError
from fedstill.core.options import Checked, Fraction
from fedstill.core.seeds import numpy_generator, torch_generator
from fedstill.core.text_format import brief_repr, times
from fedstill.data.config import DATA, Limit, make_data_config
from fedstill.data.images import to_gray
from fedstill.data.loading import CLASSIFICATION, load, make_task_tensors
from fedstill.data.stratified_sampling import (
    Ints,
    add_site_strata,
    sample_whole_units,
    stratification_labels,
    stratified_sample,
)
from fedstill.data.tables import sample_rows
from fedstill.tasks import TASKS, Targets, TaskConfig

BUILTIN_SOURCES = NONE, HELD_OUT, NOISE = "none", "held-out", "noise"  # which need no other data set
DEFAULT_NOISE_COUNT = 2000  # noise images, unless a limit says otherwise
NOISE_BLOCK = 500  # noise images drawn at once: image i is the same whatever the limit


@dataclass(frozen=True)
class PublicConfig(Checked):
    """Which public data, and how much of it."""

    under: ClassVar[str] = "public"

    name: str = NONE
    """none; held-out: a share of the training examples, which no node gets; noise: generated images, for
    which no data are needed; or another data set, named as in data.name."""

    share: Fraction = 0.2
    """held-out: the share of the training examples, the classes' shares kept; of data with patients, whole
    patients with at most that share."""

    limit: Limit = 0
    """Use only so many examples, drawn with the classes' shares kept; 0 is all, of noise 2000."""

    root: str = ""
    """The folder that holds another data set's files; without it as for data.root."""

    seed: int = 0
    """Seed of these draws."""


@dataclass(frozen=True, eq=False)
class PublicData:
    """Public inputs, and their targets where they are known and of the task's own classes.

    Args:
        name: where they come from.
        inputs: as the private data's, images normalized as those are.
        labels: as the private data's targets, ``(N,)`` int64 for classes; or None.
        note: what a reader of a figure must know.
        conversion: what was done to bring them into the private data's form; empty: nothing.
    """

    name: str
    inputs: torch.Tensor
    labels: torch.Tensor | None = None
    note: str = ""
    conversion: str = ""

    __repr__ = brief_repr

    def __len__(self) -> int:
        return len(self.inputs)

    def to_record(self) -> dict[str, Any]:
        """What a result says of them."""
        return {"name": self.name, "examples": len(self), "note": self.note}

    def to(self, device: torch.device | str) -> PublicData:
        """The same data on ``device``."""
        labels = None if self.labels is None else self.labels.to(device)
        return PublicData(self.name, self.inputs.to(device), labels, self.note, self.conversion)


def load_public(
    config: PublicConfig, data: DataSet, task: TaskConfig = CLASSIFICATION
) -> tuple[TensorData, PublicData | None]:
    """Public data beside private data, and the training examples that are left for the nodes.

    Both follow from the configuration and the data alone, so all methods meet the same.

    Raises:
        ArgumentError: the private data themselves are named, or a name that is not known.
        DataError: nothing found, or images that cannot be brought into the private data's form.
    """
    if config.name == NONE:
        return data.train, None
    if config.name == NOISE:
        return data.train, _public_from_noise(config, data, task)
    if config.name == HELD_OUT:
        kept, taken = hold_out(config, data)
        return data.train.subset(torch.from_numpy(kept)), _held_out_public(taken, config, data)
    return data.train, _public_from_data_set(config, data, task)


def hold_out(config: PublicConfig, data: DataSet) -> tuple[Ints, Ints]:
    """Which training examples are left for the nodes, and which are public if a share is held out.

    Patients and pictures (:attr:`DataSet.unit`) are held out whole, the sites' shares kept too; a share that
    leaves nothing on one side is refused.

    >>> train = TensorData(torch.zeros(10, 1, 4, 4), torch.tensor([0, 1] * 5))
    >>> data = DataSet("even", train, train, ("a", "b"), (0.5,), (0.5,))
    >>> [part.tolist() for part in hold_out(PublicConfig("held-out", share=0.4), data)]
    [[2, 3, 6, 7, 8, 9], [0, 1, 4, 5]]
    """
    labels = stratification_labels(data.train.targets)
    count = round(config.share * len(labels))
    if not 0 < count < len(labels):
        raise ArgumentError("public.share", config.share, f"a share that parts {len(labels)} examples in two")
    generator = numpy_generator(config.seed, "public", "held out")
    if data.unit:
        unit = data.columns[data.unit]
        if len(np.unique(unit)) < 2:
            raise ArgumentError("public.share", config.share, f"{NONE}: all examples are of one {data.unit}")
        taken = sample_whole_units(add_site_strata(labels, data.columns), unit, count, generator)
    else:
        taken = stratified_sample(labels, count, generator)
    return np.setdiff1d(np.arange(len(labels)), taken), taken


def _held_out_public(taken: Ints, config: PublicConfig, data: DataSet) -> PublicData:
    rows = taken[_limit_rows(stratification_labels(data.train.targets)[taken], config)]
    part = data.train.subset(torch.from_numpy(rows))
    note = (
        f"{len(rows)} training examples of {data.name} itself, drawn with seed {config.seed}; "
        f"{len(taken)} of {len(data.train)} are held out and at no node"
    )
    return PublicData(HELD_OUT, part.inputs, part.targets, note)


def _limit_rows(labels: Ints, config: PublicConfig) -> Ints:
    if not 0 < config.limit < len(labels):
        return np.arange(len(labels))
    return stratified_sample(labels, config.limit, numpy_generator(config.seed, "public", "limit"))


# --- another data set -------------------------------------------------------------------------------


def _public_from_data_set(config: PublicConfig, data: DataSet, task: TaskConfig) -> PublicData:
    if data.vocabulary:
        raise ArgumentError(
            "public.name", config.name, f"{NONE} or {HELD_OUT}, as other texts have token ids of their own"
        )
    try:
        targets = DATA[config.name].targets
        same = task.targets in targets
        served = task if same else _image_task(targets, config.name, task)
        # Nuclei stay as large.
        size = {"patch": data.train.inputs.shape[-1]} if served.targets == "instances" else {}
        other = load(make_data_config(config.name, root=config.root, **size), served)
    except ArgumentError as error:
        if error.name != "data.name":
            raise
        allowed = f"{NONE}, {HELD_OUT}, {NOISE}, {error.allowed.removeprefix('one of ')}"
        raise ArgumentError("public.name", config.name, f"one of {allowed}") from error
    if other.name == data.name:
        raise ArgumentError(
            "public.name", config.name, f"{HELD_OUT}, or other data than the nodes' own: no node's secret"
        )
    rows = _limit_rows(stratification_labels(other.train.targets), config)
    part = other.train if len(rows) == len(other.train) else other.train.subset(torch.from_numpy(rows))
    known = same and other.classes == data.classes
    notes = [
        other.note,
        f"{len(rows)} of {len(other.train)}, drawn with seed {config.seed}" * (len(rows) < len(other.train)),
        "" if known else "without labels, as its classes are others",
    ]
    if task.task_class.form == "rows":
        if other.schema != data.schema:
            allowed = f"rows of the same schema as those of {data.name}"
            raise ArgumentError("public.name", config.name, allowed)
        return PublicData(other.name, part.inputs, part.targets, "; ".join(note for note in notes if note))
    images = conform_images(part.targets if served.task_class.kind == "image" else part.inputs, other, data)
    found, wanted = (tuple(each.shape[1:]) for each in (part.inputs, images))
    conversion = (
        "" if found == wanted else f"images of {times(found)}, resized or recolored to {times(wanted)}"
    )
    inputs, labels = make_task_tensors(images, part.targets, task)
    told = "; ".join(note for note in notes if note)
    return PublicData(other.name, inputs, labels if known else None, told, conversion)


def _image_task(targets: tuple[Targets, ...], name: str, task: TaskConfig) -> TaskConfig:
    if targets[0] in ("texts", "rows", "values", "times") or task.task_class.form == "rows":
        raise ArgumentError(
            "public.name", name, f"{task.task_class.form}, as task {task.called} takes no others"
        )
    return next(each for each in (TASKS[own]() for own in TASKS.own) if each.targets == targets[0])


def conform_images(inputs: torch.Tensor, source: DataSet, target: DataSet) -> torch.Tensor:
    """Images ``(N, C, H, W)`` of one data set in the form of another: its channels, size and normalization.

    Gray becomes color by repetition and color gray by luminance, other numbers of channels are refused;
    images are resized bilinearly, with antialiasing where they shrink.
    """
    channels, *size = target.train.inputs.shape[1:]
    found = inputs.shape[1]
    if found != channels and 1 not in (found, channels):
        raise DataError(
            f"images of {source.name} have {found} channels and those of {target.name} {channels}: "
            "allowed is the same number, or 1 on one side"
        )
    if (source.mean, source.std) == (target.mean, target.std) and inputs.shape[1:] == (channels, *size):
        return inputs
    mean, std = _per_channel(source.mean), _per_channel(source.std)
    new_mean, new_std = _per_channel(target.mean), _per_channel(target.std)
    parts = []
    for part in torch.split(inputs, 1000):
        pixels = part * std + mean
        if found != channels:
            pixels = pixels.expand(-1, channels, -1, -1) if found == 1 else to_gray(pixels)
        if list(pixels.shape[2:]) != size:
            pixels = F.interpolate(pixels, size, mode="bilinear", antialias=True, align_corners=False)
        parts.append((pixels.clamp(0, 1) - new_mean) / new_std)
    return torch.cat(parts)


def _per_channel(values: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(values).view(-1, 1, 1)


# --- images from noise ------------------------------------------------------------------------------


def _public_from_noise(config: PublicConfig, data: DataSet, task: TaskConfig) -> PublicData:
    if data.vocabulary:
        raise ArgumentError("public.name", NOISE, f"{NONE} or {HELD_OUT}, as texts are no images")
    count = config.limit or DEFAULT_NOISE_COUNT
    if task.task_class.form == "rows":
        made = sample_rows(data.schema, count, torch_generator(config.seed, "public", "noise"))
        told = f"{count} rows drawn evenly from the schema with seed {config.seed}: no data were needed"
        return PublicData(NOISE, made, None, told)
    channels, height, width = data.train.inputs.shape[1:]
    blocks = [
        generate_noise_images(
            NOISE_BLOCK, channels, height, width, torch_generator(config.seed, "public", "noise", block)
        )
        for block in range(math.ceil(count / NOISE_BLOCK))
    ]
    pixels = torch.cat(blocks)[:count]
    inputs = (pixels - _per_channel(data.mean)) / _per_channel(data.std)
    note = f"{count} images generated from noise with seed {config.seed}: no data were needed"
    if task.task_class.kind == "image":
        return PublicData(NOISE, *make_task_tensors(inputs, inputs, task), note)
    return PublicData(NOISE, inputs, None, note)


def generate_noise_images(
    count: int, channels: int, height: int, width: int, generator: torch.Generator
) -> torch.Tensor:
    """Pixels ``(count, channels, H, W)`` in [0, 1] with what natural images have: scales, directions, edges.

    Each is a weighted sum of smooth random fields, from two cells across to one a pixel. A field is stretched
    in a random direction; how the scales are weighed, how hard the edges are, how much the channels differ,
    contrast and brightness are drawn for each image.
    """

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=generator)

    side = max(height, width)
    scales = [2**power for power in range(1, max(round(math.log2(side)), 1) + 1)]  # cells across
    slope = uniform(0.3, 2.0)  # how fast weights fall with the scale: steep is smooth
    image = torch.zeros(count, channels, height, width)
    own = uniform(0.0, 1.0, 1, 1, 1)  # how much channels differ
    for cells in scales:
        lattice = torch.randn(count, 1 + channels, 2 * cells + 2, 2 * cells + 2, generator=generator)
        angle, stretch = uniform(0.0, math.pi), uniform(0.3, 1.0)
        # Rows of a rotation, the second axis slowed down: there the field varies less.
        cos, sin = angle.cos() / 2, angle.sin() / 2  # halved: turns stay in the lattice, which is wider
        turn = torch.stack(
            [torch.stack([cos, -sin], 1), torch.stack([sin * stretch, cos * stretch], 1)], 1
        )  # (count, 2, 2)
        theta = torch.cat([turn, uniform(-0.2, 0.2, 2, 1)], 2)  # (count, 2, 3)
        grid = F.affine_grid(theta, [count, 1, height, width], align_corners=False)
        fields = F.grid_sample(lattice, grid, mode="bicubic", padding_mode="reflection", align_corners=False)
        mixed = (1 - own) * fields[:, :1] + own * fields[:, 1:]
        image += mixed * (cells**-slope).view(-1, 1, 1, 1)
    image -= image.mean((1, 2, 3), keepdim=True)
    image /= image.std((1, 2, 3), keepdim=True).clamp_min(1e-6)
    hardness = torch.exp(uniform(math.log(0.5), math.log(8.0), 1, 1, 1))
    brightness, contrast = uniform(-1.0, 1.0, 1, 1, 1), uniform(0.3, 1.0, 1, 1, 1)
    shape = torch.sigmoid(hardness * (image + brightness))  # (count, C, H, W) in (0, 1)
    low = uniform(0.0, 1.0, 1, 1, 1) * (1 - contrast)
    return low + contrast * shape
