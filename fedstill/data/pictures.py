"""Pictures in which objects are told apart, before they are cut into patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedstill.core.dataset import Column
from fedstill.core.errors import DataError
from fedstill.data.folders import map_files
from fedstill.data.images import Bytes, decoded, instance_map
from fedstill.data.npz import read_npz
from fedstill.data.raw import from_arrays, need


@dataclass(frozen=True, eq=False)
class Picture:
    """One picture and its objects.

    Args:
        image: ``(3, H, W)`` uint8, or floats in [0, 1].
        instances: ``(H, W)``, 0 where there is no object.
        name: of the picture, no other has it.
        site: an organ, a source: what nodes may be.
        test: 1 for testing, 2 for validation, 0 for training; None where the source does not say.
        patient: whose picture it is; empty where that is not known.
    """

    image: npt.NDArray[np.uint8] | npt.NDArray[np.float32]
    instances: npt.NDArray[np.int32]
    name: str
    site: str = ""
    test: int | None = None
    patient: str = ""


def picture(
    image: Bytes, instances: npt.NDArray[np.int32], name: str, site: str, test: int | None, what: str
) -> Picture:
    """A picture in colour, grey repeated; a DataError if objects are of another size than the image."""
    if image.shape[1:] != instances.shape:
        sizes = f"{image.shape[1]} x {image.shape[2]} and its objects {instances.shape}"
        raise DataError(f"{what}: the image is {sizes}: allowed are equal sizes")
    return Picture(image if len(image) == 3 else np.repeat(image[:1], 3, axis=0), instances, name, site, test)


def read_pictures(place: Path) -> list[Picture]:
    """Pictures with objects: an ``.npz`` with ``images`` and ``instances``, or folders of both.

    A folder has ``images/<name>.png`` with ``masks/<name>.png``, grey with the number of the object at each
    pixel (16 bits for more than 255), below ``train`` and ``test`` if it has these; sites, patients and parts
    may also be told by ``cases.csv``, in an ``.npz`` by arrays ``site``, ``patient`` and ``split``.
    """
    if place.suffix == ".npz":
        return _picture_arrays(place, read_npz(place))
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


def _picture_arrays(path: Path, arrays: Mapping[str, Column]) -> list[Picture]:
    raw, instances = from_arrays(path, arrays, "image"), need(path, arrays, "instances")
    images, count = raw.images, len(raw.images)
    if instances.shape != (count, *images.shape[2:]) or instances.dtype.kind not in "iu":
        form = f"{instances.dtype} of shape {instances.shape}"
        raise DataError(f"{path}: instances are {form}: allowed is one whole number for each pixel")
    if images.shape[1] == 1:
        images = np.repeat(images, 3, axis=1)
    nothing = np.full(count, "")
    sites, patients = (raw.columns.get(name, nothing) for name in ("site", "patient"))
    return [
        Picture(
            images[row],
            instances[row].astype(np.int32),
            str(row),
            str(sites[row]),
            None if raw.test is None else int(raw.test[row]),
            str(patients[row]),
        )
        for row in range(count)
    ]
