"""Pictures in which objects are told apart: nuclei under the microscope, cut into patches.

A picture is cut into square patches that cover it, and its true objects are kept whole beside them, so that
predictions are put together again and judged by picture. No picture is in both parts or at two nodes, nor is
any patient, as far as it is known whose pictures are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from fedstill.core import timing
from fedstill.core.dataset import CaseIndex, DataSet, TensorData, normalized
from fedstill.core.errors import DataError
from fedstill.core.names import plain
from fedstill.core.options import Share
from fedstill.data.config import MEAN, STD, DataConfig, Side
from fedstill.data.image_folders import find_image_files
from fedstill.data.images import (
    Pixels,
    decode_image,
    pad_to_patch,
    patch_corners,
    read_instance_map,
    resize_images,
    resize_instances,
)
from fedstill.data.loading import PATIENT, ExampleSource, check_sites, prepare_data_set
from fedstill.data.raw import raw_images_from_arrays, read_npz, require_array
from fedstill.tasks import Targets, TaskConfig


@dataclass(frozen=True, eq=False)
class InstanceImage:
    """One picture and its objects.

    Args:
        image: ``(3, H, W)`` uint8, or floats in [0, 1].
        instances: ``(H, W)``, 0 where there is no object.
        name: of the picture, no other has it.
        site: an organ, a source: what nodes may be.
        test: 1 for testing, 2 for validation, 0 for training; None where the source does not say.
        patient: whose picture it is; empty where that is not known.
    """

    image: Pixels
    instances: npt.NDArray[np.int32]
    name: str
    site: str = ""
    split: int | None = None
    patient: str = ""

    def __post_init__(self) -> None:
        for part in ("site", "patient"):
            object.__setattr__(self, part, plain(getattr(self, part)))


def make_instance_image(
    image: Pixels,
    instances: npt.NDArray[np.int32],
    name: str,
    site: str,
    test: int | None,
    what: str,
    patient: str = "",
) -> InstanceImage:
    """A picture in color, gray repeated; a DataError if objects are of another size than the image."""
    if image.shape[1:] != instances.shape:
        sizes = f"{image.shape[1]} x {image.shape[2]} and its objects {instances.shape}"
        raise DataError(f"{what}: the image is {sizes} (expected equal sizes)")
    image = np.repeat(image, 3, axis=0) if len(image) == 1 else image
    return InstanceImage(image, instances, name, site, test, patient)


def read_instance_images(place: Path) -> list[InstanceImage]:
    """Pictures with objects: an ``.npz`` with ``images`` and ``instances``, or folders of both.

    A folder has ``images/<name>.png`` with ``masks/<name>.png``, gray with the number of the object at each
    pixel (16 bits for more than 255), below ``train`` and ``test`` if it has these; sites, patients and parts
    may also be told by ``cases.csv``, in an ``.npz`` by arrays ``site``, ``patient`` and ``split``.
    """
    each: Iterator[tuple[Pixels, npt.NDArray[np.int32], str, str]]
    if place.suffix == ".npz":
        arrays = read_npz(place)
        raw, instances = (
            raw_images_from_arrays(place, arrays, "image"),
            require_array(place, arrays, "instances"),
        )
        form = f"{instances.dtype} of shape {instances.shape}"
        if instances.shape != (len(raw.images), *raw.images.shape[2:]) or instances.dtype.kind not in "iu":
            raise DataError(f"{place}: instances are {form} (expected one whole number for each pixel)")
        maps = enumerate(instances.astype(np.int32))
        each = ((raw.images[row], objects, str(row), str(place)) for row, objects in maps)
        columns, test = raw.columns, raw.split
    else:
        found = find_image_files(place, masks=True)
        files = zip(found.images, found.masks, found.names, strict=True)
        each = ((decode_image(i, str(i)), read_instance_map(m, str(m)), name, str(i)) for i, m, name in files)
        columns, test = found.columns, found.split
    pictures = []
    for row, (image, objects, name, what) in enumerate(each):
        site, patient = (str(columns[of][row]) if of in columns else "" for of in ("site", "patient"))
        part = None if test is None else int(test[row])
        pictures.append(make_instance_image(image, objects, name, site, part, what, patient))
    return pictures


DEFAULT_PATCH = 256  # unless data.patch says otherwise
CLASSES = ("background", "inside", "contour")
SLIDE = "slide"


@dataclass(frozen=True, kw_only=True)
class InstanceImageData(DataConfig):
    """Pictures whose objects are told apart. A subclass gives the pictures."""

    targets: ClassVar[tuple[Targets, ...]] = ("instances",)

    sites: tuple[str, ...] = ()
    """Use only these sites; empty: all."""

    patch: Side = 0
    """Side of the square patches that pictures are cut into; 0: 256."""

    scale: Share = 1.0
    """Pictures are first averaged down to this part of their height and width; 0.5: 20x from 40x."""

    @abstractmethod
    def images(self) -> Sequence[InstanceImage]:
        """All of them."""

    def read(self, task: TaskConfig) -> DataSet:
        """These pictures, divided into training and test parts and cut into patches."""
        return prepare_instance_images(self.images(), self, self.title or self.called, self.note, "site")


def prepare_instance_images(
    pictures: Sequence[InstanceImage], config: InstanceImageData, name: str, note: str, column: str
) -> DataSet:
    """The data set that pictures and a configuration make: cut into patches, in parts of whole pictures.

    Pictures of one patient stay together; one of an unknown patient is by itself.
    """
    wanted = check_sites(config.sites, sorted({one.site for one in pictures} - {""}))
    pictures = [one for one in pictures if not wanted or one.site in wanted]
    unit, owner = group_by_patient(pictures)
    scaled, patch = "", config.patch or DEFAULT_PATCH
    if config.scale < 1:
        pictures = [_downscale(one, config.scale) for one in pictures]
        scaled = f"pictures averaged down to {config.scale:g} of their size"
    cases = make_patch_cases(pictures, patch)
    of = cases.case_ids.numpy()
    sites = np.array([one.site for one in pictures])[of]
    columns = {column: sites} if sites.any() else {}
    columns[SLIDE] = np.array(cases.names)[of]
    if unit == PATIENT:
        columns[PATIENT] = np.array([one.patient or one.name for one in pictures])[of]
    source = ExampleSource(
        name=name,
        targets=np.zeros(len(of), dtype=np.int64),
        classes=CLASSES,
        make_tensors=lambda rows: cut_patches(pictures, cases, rows, patch),
        split=np.array([-1 if one.split is None else int(one.split) for one in pictures])[of],
        columns=columns,
        channels=3,
        note=note,
        sites=sites,
        unit=unit,
        unit_values=owner[of],
        slides=of,
    )
    return prepare_data_set(source, config, scaled)


def group_by_patient(pictures: Sequence[InstanceImage]) -> tuple[str, npt.NDArray[np.int64]]:
    """What is never parted, "patient" or "slide", and the first picture of each one's owner: ``(P,)``."""
    first: dict[tuple[str, str], int] = {}
    keys = [(one.patient, "" if one.patient else one.name) for one in pictures]
    owner = np.array([first.setdefault(key, row) for row, key in enumerate(keys)], dtype=np.int64)
    return PATIENT if any(one.patient for one in pictures) else SLIDE, owner


def _downscale(one: InstanceImage, scale: float) -> InstanceImage:
    height, width = (max(round(side * scale), 1) for side in one.instances.shape)
    image = resize_images(one.image[None], height, width)[0]
    return replace(one, image=image, instances=resize_instances(one.instances, height, width))


def make_patch_cases(pictures: Sequence[InstanceImage], patch: int) -> CaseIndex:
    """All patches of pictures, each picture a case: the fewest patches that cover it, evenly spread.

    A picture smaller than a patch is covered by one that sticks out below or to the right.
    """
    corners = [
        patch_corners(max(height, patch), max(width, patch), patch)
        for height, width in map(_image_size, pictures)
    ]
    return CaseIndex(
        case_ids=torch.repeat_interleave(torch.tensor([len(some) for some in corners])),
        names=tuple(one.name for one in pictures),
        sites=tuple(one.site for one in pictures),
        corners=torch.tensor([corner for some in corners for corner in some], dtype=torch.int64).view(-1, 2),
        sizes=tuple(map(_image_size, pictures)),
        instances=tuple(one.instances for one in pictures),
    )


def _image_size(one: InstanceImage) -> tuple[int, int]:
    return one.instances.shape[0], one.instances.shape[1]


def cut_patches(
    pictures: Sequence[InstanceImage], cases: CaseIndex, rows: npt.NDArray[np.int64], patch: int
) -> TensorData:
    """The patches at some rows, ``(N, 3, patch, patch)`` and ``(N, patch, patch)``."""
    from fedstill.tasks.instances import classes_from_objects

    cases = cases.subset(torch.from_numpy(rows))
    count = len(rows)
    inputs = torch.empty(count, 3, patch, patch)
    targets = torch.empty(count, patch, patch, dtype=torch.int64)
    corners = [] if cases.corners is None else cases.corners.tolist()
    for case in cases.present_ids():
        one = pictures[case]
        image = pad_to_patch(normalized(one.image[None], (MEAN,) * 3, (STD,) * 3)[0].numpy(), patch)
        # Of the whole picture, so that an object that a patch cuts has no contour there.
        classes = pad_to_patch(classes_from_objects(one.instances), patch)
        for row in torch.nonzero(cases.case_ids == case).flatten().tolist():
            timing.check()  # a server may name tiny patches
            top, left = corners[row]
            inputs[row] = torch.from_numpy(image[:, top : top + patch, left : left + patch].copy())
            cut = classes[top : top + patch, left : left + patch]
            targets[row] = torch.from_numpy(cut.astype(np.int64))
    return TensorData(inputs, targets, cases=cases)
