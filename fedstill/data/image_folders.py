"""Folders of images: one folder per class, or images with masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedstill.core.dataset import Column
from fedstill.core.errors import DataError
from fedstill.core.name_normalization import normalize_name, sort_class_names
from fedstill.core.text_format import format_shape
from fedstill.data.images import (
    encode_masks,
    list_images,
    list_images_recursively,
    read_image_size,
    read_image_stack,
    read_instance_map,
    read_orientation,
)
from fedstill.data.raw_images import RawImages
from fedstill.data.stratified_sampling import Ints
from fedstill.data.table_data import SCHEMA_FILE
from fedstill.data.table_files import CASES_FILE, SPLIT_CODES, read_case_table


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Image files with their masks, and their metadata.

    Args:
        names: of the images, without suffix.
        images: files.
        masks: files in the same order; empty if not requested.
        split: codes ``(N,)``, see :class:`fedstill.data.raw_images.RawImages`.
        columns: metadata ``(N,)`` by name.
    """

    names: tuple[str, ...]
    images: tuple[Path, ...]
    masks: tuple[Path, ...]
    split: Column | None
    columns: dict[str, Column]


# --- images with masks --------------------------------------------------------------------------------------


def find_image_files(folder: Path, *, masks: bool) -> ImageFiles:
    """Find the images of a folder, and the mask of each, which has the same name except for the suffix.

    There are folders ``images`` and ``masks``, optionally below ``train`` and ``test``. Without masks the
    images may be in the folder itself. ``cases.csv`` may have metadata
    (:func:`fedstill.data.table_files.read_case_table`).

    Raises:
        DataError: an image has no mask, several masks, or the name of another image.
    """
    split_folders = _split_folders(folder)
    names: list[str] = []
    images: list[Path] = []
    mask_files: list[Path] = []
    split_codes: list[int] = []
    for root, code in split_folders:
        image_folder = root / "images" if masks or (root / "images").is_dir() else root
        files = list_images(image_folder)
        if not files:
            raise DataError(f"{image_folder}: holds no image")
        masks_by_name: dict[str, Path] = {}
        for mask in list_images(root / "masks") if masks else []:
            if (first := masks_by_name.setdefault(normalize_name(mask.stem), mask)) != mask:
                raise DataError(f"{mask}: {first.name} exists too (expected one mask per image)")
        for file in files:
            name = normalize_name(file.stem)
            if name in names:
                raise DataError(f"{file}: has the name of another image (expected one image a name)")
            if masks and name not in masks_by_name:
                raise DataError(f"{file}: has no mask {root / 'masks' / (file.stem + '.png')}")
            names.append(name)
            images.append(file)
            split_codes.append(code)
            if masks:
                mask_files.append(masks_by_name[name])
                if read_orientation(file, str(file)) != read_orientation(mask_files[-1], str(mask_files[-1])):
                    problem = "and its mask have different EXIF orientations: save both upright"
                    raise DataError(f"{file}: {problem}")
    columns, case_split = read_case_table(folder, names)
    return ImageFiles(
        tuple(names),
        tuple(images),
        tuple(mask_files),
        _image_split_codes(folder, split_folders, split_codes, case_split),
        columns,
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
    """Read images of one size, with masks of classes if requested.

    A mask is a gray image of class numbers, or of 0 and 255 for background and foreground. Arguments: see
    :func:`fedstill.data.user_data.read_raw_images`.

    Raises:
        DataError: names the file that cannot be used.
    """
    image_files = find_image_files(folder, masks=masks)
    on_count(len(image_files.images))
    images = read_image_stack(((file, str(file)) for file in image_files.images), size, channels)
    file_names = _relative_names(image_files.images, folder)
    if not masks:
        nothing = np.zeros(len(images), dtype=np.int64)
        return RawImages(
            images,
            nothing,
            ("image",),
            image_files.split,
            image_files.columns,
            has_class_names=False,
            file_names=file_names,
        )
    mask_arrays = []
    for file, image in zip(image_files.masks, image_files.images, strict=True):
        mask, image_size = read_instance_map(file, str(file)), read_image_size(image, str(image))
        if mask.shape != image_size:
            raise DataError(
                f"{file}: is {format_shape(mask.shape)}, and its image {format_shape(image_size)}"
            )
        mask_arrays.append(mask.astype(np.int64))
    files = tuple(map(str, image_files.masks))
    labels, classes = encode_masks(mask_arrays, f"{folder / 'masks'}", gaps=gaps, size=size, files=files)
    return RawImages(
        images,
        labels,
        classes,
        image_files.split,
        image_files.columns,
        has_class_names=False,
        file_names=file_names,
    )


# --- images by class ----------------------------------------------------------------------------------------


def read_class_folders(
    path: Path, *, size: int = 0, channels: int = 0, on_count: Callable[[int], None] = lambda count: None
) -> RawImages:
    """Read images by class, from one folder per class.

    Folders are ``<class>/*``, or ``train/<class>/*``, ``test/<class>/*`` and optionally ``val/<class>/*``,
    including subfolders. Classes are folder names, sorted by
    :func:`fedstill.core.name_normalization.sort_class_names`; folders of equal name are one class. Files
    without an image suffix are skipped. ``cases.csv`` may have metadata
    (:func:`fedstill.data.table_files.read_case_table`); there, an image has its relative path without
    suffix as name: ``cat/1``. Arguments: see :func:`fedstill.data.user_data.read_raw_images`.

    Raises:
        DataError: names the folder or file that cannot be used.
    """
    split_folders = _split_folders(path)
    class_folders = {folder: _class_folders(folder) for folder, _ in split_folders}
    classes = tuple(sort_class_names(class_folders[split_folders[0][0]]))
    for folders in class_folders.values():
        if extra := sorted(folders.keys() - set(classes)):
            raise DataError(f"{folders[extra[0]][0]}: has no folder of that name in {split_folders[0][0]}")
    _reject_site_folders(split_folders[0][0], class_folders[split_folders[0][0]])
    files: list[Path] = []
    labels: list[int] = []
    split_codes: list[int] = []
    for folder, code in split_folders:
        for label, class_name in enumerate(classes):
            paths = class_folders[folder].get(class_name, [folder / class_name])
            class_files = [file for class_path in paths for file in list_images(class_path, recursive=True)]
            if not class_files and not code:
                list_images_recursively(paths[0])  # raises an error
            files += class_files
            labels += [label] * len(class_files)
            split_codes += [code] * len(class_files)
    columns, case_split = read_case_table(
        path, [file.relative_to(path).with_suffix("").as_posix() for file in files]
    )
    on_count(len(files))
    images = read_image_stack(((file, str(file)) for file in files), size, channels)
    split = _image_split_codes(path, split_folders, split_codes, case_split)
    file_names = _relative_names(files, path)
    return RawImages(images, np.array(labels), classes, split, columns, file_names=file_names)


def _class_folders(folder: Path) -> dict[str, list[Path]]:
    names: dict[str, list[Path]] = {}
    for subfolder in sorted(folder.iterdir()):
        if subfolder.is_dir() and not subfolder.name.startswith("."):
            names.setdefault(normalize_name(subfolder.name), []).append(subfolder)
    if (folder / SCHEMA_FILE).is_file():
        hint = "task tabular reads these (fedstill run wine-fediod, or --base wine-fediod)"
        raise DataError(f"{folder}: this looks like tables, as there is a {SCHEMA_FILE}; {hint}")
    if not names:
        raise DataError(f"{folder}: has no folders (expected one folder of images per class)")
    if {"images", "masks"} <= names.keys():
        raise DataError(
            f"{folder}: this looks like images and masks: task segmentation (or instances) reads these, and "
            "task classification one folder of images per class"
        )
    return names


def _reject_site_folders(folder: Path, classes: Mapping[str, Sequence[Path]]) -> None:
    """Refuse folders of sites or parts, whose subfolders are the classes."""
    parent_of: dict[str, str] = {}
    for class_folder in (subfolder for paths in classes.values() for subfolder in paths):
        if list_images(class_folder):
            continue
        for subfolder in sorted(
            normalize_name(subfolder.name) for subfolder in class_folder.iterdir() if subfolder.is_dir()
        ):
            if parent_of.setdefault(subfolder, class_folder.name) != class_folder.name:
                both = f"{parent_of[subfolder]} and {class_folder.name}"
                problem = f"{both} have a folder {subfolder} and no images"
                raise DataError(
                    f"{folder}: {problem} (expected one folder per class, optionally in train and test)"
                )


# --- train and test folders ---------------------------------------------------------------------------------


def _split_folders(folder: Path) -> list[tuple[Path, int]]:
    """Return the folders for training, testing and validation, by their usual names, with codes 0, 1, 2."""
    subfolders = [
        subfolder
        for subfolder in folder.iterdir()
        if subfolder.is_dir() and not subfolder.name.startswith(".")
    ]
    matches = sorted(
        (SPLIT_CODES[name], subfolder)
        for subfolder in subfolders
        if (name := subfolder.name.lower()) in SPLIT_CODES
    )
    codes = [code for code, _ in matches]
    if {0, 1} <= set(codes) and len(set(codes)) == len(codes):
        return [(subfolder, code) for code, subfolder in matches]
    if set(codes) & {0, 1} and len(matches) == len(subfolders):  # else these are names of classes
        names = ", ".join(sorted(subfolder.name for subfolder in subfolders))
        raise DataError(f"{folder}: is divided into {names} (expected train, test and optionally val)")
    return [(folder, 0)]


def _image_split_codes(
    folder: Path,
    split_folders: Sequence[tuple[Path, int]],
    split_codes: Sequence[int],
    case_split: Ints | None,
) -> Column | None:
    """Return split codes of images, from their folders or from ``cases.csv``."""
    if len(split_folders) < 2:
        return case_split
    if case_split is not None:
        problem = "has a column split, but there are folders train and test"
        raise DataError(f"{folder / CASES_FILE}: {problem} (expected one of these)")
    return np.array(split_codes)


def _relative_names(files: Sequence[Path], folder: Path) -> Column:
    """Return the paths of files relative to a folder."""
    return np.array([file.relative_to(folder).as_posix() for file in files])
