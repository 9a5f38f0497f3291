"""Resources that a run may use at a deployed server, from the ``server.toml`` of the server's owner.

The person with the admin's kit writes the configuration that the server reads, and may not be the owner of
the machine. So a run cannot bring code, or name code or files there, unless the owner allows it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fedstill.core.config_tables import iterate_strings, read_table, read_toml
from fedstill.core.errors import ArgumentError, FedstillError
from fedstill.core.options import CheckedOptions
from fedstill.core.registry import is_object_path
from fedstill.data.config import DATA
from fedstill.data.user_data import default_folders
from fedstill.models.backbones import Features
from fedstill.models.hugging_face import PREFIX
from fedstill.models.model_config import encoder_backbone

FILE = "server.toml"  # in the server's folder
BACKBONE = "features.backbone"
HUB = ("student.model", "data.vocabulary", BACKBONE)  # options with such values
FILES = ("data.", "public.", "student.", "features.")  # tables in which a text may name a file here


@dataclass(frozen=True)
class ServerRules(CheckedOptions):
    """Resources that a run may use at this server."""

    section: ClassVar[str] = "server"

    data: tuple[str, ...] = ()
    """Folders in which a run may name data and other files, relative to this file. Files in the folders of
    FEDSTILL_DATA are always allowed."""

    modules: tuple[str, ...] = ()
    """Custom methods, tasks, networks and data that a run may name: ["my_methods:Prox"]. They run with the
    server's rights."""

    plugins: tuple[str, ...] = ()
    """Folders of these modules, relative to this file; installed modules need none."""

    downloads: bool = False
    """Whether a run may download public data sets and models from the internet to this machine."""

    def require_allowed(self, table: Mapping[str, Any], file: Path) -> None:
        """Refuse a run's configuration that names resources which the server's owner has not allowed.

        Args:
            table: the configuration, as a TOML table.
            file: file of these rules.

        Raises:
            ArgumentError: it names code, a file, or folders with code that the rules do not allow.
        """
        if table.get("plugins"):
            raise ArgumentError("plugins", table["plugins"], f"none, as {file} lists the server's plugins")
        if "extends" in table:
            raise ArgumentError("extends", table["extends"], "none: a run's configuration is sent complete")
        for name, text in iterate_strings(table):
            if _is_code(name, text) and text not in self.modules:
                raise ArgumentError(name, text, f"one of fedstill's own, or of `modules` in {file}")
            path = path_outside_data_folders(name, text)
            if path is not None and not any(path.is_relative_to(each) for each in self._data_folders(file)):
                raise ArgumentError(name, text, f"a path in a folder that `data` of {file} lists")
            if path is None and _is_hub(name, text) and not self.downloads:
                raise ArgumentError(name, text, f"a folder here, as {file} says downloads = false")
        for part in ("data", "public"):
            inner = table.get(part)
            if isinstance(inner, Mapping) and inner.get("download") and not self.downloads:
                raise ArgumentError(f"{part}.download", True, f"false, as {file} says downloads = false")

    def plugin_folders(self, folder: Path) -> list[str]:
        """Return the absolute paths of ``plugins``.

        Args:
            folder: of the server.
        """
        return [str((folder / Path(each).expanduser()).resolve()) for each in self.plugins]

    def _data_folders(self, file: Path) -> list[Path]:
        listed = [file.parent / Path(each).expanduser() for each in self.data]
        return [folder.resolve() for folder in (*listed, *default_folders())]


def read_server_rules(folder: Path) -> ServerRules:
    """Read the rules in a server's folder; without a file nothing is allowed.

    Raises:
        FedstillError: the file cannot be read or has an unknown key.
    """
    file = folder / FILE
    if not file.exists():
        return ServerRules()
    try:
        return read_table(ServerRules, read_toml(file))
    except FedstillError as error:
        raise FedstillError(f"{file}: {error}") from error


def rules_allowing_run(table: Mapping[str, Any]) -> ServerRules:
    """Return rules that allow exactly what a run names, for a rehearsal on the researcher's own machine."""
    named = list(iterate_strings(table))
    paths = {str(path) for name, text in named if (path := path_outside_data_folders(name, text)) is not None}
    modules = {text for name, text in named if _is_code(name, text)}
    plugins = [str(Path(each).resolve()) for each in table.get("plugins", ())]
    return ServerRules(tuple(sorted(paths)), tuple(sorted(modules)), tuple(plugins), downloads=True)


def path_outside_data_folders(name: str, text: str) -> Path | None:
    """Return the absolute path that a configuration's text names outside the usual data folders, or None.

    Args:
        name: dotted name of the option.
        text: its value.

    Raises:
        ArgumentError: it is not a valid path on this machine.

    >>> path_outside_data_folders("student.model", "small-cnn:16") is None
    True
    >>> path_outside_data_folders("data.target", "mass/height") is None
    True
    >>> path_outside_data_folders("data.root", "/srv/../etc").as_posix()
    '/etc'
    >>> path_outside_data_folders("student.model", "hf:/a/b").as_posix()
    '/a/b'
    """
    value = text.removeprefix(PREFIX) if _is_hub(name, text) else text
    path = Path(value)
    outside = path.is_absolute() or str(path).startswith("~") or ".." in path.parts
    if not outside:
        known = name.endswith(".name") and text in DATA  # a data set, even if a folder has its name
        if not value or known or not name.startswith(FILES):
            return None
        if not name.endswith(".root") and not os.path.lexists(path):
            return None
    try:
        return path.expanduser().resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise ArgumentError(name, text, "a path") from error


def _is_hub(name: str, text: str) -> bool:
    """Return whether a text names a folder or a model of the Hugging Face hub with ``hf:``."""
    return name in HUB and text.startswith(PREFIX)


def _is_code(name: str, text: str) -> bool:
    backbone = text if name == BACKBONE else encoder_backbone(text)
    if name == BACKBONE or backbone:  # timm:NAME is no code of the run
        return bool(backbone) and Features(backbone).is_custom
    return is_object_path(text) and not _is_hub(name, text)
