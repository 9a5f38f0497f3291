"""Tables of images: a csv of pixels or image files with classes, or of image files with findings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedstill.core.errors import DataError
from fedstill.core.imports import first_line
from fedstill.data.images import stacked
from fedstill.data.raw import Images, Raw, by_name
from fedstill.data.tables import column_of, read_csv, rows, told_part
from fedstill.data.units import Ints

KNOWN = ("patient", "site", "split")
WHITE = 255  # of pixels; black is 0
NOTHING = "No Finding"
_VALUES = {"1": 1, "1.0": 1, "0": 0, "0.0": 0, "-1": -1, "-1.0": -1, "": -1}


@dataclass(frozen=True)
class Columns:
    """What the columns of a table mean.

    Args:
        label: the column of classes, or of all findings divided by ``|``.
        image: the column of image files, from the folder of the csv; empty: of classes all other columns are
            pixels, of findings it is called image.
        group: a column that is neither pixels nor a finding; empty: none.
    """

    label: str = "label"
    image: str = ""
    group: str = ""


# --- classes ------------------------------------------------------------------------------------------


def read_classes(path: Path, columns: Columns, shape: tuple[int, ...] = ()) -> Raw:
    """Images of classes: a column of labels, and one of image files or some of pixels of a ``shape``."""
    found = rows(path)
    _, header = next(found)
    label = column_of(header, columns.label, "data.label", path)
    image = column_of(header, columns.image, "data.image", path) if columns.image else None
    group = column_of(header, columns.group, "data.group", path) if columns.group else None
    rest = [column for column in range(len(header)) if column not in (label, group)]
    labels: list[str] = []
    groups: list[str] = []
    files: list[str] = []
    pixels: list[npt.NDArray[np.float32]] = []
    for line, row in found:  # pixels become numbers row by row: as texts they would take far more memory
        labels.append(row[label])
        groups.append("" if group is None else row[group])
        if image is not None:
            files.append(row[image])
            continue
        try:
            pixels.append(np.array([row[column] for column in rest], dtype=np.float32))
        except ValueError as error:
            raise DataError(f"{path}: line {line}: {first_line(error)}: allowed are numbers") from error
    numbers, classes = by_name(labels)
    images = _files(path, files) if image is not None else _pixels(np.stack(pixels), path, shape)
    return Raw(images, numbers, classes, columns={columns.group: np.array(groups)} if columns.group else {})


def _pixels(table: npt.NDArray[np.float32], path: Path, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Rows of pixels as images from 0 to 1: ``(N, C * H * W)`` to ``(N, C, H, W)``."""
    count = table.shape[1]
    if not shape or np.prod(shape) != count:
        side = round(count**0.5)
        if count == 0 or side**2 != count:
            raise DataError(f"{path}: has {count} pixels a line: allowed is a square number of them")
        shape = (1, side, side)
    bad = np.flatnonzero(~((table >= 0) & (table <= WHITE)).all(axis=1))
    if len(bad):
        told = f"{len(bad)} examples hold NaN or values outside 0..{WHITE}"
        raise DataError(f"{path}: {told}, the first is example {bad[0]}")
    if 0 < table.max() <= 1:
        raise DataError(f"{path}: no value is above 1: allowed are pixels from 0 to {WHITE}")
    return (table / np.float32(WHITE)).reshape(-1, *shape)


# --- findings -----------------------------------------------------------------------------------------


def read_findings(
    path: Path,
    columns: Columns | None = None,
    classes: Sequence[str] = (),
    size: int = 0,
    counted: Callable[[int], None] = lambda count: None,
) -> Raw:
    """Images and findings that a csv names.

    Findings stand in a column each, with 1, 0, and -1 or nothing where it is not known, or all in one column
    divided by ``|``, with "No Finding" for none. ``classes`` are the findings wanted, in order; those without
    a column are unknown everywhere. Other arguments as :func:`fedstill.data.formats.read`.
    """
    means = columns or Columns(label="")
    image = means.image or "image"
    table = read_csv(path, image)
    counted(len(table[image]))
    listed = means.label if means.label in table else ""
    aside = {image, listed, means.group, *KNOWN}
    if listed:
        labels, names = _divided(table[listed], tuple(classes), path)
    else:
        found = [name for name in table if name not in aside]
        names = tuple(classes) or tuple(found)
        if not set(names) & set(found):
            raise DataError(f"{path}: has columns {', '.join(table)}: allowed is one for a finding")
        unknown = ["-1"] * len(table[image])
        labels = np.stack([_values(table.get(name, unknown), name, path) for name in names], axis=1)
    test = told_part(table, path)
    known = {name: np.array(cells) for name, cells in table.items() if name in aside - {image, listed}}
    return Raw(_files(path, table[image], size), labels, names, test, known)


def _divided(cells: Sequence[str], classes: tuple[str, ...], path: Path) -> tuple[Ints, tuple[str, ...]]:
    sets = [{name.strip() for name in cell.split("|")} - {NOTHING, ""} for cell in cells]
    met = sorted(set().union(*sets))
    names = classes or tuple(met)
    unknown = next((name for name in met if name not in names), None)
    if unknown is not None:
        raise DataError(f"{path}: has a finding {unknown!r}: allowed are {', '.join(names)}")
    if not names:
        raise DataError(f"{path}: has no finding at all: allowed is one or more")
    return np.array([[int(name in found) for name in names] for found in sets], dtype=np.int64), names


def _values(cells: Sequence[str], name: str, path: Path) -> Ints:
    wrong = next((cell for cell in cells if cell not in _VALUES), None)
    if wrong is not None:
        told = f"finding {name!r} has {wrong!r}"
        raise DataError(f"{path}: {told}: allowed are 1, 0, and -1 or nothing (unknown)")
    return np.array([_VALUES[cell] for cell in cells], dtype=np.int64)


def _files(path: Path, names: Sequence[str], size: int = 0) -> Images:
    """The image files that a csv names, of one form: ``(N, C, H, W)``."""
    return stacked(((path.parent / name, f"{path}: image {name!r}") for name in names), size)
