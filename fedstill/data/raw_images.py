"""Images with labels as read from a file, before they are normalized or divided.

Every image format ends here: each reader returns arrays named as in an ``.npz``, or :class:`RawImages`. No
pickle is read: an ``.npz`` is opened with ``allow_pickle=False``, and arrays of objects are refused.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedstill.core.dataset import Column, check_labels
from fedstill.core.errors import DataError
from fedstill.core.name_normalization import (
    TEXT_DTYPE_KINDS,
    normalize_class_names,
    normalize_column,
    normalize_columns,
    normalize_name,
    parse_nonnegative_int,
    sort_class_names,
    strip_decimal_zeros,
    unknown_name_text,
)
from fedstill.core.registry import first_line
from fedstill.core.table_schema import EMPTY_CELLS
from fedstill.core.text_format import more_suffix
from fedstill.data.images import encode_masks
from fedstill.data.stratified_sampling import Ints
from fedstill.tasks import Targets

Images = npt.NDArray[Any]  # (N, C, H, W), uint8 or float32 in [0, 1]

MAX_CLASSES = 65_536  # without names; a larger label is an ID, not a class


@dataclass(frozen=True, eq=False)
class RawImages:
    """Images, their labels and metadata.

    Args:
        images: ``(N, C, H, W)``, uint8 or float32 in [0, 1].
        labels: class indices ``(N,)``; findings ``(N, C)`` of -1, 0 and 1; class maps ``(N, H, W)``; zeros
            ``(N,)`` if the images are the targets.
        classes: class names, in the order of their indices.
        split: 0 for training, 1 for testing, 2 for validation, ``(N,)``; None if the source has no split.
        columns: metadata ``(N,)`` by name, such as ``patient`` and ``site``.
        has_class_names: False if classes are only numbered.
        file_names: file of each image, ``(N,)``; None if images are only numbered.
        note: remark for readers of a result.
        classes_declared: False if classes were counted from the largest label.

    Names of classes and columns are normalized (:mod:`fedstill.core.name_normalization`).

    Raises:
        DataError: two classes or two columns have the same name.
    """

    images: Images
    labels: Ints
    classes: tuple[str, ...]
    split: Column | None = None
    columns: Mapping[str, Column] = field(default_factory=dict)
    has_class_names: bool = True
    file_names: Column | None = None
    note: str = ""
    classes_declared: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", normalize_class_names(self.classes, "classes"))
        object.__setattr__(self, "columns", normalize_columns(self.columns))

    def require_contiguous_labels(self, source: str) -> None:
        """Check that undeclared classes can be counted from the labels.

        Args:
            source: start of the error message.

        Raises:
            DataError: labels are numbers without a list of classes and do not start at 0 or have gaps.
        """
        if self.classes_declared or not len(gaps := np.setdiff1d(np.arange(len(self.classes)), self.labels)):
            return
        number_range = f"labels are numbers from {self.labels.min()} to {self.labels.max()}"
        problem = f"{number_range}, and no example has label {gaps[0]}{more_suffix(len(gaps))}"
        expected = "numbers from 0 up without gaps, or an array 'classes' with the name of each class"
        raise DataError(f"{source}: {problem} (expected {expected})")


def raw_images_from_arrays(
    path: Path, arrays: Mapping[str, Column], targets: Targets, *, gaps: bool = False
) -> RawImages:
    """Check arrays named as in an ``.npz`` and return them as :class:`RawImages`.

    Args:
        path: source of the arrays, for errors.
        arrays: as returned by :meth:`fedstill.data.ImageArrayData.arrays`.
        targets: class, labels, map or image.
        gaps: see :func:`fedstill.data.images.encode_masks`.

    Raises:
        DataError: an array is missing or has the wrong shape, type or values.

    >>> arrays = {"images": np.zeros((2, 8, 4)), "labels": np.array(["dog", "cat"]), "site": np.array([7, 9])}
    >>> raw = raw_images_from_arrays(Path("pets"), arrays, "class")
    >>> raw.images.shape, raw.labels.tolist(), raw.classes, raw.columns["site"].tolist()
    ((2, 1, 8, 4), [1, 0], ('cat', 'dog'), [7, 9])
    """
    arrays = _normalize_array_names(path, arrays)
    images = as_image_array(path, arrays)
    count = len(images)
    if count == 0:
        raise DataError(f"{path}: there are no images (expected one or more)")
    class_list, has_class_names, classes_declared = _declared_classes(path, arrays), "classes" in arrays, True
    labels: Ints = np.zeros(count, dtype=np.int64)
    classes: tuple[str, ...] = ("image",)
    if targets == "map":
        masks = require_array(path, arrays, "masks")
        if masks.shape != (count, *images.shape[2:]):
            shapes = f"masks are {masks.shape} and images {images.shape}"
            raise DataError(f"{path}: {shapes} (expected one mask of its size for each image)")
        labels, classes = encode_masks(masks, f"{path}: masks", class_list, gaps=gaps)
    elif targets == "labels":
        labels, classes = _finding_labels(path, require_array(path, arrays, "labels"), count, class_list)
    elif targets == "class":
        labels, classes = _class_labels(path, require_array(path, arrays, "labels"), count, class_list)
        are_texts = arrays["labels"].dtype.kind in TEXT_DTYPE_KINDS
        has_class_names = are_texts or classes != tuple(map(str, range(len(classes))))
        classes_declared = are_texts or bool(class_list)
    split = None
    if "split" in arrays:
        split = arrays["split"]
        if split.shape != (count,) or not np.isin(split, (0, 1, 2)).all():
            problem = f"split is not 0 (train), 1 (test) or 2 (validation) for each of the {count} images"
            raise DataError(f"{path}: {problem}")
    for name in ("patient", "site"):  # ignoring them would put one patient into both parts
        if name in arrays and arrays[name].shape != (count,):
            raise DataError(
                f"{path}: {name} is {arrays[name].shape} (expected one for each of {count} images)"
            )
    known = {"images", "masks", "labels", "classes", "split", "offsets"}
    other = {name: array for name, array in arrays.items() if name not in known}
    columns = {name: array for name, array in other.items() if array.shape == (count,)}
    return RawImages(
        images, labels, classes, split, columns, has_class_names, classes_declared=classes_declared
    )


def _declared_classes(path: Path, arrays: Mapping[str, Column]) -> tuple[str, ...]:
    names = arrays.get("classes", np.array([], dtype=np.str_))
    if names.ndim != 1 or names.dtype.kind not in TEXT_DTYPE_KINDS:
        form = f"{names.dtype} of shape {names.shape}"
        raise DataError(f"{path}: classes are {form} (expected one text per class)")
    return normalize_class_names(map(str, normalize_column(names)), f"{path}: classes")


def _class_labels(
    path: Path, labels: Column, count: int, names: tuple[str, ...]
) -> tuple[Ints, tuple[str, ...]]:
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]  # as MedMNIST's are
    if labels.ndim == 1 and labels.dtype.kind in TEXT_DTYPE_KINDS:
        labels, names = encode_labels(normalize_column(labels).tolist(), str(path), names)
    if labels.ndim != 1 or labels.dtype.kind not in "biu":
        form = f"{labels.dtype} of shape {labels.shape}"
        raise DataError(f"{path}: labels are {form} (expected one name or whole number per image)")
    if len(labels) != count:
        raise DataError(f"{path}: {count} images and {len(labels)} labels (expected one label each)")
    if not names:
        largest = max(int(labels.max()), 0)
        if largest >= MAX_CLASSES:
            problem = f"label {largest} with no array 'classes'"
            raise DataError(f"{path}: {problem} (expected below {MAX_CLASSES})")
        names = tuple(map(str, range(largest + 1)))
    labels = labels.astype(np.int64)
    check_labels(torch.from_numpy(labels), len(names), str(path))
    return labels, names


def encode_labels(
    names: Sequence[str], source: str, classes: Sequence[str] = ()
) -> tuple[Ints, tuple[str, ...]]:
    """Return class indices ``(N,)`` for labels given as texts, and the class names.

    Args:
        names: one label per example.
        source: start of error messages.
        classes: class names in order. If empty, all labels that occur, sorted by
            :func:`fedstill.core.name_normalization.sort_class_names`; if all are whole numbers, 1.0 equals 1.

    Raises:
        DataError: a label is empty, stands for a missing value (``nan``, ``NA``, ``none``), or is not a
            class.

    >>> encode_labels(["10", "9.0", "9"], "here")
    (array([1, 0, 0]), ('9', '10'))
    """
    labels = [normalize_name(text) for text in names]
    empty_texts = {*EMPTY_CELLS} - {text.lower() for text in classes}
    classes = normalize_class_names(classes, f"{source}: classes")
    if not classes:
        whole = {text: strip_decimal_zeros(text) for text in set(labels)}
        if all(parse_nonnegative_int(text) is not None for text in whole.values()):
            labels = [whole[text] for text in labels]
        classes = tuple(sort_class_names(set(labels)))
    class_index = {text: number for number, text in enumerate(classes)}
    for row, text in enumerate(labels):
        if text.lower() in empty_texts:
            shown = repr(text) if text else "empty"
            expected = "the name of a class, not a missing value"
            raise DataError(f"{source}: the label of example {row} is {shown} (expected {expected})")
        if text not in class_index:
            raise DataError(f"{source}: the label of example {row} is {unknown_name_text(text, classes)}")
    return np.array([class_index[text] for text in labels], dtype=np.int64), tuple(classes)


def are_whole_numbers(names: Sequence[str]) -> bool:
    """Return whether all texts are whole numbers from 0, in canonical form."""
    return all(str(parse_nonnegative_int(text)) == text for text in names)


def _finding_labels(
    path: Path, labels: Column, count: int, names: tuple[str, ...]
) -> tuple[Ints, tuple[str, ...]]:
    if labels.ndim != 2 or len(labels) != count or labels.dtype.kind not in "biu":
        form = f"{labels.dtype} of shape {labels.shape}"
        raise DataError(f"{path}: labels are {form} (expected whole numbers, a row for each image)")
    findings = labels.astype(np.int64)
    names = names or tuple(map(str, range(findings.shape[1])))
    if len(names) != findings.shape[1]:
        expected = f"one for each of {findings.shape[1]} labels"
        raise DataError(f"{path}: has {len(names)} classes (expected {expected})")
    invalid = np.argwhere(~np.isin(findings, (-1, 0, 1)))
    if len(invalid):
        row, column = invalid[0].tolist()
        position = f"example {row} has {findings[row, column]} in column {column} ({names[column]!r})"
        raise DataError(f"{path}: labels: {position} (expected 1, 0 and -1 (unknown))")
    return findings, names


def as_image_array(path: Path, arrays: Mapping[str, Column]) -> Images:
    """Return the array ``images`` as ``(N, C, H, W)``, uint8 or float32, without a copy if possible.

    Raises:
        DataError: another type or shape, or values outside [0, 1].
    """
    images = require_array(path, arrays, "images")
    if images.dtype != np.uint8 and images.dtype.kind != "f":
        raise DataError(f"{path}: images are {images.dtype} (expected uint8, or floats in [0, 1])")
    if images.ndim == 3:
        images = images[:, None]
    else:
        channels_last = images.ndim == 4 and 1 <= images.shape[3] <= 4
        channels_first = images.ndim == 4 and 1 <= images.shape[1] <= 4
        if channels_last == channels_first:  # neither, or ambiguous
            shapes = "(N, H, W), (N, H, W, C) or (N, C, H, W), with 1 to 4 channels, and H and W above 4"
            raise DataError(f"{path}: images are of shape {images.shape} (expected {shapes})")
        images = images.transpose(0, 3, 1, 2) if channels_last else images
    if images.dtype == np.uint8:
        require_full_scale(images, str(path))
        return images
    out_of_range = np.flatnonzero(~((images >= 0) & (images <= 1)).all(axis=(1, 2, 3)))  # NaN is bad too
    if len(out_of_range):
        example = images[out_of_range[0]]
        has_nan = np.isnan(example).any()
        content = "NaN" if has_nan else f"values from {example.min():.3g} to {example.max():.3g}"
        first = f"the first is image {out_of_range[0]}, which has {content}"
        problem = f"{len(out_of_range)} images have invalid pixels, {first}"
        raise DataError(f"{path}: {problem} (expected numbers from 0 to 1, or bytes (uint8))")
    return images.astype(np.float32)


def require_full_scale(pixels: npt.NDArray[Any], source: str) -> None:
    """Check that pixels in 0..255 use more than the values 0 and 1.

    Binary images, or images already divided by 255, are probably a mistake.

    Raises:
        DataError: the largest pixel is 1 or less, and above 0.
    """
    if 0 < pixels.max(initial=0) <= 1:
        hint = "multiply images of 0 and 1 by 255"
        raise DataError(f"{source}: no pixel is above 1 (expected pixels from 0 to 255; {hint})")


def require_array(path: Path, arrays: Mapping[str, Column], name: str) -> Column:
    """Return the array ``name``.

    Raises:
        DataError: there is no such array.
    """
    if name not in arrays:
        raise DataError(f"{path}: has no array {name!r}, only {', '.join(sorted(arrays)) or 'nothing'}")
    return arrays[name]


# Raised by numpy and zipfile for a file that is damaged, has another format, or holds a pickle.
NPZ_ERRORS = (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)

MEDMNIST_PARTS = ("train", "test", "val")  # in the order of their codes in "split"


def read_npz(path: Path) -> dict[str, Column]:
    """Read all arrays of an ``.npz``, by name.

    MedMNIST files, recognized by ``train_images``, become ``images``, ``labels`` and ``split``.

    Raises:
        DataError: the file cannot be read or holds Python objects.
    """
    arrays: dict[str, Column] = {}
    item = str(path)
    try:
        with path.open("rb") as stream:
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise DataError(f"{path}: holds a single array (expected an .npz with named arrays)")
            for name in file.files:
                item = f"{path}: array {name!r}"
                arrays[name] = np.asarray(file[name])
    except DataError:
        raise
    except NPZ_ERRORS as error:
        # numpy takes an unknown format for a pickle.
        reason = "Python objects or an unknown format; pickle is never read"
        raise DataError(
            f"{item} cannot be read ({reason if 'pickle' in str(error) else first_line(error)})"
        ) from error
    arrays = _normalize_array_names(path, arrays)
    return _merge_medmnist_parts(path, arrays) if "train_images" in arrays else arrays


def _normalize_array_names(path: Path, arrays: Mapping[str, Column]) -> dict[str, Column]:
    """Normalize the names of arrays, so that ``"split "`` is not ignored."""
    return dict(zip(normalize_class_names(arrays, f"{path}: arrays"), arrays.values(), strict=True))


def _merge_medmnist_parts(path: Path, arrays: dict[str, Column]) -> dict[str, Column]:
    """Concatenate the parts of a MedMNIST file, and add ``split`` if there are several.

    The validation part may be missing, and the test part too. All other arrays are kept.
    """
    parts = [part for part in MEDMNIST_PARTS if f"{part}_images" in arrays]
    if parts == ["train", "val"]:
        problem = "has val_images and no test_images"
        raise DataError(f"{path}: {problem} (expected train and test parts, and val next to them)")
    suffixes = {name: name.partition("_")[2] for name in arrays if name.partition("_")[0] in MEDMNIST_PARTS}
    merged = {name: array for name, array in arrays.items() if name not in suffixes}
    for suffix in dict.fromkeys(suffixes.values()):
        part_arrays = [require_array(path, arrays, f"{part}_{suffix}") for part in parts]
        for part, array in zip(parts, part_arrays, strict=True):
            count = len(arrays[f"{part}_images"])
            if array.shape[:1] != (count,) or array.shape[1:] != part_arrays[0].shape[1:]:
                expected = f"one for each of {count} images, of one shape in all parts"
                raise DataError(f"{path}: {part}_{suffix} is of shape {array.shape} (expected {expected})")
        merged[suffix] = np.concatenate(part_arrays)
    if len(parts) > 1:
        counts = [len(arrays[f"{part}_images"]) for part in parts]
        merged["split"] = np.repeat([MEDMNIST_PARTS.index(part) for part in parts], counts)
    return merged
