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

from fedstill.core.dataset import CaseIndex, Column, TensorData
from fedstill.core.errors import ArgumentError, DataError
from fedstill.core.names import plain
from fedstill.data import text
from fedstill.data.config import DATA, make_data_config
from fedstill.data.images import list_images_recursively, read_image_stack
from fedstill.data.input_spec import InputSpec
from fedstill.data.loading import PATIENT, SITE, check_sites, load, make_task_tensors, select_channels
from fedstill.data.node_data import map_images_to_spec, map_labels_to_spec
from fedstill.data.object_images import cut_patches, make_patch_cases, read_instance_images
from fedstill.data.raw import Images, as_image_array, read_npz
from fedstill.data.stratified_sampling import require_no_gaps, require_unit_names
from fedstill.data.table_files import CsvColumns, find_column, parse_pixel_row, read_csv, reshape_pixel_rows
from fedstill.data.tables import read_cells, read_rows, read_table_folder
from fedstill.data.user_data import UserFiles, detect_format, find_data, read_raw_images


@dataclass(frozen=True, kw_only=True)
class NewDataOptions:
    """How new data are read.

    Args:
        root: the folder that paths count from; empty: this one.
        fit: bring images of another size or number of channels into the student's form.
        label, image: columns of a csv, as :class:`fedstill.data.table_files.CsvColumns` has them.
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


def load_labeled(name: str, spec: InputSpec, how: NewDataOptions) -> TensorData:
    """Examples and what is true of them, in a student's spec: all of a path, or a named data set's test part.

    Their cases are patients or pictures, and of the sites that columns ``site`` and ``patient`` say; a folder
    of tables has a site a table.

    Raises:
        ArgumentError: no such data, or a site or channels that these have not.
        DataError: they cannot be read, or are of another spec.
    """
    if name in DATA or ":" in name:
        return _load_named(name, spec, how)
    config = UserFiles(name=name, root=how.root)
    place, targets = find_data(config, spec.task.called, spec.task.targets), spec.task.targets
    what = f"data {name!r}"
    columns: Mapping[str, Column] = {}
    if targets == "texts":
        source = text.read_labeled_texts(place)
        labels = torch.from_numpy(map_labels_to_spec(source, spec, what))
        ids = text.encode_for_vocabulary(source.texts, spec.shape[0], spec.vocabulary, how.words, what)
        data, columns = TensorData(ids, labels), source.columns
    elif spec.task.task_class.form == "rows":
        table = (read_table_folder if place.is_dir() else read_rows)(place, spec.schema)
        data, columns = table.data, table.columns
    elif targets == "instances":
        all_of = read_instance_images(place)
        sites = check_sites(how.sites, sorted({one.site for one in all_of if one.site}))
        pictures = [one for one in all_of if not sites or one.site in sites]
        cases = make_patch_cases(pictures, spec.shape[1])
        return _check(cut_patches(pictures, cases, np.arange(len(cases.case_ids)), spec.shape[1]), spec, what)
    else:
        fitted = how.fit and spec.shape[1] == spec.shape[2]
        raw = read_raw_images(
            place,
            detect_format(place, targets),
            targets,
            size=spec.shape[1] if fitted else 0,
            slices=how.slices,
            gaps=True,
            columns=CsvColumns(how.label, how.image) if targets == "class" or how.label != "label" else None,
            classes=spec.classes if targets == "labels" else (),
            shape=spec.shape,
        )
        labels = torch.from_numpy(map_labels_to_spec(raw, spec, what))
        images = _map_pixels(raw.images, spec, how, what)
        inputs, outputs = make_task_tensors(images, labels, spec.task)
        data, columns = TensorData(inputs, outputs), raw.columns
    return _check(_select_sites(data, columns, how.sites), spec, what)


def _check(data: TensorData, spec: InputSpec, what: str) -> TensorData:
    spec.make_task().check(data, what)
    return data


def _load_named(name: str, spec: InputSpec, how: NewDataOptions) -> TensorData:
    """The test part of a data set that has a name."""
    data = load(
        make_data_config(name, **({"root": how.root} if how.root else {})), spec.task, train_needed=False
    )
    same = (data.classes, tuple(data.test.inputs.shape[1:])) == (spec.classes, spec.shape)
    if not same or (data.mean, data.std, data.vocabulary) != (spec.mean, spec.std, spec.vocabulary):
        told = "classes, shape or normalization are not those of the student"
        raise DataError(f"data {name!r}: {told} (expected a path to data that can be brought into them)")
    return _select_sites(data.test, data.test_columns, how.sites)


def _select_sites(data: TensorData, columns: Mapping[str, Column], sites: tuple[str, ...]) -> TensorData:
    """Examples of some sites, or all, with their cases, as they have them or as columns tell: patients, or
    examples of a site."""
    if (known := data.cases) is not None:
        sites = check_sites(sites, sorted({site for site in known.sites if site}))
        rows = [known.examples_from_site(site) for site in sites]
        return data.subset(torch.cat(rows).sort().values) if sites else data
    places = columns.get(SITE)
    here = [] if places is None else sorted(set(map(str, places.tolist())))
    sites = check_sites(sites, here)
    each = np.arange(len(data))
    owners = columns.get(PATIENT, each if places is not None else None)
    if owners is None:
        return data
    for column in columns.keys() & {PATIENT, SITE}:
        (require_unit_names if column == PATIENT else require_no_gaps)(column, columns[column])
    cases = CaseIndex.from_columns(owners, places)
    chosen = each if places is None or not sites else np.flatnonzero(np.isin(places.astype(str), sites))
    whole = replace(data, cases=cases, groups=cases.case_ids if PATIENT in columns else None)
    return whole if len(chosen) == len(data) else whole.subset(torch.from_numpy(chosen))


# --- to be asked about ------------------------------------------------------------------------------------


def load_unlabeled(name: str, spec: InputSpec, how: NewDataOptions) -> tuple[list[str], Any]:
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
    place, what, form = Path(how.root, name).expanduser(), f"data {name!r}", spec.task.task_class.form
    if not name:
        raise ArgumentError("data", name, "a path to a file or folder")
    if not place.exists():
        raise DataError(f"{what}: there is no {place}")
    if form == "rows":
        cells, _ = read_cells(place)
        return _row_numbers(len(next(iter(cells.values())))), cells
    if form == "texts":
        texts = read_csv(place, "text")["text"]
        return _row_numbers(len(texts)), texts
    names, images = _read_images(place, spec, how)
    unit = replace(spec, mean=(0.0,) * len(spec.mean), std=(1.0,) * len(spec.std))
    return names, torch.cat([_map_pixels(some, unit, how, what) for some in images])


def _map_pixels(images: Images, spec: InputSpec, how: NewDataOptions, what: str) -> torch.Tensor:
    return map_images_to_spec(select_channels(images, how.channels), how.fit, spec, what)


def _read_images(place: Path, spec: InputSpec, how: NewDataOptions) -> tuple[list[str], Sequence[Images]]:
    """Names, and stacks of images of one form each."""
    if place.suffix == ".npz":
        images = as_image_array(place, read_npz(place))
        return _row_numbers(len(images)), [images]
    if place.suffix != ".csv":
        found = [place] if place.is_file() else list_images_recursively(place)
        names = [str(file.relative_to(place)) if place.is_dir() else file.name for file in found]
        return names, _decode_files([(file, str(file)) for file in found], spec, how)
    table = read_csv(place)
    image = plain(how.image) or ("image" if "image" in table else "")
    if image:
        find_column(list(table), image, "--image", place)
        files = [(place.parent / name, f"{place}: image {name!r}") for name in table[image]]
        return table[image], _decode_files(files, spec, how)
    rows = zip(*(column for name, column in table.items() if name != plain(how.label)), strict=True)
    hint = ", named by --image"
    pixels = np.stack([parse_pixel_row(row, f"{place}: row {at}", hint) for at, row in enumerate(rows, 1)])
    return _row_numbers(len(pixels)), [reshape_pixel_rows(pixels, place, spec.shape)]


def _decode_files(files: Sequence[tuple[Path, str]], spec: InputSpec, how: NewDataOptions) -> list[Images]:
    """Image files, one by one where they are fitted, and brought to a size as those of the task are."""
    if not how.fit:
        return [read_image_stack(files)]
    return [read_image_stack([each]) for each in files]


def _row_numbers(count: int) -> list[str]:
    return [str(number) for number in range(count)]
