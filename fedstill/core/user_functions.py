"""A user's own function from its path, ``package.module:function``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fedstill.core.errors import ArgumentError

# What a user's own function raises when something does not suit it.
OWN = (
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


def is_path(spec: str) -> bool:
    """Whether a text can name a function.

    >>> is_path("clinic.scans:load"), is_path("small-cnn:16"), is_path("npz")
    (True, False, False)
    """
    module, colon, attribute = spec.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), attribute))


def find(spec: str, folder: Path, whose: str) -> Callable[..., Any]:
    """The function that a path names, from a file in the owner's folder or from what is installed.

    Args:
        spec: ``"package.module:function"``.
        folder: looked into before everything else.
        whose: the argument that names it, for errors.

    Raises:
        ArgumentError: there is no such module or function, its import fails, or its module has the name of
            one from elsewhere that is in use already.
    """
    module, _, attribute = spec.partition(":")
    if not is_path(spec):
        raise ArgumentError(whose, spec, "package.module:function")
    folder = folder.resolve()
    here = str(folder)
    sys.path.insert(0, here)
    try:
        importlib.invalidate_caches()
        found = importlib.import_module(module)
    except (*OWN, SyntaxError) as error:
        reason = first_line(error)
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise ArgumentError(whose, spec, f"one in {folder} or installed here") from error
        raise ArgumentError(whose, spec, f"what can be imported, which fails: {reason}") from error
    finally:
        sys.path.remove(here)
        if here not in sys.path:
            sys.path.append(here)  # what the function itself imports later
    mine = folder.joinpath(*module.split(".")).with_suffix(".py")
    origin = Path(getattr(found, "__file__", None) or "")
    if mine.is_file() and origin.resolve() != mine:
        raise ArgumentError(whose, spec, f"another name for {mine}: a module {module!r} is {origin} already")
    if not hasattr(found, attribute):
        raise ArgumentError(whose, spec, f"one of {origin}, which has no {attribute!r}")
    function = getattr(found, attribute)
    if not callable(function):
        raise ArgumentError(whose, spec, f"a function or class, which {attribute!r} of {origin} is not")
    return function  # type: ignore[no-any-return]


def look_in(folders: Iterable[str]) -> None:
    """Look for modules in some folders, too, after all that is installed."""
    sys.path.extend(folder for folder in folders if folder not in sys.path)


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
