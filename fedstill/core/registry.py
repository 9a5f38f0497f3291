"""Objects by name: built-in ones, those of installed packages, and ``module:Name`` for any other.

A package registers its classes as entry points (``[project.entry-points."fedstill.methods"]``, for example).
Nothing is imported before it is looked up, so a broken plug-in affects only those who name it.
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
from fedstill.core.options import append_options_to_docstring, check_fields

# Errors that a computation of custom code may raise, such as a module's forward with an unsuitable input.
COMPUTATION_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
)
USER_CODE_ERRORS = (*COMPUTATION_ERRORS, ImportError, OSError)


def is_object_path(spec: str) -> bool:
    """Return whether a text has the form ``package.module:name``.

    >>> is_object_path("clinic.scans:load"), is_object_path("small-cnn:16"), is_object_path("npz")
    (True, False, False)
    """
    module, colon, attribute = spec.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), attribute))


def import_object(spec: str, folder: Path, argument: str) -> Callable[..., Any]:
    """Import a function or class from a file in the owner's folder, or from an installed package.

    Args:
        spec: ``"package.module:name"``.
        folder: the folder that is searched first.
        argument: name of the argument, for errors.

    Raises:
        ArgumentError: there is no such module or object, the import fails, or another module of that name is
            already imported.
    """
    module, _, attribute = spec.partition(":")
    if not is_object_path(spec):
        raise ArgumentError(argument, spec, "package.module:function")
    folder = folder.resolve()
    path = str(folder)
    sys.path.insert(0, path)
    try:
        importlib.invalidate_caches()
        imported = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # any error of the user's code
        reason = "it exits" if isinstance(error, SystemExit) else first_line(error)
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise ArgumentError(argument, spec, f"a module in {folder} or an installed one") from error
        raise ArgumentError(argument, spec, f"an importable module; importing it fails: {reason}") from error
    finally:
        sys.path.remove(path)
        if path not in sys.path:
            sys.path.append(path)  # for later imports of the function itself
    expected_file = folder.joinpath(*module.split(".")).with_suffix(".py")
    origin = Path(getattr(imported, "__file__", None) or "")
    if expected_file.is_file() and origin.resolve() != expected_file:
        raise ArgumentError(
            argument,
            spec,
            f"another name for {expected_file}: module {module!r} is already imported from {origin}",
        )
    if not hasattr(imported, attribute):
        raise ArgumentError(argument, spec, f"a name in {origin}, which has no {attribute!r}")
    function = getattr(imported, attribute)
    if not callable(function):
        raise ArgumentError(argument, spec, f"a function or class; {attribute!r} of {origin} is neither")
    return function  # type: ignore[no-any-return]


def add_search_folders(folders: Iterable[str]) -> None:
    """Search modules in further folders, after all installed packages."""
    sys.path.extend(folder for folder in folders if folder not in sys.path)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class name if there is no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


T = TypeVar("T")
_FOLDER: ContextVar[Path | None] = ContextVar("_FOLDER", default=None)


@contextmanager
def searching_in(folder: Path) -> Iterator[None]:
    """Search ``module:Name`` in a folder instead of the current one. Installed packages come first."""
    token = _FOLDER.set(folder)
    try:
        yield
    finally:
        _FOLDER.reset(token)


class Registry(Mapping[str, T], Generic[T]):
    """Objects that one key of a configuration can name.

    Args:
        what: the kind of object, for errors: "method".
        builtin: ``module:Name`` of each built-in object, by name.
        base: base class of the objects; None: they are functions.
        call_signature: arguments of such functions, for errors.
        fallback: description of all other names ("a path"), and the ``module:Name`` of the built-in object
            that handles them; None: other names are errors.

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
        """Group of the entry points in this registry."""
        return f"fedstill.{self.plural.replace(' ', '_')}"

    @property
    def plural(self) -> str:
        """The kind of object, in the plural."""
        return f"{self.what.removesuffix('y')}ies" if self.what.endswith("y") else f"{self.what}s"

    def __getitem__(self, name: str) -> T:
        """Return the object of a name, importing it if needed.

        Raises:
            UnknownName: there is no such name.
            PluginError: the object cannot be imported.
            ArgumentError: the object has the wrong type.
        """
        if self.fallback is not None and name not in self:
            return self._import_builtin(self.fallback[1])
        if is_object_path(name):  # not cached: it depends on the folder
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

    # Compared by identity: comparing registries as mappings would import all their objects.
    __eq__, __hash__ = object.__eq__, object.__hash__

    @property
    def choices_text(self) -> str:
        """Valid names in words, for help and errors."""
        return ", ".join(self) + (f", or {self.fallback[0]}" if self.fallback else "")

    def importable_objects(self) -> dict[str, T]:
        """Return all objects that can be imported, by name. Broken plug-ins are left out."""
        objects = {}
        for name in self:
            try:
                objects[name] = self[name]
            except ArgumentError:
                continue
        return objects

    def name_of(self, target: Any) -> str:
        """Return the name of a class or function: its registered name, or ``module:Name``.

        >>> Registry("error", {"argument": "fedstill.core.errors:ArgumentError"}).name_of(ArgumentError)
        'argument'
        """
        path = f"{target.__module__}:{target.__qualname__}"
        short = self.canonical_name(path)
        if short in self.builtin:  # a custom class may claim any module name
            return short if self[short] is target else path
        if short != path:
            return short
        package = path.partition(":")[0].partition(".")[0]
        for name, point in _installed(self.group).items():  # registered from a module that does not define it
            if name not in self.builtin and point.value.partition(":")[0].partition(".")[0] == package:
                with suppress(ArgumentError):
                    if self[name] is target:
                        return name
        return path

    def handles_unregistered_names(self, kind: type) -> bool:
        """Return whether a class handles all names that are not registered."""
        return self.fallback is not None and self.fallback[1] == f"{kind.__module__}:{kind.__qualname__}"

    def canonical_name(self, name: str) -> str:
        """Return the registered name of an object that has several names, without importing it."""
        installed = _installed(self.group).items()
        names_by_path = {point.value: short for short, point in installed if short not in self.builtin}
        return {**names_by_path, **{path: short for short, path in self.builtin.items()}}.get(name, name)

    def is_allowed(self, name: object, plugins: Iterable[str]) -> bool:
        """Return whether a name is built in or in an allow-list of plug-ins. Nothing is imported."""
        allowed_names = {*self.builtin, *map(self.canonical_name, plugins)}
        return isinstance(name, str) and self.canonical_name(name) in allowed_names

    def require_allowed(self, name: object, plugins: Iterable[str], path: str) -> None:
        """Refuse a name that a server sent unless it is built in, or installed and allowed by its owner.

        This is the only check of plug-ins at a node. Nothing is imported before it, or by it.

        Args:
            name: the received name.
            plugins: allow-list of the node's owner (``policy.plugins``).
            path: dotted name of the option, for errors.

        Raises:
            ArgumentError: the name is not allowed, or not installed.
        """
        if not self.is_allowed(name, plugins):
            expected = f"a name that policy.plugins of the node allows, or one of {', '.join(self.builtin)}"
            raise ArgumentError(path, name, expected)
        if name not in self:
            raise ArgumentError(
                path, name, "a name that is installed at the node: its policy.plugins allows it"
            )

    def _load(self, name: str) -> T:
        if name in self.builtin:
            return self._import_builtin(self.builtin[name])
        installed = _installed(self.group)
        loaded: Any
        if name in installed:
            try:
                loaded = installed[name].load()
            except Exception as error:  # custom code may raise anything on import
                reason = f"an importable object: {installed[name].value} fails with {first_line(error)}"
                raise PluginError(self.what, name, reason) from error
        elif is_object_path(name):
            with suppress(Exception, SystemExit):  # installed modules come before those of a folder
                importlib.import_module(name.partition(":")[0])
            try:
                loaded = import_object(name, _FOLDER.get() or Path.cwd(), self.what)
            except ArgumentError as error:
                raise PluginError(self.what, name, error.expected) from error
            except Exception as error:
                reason = f"an importable object; importing it fails: {first_line(error)}"
                raise PluginError(self.what, name, reason) from error
        else:
            raise UnknownName(self.what, name, [*self, "or module:Name"])
        if self.base is None:
            expected = None if callable(loaded) else f"a function of {self.call_signature}"
        elif not (isinstance(loaded, type) and issubclass(loaded, self.base)):
            expected = f"a subclass of {self.base.__name__}; this is {loaded!r}"
        else:
            expected = self.base.validate_class(loaded) if issubclass(self.base, Registrable) else None
        if expected is not None:
            raise PluginError(self.what, name, expected)  # the text may quote the custom class
        checked: T = loaded
        return checked

    def _import_builtin(self, path: str) -> T:
        module, _, attribute = path.partition(":")
        loaded: T = getattr(importlib.import_module(module), attribute)
        return loaded


class Registrable:
    """Base of classes that a configuration chooses by name: a method, a task, a split.

    Each is a frozen dataclass below a base class: its fields are its options, its methods implement it. In a
    table (TOML, the command line) one key names the class, and all other keys are options of that class. A
    class that handles many names (all paths, for example) has a field named as the key, which holds the name.

    Attributes:
        registry: the names; declared by the base class only.
        section: dotted name of the table that holds the fields, for errors.
        key: the key of a table that names the class; empty: the name of the table does, as several may be
            chosen.
        default: name of the default; None: a table must name a class.
        same_meaning: whether options of one name mean the same in all classes. Then another choice keeps the
            options that the new class has too; else it keeps only those that the base class declares.
    """

    registry: ClassVar[Registry[Any]]
    section: ClassVar[str] = ""
    key: ClassVar[str] = "name"
    default: ClassVar[str | None] = None
    same_meaning: ClassVar[bool] = False

    def __init_subclass__(cls, **given: Any) -> None:
        """Append the options to the docstring."""
        super().__init_subclass__(**given)
        append_options_to_docstring(cls)

    def __post_init__(self) -> None:
        """Check each field against its type.

        Raises:
            ArgumentError: with the field, its value and the valid values.
        """
        check_fields(self, self.section)

    @staticmethod
    def validate_class(kind: Any) -> str | None:
        """Describe what a custom class lacks, or return None if it is complete.

        It must be a frozen dataclass whose fields are options, with all that its bases leave open: abstract
        methods, and declared attributes (``title: ClassVar[str]``) without a value.
        """
        declared = {
            name: annotation
            for base in kind.__mro__[1:]
            if issubclass(base, Registrable)
            for name, annotation in get_annotations(base).items()
            if str(annotation).startswith("ClassVar")
        }
        missing = [
            f"{name}: {annotation}" for name, annotation in declared.items() if not hasattr(kind, name)
        ]
        missing += [f"a method {name}" for name in sorted(getattr(kind, "__abstractmethods__", ()))]
        return _options_fault(kind) or (f"a class with {', '.join(missing)}" if missing else None)

    @property
    def registered_name(self) -> str:
        """The registered name of the class, or ``module:Name``."""
        if self.registry.handles_unregistered_names(type(self)):
            return str(vars(self)[self.key])
        return self.registry.name_of(type(self))


def check_registered_names(config: object, section: str) -> None:
    """Check the fields of type ``Annotated[str, a registry]``.

    The named objects are imported. The function is therefore for the party that chooses them: a node that
    receives such a name from a server does not need the object.

    Args:
        config: a dataclass.
        section: dotted name of the table that holds the fields, for errors.

    Raises:
        ArgumentError: a name is unknown, cannot be imported, or has the wrong type.
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
    """Return the fields of a class that hold names, each with its registry."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple(
        (name, extra)
        for name, hint in hints.items()
        for extra in getattr(hint, "__metadata__", ())
        if isinstance(extra, Registry)
    )


def _options_fault(kind: Any) -> str | None:
    """Describe what is wrong with the fields of a class as options, or return None."""
    parameters = vars(kind).get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        return "a frozen dataclass: @dataclass(frozen=True, kw_only=True) above its class"
    key = getattr(kind, "key", "name")
    reserved = (key, "key", "default", "registry", "registered_name", "validate_class", "section")
    if any(part.name in reserved for part in fields(kind)):
        return f"a class without options named {', '.join(reserved)}: these names are reserved"
    required = [part.name for part in fields(kind) if part.default is part.default_factory is MISSING]
    if required:
        return f"a class with a default for each option: {', '.join(required)} has none"
    return None


@cache
def _installed(group: str) -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}
