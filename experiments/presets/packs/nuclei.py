"""Instances of nuclei under the microscope: MoNuSeg 2018 and Data Science Bowl 2018, from their packs."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

from fedstill.core.dataset import Column, DataSet
from fedstill.data import InstanceImageData, find_file
from fedstill.data.images import decode_image, read_instance_map
from fedstill.data.instance_images import InstanceImage, make_instance_image, prepare_instance_images
from fedstill.data.loading import normalize_requested_sites
from fedstill.data.raw_images import read_npz, require_array
from fedstill.tasks import TaskConfig

TISSUE = "he_256x320"  # the stained kind of images of DSB 2018


@dataclass(frozen=True, kw_only=True)
class MoNuSeg(InstanceImageData):
    """MoNuSeg 2018: nuclei of H&E tissue, 1000 x 1000 at 40x; sites are organs."""

    title: ClassVar[str] = "monuseg"
    note: ClassVar[str] = "27 of the 51 pictures of MoNuSeg 2018, official split"

    sites: tuple[str, ...] = ()
    """Use only these organs; empty: those that are in both parts."""

    def images(self) -> Sequence[InstanceImage]:
        """Return the images of all organs."""
        return _pictures(find_file(self, "nuclei_monuseg.npz"), "organ", "split")

    def read(self, task: TaskConfig) -> DataSet:
        """Return the images of the chosen organs."""
        pictures, config, note = self.images(), self, self.note
        if not self.sites:
            both = {one.site for one in pictures if one.split} & {
                one.site for one in pictures if not one.split
            }
            config = replace(self, sites=tuple(sorted(both)))
            note += f"; organs in both parts: {', '.join(config.sites)}"
        return prepare_instance_images(pictures, config, self.title, note, "organ")


@dataclass(frozen=True, kw_only=True)
class DSB2018(InstanceImageData):
    """Data Science Bowl 2018: nuclei in four kinds of pictures, which are the sites."""

    title: ClassVar[str] = "dsb2018"
    note: ClassVar[str] = "561 of the 664 pictures of Data Science Bowl 2018"

    sites: tuple[str, ...] = ()
    """Use only these kinds of pictures; empty: the stained tissue."""

    def images(self) -> Sequence[InstanceImage]:
        """Return the images of the chosen kinds."""
        return _pictures(find_file(self, "nuclei_dsb2018.npz"), "group", only=self.sites or (TISSUE,))


@dataclass(frozen=True, kw_only=True)
class Nuclei(InstanceImageData):
    """MoNuSeg 2018 and the stained tissue of Data Science Bowl 2018, each a site."""

    title: ClassVar[str] = "nuclei"

    def images(self) -> Sequence[InstanceImage]:
        """Return the images of both sources."""
        sources = {"monuseg": MoNuSeg(root=self.root), "dsb2018": DSB2018(root=self.root)}
        return [replace(one, site=site) for site, source in sources.items() for one in source.images()]

    def read(self, task: TaskConfig) -> DataSet:
        """Return the images of one source or both."""
        pictures = self.images()
        count = sum(one.site == "dsb2018" for one in pictures)
        note = f"{MoNuSeg.note}, and the {count} of stained tissue of Data Science Bowl 2018"
        return prepare_instance_images(pictures, self, self.title, note, "site")


def _pictures(path: Path, site: str, split: str = "", only: Sequence[str] = ()) -> list[InstanceImage]:
    """Return the pictures of some sites in a pack; ``split`` names the array of parts, if there is one."""
    arrays = read_npz(path)
    names, sites = require_array(path, arrays, "name"), require_array(path, arrays, site)
    normalize_requested_sites(only, sorted({str(name) for name in sites}))
    images, maps = (_streams(path, arrays, part) for part in ("image", "label"))
    pictures = []
    for number, name in enumerate(names):
        if only and sites[number] not in only:
            continue  # avoids decoding unused images
        what = f"{path}: picture {name!s}"
        image = decode_image(io.BytesIO(images[number]), what)
        instances = read_instance_map(io.BytesIO(maps[number]), what)
        test = bool(require_array(path, arrays, split)[number] == "test") if split else None
        pictures.append(make_instance_image(image, instances, str(name), str(sites[number]), test, what))
    return pictures


def _streams(path: Path, arrays: dict[str, Column], part: str) -> list[bytes]:
    joined = require_array(path, arrays, f"{part}_bytes").tobytes()
    ends = [int(end) for end in require_array(path, arrays, f"{part}_offsets")]
    return [joined[start:end] for start, end in pairwise(ends)]
