"""Folders of images: one folder a class, or images beside masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedstill.core.dataset import Column
from fedstill.core.errors import DataError
from fedstill.core.names import ordered, plain
from fedstill.core.text_format import times
from fedstill.data.images import (
    encode_masks,
    list_images,
    list_images_recursively,
    read_image_size,
    read_image_stack,
    read_instance_map,
    read_orientation,
)
from fedstill.data.raw import RawImages
from fedstill.data.stratified_sampling import Ints
from fedstill.data.table_files import CASES_FILE, SPLIT_CODES, read_case_table
from fedstill.data.tables import SCHEMA_FILE


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Files of images and of their masks, in order, and what is known of them."""

    names: tuple[str, ...]
    images: tuple[Path, ...]
    masks: tuple[Path, ...]  # none where no masks are wanted
    split: Column | None
    columns: dict[str, Column]


def find_image_files(folder: Path, *, masks: bool) -> ImageFiles:
    """The images of a folder, and the mask of each, which is of the same name but for the suffix.

    Folders ``images`` and ``masks``, both below ``train`` and ``test`` if there are these; without masks the
    images may also lie in the folder itself. ``cases.csv`` may say more
    (:func:`fedstill.data.table_files.read_case_table`).
    """
    roots = _split_folders(folder)
    names: list[str] = []
    images: list[Path] = []
    beside: list[Path] = []
    test: list[int] = []
    for root, number in roots:
        here = root / "images" if masks or (root / "images").is_dir() else root
        files = list_images(here)
        if not files:
            raise DataError(f"{here}: holds no image")
        there: dict[str, Path] = {}
        for mask in list_images(root / "masks") if masks else []:
            if (first := there.setdefault(plain(mask.stem), mask)) != mask:
                raise DataError(f"{mask}: {first.name} is there, too (expected one mask for an image)")
        for file in files:
            own = plain(file.stem)
            if own in names:
                raise DataError(f"{file}: has the name of another image (expected one image a name)")
            if masks and own not in there:
                raise DataError(f"{file}: has no mask {root / 'masks' / (file.stem + '.png')}")
            names.append(own)
            images.append(file)
            test.append(number)
            if masks:
                beside.append(there[own])
                if read_orientation(file, str(file)) != read_orientation(beside[-1], str(beside[-1])):
                    apart = "is to be turned, as EXIF says, and its mask otherwise: save both upright"
                    raise DataError(f"{file}: {apart}")
    columns, told = read_case_table(folder, names)
    return ImageFiles(
        tuple(names), tuple(images), tuple(beside), _merge_split(folder, roots, test, told), columns
    )


def read_map_folder(
    folder: Path,
    *,
    masks: bool,
    size: int = 0,
    channels: int = 0,
    gaps: bool = False,
    on_count: Callable[[int], None] = lambda count: None,
) -> RawImages:
    """Images, with masks of classes if they are wanted, all of one size.

    A mask is a gray image: the number of the class at each pixel, or 0 and 255 for background and foreground.
    Arguments as :func:`fedstill.data.user_data.read_raw_images`; a DataError names the file.
    """
    found = find_image_files(folder, masks=masks)
    on_count(len(found.images))
    images = read_image_stack(((file, str(file)) for file in found.images), size, channels)
    called = _relative_names(found.images, folder)
    if not masks:
        nothing = np.zeros(len(images), dtype=np.int64)
        return RawImages(
            images, nothing, ("image",), found.split, found.columns, has_class_names=False, file_names=called
        )
    maps = []
    for file, image in zip(found.masks, found.images, strict=True):
        mask, own = read_instance_map(file, str(file)), read_image_size(image, str(image))
        if mask.shape != own:
            raise DataError(f"{file}: is {times(mask.shape)}, and its image {times(own)}")
        maps.append(mask.astype(np.int64))
    files = tuple(map(str, found.masks))
    labels, classes = encode_masks(maps, f"{folder / 'masks'}", gaps=gaps, size=size, files=files)
    return RawImages(
        images, labels, classes, found.split, found.columns, has_class_names=False, file_names=called
    )


def read_class_folders(
    path: Path, *, size: int = 0, channels: int = 0, on_count: Callable[[int], None] = lambda count: None
) -> RawImages:
    """Images by class: either ``train/<class>/*`` with ``test/<class>/*``, and ``val/<class>/*`` if there is
    one, or ``<class>/*``; in folders below these, too.

    Classes are the names of the folders, in the order of :func:`fedstill.core.names.ordered`; folders of one
    name are one class, and files that end in no image suffix are passed over.
    ``cases.csv`` may say more (:func:`fedstill.data.table_files.read_case_table`), where an image is called by its place
    in the folder, without suffix: ``cat/1``. Arguments as :func:`fedstill.data.user_data.read_raw_images`; a DataError
    names the folder or file that cannot be used.
    """
    parts = _split_folders(path)
    by_part = {part: _class_folders(part) for part, _ in parts}
    classes = tuple(ordered(by_part[parts[0][0]]))
    for own in by_part.values():
        if unknown := sorted(own.keys() - set(classes)):
            raise DataError(f"{own[unknown[0]][0]}: has no folder of that name in {parts[0][0]}")
    _reject_site_folders(parts[0][0], by_part[parts[0][0]])
    files: list[Path] = []
    labels: list[int] = []
    test: list[int] = []
    for part, number in parts:
        for label, of in enumerate(classes):
            places = by_part[part].get(of, [part / of])
            there = [file for place in places for file in list_images(place, recursive=True)]
            if not there and not number:
                list_images_recursively(places[0])  # which refuses it
            files += there
            labels += [label] * len(there)
            test += [number] * len(there)
    columns, told = read_case_table(
        path, [file.relative_to(path).with_suffix("").as_posix() for file in files]
    )
    on_count(len(files))
    images = read_image_stack(((file, str(file)) for file in files), size, channels)
    split, called = _merge_split(path, parts, test, told), _relative_names(files, path)
    return RawImages(images, np.array(labels), classes, split, columns, file_names=called)


def _relative_names(files: Sequence[Path], folder: Path) -> Column:
    """The place of each file in a folder."""
    return np.array([file.relative_to(folder).as_posix() for file in files])


def _merge_split(
    folder: Path, roots: Sequence[tuple[Path, int]], test: Sequence[int], told: Ints | None
) -> Column | None:
    """Which images are for testing (1) or validation (2), by their folders, or by ``cases.csv``."""
    if len(roots) < 2:
        return told
    if told is not None:
        raise DataError(
            f"{folder / CASES_FILE}: has a column split beside folders train and test (expected one)"
        )
    return np.array(test)


def _split_folders(folder: Path) -> list[tuple[Path, int]]:
    """The folders of its parts, by any usual name: for training (0), testing (1) and validation (2)."""
    places = [place for place in folder.iterdir() if place.is_dir() and not place.name.startswith(".")]
    parts = sorted(
        (SPLIT_CODES[name], place) for place in places if (name := place.name.lower()) in SPLIT_CODES
    )
    numbers = [number for number, _ in parts]
    if {0, 1} <= set(numbers) and len(set(numbers)) == len(numbers):
        return [(place, number) for number, place in parts]
    if set(numbers) & {0, 1} and len(parts) == len(places):  # else classes are called so
        names = ", ".join(sorted(place.name for place in places))
        raise DataError(f"{folder}: is parted into {names} (expected train and test, and val beside them)")
    return [(folder, 0)]


def _class_folders(folder: Path) -> dict[str, list[Path]]:
    """The folders of each class."""
    names: dict[str, list[Path]] = {}
    for place in sorted(folder.iterdir()):
        if place.is_dir() and not place.name.startswith("."):
            names.setdefault(plain(place.name), []).append(place)
    if (folder / SCHEMA_FILE).is_file():
        told = "task tabular reads these (fedstill run wine-fediod, or --base wine-fediod)"
        raise DataError(f"{folder}: this looks like tables, as there is a {SCHEMA_FILE}: {told}")
    if not names:
        raise DataError(f"{folder}: has no folders (expected one folder of images per class)")
    if {"images", "masks"} <= names.keys():
        raise DataError(
            f"{folder}: this looks like images and masks: task segmentation (or instances) reads these, and "
            "task classification one folder of images per class"
        )
    return names


def _reject_site_folders(folder: Path, classes: Mapping[str, Sequence[Path]]) -> None:
    """Refuse folders of sites or parts, whose own folders are the classes."""
    inner: dict[str, str] = {}
    for below in (place for places in classes.values() for place in places):
        if list_images(below):
            continue
        for place in sorted(plain(place.name) for place in below.iterdir() if place.is_dir()):
            if inner.setdefault(place, below.name) != below.name:
                told = f"{inner[place]} and {below.name} both hold a folder {place}, and no image beside it"
                raise DataError(f"{folder}: {told} (expected a folder a class, in train and test if parted)")
