"""What a source holds, before it is divided or normalized: arrays by name, checked for what they teach.

Every form of files ends here: each reader gives arrays as an ``.npz`` has them, or a :class:`RawImages` itself. No
pickle is read: an ``.npz`` is opened with ``allow_pickle=False``, and an array of objects is an error.
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
from fedstill.core.names import (
    TEXTS,
    class_names,
    count_of,
    named_column,
    named_columns,
    ordered,
    plain,
    unknown_name,
    without_point,
)
from fedstill.core.registry import first_line
from fedstill.core.table_schema import EMPTY
from fedstill.core.text_format import more_such
from fedstill.data.images import encode_masks
from fedstill.data.stratified_sampling import Ints
from fedstill.tasks import Targets

Images = npt.NDArray[Any]  # (N, C, H, W), uint8 or float32 in [0, 1]

MAX_CLASSES = 65_536  # without names; a larger label is a patient's number, not a class


@dataclass(frozen=True, eq=False)
class RawImages:
    """Images and what was read beside them.

    Args:
        images: ``(N, C, H, W)``.
        labels: classes ``(N,)``; findings ``(N, C)`` of -1, 0 and 1; maps ``(N, H, W)``; nothing of images.
        test: 1 for testing, 2 for validation, 0 for training, ``(N,)``; None where the source has no split.
        columns: ``(N,)`` each.
        named: whether classes have names of their own, and not only numbers.
        names: of each image's file, ``(N,)``; None: images have numbers only.
        note: what a reader of results must know of how they were read.
        declared: whether the source says which classes there are; else they are counted from the largest
            label.

    Classes and columns are brought into the one form that names have (:mod:`fedstill.core.names`).

    Raises:
        DataError: two classes or two columns of one name.
    """

    images: Images
    labels: Ints
    classes: tuple[str, ...]
    split: Column | None = None
    columns: Mapping[str, Column] = field(default_factory=dict)
    has_class_names: bool = True
    names: Column | None = None
    note: str = ""
    declared: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", class_names(self.classes, "classes"))
        object.__setattr__(self, "columns", named_columns(self.columns))

    def require_every_class(self, what: str) -> None:
        """Refuse labels from which the number of classes cannot be told, as some class has no example.

        Raises:
            DataError: numbers without a list of the classes that do not begin at 0, or have gaps.
        """
        if self.declared or not len(gaps := np.setdiff1d(np.arange(len(self.classes)), self.labels)):
            return
        ends = f"labels are numbers from {self.labels.min()} to {self.labels.max()}"
        told = f"{ends}, and no example has label {gaps[0]}{more_such(len(gaps))}"
        allowed = "numbers from 0 up without gaps, or an array 'classes' with the name of each class"
        raise DataError(f"{what}: {told} (expected {allowed})")


def raw_images_from_arrays(
    path: Path, arrays: Mapping[str, Column], targets: Targets, *, gaps: bool = False
) -> RawImages:
    """Arrays by name, as :meth:`fedstill.data.ArrayData.arrays` gives them, checked for what they teach.

    Args:
        path: where they come from, for errors.
        targets: class, labels, map or image.
        gaps: as :func:`fedstill.data.images.encode_masks` takes it.

    Raises:
        DataError: an array is missing, or of another form.

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
    names, named, declared = _declared_classes(path, arrays), "classes" in arrays, True
    labels: Ints = np.zeros(count, dtype=np.int64)
    classes: tuple[str, ...] = ("image",)
    if targets == "map":
        masks = require_array(path, arrays, "masks")
        if masks.shape != (count, *images.shape[2:]):
            shapes = f"masks are {masks.shape} and images {images.shape}"
            raise DataError(f"{path}: {shapes} (expected one mask of its size for each image)")
        labels, classes = encode_masks(masks, f"{path}: masks", names, gaps=gaps)
    elif targets == "labels":
        labels, classes = _finding_labels(path, require_array(path, arrays, "labels"), count, names)
    elif targets == "class":
        labels, classes = _class_labels(path, require_array(path, arrays, "labels"), count, names)
        texts = arrays["labels"].dtype.kind in TEXTS
        # Classes that are called as they are numbered have no names of their own.
        named = texts or classes != tuple(map(str, range(len(classes))))
        declared = texts or bool(names)
    test = None
    if "split" in arrays:
        test = arrays["split"]
        if test.shape != (count,) or not np.isin(test, (0, 1, 2)).all():
            told = f"split is not 0 (train), 1 (test) or 2 (validation) for each of the {count} images"
            raise DataError(f"{path}: {told}")
    for name in ("patient", "site"):  # passed over, they would let one patient into both parts
        if name in arrays and arrays[name].shape != (count,):
            raise DataError(
                f"{path}: {name} is {arrays[name].shape} (expected one for each of {count} images)"
            )
    known = {"images", "masks", "labels", "classes", "split", "offsets"}
    columns = {name: a for name, a in arrays.items() if name not in known and a.shape == (count,)}
    return RawImages(images, labels, classes, test, columns, named, declared=declared)


def _declared_classes(path: Path, arrays: Mapping[str, Column]) -> tuple[str, ...]:
    names = arrays.get("classes", np.array([], dtype=np.str_))
    if names.ndim != 1 or names.dtype.kind not in TEXTS:
        form = f"{names.dtype} of shape {names.shape}"
        raise DataError(f"{path}: classes are {form} (expected one text per class)")
    return class_names(map(str, named_column(names)), f"{path}: classes")


def _class_labels(
    path: Path, labels: Column, count: int, names: tuple[str, ...]
) -> tuple[Ints, tuple[str, ...]]:
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]  # as MedMNIST's are
    if labels.ndim == 1 and labels.dtype.kind in TEXTS:
        labels, names = encode_labels(named_column(labels).tolist(), str(path), names)
    if labels.ndim != 1 or labels.dtype.kind not in "biu":
        form = f"{labels.dtype} of shape {labels.shape}"
        raise DataError(f"{path}: labels are {form} (expected one name or whole number per image)")
    if len(labels) != count:
        raise DataError(f"{path}: {count} images and {len(labels)} labels (expected one label each)")
    if not names:
        largest = max(int(labels.max()), 0)
        if largest >= MAX_CLASSES:
            told = f"label {largest} with no array 'classes'"
            raise DataError(f"{path}: {told} (expected below {MAX_CLASSES})")
        names = tuple(map(str, range(largest + 1)))
    labels = labels.astype(np.int64)
    check_labels(torch.from_numpy(labels), len(names), str(path))
    return labels, names


def encode_labels(
    names: Sequence[str], what: str, classes: Sequence[str] = ()
) -> tuple[Ints, tuple[str, ...]]:
    """Labels given as texts: their numbers, and the classes in order.

    Args:
        what: where they come from, for errors.
        classes: which there are; without, all that occur, as :func:`fedstill.core.names.ordered` has them. If
            all are whole numbers, 1.0 is 1.

    Raises:
        DataError: a label that is empty or stands for nothing (``nan``, ``NA``, ``none``) and is none of
            ``classes``, or another that is none of them.

    >>> encode_labels(["10", "9.0", "9"], "here")
    (array([1, 0, 0]), ('9', '10'))
    """
    labels = [plain(each) for each in names]
    missing = {*EMPTY} - {each.lower() for each in classes}
    classes = class_names(classes, f"{what}: classes")
    if not classes:
        whole = {each: without_point(each) for each in set(labels)}
        if all(count_of(each) is not None for each in whole.values()):
            labels = [whole[each] for each in labels]
        classes = tuple(ordered(set(labels)))
    place = {each: number for number, each in enumerate(classes)}
    for row, each in enumerate(labels):
        if each.lower() in missing:
            found = repr(each) if each else "empty"
            allowed = "the name of a class, which is none of those that stand for an empty cell"
            raise DataError(f"{what}: the label of example {row} is {found} (expected {allowed})")
        if each not in place:
            raise DataError(f"{what}: the label of example {row} is {unknown_name(each, classes)}")
    return np.array([place[each] for each in labels], dtype=np.int64), tuple(classes)


def are_whole_numbers(names: Sequence[str]) -> bool:
    """Whether texts are whole numbers from 0, as one writes them."""
    return all(str(count_of(each)) == each for each in names)


def _finding_labels(
    path: Path, labels: Column, count: int, names: tuple[str, ...]
) -> tuple[Ints, tuple[str, ...]]:
    if labels.ndim != 2 or len(labels) != count or labels.dtype.kind not in "biu":
        form = f"{labels.dtype} of shape {labels.shape}"
        raise DataError(f"{path}: labels are {form} (expected whole numbers, a row for each image)")
    found = labels.astype(np.int64)
    names = names or tuple(map(str, range(found.shape[1])))
    if len(names) != found.shape[1]:
        told = f"has {len(names)} classes: allowed is one for each of {found.shape[1]} labels"
        raise DataError(f"{path}: {told}")
    wrong = np.argwhere(~np.isin(found, (-1, 0, 1)))
    if len(wrong):
        row, column = wrong[0].tolist()
        where = f"example {row} has {found[row, column]} in column {column} ({names[column]!r})"
        raise DataError(f"{path}: labels: {where} (expected 1, 0 and -1 (unknown))")
    return found, names


def as_image_array(path: Path, arrays: Mapping[str, Column]) -> Images:
    """The array ``images`` as ``(N, C, H, W)``, uint8 or float32, without a copy where that can be."""
    images = require_array(path, arrays, "images")
    if images.dtype != np.uint8 and images.dtype.kind != "f":
        raise DataError(f"{path}: images are {images.dtype} (expected uint8, or floats in [0, 1])")
    if images.ndim == 3:
        images = images[:, None]
    else:
        last = images.ndim == 4 and 1 <= images.shape[3] <= 4
        first = images.ndim == 4 and 1 <= images.shape[1] <= 4
        if last == first:  # neither, or it cannot be told
            told = f"images are of shape {images.shape}: allowed is (N, H, W), (N, H, W, C) or (N, C, H, W)"
            raise DataError(f"{path}: {told} with 1 to 4 channels, and H and W above 4")
        images = images.transpose(0, 3, 1, 2) if last else images
    if images.dtype == np.uint8:
        require_full_scale(images, str(path))
        return images
    bad = np.flatnonzero(~((images >= 0) & (images <= 1)).all(axis=(1, 2, 3)))  # NaN is bad too
    if len(bad):
        first = images[bad[0]]
        what = "NaN" if np.isnan(first).any() else f"values from {first.min():.3g} to {first.max():.3g}"
        told = f"{len(bad)} images are no pictures, the first is image {bad[0]}, which has {what}"
        raise DataError(f"{path}: {told} (expected numbers from 0 to 1, or bytes (uint8))")
    return images.astype(np.float32)


def require_full_scale(pixels: npt.NDArray[Any], what: str) -> None:
    """Refuse pixels from 0 to 255 of which none is above 1: binary ones, or ones already divided by 255.

    Raises:
        DataError: there are no others.
    """
    if 0 < pixels.max(initial=0) <= 1:
        hint = "of pictures of 0 and 1, times 255"
        raise DataError(f"{what}: no pixel is above 1 (expected pixels from 0 to 255; {hint})")


def require_array(path: Path, arrays: Mapping[str, Column], name: str) -> Column:
    """One of some arrays; a DataError if there is none of that name."""
    if name not in arrays:
        raise DataError(f"{path}: has no array {name!r}, only {', '.join(sorted(arrays)) or 'nothing'}")
    return arrays[name]


# What numpy and zipfile raise for a file that is damaged, of another format, or holds a pickle.
NPZ_ERRORS = (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)

MEDMNIST_PARTS = ("train", "test", "val")  # parts of its files, as "split" numbers them


def read_npz(path: Path) -> dict[str, Column]:
    """All arrays of an ``.npz``, by name.

    The files of MedMNIST, known by ``train_images``, become ``images``, ``labels`` and ``split``.

    Raises:
        DataError: a file that cannot be read or holds Python objects.
    """
    arrays: dict[str, Column] = {}
    what = str(path)
    try:
        with path.open("rb") as stream:
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise DataError(f"{path}: holds a single array (expected an .npz with named arrays)")
            for name in file.files:
                what = f"{path}: array {name!r}"
                arrays[name] = np.asarray(file[name])
    except DataError:
        raise
    except NPZ_ERRORS as error:
        # numpy takes a file that it does not know for a pickle.
        unknown = "Python objects or an unknown format; pickle is never read"
        raise DataError(
            f"{what} cannot be read ({unknown if 'pickle' in str(error) else first_line(error)})"
        ) from error
    arrays = _normalize_array_names(path, arrays)
    return _merge_medmnist_parts(path, arrays) if "train_images" in arrays else arrays


def _normalize_array_names(path: Path, arrays: Mapping[str, Column]) -> dict[str, Column]:
    """Arrays by the one form of their names: ``"split "`` is the split, and passed over it would be lost."""
    return dict(zip(class_names(arrays, f"{path}: arrays"), arrays.values(), strict=True))


def _merge_medmnist_parts(path: Path, arrays: dict[str, Column]) -> dict[str, Column]:
    """The parts of MedMNIST's files in one, with ``split`` where there are several; no other array is lost.

    The validation part may be missing, and the test part, too, which is then drawn.
    """
    parts = [part for part in MEDMNIST_PARTS if f"{part}_images" in arrays]
    if parts == ["train", "val"]:
        missing = "has val_images and no test_images"
        raise DataError(f"{path}: {missing} (expected train and test parts, and val next to them)")
    of_parts = {name: name.partition("_")[2] for name in arrays if name.partition("_")[0] in MEDMNIST_PARTS}
    joined = {name: array for name, array in arrays.items() if name not in of_parts}
    for kind in dict.fromkeys(of_parts.values()):
        some = [require_array(path, arrays, f"{part}_{kind}") for part in parts]
        for part, array in zip(parts, some, strict=True):
            count = len(arrays[f"{part}_images"])
            if array.shape[:1] != (count,) or array.shape[1:] != some[0].shape[1:]:
                allowed = f"one for each of {count} images, of one shape in all parts"
                raise DataError(f"{path}: {part}_{kind} is of shape {array.shape} (expected {allowed})")
        joined[kind] = np.concatenate(some)
    if len(parts) > 1:
        counts = [len(arrays[f"{part}_images"]) for part in parts]
        joined["split"] = np.repeat([MEDMNIST_PARTS.index(part) for part in parts], counts)
    return joined
