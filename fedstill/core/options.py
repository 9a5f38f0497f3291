"""Options as fields of frozen dataclasses: their valid values and their documentation.

The type of a field declares its valid values, with the constraints of the library annotated-types:
``lr: Annotated[float, Gt(0)]``. A text next to them describes the valid values in better words:
``Annotated[int, Ge(0), "0 (no limit) or more"]``.

The string below a field is its documentation. Commented configuration files, ``help()`` of the class and the
reference manual all show this string, so they cannot disagree.
"""

from __future__ import annotations

import ast
import inspect
import operator
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import astuple, fields, is_dataclass
from functools import cache
from math import inf
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import (
    BaseMetadata,
    Ge,
    GroupedMetadata,
    Gt,
    Interval,
    Le,
    Lt,
    MaxLen,
    MinLen,
    MultipleOf,
)

from fedstill.core.errors import ArgumentError

WIDTH = 100  # columns of a docstring


def field_docs(kind: Any) -> dict[str, str]:
    """Return the documentation of each field of a dataclass and its bases, in one line each."""
    texts = dict[str, str]()
    base: type
    for base in reversed(kind.__mro__):
        if is_dataclass(base):
            texts |= _parse_field_docs(base)
    return texts


@cache
def _parse_field_docs(kind: Any) -> dict[str, str]:
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError, SyntaxError):  # no source code, as in an interactive session
        return {}
    texts = {}
    for field, below in zip(*(getattr(definition, "body", [])[start:] for start in (0, 1)), strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = below.value if isinstance(below, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                texts[field.target.id] = " ".join(text.value.split())
    return texts


class DocstringWithOptions(str):
    """Docstring of a class that appends the options when it is read.

    Reading source code takes a while, so it is not read when the class is defined. The attribute ``__doc__``
    of the class returns the whole text (``inspect.getdoc``, notebooks, editors). ``help()`` reads the class
    dictionary and expands tabs, and gets the whole text by that.

    Attributes:
        kind: the class.
    """

    kind: Any

    @classmethod
    def from_text(cls, kind: Any, text: str) -> DocstringWithOptions:
        """Create the docstring of a class from its text in the source code."""
        docstring = cls(inspect.cleandoc(text))
        docstring.kind = kind
        return docstring

    def __get__(self, _: object, kind: Any) -> str:
        # __match_args__ is set last: while the dataclass is built, only the presence of a docstring matters.
        return self.with_options(kind) if "__match_args__" in vars(kind) else str(self)

    def expandtabs(self, tabsize: Any = 8) -> str:
        """Return the whole docstring with expanded tabs."""
        return self.with_options(self.kind).expandtabs(tabsize)

    def with_options(self, kind: Any) -> str:
        """Return the docstring with the options of a class, which may be a subclass without docstring."""
        texts, indent = field_docs(kind), " " * 4
        lines = [f"{field.name}: {texts[field.name]}" for field in fields(kind) if field.name in texts]
        wrapped = [
            textwrap.fill(line, WIDTH, initial_indent=indent, subsequent_indent=2 * indent) for line in lines
        ]
        return "\n".join([f"{self}\n\nArgs:", *wrapped] if lines else [str(self)])


PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Interval(gt=0, lt=inf)]
NonNegativeFloat = Annotated[float, Interval(ge=0, lt=inf)]
Finite = Annotated[float, Interval(gt=-inf, lt=inf), "a finite number"]
PositiveOrInf = Annotated[float, Gt(0), "above 0, or inf"]
Share = Annotated[float, Interval(gt=0, le=1)]
Fraction = Annotated[float, Interval(gt=0, lt=1)]

_CONSTRAINTS: dict[type, tuple[Callable[[Any, Any], bool], str]] = {
    Gt: (operator.gt, "above {}"),
    Ge: (operator.ge, "{} or more"),
    Lt: (operator.lt, "below {}"),
    Le: (operator.le, "up to {}"),
    MultipleOf: (lambda value, factor: value % factor == 0, "a multiple of {}"),
    MinLen: (lambda value, least: len(value) >= least, "{} or more of them"),
    MaxLen: (lambda value, most: most is None or len(value) <= most, "{} of them at most"),
}


class CheckedOptions:
    """Base of dataclasses that check their fields against their types on construction.

    A subclass with further checks, such as of two fields against each other, does them in ``__post_init__``
    and calls the one of this class.

    Attributes:
        section: dotted name of the table that holds the fields, for errors.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Training(CheckedOptions):
    ...     section: ClassVar[str] = "local"
    ...     lr: Annotated[float, Gt(0)] = 0.1
    ...     optimizer: Literal["adam", "sgd"] = "adam"
    >>> Training(lr=-1)
    Traceback (most recent call last):
    ...
    fedstill.core.errors.ArgumentError: invalid local.lr = -1 (expected above 0)
    """

    section: ClassVar[str] = ""

    def __init_subclass__(cls, **given: Any) -> None:
        """Append the options to the docstring."""
        super().__init_subclass__(**given)
        append_options_to_docstring(cls)

    def __post_init__(self) -> None:
        """Check each field.

        Raises:
            ArgumentError: with the field, its value and the valid values.
        """
        check_fields(self, self.section)


def append_options_to_docstring(kind: type) -> None:
    """Have a dataclass list its options in its docstring."""
    if isinstance(text := vars(kind).get("__doc__"), str):
        kind.__doc__ = DocstringWithOptions.from_text(kind, text)


def check_fields(config: object, section: str) -> None:
    """Check that each field has a value that its type allows.

    Args:
        config: a dataclass.
        section: dotted name of the table that holds the fields, for errors.

    Raises:
        ArgumentError: with the field, its value and the valid values.
    """
    of: Any = type(config)
    for name, kind, is_valid in _constrained_fields(of):
        value = getattr(config, name)
        if not is_valid(value):
            shown = list(value) if isinstance(value, tuple) else value
            raise ArgumentError(f"{section}.{name}" if section else name, shown, describe_constraints(kind))
    for name, group in _group_fields(of):
        if not isinstance(value := getattr(config, name), group):
            raise ArgumentError(f"{section}.{name}" if section else name, value, f"a {group.__name__}(...)")


def check_value(kind: Any, value: object, name: str) -> None:
    """Check that a value is one that a type allows.

    Raises:
        ArgumentError: with the name, the value and the valid values.

    >>> check_value(PositiveInt | None, 0, "--seeds")
    Traceback (most recent call last):
    ...
    fedstill.core.errors.ArgumentError: invalid --seeds = 0 (expected 1 or more, or none)
    """
    expected = describe_constraints(kind)
    if expected and not _make_validator(kind)(value):
        raise ArgumentError(name, value, expected)


def describe_constraints(kind: Any) -> str:
    """Describe the values that the constraints of a type allow; empty: no constraints.

    >>> [describe_constraints(kind) for kind in (PositiveInt, Share, NonNegativeFloat | None)]
    ['1 or more', 'above 0 and up to 1', '0 or more and finite, or none']
    >>> describe_constraints(tuple[Literal["a", "b"], ...])
    'each one of a, b'
    """
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if origin is Annotated:
        texts = [extra for extra in parts[1:] if isinstance(extra, str)]
        texts = texts or [
            "finite" if of == inf else _CONSTRAINTS[type(each)][1].format(of)
            for each, of in _constraints(kind)
        ]
        return texts[0] if len(texts) == 1 else " and ".join(texts) or describe_constraints(parts[0])
    if origin in (Union, UnionType):
        texts = [text for part in parts if (text := describe_constraints(part))]
        return ", or ".join([*texts, "none"] if texts and NoneType in parts else texts)
    text = describe_constraints(parts[0]) if _is_list(kind) else ""
    return f"each {text}" if text else ""


@cache  # each instance asks, and analyzing types is slow
def _constrained_fields(kind: type) -> tuple[tuple[str, Any, Callable[[Any], bool]], ...]:
    """Return name, type and validator of the fields whose types have constraints."""
    hints = get_type_hints(kind, include_extras=True)
    names = getattr(kind, "__dataclass_fields__", ())
    return tuple(
        (name, hints[name], _make_validator(hints[name]))
        for name in names
        if describe_constraints(hints[name])
    )


@cache
def _group_fields(kind: type) -> tuple[tuple[str, type], ...]:
    """Return name and type of the fields that are groups of options, which are dataclasses, too."""
    hints = get_type_hints(kind)
    return tuple(
        (name, hints[name])
        for name in getattr(kind, "__dataclass_fields__", ())
        if isinstance(hints[name], type) and is_dataclass(hints[name])
    )


def _make_validator(kind: Any) -> Callable[[Any], bool]:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return lambda value: value in parts
    if origin is Annotated:
        plain = _make_validator(parts[0])
        limits = [(_CONSTRAINTS[type(each)][0], of) for each, of in _constraints(kind)]
        return lambda value: plain(value) and all(satisfies(value, of) for satisfies, of in limits)
    if origin in (Union, UnionType):
        validators = [_make_validator(part) for part in parts]
        return lambda value: any(validate(value) for validate in validators)
    if _is_list(kind):
        validate_item = _make_validator(parts[0])
        return lambda value: isinstance(value, (list, tuple)) and all(map(validate_item, value))
    if kind in (int, float):
        number = Integral if kind is int else Real
        return lambda value: isinstance(value, number) and not isinstance(value, bool)
    return lambda value: isinstance(value, kind) if isinstance(kind, type) else value is not None


def _is_list(kind: Any) -> bool:
    return get_origin(kind) is tuple and get_args(kind)[1:] == (...,)


def _constraints(kind: Any) -> Iterator[tuple[Any, Any]]:
    for extra in get_args(kind)[1:]:
        for constraint_part in extra if isinstance(extra, GroupedMetadata) else (extra,):
            constraint: Any = constraint_part
            if isinstance(constraint_part, BaseMetadata) and type(constraint_part) not in _CONSTRAINTS:
                known = ", ".join(kind.__name__ for kind in _CONSTRAINTS)
                raise TypeError(f"{constraint_part} is not supported (expected {known}, Interval or Len)")
            if isinstance(constraint_part, BaseMetadata):
                yield constraint, astuple(constraint)[0]
