"""Volumes in NIfTI files, read as axial slices by nibabel (the extra "medical")."""

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
from fedstill.core.name_normalization import normalize_name
from fedstill.core.registry import first_line
from fedstill.core.text_format import format_shape
from fedstill.data.images import encode_masks, resize_images
from fedstill.data.raw_images import RawImages
from fedstill.data.table_files import read_case_table

Volume = npt.NDArray[np.float32]  # (X, Y, Z) or (X, Y, Z, C), from left, back and bottom
Affine = npt.NDArray[np.float64]  # (4, 4), from voxels to millimeters in the patient: right, front, top
NIFTI_SUFFIXES = (".nii.gz", ".nii")
NNUNET_FOLDERS = frozenset({"imagesTr", "labelsTr", "imagesTs", "labelsTs"})  # folders of all cases
MASK_NAMES = ("mask", "seg", "label", "segmentation")  # of mask files
LOW_PERCENTILE, HIGH_PERCENTILE = 1.0, 99.0  # of a volume's voxels, which become 0 and 1
VISIBLE_LEVEL = 0.1  # a slice without brighter voxels is empty
MAX_CORNER_OFFSET = 0.1  # in voxels, between two files of one case
UNORIENTED = "sform_code and qform_code are 0, so its orientation is unknown"


@dataclass(frozen=True)
class CaseFiles:
    """Files of one case: images in the order of their modalities' names, and the mask."""

    name: str
    images: tuple[Path, ...]
    modalities: tuple[str, ...]
    mask: Path | None


@dataclass(frozen=True, eq=False)
class StoredVolume:
    """A volume in the axis order of its file, with its affine.

    Args:
        values: ``(X, Y, Z)`` or ``(X, Y, Z, C)`` along the axes of the file.
        affine: from voxels to patient coordinates.
        oriented: whether the file declares its orientation.
    """

    file: Path
    values: Volume
    affine: Affine
    oriented: bool

    @property
    def axes(self) -> str:
        """Directions of the axes, such as ``RAS``: right, anterior, superior."""
        return _axis_codes(self.affine)

    @property
    def spacing_text(self) -> str:
        """Voxel size, as text."""
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
    """Read the axial slices of all cases: ``(N, C, H, W)`` float32 in [0, 1], masks ``(N, H, W)``.

    A case is ``<case>_image.nii.gz`` with ``<case>_mask.nii.gz``; or a folder ``<case>`` with one file per
    modality, ``t1.nii.gz`` or ``<case>_t1.nii.gz``, and the mask (mask, seg, label or segmentation).
    Modalities, in alphabetical order, are channels, as is the fourth axis of a file.

    Rows go from front to back, columns from left to right. The 1st percentile of a volume becomes 0, the 99th
    becomes 1. Empty slices at both ends are left out. With ``size``, slices are padded to squares with the
    darkest value and averaged. Other arguments: see :func:`fedstill.data.user_data.read_raw_images`.

    All files of a case must have one shape and one affine, as nothing is resampled. A file without
    orientation (sform_code and qform_code 0) is read with nibabel's default: its first axis from right to
    left.

    Raises:
        DataError: names the file.
    """
    case_files = list_cases(folder, masks=masks)
    metadata, split = read_case_table(folder, [case.name for case in case_files])
    images: list[Volume] = []
    mask_slices: list[npt.NDArray[np.int64]] = []
    case_numbers: list[int] = []
    slice_numbers: list[int] = []
    unoriented = 0
    for number, case in enumerate(case_files):
        if case.modalities != case_files[0].modalities:
            first = f"{case_files[0].name} {', '.join(case_files[0].modalities)}"
            difference = f"{', '.join(case.modalities)}, and {first}"
            raise DataError(f"{case.images[0].parent}: {case.name} has {difference} (expected the same)")
        volumes = [_read_volume(file) for file in case.images]
        mask_volume = None if case.mask is None or not masks else _read_volume(case.mask)
        for volume in [*volumes[1:], *([] if mask_volume is None else [mask_volume])]:
            _check_same_grid(volumes[0], volume)
        unoriented += not volumes[0].oriented
        channels = np.concatenate(
            [_rescale_to_unit_range(_reorient(volume, volumes[0]), volume.file) for volume in volumes], axis=3
        )
        slice_indices = select_slices(channels, slices)
        on_count(len(case_numbers) + len(slice_indices))
        image = _axial_slices(channels, slice_indices)  # (S, C, H, W)
        mask = (
            None
            if mask_volume is None
            else _mask_slices(mask_volume.file, _reorient(mask_volume, volumes[0]), slice_indices)
        )
        if size:
            image = resize_images(_pad_to_square(image), size, size)
            mask = None if mask is None else _pad_to_square(mask)
        if images and image.shape[1:] != images[0].shape[1:]:
            first = f"{case_files[0].name} {format_shape(images[0].shape[1:])}"
            shapes = f"{format_shape(image.shape[1:])}, and those of {first}"
            raise DataError(f"{case.images[0]}: slices are {shapes} (expected one size; data.size resizes)")
        images.append(image)
        mask_slices += [] if mask is None else list(mask)
        case_numbers += [number] * len(slice_indices)
        slice_numbers += slice_indices.tolist()
    names = np.array([case.name for case in case_files])
    columns: dict[str, Column] = {"patient": names, **metadata}
    columns = {key: column[case_numbers] for key, column in columns.items()} | {
        "slice": np.array(slice_numbers)
    }
    slice_split = None if split is None else split[case_numbers]
    problem = f"{unoriented} of {len(case_files)} volumes have no orientation (sform_code and qform_code 0)"
    note = f"{problem}; their first axis is read from right to left" if unoriented else ""
    if not masks:
        nothing = np.zeros(len(case_numbers), dtype=np.int64)
        return RawImages(
            np.concatenate(images),
            nothing,
            ("image",),
            slice_split,
            columns,
            has_class_names=False,
            note=note,
        )
    files = [str(case_files[number].mask) for number in case_numbers]
    labels, classes = encode_masks(mask_slices, f"{folder}: masks", gaps=gaps, size=size, files=files)
    return RawImages(
        np.concatenate(images), labels, classes, slice_split, columns, has_class_names=False, note=note
    )


# --- files --------------------------------------------------------------------------------------------------


def list_cases(folder: Path, *, masks: bool) -> list[CaseFiles]:
    """Return the cases of a folder, by name; with ``masks``, each must have a mask."""
    files: dict[str, dict[str, list[Path]]] = {}  # by case and kind
    for file in sorted(folder.iterdir()):
        stem = _nifti_stem(file)
        if file.is_dir() and not file.name.startswith("."):
            if file.name in NNUNET_FOLDERS:
                raise DataError(
                    f"{file}: is a folder of nnU-Net's layout (expected <case>_image.nii.gz with "
                    "<case>_mask.nii.gz, or a folder for each case)"
                )
            case = normalize_name(file.name)
            for file_path in sorted(file.iterdir()):
                if (role := _nifti_stem(file_path)) is not None:
                    role = normalize_name(role).removeprefix(f"{case}_").lower()
                    files.setdefault(case, {}).setdefault(role, []).append(file_path)
        elif stem is not None and stem.lower().endswith(tuple(f"_{role}" for role in ("image", *MASK_NAMES))):
            name, _, role = stem.rpartition("_")
            files.setdefault(normalize_name(name), {}).setdefault(role.lower(), []).append(file)
    if not files:
        raise DataError(f"{folder}: has no <case>_image.nii.gz, and no folder with NIfTI files for each case")
    case_files = []
    for name, roles in files.items():
        images = {role: paths[0] for role, paths in roles.items() if role not in MASK_NAMES}
        mask_paths = [file for role in MASK_NAMES for file in roles.get(role, [])]
        for several in [mask_paths, *(paths for role, paths in roles.items() if role not in MASK_NAMES)]:
            if len(several) > 1:
                expected = "one mask" if several is mask_paths else "one file for each image"
                raise DataError(
                    f"{several[1]}: case {name!r} has {several[0].name}, too (expected {expected})"
                )
        mask = mask_paths[0] if mask_paths else None
        if not images:
            raise DataError(f"{mask}: case {name!r} has a mask and no image (expected both)")
        if masks and mask is None:
            image = next(iter(images.values()))
            raise DataError(f"{image}: case {name!r} has no mask ({', '.join(MASK_NAMES)})")
        case_files.append(CaseFiles(name, tuple(images.values()), tuple(images), mask))
    return case_files


def contains_nifti_files(folder: Path) -> bool:
    """Return whether a NIfTI file is in a folder or below it."""
    return any(_nifti_stem(file) is not None for file in folder.rglob("*"))


def _nifti_stem(file: Path) -> str | None:
    """Return the name of a NIfTI file without its suffix; None for another file."""
    name = file.name
    return next((name[: -len(suffix)] for suffix in NIFTI_SUFFIXES if name.lower().endswith(suffix)), None)


def _import_nibabel(file: Path) -> Any:
    try:
        return importlib.import_module("nibabel")
    except ImportError as error:
        raise DataError(f"{file}: reading NIfTI needs nibabel: pip install 'fedstill[medical]'") from error


def _read_volume(file: Path) -> StoredVolume:
    nibabel = _import_nibabel(file)
    nibabel_errors = (nibabel.filebasedimages.ImageFileError, nibabel.spatialimages.HeaderDataError)
    try:
        image = nibabel.load(file)
        with nibabel.openers.ImageOpener(
            file
        ) as stream:  # the original header, as load() corrects some fields
            header = type(image.header).from_fileobj(stream, check=False)
        dtype_kind = image.get_data_dtype().kind
        if dtype_kind not in "biuf":
            content = "complex numbers" if dtype_kind == "c" else "colors, or other tuples of values"
            raise DataError(f"{file}: holds {content} (expected one real number a voxel)")
        affine, oriented = (
            _checked_affine(image, header, file),
            bool(header["sform_code"] or header["qform_code"]),
        )
        values = np.asarray(image.dataobj, dtype=np.float32)
    except DataError:
        raise
    except (OSError, ValueError, TypeError, EOFError, *nibabel_errors) as error:
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
    """Return the affine, of the sform if there is one.

    Raises:
        DataError: the header contradicts itself.
    """
    sform, qform = image.get_sform(coded=True)[0], image.get_qform(coded=True)[0]
    pixdim = np.asarray(header["pixdim"], dtype=np.float64)[1:4]
    if sform is None and not (np.isfinite(pixdim) & (pixdim > 0)).all():
        sizes = _format_numbers(pixdim, ", ")
        raise DataError(f"{file}: its pixdim is {sizes} (expected voxels with edges above 0)")
    affine: Affine = np.asarray(image.affine, dtype=np.float64)
    if not np.isfinite(affine).all() or np.linalg.matrix_rank(affine[:3, :3]) < 3:
        raise DataError(f"{file}: its affine is singular (expected one that can be inverted)")
    if sform is not None and qform is not None and _axis_codes(sform) != _axis_codes(qform):
        problem = f"its sform says {_axis_codes(sform)} and its qform {_axis_codes(qform)}"
        raise DataError(f"{file}: {problem} (expected one orientation)")
    return affine


def _axis_codes(affine: Affine) -> str:
    codes = importlib.import_module("nibabel").aff2axcodes(affine)
    return "".join(code or "?" for code in codes)


def _format_numbers(values: npt.NDArray[np.float64], separator: str) -> str:
    return separator.join(f"{value:.6g}" for value in values)


def _check_same_grid(first: StoredVolume, other: StoredVolume) -> None:
    """Check that two files of a case have the same voxel grid.

    Raises:
        DataError: they do not; names both files.
    """
    expected = "one shape and one affine for all files of a case"
    other_shape, first_shape = (volume.values.shape[:3] for volume in (other, first))
    if other_shape != first_shape:
        problem = f"is of shape {other_shape}, and {first.file} {first_shape}"
        raise DataError(f"{other.file}: {problem} (expected {expected})")
    corners = np.stack(np.meshgrid(*[(0, side - 1) for side in first_shape], indexing="ij")).reshape(3, -1)
    corners = np.concatenate([corners, np.ones((1, corners.shape[1]))])  # (4, 8)
    offset = np.abs(np.linalg.solve(first.affine, other.affine @ corners) - corners).max()
    if offset <= MAX_CORNER_OFFSET:
        return
    if first.axes != other.axes:
        problem = f"its axes are {other.axes}, and those of {first.file} {first.axes}"
    elif first.spacing_text != other.spacing_text:
        problem = f"its voxels are {other.spacing_text}, and those of {first.file} {first.spacing_text}"
    else:
        problem = f"it is {offset:.3g} voxels away from {first.file}"
        if (origins := [_format_numbers(volume.affine[:3, 3], ", ") for volume in (other, first)])[
            0
        ] != origins[1]:
            problem = f"its origin is ({origins[0]}), and that of {first.file} ({origins[1]})"
    unoriented_file = next((volume.file for volume in (other, first) if not volume.oriented), None)
    if unoriented_file is not None:
        problem += f"; of {unoriented_file.name}, {UNORIENTED}"
    raise DataError(f"{other.file}: {problem} (expected {expected})")


# --- voxels -------------------------------------------------------------------------------------------------


def _reorient(volume: StoredVolume, first: StoredVolume) -> Volume:
    """Reorient voxels left to right, back to front and bottom to top, by the first affine of the case."""
    orientations: Any = importlib.import_module("nibabel.orientations")
    # One orientation for all files of a case: at 45 degrees, rounding could give each its own.
    orientation = orientations.io_orientation(first.affine)
    reoriented: Volume = orientations.apply_orientation(volume.values, orientation)
    return reoriented


def _rescale_to_unit_range(volume: Volume, file: Path) -> Volume:
    """Rescale each channel to [0, 1] by its percentiles; return ``(X, Y, Z, C)``."""
    volume = volume[..., None] if volume.ndim == 3 else volume
    low, high = np.percentile(volume, (LOW_PERCENTILE, HIGH_PERCENTILE), axis=(0, 1, 2)).astype(np.float32)
    is_flat = high <= low  # almost all voxels have one value
    low, high = np.where(is_flat, volume.min((0, 1, 2)), low), np.where(is_flat, volume.max((0, 1, 2)), high)
    if (high <= low).any():
        raise DataError(f"{file}: has one value everywhere (expected an image)")
    scaled: Volume = ((volume - low) / (high - low)).clip(0, 1).astype(np.float32)
    return scaled


def select_slices(volume: Volume, max_slices: int) -> npt.NDArray[np.int64]:
    """Return ascending indices of slices of ``(X, Y, Z, C)``: at most ``max_slices``, evenly spaced; 0: all.

    Empty slices at both ends are left out.

    >>> volume = np.zeros((2, 2, 10, 1), dtype=np.float32)
    >>> volume[:, :, 2:8] = 1
    >>> select_slices(volume, 3).tolist()
    [3, 5, 7]
    """
    visible = np.flatnonzero(volume.max((0, 1, 3)) > VISIBLE_LEVEL)
    candidates = np.arange(visible[0], visible[-1] + 1)
    if not 0 < max_slices < len(candidates):
        return candidates
    return candidates[((np.arange(max_slices) + 0.5) * len(candidates) / max_slices).astype(np.int64)]


def _axial_slices(volume: npt.NDArray[Any], slice_indices: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Return slices ``(S, C, H, W)`` of ``(X, Y, Z, C)``, with rows front to back, columns left to right."""
    return np.ascontiguousarray(volume[:, ::-1, slice_indices].transpose(2, 3, 1, 0))


def _mask_slices(file: Path, mask: Volume, slice_indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    if mask.ndim > 3:
        raise DataError(f"{file}: has {mask.shape[3]} channels (expected one number a voxel, its class)")
    rounded = np.rint(mask)
    if np.abs(mask - rounded).max() > 1e-3:
        raise DataError(f"{file}: has fractional values (expected the class of each voxel)")
    slices: npt.NDArray[np.int64] = _axial_slices(rounded.astype(np.int64)[..., None], slice_indices)[:, 0]
    return slices


def _pad_to_square(slices: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Pad with 0 on both sides to as many rows as columns."""
    height, width = slices.shape[-2:]
    side = max(height, width)
    padding = [((side - size) // 2, (side - size + 1) // 2) for size in (height, width)]
    return np.pad(slices, [(0, 0)] * (slices.ndim - 2) + padding)
