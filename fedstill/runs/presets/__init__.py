"""Presets: complete experiments as TOML files beside this module, and how such files are read.

A file may start from a preset with ``extends = "name"`` on top and then say only what differs.
The first comment line of a file describes it; ``fedstill list`` shows that line. Nothing here
imports torch, so that listing and asking for help stay quick.
"""

from __future__ import annotations

from pathlib import Path

from fedstill.core import toml
from fedstill.core.errors import ArgumentError, FedstillError, UnknownName
from fedstill.core.tables import layered
from fedstill.core.toml import Table

__all__ = ["Table", "describe", "names", "parse", "path", "read", "read_file"]

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
        raise UnknownName("preset", name, names(), meant=meant)
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
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise FedstillError(f"cannot read {str(file)!r}: {reason}") from error
    return {"name": file.stem, **parse(text, str(file), kind)}


def parse(text: str, source: str = "the text", kind: type | None = None) -> Table:
    """TOML as a table, with what it extends filled in.

    Args:
        text: TOML; may name a preset with ``extends`` on top.
        source: what an error calls this text.
        kind: as in :func:`read`.

    Raises:
        FedstillError: the text is not TOML, extends what is no preset, or extends itself.

    >>> parse("seed = 1\\n[split]\\nnodes = 8")
    {'seed': 1, 'split': {'nodes': 8}}
    """
    return _parse(text, source, kind, ())


def _parse(text: str, source: str, kind: type | None, seen: tuple[str, ...]) -> Table:
    table = toml.parse(text, source)
    base = table.pop("extends", None)
    if base is None:
        return table
    if not isinstance(base, str):
        raise ArgumentError("extends", base, "the name of a preset")
    if base in seen:
        raise FedstillError(f"presets extend each other in a circle: {' -> '.join((*seen, base))}")
    file = path(base)
    below = _parse(file.read_text(encoding="utf-8"), str(file), kind, (*seen, base))
    below.pop("name", None)  # what differs from a preset is not that preset any more
    return layered(kind, below, table)
