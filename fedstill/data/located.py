"""Where the files of a data set lie: the path that a configuration gives, or the folders that hold packs."""

from __future__ import annotations

import os
from pathlib import Path

from fedstill.core.errors import ArgumentError, DataError
from fedstill.data.config import DataConfig, available


def located(config: DataConfig, task: str, *suffixes: str) -> Path:
    """The folder or file that a path in a configuration means: an ``.npz``, or what else a task reads.

    Raises:
        ArgumentError: neither a name that is known nor a path.
        DataError: no such file or folder, or a file of a kind that the task does not read.
    """
    places = [Path(config.name).expanduser(), *(root / config.name for root in folders(config))]
    places = list(dict.fromkeys(places))  # an absolute path is the same in every folder
    suffixes = (".npz", *suffixes)
    for place in places:
        if place.is_dir() or (place.is_file() and place.suffix in suffixes):
            return place
    other = next((place for place in places if place.is_file()), None)
    if other is not None:
        kinds = " or ".join((*suffixes, *(() if task == "multi-label" else ("a folder",))))
        raise DataError(f"{other}: is no kind of file that task {task} reads: allowed is {kinds}")
    if config.name.endswith(suffixes) or len(Path(config.name).parts) > 1:
        kinds = ", ".join(suffixes)
        raise DataError(f"data {config.name!r}: no such {kinds} or folder; looked for {_listed(places)}")
    names = ", ".join(available())
    raise ArgumentError("data.name", config.name, f"one of {names}, or a path to an .npz or a folder")


def find_pack(config: DataConfig, file: str) -> Path:
    """Where the file of a data set with a name is.

    Raises:
        DataError: it is nowhere.
    """
    roots = folders(config)
    for root in roots:
        if (root / file).is_file():
            return root / file
    raise DataError(
        f"data {config.name!r}: there is no {file} in {_listed(roots)}: put it there, or name its folder in "
        "data.root"
    )


def folders(config: DataConfig) -> list[Path]:
    """The folders in which data files are looked for, in order."""
    if config.root:
        return [Path(config.root).expanduser()]
    named = os.environ.get("FEDSTILL_DATA")
    return [Path("data"), *([Path(named).expanduser()] if named else [])]


def _listed(paths: list[Path]) -> str:
    return " or ".join(str(path) for path in paths)
