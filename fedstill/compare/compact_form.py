"""A comparison's file in its short form, written out: what a reader of comparisons knows is left.

Short for what many methods share (``[method]``), for one option varied at a time (``[vary]``), for a paper's
table (``[published]``), and for the same comparison at another scale (``[scale.NAME]``). ``[reproduces]``
says which table or figure of a paper the file is about: :mod:`fedstill.compare.reproduction` reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedstill.compare.comparison import SINGLE, merged
from fedstill.core.errors import ArgumentError, UnknownName
from fedstill.core.toml import Table

SMALL = "small"  # the scale of a file as it stands
SHORT = ("reproduces", "scale", "method", "vary", "published", "arguments")  # keys that are written out
BY_LABEL = ("options", "runs")  # tables of methods by label
LISTS = ("methods", "options", "vary")  # any of them names the methods of a comparison
CELL = "a figure, or [mean, deviation]"


def written_out(table: Mapping[str, Any], scale: str = SMALL) -> Table:
    """A comparison's table without its short forms, at one of its scales.

    Raises:
        ArgumentError, UnknownName: a short form that says nothing, or a scale that the file has not.

    >>> written_out({"method": {"name": "fedkd"}, "vary": {"gamma": [1.0, 0.5]}})["options"]["gamma-0.5"]
    {'name': 'fedkd', 'gamma': 0.5}
    """
    whole = at_scale(table, scale)
    about = _table(whole.pop("reproduces", {}), "reproduces")
    whole.pop("arguments", None)  # of its program
    shared = _table(whole.pop("method", {}), "method")
    options = {label: _table(given, f"options.{label}") for label, given in whole.get("options", {}).items()}
    for key, values in _table(whole.pop("vary", {}), "vary").items():
        if not isinstance(values, list) or not values:
            raise ArgumentError(f"vary.{key}", values, "a list of values")
        options |= {f"{key}-{_label(value)}": {key: value} for value in values}
    if shared:
        options = {
            label: given if "name" in given else {**shared, **given} for label, given in options.items()
        }
    if options:
        whole["options"] = options
        whole.setdefault("methods", list(options))
    if "published" in whole:
        named = f"{about.get('paper', '')}, {about.get('what', '')}".strip(", ")
        figures = list(_published(_table(whole.pop("published"), "published"), named))
        whole["paper"] = [*whole.get("paper", []), *figures]
    return whole


def at_scale(table: Mapping[str, Any], scale: str = SMALL) -> Table:
    """A table at one of its scales: what ``[scale.NAME]`` says stands above what the file says.

    A base, or a method's options, that extend a preset begin anew; lists are replaced as wholes. Options of
    methods that the scale does not list are left out.

    Raises:
        UnknownName: the file has no such scale.

    >>> at_scale({"seeds": 1, "scale": {"paper": {"seeds": 3}}}, "paper")
    {'seeds': 3}
    >>> small = {"options": {"fediod": {"steps": 9}, "fedavg": {"rounds": 9}}}
    >>> above = {"options": {"fediod": {"extends": "paper"}, "fedavg": {"participation": 0.5}}}
    >>> at_scale({**small, "scale": {"paper": above}}, "paper")["options"]
    {'fediod': {'extends': 'paper'}, 'fedavg': {'rounds': 9, 'participation': 0.5}}
    """
    below = dict(table)
    scales = _table(below.pop("scale", {}), "scale")
    if scale == SMALL:
        return below
    if scale not in scales:
        raise UnknownName("scale", scale, [SMALL, *scales])
    above = _table(scales[scale], f"scale.{scale}")
    if "methods" in above:
        below = _only(below, above["methods"])
        if isinstance(below.get("settings"), list):
            below["settings"] = [
                _only(setting, above["methods"]) if isinstance(setting, Mapping) else setting
                for setting in below["settings"]
            ]
    for key, value in above.items():
        old = below.get(key)
        if not isinstance(old, Mapping) or not isinstance(value, Mapping):
            below[key] = value
        elif key == "base":
            below[key] = dict(value) if "extends" in value else merged(old, value)
        else:
            below[key] = {
                name: {**old[name], **inner} if _goes_on(old.get(name), inner) else inner
                for name, inner in {**old, **value}.items()
            }
    return below


def _goes_on(below: object, above: object) -> bool:
    """Whether a table stands above another one, and does not begin anew."""
    return isinstance(above, Mapping) and isinstance(below, Mapping) and "extends" not in above


def _only(table: Mapping[str, Any], methods: Sequence[str]) -> Table:
    """A table without what it says of other methods than these."""
    return {
        key: {label: of for label, of in value.items() if label in methods}
        if key in BY_LABEL and isinstance(value, Mapping)
        else value
        for key, value in table.items()
    }


def _published(given: Mapping[str, Any], source: str) -> Iterator[Table]:
    """A paper's table, row by row: figures by method, or by setting and method."""
    rest = dict(given)
    source, figures = rest.pop("source", source), rest.pop("figures", ["accuracy"])
    for name, value in rest.items():
        rows = value if isinstance(value, Mapping) else {name: value}
        for method, row in rows.items():
            cells = row if len(figures) > 1 else [row]
            if not isinstance(cells, list) or len(cells) != len(figures):
                allowed = f"{len(figures)} cells ({', '.join(figures)}), each {CELL}, or empty text"
                raise ArgumentError(f"published.{method}", row, allowed)
            for figure, cell in zip(figures, cells, strict=True):
                if cell == "":
                    continue
                pair = cell if isinstance(cell, list) else [cell]
                numbers = all(isinstance(part, int | float) for part in pair)
                if not numbers or not 1 <= len(pair) <= 2:
                    raise ArgumentError(f"published.{method}", cell, CELL)
                told = {"method": method, "figure": figure, "value": float(pair[0]), "source": source}
                told |= {"std": float(pair[1])} if len(pair) == 2 else {}
                yield told | ({"setting": name} if rows is value and name != SINGLE else {})


def _label(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _table(value: object, key: str) -> Table:
    if not isinstance(value, Mapping):
        raise ArgumentError(key, value, "a table")
    return dict(value)
