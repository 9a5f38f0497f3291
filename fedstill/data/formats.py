"""Forms in which images are kept, each with its reader: for a run's data by path and for a node's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from fedstill.core.errors import DataError
from fedstill.data.folders import in_one_size, read_folder
from fedstill.data.image_tables import Columns, read_classes, read_findings
from fedstill.data.nifti import read_volumes
from fedstill.data.npz import read_npz
from fedstill.data.raw import Raw, from_arrays
from fedstill.tasks import Targets

# By what they teach: the forms that can hold it.
SERVING: Mapping[Targets, tuple[str, ...]] = MappingProxyType(
    {
        "class": ("npz", "folder", "csv"),
        "labels": ("npz", "csv"),
        "map": ("npz", "folder", "nifti"),
        "image": ("npz", "folder", "nifti"),
        "instances": ("npz", "folder"),
        "texts": ("csv",),
    }
)


def form_of(place: Path, targets: Targets) -> str:
    """The form that a file or folder has: npz, csv, folder or nifti; no folder teaches findings."""
    if not place.is_dir():
        return place.suffix.removeprefix(".")
    if targets == "labels":
        raise DataError(f"{place}: is a folder: allowed for findings are an .npz or a csv")
    volumes = "nifti" in SERVING[targets] and any(any(place.rglob(name)) for name in ("*.nii", "*.nii.gz"))
    return "nifti" if volumes else "folder"


def read(
    place: Path,
    form: str,
    targets: Targets,
    *,
    size: int = 0,
    slices: int = 0,
    gaps: bool = False,
    columns: Columns | None = None,
    classes: tuple[str, ...] = (),
    shape: tuple[int, ...] = (),
    counted: Callable[[int], None] = lambda count: None,
) -> Raw:
    """What a file or folder holds: images of classes, of findings, with masks, or alone.

    Args:
        place: the file or folder.
        form: one of those that can hold it: npz, folder, csv or nifti.
        targets: class, labels, map or image.
        size: height and width to which images of other targets than classes are averaged; 0: as they are.
        slices: of each NIfTI volume at most; 0: all.
        gaps: as :func:`fedstill.data.masks.mask_classes` takes it.
        columns: what those of a csv mean.
        classes: the findings wanted of a csv; empty: all.
        shape: of a csv's pixels, if these are as many.
        counted: called with the number of images before they are read, if that can be told.

    Raises:
        DataError: it cannot be read, or is not of a form that can be used.
    """
    if form == "npz":
        return from_arrays(place, read_npz(place), targets, gaps=gaps)
    if targets == "labels":
        return read_findings(place, columns, classes, size, counted)
    if form == "csv":
        return read_classes(place, columns or Columns(), shape)
    masks = targets == "map"
    if form == "nifti":
        return read_volumes(place, masks=masks, size=size, slices=slices, gaps=gaps, counted=counted)
    if targets == "class":
        return read_folder(place)
    return in_one_size(place, masks=masks, size=size, gaps=gaps, counted=counted)
