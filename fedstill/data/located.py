"""Where the files of a data set lie: the folders that hold packs, and the place that a path means."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fedstill.core.errors import ArgumentError, DataError
from fedstill.data.config import DATA, DataConfig
from fedstill.tasks import Targets


def located(config: DataConfig, task: str, targets: Targets) -> Path:
    """The folder or file that a path in a configuration means, for a task.

    Raises:
        ArgumentError: neither a name that is known nor a path.
        DataError: no such file or folder, or a file of a kind that does not teach this.
    """
    places, name = places_of(config), config.called
    place = next((place for place in places if place.exists()), None)
    if place is None and Path(name).suffix == "" and len(Path(name).parts) == 1:
        raise ArgumentError("data.name", name, f"one of {DATA.allowed} to a file or a folder")
    if place is None:
        raise DataError(f"data {name!r}: there is no {listed(places)}: name its folder in data.root")
    suffixes = (".npz", ".csv") if targets == "labels" else (".npz",)
    if place.is_file() and targets != "texts" and place.suffix not in suffixes:
        kinds = " or ".join((*suffixes, *(() if targets == "labels" else ("a folder",))))
        raise DataError(f"{place}: is no kind of file that task {task} reads: allowed is {kinds}")
    return place


def places_of(config: DataConfig) -> list[Path]:
    """Where a path in a configuration may be, in order."""
    places = [Path(config.called).expanduser(), *(root / config.called for root in folders(config))]
    return list(dict.fromkeys(places))  # an absolute path is the same in every folder


def find_file(config: DataConfig, file: str) -> Path:
    """Where the file of a data set with a name is; a DataError if it is nowhere."""
    roots = folders(config)
    for root in roots:
        if (root / file).is_file():
            return root / file
    raise DataError(
        f"data {config.called!r}: there is no {file} in {listed(roots)}: put it there, or name its folder in "
        "data.root"
    )


def folders(config: DataConfig) -> list[Path]:
    """The folders in which data files are looked for, in order."""
    if config.root:
        return [Path(config.root).expanduser()]
    return usual_folders()


def usual_folders() -> list[Path]:
    """Those of them that no configuration names: ``./data`` and what ``FEDSTILL_DATA`` lists as PATH does."""
    named = os.environ.get("FEDSTILL_DATA", "").split(os.pathsep)
    return [Path("data"), *(Path(each).expanduser() for each in named if each)]


def listed(paths: Sequence[Path]) -> str:
    """Places, in words."""
    return " or ".join(map(str, paths))
