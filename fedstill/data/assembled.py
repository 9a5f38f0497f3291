"""From what a source holds to a data set: sites chosen, a test part apart, images of one size, targets.

For tasks whose examples have one size and come from patients: segmentation, reconstruction, findings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from fedstill.core.dataset import Cases, Column, DataSet, TensorData, normalised
from fedstill.core.errors import ArgumentError, DataError
from fedstill.core.seeds import numpy_generator
from fedstill.data.config import MEAN, STD, DataConfig
from fedstill.data.groups import numbered
from fedstill.data.packs import Images, Raw
from fedstill.data.rasters import resized, resized_maps
from fedstill.data.units import drawn_units, labels_of, strata, whole
from fedstill.data.validation import set_aside
from fedstill.tasks import TaskConfig

PATIENT, SITE = "patient", "site"


@dataclass(frozen=True, eq=False)
class Source:
    """What was read, and what is to be said of it.

    ``raw.labels`` are findings ``(N, C)`` or maps ``(N, H, W)``; for reconstruction ``(N,)``, not looked at.
    Columns "patient" and "site" say whose and whence each example is, if they are there.
    """

    raw: Raw
    name: str
    note: str = ""


def data_set(
    source: Source,
    config: DataConfig,
    task: TaskConfig,
    *,
    size: int = 0,
    channels: tuple[int, ...] = (),
    sites: tuple[str, ...] = (),
) -> DataSet:
    """The data set that a source and a configuration make.

    Where examples have a patient, no patient is in both parts, and where the source has no test part of its
    own, it is a share of the patients of each site: at least one, and never all. Sites with one patient
    cannot be parted so and are left out, which the note says.

    Args:
        source: what was read.
        config: how much for testing, validation, training.
        task: which, and how images are measured.
        size: height and width that images are averaged down to, masks by majority; 0: as they are.
        channels: which; empty: all, and for reconstruction the first.
        sites: only these; empty: all.

    Raises:
        ArgumentError: a site that is not there or too small, channels that there are not.
        DataError: a source that has a patient in both of its parts, or nothing in one of them.
    """
    raw, name = source.raw, source.name
    rows, left_out = chosen_sites(raw.columns, sites, len(raw.images), raw.test is None)
    unit = PATIENT if PATIENT in raw.columns else ""
    test, drawn = _test_part(raw, rows, config, name)
    unit_of = raw.columns[PATIENT] if unit else np.arange(len(raw.images))
    kept, test, told = set_aside(
        test,
        labels_of(torch.from_numpy(raw.labels[rows])),
        unit_of[rows],
        raw.columns[SITE][rows] if SITE in raw.columns else None,
        config,
        "patients" if unit else "images",
    )
    notes = [source.note, left_out, drawn, told]
    train_rows, test_rows = rows[kept], rows[test]
    train_rows, limited = _limited(raw, train_rows, config, unit)
    notes.append(limited)

    if task.like == "reconstruction":
        if len(channels) > 1:
            raise ArgumentError("data.channels", list(channels), "one, as reconstruction rebuilds one image")
        channels = channels or (0,)
    images = with_channels(raw.images, channels, "data.channels")
    classes = ("image",) if task.like == "reconstruction" else raw.classes
    sides = (size, size) if size else images.shape[2:]
    mean, std = (MEAN,) * images.shape[1], (STD,) * images.shape[1]
    cases = patients(raw.columns)
    train, tested = (
        part(images[at], raw.labels[at], sides, task, classes, None if cases is None else at_rows(cases, at))
        for at in (train_rows, test_rows)
    )
    if unit:
        train = replace(train, groups=numbered(raw.columns[unit][train_rows].tolist()))
    return DataSet(
        name=name,
        train=train,
        test=tested,
        classes=classes,
        mean=mean,
        std=std,
        note="; ".join(note for note in notes if note),
        columns={key: column[train_rows] for key, column in raw.columns.items()},
        unit=unit,
    )


def part(
    images: Images,
    labels: npt.NDArray[np.int64],
    size: Sequence[int],
    task: TaskConfig,
    classes: tuple[str, ...],
    cases: Cases | None = None,
) -> TensorData:
    """Inputs and targets of a task, from images and what was read beside them.

    Args:
        images: ``(N, C, H, W)``, uint8 or floats in [0, 1].
        labels: findings ``(N, labels)`` or maps ``(N, H, W)``; for reconstruction, not looked at.
        size: wanted height and width.
        task: which, and how images are measured.
        classes: names.
        cases: of which patients.
    """
    channels, (height, width) = images.shape[1], size
    if tuple(images.shape[2:]) != (height, width):
        images = resized(images, height, width)
    inputs = normalised(images, (MEAN,) * channels, (STD,) * channels)
    if task.like == "reconstruction":
        return TensorData(observed(inputs, task), inputs, cases=cases)
    targets = torch.from_numpy(np.asarray(labels, dtype=np.int64))
    if task.like == "segmentation":
        targets = resized_maps(targets, height, width)
    return TensorData(inputs, targets, cases=cases)


def observed(pictures: torch.Tensor, task: TaskConfig) -> torch.Tensor:
    """What a network of a task sees of images ``(N, C, H, W)``: for reconstruction, what is measured."""
    made = task.make(1)
    with torch.no_grad():
        return torch.cat([made.observe(some) for some in torch.split(pictures, 256)]).contiguous()


def with_channels(images: Images, channels: tuple[int, ...], option: str) -> Images:
    """The wanted channels of ``(N, C, H, W)``, all if none is named.

    Raises:
        ArgumentError: channels that there are not, or one twice.
    """
    there = images.shape[1]
    if not all(0 <= channel < there for channel in channels) or len(set(channels)) < len(channels):
        raise ArgumentError(option, list(channels), f"different numbers from 0 to {there - 1}")
    return images[:, list(channels)] if channels else images


def chosen_sites(
    columns: Mapping[str, Column], wanted: tuple[str, ...], count: int, to_be_parted: bool
) -> tuple[npt.NDArray[np.int64], str]:
    """The rows of the sites that are used, and what to say of those that are left out.

    Raises:
        ArgumentError: a site that is named and not there, or of which a patient cannot be kept for testing.
    """
    if SITE not in columns:
        if wanted:
            raise ArgumentError("data.sites", list(wanted), "none, as this data does not tell sites")
        return np.arange(count), ""
    sites = columns[SITE]
    names = [str(name) for name in np.unique(sites)]
    for name in wanted:
        if name not in names:
            raise ArgumentError("data.sites", name, f"some of {', '.join(names)}")
    unit = columns.get(PATIENT, np.arange(count))
    least = 2 if to_be_parted else 1  # to part a site's patients there must be two
    small = [name for name in names if len(np.unique(unit[sites == name])) < least]
    for name in wanted:
        if name in small:
            raise ArgumentError("data.sites", name, "sites of two or more patients, one of them for testing")
    used = list(wanted) or [name for name in names if name not in small]
    left_out = [name for name in small if not wanted]
    rows = np.flatnonzero(np.isin(sites, used))
    return rows, f"left out, with one patient each: {', '.join(left_out)}" if left_out else ""


def _test_part(
    raw: Raw, rows: npt.NDArray[np.int64], config: DataConfig, name: str
) -> tuple[npt.NDArray[np.bool_], str]:
    """Which of the rows are for testing, and what to say of it."""
    patient = raw.columns.get(PATIENT)
    unit = (np.arange(len(raw.images)) if patient is None else patient)[rows]
    of, called = np.unique(unit), "images" if patient is None else "patients"
    if raw.test is None:
        site = raw.columns[SITE][rows] if SITE in raw.columns else None
        generator = numpy_generator(config.seed, "data", "test")
        if len(of) < 2:
            raise DataError(f"{name}: has one of {called}: allowed are two, of which one is for testing")
        labels = labels_of(torch.from_numpy(raw.labels[rows]))
        test = drawn_units(labels, unit, site, config.test_fraction, generator)
        count, where = len(np.unique(unit[test])), " of each site" if site is not None else ""
        return test, (
            f"no official split: tested on {count} of {len(of)} {called}, "
            f"a share{where} drawn with seed {config.seed}"
        )
    test = raw.test[rows]
    both = np.intersect1d(unit[test], unit[~test])
    if len(both):
        raise DataError(f"{name}: patient {str(both[0])!r} is in both parts: allowed is one of them")
    return test, ""


def _limited(
    raw: Raw, rows: npt.NDArray[np.int64], config: DataConfig, unit: str
) -> tuple[npt.NDArray[np.int64], str]:
    """So many of the training rows, by whole patients, and what to say of it."""
    if not 0 < config.train_limit < len(rows):
        return rows, ""
    labels = labels_of(torch.from_numpy(raw.labels[rows]))
    columns = {key: column[rows] for key, column in raw.columns.items()}
    generator = numpy_generator(config.seed, "data", "limit")
    whose = columns[unit] if unit else np.arange(len(rows))
    kept = rows[whole(strata(labels, columns), whose, config.train_limit, generator)]
    return kept, f"trained on {len(kept)} of {len(rows)}, drawn with seed {config.seed}"


def patients(columns: Mapping[str, Column]) -> Cases | None:
    """The patients that examples are slices of, with their sites, if they are told."""
    if PATIENT not in columns:
        return None
    names, first, of = np.unique(columns[PATIENT], return_index=True, return_inverse=True)
    sites = [str(site) for site in columns[SITE][first]] if SITE in columns else [""] * len(names)
    return Cases(torch.from_numpy(of.astype(np.int64)), tuple(map(str, names)), tuple(sites))


def at_rows(cases: Cases, rows: npt.NDArray[np.int64]) -> Cases:
    """The cases of some examples."""
    return cases.subset(torch.from_numpy(rows))
