"""From a data configuration to a data set: read, check, split, limit and normalize.

All readers end in :func:`prepare_data_set`, which selects the test or validation part and limits the training
examples. Patients and slides are never divided between parts. Custom readers derive from
:class:`ImageArrayData`, or from its counterparts for tables, texts and instance images.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from fedstill.core.dataset import CaseIndex, Column, DataSet, TensorData, normalize
from fedstill.core.errors import ArgumentError, DataError, FedstillError
from fedstill.core.name_normalization import normalize_name, similar_names_note
from fedstill.core.registry import USER_CODE_ERRORS, first_line
from fedstill.core.seeds import numpy_generator
from fedstill.data.config import MEAN, STD, DataConfig, check_supports_task
from fedstill.data.images import resize_class_maps, resize_images, to_arrays
from fedstill.data.raw_images import Images, RawImages, raw_images_from_arrays
from fedstill.data.stratified_sampling import (
    Ints,
    add_site_strata,
    hash_groups,
    reject_misspelled_columns,
    require_no_gaps,
    require_unit_names,
    sample_units_per_site,
    sample_whole_units,
    stratification_labels,
    stratified_sample,
)
from fedstill.tasks import TaskConfig
from fedstill.tasks.classification import ClassificationConfig

PATIENT, SITE = "patient", "site"
Bools = npt.NDArray[np.bool_]
CLASSIFICATION = ClassificationConfig()


# --- loading a data set -------------------------------------------------------------------------------------

LoadKey = tuple[DataConfig, TaskConfig, bool]
CACHE_SIZE = 2  # private and public data of a run
_load_cache: ContextVar[deque[tuple[LoadKey, DataSet]] | None] = ContextVar("last", default=None)


def load(config: DataConfig, task: TaskConfig = CLASSIFICATION, *, train_needed: bool = True) -> DataSet:
    """Load a data set: decoded, normalized, and divided into training and test parts.

    Args:
        config: data set and its options.
        task: determines the form of the targets.
        train_needed: refuse data without a training part. A server needs none, as its nodes have theirs.

    Returns:
        Data set whose inputs are images (N, C, H, W) float32 in [-1, 1], token ids (N, L) int64, or rows (N,
        F) float32.

    Raises:
        ArgumentError: the data do not support the task, or an option has no effect on them.
        DataError: no data were found (the message says where it looked), or they cannot be used.

    >>> from fedstill.data.config import make_data_config
    >>> data = load(make_data_config("digits", train_limit=100))
    >>> data.train.inputs.shape, len(data.test), len(data.classes)
    (torch.Size([100, 1, 8, 8]), 359, 10)
    """
    key, cache = (config, task, train_needed), _load_cache.get()
    for cached_key, data in cache or ():
        if cached_key == key:
            return data
    data = _read_and_check(config, task, train_needed)
    if cache is not None:
        cache.append((key, data))
    return data


def _read_and_check(config: DataConfig, task: TaskConfig, train_needed: bool) -> DataSet:
    check_supports_task(config, task)
    data = config.read(task)
    task_object = task.make(data.classes)
    if train_needed or len(data.train):
        task_object.check(data.train, f"train part of {data.name}")
    task_object.check(data.test, f"test part of {data.name}")
    return data


@contextmanager
def cache_loads() -> Iterator[None]:
    """Cache the last two data sets loaded by :func:`load` within the ``with`` block.

    The runs of a comparison share their data, and decoding 120,000 images for each run would be slow.
    """
    token = _load_cache.set(deque(maxlen=CACHE_SIZE))
    try:
        yield
    finally:
        _load_cache.reset(token)


# --- from examples to a data set ----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class UnsplitExamples:
    """Examples as read, with all that decides how they are divided.

    Args:
        name: of the data set, in results.
        targets: for stratification: classes ``(N,)``, findings ``(N, C)`` or maps ``(N, H, W)``.
        classes: class names.
        make_tensors: returns the examples at given row indices.
        split: 0 for training, 1 for testing, 2 for validation, -1 if undecided, ``(N,)``; None: all
            undecided.
        columns: metadata ``(N,)`` by name.
        channels: of images; 0: texts or rows.
        note: remark for readers of a result.
        sites: site of each example, ``(N,)``; None: all from one site.
        unit: column whose values are never divided between parts (patients, slides); empty: none.
        unit_values: replaces that column when units are sampled, as values are sampled in sorted order; None:
            the column itself.
        slides: slide index of each example, ``(N,)``; None: examples are not patches.
        example_names: of each example in its source, ``(N,)``; None: numbers from 0.
        ignore_sites: sample by class alone instead of by class and site.
    """

    name: str
    targets: Column
    classes: tuple[str, ...]
    make_tensors: Callable[[Ints], TensorData]
    split: Column | None = None
    columns: Mapping[str, Column] = field(default_factory=dict)
    channels: int = 0
    note: str = ""
    sites: Column | None = None
    unit: str = ""
    unit_values: Column | None = None
    slides: Column | None = None
    example_names: Column | None = None
    ignore_sites: bool = False

    @property
    def example_noun(self) -> str:
        """Plural noun for examples without known patients, for notes: "slides", "examples" or "images"."""
        if self.slides is not None:
            return "slides"
        return "examples" if self.ignore_sites else "images"

    def labels_at(self, rows: Ints) -> Ints:
        """Return the labels of some rows by which examples are stratified, ``(n,)``."""
        has_all = len(rows) == len(self.targets)  # then no copy is made, as maps are large
        targets = self.targets if has_all else self.targets[rows]
        return stratification_labels(torch.from_numpy(targets))

    def site_strata(self, rows: Ints) -> Ints:
        """Return stratification labels of some rows that also distinguish sites."""
        return add_site_strata(self.labels_at(rows), {} if self.sites is None else {SITE: self.sites[rows]})


def prepare_data_set(source: UnsplitExamples, config: DataConfig, scaling_note: str = "") -> DataSet:
    """Return the data set of a source: divided into training and test parts, and limited.

    If the source has no test part, a share of the examples (or of each site's units) is sampled for it: at
    least one, never all.

    Args:
        scaling_note: remark on the size of images.

    Raises:
        ArgumentError: a site has only one unit, or there is too little for validation.
        DataError: a patient is in both parts of the source; there is one patient only; some examples lack a
            patient or site.
    """
    for column in source.columns.keys() & {source.unit, SITE}:
        check = require_unit_names if column == PATIENT else require_no_gaps
        check(column, source.columns[column], source.name)
    reject_misspelled_columns(source.columns, source.name)
    rows = np.arange(len(source.targets))
    unit_names = source.columns[source.unit] if source.unit else rows
    unit_values = unit_names if source.unit_values is None else source.unit_values
    split_codes = np.full(len(rows), -1) if source.split is None else source.split.astype(np.int64)
    test, split_note = _sample_test_part(source, split_codes, unit_values, config)
    for part in (test, split_codes == 2):
        if len(shared := np.intersect1d(unit_values[part], unit_values[~part])):
            patient = str(unit_names[unit_values == shared[0]][0])
            raise DataError(f"{source.name}: patient {patient!r} is in both parts (expected one of them)")
    is_train, is_evaluated, evaluation_note = _select_evaluation_part(
        source, split_codes == 2, test, unit_values, config
    )
    train, limit_note = np.flatnonzero(is_train), ""
    if 0 < config.train_limit < len(train):
        generator = numpy_generator(config.seed, "data", "limit")
        if source.ignore_sites and not source.unit:
            sampled = train[stratified_sample(source.labels_at(train), config.train_limit, generator)]
        else:
            sampled = train[
                sample_whole_units(
                    source.site_strata(train), unit_values[train], config.train_limit, generator
                )
            ]
        noun = "" if source.slides is None else " patches"
        limit_note = f"trained on {len(sampled)} of {len(train)}{noun}, sampled with seed {config.seed}"
        train = sampled
    columns = {key: column[train] for key, column in source.columns.items()}
    data = source.make_tensors(train)
    if source.unit:
        data = replace(data, groups=hash_groups(columns[source.unit].tolist()))
    return DataSet(
        name=source.name,
        train=data,
        test=source.make_tensors(np.flatnonzero(is_evaluated)),
        classes=source.classes,
        mean=(MEAN,) * source.channels,
        std=(STD,) * source.channels,
        note=join_notes(
            source.note, split_note, evaluation_note, scaling_note, limit_note, *_similar_name_notes(source)
        ),
        columns=columns,
        test_columns={key: column[is_evaluated] for key, column in source.columns.items()},
        test_names=tuple(
            map(str, (rows if source.example_names is None else source.example_names)[is_evaluated].tolist())
        ),
        group_column=source.unit,
    )


def _sample_test_part(
    source: UnsplitExamples, split_codes: Ints, unit_values: Column, config: DataConfig
) -> tuple[Bools, str]:
    """Return a mask ``(N,)`` of test examples, and a note if they were sampled."""
    test, undecided = split_codes == 1, np.flatnonzero(split_codes < 0)
    if not len(undecided):
        return test, ""
    undecided_units, by_patient = unit_values[undecided], source.unit == PATIENT and source.slides is None
    counted_items = undecided_units if source.slides is None else source.slides[undecided]
    count, noun = len(np.unique(counted_items)), "patients" if by_patient else source.example_noun
    if count < 2:
        problem = f"has one {noun[:-1]} (expected two or more, one of them for testing)"
        raise DataError(f"{source.name}: {problem}")
    generator = numpy_generator(config.seed, "data", "test")
    share_note = ""
    if source.ignore_sites and not by_patient:
        test_count = min(max(round(count * config.test_fraction), 1), count - 1)
        test[undecided[stratified_sample(source.labels_at(undecided), test_count, generator)]] = True
        noun = ""
    elif source.ignore_sites:
        labels = source.site_strata(undecided)
        test[undecided] = sample_units_per_site(
            labels, undecided_units, None, config.test_fraction, generator
        )
    else:
        sites = None if source.sites is None else source.sites[undecided]
        labels = source.labels_at(undecided)
        test[undecided] = sample_units_per_site(
            labels, undecided_units, sites, config.test_fraction, generator
        )
        if source.slides is None:
            share_note = " a share" if sites is None else " a share of each site"
    part_note = "" if source.slides is None else " of some"
    tested = f"{len(np.unique(counted_items[test[undecided]]))} of {count} {noun}".rstrip()
    note = f"no official split{part_note}: tested on {tested},{share_note} sampled with seed {config.seed}"
    return test, note


def _select_evaluation_part(
    source: UnsplitExamples, is_validation: Bools, is_test: Bools, unit_values: Column, config: DataConfig
) -> tuple[Bools, Bools, str]:
    """Return masks ``(N,)`` of the training and the evaluated examples, and a note.

    Without ``data.validation``, evaluation uses the test part. With it, evaluation uses the source's
    validation part, or else a share of the training units of each site that has two or more.
    """
    is_train: Bools = ~(is_test | is_validation)
    if is_validation.any():
        if not config.validation:
            note = f"{is_validation.sum()} validation examples are not used (data.validation)"
            return is_train, is_test, note
        note = f"evaluated on its validation part of {is_validation.sum()}"
        return is_train, is_validation, f"{note}; the test part is not used"
    if not config.validation:
        return is_train, is_test, ""
    noun = "patients" if source.unit == PATIENT else source.example_noun
    site_of = np.zeros(len(is_test), dtype=np.int64) if source.sites is None else source.sites
    usable_sites = [
        site
        for site in np.unique(site_of[is_train])
        if len(np.unique(unit_values[is_train & (site_of == site)])) > 1
    ]
    rows = np.flatnonzero(is_train & np.isin(site_of, usable_sites))
    if not len(rows):
        raise ArgumentError("data.validation", config.validation, f"0, as no site has two training {noun}")
    generator = numpy_generator(config.seed, "data", "validation")
    labels = source.labels_at(np.arange(len(is_test)))[rows]
    chosen = sample_units_per_site(labels, unit_values[rows], site_of[rows], config.validation, generator)
    evaluated_units = unit_values[rows[chosen]]  # whole units, at all their sites
    is_evaluated: Bools = is_train & np.isin(unit_values, evaluated_units)
    count, total = len(np.unique(unit_values[is_evaluated])), len(np.unique(unit_values[is_train]))
    note = f"evaluated on {count} of {total} training {noun}, held out with seed {config.seed}"
    return is_train & ~is_evaluated, is_evaluated, f"{note}; the test part is not used"


def _similar_name_notes(source: UnsplitExamples) -> list[str]:
    """Return notes on classes and sites with nearly equal names."""
    sites = [] if source.sites is None else [str(site) for site in np.unique(source.sites)]
    return [similar_names_note("classes", source.classes), similar_names_note("sites", sites)]


def join_notes(*notes: str) -> str:
    """Join the notes that are not empty."""
    return "; ".join(note for note in notes if note)


# --- images -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ImageArrayData(DataConfig):
    """Custom data set of images, whose targets are classes, findings, class maps or the images themselves.

    A subclass sets ``targets`` to what its examples can teach, and implements :meth:`arrays`.

    Example::

        @dataclass(frozen=True, kw_only=True)
        class Blobs(ImageArrayData):
            targets = ("class",)

            def arrays(self):
                rng = np.random.default_rng(0)
                return {"images": rng.random((200, 8, 8)), "labels": rng.integers(0, 2, 200)}
    """

    @abstractmethod
    def arrays(self) -> Mapping[str, npt.ArrayLike]:
        """Return all examples, as arrays named as in an ``.npz``.

        Returns:
            ``images`` (N, H, W), (N, H, W, C) or (N, C, H, W), uint8 or floats in [0, 1], H and W multiples
            of 4, or a list of PIL images (``masks`` too). Targets: ``labels`` (N,), names or numbers from 0;
            or ``labels`` (N, C), findings of -1 (unknown), 0 and 1; or ``masks`` (N, H, W), classes from 0.
            Optional: ``classes``, names in the order of their numbers; ``split`` (N,), 0 for training, 1 for
            testing and 2 for validation; and any metadata columns (N,). Column ``patient`` keeps a patient's
            examples together; ``site`` can define the nodes.
        """

    def read(self, task: TaskConfig) -> DataSet:
        """Return the arrays as a data set: checked, divided into training and test parts, and normalized."""
        raw = raw_images_from_arrays(Path(self.registered_name), self._read_checked_arrays(), task.targets)
        return prepare_images(raw, self, task, self.title or self.registered_name, self.note)

    def _read_checked_arrays(self) -> dict[str, Column]:
        try:
            return to_arrays(self.arrays(), f"data {self.registered_name!r}")
        except FedstillError:
            raise
        except USER_CODE_ERRORS as error:
            problem = f"arrays() failed ({type(error).__name__}: {first_line(error)})"
            raise DataError(f"data {self.registered_name!r}: {problem}") from error


def prepare_images(
    raw: RawImages,
    config: DataConfig,
    task: TaskConfig,
    name: str,
    note: str = "",
    size: int = 0,
    channels: tuple[int, ...] = (),
    sites: tuple[str, ...] = (),
) -> DataSet:
    """Return the data set of images with targets of any kind.

    If the source has no test part, sites with one patient cannot be divided: for maps, images and findings
    they are left out, which the note says.

    Args:
        size: height and width to which images are averaged, masks by majority; 0: as they are.
        channels: empty: all, for reconstruction the first.
        sites: empty: all.

    Raises:
        ArgumentError: an unknown or too small site, or unknown channels.
        DataError: see :func:`prepare_data_set`.
    """
    kind = task.task_class.kind
    if kind == "class":
        raw.require_contiguous_labels(name)
    targets_are_images, classes = kind == "image", raw.classes
    all_rows: Ints = np.arange(len(raw.images))
    rows, sites_note = (all_rows, "") if kind == "class" else _select_sites(raw, sites)
    if targets_are_images:
        if len(channels) > 1:
            raise ArgumentError("data.channels", list(channels), "one, as reconstruction rebuilds one image")
        channels, classes = channels or (0,), ("image",)
    images = select_channels(raw.images, channels)
    cases = None if kind == "class" else _patient_case_index(raw.columns)

    def tensors(selected: Ints) -> TensorData:
        indices = rows[selected]
        pixels = images[indices]
        if size and pixels.shape[2:] != (size, size):
            pixels = resize_images(pixels, size, size)
        inputs = normalize(pixels, mean, std)
        inputs, targets = make_task_tensors(inputs, torch.from_numpy(raw.labels[indices]), task)
        return TensorData(
            inputs, targets, cases=None if cases is None else cases.subset(torch.from_numpy(indices))
        )

    mean, std = (MEAN,) * images.shape[1], (STD,) * images.shape[1]
    source = UnsplitExamples(
        name=name,
        targets=raw.labels if len(rows) == len(raw.labels) else raw.labels[rows],
        classes=classes,
        make_tensors=tensors,
        split=None if raw.split is None else raw.split[rows],
        columns={key: column[rows] for key, column in raw.columns.items()},
        channels=images.shape[1],
        note=join_notes(note, raw.note, sites_note),
        sites=raw.columns[SITE][rows] if SITE in raw.columns else None,
        unit=PATIENT if PATIENT in raw.columns else "",
        example_names=rows if raw.file_names is None else raw.file_names[rows],
        ignore_sites=kind == "class",
    )
    return prepare_data_set(source, config)


def make_task_tensors(
    images: torch.Tensor, labels: torch.Tensor, task: TaskConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of a task, given normalized images ``(N, C, H, W)`` and their labels.

    Class maps are resized to the images. For reconstruction the images are the targets and the simulated
    measurements the inputs.
    """
    if task.task_class.kind == "image":
        if not len(images):
            return images, images
        task_object = task.make(1)
        with torch.no_grad():
            observations = torch.cat([task_object.observe(batch) for batch in torch.split(images, 256)])
        return observations.contiguous(), images
    if labels.ndim == 3:
        labels = resize_class_maps(labels, images.shape[2], images.shape[3])
    return images, labels


def select_channels(images: Images, channels: tuple[int, ...]) -> Images:
    """Return selected channels of ``(N, C, H, W)``; all if ``channels`` is empty.

    Raises:
        ArgumentError: a channel does not exist or is selected twice.
    """
    available = images.shape[1]
    if not all(0 <= channel < available for channel in channels) or len(set(channels)) < len(channels):
        raise ArgumentError("data.channels", list(channels), f"different numbers from 0 to {available - 1}")
    return images[:, list(channels)] if channels else images


def normalize_requested_sites(requested: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Return the requested sites in normalized form.

    Raises:
        ArgumentError: a site does not exist; the message lists those that do.
    """
    sites = tuple(map(normalize_name, requested))
    for site in sites:
        if site not in known:
            expected = f"some of {', '.join(known)}" if known else "none, as the data have no column site"
            raise ArgumentError("data.sites", site, expected)
    return sites


def _select_sites(raw: RawImages, requested: tuple[str, ...]) -> tuple[Ints, str]:
    """Return the rows of the requested sites, and a note on sites that were left out."""
    rows = np.arange(len(raw.images))
    sites = raw.columns.get(SITE)
    for column in raw.columns.keys() & {PATIENT, SITE}:  # else examples without a site would be left out
        require_no_gaps(column, raw.columns[column])
    names = [] if sites is None else [str(site) for site in np.unique(sites)]
    requested = normalize_requested_sites(requested, names)
    if sites is None:
        return rows, ""
    unit = raw.columns.get(PATIENT, rows)
    min_units = 2 if raw.split is None else 1  # a site without a test part needs two patients
    small = [site for site in names if len(np.unique(unit[sites == site])) < min_units]
    for site in requested:
        if site in small:
            raise ArgumentError("data.sites", site, "sites of two or more patients, one of them for testing")
    used = requested or [site for site in names if site not in small]
    note = f"left out, with one patient each: {', '.join(small)}" if small and not requested else ""
    return np.flatnonzero(np.isin(sites, used)), note


def _patient_case_index(columns: Mapping[str, Column]) -> CaseIndex | None:
    if PATIENT not in columns:
        return None
    return CaseIndex.from_columns(columns[PATIENT], columns.get(SITE))
