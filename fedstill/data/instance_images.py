"""Images with instances, such as cell nuclei in microscopy, cut into patches.

An image is cut into square patches that cover it. Its instances are kept whole, so that predictions of
patches are stitched together and evaluated by image. No image, and no patient if patients are known, is
divided between training and test parts or between nodes. Custom data derive from :class:`InstanceImageData`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from annotated_types import Interval

from fedstill.core import timing
from fedstill.core.dataset import CaseIndex, DataSet, TensorData, normalize
from fedstill.core.errors import DataError
from fedstill.core.name_normalization import normalize_name
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
from fedstill.data.loading import PATIENT, UnsplitExamples, normalize_requested_sites, prepare_data_set
from fedstill.data.raw_images import raw_images_from_arrays, read_npz, require_array
from fedstill.data.stain_shift import shift_stains, site_stains
from fedstill.tasks import Targets, TaskConfig
from fedstill.tasks.instances import classes_from_objects


@dataclass(frozen=True, eq=False)
class InstanceImage:
    """An image and its instances.

    Args:
        image: ``(3, H, W)`` uint8, or floats in [0, 1].
        instances: number of the instance at each pixel, ``(H, W)``; 0: none.
        name: unique name of the image.
        site: an organ or source, which can define the nodes.
        split: 0 for training, 1 for testing, 2 for validation; None if the source has no split.
        patient: empty if not known.
    """

    image: Pixels
    instances: npt.NDArray[np.int32]
    name: str
    site: str = ""
    split: int | None = None
    patient: str = ""

    def __post_init__(self) -> None:
        for part in ("site", "patient"):
            object.__setattr__(self, part, normalize_name(getattr(self, part)))


def make_instance_image(
    image: Pixels,
    instances: npt.NDArray[np.int32],
    name: str,
    site: str,
    split: int | None,
    label: str,
    patient: str = "",
) -> InstanceImage:
    """Return an image in color; gray is repeated.

    Raises:
        DataError: image and instances differ in size.
    """
    if image.shape[1:] != instances.shape:
        sizes = f"{image.shape[1]} x {image.shape[2]} and its instances {instances.shape}"
        raise DataError(f"{label}: the image is {sizes} (expected equal sizes)")
    image = np.repeat(image, 3, axis=0) if len(image) == 1 else image
    return InstanceImage(image, instances, name, site, split, patient)


def read_instance_images(path: Path) -> list[InstanceImage]:
    """Read images with instances from an ``.npz`` with ``images`` and ``instances``, or from folders.

    A folder has ``images/<name>.png`` with ``masks/<name>.png``, gray with the number of the instance at each
    pixel (16 bits for more than 255), optionally below ``train`` and ``test``. Sites, patients and split come
    from ``cases.csv``, or from arrays ``site``, ``patient`` and ``split`` of the ``.npz``.
    """
    items: Iterator[tuple[Pixels, npt.NDArray[np.int32], str, str]]
    if path.suffix == ".npz":
        arrays = read_npz(path)
        raw = raw_images_from_arrays(path, arrays, "image")
        all_instances = require_array(path, arrays, "instances")
        shape = f"{all_instances.dtype} of shape {all_instances.shape}"
        if (
            all_instances.shape != (len(raw.images), *raw.images.shape[2:])
            or all_instances.dtype.kind not in "iu"
        ):
            raise DataError(f"{path}: instances are {shape} (expected one whole number for each pixel)")
        maps = enumerate(all_instances.astype(np.int32))
        items = ((raw.images[row], instance_map, str(row), str(path)) for row, instance_map in maps)
        columns, split = raw.columns, raw.split
    else:
        image_files = find_image_files(path, masks=True)
        files = zip(image_files.images, image_files.masks, image_files.names, strict=True)
        items = (
            (decode_image(file, str(file)), read_instance_map(mask, str(mask)), name, str(file))
            for file, mask, name in files
        )
        columns, split = image_files.columns, image_files.split
    images = []
    for row, (pixels, instance_map, name, label) in enumerate(items):
        site, patient = (
            str(columns[column][row]) if column in columns else "" for column in ("site", "patient")
        )
        split_code = None if split is None else int(split[row])
        images.append(make_instance_image(pixels, instance_map, name, site, split_code, label, patient))
    return images


DEFAULT_PATCH = 256
CLASSES = ("background", "inside", "contour")
SLIDE = "slide"


@dataclass(frozen=True, kw_only=True)
class InstanceImageData(DataConfig):
    """Custom data set of images with instances. A subclass implements :meth:`images`.

    Example::

        @dataclass(frozen=True, kw_only=True)
        class Cells(InstanceImageData):
            def images(self):
                instances = np.zeros((64, 64), dtype=np.int32)
                instances[8:24, 8:24] = 1
                pixels = np.repeat((instances[None] > 0).astype(np.float32), 3, axis=0)
                return [InstanceImage(pixels, instances, f"cell {i}") for i in range(10)]
    """

    targets: ClassVar[tuple[Targets, ...]] = ("instances",)

    sites: tuple[str, ...] = ()
    """Use only these sites; empty: all."""

    patch: Side = 0
    """Side of the square patches into which images are cut; 0: 256."""

    scale: Share = 1.0
    """First average images down to this share of their height and width; 0.5: 20x from 40x."""

    stain_shift: Annotated[float, Interval(ge=0, le=1), "0 to 1"] = 0.0
    """Shift of the stains of H&E images toward stains that are random for each site: 0 none, 1 wholly."""

    @abstractmethod
    def images(self) -> Sequence[InstanceImage]:
        """Return all images."""

    def read(self, task: TaskConfig) -> DataSet:
        """Return the images as patches, divided into training and test parts."""
        return prepare_instance_images(
            self.images(), self, self.title or self.registered_name, self.note, "site"
        )


def prepare_instance_images(
    images: Sequence[InstanceImage], config: InstanceImageData, name: str, note: str, site_column: str
) -> DataSet:
    """Return the data set of images with instances, cut into patches and divided by whole images.

    Images of one patient stay together; an image of an unknown patient forms its own unit.

    Args:
        site_column: name of the metadata column of sites.
    """
    selected_sites = normalize_requested_sites(config.sites, sorted({image.site for image in images} - {""}))
    images = [image for image in images if not selected_sites or image.site in selected_sites]
    unit, owner_index = unit_and_owner_index(images)
    scaling_note, patch = "", config.patch or DEFAULT_PATCH
    if config.scale < 1:
        images = [_downscale(image, config.scale) for image in images]
        scaling_note = f"images averaged down to {config.scale:g} of their size"
    if config.stain_shift:
        images = [_shift_stains(image, config) for image in images]
    cases = patch_case_index(images, patch)
    image_index = cases.case_ids.numpy()
    sites = np.array([image.site for image in images])[image_index]
    columns = {site_column: sites} if sites.any() else {}
    columns[SLIDE] = np.array(cases.names)[image_index]
    if unit == PATIENT:
        columns[PATIENT] = np.array([image.patient or image.name for image in images])[image_index]
    source = UnsplitExamples(
        name=name,
        targets=np.zeros(len(image_index), dtype=np.int64),
        classes=CLASSES,
        make_tensors=lambda rows: cut_patches(images, cases, rows, patch),
        split=np.array([-1 if image.split is None else int(image.split) for image in images])[image_index],
        columns=columns,
        channels=3,
        note=note,
        sites=sites,
        unit=unit,
        unit_values=owner_index[image_index],
        slides=image_index,
    )
    return prepare_data_set(source, config, scaling_note)


def unit_and_owner_index(images: Sequence[InstanceImage]) -> tuple[str, npt.NDArray[np.int64]]:
    """Return the unit, "patient" or "slide", and for each image the first image of its owner: ``(P,)``."""
    first_row: dict[tuple[str, str], int] = {}
    keys = [(image.patient, "" if image.patient else image.name) for image in images]
    owner_index = np.array([first_row.setdefault(key, row) for row, key in enumerate(keys)], dtype=np.int64)
    return PATIENT if any(image.patient for image in images) else SLIDE, owner_index


def _downscale(image: InstanceImage, scale: float) -> InstanceImage:
    height, width = (max(round(side * scale), 1) for side in image.instances.shape)
    pixels = resize_images(image.image[None], height, width)[0]
    return replace(image, image=pixels, instances=resize_instances(image.instances, height, width))


def _shift_stains(image: InstanceImage, config: InstanceImageData) -> InstanceImage:
    stains = site_stains(image.site, config.seed)
    return replace(image, image=shift_stains(image.image, stains, config.stain_shift))


def patch_case_index(images: Sequence[InstanceImage], patch: int) -> CaseIndex:
    """Return the case index of all patches, with one case per image.

    The fewest patches that cover an image are used, evenly spaced. An image smaller than a patch is padded at
    the bottom or right.
    """
    corners = [
        patch_corners(max(height, patch), max(width, patch), patch)
        for height, width in map(_image_size, images)
    ]
    return CaseIndex(
        case_ids=torch.repeat_interleave(torch.tensor([len(patch_list) for patch_list in corners])),
        names=tuple(image.name for image in images),
        sites=tuple(image.site for image in images),
        corners=torch.tensor(
            [corner for patch_list in corners for corner in patch_list], dtype=torch.int64
        ).view(-1, 2),
        sizes=tuple(map(_image_size, images)),
        instances=tuple(image.instances for image in images),
    )


def _image_size(image: InstanceImage) -> tuple[int, int]:
    return image.instances.shape[0], image.instances.shape[1]


def cut_patches(
    images: Sequence[InstanceImage], cases: CaseIndex, rows: npt.NDArray[np.int64], patch: int
) -> TensorData:
    """Return the patches at some rows: inputs ``(N, 3, patch, patch)``, targets ``(N, patch, patch)``."""
    cases = cases.subset(torch.from_numpy(rows))
    count = len(rows)
    inputs = torch.empty(count, 3, patch, patch)
    targets = torch.empty(count, patch, patch, dtype=torch.int64)
    corners = [] if cases.corners is None else cases.corners.tolist()
    for case in cases.present_ids():
        instance_image = images[case]
        pixels = pad_to_patch(
            normalize(instance_image.image[None], (MEAN,) * 3, (STD,) * 3)[0].numpy(), patch
        )
        # Computed for the whole image, so that instances have no contour where a patch cuts them.
        classes = pad_to_patch(classes_from_objects(instance_image.instances), patch)
        for row in torch.nonzero(cases.case_ids == case).flatten().tolist():
            timing.check_limits()  # a server may request tiny patches
            top, left = corners[row]
            inputs[row] = torch.from_numpy(pixels[:, top : top + patch, left : left + patch].copy())
            patch_classes = classes[top : top + patch, left : left + patch]
            targets[row] = torch.from_numpy(patch_classes.astype(np.int64))
    return TensorData(inputs, targets, cases=cases)
