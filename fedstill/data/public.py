"""Public data: unlabeled or labeled inputs that the server and all nodes share.

Three sources: a held-out share of the training examples that no node gets, another data set converted to the
form of the private data, or images generated from noise, which need no data at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from fedstill.core.dataset import DataSet, TensorData
from fedstill.core.errors import ArgumentError, DataError
from fedstill.core.options import CheckedOptions, Fraction
from fedstill.core.seeds import numpy_generator, torch_generator
from fedstill.core.text_format import brief_repr, format_shape
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
from fedstill.data.table_data import sample_rows
from fedstill.tasks import TASKS, Targets, TaskConfig

NONE, HELD_OUT, NOISE, GAUSSIAN = "none", "held-out", "noise", "gaussian"
BUILTIN_SOURCES = NONE, HELD_OUT, NOISE, GAUSSIAN  # need no other data set
DEFAULT_NOISE_COUNT = 2000  # noise images without a limit
DEFAULT_GAUSSIAN_COUNT = 8000  # normally distributed features without a limit
NOISE_BLOCK = 500  # noise images sampled at once, so that image i does not depend on the limit


@dataclass(frozen=True)
class PublicConfig(CheckedOptions):
    """Source and size of the public data."""

    section: ClassVar[str] = "public"

    name: str = NONE
    """none; held-out: a share of the training examples, which no node gets; noise: generated images, which
    need no data; gaussian: normally distributed features, which need no data either, with features.backbone;
    or another data set, named as in data.name.
    """

    share: Fraction = 0.2
    """held-out: share of the training examples, stratified by class; of data with patients, whole patients
    with at most that share.
    """

    limit: Limit = 0
    """Use only this many examples, stratified by class; 0: all, of noise 2000, of gaussian 8000."""

    root: str = ""
    """Folder of another data set's files; empty: as for data.root."""

    seed: int = 0
    """Seed of sampling."""


@dataclass(frozen=True, eq=False)
class PublicData:
    """Public inputs, with labels if they are known and of the task's classes.

    Args:
        name: source.
        inputs: in the form of the private data, with the same normalization.
        labels: like the private data's targets, ``(N,)`` int64 for classes; None if unknown.
        note: remark for readers of a result.
        conversion: how they were converted to the form of the private data; empty: not at all.
        moments: moments of their features before normalization, by which nodes normalize theirs, named as in
            :class:`~fedstill.models.backbones.FeatureScale`; None: no such normalization.
    """

    name: str
    inputs: torch.Tensor
    labels: torch.Tensor | None = None
    note: str = ""
    conversion: str = ""
    moments: Mapping[str, torch.Tensor] | None = None

    __repr__ = brief_repr

    def __len__(self) -> int:
        return len(self.inputs)

    def to_record(self) -> dict[str, Any]:
        """Return the entry of these data in a run's results."""
        return {"name": self.name, "examples": len(self), "note": self.note}

    def to(self, device: torch.device | str) -> PublicData:
        """Return the same data on ``device``."""
        labels = None if self.labels is None else self.labels.to(device)
        return replace(self, inputs=self.inputs.to(device), labels=labels)


def load_public(
    config: PublicConfig, data: DataSet, task: TaskConfig = CLASSIFICATION
) -> tuple[TensorData, PublicData | None]:
    """Return the training examples that remain for the nodes, and the public data.

    They depend on the configuration and the data only, so all methods get the same.

    Raises:
        ArgumentError: the name is unknown, or names the private data themselves.
        DataError: no data were found, or they cannot be converted to the form of the private data.
    """
    if config.name in (NONE, GAUSSIAN):  # features are sampled once their number is known
        return data.train, None
    if config.name == NOISE:
        return data.train, _public_from_noise(config, data, task)
    if config.name == HELD_OUT:
        private_rows, public_rows = hold_out(config, data)
        return data.train.subset(torch.from_numpy(private_rows)), _held_out_public(public_rows, config, data)
    return data.train, _public_from_data_set(config, data, task)


def hold_out(config: PublicConfig, data: DataSet) -> tuple[Ints, Ints]:
    """Return the indices of the training examples that remain for the nodes, and of those held out.

    Patients and slides (:attr:`DataSet.unit`) are held out as a whole, stratified by site too.

    Raises:
        ArgumentError: the share leaves nothing on one side.

    >>> train = TensorData(torch.zeros(10, 1, 4, 4), torch.tensor([0, 1] * 5))
    >>> data = DataSet("even", train, train, ("a", "b"), (0.5,), (0.5,))
    >>> [part.tolist() for part in hold_out(PublicConfig("held-out", share=0.4), data)]
    [[2, 3, 6, 7, 8, 9], [0, 1, 4, 5]]
    """
    labels = stratification_labels(data.train.targets)
    count = round(config.share * len(labels))
    if not 0 < count < len(labels):
        raise ArgumentError(
            "public.share", config.share, f"a share that divides {len(labels)} examples in two"
        )
    generator = numpy_generator(config.seed, "public", "held out")
    if data.group_column:
        unit = data.columns[data.group_column]
        if len(np.unique(unit)) < 2:
            raise ArgumentError(
                "public.share", config.share, f"{NONE}: all examples are of one {data.group_column}"
            )
        public_rows = sample_whole_units(add_site_strata(labels, data.columns), unit, count, generator)
    else:
        public_rows = stratified_sample(labels, count, generator)
    return np.setdiff1d(np.arange(len(labels)), public_rows), public_rows


def _held_out_public(public_rows: Ints, config: PublicConfig, data: DataSet) -> PublicData:
    rows = public_rows[_limit_rows(stratification_labels(data.train.targets)[public_rows], config)]
    part = data.train.subset(torch.from_numpy(rows))
    note = (
        f"{len(rows)} training examples of {data.name} itself, sampled with seed {config.seed}; "
        f"{len(public_rows)} of {len(data.train)} are held out and at no node"
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
        same_targets = task.targets in targets
        served_task = task if same_targets else _task_for_targets(targets, config.name, task)
        # Nuclei keep their size.
        size = {"patch": data.train.inputs.shape[-1]} if served_task.targets == "instances" else {}
        other = load(make_data_config(config.name, root=config.root, **size), served_task)
    except ArgumentError as error:
        if error.name != "data.name":
            raise
        expected = f"{NONE}, {HELD_OUT}, {NOISE}, {error.expected.removeprefix('one of ')}"
        raise ArgumentError("public.name", config.name, f"one of {expected}") from error
    if other.name == data.name:
        raise ArgumentError("public.name", config.name, f"{HELD_OUT}, or other data than the private data")
    rows = _limit_rows(stratification_labels(other.train.targets), config)
    part = other.train if len(rows) == len(other.train) else other.train.subset(torch.from_numpy(rows))
    labels_known = same_targets and other.classes == data.classes
    notes = [
        other.note,
        f"{len(rows)} of {len(other.train)}, sampled with seed {config.seed}"
        * (len(rows) < len(other.train)),
        "" if labels_known else "without labels, as its classes differ",
    ]
    if task.task_class.form == "rows":
        if other.schema != data.schema:
            expected = f"rows of the same schema as those of {data.name}"
            raise ArgumentError("public.name", config.name, expected)
        return PublicData(other.name, part.inputs, part.targets, "; ".join(note for note in notes if note))
    images = conform_images(
        part.targets if served_task.task_class.kind == "image" else part.inputs, other, data
    )
    original_shape, shape = (tuple(tensor.shape[1:]) for tensor in (part.inputs, images))
    changed = f"images of {format_shape(original_shape)}, resized or recolored to {format_shape(shape)}"
    conversion = "" if original_shape == shape else changed
    inputs, labels = make_task_tensors(images, part.targets, task)
    joined_notes = "; ".join(note for note in notes if note)
    return PublicData(other.name, inputs, labels if labels_known else None, joined_notes, conversion)


def _task_for_targets(targets: tuple[Targets, ...], name: str, task: TaskConfig) -> TaskConfig:
    if targets[0] in ("texts", "rows", "values", "times") or task.task_class.form == "rows":
        raise ArgumentError(
            "public.name", name, f"{task.task_class.form}, as task {task.registered_name} needs these"
        )
    return next(
        task_config
        for task_config in (TASKS[task_name]() for task_name in TASKS.builtin)
        if task_config.targets == targets[0]
    )


def conform_images(inputs: torch.Tensor, source: DataSet, target: DataSet) -> torch.Tensor:
    """Convert images ``(N, C, H, W)`` of one data set to the channels, size and normalization of another.

    Gray becomes color by repetition, color becomes gray by luminance. Images are resized bilinearly, with
    antialiasing when they shrink.

    Raises:
        DataError: the numbers of channels differ, and neither is 1.
    """
    channels, *size = target.train.inputs.shape[1:]
    source_channels = inputs.shape[1]
    if source_channels != channels and 1 not in (source_channels, channels):
        raise DataError(
            f"images of {source.name} have {source_channels} channels and those of {target.name} {channels} "
            "(expected the same number, or 1 of either)"
        )
    if (source.mean, source.std) == (target.mean, target.std) and inputs.shape[1:] == (channels, *size):
        return inputs
    mean, std = _per_channel(source.mean), _per_channel(source.std)
    target_mean, target_std = _per_channel(target.mean), _per_channel(target.std)
    converted = []
    for batch in torch.split(inputs, 1000):
        pixels = batch * std + mean
        if source_channels != channels:
            pixels = pixels.expand(-1, channels, -1, -1) if source_channels == 1 else to_gray(pixels)
        if list(pixels.shape[2:]) != size:
            pixels = F.interpolate(pixels, size, mode="bilinear", antialias=True, align_corners=False)
        converted.append((pixels.clamp(0, 1) - target_mean) / target_std)
    return torch.cat(converted)


def _per_channel(values: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(values).view(-1, 1, 1)


# --- images from noise ------------------------------------------------------------------------------


def _public_from_noise(config: PublicConfig, data: DataSet, task: TaskConfig) -> PublicData:
    if data.vocabulary:
        raise ArgumentError("public.name", NOISE, f"{NONE} or {HELD_OUT}, as texts are no images")
    count = config.limit or DEFAULT_NOISE_COUNT
    if task.task_class.form == "rows":
        rows = sample_rows(data.schema, count, torch_generator(config.seed, "public", "noise"))
        rows_note = (
            f"{count} rows sampled uniformly from the schema with seed {config.seed}; no data were needed"
        )
        return PublicData(NOISE, rows, None, rows_note)
    channels, height, width = data.train.inputs.shape[1:]
    blocks = [
        generate_noise_images(
            NOISE_BLOCK, channels, height, width, torch_generator(config.seed, "public", "noise", block)
        )
        for block in range(math.ceil(count / NOISE_BLOCK))
    ]
    pixels = torch.cat(blocks)[:count]
    inputs = (pixels - _per_channel(data.mean)) / _per_channel(data.std)
    note = f"{count} images generated from noise with seed {config.seed}; no data were needed"
    if task.task_class.kind == "image":
        return PublicData(NOISE, *make_task_tensors(inputs, inputs, task), note)
    return PublicData(NOISE, inputs, None, note)


def gaussian_features(config: PublicConfig, features: int) -> PublicData:
    """Return inputs for queries from a standard normal distribution in feature space, ``(N, features)``."""
    count = config.limit or DEFAULT_GAUSSIAN_COUNT
    inputs = torch.randn(count, features, generator=torch_generator(config.seed, "public", "gaussian"))
    note = f"{count} vectors of {features} normally distributed features, with seed {config.seed}"
    return PublicData(GAUSSIAN, inputs, None, f"{note}; no data were needed")


def generate_noise_images(
    count: int, channels: int, height: int, width: int, generator: torch.Generator
) -> torch.Tensor:
    """Generate images ``(count, channels, H, W)`` in [0, 1] with statistics of natural images.

    Each image is a weighted sum of smooth random fields, from two cells across to one cell per pixel, each
    stretched in a random direction. Sampled for each image: the weights of the scales, the sharpness of
    edges, the difference between channels, contrast and brightness.
    """

    def uniform(low: float, high: float, *pixels: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, *pixels, generator=generator)

    longer_side = max(height, width)
    scales = [2**power for power in range(1, max(round(math.log2(longer_side)), 1) + 1)]  # cells across
    slope = uniform(0.3, 2.0)  # decay of the weights with the scale: a steep slope gives smooth images
    image = torch.zeros(count, channels, height, width)
    channel_mix = uniform(0.0, 1.0, 1, 1, 1)  # difference between channels
    for cells in scales:
        lattice = torch.randn(count, 1 + channels, 2 * cells + 2, 2 * cells + 2, generator=generator)
        angle, stretch = uniform(0.0, math.pi), uniform(0.3, 1.0)
        # Rotation whose second axis is slowed down, so that the field varies less along it.
        cos, sin = angle.cos() / 2, angle.sin() / 2  # halved, as rotations must stay within the wider lattice
        rotation = torch.stack(
            [torch.stack([cos, -sin], 1), torch.stack([sin * stretch, cos * stretch], 1)], 1
        )  # (count, 2, 2)
        theta = torch.cat([rotation, uniform(-0.2, 0.2, 2, 1)], 2)  # (count, 2, 3)
        grid = F.affine_grid(theta, [count, 1, height, width], align_corners=False)
        fields = F.grid_sample(lattice, grid, mode="bicubic", padding_mode="reflection", align_corners=False)
        mixed = (1 - channel_mix) * fields[:, :1] + channel_mix * fields[:, 1:]
        image += mixed * (cells**-slope).view(-1, 1, 1, 1)
    image -= image.mean((1, 2, 3), keepdim=True)
    image /= image.std((1, 2, 3), keepdim=True).clamp_min(1e-6)
    hardness = torch.exp(uniform(math.log(0.5), math.log(8.0), 1, 1, 1))
    brightness, contrast = uniform(-1.0, 1.0, 1, 1, 1), uniform(0.3, 1.0, 1, 1, 1)
    pixels = torch.sigmoid(hardness * (image + brightness))  # (count, C, H, W) in (0, 1)
    low = uniform(0.0, 1.0, 1, 1, 1) * (1 - contrast)
    return low + contrast * pixels
