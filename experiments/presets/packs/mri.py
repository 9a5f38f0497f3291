"""Brain MRI of patients with lower-grade glioma, from its pack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedstill.core.dataset import DataSet
from fedstill.data import DataConfig, Targets, find_file
from fedstill.data.config import Side
from fedstill.data.loading import PATIENT, SITE, prepare_images
from fedstill.data.raw_images import RawImages, read_npz, require_array
from fedstill.tasks import TaskConfig

FLAIR = 1  # index among pre-contrast, FLAIR, post-contrast


@dataclass(frozen=True, kw_only=True)
class BrainMRI(DataConfig):
    """Brain MRI of lower-grade glioma (TCGA), 5 institutions, for segmentation or reconstruction."""

    targets: ClassVar[tuple[Targets, ...]] = ("map", "image")
    title: ClassVar[str] = "brain-mri"
    note: ClassVar[str] = "TCGA lower-grade glioma, 8 axial slices of each patient"

    size: Side = 0
    """Height and width that images are averaged down to, masks by majority; 0 keeps their size."""

    channels: tuple[int, ...] = ()
    """Channels: 0 pre-contrast, 1 FLAIR, 2 post-contrast; empty: all, or FLAIR for reconstruction."""

    sites: tuple[str, ...] = ()
    """Use only these institutions; empty: those with two patients or more."""

    def read(self, task: TaskConfig) -> DataSet:
        """Return the three sequences and the FLAIR abnormality of all slices."""
        path = find_file(self, "brain_mri_lgg.npz")
        arrays = read_npz(path)
        masks = require_array(path, arrays, "masks")
        columns = {
            SITE: require_array(path, arrays, "sites")[require_array(path, arrays, "site")],
            PATIENT: require_array(path, arrays, "patients")[require_array(path, arrays, "patient")],
            "slice": require_array(path, arrays, "slice_no"),
            "tumor": masks.reshape(len(masks), -1).astype(bool).sum(1),  # pixels
        }
        raw = RawImages(
            require_array(path, arrays, "images").transpose(0, 3, 1, 2),
            masks.astype(np.int64),
            ("background", "tumor"),
            columns=columns,
        )
        channels = self.channels or ((FLAIR,) if task.targets == "image" else ())
        return prepare_images(raw, self, task, self.title, self.note, self.size, channels, self.sites)
