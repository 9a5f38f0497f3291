"""From a name or a path in a configuration to a data set."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from fedstill.core.dataset import DataSet, TensorData, normalised
from fedstill.core.errors import DataError
from fedstill.data.config import MEAN, STD, DataConfig, available, check_config, check_options, tasks_of
from fedstill.data.located import _listed, find_pack, folders, located
from fedstill.data.packs import Raw, read_folder, read_npz
from fedstill.data.parts import parted
from fedstill.data.splits import Ints
from fedstill.tasks import TaskConfig
from fedstill.tasks.classification import ClassificationConfig

__all__ = ["MEAN", "STD", "DataConfig", "available", "find_pack", "folders", "load", "located", "tasks_of"]

CLASSIFICATION = ClassificationConfig()


@dataclass(frozen=True)
class _Known:
    """Where a data set with a name may be found."""

    pack: str  # our file
    pack_note: str
    vision: str  # torchvision's class, and the folder in which it keeps the data
    vision_folder: str


_KNOWN: Mapping[str, _Known] = MappingProxyType(
    {
        "mnist": _Known("mnist.npz", "official split", "MNIST", "MNIST"),
        "fashion-mnist": _Known(
            "fashion_mnist.npz", "a stratified split, not the official one", "FashionMNIST", "FashionMNIST"
        ),
        "cifar10": _Known(
            "cifar10_jpeg.npz",
            "JPEG copy of CIFAR-10 (lossy), official split",
            "CIFAR10",
            "cifar-10-batches-py",
        ),
        "cifar100": _Known(
            "cifar100_mosaic.npz",
            "JPEG copy of CIFAR-100 (lossy), a fixed split of 500 and 100 a class, not the official one",
            "CIFAR100",
            "cifar-100-python",
        ),
    }
)


def load(config: DataConfig, task: TaskConfig = CLASSIFICATION, *, train_needed: bool = True) -> DataSet:
    """Load a data set, decoded and normalised, with its test part apart.

    Where the source has no split of its own, a seeded draw with the classes' shares kept is the
    test part, and the note says so. ``train_limit`` draws from the training part alone, so the
    test part is the same for every limit. Where examples belong to patients or pictures
    (:attr:`DataSet.unit`), neither draw parts them.

    Args:
        config: name or path, and how much of it.
        task: what the data are for, which says what their targets are.
        train_needed: refuse data without a training part; a server needs none, as its nodes have theirs.

    Returns:
        Inputs (N, C, H, W) float32 in [-1, 1], or token ids (N, L) int64, and the task's targets.

    Raises:
        ArgumentError: a name that is neither known nor a path, or serves other tasks; an option that the data
            do not have, a number out of range.
        DataError: nothing found (what was looked for, and where), or data that cannot be used.

    >>> data = load(DataConfig(name="digits", train_limit=100))
    >>> data.train.inputs.shape, len(data.test), len(data.classes)
    (torch.Size([100, 1, 8, 8]), 359, 10)
    """
    check_config(config)
    check_options(config, task)
    if task.like == "text":
        from fedstill.data.text import load_text

        data = load_text(config)
    elif task.like == "classification":
        data = _classified(config)
    elif task.like == "instances":
        from fedstill.data.nuclei import load_nuclei

        data = load_nuclei(config, task)
    else:
        from fedstill.data.medical import load_medical

        data = load_medical(config, task)
    made = task.make(data.classes)
    if train_needed or len(data.train):
        made.check(data.train, f"train part of {data.name}")
    made.check(data.test, f"test part of {data.name}")
    return data


def _classified(config: DataConfig) -> DataSet:
    raw, name, note = _read(config)
    parts = parted(raw.labels, raw.test, raw.columns, config, name)
    channels = raw.images.shape[1]
    mean, std = (MEAN,) * channels, (STD,) * channels
    return DataSet(
        name=name,
        train=replace(_tensors(raw, parts.train, mean, std), groups=parts.groups),
        test=_tensors(raw, parts.test, mean, std),
        classes=raw.classes,
        mean=mean,
        std=std,
        note="; ".join((note, *parts.notes) if note else parts.notes),
        columns={key: column[parts.train] for key, column in raw.columns.items()},
        unit=parts.unit,
    )


def _tensors(raw: Raw, rows: Ints, mean: tuple[float, ...], std: tuple[float, ...]) -> TensorData:
    return TensorData(normalised(raw.images[rows], mean, std), torch.from_numpy(raw.labels[rows]))


def _read(config: DataConfig) -> tuple[Raw, str, str]:
    """The data, its name, and what is to be said of it."""
    if config.name == "digits":
        return _digits(), "digits", "the 8 x 8 handwritten digits of scikit-learn"
    if config.name in _KNOWN:
        return _known(config)
    return _path(config)


def _digits() -> Raw:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)  # (1797, 1, 8, 8), from 0..16
    return Raw(images, digits.target.astype(np.int64), tuple(str(name) for name in digits.target_names))


def _known(config: DataConfig) -> tuple[Raw, str, str]:
    known, roots = _KNOWN[config.name], folders(config)
    for root in roots:
        if (root / known.pack).is_file():
            return read_npz(root / known.pack), config.name, known.pack_note
    there = [root for root in roots if (root / known.vision_folder).is_dir()]
    if there or config.download:
        return _torchvision(known, (there or roots)[0], config.download), config.name, "official split"
    raise DataError(
        f"data {config.name!r}: there is neither {known.pack} nor torchvision's {known.vision_folder} in "
        f"{_listed(roots)}: put one there, name its folder in data.root, or set data.download"
    )


def _path(config: DataConfig) -> tuple[Raw, str, str]:
    place = located(config, CLASSIFICATION.like)
    if place.is_dir():
        return read_folder(place), place.resolve().name, ""
    return read_npz(place), place.stem, ""


def _torchvision(known: _Known, root: Path, download: bool) -> Raw:
    """Both official parts of a data set, through torchvision.

    The CIFAR files are pickles. torchvision opens them only after their MD5 sums agree with
    those of the published files.
    """
    try:
        vision = importlib.import_module("torchvision.datasets")
    except ImportError as error:
        raise DataError(
            f"{root / known.vision_folder}: only torchvision can read this or download it: "
            "pip install 'fedstill[vision]'"
        ) from error
    try:
        train, test = (
            getattr(vision, known.vision)(str(root), train=part, download=download) for part in (True, False)
        )
    except (RuntimeError, OSError, ValueError, AssertionError, EOFError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{known.vision} in {root}: torchvision gives none ({reason})") from error
    images = np.concatenate([np.asarray(train.data), np.asarray(test.data)])  # (N, H, W) or (N, H, W, 3)
    labels = np.concatenate([np.asarray(train.targets), np.asarray(test.targets)]).astype(np.int64)
    return Raw(
        images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2),
        labels,
        tuple(str(name) for name in train.classes),
        np.arange(len(labels)) >= len(train.targets),
    )
