"""Findings of images, any number of which an image may have, from a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedstill.core.errors import DataError
from fedstill.data.images import decoded
from fedstill.data.packs import Images, Raw
from fedstill.data.rasters import resized
from fedstill.data.tables import parts, read_csv

KNOWN = ("patient", "site", "split")
NOTHING = "No Finding"
_VALUES = {"1": 1, "1.0": 1, "0": 0, "0.0": 0, "-1": -1, "-1.0": -1, "": -1}


def read_findings(
    path: Path,
    *,
    image: str = "image",
    listed: str = "",
    others: Sequence[str] = (),
    classes: Sequence[str] = (),
    size: int = 0,
) -> Raw:
    """Images and findings that a csv names.

    Findings stand in a column each, with 1, 0, and -1 or nothing where it is not known, or all in one column
    divided by ``|``, with "No Finding" for none.

    Args:
        path: of the csv.
        image: the column of image files, from the folder of the csv.
        listed: the one column of all findings; empty: a column each.
        others: columns that are no findings, beside patient, site and split.
        classes: names of the findings wanted, in order; those that have no column are unknown everywhere.
            Empty: all that there are.
        size: height and width of the images; 0: as they are, all alike.

    Raises:
        DataError: it cannot be read, a column is missing, a cell is of another form, an unknown finding, or
            images of different sizes.
    """
    table = read_csv(path)
    for name in (image, *((listed,) if listed else ())):
        if name not in table:
            raise DataError(f"{path}: has no column {name!r}, only {', '.join(table)}")
    aside = {image, listed, *KNOWN, *others}
    if listed:
        labels, names = _divided(table[listed], tuple(classes), path)
    else:
        found = [name for name in table if name not in aside]
        names = tuple(classes) or tuple(found)
        if not set(names) & set(found):
            raise DataError(f"{path}: has columns {', '.join(table)}: allowed is one for a finding")
        unknown = ["-1"] * len(table[image])
        labels = np.stack([_values(table.get(name, unknown), name, path) for name in names], axis=1)
    test = parts(table["split"], path) if "split" in table else None
    columns = {
        name: np.array(cells) for name, cells in table.items() if name in aside - {image, listed, "split"}
    }
    return Raw(_images(path, table[image], size), labels, names, test, columns)


def _divided(
    cells: Sequence[str], classes: tuple[str, ...], path: Path
) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    sets = [{name.strip() for name in cell.split("|")} - {NOTHING, ""} for cell in cells]
    met = sorted(set().union(*sets))
    names = classes or tuple(met)
    unknown = next((name for name in met if name not in names), None)
    if unknown is not None:
        raise DataError(f"{path}: has a finding {unknown!r}: allowed are {', '.join(names)}")
    if not names:
        raise DataError(f"{path}: has no finding at all: allowed is one or more")
    return np.array([[int(name in found) for name in names] for found in sets], dtype=np.int64), names


def _values(cells: Sequence[str], name: str, path: Path) -> npt.NDArray[np.int64]:
    wrong = next((cell for cell in cells if cell not in _VALUES), None)
    if wrong is not None:
        raise DataError(
            f"{path}: finding {name!r} has {wrong!r}: allowed are 1, 0, and -1 or nothing (unknown)"
        )
    return np.array([_VALUES[cell] for cell in cells], dtype=np.int64)


def _images(path: Path, files: Sequence[str], size: int) -> Images:
    images: list[Images] = []
    for name in files:
        image: Images = decoded(path.parent / name, f"{path}: image {name!r}")
        if size:
            image = resized(image[None], size, size)[0]
        if images and image.shape != images[0].shape:
            sizes = " and ".join(" x ".join(map(str, one.shape)) for one in (image, images[0]))
            raise DataError(
                f"{path}: images {name!r} and {files[0]!r} are {sizes}: allowed is one form for all"
            )
        images.append(image)
    return np.stack(images)
