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
from fedstill.core.names import plain
from fedstill.core.registry import first_line
from fedstill.core.text_format import times
from fedstill.data.images import encode_masks, resize_images
from fedstill.data.raw import RawImages
from fedstill.data.table_files import read_case_table

NIFTI_SUFFIXES = (".nii.gz", ".nii")
NNUNET_FOLDERS = frozenset(
    {"imagesTr", "labelsTr", "imagesTs", "labelsTs"}
)  # not cases, but folders of all of them
MASK_NAMES = ("mask", "seg", "label", "segmentation")  # what files of masks are called
LOW_PERCENTILE, HIGH_PERCENTILE = 1.0, 99.0  # per cent of a volume's voxels: 0 and 1 afterwards
VISIBLE_LEVEL = 0.1  # a slice with a voxel above this shows something

MAX_CORNER_OFFSET = 0.1  # voxels by which the corners of two files of one case may lie apart
UNORIENTED = "its sform_code and qform_code are 0, so that nothing says how it lies"

Volume = npt.NDArray[np.float32]  # (X, Y, Z) or (X, Y, Z, C), from left, back and below
Affine = npt.NDArray[np.float64]  # (4, 4), from voxels to millimeters in the patient: right, front, above


@dataclass(frozen=True)
class CaseFiles:
    """The files of one case: its images, in the order of the modalities' names, and its mask."""

    name: str
    images: tuple[Path, ...]
    modalities: tuple[str, ...]
    mask: Path | None


@dataclass(frozen=True, eq=False)
class StoredVolume:
    """A volume in the order of its file, and where its voxels lie in the patient.

    Args:
        values: ``(X, Y, Z)`` or ``(X, Y, Z, C)`` along the file's own axes.
        affine: from its voxels to the patient's axes.
        oriented: whether the file itself says how it lies.
    """

    file: Path
    values: Volume
    affine: Affine
    oriented: bool

    @property
    def axes(self) -> str:
        """The ends that its axes point to, as in ``RAS``: right, front (anterior) and above (superior)."""
        return _axis_codes(self.affine)

    @property
    def spacing(self) -> str:
        """The edges of a voxel."""
        return f"{_format_numbers(np.linalg.norm(self.affine[:3, :3], axis=0), ' x ')} mm"


def read_volumes(
    folder: Path,
    *,
    masks: bool,
    size: int = 0,
    slices: int = 0,
    gaps: bool = False,
    on_count: Callable[[int], None] = lambda count: None,
) -> RawImages:
    """Axial slices of all cases of a folder: ``(N, C, H, W)`` float32 in [0, 1], masks ``(N, H, W)``.

    A case is ``<case>_image.nii.gz`` with ``<case>_mask.nii.gz``; or a folder ``<case>`` with one file a
    modality, ``t1.nii.gz`` or ``<case>_t1.nii.gz``, and the mask (mask, seg, label or segmentation).
    Modalities, in alphabetical order, are channels, as is the fourth axis of a file that has one.

    Rows go from front to back, columns from left to right. The 1st percentile of a volume becomes 0, the 99th
    1. Slices below the first and above the last that shows anything are left out; with ``size`` they are
    filled up to squares with the darkest value and averaged. Other arguments as
    :func:`fedstill.data.user_data.read_raw_images`; a DataError names the file.

    All files of a case have one shape and one affine: nothing is resampled. A file that does not say how it
    lies (sform_code and qform_code 0) is taken as nibabel takes it, its first axis from right to left.
    """
    found = list_cases(folder, masks=masks)
    told, test = read_case_table(folder, [case.name for case in found])
    images: list[Volume] = []
    maps: list[npt.NDArray[np.int64]] = []
    whose: list[int] = []
    heights: list[int] = []
    unoriented = 0
    for number, case in enumerate(found):
        if case.modalities != found[0].modalities:
            other = f"{', '.join(case.modalities)}, and {found[0].name} {', '.join(found[0].modalities)}"
            raise DataError(f"{case.images[0].parent}: {case.name} has {other} (expected the same)")
        stored = [_read_volume(file) for file in case.images]
        mask_file = None if case.mask is None or not masks else _read_volume(case.mask)
        for one in [*stored[1:], *([] if mask_file is None else [mask_file])]:
            _check_same_grid(stored[0], one)
        unoriented += not stored[0].oriented
        volume = np.concatenate([_rescale(_reorient(one, stored[0]), one.file) for one in stored], axis=3)
        chosen = select_slices(volume, slices)
        on_count(len(whose) + len(chosen))
        image = _axial_slices(volume, chosen)  # (S, C, H, W)
        mask = (
            None
            if mask_file is None
            else _mask_slices(mask_file.file, _reorient(mask_file, stored[0]), chosen)
        )
        if size:
            image = resize_images(_pad_to_square(image), size, size)
            mask = None if mask is None else _pad_to_square(mask)
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
    silent = f"{unoriented} of {len(found)} volumes do not say how they lie (sform_code and qform_code 0)"
    note = f"{silent}: their first axis is taken as from right to left" if unoriented else ""
    if not masks:
        nothing = np.zeros(len(whose), dtype=np.int64)
        return RawImages(
            np.concatenate(images), nothing, ("image",), part, columns, has_class_names=False, note=note
        )
    files = [str(found[number].mask) for number in whose]
    labels, classes = encode_masks(maps, f"{folder}: masks", gaps=gaps, size=size, files=files)
    return RawImages(np.concatenate(images), labels, classes, part, columns, has_class_names=False, note=note)


def list_cases(folder: Path, *, masks: bool) -> list[CaseFiles]:
    """The cases of a folder, by name; if ``masks`` are wanted each has one."""
    files: dict[str, dict[str, list[Path]]] = {}  # by case and kind
    for file in sorted(folder.iterdir()):
        stem = _nifti_stem(file)
        if file.is_dir() and not file.name.startswith("."):
            if file.name in NNUNET_FOLDERS:
                raise DataError(
                    f"{file}: is a folder of nnU-Net's layout: allowed are <case>_image.nii.gz with "
                    "<case>_mask.nii.gz, or a folder for each case"
                )
            case = plain(file.name)
            for each in sorted(file.iterdir()):
                if (kind := _nifti_stem(each)) is not None:
                    kind = plain(kind).removeprefix(f"{case}_").lower()
                    files.setdefault(case, {}).setdefault(kind, []).append(each)
        elif stem is not None and stem.lower().endswith(tuple(f"_{kind}" for kind in ("image", *MASK_NAMES))):
            name, _, kind = stem.rpartition("_")
            files.setdefault(plain(name), {}).setdefault(kind.lower(), []).append(file)
    if not files:
        raise DataError(f"{folder}: has no <case>_image.nii.gz, and no folder with NIfTI files for each case")
    found = []
    for name, kinds in files.items():
        images = {kind: some[0] for kind, some in kinds.items() if kind not in MASK_NAMES}
        drawn = [file for kind in MASK_NAMES for file in kinds.get(kind, [])]
        for several in [drawn, *(some for kind, some in kinds.items() if kind not in MASK_NAMES)]:
            if len(several) > 1:
                one = "one mask" if several is drawn else "one file for each image"
                raise DataError(f"{several[1]}: case {name!r} has {several[0].name}, too (expected {one})")
        mask = drawn[0] if drawn else None
        if not images:
            raise DataError(f"{mask}: case {name!r} has a mask and no image (expected one beside it)")
        if masks and mask is None:
            first = next(iter(images.values()))
            raise DataError(f"{first}: case {name!r} has no mask ({', '.join(MASK_NAMES)}) beside it")
        found.append(CaseFiles(name, tuple(images.values()), tuple(images), mask))
    return found


def _nifti_stem(file: Path) -> str | None:
    """A NIfTI file's name without its ending; None: another file."""
    name = file.name
    return next((name[: -len(end)] for end in NIFTI_SUFFIXES if name.lower().endswith(end)), None)


def has_volumes(folder: Path) -> bool:
    """Return whether a NIfTI file lies in a folder or below it."""
    return any(_nifti_stem(file) is not None for file in folder.rglob("*"))


def _import_nibabel(file: Path) -> Any:
    try:
        return importlib.import_module("nibabel")
    except ImportError as error:
        raise DataError(f"{file}: only nibabel reads this: pip install 'fedstill[medical]'") from error


def _read_volume(file: Path) -> StoredVolume:
    nibabel = _import_nibabel(file)
    faults = (nibabel.filebasedimages.ImageFileError, nibabel.spatialimages.HeaderDataError)
    try:
        image = nibabel.load(file)
        with nibabel.openers.ImageOpener(file) as stream:  # loading corrects what it does not like
            header = type(image.header).from_fileobj(stream, check=False)
        kind = image.get_data_dtype().kind
        if kind not in "biuf":
            form = "complex numbers" if kind == "c" else "colors, or other tuples of values"
            raise DataError(f"{file}: holds {form} (expected one real number a voxel)")
        affine, oriented = (
            _checked_affine(image, header, file),
            bool(header["sform_code"] or header["qform_code"]),
        )
        values = np.asarray(image.dataobj, dtype=np.float32)
    except DataError:
        raise
    except (OSError, ValueError, TypeError, EOFError, *faults) as error:
        raise DataError(f"{file}: cannot be read as NIfTI ({first_line(error)})") from error
    shape = values.shape
    while values.ndim > 3 and values.shape[-1] == 1:
        values = values[..., 0]
    if values.ndim not in (3, 4) or values.size == 0:
        raise DataError(f"{file}: is of shape {shape} (expected three axes, or channels as the fourth)")
    if not np.isfinite(values).all():
        raise DataError(f"{file}: holds NaN or infinity")
    return StoredVolume(file, values, affine, oriented)


def _checked_affine(image: Any, header: Any, file: Path) -> Affine:
    """Return the affine, by the sform where there is one; a DataError if a header contradicts itself."""
    sform, qform = image.get_sform(coded=True)[0], image.get_qform(coded=True)[0]
    pixdim = np.asarray(header["pixdim"], dtype=np.float64)[1:4]
    if sform is None and not (np.isfinite(pixdim) & (pixdim > 0)).all():
        sizes = _format_numbers(pixdim, ", ")
        raise DataError(f"{file}: its pixdim is {sizes} (expected voxels with edges above 0)")
    affine: Affine = np.asarray(image.affine, dtype=np.float64)
    if not np.isfinite(affine).all() or np.linalg.matrix_rank(affine[:3, :3]) < 3:
        raise DataError(f"{file}: its affine is singular (expected one that can be inverted)")
    if sform is not None and qform is not None and _axis_codes(sform) != _axis_codes(qform):
        found = f"its sform says {_axis_codes(sform)} and its qform {_axis_codes(qform)}"
        raise DataError(f"{file}: {found} (expected one orientation)")
    return affine


def _axis_codes(affine: Affine) -> str:
    codes = importlib.import_module("nibabel").aff2axcodes(affine)
    return "".join(code or "?" for code in codes)


def _format_numbers(values: npt.NDArray[np.float64], between: str) -> str:
    return between.join(f"{value:.6g}" for value in values)


def _check_same_grid(first: StoredVolume, other: StoredVolume) -> None:
    """Refuse a file of a case whose voxels are not those of the first, with a DataError that names both."""
    allowed = "allowed is one shape and one affine for all files of a case"
    mine, own = (one.values.shape[:3] for one in (other, first))
    if mine != own:
        found = f"is of shape {mine}, and {first.file} {own}"
        raise DataError(f"{other.file}: {found}: {allowed}")
    corners = np.stack(np.meshgrid(*[(0, side - 1) for side in own], indexing="ij")).reshape(3, -1)
    corners = np.concatenate([corners, np.ones((1, corners.shape[1]))])  # (4, 8)
    apart = np.abs(np.linalg.solve(first.affine, other.affine @ corners) - corners).max()
    if apart <= MAX_CORNER_OFFSET:
        return
    if first.axes != other.axes:
        found = f"its axes are {other.axes}, and those of {first.file} {first.axes}"
    elif first.spacing != other.spacing:
        found = f"its voxels are {other.spacing}, and those of {first.file} {first.spacing}"
    else:
        found = f"it lies {apart:.3g} voxels from {first.file}"
        if (places := [_format_numbers(one.affine[:3, 3], ", ") for one in (other, first)])[0] != places[1]:
            found = f"its origin is ({places[0]}), and that of {first.file} ({places[1]})"
    silent = next((one.file for one in (other, first) if not one.oriented), None)
    if silent is not None:
        found += f"; of {silent.name}, {UNORIENTED}"
    raise DataError(f"{other.file}: {found}: {allowed}")


def _reorient(one: StoredVolume, first: StoredVolume) -> Volume:
    """The voxels from left to right, back to front and bottom to top, by the first affine of the case."""
    orientations: Any = importlib.import_module("nibabel.orientations")
    turn = orientations.io_orientation(first.affine)  # of one for all: at 45 degrees two could come apart
    turned: Volume = orientations.apply_orientation(one.values, turn)
    return turned


def _rescale(volume: Volume, file: Path) -> Volume:
    """``(X, Y, Z, C)`` in [0, 1], each channel by its own percentiles."""
    volume = volume[..., None] if volume.ndim == 3 else volume
    low, high = np.percentile(volume, (LOW_PERCENTILE, HIGH_PERCENTILE), axis=(0, 1, 2)).astype(np.float32)
    flat = high <= low  # all but single voxels have one value
    low, high = np.where(flat, volume.min((0, 1, 2)), low), np.where(flat, volume.max((0, 1, 2)), high)
    if (high <= low).any():
        raise DataError(f"{file}: has one value everywhere (expected an image)")
    scaled: Volume = ((volume - low) / (high - low)).clip(0, 1).astype(np.float32)
    return scaled


def select_slices(volume: Volume, most: int) -> npt.NDArray[np.int64]:
    """Which slices of ``(X, Y, Z, C)`` are taken, ascending: at most so many; 0: all between what shows
    something.

    >>> volume = np.zeros((2, 2, 10, 1), dtype=np.float32)
    >>> volume[:, :, 2:8] = 1
    >>> select_slices(volume, 3).tolist()
    [3, 5, 7]
    """
    shows = np.flatnonzero(volume.max((0, 1, 3)) > VISIBLE_LEVEL)
    inside = np.arange(shows[0], shows[-1] + 1)
    if not 0 < most < len(inside):
        return inside
    return inside[((np.arange(most) + 0.5) * len(inside) / most).astype(np.int64)]


def _axial_slices(volume: npt.NDArray[Any], chosen: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Slices ``(S, C, H, W)`` of ``(X, Y, Z, C)``: rows from front to back, columns from left to right."""
    return np.ascontiguousarray(volume[:, ::-1, chosen].transpose(2, 3, 1, 0))


def _mask_slices(file: Path, mask: Volume, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    if mask.ndim > 3:
        raise DataError(f"{file}: has {mask.shape[3]} channels (expected one number a voxel, its class)")
    whole = np.rint(mask)
    if np.abs(mask - whole).max() > 1e-3:
        raise DataError(f"{file}: has values that are no whole numbers (expected the class of each voxel)")
    slices: npt.NDArray[np.int64] = _axial_slices(whole.astype(np.int64)[..., None], chosen)[:, 0]
    return slices


def _pad_to_square(slices: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Filled up evenly with 0 to as many rows as columns."""
    height, width = slices.shape[-2:]
    side = max(height, width)
    around = [((side - length) // 2, (side - length + 1) // 2) for length in (height, width)]
    return np.pad(slices, [(0, 0)] * (slices.ndim - 2) + around)
