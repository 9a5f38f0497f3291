"""A user's own function from its path, ``package.module:function``.

Things by name: the package's own, those of installed packages, and ``module:Name`` for any other.

A package offers its own under an entry point (``[project.entry-points."fedstill.methods"]``, say). Nothing is
imported until it is asked for by name, so that a broken plug-in is in nobody's way who does not name it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import MISSING, fields
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from inspect import get_annotations
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, get_type_hints

from fedstill.core.errors import ArgumentError, PluginError, UnknownName
from fedstill.core.options import CheckedOptions

# What a user's own function raises when something does not suit it.
USER_CODE_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    ImportError,
    OSError,
)


def is_object_path(spec: str) -> bool:
    """Whether a text can name a function.

    >>> is_object_path("clinic.scans:load"), is_object_path("small-cnn:16"), is_object_path("npz")
    (True, False, False)
    """
    module, colon, attribute = spec.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), attribute))


def import_object(spec: str, folder: Path, argument: str) -> Callable[..., Any]:
    """The function that a path names, from a file in the owner's folder or from what is installed.

    Args:
        spec: ``"package.module:function"``.
        folder: looked into before everything else.
        argument: the argument that names it, for errors.

    Raises:
        ArgumentError: there is no such module or function, its import fails, or its module has the name of
            one from elsewhere that is in use already.
    """
    module, _, attribute = spec.partition(":")
    if not is_object_path(spec):
        raise ArgumentError(argument, spec, "package.module:function")
    folder = folder.resolve()
    here = str(folder)
    sys.path.insert(0, here)
    try:
        importlib.invalidate_caches()
        found = importlib.import_module(module)
    except (*USER_CODE_ERRORS, SyntaxError) as error:
        reason = first_line(error)
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise ArgumentError(argument, spec, f"one in {folder} or installed here") from error
        raise ArgumentError(argument, spec, f"what can be imported, which fails: {reason}") from error
    finally:
        sys.path.remove(here)
        if here not in sys.path:
            sys.path.append(here)  # what the function itself imports later
    mine = folder.joinpath(*module.split(".")).with_suffix(".py")
    origin = Path(getattr(found, "__file__", None) or "")
    if mine.is_file() and origin.resolve() != mine:
        raise ArgumentError(
            argument, spec, f"another name for {mine}: a module {module!r} is {origin} already"
        )
    if not hasattr(found, attribute):
        raise ArgumentError(argument, spec, f"one of {origin}, which has no {attribute!r}")
    function = getattr(found, attribute)
    if not callable(function):
        raise ArgumentError(argument, spec, f"a function or class, which {attribute!r} of {origin} is not")
    return function  # type: ignore[no-any-return]


def add_search_folders(folders: Iterable[str]) -> None:
    """Look for modules in some folders, too, after all that is installed."""
    sys.path.extend(folder for folder in folders if folder not in sys.path)


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


T = TypeVar("T")
PACKAGE = "fedstill"  # the package whose things need no leave
_FOLDER: ContextVar[Path | None] = ContextVar("_FOLDER", default=None)


@contextmanager
def searching_in(folder: Path) -> Iterator[None]:
    """Within, ``module:Name`` that is not installed is looked for in a folder, and not in the current one."""
    token = _FOLDER.set(folder)
    try:
        yield
    finally:
        _FOLDER.reset(token)


class Registry(Mapping[str, T], Generic[T]):
    """What can be named in one place of a configuration.

    Args:
        what: it is, for errors: "method".
        builtin: ``module:Name`` of each of the package's own, by name.
        base: the class of which it must be a subclass; None is a function.
        call_signature: what such a function is called with, for errors.
        fallback: what every name is that nothing else has ("a path"), and the ``module:Name`` of the package's
            own that stands for it; None: such a name is an error.

    >>> from fedstill.core.errors import ArgumentError
    >>> errors = Registry("error", {"argument": "fedstill.core.errors:ArgumentError"})
    >>> errors["argument"] is errors["fedstill.core.errors:ArgumentError"] is ArgumentError
    True
    >>> errors["arguments"]
    Traceback (most recent call last):
    ...
    fedstill.core.errors.UnknownName: unknown error 'arguments': did you mean 'argument'?
    """

    def __init__(
        self,
        what: str,
        builtin: Mapping[str, str],
        base: type | None = None,
        call_signature: str = "",
        fallback: tuple[str, str] | None = None,
    ) -> None:
        self.what, self.builtin, self.base, self.call_signature, self.fallback = (
            what,
            dict(builtin),
            base,
            call_signature,
            fallback,
        )
        self._loaded: dict[str, T] = {}

    @property
    def group(self) -> str:
        """The entry points under which packages offer theirs."""
        return f"fedstill.{self.what.replace(' ', '_')}s"

    def __getitem__(self, name: str) -> T:
        """What has a name.

        Raises:
            UnknownName: nothing has.
            PluginError: it cannot be imported.
            ArgumentError: it is something else.
        """
        if self.fallback is not None and name not in self:
            return self._import_builtin(self.fallback[1])
        if is_object_path(name):  # which may be another thing in another folder
            return self._load(name)
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (
            name in self.builtin or is_object_path(name) or name in _installed(self.group)
        )

    def __iter__(self) -> Iterator[str]:
        yield from self.builtin
        yield from (name for name in _installed(self.group) if name not in self.builtin)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"a {self.what} by name"

    # Each is itself alone, and can be part of a type: to compare them as mappings would import all they name.
    __eq__, __hash__ = object.__eq__, object.__hash__

    @property
    def choices(self) -> str:
        """What can be named, for help and errors."""
        return ", ".join(self) + (f", or {self.fallback[0]}" if self.fallback else "")

    def importable(self) -> dict[str, T]:
        """All that can be imported, by name: who does not name a broken one is not to be stopped by it."""
        found = {}
        for name in self:
            try:
                found[name] = self[name]
            except ArgumentError:
                continue
        return found

    def name_of(self, thing: Any) -> str:
        """The name by which a class or function can be asked for: ``module:Name``, if it has no shorter one.

        >>> Registry("error", {"argument": "fedstill.core.errors:ArgumentError"}).name_of(ArgumentError)
        'argument'
        """
        place = f"{thing.__module__}:{thing.__qualname__}"
        short = self.canonical_name(place)
        if short in self.builtin:  # which nobody else's is, whatever it says of itself
            return short if self[short] is thing else place
        if short != place:
            return short
        package = place.partition(":")[0].partition(".")[0]
        for name, point in _installed(self.group).items():  # offered from where it is not defined
            if name not in self.builtin and point.value.partition(":")[0].partition(".")[0] == package:
                with suppress(ArgumentError):
                    if self[name] is thing:
                        return name
        return place

    def is_fallback(self, kind: type) -> bool:
        """Whether a class is the one for all names that nothing else has."""
        return self.fallback is not None and self.fallback[1] == f"{kind.__module__}:{kind.__qualname__}"

    def canonical_name(self, name: str) -> str:
        """The one name that stands for all names of the same thing; nothing is imported to find it."""
        offered = _installed(self.group).items()
        places = {point.value: short for short, point in offered if short not in self.builtin}
        return {**places, **{place: short for short, place in self.builtin.items()}}.get(name, name)

    def is_allowed(self, name: object, also_allowed: Iterable[str]) -> bool:
        """Whether who allows the package's own and some more allows this one.

        Only what is allowed is imported, to find its other names.
        """
        known = {self.canonical_name(each) for each in (*self.builtin, *also_allowed)}
        for each in also_allowed:
            with suppress(ArgumentError):
                known.add(self.name_of(self[each]))
        return isinstance(name, str) and self.canonical_name(name) in known

    def require_allowed(self, name: object, also_allowed: Iterable[str], path: str, rule: str) -> None:
        """Refuse a name that somebody sent, unless it is allowed and here; nothing else is imported, or told.

        Args:
            also_allowed: names that are allowed beside the package's own.
            path: where it was named, for errors.
            rule: of the policy, that allows more.

        Raises:
            ArgumentError: it is not.
        """
        if not self.is_allowed(name, also_allowed):
            allowed = f"one that {rule} of the node names, or one of {', '.join(self.builtin)}"
            raise ArgumentError(path, name, allowed)
        if name not in self:
            raise ArgumentError(path, name, f"one that is installed at the node, as {rule} of it allows it")

    def origin(self, name: str) -> str:
        """The distribution or module that a name comes from; ``"fedstill"`` is this package.

        >>> Registry("error", {}).origin("my_lab.errors:Odd")
        'my_lab'
        """
        if name in self.builtin:
            return PACKAGE
        installed = _installed(self.group)
        module = (installed[name].value if name in installed else name).partition(":")[0]
        package = module.partition(".")[0]
        return (
            module if package == PACKAGE else package
        )  # what lies among ours without being listed is not ours

    def _load(self, name: str) -> T:
        if name in self.builtin:
            return self._import_builtin(self.builtin[name])
        installed = _installed(self.group)
        found: Any
        if name in installed:
            try:
                found = installed[name].load()
            except Exception as error:  # whatever a stranger's module does as it is imported
                reason = f"one that can be imported: {installed[name].value} cannot, {first_line(error)}"
                raise PluginError(self.what, name, reason) from error
        elif is_object_path(name):
            with suppress(Exception):  # what is installed comes before what lies in a folder
                importlib.import_module(name.partition(":")[0])
            try:
                found = import_object(name, _FOLDER.get() or Path.cwd(), self.what)
            except ArgumentError as error:
                raise PluginError(self.what, name, error.expected) from error
            except Exception as error:
                reason = f"one that can be imported, which fails: {first_line(error)}"
                raise PluginError(self.what, name, reason) from error
        else:
            raise UnknownName(self.what, name, [*self, "your own as module:Name"])
        if self.base is None:
            asked = None if callable(found) else f"a function of {self.call_signature}"
        elif not (isinstance(found, type) and issubclass(found, self.base)):
            asked = f"a subclass of {self.base.__name__}, and this is {found!r}"
        else:
            asked = self.base.validate_class(found) if issubclass(self.base, Registrable) else None
        if asked is not None:
            raise PluginError(self.what, name, asked)  # which may quote it
        thing: T = found
        return thing

    def _import_builtin(self, place: str) -> T:
        module, _, attribute = place.partition(":")
        found: T = getattr(importlib.import_module(module), attribute)
        return found


class Registrable(CheckedOptions):
    """What a configuration chooses by name: a method, a task, a split.

    Each is a frozen dataclass below a base class: its fields are its options, its methods do its work. In a
    table (TOML, the command line) one key names it, and all others are options of that one alone. A class
    that stands for many names (all paths, say) has a field called as that key, which holds the name.

    Attributes:
        registry: where names are looked up; declared by the base class, and by no other.
        key: the key of a table that names one; empty: what the table itself is called does, as several may be
            chosen.
        default: the one that is meant where a table names none; None: a table must name one.
        same_meaning: whether options of one name mean the same in all of them, so that another choice keeps those
            that it has, too; else it keeps only what the base class declares.
    """

    registry: ClassVar[Registry[Any]]
    key: ClassVar[str] = "name"
    default: ClassVar[str | None] = None
    same_meaning: ClassVar[bool] = False

    @staticmethod
    def validate_class(kind: Any) -> str | None:
        """What a class of somebody else's should be and is not, or None.

        A frozen dataclass whose fields are options, with all that its bases leave open: abstract methods, and
        attributes that they declare (``title: ClassVar[str]``) without a value.
        """
        declared = {
            name: told
            for base in kind.__mro__[1:]
            if issubclass(base, Registrable)
            for name, told in get_annotations(base).items()
            if str(told).startswith("ClassVar")
        }
        missing = [f"{name}: {told}" for name, told in declared.items() if not hasattr(kind, name)]
        missing += [f"a method {name}" for name in sorted(getattr(kind, "__abstractmethods__", ()))]
        return _options_fault(kind) or (f"one with {', '.join(missing)}" if missing else None)

    @property
    def registered_name(self) -> str:
        """The name by which this one can be asked for: ``module:Name``, where it has no shorter one."""
        if self.registry.is_fallback(type(self)):
            return str(vars(self)[self.key])
        return self.registry.name_of(type(self))


def check_registered_names(config: object, section: str) -> None:
    """Refuse a name that nothing has, in a field of type ``Annotated[str, a registry]``.

    What has the name is imported. So this is for whoever chooses it: a node that a server sends such a name
    neither needs what it means nor imports it.

    Args:
        section: what its fields stand under, for the error.

    Raises:
        ArgumentError: nothing has the name, or it cannot be imported or is something else.
    """
    of: Any = type(config)
    for name, registry in _registries(of):
        value = getattr(config, name)
        try:
            registry[value]
        except ArgumentError as error:
            raise ArgumentError(f"{section}.{name}", value, error.expected) from error


@cache  # hints are slow
def _registries(kind: type) -> tuple[tuple[str, Registry[Any]], ...]:
    """The fields of a class that hold names, each with the registry of what has them."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple(
        (name, extra)
        for name, hint in hints.items()
        for extra in getattr(hint, "__metadata__", ())
        if isinstance(extra, Registry)
    )


def _options_fault(kind: Any) -> str | None:
    """What is wrong with a class whose fields should be options, each with a default."""
    parameters = vars(kind).get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        return "a frozen dataclass: @dataclass(frozen=True, kw_only=True) above its class"
    key = getattr(kind, "key", "name")
    reserved = (key, "key", "default", "registry", "registered_name", "validate_class", "section")
    if any(part.name in reserved for part in fields(kind)):
        return f"a class without options named {join_names(reserved)}: these names are reserved"
    required = [part.name for part in fields(kind) if part.default is part.default_factory is MISSING]
    if required:
        return f"a class with a default for each option: {', '.join(required)} has none"
    return None


@cache
def _installed(group: str) -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}
