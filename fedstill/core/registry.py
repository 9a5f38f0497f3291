"""Things by name: the package's own, those of installed packages, and ``module:Name`` for any other.

A package offers its own under an entry point (``[project.entry-points."fedstill.methods"]``, say). Nothing is
imported until it is asked for by name, so that a broken plug-in is in nobody's way who does not name it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from fedstill.core.errors import ArgumentError, UnknownName
from fedstill.core.imports import OWN, find, first_line, is_path

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """What can be named in one place of a configuration.

    Args:
        what: it is, for errors: "method".
        own: ``module:Name`` of each of the package's own, by name.
        kind: of what it must be an instance, or for a class a subclass; None is anything.

    >>> from fedstill.core.errors import ArgumentError
    >>> errors = Registry("error", {"argument": "fedstill.core.errors:ArgumentError"})
    >>> errors["argument"] is errors["fedstill.core.errors:ArgumentError"] is ArgumentError
    True
    >>> errors["arguments"]
    Traceback (most recent call last):
    ...
    fedstill.core.errors.UnknownName: unknown error 'arguments': did you mean 'argument'?
    """

    def __init__(self, what: str, own: Mapping[str, str], kind: type | None = None) -> None:
        self.what, self.own, self.kind = what, dict(own), kind
        self._found: dict[str, T] = {}

    @property
    def group(self) -> str:
        """The entry points under which packages offer theirs."""
        return f"fedstill.{self.what.replace(' ', '_')}s"

    def __getitem__(self, name: str) -> T:
        """What has a name.

        Raises:
            UnknownName: nothing has.
            ArgumentError: it cannot be imported, or is something else.
        """
        if name not in self._found:
            self._found[name] = self._load(name)
        return self._found[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self.own or is_path(name) or name in _installed(self.group))

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        yield from (name for name in _installed(self.group) if name not in self.own)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def known(self) -> tuple[str, ...]:
        """Names of the package's own, and of what has been asked for."""
        return tuple(dict.fromkeys((*self.own, *self._found)))

    def origin(self, name: str) -> str:
        """The distribution or module that a name comes from; ``"fedstill"`` is this package.

        >>> Registry("error", {}).origin("my_lab.errors:Odd")
        'my_lab'
        """
        if name in self.own:
            return "fedstill"
        return (
            (name if is_path(name) else _installed(self.group)[name].value)
            .partition(":")[0]
            .partition(".")[0]
        )

    def _load(self, name: str) -> T:
        if name in self.own:
            module, _, attribute = self.own[name].partition(":")
            ours: T = getattr(importlib.import_module(module), attribute)
            return ours
        installed = _installed(self.group)
        found: Any
        if name in installed:
            try:
                found = installed[name].load()
            except (*OWN, SyntaxError) as error:
                reason = f"one that can be imported: {installed[name].value} cannot, {first_line(error)}"
                raise ArgumentError(self.what, name, reason) from error
        elif is_path(name):
            found = find(name, Path.cwd(), self.what)
        else:
            raise UnknownName(self.what, name, list(self))
        if self.kind is not None and not isinstance(found, self.kind):
            raise ArgumentError(self.what, name, f"a {self.kind.__name__}, and this is {found!r}")
        thing: T = found
        return thing


@cache
def _installed(group: str) -> Mapping[str, EntryPoint]:
    """What installed packages offer, by name."""
    return {point.name: point for point in entry_points(group=group)}
