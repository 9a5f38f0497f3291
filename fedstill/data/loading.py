"""From examples as they were read to a data set: sites, test part, validation, limit, notes.

All readers end here. Where examples belong to patients or pictures, these are never parted.

Data that are arrays: whoever writes a reader gives what it holds, and the preparation is done here.

From a configuration to a data set, checked for its task.
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

from fedstill.core.dataset import CaseIndex, Column, DataSet, TensorData, normalized
from fedstill.core.errors import ArgumentError, DataError, FedstillError
from fedstill.core.names import alike_note, plain
from fedstill.core.registry import OWN, first_line
from fedstill.core.seeds import numpy_generator
from fedstill.data.config import MEAN, STD, DataConfig, check_supports_task
from fedstill.data.images import resize_class_maps, resize_images, to_arrays
from fedstill.data.raw import Images, RawImages, raw_images_from_arrays
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


@dataclass(frozen=True, eq=False)
class ExampleSource:
    """Examples as they were read, and what is heeded as they are divided.

    Args:
        name: of the data set, in results.
        targets: whose shares are kept: classes ``(N,)``, findings ``(N, C)`` or maps ``(N, H, W)``.
        tensors: the examples at some rows.
        test: 1 for testing, 2 for validation, 0 for training, -1 where the source does not say, ``(N,)``;
            None: nowhere.
        columns: ``(N,)`` each.
        channels: of images; 0: texts.
        note: what is to be said of it.
        sites: where each is from, ``(N,)``; None: all from one place.
        unit: the column whose values are never parted; empty: none.
        units: that column, its values in the order in which they are drawn; None: as numpy sorts them.
        slides: the picture that each is a patch of, ``(N,)``; None: they are no patches.
        names: of each in its source, ``(N,)``; None: numbers from 0.
        one_by_one: whether examples of no unit are drawn by their classes alone, whatever their site.
    """

    name: str
    targets: Column
    classes: tuple[str, ...]
    tensors: Callable[[Ints], TensorData]
    split: Column | None = None
    columns: Mapping[str, Column] = field(default_factory=dict)
    channels: int = 0
    note: str = ""
    sites: Column | None = None
    unit: str = ""
    units: Column | None = None
    slides: Column | None = None
    names: Column | None = None
    one_by_one: bool = False

    @property
    def called(self) -> str:
        """What examples are called where no patients are known."""
        if self.slides is not None:
            return "pictures"
        return "examples" if self.one_by_one else "images"

    def labels(self, rows: Ints) -> Ints:
        """Labels of some rows, as :func:`fedstill.data.stratified_sampling.stratification_labels`."""
        some = self.targets if len(rows) == len(self.targets) else self.targets[rows]  # maps are large
        return stratification_labels(torch.from_numpy(some))

    def by_site(self, rows: Ints) -> Ints:
        """Labels of some rows that also tell sites apart."""
        return add_site_strata(self.labels(rows), {} if self.sites is None else {SITE: self.sites[rows]})


def prepare_data_set(source: ExampleSource, config: DataConfig, scaled: str = "") -> DataSet:
    """The data set that a source and a configuration make.

    Where the source has no test part of its own, it is a share of the examples, or of the units of each site:
    at least one, and never all. ``scaled`` is said of the size of pictures.

    Raises:
        ArgumentError: a site with one unit, or too little for validation.
        DataError: a patient in both of the source's parts, or one patient alone and nothing told; examples
            without a patient or site where others have one.
    """
    for column in source.columns.keys() & {source.unit, SITE}:
        require = require_unit_names if column == PATIENT else require_no_gaps
        require(column, source.columns[column], source.name)
    reject_misspelled_columns(source.columns, source.name)
    rows = np.arange(len(source.targets))
    own = source.columns[source.unit] if source.unit else rows
    units = own if source.units is None else source.units
    given = np.full(len(rows), -1) if source.split is None else source.split.astype(np.int64)
    test, drawn = _sample_test_part(source, given, units, config)
    for part in (test, given == 2):
        if len(both := np.intersect1d(units[part], units[~part])):
            patient = str(own[units == both[0]][0])
            raise DataError(f"{source.name}: patient {patient!r} is in both parts (expected one of them)")
    kept, measured, told = _select_evaluation_part(source, given == 2, test, units, config)
    train, limited = np.flatnonzero(kept), ""
    if 0 < config.train_limit < len(train):
        generator = numpy_generator(config.seed, "data", "limit")
        if source.one_by_one and not source.unit:
            some = train[stratified_sample(source.labels(train), config.train_limit, generator)]
        else:
            some = train[
                sample_whole_units(source.by_site(train), units[train], config.train_limit, generator)
            ]
        what = "" if source.slides is None else " patches"
        limited = f"trained on {len(some)} of {len(train)}{what}, drawn with seed {config.seed}"
        train = some
    columns = {key: column[train] for key, column in source.columns.items()}
    data = source.tensors(train)
    if source.unit:
        data = replace(data, groups=hash_groups(columns[source.unit].tolist()))
    return DataSet(
        name=source.name,
        train=data,
        test=source.tensors(np.flatnonzero(measured)),
        classes=source.classes,
        mean=(MEAN,) * source.channels,
        std=(STD,) * source.channels,
        note=join_notes(source.note, drawn, told, scaled, limited, *_similar_name_notes(source)),
        columns=columns,
        test_columns={key: column[measured] for key, column in source.columns.items()},
        test_names=tuple(map(str, (rows if source.names is None else source.names)[measured].tolist())),
        unit=source.unit,
    )


def _similar_name_notes(source: ExampleSource) -> list[str]:
    """Return notes on classes and sites whose names are nearly equal."""
    sites = [] if source.sites is None else [str(site) for site in np.unique(source.sites)]
    return [alike_note("classes", source.classes), alike_note("sites", sites)]


def join_notes(*notes: str) -> str:
    """What there is of some notes, in one line."""
    return "; ".join(note for note in notes if note)


def _sample_test_part(
    source: ExampleSource, given: Ints, units: Column, config: DataConfig
) -> tuple[Bools, str]:
    test, undecided = given == 1, np.flatnonzero(given < 0)
    if not len(undecided):
        return test, ""
    of, patients = units[undecided], source.unit == PATIENT and source.slides is None
    counted = of if source.slides is None else source.slides[undecided]
    count, called = len(np.unique(counted)), "patients" if patients else source.called
    if count < 2:
        told = f"has one {called[:-1]}: allowed are two, of which one is for testing"
        raise DataError(f"{source.name}: {told}")
    generator = numpy_generator(config.seed, "data", "test")
    share = ""
    if source.one_by_one and not patients:
        wanted = min(max(round(count * config.test_fraction), 1), count - 1)
        test[undecided[stratified_sample(source.labels(undecided), wanted, generator)]] = True
        called = ""
    elif source.one_by_one:
        labels = source.by_site(undecided)
        test[undecided] = sample_units_per_site(labels, of, None, config.test_fraction, generator)
    else:
        sites = None if source.sites is None else source.sites[undecided]
        labels = source.labels(undecided)
        test[undecided] = sample_units_per_site(labels, of, sites, config.test_fraction, generator)
        if source.slides is None:
            share = " a share" if sites is None else " a share of each site"
    some = "" if source.slides is None else " of some"
    told = f"{len(np.unique(counted[test[undecided]]))} of {count} {called}".rstrip()
    return test, f"no official split{some}: tested on {told},{share} drawn with seed {config.seed}"


def _select_evaluation_part(
    source: ExampleSource, own: Bools, test: Bools, units: Column, config: DataConfig
) -> tuple[Bools, Bools, str]:
    """Which examples are for training, which figures are measured on, and what to say of it.

    Without ``data.validation`` the two parts as they are; with it the source's own validation part takes the
    place of the test part, or else that share of each site's training units, if it has two or more.
    """
    train: Bools = ~(test | own)
    if own.any():
        if not config.validation:
            return train, test, f"{own.sum()} of it are for validation, and set aside (data.validation)"
        told = f"measured on {own.sum()} of its own validation part"
        return train, own, f"{told}; the test part is not used"
    if not config.validation:
        return train, test, ""
    called = "patients" if source.unit == PATIENT else source.called
    where = np.zeros(len(test), dtype=np.int64) if source.sites is None else source.sites
    large = [site for site in np.unique(where[train]) if len(np.unique(units[train & (where == site)])) > 1]
    rows = np.flatnonzero(train & np.isin(where, large))
    if not len(rows):
        raise ArgumentError("data.validation", config.validation, f"0, as no site has two training {called}")
    generator = numpy_generator(config.seed, "data", "validation")
    labels = source.labels(np.arange(len(test)))[rows]
    chosen = sample_units_per_site(labels, units[rows], where[rows], config.validation, generator)
    measured: Bools = train & np.isin(units, units[rows[chosen]])  # whole units, at whichever sites
    count, of = len(np.unique(units[measured])), len(np.unique(units[train]))
    told = f"measured on {count} of {of} training {called}, set aside with seed {config.seed}"
    return train & ~measured, measured, f"{told}; the test part is not used"


# --- images -------------------------------------------------------------------------------------------


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
    """The data set that images with targets of one kind make, all or some of its sites.

    Sites with one patient cannot be parted where the source has no test part of its own, and are left out of
    maps, images and findings, which the note says. Images are averaged down to a ``size``, masks by majority;
    0: as they are. Of ``channels`` empty is all, and for reconstruction the first; of ``sites`` all.

    Raises:
        ArgumentError: a site that is not there or too small, channels that there are not.
        DataError: as :func:`prepare_data_set`.
    """
    kind = task.task_class.kind
    if kind == "class":
        raw.require_contiguous_labels(name)
    whole_images, classes = kind == "image", raw.classes
    everything: Ints = np.arange(len(raw.images))
    rows, left_out = (everything, "") if kind == "class" else _select_sites(raw, sites)
    if whole_images:
        if len(channels) > 1:
            raise ArgumentError("data.channels", list(channels), "one, as reconstruction rebuilds one image")
        channels, classes = channels or (0,), ("image",)
    images = select_channels(raw.images, channels)
    cases = None if kind == "class" else _patient_cases(raw.columns)

    def tensors(some: Ints) -> TensorData:
        at = rows[some]
        pixels = images[at]
        if size and pixels.shape[2:] != (size, size):
            pixels = resize_images(pixels, size, size)
        inputs = normalized(pixels, mean, std)
        inputs, targets = make_task_tensors(inputs, torch.from_numpy(raw.labels[at]), task)
        return TensorData(
            inputs, targets, cases=None if cases is None else cases.subset(torch.from_numpy(at))
        )

    mean, std = (MEAN,) * images.shape[1], (STD,) * images.shape[1]
    source = ExampleSource(
        name=name,
        targets=raw.labels if len(rows) == len(raw.labels) else raw.labels[rows],
        classes=classes,
        tensors=tensors,
        split=None if raw.split is None else raw.split[rows],
        columns={key: column[rows] for key, column in raw.columns.items()},
        channels=images.shape[1],
        note=join_notes(note, raw.note, left_out),
        sites=raw.columns[SITE][rows] if SITE in raw.columns else None,
        unit=PATIENT if PATIENT in raw.columns else "",
        names=rows if raw.file_names is None else raw.file_names[rows],
        one_by_one=kind == "class",
    )
    return prepare_data_set(source, config)


def make_task_tensors(
    images: torch.Tensor, labels: torch.Tensor, task: TaskConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a task, of normalized images ``(N, C, H, W)`` and what was read beside them.

    Maps, of any size, become as large as the images; where the images are the targets, what is measured of
    them are the inputs.
    """
    if task.task_class.kind == "image":
        if not len(images):
            return images, images
        made = task.make(1)
        with torch.no_grad():
            measured = torch.cat([made.observe(some) for some in torch.split(images, 256)])
        return measured.contiguous(), images
    if labels.ndim == 3:
        labels = resize_class_maps(labels, images.shape[2], images.shape[3])
    return images, labels


def select_channels(images: Images, channels: tuple[int, ...]) -> Images:
    """The wanted channels of ``(N, C, H, W)``, all if none is named; an ArgumentError if one is not there."""
    there = images.shape[1]
    if not all(0 <= channel < there for channel in channels) or len(set(channels)) < len(channels):
        raise ArgumentError("data.channels", list(channels), f"different numbers from 0 to {there - 1}")
    return images[:, list(channels)] if channels else images


def check_sites(wanted: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """The names of wanted sites; an ArgumentError refuses one that is not there, and names those that are."""
    sites = tuple(map(plain, wanted))
    for site in sites:
        if site not in known:
            allowed = f"some of {', '.join(known)}" if known else "none, as no column site tells them"
            raise ArgumentError("data.sites", site, allowed)
    return sites


def _select_sites(raw: RawImages, wanted: tuple[str, ...]) -> tuple[Ints, str]:
    rows = np.arange(len(raw.images))
    sites = raw.columns.get(SITE)
    for column in raw.columns.keys() & {PATIENT, SITE}:  # else a site without a name is left out
        require_no_gaps(column, raw.columns[column])
    names = [] if sites is None else [str(site) for site in np.unique(sites)]
    wanted = check_sites(wanted, names)
    if sites is None:
        return rows, ""
    unit = raw.columns.get(PATIENT, rows)
    least = 2 if raw.split is None else 1  # to part a site's patients there must be two
    small = [site for site in names if len(np.unique(unit[sites == site])) < least]
    for site in wanted:
        if site in small:
            raise ArgumentError("data.sites", site, "sites of two or more patients, one of them for testing")
    used = wanted or [site for site in names if site not in small]
    told = f"left out, with one patient each: {', '.join(small)}" if small and not wanted else ""
    return np.flatnonzero(np.isin(sites, used)), told


def _patient_cases(columns: Mapping[str, Column]) -> CaseIndex | None:
    if PATIENT not in columns:
        return None
    return CaseIndex.from_columns(columns[PATIENT], columns.get(SITE))


@dataclass(frozen=True, kw_only=True)
class ArrayData(DataConfig):
    """Images whose targets are classes, findings, maps, or the images themselves: what one's own mostly are.

    A subclass says in ``targets`` what it can teach, and gives its arrays.
    """

    @abstractmethod
    def arrays(self) -> Mapping[str, npt.ArrayLike]:
        """All examples, by name as an ``.npz`` has them.

        Returns:
            ``images`` (N, H, W), (N, H, W, C) or (N, C, H, W), uint8 or floats in [0, 1], with H and W that 4
            divides, or a list of images of PIL (of ``masks``, too). What they teach: ``labels`` (N,), names
            or numbers from 0, or (N, C) findings of -1 (unknown), 0 and 1; or ``masks`` (N, H, W), classes
            from 0. If there are such: ``classes``, names in the order of their numbers; ``split`` (N,), 0 for
            training, 1 for testing and 2 for validation; and any columns (N,), of which ``patient`` (whose
            each is: those of a patient are not divided) and ``site`` are heeded.
        """

    def read(self, task: TaskConfig) -> DataSet:
        """These arrays, checked, divided into training and test parts, and normalized."""
        raw = raw_images_from_arrays(Path(self.called), self._given(), task.targets)
        return prepare_images(raw, self, task, self.title or self.called, self.note)

    def _given(self) -> dict[str, Column]:
        try:
            return to_arrays(self.arrays(), f"data {self.called!r}")
        except FedstillError:
            raise
        except OWN as error:
            told = f"its arrays cannot be had: {type(error).__name__}: {first_line(error)}"
            raise DataError(f"data {self.called!r}: {told}") from error


CLASSIFICATION = ClassificationConfig()

LoadKey = tuple[DataConfig, TaskConfig, bool]
CACHE_SIZE = 2  # a run's own data, and those that are public
_load_cache: ContextVar[deque[tuple[LoadKey, DataSet]] | None] = ContextVar("last", default=None)


@contextmanager
def cache_loads() -> Iterator[None]:
    """What is loaded within is read once for all that ask for the same: the two data sets loaded last stay.

    The runs of a comparison meet the same data; to decode 120,000 images for each of them takes long.
    """
    token = _load_cache.set(deque(maxlen=CACHE_SIZE))
    try:
        yield
    finally:
        _load_cache.reset(token)


def load(config: DataConfig, task: TaskConfig = CLASSIFICATION, *, train_needed: bool = True) -> DataSet:
    """Load a data set, decoded and normalized, with its test part apart.

    Args:
        config: which, and how much of it.
        task: what the data are for, which says what their targets are.
        train_needed: refuse data without a training part; a server needs none, as its nodes have theirs.

    Returns:
        Inputs (N, C, H, W) float32 in [-1, 1], or token ids (N, L) int64, and the task's targets.

    Raises:
        ArgumentError: data that serve other tasks, a name that is unknown, an option that does nothing here.
        DataError: nothing found (what was looked for, and where), or data that cannot be used.

    >>> from fedstill.data.config import make_data_config
    >>> data = load(named("digits", train_limit=100))
    >>> data.train.inputs.shape, len(data.test), len(data.classes)
    (torch.Size([100, 1, 8, 8]), 359, 10)
    """
    asked, last = (config, task, train_needed), _load_cache.get()
    for before, data in last or ():
        if before == asked:
            return data
    data = _read_and_check(config, task, train_needed)
    if last is not None:
        last.append((asked, data))
    return data


def _read_and_check(config: DataConfig, task: TaskConfig, train_needed: bool) -> DataSet:
    check_supports_task(config, task)
    data = config.read(task)
    made = task.make(data.classes)
    if train_needed or len(data.train):
        made.check(data.train, f"train part of {data.name}")
    made.check(data.test, f"test part of {data.name}")
    return data
