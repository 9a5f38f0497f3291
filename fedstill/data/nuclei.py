"""Pictures in which objects are told apart: nuclei under the microscope, cut into patches.

A picture is cut into square patches that cover it, and its true objects are kept whole beside them, so that
predictions are put together again and judged by picture. No picture is in both parts or at two nodes, nor is
any patient, as far as it is known whose pictures are.
"""

from __future__ import annotations

import io
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from fedstill.core import deadline
from fedstill.core.checked import Share
from fedstill.core.dataset import Cases, DataSet, TensorData, normalised
from fedstill.data.config import MEAN, STD, DataConfig, Side
from fedstill.data.images import decoded, instance_map
from fedstill.data.located import find_file
from fedstill.data.npz import read_npz
from fedstill.data.pictures import Picture, picture
from fedstill.data.preparation import PATIENT, Source, check_sites, prepared
from fedstill.data.rasters import grown, nearest, places, resized
from fedstill.data.raw import need
from fedstill.tasks import Targets, TaskConfig

PATCH = 256  # unless data.patch says otherwise
CLASSES = ("background", "inside", "contour")
TISSUE = "he_256x320"  # the stained one among the kinds of DSB 2018
SLIDE = "slide"
MONUSEG, DSB = "nuclei_monuseg.npz", "nuclei_dsb2018.npz"  # our packs


@dataclass(frozen=True, kw_only=True)
class PictureData(DataConfig):
    """Pictures whose objects are told apart. A subclass gives the pictures."""

    targets: ClassVar[tuple[Targets, ...]] = ("instances",)

    sites: tuple[str, ...] = ()
    """Use only these sites; empty: all."""

    patch: Side = 0
    """Side of the square patches that pictures are cut into; 0: 256."""

    scale: Share = 1.0
    """Pictures are first averaged down to this part of their height and width; 0.5: 20x from 40x."""

    @abstractmethod
    def pictures(self) -> Sequence[Picture]:
        """All of them."""

    def read(self, task: TaskConfig) -> DataSet:
        """These pictures, divided into training and test parts and cut into patches."""
        return data_set(self.pictures(), self, self.called, self.note, "site")


@dataclass(frozen=True, kw_only=True)
class MoNuSeg(PictureData):
    """MoNuSeg 2018: nuclei of H&E tissue, sites are organs."""

    note: ClassVar[str] = "27 of the 51 pictures of MoNuSeg 2018, official split"

    sites: tuple[str, ...] = ()
    """Use only these organs; empty: those that are in both parts."""

    def pictures(self) -> Sequence[Picture]:
        """Those of all organs."""
        return monuseg(find_file(self, MONUSEG))

    def read(self, task: TaskConfig) -> DataSet:
        """These pictures, of some organs."""
        pictures, config, note = self.pictures(), self, self.note
        if not self.sites:
            both = {one.site for one in pictures if one.test} & {one.site for one in pictures if not one.test}
            config = replace(self, sites=tuple(sorted(both)))
            note += f"; organs in both parts: {', '.join(config.sites)}"
        return data_set(pictures, config, self.called, note, "organ")


@dataclass(frozen=True, kw_only=True)
class DSB2018(PictureData):
    """Data Science Bowl 2018: nuclei in four kinds of pictures, which are the sites."""

    note: ClassVar[str] = "561 of the 664 pictures of Data Science Bowl 2018"

    sites: tuple[str, ...] = ()
    """Use only these kinds of pictures; empty: the stained tissue."""

    def pictures(self) -> Sequence[Picture]:
        """Those of some kinds."""
        return dsb2018(find_file(self, DSB), self.sites or (TISSUE,))


@dataclass(frozen=True, kw_only=True)
class Nuclei(PictureData):
    """MoNuSeg 2018 and the stained tissue of Data Science Bowl 2018, which are the sites."""

    def pictures(self) -> Sequence[Picture]:
        """Those of both sources."""
        tissue = dsb2018(find_file(self, DSB), (TISSUE,))
        pictures = [replace(one, site="monuseg") for one in monuseg(find_file(self, MONUSEG))]
        return [*pictures, *(replace(one, site="dsb2018") for one in tissue)]

    def read(self, task: TaskConfig) -> DataSet:
        """These pictures, of one source or both."""
        pictures = self.pictures()
        count = sum(one.site == "dsb2018" for one in pictures)
        more = f"the {count} of stained tissue of Data Science Bowl 2018"
        return data_set(pictures, self, self.called, f"{MoNuSeg.note}, and {more}", "site")


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
    arrays = read_npz(path)
    names, sites = need(path, arrays, "name"), need(path, arrays, site)
    check_sites(only, sorted({str(name) for name in sites}))
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


def data_set(pictures: Sequence[Picture], config: PictureData, name: str, note: str, column: str) -> DataSet:
    """The data set that pictures and a configuration make.

    Where the pictures do not say which are for testing, a share of those of each site is: at least one, and
    never all. Pictures of one patient stay together; one of an unknown patient is by itself.

    Raises:
        ArgumentError: a site that is not there, a patch larger than is sensible.
        DataError: no pictures in one of the parts, or a patient in both.
    """
    check_sites(config.sites, sorted({one.site for one in pictures} - {""}))
    pictures = [one for one in pictures if not config.sites or one.site in config.sites]
    unit, owner = whose(pictures)
    scaled, patch = "", config.patch or PATCH
    if config.scale < 1:
        pictures = [_scaled(one, config.scale) for one in pictures]
        scaled = f"pictures averaged down to {config.scale:g} of their size"
    cases = cases_of(pictures, patch)
    of = cases.of.numpy()
    sites = np.array([one.site for one in pictures])[of]
    columns = {column: sites} if sites.any() else {}
    columns[SLIDE] = np.array(cases.names)[of]
    if unit == PATIENT:
        columns[PATIENT] = np.array([one.patient or one.name for one in pictures])[of]
    source = Source(
        name=name,
        targets=np.zeros(len(of), dtype=np.int64),
        classes=CLASSES,
        tensors=lambda rows: cut(pictures, cases, rows, patch),
        test=np.array([-1 if one.test is None else int(one.test) for one in pictures])[of],
        columns=columns,
        channels=3,
        note=note,
        sites=sites,
        unit=unit,
        units=owner[of],
        slides=of,
    )
    return prepared(source, config, scaled)


def whose(pictures: Sequence[Picture]) -> tuple[str, npt.NDArray[np.int64]]:
    """What is never parted, "patient" or "slide", and the first picture of each one's owner: ``(P,)``."""
    first: dict[tuple[str, str], int] = {}
    keys = [(one.patient, "" if one.patient else one.name) for one in pictures]
    owner = np.array([first.setdefault(key, row) for row, key in enumerate(keys)], dtype=np.int64)
    return PATIENT if any(one.patient for one in pictures) else SLIDE, owner


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
