"""Presets: complete configurations as TOML files in this folder, and functions that read such files.

A file may extend a preset with ``extends = "name"``, or a file in the same folder with ``extends =
"name.toml"``, and contain only the differences. The first comment line of a file is its description in
``fedstill list``. This
module does not import torch, so that listing presets is fast.
"""

from __future__ import annotations

from pathlib import Path

from fedstill.core.config_tables import Table, iterate_strings, merge_tables, parse_toml, read_text, read_toml
from fedstill.core.errors import ArgumentError, FedstillError, UnknownName, similar_names
from fedstill.core.registry import add_search_folders, is_object_path

__all__ = ["Table", "describe", "filled", "names", "parse", "path", "read", "read_file"]

FOLDER = Path(__file__).parent
FEW = 9  # presets that are suggested at most


def names() -> list[str]:
    """The presets, in alphabetical order."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def path(name: str) -> Path:
    """The file of a preset.

    Raises:
        UnknownName: there is no such preset.
    """
    if name not in names():
        alike = [preset for preset in names() if preset.startswith(f"{name}-") or preset.endswith(f"-{name}")]
        few = len(alike) <= FEW
        meant = ", ".join(map(repr, alike)) if few else f"one of {len(alike)} in `fedstill list presets`"
        if name and (file := Path(name) / "config.toml").is_file():  # a run's folder
            meant = repr(str(file))
        near = ", ".join(map(repr, similar_names(name, names(), 0.5)[:3]))
        see = "`fedstill list presets` shows all" + (f"; nearest: {near}" if near else "")
        raise UnknownName("preset", name, names(), see=see, suggestion=meant)
    return FOLDER / f"{name}.toml"


def describe(name: str) -> str:
    """The first comment line of a preset, which says what it is; empty if there is none.

    Raises:
        UnknownName: there is no such preset.
    """
    lines = path(name).read_text(encoding="utf-8").splitlines()
    return next((line.lstrip("# ").rstrip() for line in lines if line.startswith("#")), "")


def read(target: str, kind: type | None = None) -> Table:
    """The table of a preset or of a TOML file, with what it extends filled in.

    Args:
        target: the name of a preset, or a path that ends with ``.toml``.
        kind: the configuration that it describes, where what it extends may be of another method or split.

    Raises:
        UnknownName: there is no such preset.
        FedstillError: there is no such file, or it is not TOML.
    """
    return read_file(Path(target) if target.endswith(".toml") else path(target), kind)


def read_file(file: Path, kind: type | None = None) -> Table:
    """The table of a TOML file, with what it extends filled in; called after the file unless it says a name.

    Raises:
        FedstillError: there is no such file, or it is not TOML.
    """
    return {"name": file.stem, **parse(read_text(file), str(file), kind, file.parent)}


def parse(text: str, source: str = "the text", kind: type | None = None, folder: Path | None = None) -> Table:
    """TOML as a table, with what it extends filled in.

    Where it names ``module:Name`` that lies in its folder, the table says so (``plugins``), and it can be
    imported from then on.

    Args:
        text: TOML; may name a preset or, ending with ``.toml``, a file of its folder with ``extends`` on top.
        source: what an error calls this text.
        kind: as in :func:`read`.
        folder: in which it lies; None: nowhere.

    Raises:
        FedstillError: the text is not TOML, extends what is no preset, or extends itself.

    >>> parse("seed = 1\\n[split]\\nnodes = 8")
    {'seed': 1, 'split': {'nodes': 8}}
    """
    return filled(parse_toml(text, source), kind, folder)


def filled(table: Table, kind: type | None, folder: Path | None, seen: tuple[str, ...] = ()) -> Table:
    """A table with what it extends filled in, as :func:`parse`."""
    table = dict(table)
    base = table.pop("extends", None)
    below: Table = {}
    if base is not None:
        if not isinstance(base, str):
            raise ArgumentError("extends", base, "the name of a preset, or a .toml file")
        file = (folder or Path()) / base if base.endswith(".toml") else path(base)
        name = str(file.resolve()) if base.endswith(".toml") else base
        if name in seen:
            raise FedstillError(f"presets extend each other in a circle: {' -> '.join((*seen, name))}")
        below = filled(read_toml(file), kind, file.parent, (*seen, name))
        below.pop("name", None)  # what differs from a preset is not that preset any more
    if plugins := [*below.get("plugins", []), *_plugin_folders(table, folder)]:
        table["plugins"] = list(dict.fromkeys([*plugins, *table.get("plugins", [])]))
        add_search_folders(table["plugins"])
    return merge_tables(kind, below, table) if below else table


def _plugin_folders(table: Table, folder: Path | None) -> list[str]:
    """The folder, if a table names ``module:Name`` that lies in it."""
    if folder is None:
        return []
    there = (
        folder / name.partition(":")[0].partition(".")[0]
        for _, name in iterate_strings(table)
        if is_object_path(name)
    )
    found = any(place.is_dir() or place.with_suffix(".py").is_file() for place in there)
    return [str(folder.resolve())] if found else []
