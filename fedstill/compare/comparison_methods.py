"""The methods of a comparison: from their names and options to a complete table each, by label."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.compare.comparison import merged
from fedstill.core.errors import ArgumentError, FedstillError, UnknownName
from fedstill.core.toml import Table
from fedstill.protocol.method import METHODS
from fedstill.runs import presets
from fedstill.runs.config import RunConfig, from_dict, to_dict


def methods_by_label(names: Sequence[str], table: Mapping[str, Any]) -> dict[str, Table]:
    """Each method's complete table, by label."""
    labels = _labels(names)
    if not names:
        raise ArgumentError("methods", [], "a list of methods (`fedstill list`), presets or .toml files")
    if twice := [name for name, label in zip(names, labels, strict=True) if labels.count(label) > 1]:
        raise ArgumentError("methods", ", ".join(twice), "each once: a file can name one by other labels")
    given = tables_at(table, "options", labels)
    return {
        label: _method(label, name, given.get(label, {})) for label, name in zip(labels, names, strict=True)
    }


def _labels(names: Sequence[str]) -> list[str]:
    """What methods are called in a comparison: by a file's name, or by a class's; with the module's before
    it, where classes of several modules have one name.

    >>> _labels(["fedavg", "mine/run.toml", "lab:Own", "a:Best", "b.c:Best"])
    ['fedavg', 'run', 'Own', 'a.Best', 'b.c.Best']
    """
    short = [Path(name).stem if name.endswith(".toml") else name.rpartition(":")[2] for name in names]
    return [
        name.replace(":", ".") if short.count(label) > 1 and ":" in name else label
        for name, label in zip(names, short, strict=True)
    ]


def _method(label: str, name: str, given: Table) -> Table:
    """The complete table of one method: named by its options, by its label, or by a preset."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", label):
        raise ArgumentError("methods", name, "letters, digits, '.', '_' and '-', as it names a folder")
    below: Table = {}
    if "extends" in given:
        below = table_at(presets.read(str(given["extends"]), RunConfig), "method")
        given = {key: value for key, value in given.items() if key != "extends"}
    elif "name" not in given:
        if name in METHODS:
            below = {"name": name}
        elif name.endswith(".toml") or name in presets.names():
            below = table_at(presets.read(name, RunConfig), "method")
        else:
            known = [*METHODS, *presets.names()]
            module = Path(name).stem if name.endswith(".py") else name
            meant = f"'{module}:CLASS', a method in that file" if Path(f"{module}.py").is_file() else ""
            raise UnknownName("method or preset", name, known, see="see `fedstill list`", meant=meant)
    try:
        run = from_dict({"method": merged({"method": below}, {"method": given})["method"]})
    except FedstillError as error:
        raise FedstillError(f"{label}: {error}") from error
    complete: Table = to_dict(run)["method"]
    return complete


def beside(names: Sequence[str], folder: Path | None) -> list[str]:
    """Names of methods, presets and files, these from the folder of the comparison if they lie there."""
    there = [folder / name if folder and name.endswith(".toml") else Path() for name in names]
    return [str(file) if file.is_file() else name for file, name in zip(there, names, strict=True)]


def extending(options: Table, folder: Path | None) -> Table:
    """Options by label; files that they extend are found as :func:`beside` finds them."""
    return {
        label: {**given, "extends": beside([str(given["extends"])], folder)[0]}
        if isinstance(given, dict) and "extends" in given
        else given
        for label, given in options.items()
    }


def table_at(table: Mapping[str, Any], key: str) -> Table:
    value = table.get(key, {})
    if not isinstance(value, dict):
        raise ArgumentError(key, value, "a table")
    return value


def tables_at(
    table: Mapping[str, Any], key: str, labels: Mapping[str, Any] | Sequence[str]
) -> dict[str, Table]:
    """A table of tables by label."""
    found = table_at(table, key)
    for label in found:
        if label not in labels:
            allowed = f"options of what methods lists: {', '.join(labels)}"
            raise ArgumentError(key, label, allowed)
    return {label: table_at(found, label) for label in found}
