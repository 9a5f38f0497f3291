"""Chest X-rays with 14 findings, from their pack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedstill.core.dataset import DataSet
from fedstill.data import DataConfig, Targets, find_file
from fedstill.data.config import Side
from fedstill.data.loading import PATIENT, prepare_images
from fedstill.data.raw_images import RawImages, read_npz, require_array
from fedstill.tasks import TaskConfig


@dataclass(frozen=True, kw_only=True)
class ChestXray(DataConfig):
    """Chest X-rays with 14 findings (NIH ChestX-ray14), 64 x 64 and gray.

    The source's own split has patients in both parts, so it is not used.
    """

    targets: ClassVar[tuple[Targets, ...]] = ("labels",)
    title: ClassVar[str] = "chest-xray"

    size: Side = 0
    """Height and width that images are averaged down to; 0 keeps their size."""

    def read(self, task: TaskConfig) -> DataSet:
        """Return all images with their findings."""
        path = find_file(self, "chest_xray_nih1000.npz")
        arrays = read_npz(path)
        raw = RawImages(
            require_array(path, arrays, "images")[:, None],
            require_array(path, arrays, "labels").astype(np.int64),
            tuple(str(name) for name in require_array(path, arrays, "label_names")),
            columns={PATIENT: require_array(path, arrays, "patient").astype(np.str_)},
        )
        side = self.size or raw.images.shape[-1]
        note = f"{len(raw.images)} of the images of NIH ChestX-ray14, reduced to {side} x {side}"
        return prepare_images(raw, self, task, self.title, note, self.size)
