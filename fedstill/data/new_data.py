"""Data that were not a run's own, as its student takes them: to be measured on, or to be asked about.

They are read as a node's owner's are, into the spec that the run had: classes by name, images of its form, a
table by its schema. Nothing is drawn and nothing left out, whatever a source marks as its test part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstill.core.dataset import Cases, Column, TensorData
from fedstill.core.errors import ArgumentError, DataError
from fedstill.core.names import plain
from fedstill.data import text
from fedstill.data.config import DATA, named
from fedstill.data.images import images_below, stacked
from fedstill.data.input_spec import InputSpec
from fedstill.data.loading import PATIENT, SITE, check_sites, load, taught, with_channels
from fedstill.data.node_data import inputs_in, labels_in
from fedstill.data.object_images import cases_of, cut, read_pictures
from fedstill.data.raw import Images, image_array, read_npz
from fedstill.data.stratified_sampling import require_told, require_units
from fedstill.data.table_files import Columns, column_of, pixel_images, pixel_row, read_csv
from fedstill.data.tables import cells_of, read_folder, read_rows
from fedstill.data.user_data import UserFiles, form_of, located, read


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How new data are read.

    Args:
        root: the folder that paths count from; empty: this one.
        fit: bring images of another size or number of channels into the student's form.
        label, image: columns of a csv, as :class:`fedstill.data.table_files.Columns` has them.
        channels: which of the images'; empty: all.
        slices: of each NIfTI volume at most; 0: all.
        sites: only examples of these; empty: all.
        words: how words become token ids, as in the run.
    """

    root: str = ""
    fit: bool = False
    label: str = "label"
    image: str = ""
    channels: tuple[int, ...] = ()
    slices: int = 0
    sites: tuple[str, ...] = ()
    words: str = ""


def measured(name: str, spec: InputSpec, how: Reading) -> TensorData:
    """Examples and what is true of them, in a student's spec: all of a path, or a named data set's test part.

    Their cases are patients or pictures, and of the sites that columns ``site`` and ``patient`` say; a folder
    of tables has a site a table.

    Raises:
        ArgumentError: no such data, or a site or channels that these have not.
        DataError: they cannot be read, or are of another spec.
    """
    if name in DATA or ":" in name:
        return _named(name, spec, how)
    config = UserFiles(name=name, root=how.root)
    place, targets = located(config, spec.task.called, spec.task.targets), spec.task.targets
    what = f"data {name!r}"
    columns: Mapping[str, Column] = {}
    if targets == "texts":
        source = text.read_table(place)
        labels = torch.from_numpy(labels_in(source, spec, what))
        ids = text.ids_of(source.texts, spec.shape[0], spec.vocabulary, how.words, what)
        data, columns = TensorData(ids, labels), source.columns
    elif spec.task.makes.form == "rows":
        table = (read_folder if place.is_dir() else read_rows)(place, spec.schema)
        data, columns = table.data, table.columns
    elif targets == "instances":
        all_of = read_pictures(place)
        sites = check_sites(how.sites, sorted({one.site for one in all_of if one.site}))
        pictures = [one for one in all_of if not sites or one.site in sites]
        cases = cases_of(pictures, spec.shape[1])
        return _checked(cut(pictures, cases, np.arange(len(cases.of)), spec.shape[1]), spec, what)
    else:
        fitted = how.fit and spec.shape[1] == spec.shape[2]
        raw = read(
            place,
            form_of(place, targets),
            targets,
            size=spec.shape[1] if fitted else 0,
            slices=how.slices,
            gaps=True,
            columns=Columns(how.label, how.image) if targets == "class" or how.label != "label" else None,
            classes=spec.classes if targets == "labels" else (),
            shape=spec.shape,
        )
        labels = torch.from_numpy(labels_in(raw, spec, what))
        images = _pixels(raw.images, spec, how, what)
        inputs, outputs = taught(images, labels, spec.task)
        data, columns = TensorData(inputs, outputs), raw.columns
    return _checked(_of_sites(data, columns, how.sites), spec, what)


def _checked(data: TensorData, spec: InputSpec, what: str) -> TensorData:
    spec.make_task().check(data, what)
    return data


def _named(name: str, spec: InputSpec, how: Reading) -> TensorData:
    """The test part of a data set that has a name."""
    data = load(named(name, **({"root": how.root} if how.root else {})), spec.task, train_needed=False)
    same = (data.classes, tuple(data.test.inputs.shape[1:])) == (spec.classes, spec.shape)
    if not same or (data.mean, data.std, data.vocabulary) != (spec.mean, spec.std, spec.vocabulary):
        told = "classes, shape or normalization are not those of the student"
        raise DataError(f"data {name!r}: {told} (expected a path to data that can be brought into them)")
    return _of_sites(data.test, data.test_columns, how.sites)


def _of_sites(data: TensorData, columns: Mapping[str, Column], sites: tuple[str, ...]) -> TensorData:
    """Examples of some sites, or all, with their cases, as they have them or as columns tell: patients, or
    examples of a site."""
    if (known := data.cases) is not None:
        sites = check_sites(sites, sorted({site for site in known.sites if site}))
        rows = [known.of_site(site) for site in sites]
        return data.subset(torch.cat(rows).sort().values) if sites else data
    places = columns.get(SITE)
    here = [] if places is None else sorted(set(map(str, places.tolist())))
    sites = check_sites(sites, here)
    each = np.arange(len(data))
    owners = columns.get(PATIENT, each if places is not None else None)
    if owners is None:
        return data
    for column in columns.keys() & {PATIENT, SITE}:
        (require_units if column == PATIENT else require_told)(column, columns[column])
    cases = Cases.by_column(owners, places)
    chosen = each if places is None or not sites else np.flatnonzero(np.isin(places.astype(str), sites))
    whole = replace(data, cases=cases, groups=cases.of if PATIENT in columns else None)
    return whole if len(chosen) == len(data) else whole.subset(torch.from_numpy(chosen))


# --- to be asked about ------------------------------------------------------------------------------------


def unlabeled(name: str, spec: InputSpec, how: Reading) -> tuple[list[str], Any]:
    """Examples of which nothing need be known: what each is called, and all of them as a student takes them.

    Images are an ``.npz`` with ``images``, an image file, a folder of such with all that lies below it, or a
    csv that names some, or has their pixels; texts are the column ``text`` of a csv, and rows the schema's
    columns, beside which a csv may have others.

    Returns:
        N names, and pixels ``(N, C, H, W)`` from 0 to 1, N texts, or cells by column.

    Raises:
        ArgumentError: channels or a column that are not there.
        DataError: there is no such file, or it cannot be used.
    """
    place, what, form = Path(how.root, name).expanduser(), f"data {name!r}", spec.task.makes.form
    if not name:
        raise ArgumentError("data", name, "a path to a file or folder")
    if not place.exists():
        raise DataError(f"{what}: there is no {place}")
    if form == "rows":
        cells, _ = cells_of(place)
        return _numbered(len(next(iter(cells.values())))), cells
    if form == "texts":
        texts = read_csv(place, "text")["text"]
        return _numbered(len(texts)), texts
    names, images = _images(place, spec, how)
    unit = replace(spec, mean=(0.0,) * len(spec.mean), std=(1.0,) * len(spec.std))
    return names, torch.cat([_pixels(some, unit, how, what) for some in images])


def _pixels(images: Images, spec: InputSpec, how: Reading, what: str) -> torch.Tensor:
    return inputs_in(with_channels(images, how.channels), how.fit, spec, what)


def _images(place: Path, spec: InputSpec, how: Reading) -> tuple[list[str], Sequence[Images]]:
    """Names, and stacks of images of one form each."""
    if place.suffix == ".npz":
        images = image_array(place, read_npz(place))
        return _numbered(len(images)), [images]
    if place.suffix != ".csv":
        found = [place] if place.is_file() else images_below(place)
        names = [str(file.relative_to(place)) if place.is_dir() else file.name for file in found]
        return names, _decoded([(file, str(file)) for file in found], spec, how)
    table = read_csv(place)
    image = plain(how.image) or ("image" if "image" in table else "")
    if image:
        column_of(list(table), image, "--image", place)
        files = [(place.parent / name, f"{place}: image {name!r}") for name in table[image]]
        return table[image], _decoded(files, spec, how)
    rows = zip(*(column for name, column in table.items() if name != plain(how.label)), strict=True)
    hint = ", named by --image"
    pixels = np.stack([pixel_row(row, f"{place}: row {at}", hint) for at, row in enumerate(rows, 1)])
    return _numbered(len(pixels)), [pixel_images(pixels, place, spec.shape)]


def _decoded(files: Sequence[tuple[Path, str]], spec: InputSpec, how: Reading) -> list[Images]:
    """Image files, one by one where they are fitted, and brought to a size as those of the task are."""
    if not how.fit:
        return [stacked(files)]
    return [stacked([each]) for each in files]


def _numbered(count: int) -> list[str]:
    return [str(number) for number in range(count)]
