"""What options mean, read from where it is written: the texts below the fields of a dataclass.

So files that explain themselves, ``help()`` of a class and the site's reference cannot say different things.

Frozen dataclasses whose types say what their fields may hold: ``lr: Annotated[float, Gt(0)]``.

The constraints are those of the library annotated-types. A text beside them says what is allowed in better
words: ``Annotated[int, Ge(0), "0 (no limit) or more"]``.
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
    """The text of each field of a dataclass, its own and those of its bases, as one line."""
    found = dict[str, str]()
    for base in reversed(kind.__mro__):
        if is_dataclass(base):
            found |= _parse_field_docs(base)
    return found


def _parse_field_docs(kind: Any) -> dict[str, str]:
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError, SyntaxError):  # no source is at hand, as of what was typed in
        return {}
    told = {}
    for field, below in zip(*(getattr(definition, "body", [])[start:] for start in (0, 1)), strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = below.value if isinstance(below, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                told[field.target.id] = " ".join(text.value.split())
    return told


class DocstringWithOptions(str):
    """A class's docstring that ends in its options, put together when somebody asks for it.

    Reading a module's source takes a while, so nothing is read as a class is made. Whoever takes the
    attribute of the class gets all of it (``inspect.getdoc``, notebooks, editors); ``help()`` takes what
    stands in the class and expands its tabs, and gets it there.

    Attributes:
        kind: the class.
    """

    kind: Any

    @classmethod
    def from_text(cls, kind: Any, text: str) -> DocstringWithOptions:
        """For a class, from its docstring as it is written."""
        made = cls(inspect.cleandoc(text))
        made.kind = kind
        return made

    def __get__(self, _: object, kind: Any) -> str:
        # The last thing that a dataclass is given: one in the making asks only whether there is a text.
        return self.with_options(kind) if "__match_args__" in vars(kind) else str(self)

    def expandtabs(self, tabsize: Any = 8) -> str:
        """See the class."""
        return self.with_options(self.kind).expandtabs(tabsize)

    def with_options(self, kind: Any) -> str:
        """With the options that the class has, or one below it that has no text of its own."""
        told, indent = field_docs(kind), " " * 4
        lines = [f"{field.name}: {told[field.name]}" for field in fields(kind) if field.name in told]
        wrapped = [
            textwrap.fill(each, WIDTH, initial_indent=indent, subsequent_indent=2 * indent) for each in lines
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
    """A dataclass that holds only what the types of its fields allow, also where Python code makes it.

    One that checks more, as two fields against each other, does so in ``__post_init__`` and calls this one's.

    Attributes:
        section: what its fields stand under in a configuration, for errors.

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
        """Its docstring tells its options, as they are told below its fields."""
        super().__init_subclass__(**given)
        if isinstance(text := vars(cls).get("__doc__"), str):
            cls.__doc__ = DocstringWithOptions.from_text(cls, text)

    def __post_init__(self) -> None:
        """Checks each field by itself.

        Raises:
            ArgumentError: naming field, value and what is allowed.
        """
        check_fields(self, self.section)


def check_fields(config: object, section: str) -> None:
    """Refuse a value that the type of its field does not allow.

    Args:
        section: what its fields stand under, for the error.

    Raises:
        ArgumentError: naming field, value and what is allowed.
    """
    of: Any = type(config)
    for name, kind, fits in _constrained_fields(of):
        value = getattr(config, name)
        if not fits(value):
            told = list(value) if isinstance(value, tuple) else value
            raise ArgumentError(f"{section}.{name}" if section else name, told, describe_constraints(kind))


def describe_constraints(kind: Any) -> str:
    """What a type allows among the values of its kind, in words; empty: all.

    >>> describe_constraints(PositiveInt), describe_constraints(Share), describe_constraints(NonNegativeFloat | None)
    ('1 or more', 'above 0 and up to 1', '0 or more and finite, or none')
    >>> describe_constraints(tuple[Literal["a", "b"], ...])
    'each one of a, b'
    """
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if origin is Annotated:
        told = [extra for extra in parts[1:] if isinstance(extra, str)]
        told = told or [
            "finite" if of == inf else _CONSTRAINTS[type(each)][1].format(of)
            for each, of in _constraints(kind)
        ]
        return told[0] if len(told) == 1 else " and ".join(told) or describe_constraints(parts[0])
    if origin in (Union, UnionType):
        told = [words for part in parts if (words := describe_constraints(part))]
        return ", or ".join([*told, "none"] if told and NoneType in parts else told)
    words = describe_constraints(parts[0]) if _is_list(kind) else ""
    return f"each {words}" if words else ""


@cache  # each instance asks, and taking types apart is slow
def _constrained_fields(kind: type) -> tuple[tuple[str, Any, Callable[[Any], bool]], ...]:
    """The fields whose types say more than what kind of value they hold, each with its test."""
    hints = get_type_hints(kind, include_extras=True)
    names = getattr(kind, "__dataclass_fields__", ())
    return tuple(
        (name, hints[name], _make_validator(hints[name]))
        for name in names
        if describe_constraints(hints[name])
    )


def _make_validator(kind: Any) -> Callable[[Any], bool]:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return lambda value: value in parts
    if origin is Annotated:
        plain = _make_validator(parts[0])
        limits = [(_CONSTRAINTS[type(each)][0], of) for each, of in _constraints(kind)]
        return lambda value: plain(value) and all(holds(value, of) for holds, of in limits)
    if origin in (Union, UnionType):
        either = [_make_validator(part) for part in parts]
        return lambda value: any(one(value) for one in either)
    if _is_list(kind):
        each_one = _make_validator(parts[0])
        return lambda value: isinstance(value, (list, tuple)) and all(map(each_one, value))
    if kind in (int, float):
        number = Integral if kind is int else Real
        return lambda value: isinstance(value, number) and not isinstance(value, bool)
    return lambda value: isinstance(value, kind) if isinstance(kind, type) else value is not None


def _is_list(kind: Any) -> bool:
    return get_origin(kind) is tuple and get_args(kind)[1:] == (...,)


def _constraints(kind: Any) -> Iterator[tuple[Any, Any]]:
    for extra in get_args(kind)[1:]:
        for each in extra if isinstance(extra, GroupedMetadata) else (extra,):
            constraint: Any = each
            if isinstance(each, BaseMetadata) and type(each) not in _CONSTRAINTS:
                known = ", ".join(kind.__name__ for kind in _CONSTRAINTS)
                raise TypeError(f"{each} says nothing of an option (expected {known}, Interval and Len)")
            if isinstance(each, BaseMetadata):
                yield constraint, astuple(constraint)[0]
