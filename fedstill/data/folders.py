"""Folders of images beside folders of masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from fedstill.core.dataset import Column
from fedstill.core.errors import DataError
from fedstill.data.images import decoded, image_files, instance_map
from fedstill.data.packs import Raw
from fedstill.data.rasters import resized, resized_maps
from fedstill.data.tables import CASES, about

MOST = 255  # classes of a mask: larger numbers are objects


@dataclass(frozen=True, eq=False)
class Found:
    """Files of images and of their masks, in order, and what is known of them."""

    names: tuple[str, ...]
    images: tuple[Path, ...]
    masks: tuple[Path, ...]  # none where no masks are wanted
    test: npt.NDArray[np.bool_] | None
    columns: dict[str, Column]


def map_files(folder: Path, *, masks: bool) -> Found:
    """The images of a folder, and the mask of each, which is of the same name but for the suffix.

    Either ``train/images`` and ``train/masks`` with ``test/images`` and ``test/masks``, or ``images`` and
    ``masks``; without masks the images may also lie in the folder itself. ``cases.csv`` may say more
    (:func:`fedstill.data.tables.about`).

    Raises:
        DataError: no images, an image without a mask or of the same name as another.
    """
    if (folder / "train").is_dir() and (folder / "test").is_dir():
        roots, parts = [folder / "train", folder / "test"], [False, True]
    else:
        roots, parts = [folder], [False]
    names: list[str] = []
    images: list[Path] = []
    beside: list[Path] = []
    test: list[bool] = []
    for root, is_test in zip(roots, parts, strict=True):
        here = root / "images" if masks or (root / "images").is_dir() else root
        files = image_files(here)
        if not files:
            raise DataError(f"{here}: holds no image")
        there = {file.stem: file for file in image_files(root / "masks")} if masks else {}
        for file in files:
            name = file.relative_to(folder).stem
            if name in names:
                raise DataError(f"{file}: has the name of another image: allowed is one image a name")
            if masks and file.stem not in there:
                raise DataError(f"{file}: has no mask {root / 'masks' / (file.stem + '.png')}")
            names.append(name)
            images.append(file)
            test.append(is_test)
            if masks:
                beside.append(there[file.stem])
    columns, told = about(folder, names)
    if len(roots) == 2 and told is not None:
        raise DataError(f"{folder / CASES}: has a column split beside folders train and test: allowed is one")
    part = np.array(test) if len(roots) == 2 else told
    return Found(tuple(names), tuple(images), tuple(beside), part, columns)


def in_one_size(folder: Path, *, masks: bool, size: int = 0, gaps: bool = False) -> Raw:
    """Images, with masks of classes if they are wanted, all of one size.

    A mask is a grey image: the number of the class at each pixel, or 0 and 255 for background and foreground.

    Args:
        folder: as :func:`map_files` takes it.
        masks: whether each image must have one.
        size: height and width wanted; 0: all have one size already.
        gaps: as :func:`mask_classes` takes it.

    Raises:
        DataError: as :func:`map_files`, or images of different sizes or kinds; the line names the file.
    """
    found = map_files(folder, masks=masks)
    images: list[npt.NDArray[np.uint8] | npt.NDArray[np.float32]] = []
    maps: list[npt.NDArray[np.int64]] = []
    for row, file in enumerate(found.images):
        image: npt.NDArray[np.uint8] | npt.NDArray[np.float32] = decoded(file, str(file))
        own = image.shape[1:]
        if size:
            image = resized(image[None], size, size)[0]
        if images and image.shape != images[0].shape:
            sizes = f"{_times(image.shape)}, but {found.images[0]} is {_times(images[0].shape)}"
            raise DataError(f"{file}: is {sizes}: allowed is one form for all; data.size makes one size")
        images.append(image)
        if not masks:
            continue
        mask = instance_map(found.masks[row], str(found.masks[row]))
        if mask.shape != own:
            raise DataError(f"{found.masks[row]}: is {_times(mask.shape)}, and its image {_times(own)}")
        maps.append(mask.astype(np.int64))
    if not masks:
        return Raw(
            np.stack(images), np.zeros(len(images), dtype=np.int64), ("image",), found.test, found.columns
        )
    whose = tuple(map(str, found.masks))
    labels, classes = joined_masks(maps, f"{folder / 'masks'}", size, whose, gaps=gaps)
    return Raw(np.stack(images), labels, classes, found.test, found.columns)


def joined_masks(
    maps: Sequence[npt.NDArray[np.int64]], what: str, size: int, whose: Sequence[str], *, gaps: bool = False
) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Masks of one size, ``(N, H, W)``, and the names of their classes.

    Args:
        maps: N masks.
        what: they are, the first words of an error.
        size: height and width wanted; 0: all have one size already.
        whose: the file of each, N.
        gaps: as :func:`mask_classes` takes it.

    Raises:
        DataError: they are no masks of classes.
    """
    values = np.unique(np.concatenate([np.unique(mask) for mask in maps]))
    odd = None if gaps else stray(values)
    if odd is not None:
        first = next(file for mask, file in zip(maps, whose, strict=True) if (mask == odd).any())
        raise DataError(f"{first}: has value {odd}, and all masks together {_gap(values)}")
    if not size:
        return mask_classes(np.stack(maps), what, (), values, gaps=gaps)
    parts = [mask_classes(mask, what, (), values, gaps=gaps) for mask in maps]
    small = [resized_maps(torch.from_numpy(mask)[None], size, size)[0].numpy() for mask, _ in parts]
    return np.stack(small), parts[0][1]


def mask_classes(
    masks: npt.NDArray[np.generic],
    what: str,
    names: tuple[str, ...],
    values: npt.NDArray[np.generic] | None = None,
    *,
    gaps: bool = False,
) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Masks as class indices, and the classes' names; 255 beside nothing but 0 is class 1.

    Args:
        masks: whole numbers of any shape.
        what: they are, the first words of an error.
        names: of the classes; empty: background, foreground, or numbers where there are more.
        values: those that occur in all masks, if these are only some.
        gaps: whether numbers of classes without names may be missing, as where a node has not every class of
            a federation; elsewhere one stray pixel would make classes that do not exist.

    Raises:
        DataError: not whole numbers, outside the classes, or with gaps between them.

    >>> masks, classes = mask_classes(np.array([[0, 255]]), "mine", ())
    >>> masks.tolist(), classes
    ([[0, 1]], ('background', 'foreground'))
    """
    if masks.dtype.kind not in "biu":
        raise DataError(f"{what}: are {masks.dtype}: allowed are whole numbers, the class of each pixel")
    values = np.unique(masks) if values is None else values
    odd = None if names or gaps else stray(values)
    if odd is not None:
        row = int(np.flatnonzero((masks == odd).reshape(len(masks), -1).any(1))[0])
        raise DataError(f"{what}: example {row} has value {odd}, and all masks together {_gap(values)}")
    least, most = int(values.min()), int(values.max())
    if most == MOST and set(values.tolist()) <= {0, MOST}:
        masks, most = masks == MOST, 1
    if least < 0 or most >= (len(names) or MOST):
        allowed = f"0 to {(len(names) or MOST) - 1}"
        raise DataError(
            f"{what}: have values from {least} to {most}: allowed are {allowed}, the class of a pixel"
        )
    if not names:
        count = max(most + 1, 2)
        names = ("background", "foreground") if count == 2 else ("background", *map(str, range(1, count)))
    return masks.astype(np.int64), names


def stray(values: npt.NDArray[np.generic]) -> int | None:
    """The first value of masks beyond a gap; None: 0..n without gaps, 0 and 255, or negative ones.

    >>> stray(np.array([0, 1, 7])), stray(np.array([1, 2])), stray(np.array([0, 255]))
    (7, None, None)
    """
    present = set(values.tolist()) | {0}  # no mask need show background
    if present <= {0, MOST} or min(present) < 0:
        return None
    return next((value for value in sorted(present) if value and value - 1 not in present), None)


def _gap(values: npt.NDArray[np.generic]) -> str:
    known = [str(value) for value in values.tolist()]
    listed = ", ".join(known[:8]) + (" ..." if len(known) > 8 else "")
    return f"have {listed}: allowed are 0..n without gaps, or 0 and {MOST}"


def _times(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
