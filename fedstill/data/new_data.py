"""New data for a trained student: to evaluate it, or to get its predictions.

Data are read like a node's, and converted to the spec of the run: classes by name, images to its size and
channels, tables by its schema. No examples are sampled or left out, even if the source has a test part.
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
from fedstill.core.name_normalization import normalize_name
from fedstill.data import text_data
from fedstill.data.config import DATA, make_data_config
from fedstill.data.data_spec import DataSpec
from fedstill.data.images import list_images_recursively, read_image_stack
from fedstill.data.instance_images import cut_patches, patch_case_index, read_instance_images
from fedstill.data.loading import (
    PATIENT,
    SITE,
    load,
    make_task_tensors,
    normalize_requested_sites,
    select_channels,
)
from fedstill.data.node_data import map_images_to_spec, map_labels_to_spec
from fedstill.data.raw_images import Images, as_image_array, read_npz
from fedstill.data.stratified_sampling import require_no_gaps, require_unit_names
from fedstill.data.table_data import read_cells, read_rows, read_table_folder
from fedstill.data.table_files import (
    CsvColumns,
    find_column_index,
    parse_pixel_row,
    read_csv,
    reshape_pixel_rows,
)
from fedstill.data.user_data import UserFiles, detect_format, find_data_path, read_raw_images


@dataclass(frozen=True, kw_only=True)
class EvaluationDataOptions:
    """Options for reading new data.

    Args:
        root: base of relative paths; empty: the working directory.
        fit: convert images of another size or number of channels.
        label, image: columns of a csv, see :class:`fedstill.data.table_files.CsvColumns`.
        channels: of images; empty: all.
        slices: maximum number of slices per NIfTI volume; 0: all.
        sites: use only these sites; empty: all.
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


# --- with labels --------------------------------------------------------------------------------------------


def load_labeled(name: str, spec: DataSpec, options: EvaluationDataOptions) -> TensorData:
    """Load examples with labels in a student's spec: all at a path, or the test part of a named data set.

    Columns ``patient`` and ``site`` define their cases; slides are cases too. Each table of a folder is a
    site.

    Raises:
        ArgumentError: unknown data, sites or channels.
        DataError: the data cannot be read or do not fit the spec.
    """
    if name in DATA or ":" in name:
        return _load_named(name, spec, options)
    config = UserFiles(name=name, root=options.root)
    path, targets = find_data_path(config, spec.task.registered_name, spec.task.targets), spec.task.targets
    label = f"data {name!r}"
    columns: Mapping[str, Column] = {}
    if targets == "texts":
        source = text_data.read_labeled_texts(path)
        labels = torch.from_numpy(map_labels_to_spec(source, spec, label))
        ids = text_data.encode_texts_for_model(
            source.texts, spec.shape[0], spec.vocabulary, options.words, label
        )
        data, columns = TensorData(ids, labels), source.columns
    elif spec.task.task_class.form == "rows":
        table = (read_table_folder if path.is_dir() else read_rows)(path, spec.schema)
        data, columns = table.data, table.columns
    elif targets == "instances":
        all_images = read_instance_images(path)
        sites = normalize_requested_sites(
            options.sites, sorted({image.site for image in all_images if image.site})
        )
        selected_images = [image for image in all_images if not sites or image.site in sites]
        cases = patch_case_index(selected_images, spec.shape[1])
        return _check(
            cut_patches(selected_images, cases, np.arange(len(cases.case_ids)), spec.shape[1]), spec, label
        )
    else:
        resize = options.fit and spec.shape[1] == spec.shape[2]
        raw = read_raw_images(
            path,
            detect_format(path, targets),
            targets,
            size=spec.shape[1] if resize else 0,
            slices=options.slices,
            gaps=True,
            columns=CsvColumns(options.label, options.image)
            if targets == "class" or options.label != "label"
            else None,
            classes=spec.classes if targets == "labels" else (),
            shape=spec.shape,
        )
        labels = torch.from_numpy(map_labels_to_spec(raw, spec, label))
        images = _map_pixels(raw.images, spec, options, label)
        inputs, outputs = make_task_tensors(images, labels, spec.task)
        data, columns = TensorData(inputs, outputs), raw.columns
    return _check(_select_sites(data, columns, options.sites), spec, label)


def _load_named(name: str, spec: DataSpec, options: EvaluationDataOptions) -> TensorData:
    """Return the test part of a named data set."""
    data = load(
        make_data_config(name, **({"root": options.root} if options.root else {})),
        spec.task,
        train_needed=False,
    )
    same = (data.classes, tuple(data.test.inputs.shape[1:])) == (spec.classes, spec.shape)
    if not same or (data.mean, data.std, data.vocabulary) != (spec.mean, spec.std, spec.vocabulary):
        problem = "classes, shape or normalization differ from the student's"
        raise DataError(f"data {name!r}: {problem} (expected a path to data that can be converted)")
    return _select_sites(data.test, data.test_columns, options.sites)


def _check(data: TensorData, spec: DataSpec, label: str) -> TensorData:
    spec.make_task().check(data, label)
    return data


def _select_sites(data: TensorData, columns: Mapping[str, Column], sites: tuple[str, ...]) -> TensorData:
    """Return the examples of some sites, or all, with cases: existing ones, or by patient and site."""
    if (case_index := data.cases) is not None:
        sites = normalize_requested_sites(sites, sorted({site for site in case_index.sites if site}))
        rows = [case_index.indices_from_site(site) for site in sites]
        return data.subset(torch.cat(rows).sort().values) if sites else data
    site_column = columns.get(SITE)
    available = [] if site_column is None else sorted(set(map(str, site_column.tolist())))
    sites = normalize_requested_sites(sites, available)
    all_rows = np.arange(len(data))
    owners = columns.get(PATIENT, all_rows if site_column is not None else None)
    if owners is None:
        return data
    for column in columns.keys() & {PATIENT, SITE}:
        (require_unit_names if column == PATIENT else require_no_gaps)(column, columns[column])
    cases = CaseIndex.from_columns(owners, site_column)
    selected = (
        all_rows
        if site_column is None or not sites
        else np.flatnonzero(np.isin(site_column.astype(str), sites))
    )
    with_cases = replace(data, cases=cases, groups=cases.case_ids if PATIENT in columns else None)
    return with_cases if len(selected) == len(data) else with_cases.subset(torch.from_numpy(selected))


# --- without labels -----------------------------------------------------------------------------------------


def load_unlabeled(name: str, spec: DataSpec, options: EvaluationDataOptions) -> tuple[list[str], Any]:
    """Load inputs without labels, and a name for each.

    Images come from an ``.npz`` with ``images``, an image file, a folder of images (recursively), or a csv
    that lists image files or has pixels. Texts come from the column ``text`` of a csv, rows from the schema's
    columns of a table, which may have others.

    Returns:
        N names, and pixels ``(N, C, H, W)`` in [0, 1], N texts, or cells by column.

    Raises:
        ArgumentError: unknown channels or columns.
        DataError: the file does not exist or cannot be used.
    """
    path, label, form = Path(options.root, name).expanduser(), f"data {name!r}", spec.task.task_class.form
    if not name:
        raise ArgumentError("data", name, "a path to a file or folder")
    if not path.exists():
        raise DataError(f"{label}: file not found: {path}")
    if form == "rows":
        cells, _ = read_cells(path)
        return _row_numbers(len(next(iter(cells.values())))), cells
    if form == "texts":
        texts = read_csv(path, "text")["text"]
        return _row_numbers(len(texts)), texts
    names, images = _read_image_stacks(path, spec, options)
    unnormalized = replace(spec, mean=(0.0,) * len(spec.mean), std=(1.0,) * len(spec.std))
    return names, torch.cat([_map_pixels(stack, unnormalized, options, label) for stack in images])


def _map_pixels(images: Images, spec: DataSpec, options: EvaluationDataOptions, label: str) -> torch.Tensor:
    return map_images_to_spec(select_channels(images, options.channels), options.fit, spec, label)


def _read_image_stacks(
    path: Path, spec: DataSpec, options: EvaluationDataOptions
) -> tuple[list[str], Sequence[Images]]:
    """Return names, and stacks of images of equal form."""
    if path.suffix == ".npz":
        images = as_image_array(path, read_npz(path))
        return _row_numbers(len(images)), [images]
    if path.suffix != ".csv":
        image_paths = [path] if path.is_file() else list_images_recursively(path)
        names = [str(file.relative_to(path)) if path.is_dir() else file.name for file in image_paths]
        return names, _decode_files([(file, str(file)) for file in image_paths], spec, options)
    table = read_csv(path)
    image = normalize_name(options.image) or ("image" if "image" in table else "")
    if image:
        find_column_index(list(table), image, "--image", path)
        files = [(path.parent / name, f"{path}: image {name!r}") for name in table[image]]
        return table[image], _decode_files(files, spec, options)
    rows = zip(
        *(column for name, column in table.items() if name != normalize_name(options.label)), strict=True
    )
    hint = ", named by --image"
    pixels = np.stack(
        [parse_pixel_row(row, f"{path}: row {number}", hint) for number, row in enumerate(rows, 1)]
    )
    return _row_numbers(len(pixels)), [reshape_pixel_rows(pixels, path, spec.shape)]


def _decode_files(
    files: Sequence[tuple[Path, str]], spec: DataSpec, options: EvaluationDataOptions
) -> list[Images]:
    """Decode image files, one by one if they are converted, as for the task."""
    if not options.fit:
        return [read_image_stack(files)]
    return [read_image_stack([file]) for file in files]


def _row_numbers(count: int) -> list[str]:
    return [str(number) for number in range(count)]
