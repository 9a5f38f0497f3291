"""Images of patients: brain MRI and chest X-rays from their packs, and one's own from a path."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from fedstill.core.dataset import Column, DataSet
from fedstill.core.errors import DataError
from fedstill.data.assembled import PATIENT, SITE, Source, data_set
from fedstill.data.config import DataConfig
from fedstill.data.packs import Raw, arrays_of, need
from fedstill.tasks import TaskConfig

FLAIR = 1  # of pre-contrast, FLAIR, post-contrast


def load_medical(config: DataConfig, task: TaskConfig) -> DataSet:
    """Load data for segmentation, reconstruction or findings.

    Raises:
        ArgumentError: an option that these data do not allow.
        DataError: data that are not there or cannot be used.
    """
    from fedstill.data.located import find_pack  # which imports this file

    if config.name == "brain-mri":
        if task.like == "reconstruction" and not config.channels:
            config = replace(config, channels=(FLAIR,))
        return data_set(brain_mri(find_pack(config, "brain_mri_lgg.npz")), config, task)
    if config.name == "chest-xray":
        return data_set(chest_xray(find_pack(config, "chest_xray_nih1000.npz")), config, task)
    return data_set(own(config, task), config, task)


def brain_mri(path: Path) -> Source:
    """TCGA lower-grade glioma: 3 MR sequences and the FLAIR abnormality, of patients at 5 institutions.

    Raises:
        DataError: not the pack that it should be.
    """
    arrays = arrays_of(path)
    images, masks = need(path, arrays, "images"), need(path, arrays, "masks")
    columns = {
        SITE: _names(path, arrays, "sites", "site"),
        PATIENT: _names(path, arrays, "patients", "patient"),
        "slice": need(path, arrays, "slice_no"),
    }
    if images.ndim != 4 or images.shape[:3] != masks.shape:
        shapes = f"images are {images.shape} and masks {masks.shape}"
        raise DataError(f"{path}: {shapes}: allowed is one mask each")
    raw = Raw(images.transpose(0, 3, 1, 2), masks.astype(np.int64), ("background", "tumour"), columns=columns)
    return Source(raw, "brain-mri", "TCGA lower-grade glioma, 8 axial slices of each patient")


def chest_xray(path: Path) -> Source:
    """NIH ChestX-ray14, a part: 64 x 64 grey images with 14 findings.

    The source's own split has patients in both parts, so it is not used.

    Raises:
        DataError: not the pack that it should be.
    """
    arrays = arrays_of(path)
    images, labels = need(path, arrays, "images"), need(path, arrays, "labels")
    names = tuple(str(name) for name in need(path, arrays, "label_names"))
    patient = need(path, arrays, "patient").astype(np.str_)
    raw = Raw(images[:, None], labels.astype(np.int64), names, columns={PATIENT: patient})
    return Source(raw, "chest-xray", f"{len(images)} of the images of NIH ChestX-ray14, reduced to 64 x 64")


def _names(path: Path, arrays: dict[str, Column], names: str, numbers: str) -> Column:
    return need(path, arrays, names)[need(path, arrays, numbers)]


def own(config: DataConfig, task: TaskConfig) -> Source:
    """What a path holds: an ``.npz``, images and masks in a folder, NIfTI volumes, a csv of findings.

    Raises:
        ArgumentError: no such name.
        DataError: nothing there, or not of a form that the task can use.
    """
    from fedstill.data.located import located  # which imports this file
    from fedstill.data.own import read_own

    place = located(config, task.like, *((".csv",) if task.like == "multi-label" else ()))
    raw = read_own(place, task.like, size=config.size, slices=config.slices)
    return Source(raw, place.resolve().name if place.is_dir() else place.stem)
