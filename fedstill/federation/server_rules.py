"""What a run may use at a deployed server beside what fedstill brings: what its owner's ``server.toml`` says.

Whoever holds an admin's kit writes the configuration that the server reads, and need not be whoever owns the
machine. So no run brings code, names code or names a file there unless the owner lets it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fedstill.core import toml
from fedstill.core.config_tables import read_table
from fedstill.core.errors import ArgumentError, FedstillError
from fedstill.core.options import Checked
from fedstill.core.registry import is_path
from fedstill.data.config import DATA
from fedstill.data.user_data import default_folders

FILE = "server.toml"  # in the server's folder
HF = "hf:"  # before a folder, where a model is named
HUB = ("student.model", "data.vocabulary")  # where it is
FILES = ("data.", "public.", "student.")  # under which a text may name what lies in the current folder


@dataclass(frozen=True)
class ServerRules(Checked):
    """What a run may use at this server."""

    under: ClassVar[str] = "server"

    data: tuple[str, ...] = ()
    """Folders beneath which a run may name data and other files, relative to this file. What lies in
    the folders of FEDSTILL_DATA, a run may ask for in any case."""

    modules: tuple[str, ...] = ()
    """Methods, tasks, networks and data of your own that a run may name: ["my_methods:Prox"]. They run as the
    server does."""

    plugins: tuple[str, ...] = ()
    """Folders in which these lie, relative to this file; what is installed is found without."""

    downloads: bool = False
    """Whether a run may have this machine fetch public data sets and models from the internet."""

    def check(self, table: Mapping[str, Any], file: Path) -> None:
        """Refuse a run's configuration that names what its server's owner has not let it use.

        Args:
            table: the configuration, as TOML has it.
            file: where the rules stand.

        Raises:
            ArgumentError: code, a file, or folders with code that the rules do not let in.
        """
        if table.get("plugins"):
            raise ArgumentError("plugins", table["plugins"], f"none here, but those of {file}")
        if "extends" in table:
            raise ArgumentError("extends", table["extends"], "nothing here: a run comes complete")
        for name, text in toml.texts(table):
            if _is_code(name, text) and text not in self.modules:
                raise ArgumentError(name, text, f"one of fedstill's own here, or of `modules` in {file}")
            place = place_of(name, text)
            if place is not None and not any(place.is_relative_to(each) for each in self._folders(file)):
                raise ArgumentError(name, text, f"what lies in a folder that `data` of {file} lists")
            if place is None and _is_hub(name, text) and not self.downloads:
                raise ArgumentError(name, text, f"a folder here, as {file} says downloads = false")
        for part in ("data", "public"):
            inner = table.get(part)
            if isinstance(inner, Mapping) and inner.get("download") and not self.downloads:
                raise ArgumentError(f"{part}.download", True, f"false, as {file} says downloads = false")

    def plugin_folders(self, folder: Path) -> list[str]:
        """Those of ``plugins``, whole.

        Args:
            folder: the server's.
        """
        return [str((folder / Path(each).expanduser()).resolve()) for each in self.plugins]

    def _folders(self, file: Path) -> list[Path]:
        listed = [file.parent / Path(each).expanduser() for each in self.data]
        return [folder.resolve() for folder in (*listed, *default_folders())]


def read(folder: Path) -> ServerRules:
    """The rules in a server's folder; where there are none, nothing is let in.

    Raises:
        FedstillError: the file cannot be read, or says something that is not known.
    """
    file = folder / FILE
    if not file.exists():
        return ServerRules()
    try:
        return read_table(ServerRules, toml.read(file))
    except FedstillError as error:
        raise FedstillError(f"{file}: {error}") from error


def for_run(table: Mapping[str, Any]) -> ServerRules:
    """The rules that let in exactly what a run names: of a rehearsal, whose server is the researcher's."""
    named = list(toml.texts(table))
    places = {str(place) for name, text in named if (place := place_of(name, text)) is not None}
    modules = {text for name, text in named if _is_code(name, text)}
    plugins = [str(Path(each).resolve()) for each in table.get("plugins", ())]
    return ServerRules(tuple(sorted(places)), tuple(sorted(modules)), tuple(plugins), downloads=True)


def place_of(name: str, text: str) -> Path | None:
    """The file or folder, whole, that a text names outside the usual folders of data, as whoever reads it
    understands it; None if it names none.

    Args:
        name: the text's place in a configuration.

    Raises:
        ArgumentError: it can be no path on this machine.

    >>> place_of("student.model", "small-cnn:16") is place_of("data.target", "mass/height") is None
    True
    >>> place_of("data.root", "/srv/../etc").as_posix(), place_of("student.model", "hf:/a/b").as_posix()
    ('/etc', '/a/b')
    """
    told = text.removeprefix(HF) if _is_hub(name, text) else text
    path = Path(told)
    outside = path.is_absolute() or str(path).startswith("~") or ".." in path.parts
    if not outside:
        known = name.endswith(".name") and text in DATA  # which no folder of that name stands for
        if not told or known or not name.startswith(FILES):
            return None
        if not name.endswith(".root") and not os.path.lexists(path):
            return None
    try:
        return path.expanduser().resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise ArgumentError(name, text, "a path") from error


def _is_hub(name: str, text: str) -> bool:
    """Whether a text is ``hf:`` with a folder or a name of the hub, where that means something."""
    return name in HUB and text.startswith(HF)


def _is_code(name: str, text: str) -> bool:
    return is_path(text) and not _is_hub(name, text)
