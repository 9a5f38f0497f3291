"""Pictures in which objects are told apart: nuclei under the microscope, cut into patches.

A picture is cut into square patches that cover it, and its true objects are kept whole beside them, so that
predictions are put together again and judged by picture. No picture is in both parts or at two nodes, nor is
any patient, as far as it is known whose pictures are.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from fedstill.core import deadline
from fedstill.core.dataset import Cases, DataSet, TensorData, normalised
from fedstill.core.errors import ArgumentError, DataError
from fedstill.core.seeds import numpy_generator
from fedstill.data.assembled import PATIENT
from fedstill.data.config import MEAN, STD, DataConfig
from fedstill.data.groups import numbered
from fedstill.data.images import decoded, instance_map
from fedstill.data.packs import arrays_of, need
from fedstill.data.pictures import Picture, picture
from fedstill.data.rasters import grown, nearest, places, resized
from fedstill.data.units import drawn_units, strata, whole
from fedstill.data.validation import set_aside
from fedstill.tasks import TaskConfig

PATCH = 256  # unless data.patch says otherwise
CLASSES = ("background", "inside", "contour")
TISSUE = "he_256x320"  # the stained one among the kinds of DSB 2018
SLIDE = "slide"


def load_nuclei(config: DataConfig, task: TaskConfig) -> DataSet:
    """Load pictures for the task instances.

    "monuseg" has H&E tissue, sites are organs, and the official parts. "dsb2018" has four kinds of pictures
    as sites, the stained tissue unless ``sites`` names others. "nuclei" is both, stained tissue only, with
    the source as site. Else a path, as :func:`fedstill.data.own.read_pictures` reads it.

    Raises:
        ArgumentError: an option that these data do not allow.
        DataError: data that are not there or cannot be used.
    """
    from fedstill.data.located import find_pack, located  # which imports this file

    column, note = "site", ""
    if config.name in ("monuseg", "nuclei"):
        pictures = monuseg(find_pack(config, "nuclei_monuseg.npz"))
        column, note = "organ", "27 of the 51 pictures of MoNuSeg 2018, official split"
    if config.name == "monuseg" and not config.sites:
        both = {one.site for one in pictures if one.test} & {one.site for one in pictures if not one.test}
        config = replace(config, sites=tuple(sorted(both)))
        note += f"; organs in both parts: {', '.join(config.sites)}"
    if config.name == "dsb2018":
        pictures = dsb2018(find_pack(config, "nuclei_dsb2018.npz"), config.sites or (TISSUE,))
        note = "561 of the 664 pictures of Data Science Bowl 2018"
    if config.name == "nuclei":
        more = dsb2018(find_pack(config, "nuclei_dsb2018.npz"), (TISSUE,))
        pictures = [replace(one, site="monuseg") for one in pictures]
        pictures += [replace(one, site="dsb2018") for one in more]
        column, note = "site", f"{note}, and the {len(more)} of stained tissue of Data Science Bowl 2018"
    if config.name not in ("monuseg", "dsb2018", "nuclei"):
        from fedstill.data.own import read_pictures

        place = located(config, task.like)
        pictures = read_pictures(place)
        return data_set(pictures, config, place.resolve().name if place.is_dir() else place.stem, "", column)
    return data_set(pictures, config, config.name, note, column)


def monuseg(path: Path) -> list[Picture]:
    """MoNuSeg 2018, what the pack has of it: 1000 x 1000 at 40x, sites are organs.

    Raises:
        DataError: not the pack that it should be.
    """
    return _pictures(path, "organ", "split")


def dsb2018(path: Path, kinds: Sequence[str]) -> list[Picture]:
    """Data Science Bowl 2018, what the pack has of it: pictures of four kinds, which are the sites.

    Raises:
        ArgumentError: a kind that is not there.
        DataError: not the pack that it should be.
    """
    return _pictures(path, "group", None, kinds)


def _pictures(path: Path, site: str, split: str | None, only: Sequence[str] = ()) -> list[Picture]:
    arrays = arrays_of(path)
    names, sites = need(path, arrays, "name"), need(path, arrays, site)
    _check_sites(only, sorted({str(name) for name in sites}))
    images, maps = (_streams(path, arrays, part) for part in ("image", "label"))
    tests = [None] * len(names) if split is None else need(path, arrays, split) == "test"
    pictures = []
    for number, name in enumerate(names):
        if only and sites[number] not in only:
            continue  # decoding takes a while
        what = f"{path}: picture {name!s}"
        image = decoded(io.BytesIO(images[number]), what)
        instances = instance_map(io.BytesIO(maps[number]), what)
        test = None if split is None else bool(tests[number])
        pictures.append(picture(image, instances, str(name), str(sites[number]), test, what))
    return pictures


def _streams(path: Path, arrays: dict[str, npt.NDArray[np.uint8]], part: str) -> list[bytes]:
    joined = need(path, arrays, f"{part}_bytes").tobytes()
    ends = [int(end) for end in need(path, arrays, f"{part}_offsets")]
    return [joined[start:end] for start, end in pairwise(ends)]


def data_set(pictures: Sequence[Picture], config: DataConfig, name: str, note: str, column: str) -> DataSet:
    """The data set that pictures and a configuration make.

    Where the pictures do not say which are for testing, a share of those of each site is: at least one, and
    never all. Pictures of one patient stay together; one of an unknown patient is by itself.

    Raises:
        ArgumentError: a site that is not there, a patch larger than is sensible.
        DataError: no pictures in one of the parts, or a patient in both.
    """
    pictures = _of_sites(pictures, config)
    notes = [note]
    sites = np.array([one.site for one in pictures])
    rows = np.arange(len(pictures))
    undecided = np.array([one.test is None for one in pictures])
    test = np.array([bool(one.test) for one in pictures])
    unit, owner = whose(pictures)
    if undecided.any():
        if undecided.sum() < 2:
            raise DataError(f"{name}: has one picture: allowed are two, of which one is for testing")
        some = rows[undecided]
        generator = numpy_generator(config.seed, "data", "test")
        alike = np.zeros(len(some), dtype=np.int64)
        test[some] = drawn_units(alike, owner[some], sites[some], config.test_fraction, generator)
        drawn = f"{int(test[some].sum())} of {len(some)} pictures"
        notes.append(f"no official split of some: tested on {drawn}, drawn with seed {config.seed}")
    both = np.intersect1d(owner[test], owner[~test])
    if len(both):
        twice = pictures[both[0]].patient
        raise DataError(f"{name}: patient {twice!r} is in both parts: allowed is one of them")
    none, called = np.zeros(len(pictures), dtype=np.int64), "patients" if unit == PATIENT else "pictures"
    trained, test, told = set_aside(test, none, owner, sites, config, called)
    notes.append(told)
    if config.scale < 1:
        pictures = [_scaled(one, config.scale) for one in pictures]
        notes.append(f"pictures averaged down to {config.scale:g} of their size")

    patch = config.patch or PATCH
    cases = cases_of(pictures, patch)
    of = cases.of.numpy()
    train, tested = np.flatnonzero(trained[of]), np.flatnonzero(test[of])
    if 0 < config.train_limit < len(train):
        generator = numpy_generator(config.seed, "data", "limit")
        by_site = strata(np.zeros(len(train), dtype=np.int64), {"site": sites[of[train]]})
        kept = train[whole(by_site, owner[of[train]], config.train_limit, generator)]
        notes.append(f"trained on {len(kept)} of {len(train)} patches, drawn with seed {config.seed}")
        train = kept
    columns = {column: sites[of[train]]} if sites.any() else {}
    columns[SLIDE] = np.array(cases.names)[of[train]]
    if unit == PATIENT:
        columns[PATIENT] = np.array([one.patient or one.name for one in pictures])[of[train]]
    return DataSet(
        name=name,
        train=replace(cut(pictures, cases, train, patch), groups=numbered(columns[unit].tolist())),
        test=cut(pictures, cases, tested, patch),
        classes=CLASSES,
        mean=(MEAN,) * 3,
        std=(STD,) * 3,
        note="; ".join(note for note in notes if note),
        columns=columns,
        unit=unit,
    )


def whose(pictures: Sequence[Picture]) -> tuple[str, npt.NDArray[np.int64]]:
    """What is never parted, "patient" or "slide", and the first picture of each one's owner: ``(P,)``."""
    first: dict[tuple[str, str], int] = {}
    keys = [(one.patient, "" if one.patient else one.name) for one in pictures]
    owner = np.array([first.setdefault(key, row) for row, key in enumerate(keys)], dtype=np.int64)
    return PATIENT if any(one.patient for one in pictures) else SLIDE, owner


def _of_sites(pictures: Sequence[Picture], config: DataConfig) -> list[Picture]:
    _check_sites(config.sites, sorted({one.site for one in pictures} - {""}))
    return [one for one in pictures if not config.sites or one.site in config.sites]


def _check_sites(wanted: Sequence[str], known: Sequence[str]) -> None:
    for site in wanted:
        if site not in known:
            allowed = f"some of {', '.join(known)}" if known else "none, as this data does not tell sites"
            raise ArgumentError("data.sites", site, allowed)


def _scaled(one: Picture, scale: float) -> Picture:
    height, width = (max(round(side * scale), 1) for side in one.instances.shape)
    image = resized(one.image[None], height, width)[0]
    return replace(one, image=image, instances=nearest(one.instances, height, width))


def cases_of(pictures: Sequence[Picture], patch: int) -> Cases:
    """All patches of pictures, each picture a case: the fewest patches that cover it, evenly spread.

    A picture smaller than a patch is covered by one that sticks out below or to the right.
    """
    corners = [places(max(height, patch), max(width, patch), patch) for height, width in map(_size, pictures)]
    return Cases(
        of=torch.repeat_interleave(torch.tensor([len(some) for some in corners])),
        names=tuple(one.name for one in pictures),
        sites=tuple(one.site for one in pictures),
        places=torch.tensor([corner for some in corners for corner in some], dtype=torch.int64).view(-1, 2),
        sizes=tuple(map(_size, pictures)),
        instances=tuple(one.instances for one in pictures),
    )


def _size(one: Picture) -> tuple[int, int]:
    return one.instances.shape[0], one.instances.shape[1]


def cut(pictures: Sequence[Picture], cases: Cases, rows: npt.NDArray[np.int64], patch: int) -> TensorData:
    """The patches at some rows, ``(N, 3, patch, patch)`` and ``(N, patch, patch)``."""
    from fedstill.tasks.shapes import three_classes

    cases = cases.subset(torch.from_numpy(rows))
    count = len(rows)
    inputs = torch.empty(count, 3, patch, patch)
    targets = torch.empty(count, patch, patch, dtype=torch.int64)
    corners = [] if cases.places is None else cases.places.tolist()
    for case in cases.present():
        one = pictures[case]
        image = grown(normalised(one.image[None], (MEAN,) * 3, (STD,) * 3)[0].numpy(), patch)
        # Of the whole picture, so that an object that a patch cuts has no contour there.
        classes = grown(three_classes(one.instances), patch)
        for row in torch.nonzero(cases.of == case).flatten().tolist():
            deadline.check()  # a server may name tiny patches
            top, left = corners[row]
            inputs[row] = torch.from_numpy(image[:, top : top + patch, left : left + patch].copy())
            cut = classes[top : top + patch, left : left + patch]
            targets[row] = torch.from_numpy(cut.astype(np.int64))
    return TensorData(inputs, targets, cases=cases)
