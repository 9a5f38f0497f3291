"""Volumes in NIfTI files, as axial slices. Read by nibabel (the extra "medical")."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedstill.core.dataset import Column
from fedstill.core.errors import DataError
from fedstill.core.text_format import times
from fedstill.core.user_functions import first_line
from fedstill.data.csv_tables import about
from fedstill.data.images import mask_classes, resized
from fedstill.data.raw import Raw

SUFFIXES = (".nii.gz", ".nii")
MASKS = ("mask", "seg", "label", "segmentation")  # what files of masks are called
DARKEST, BRIGHTEST = 1.0, 99.0  # per cent of a volume's voxels: 0 and 1 afterwards
SHOWS = 0.1  # a slice with a voxel above this shows something

Volume = npt.NDArray[np.float32]  # (X, Y, Z) or (X, Y, Z, C), from left, back and below


@dataclass(frozen=True)
class CaseFiles:
    """The files of one case: its images, in the order of the modalities' names, and its mask."""

    name: str
    images: tuple[Path, ...]
    modalities: tuple[str, ...]
    mask: Path | None


def read_volumes(
    folder: Path,
    *,
    masks: bool,
    size: int = 0,
    slices: int = 0,
    gaps: bool = False,
    counted: Callable[[int], None] = lambda count: None,
) -> Raw:
    """Axial slices of all cases of a folder: ``(N, C, H, W)`` float32 in [0, 1], masks ``(N, H, W)``.

    A case is ``<case>_image.nii.gz`` with ``<case>_mask.nii.gz``; or a folder ``<case>`` with one file a
    modality, ``t1.nii.gz`` or ``<case>_t1.nii.gz``, and the mask (mask, seg, label or segmentation).
    Modalities, in alphabetical order, are channels, as is the fourth axis of a file that has one.

    Rows go from front to back, columns from left to right. The 1st percentile of a volume becomes 0, the 99th
    1. Slices below the first and above the last that shows anything are left out; with ``size`` they are
    filled up to squares with the darkest value and averaged. Other arguments as
    :func:`fedstill.data.user_data.read`; a DataError names the file.
    """
    found = cases(folder, masks=masks)
    told, test = about(folder, [case.name for case in found])
    images: list[Volume] = []
    maps: list[npt.NDArray[np.int64]] = []
    whose: list[int] = []
    heights: list[int] = []
    for number, case in enumerate(found):
        if case.modalities != found[0].modalities:
            other = f"{', '.join(case.modalities)}, and {found[0].name} {', '.join(found[0].modalities)}"
            raise DataError(f"{case.images[0].parent}: {case.name} has {other}: allowed are the same")
        volume = np.concatenate([_scaled(_volume(file), file) for file in case.images], axis=3)
        chosen = spread(volume, slices)
        counted(len(whose) + len(chosen))
        image = _pictures(volume, chosen)  # (S, C, H, W)
        mask = None if case.mask is None or not masks else _mask(case.mask, volume, chosen)  # (S, H, W)
        if size:
            image = resized(_square(image), size, size)
            mask = None if mask is None else _square(mask)
        if images and image.shape[1:] != images[0].shape[1:]:
            forms = f"{times(image.shape[1:])}, and those of {found[0].name} {times(images[0].shape[1:])}"
            raise DataError(f"{case.images[0]}: slices are {forms}: data.size makes them alike")
        images.append(image)
        maps += [] if mask is None else list(mask)
        whose += [number] * len(chosen)
        heights += chosen.tolist()
    names = np.array([case.name for case in found])
    columns: dict[str, Column] = {"patient": names, **told}
    columns = {key: column[whose] for key, column in columns.items()} | {"slice": np.array(heights)}
    part = None if test is None else test[whose]
    if not masks:
        nothing = np.zeros(len(whose), dtype=np.int64)
        return Raw(np.concatenate(images), nothing, ("image",), part, columns, named=False)
    files = [str(found[number].mask) for number in whose]
    labels, classes = mask_classes(maps, f"{folder}: masks", gaps=gaps, size=size, files=files)
    return Raw(np.concatenate(images), labels, classes, part, columns, named=False)


def cases(folder: Path, *, masks: bool) -> list[CaseFiles]:
    """The cases of a folder, by name; if ``masks`` are wanted each has one."""
    files: dict[str, dict[str, Path]] = {}  # by case and kind
    for file in sorted(folder.iterdir()):
        stem = _stem(file)
        if file.is_dir() and not file.name.startswith("."):
            own = {each: kind for each in sorted(file.iterdir()) if (kind := _stem(each)) is not None}
            kinds = {kind.removeprefix(f"{file.name}_").lower(): each for each, kind in own.items()}
            files.update({file.name: kinds} if kinds else {})
        elif stem is not None and stem.endswith(tuple(f"_{kind}" for kind in ("image", *MASKS))):
            name, _, kind = stem.rpartition("_")
            files.setdefault(name, {})[kind] = file
    if not files:
        raise DataError(f"{folder}: has no <case>_image.nii.gz, and no folder with NIfTI files for each case")
    found = []
    for name, kinds in files.items():
        images = {kind: file for kind, file in kinds.items() if kind not in MASKS}
        mask = next((kinds[kind] for kind in MASKS if kind in kinds), None)
        if not images:
            raise DataError(f"{mask}: case {name!r} has a mask and no image: allowed is one beside it")
        if masks and mask is None:
            first = next(iter(images.values()))
            raise DataError(f"{first}: case {name!r} has no mask ({', '.join(MASKS)}) beside it")
        found.append(CaseFiles(name, tuple(images.values()), tuple(images), mask))
    return found


def _stem(file: Path) -> str | None:
    """A NIfTI file's name without its ending; None: another file."""
    return next((file.name.removesuffix(end) for end in SUFFIXES if file.name.endswith(end)), None)


def _volume(file: Path) -> Volume:
    try:
        nibabel: Any = importlib.import_module("nibabel")
    except ImportError as error:
        raise DataError(f"{file}: only nibabel reads this: pip install 'fedstill[medical]'") from error
    try:
        # To the patient's axes: a file may have them in any order and direction.
        image = nibabel.as_closest_canonical(nibabel.load(file))
        volume = np.asarray(image.dataobj, dtype=np.float32)
    except (OSError, ValueError, TypeError, EOFError, nibabel.filebasedimages.ImageFileError) as error:
        raise DataError(f"{file}: cannot be read as NIfTI ({first_line(error)})") from error
    if volume.ndim not in (3, 4) or volume.size == 0:
        raise DataError(
            f"{file}: is of shape {volume.shape}: allowed are three axes, or channels as the fourth"
        )
    if not np.isfinite(volume).all():
        raise DataError(f"{file}: holds NaN or infinity")
    return volume


def _scaled(volume: Volume, file: Path) -> Volume:
    """``(X, Y, Z, C)`` in [0, 1], each channel by its own percentiles."""
    volume = volume[..., None] if volume.ndim == 3 else volume
    low, high = np.percentile(volume, (DARKEST, BRIGHTEST), axis=(0, 1, 2)).astype(np.float32)
    flat = high <= low  # all but single voxels have one value
    low, high = np.where(flat, volume.min((0, 1, 2)), low), np.where(flat, volume.max((0, 1, 2)), high)
    if (high <= low).any():
        raise DataError(f"{file}: has one value everywhere: allowed is an image")
    scaled: Volume = ((volume - low) / (high - low)).clip(0, 1).astype(np.float32)
    return scaled


def spread(volume: Volume, most: int) -> npt.NDArray[np.int64]:
    """Which slices of ``(X, Y, Z, C)`` are taken, ascending: at most so many; 0: all between what shows
    something.

    >>> volume = np.zeros((2, 2, 10, 1), dtype=np.float32)
    >>> volume[:, :, 2:8] = 1
    >>> spread(volume, 3).tolist()
    [3, 5, 7]
    """
    shows = np.flatnonzero(volume.max((0, 1, 3)) > SHOWS)
    inside = np.arange(shows[0], shows[-1] + 1)
    if not 0 < most < len(inside):
        return inside
    return inside[((np.arange(most) + 0.5) * len(inside) / most).astype(np.int64)]


def _pictures(volume: npt.NDArray[Any], chosen: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Slices ``(S, C, H, W)`` of ``(X, Y, Z, C)``: rows from front to back, columns from left to right."""
    return np.ascontiguousarray(volume[:, ::-1, chosen].transpose(2, 3, 1, 0))


def _mask(file: Path, image: Volume, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    mask = _volume(file)
    if mask.shape != image.shape[:3]:
        raise DataError(
            f"{file}: is of shape {mask.shape}, and its image {image.shape[:3]}: allowed are equal ones"
        )
    whole = np.rint(mask)
    if np.abs(mask - whole).max() > 1e-3:
        raise DataError(f"{file}: has values that are no whole numbers: allowed is the class of each voxel")
    slices: npt.NDArray[np.int64] = _pictures(whole.astype(np.int64)[..., None], chosen)[:, 0]
    return slices


def _square(slices: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Filled up evenly with 0 to as many rows as columns."""
    height, width = slices.shape[-2:]
    side = max(height, width)
    around = [((side - length) // 2, (side - length + 1) // 2) for length in (height, width)]
    return np.pad(slices, [(0, 0)] * (slices.ndim - 2) + around)
