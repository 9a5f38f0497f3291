"""From a name or a path in a configuration to a data set."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from fedstill.data.dataset import DataSet, TensorData, check_classification, normalised
from fedstill.data.packs import Raw, read_folder, read_npz
from fedstill.data.splits import Ints, stratified
from fedstill.errors import ArgumentError, DataError
from fedstill.seeds import numpy_generator

MEAN = STD = 0.5  # for every channel and every data set: pixels 0..255 become -1..1


@dataclass(frozen=True)
class DataConfig:
    """Which data, and how much of it."""

    name: str = "digits"
    """digits, mnist, fashion-mnist, cifar10, cifar100, or a path: to an .npz with images and
    labels, or to a folder of images by class."""

    root: str = ""
    """The folder that holds the data files; without it ./data, then the folder that the
    environment variable FEDSTILL_DATA names."""

    download: bool = False
    """Let torchvision (the extra "vision") download what is not there."""

    train_limit: int = 0
    """Use only so many training examples, drawn with the classes' shares kept; 0 is all."""

    test_fraction: float = 0.2
    """The part of the examples kept for testing, where the source has no split of its own."""

    seed: int = 0
    """Seed of that split and of the draw for train_limit."""


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


def available() -> tuple[str, ...]:
    """The data sets that have a name. Only digits comes with the installation.

    >>> available()
    ('digits', 'mnist', 'fashion-mnist', 'cifar10', 'cifar100')
    """
    return ("digits", *_KNOWN)


def load(config: DataConfig, *, train_needed: bool = True) -> DataSet:
    """Load a data set, decoded and normalised, with its test part apart.

    Where the source has no split of its own, a seeded draw with the classes' shares kept is the
    test part, and the note says so. ``train_limit`` draws from the training part alone, so the
    test part is the same for every limit.

    Args:
        config: name or path, and how much of it.
        train_needed: refuse data without a training part; a server needs none, as its nodes have theirs.

    Returns:
        Inputs (N, C, H, W) float32 in [-1, 1], targets (N,) int64 class indices.

    Raises:
        ArgumentError: a name that is neither known nor a path, a number out of range.
        DataError: nothing found (what was looked for, and where), or data that cannot be used.

    >>> data = load(DataConfig(name="digits", train_limit=100))
    >>> data.train.inputs.shape, len(data.test), len(data.classes)
    (torch.Size([100, 1, 8, 8]), 359, 10)
    """
    _check_config(config)
    raw, name, note = _read(config)

    notes = [note] if note else []
    if raw.test is None:
        # At least one example on each side, however small the source.
        count = min(max(round(len(raw.labels) * config.test_fraction), 1), len(raw.labels) - 1)
        test = stratified(raw.labels, count, numpy_generator(config.seed, "data", "test"))
        drawn = f"{count} of {len(raw.labels)}, drawn with seed {config.seed}"
        notes.append(f"no official split: tested on {drawn}")
    else:
        test = np.flatnonzero(raw.test)
    train = np.setdiff1d(np.arange(len(raw.labels)), test)
    if 0 < config.train_limit < len(train):
        notes.append(f"trained on {config.train_limit} of {len(train)}, drawn with seed {config.seed}")
        generator = numpy_generator(config.seed, "data", "limit")
        train = train[stratified(raw.labels[train], config.train_limit, generator)]

    channels = raw.images.shape[1]
    mean, std = (MEAN,) * channels, (STD,) * channels
    data = DataSet(
        name=name,
        train=_tensors(raw, train, mean, std),
        test=_tensors(raw, test, mean, std),
        classes=raw.classes,
        mean=mean,
        std=std,
        note="; ".join(notes),
        columns={key: column[train] for key, column in raw.columns.items()},
    )
    if train_needed or len(data.train):
        check_classification(data.train, len(data.classes), f"train part of {name}")
    check_classification(data.test, len(data.classes), f"test part of {name}")
    return data


def _check_config(config: DataConfig) -> None:
    if not config.name:
        raise ArgumentError("data.name", config.name, f"one of {', '.join(available())}, or a path")
    if config.train_limit < 0:
        raise ArgumentError("data.train_limit", config.train_limit, "0 (all) or a whole number from 1 up")
    if not 0 < config.test_fraction < 1:
        raise ArgumentError("data.test_fraction", config.test_fraction, "a number between 0 and 1")


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
    known, roots = _KNOWN[config.name], _roots(config)
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
    places = [Path(config.name).expanduser(), *(root / config.name for root in _roots(config))]
    for place in places:
        if place.is_dir():
            return read_folder(place), place.resolve().name, ""
        if place.is_file() and place.suffix == ".npz":
            return read_npz(place), place.stem, ""
    if config.name.endswith(".npz") or len(Path(config.name).parts) > 1:
        raise DataError(f"data {config.name!r}: no such .npz or folder; looked for {_listed(places)}")
    names = ", ".join(available())
    raise ArgumentError("data.name", config.name, f"one of {names}, or a path to an .npz or a folder")


def _roots(config: DataConfig) -> list[Path]:
    if config.root:
        return [Path(config.root).expanduser()]
    named = os.environ.get("FEDSTILL_DATA")
    return [Path("data"), *([Path(named).expanduser()] if named else [])]


def _listed(paths: list[Path]) -> str:
    return " or ".join(str(path) for path in paths)


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
