"""What an owner's data are for, where no run says so yet: some can be told from how they are kept.

Only names of arrays, columns and folders are looked at, and cells of one column. What looks like nothing in
particular is taken for images of classes, as a run has them most often.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fedstill.core.errors import DataError
from fedstill.data.images import image_files
from fedstill.data.npz import UNREADABLE
from fedstill.data.private_config import PrivateConfig
from fedstill.data.tables import rows

FINDINGS = "images with findings"
MASKS = "images with masks"
OBJECTS = "pictures with objects"
PLAIN = "images without labels"
TEXTS = "texts"


def other_than_classes(config: PrivateConfig, path: Path) -> str | None:
    """What data are that are no images of classes, in words; None where they are, or it cannot be told.

    Args:
        config: how they are kept.
        path: where; it is there.
    """
    if config.source == "nifti":
        return "volumes"
    if config.source == "tensors":
        return "tensors of a server's input spec"
    if config.vocabulary:
        return TEXTS
    with suppress(DataError, AttributeError, TypeError, *UNREADABLE):  # who reads it says what is wrong
        if config.source == "csv":
            return _in_csv(config, path)
        if config.source == "folder":
            return _in_folder(path)
        with np.load(path, allow_pickle=False) as arrays:
            return of_arrays(arrays)
    return None


def of_arrays(arrays: Mapping[str, Any]) -> str | None:
    """The same of arrays by name, which need not be read yet.

    >>> of_arrays({"images": 0, "masks": 0}), of_arrays({"images": 0, "labels": np.zeros(3)})
    ('images with masks', None)
    """
    if "masks" in arrays:
        return MASKS
    if "instances" in arrays:
        return OBJECTS
    if "images" in arrays and "labels" not in arrays:
        return PLAIN
    return FINDINGS if "labels" in arrays and np.ndim(arrays["labels"]) == 2 else None


def _in_folder(path: Path) -> str | None:
    parted = (path / "train").is_dir() and (path / "test").is_dir()
    root = path / "train" if parted else path
    if (root / "images").is_dir() and (root / "masks").is_dir():
        return MASKS
    return PLAIN if image_files(root) else None


def _in_csv(config: PrivateConfig, path: Path) -> str | None:
    found = rows(path)
    _, header = next(found)
    if "text" in header and not config.image:
        return TEXTS
    if (config.image or "image") not in header:
        return None
    if config.label not in header:
        return FINDINGS
    place = header.index(config.label)
    return FINDINGS if any("|" in row[place] for _, row in found) else None
