"""Data of one's own for maps, images and findings, by the form that a path has.

An ``.npz`` with arrays ``images`` and ``masks`` (segmentation), ``instances`` or ``labels`` ``(N, C)``
(findings); a folder ``images`` beside a folder ``masks``; NIfTI volumes; a csv of findings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedstill.core.dataset import Column
from fedstill.core.errors import DataError
from fedstill.data.folders import in_one_size, map_files, mask_classes
from fedstill.data.images import decoded, instance_map
from fedstill.data.packs import Raw, arrays_of, image_array, need

if TYPE_CHECKING:
    from fedstill.data.pictures import Picture

_TARGETS = {"segmentation": "masks", "instances": "instances", "multi-label": "labels"}


def read_own(place: Path, task: str, *, size: int = 0, slices: int = 0, pixels: bool = True) -> Raw:
    """What a file or folder holds, for segmentation, reconstruction or findings.

    Args:
        place: the file or folder.
        task: its name.
        size: height and width to which folders and volumes are averaged; 0: as they are.
        slices: of each NIfTI volume at most; 0: all.
        pixels: whether floats must lie in [0, 1].

    Raises:
        DataError: it cannot be read, or is not of a form that the task can use.
    """
    if place.suffix == ".npz":
        return from_arrays(place, arrays_of(place), task, pixels=pixels)
    if place.suffix == ".csv":
        from fedstill.data.findings import read_findings

        return read_findings(place, size=size)
    if task == "multi-label":
        raise DataError(f"{place}: is a folder: allowed for findings are an .npz or a csv")
    if any(place.rglob("*.nii")) or any(place.rglob("*.nii.gz")):
        from fedstill.data.nifti import read_volumes

        return read_volumes(place, masks=task == "segmentation", size=size, slices=slices)
    return in_one_size(place, masks=task == "segmentation", size=size)


def from_arrays(
    path: Path, arrays: Mapping[str, Column], task: str, *, pixels: bool = True, gaps: bool = False
) -> Raw:
    """Arrays by name, checked: ``images``, and what the task is taught with.

    ``masks`` are ``(N, H, W)`` whole numbers; ``labels`` ``(N, C)`` of -1 unknown, 0 and 1. ``classes``
    names classes or findings, ``split`` is 0 (train) or 1 (test), all other ``(N,)`` arrays are columns:
    ``patient`` and ``site`` are heeded. ``gaps``: as :func:`fedstill.data.folders.mask_classes` takes it.

    Raises:
        DataError: an array is missing, or of another form.
    """
    images = image_array(path, arrays, pixels=pixels)
    count = len(images)
    if count == 0:
        raise DataError(f"{path}: there are no images: allowed is one or more")
    names = tuple(str(name) for name in arrays["classes"]) if "classes" in arrays else ()
    labels: npt.NDArray[np.int64]
    classes: tuple[str, ...]
    if task == "reconstruction":
        labels, classes = np.zeros(count, dtype=np.int64), ("image",)
    elif task == "segmentation":
        masks = need(path, arrays, "masks")
        if masks.shape != (count, *images.shape[2:]):
            shapes = f"masks are {masks.shape} and images {images.shape}"
            raise DataError(f"{path}: {shapes}: allowed is one mask of its size for each image")
        labels, classes = mask_classes(masks, f"{path}: masks", names, gaps=gaps)
    else:
        labels, classes = _findings(path, need(path, arrays, "labels"), count, names)
    test = None
    if "split" in arrays:
        if arrays["split"].shape != (count,) or not np.isin(arrays["split"], (0, 1)).all():
            raise DataError(f"{path}: split is not 0 (train) or 1 (test) for each of the {count} images")
        test = arrays["split"] == 1
    known = {"images", "masks", "labels", "classes", "split"}
    columns = {name: a for name, a in arrays.items() if name not in known and a.shape == (count,)}
    return Raw(images, labels, classes, test, columns)


def _findings(
    path: Path, labels: Column, count: int, names: tuple[str, ...]
) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    if labels.ndim != 2 or len(labels) != count or labels.dtype.kind not in "biu":
        form = f"{labels.dtype} of shape {labels.shape}"
        raise DataError(f"{path}: labels are {form}: allowed are whole numbers, a row for each image")
    found = labels.astype(np.int64)
    names = names or tuple(str(number) for number in range(found.shape[1]))
    if len(names) != found.shape[1]:
        raise DataError(
            f"{path}: has {len(names)} classes: allowed is one for each of {found.shape[1]} labels"
        )
    wrong = np.argwhere(~np.isin(found, (-1, 0, 1)))
    if len(wrong):
        row, column = wrong[0].tolist()
        where = f"example {row} has {found[row, column]} in column {column} ({names[column]!r})"
        raise DataError(f"{path}: labels: {where}: allowed are 1, 0 and -1 (unknown)")
    return found, names


def read_pictures(place: Path) -> list[Picture]:
    """Pictures with objects: an ``.npz`` with ``images`` and ``instances``, or folders of both.

    A folder has ``images/<name>.png`` with ``masks/<name>.png``, grey with the number of the object at each
    pixel (16 bits for more than 255), below ``train`` and ``test`` if it has these; sites, patients and parts
    may also be told by ``cases.csv``, in an ``.npz`` by arrays ``site``, ``patient`` and ``split``.

    Raises:
        DataError: it cannot be read, or is not of that form.
    """
    from fedstill.data.pictures import picture

    if place.suffix == ".npz":
        return _picture_arrays(place, arrays_of(place))
    found = map_files(place, masks=True)
    nothing = np.full(len(found.names), "")
    sites, patients = (found.columns.get(name, nothing) for name in ("site", "patient"))
    pictures = []
    for row, (image, mask) in enumerate(zip(found.images, found.masks, strict=True)):
        test = None if found.test is None else bool(found.test[row])
        instances = instance_map(mask, str(mask))
        name, site = found.names[row], str(sites[row])
        one = picture(decoded(image, str(image)), instances, name, site, test, str(image))
        pictures.append(replace(one, patient=str(patients[row])))
    return pictures


def _picture_arrays(path: Path, arrays: Mapping[str, Any]) -> list[Picture]:
    from fedstill.data.pictures import Picture

    images, instances = image_array(path, arrays), need(path, arrays, "instances")
    count = len(images)
    if instances.shape != (count, *images.shape[2:]) or instances.dtype.kind not in "iu":
        form = f"{instances.dtype} of shape {instances.shape}"
        raise DataError(f"{path}: instances are {form}: allowed is one whole number for each pixel")
    if images.shape[1] == 1:
        images = np.repeat(images, 3, axis=1)
    for name in ("site", "split", "patient"):
        if name in arrays and arrays[name].shape != (count,):
            raise DataError(f"{path}: {name} is of shape {arrays[name].shape}: allowed is ({count},)")
    return [
        Picture(
            images[row],
            instances[row].astype(np.int32),
            str(row),
            str(arrays["site"][row]) if "site" in arrays else "",
            bool(arrays["split"][row]) if "split" in arrays else None,
            str(arrays["patient"][row]) if "patient" in arrays else "",
        )
        for row in range(count)
    ]
