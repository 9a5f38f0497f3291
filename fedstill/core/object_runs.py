"""Folders of runs that :func:`fedstill.distil` made of objects: no file holds their data and networks."""

from __future__ import annotations

from pathlib import Path

from fedstill.core.errors import RunFolderError

OBJECTS = "setting.json"  # what such a run keeps in place of a config.toml
ATTACKS = "an attack repeats a run by its config.toml, as fedstill run and fedstill.run_preset write it"


def require_no_objects(folder: Path, cure: str) -> None:
    """Refuse the folder of such a run.

    Raises:
        RunFolderError: it is one; ``cure`` says what there is to do.
    """
    if (folder / OBJECTS).exists() and not (folder / "config.toml").exists():
        told = f"{folder} holds a run of fedstill.distil, without its data and networks"
        raise RunFolderError(f"{told}: {cure}")
