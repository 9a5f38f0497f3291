"""A configuration as a TOML file that explains itself: every option with its value and its meaning.

The meanings are those of :mod:`fedstill.core.option_texts`, so that file and code cannot drift apart.
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from typing import Any, get_type_hints

from fedstill.core.checked import allowed
from fedstill.core.option_texts import meanings
from fedstill.core.registry import Registered

WIDTH = 100  # columns of a comment


def commented(config: Any, path: str = "") -> str:
    """A dataclass, with dataclasses as its sections, as commented TOML.

    Args:
        path: of the section that it is, up to its last dot.

    >>> from fedstill.core.compute import EngineConfig
    >>> print(commented(EngineConfig()))  # doctest: +ELLIPSIS
    # ...
    name = ...
    """
    kind: Any = type(config)
    hints, told = get_type_hints(kind, include_extras=True), meanings(kind)
    values = {part.name: getattr(config, part.name) for part in dataclasses.fields(config)}
    lines: list[str] = []
    if isinstance(config, Registered):
        each = [f"{name}: {_first(of)}" for name, of in config.registry.working().items()]
        which = f"Each has options of its own. {' '.join(each)} Or package.module:Name, one of your own."
        lines += [*_comment(which), f"{config.key} = {_toml(config.called)}"]
    for name, value in values.items():
        if not dataclasses.is_dataclass(value):
            meaning, limits = told.get(name, ""), allowed(hints[name])
            if limits:
                meaning = f"{meaning} Allowed: {limits}.".strip()
            lines += [*_comment(meaning), f"{name} = {_toml(value)}"]
    for name, value in values.items():
        if dataclasses.is_dataclass(value):
            inner = f"{path}{name}"
            lines += ["", "", *_comment(told.get(name, "")), f"[{inner}]"]
            lines.append(commented(value, f"{inner}.").rstrip("\n"))
    return "\n".join(lines) + "\n"


def _first(kind: type[Any]) -> str:
    """The first sentence of what a class says of itself."""
    return " ".join(str(kind.__doc__).split("\n\n")[0].split())


def _comment(text: str) -> list[str]:
    wrapped = textwrap.wrap(text, WIDTH - 2, break_long_words=False, break_on_hyphens=False)
    return [f"# {line}" for line in wrapped]


def _toml(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_toml, value))}]"
    if value is None or isinstance(value, str):
        return json.dumps("none" if value is None else value, ensure_ascii=False)
    return str(value).lower() if isinstance(value, bool) else repr(value)
