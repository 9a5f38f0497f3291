"""Images of patients: brain MRI and chest X-rays from their packs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedstill.core.dataset import Column, DataSet
from fedstill.core.errors import DataError
from fedstill.data.config import DataConfig, Side
from fedstill.data.located import find_file
from fedstill.data.npz import read_npz
from fedstill.data.preparation import PATIENT, SITE, of_images
from fedstill.data.raw import Raw, need
from fedstill.tasks import Targets, TaskConfig

FLAIR = 1  # of pre-contrast, FLAIR, post-contrast


@dataclass(frozen=True, kw_only=True)
class BrainMRI(DataConfig):
    """Brain MRI of lower-grade glioma (TCGA): tumours, and images to rebuild."""

    targets: ClassVar[tuple[Targets, ...]] = ("map", "image")

    size: Side = 0
    """Height and width that images are averaged down to, masks by majority; 0: as they are."""

    channels: tuple[int, ...] = ()
    """Which: 0 pre-contrast, 1 FLAIR, 2 post-contrast; empty: all, and for reconstruction FLAIR."""

    sites: tuple[str, ...] = ()
    """Use only these institutions; empty: those with two patients or more."""

    def read(self, task: TaskConfig) -> DataSet:
        """From its pack."""
        channels = self.channels or ((FLAIR,) if task.targets == "image" else ())
        raw = brain_mri(find_file(self, "brain_mri_lgg.npz"))
        note = "TCGA lower-grade glioma, 8 axial slices of each patient"
        options = (self.size, channels, self.sites)
        return of_images(raw, self, task, self.called, note, *options)


@dataclass(frozen=True, kw_only=True)
class ChestXray(DataConfig):
    """Chest X-rays with 14 findings (NIH ChestX-ray14)."""

    targets: ClassVar[tuple[Targets, ...]] = ("labels",)

    size: Side = 0
    """Height and width that images are averaged down to; 0: as they are."""

    def read(self, task: TaskConfig) -> DataSet:
        """From its pack."""
        raw = chest_xray(find_file(self, "chest_xray_nih1000.npz"))
        note = f"{len(raw.images)} of the images of NIH ChestX-ray14, reduced to 64 x 64"
        return of_images(raw, self, task, self.called, note, size=self.size)


def brain_mri(path: Path) -> Raw:
    """TCGA lower-grade glioma: 3 MR sequences and the FLAIR abnormality, of patients at 5 institutions.

    Raises:
        DataError: not the pack that it should be.
    """
    arrays = read_npz(path)
    images, masks = need(path, arrays, "images"), need(path, arrays, "masks")
    columns = {
        SITE: _names(path, arrays, "sites", "site"),
        PATIENT: _names(path, arrays, "patients", "patient"),
        "slice": need(path, arrays, "slice_no"),
    }
    if images.ndim != 4 or images.shape[:3] != masks.shape:
        shapes = f"images are {images.shape} and masks {masks.shape}"
        raise DataError(f"{path}: {shapes}: allowed is one mask each")
    classes = ("background", "tumour")
    return Raw(images.transpose(0, 3, 1, 2), masks.astype(np.int64), classes, columns=columns)


def chest_xray(path: Path) -> Raw:
    """NIH ChestX-ray14, a part: 64 x 64 grey images with 14 findings.

    The source's own split has patients in both parts, so it is not used.

    Raises:
        DataError: not the pack that it should be.
    """
    arrays = read_npz(path)
    images, labels = need(path, arrays, "images"), need(path, arrays, "labels")
    names = tuple(str(name) for name in need(path, arrays, "label_names"))
    patient = need(path, arrays, "patient").astype(np.str_)
    return Raw(images[:, None], labels.astype(np.int64), names, columns={PATIENT: patient})


def _names(path: Path, arrays: dict[str, Column], names: str, numbers: str) -> Column:
    return need(path, arrays, names)[need(path, arrays, numbers)]
