"""Names in users' files (patients, sites, classes, columns), each in one form, and how two of them differ.

A text that looks like another one is often the same name: a file system or a spreadsheet stored its letters
in another normal form, or added a blank or an invisible character. Every reader of names applies
:func:`normalize_name`, so that one person, one site and one class count once.

Arrays of names, each in the one form of :mod:`fedstill.core.names`.

Names of runs: each is a folder at the server and at every node.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from numbers import Real
from typing import TYPE_CHECKING, Any

from fedstill.core.errors import ArgumentError, DataError

if TYPE_CHECKING:
    import numpy.typing as npt

# Format characters (category Cf) that are visible: they enclose the number that follows.
_VISIBLE = frozenset("\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd")
# What shows nothing and is of another category: joiners, fillers and variation selectors.
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
_BLANK = "\u2800"  # braille without dots, which no definition counts as a blank
_WHOLE = re.compile(r"([+-]?)0*([0-9]+)(?:\.0*)?")  # 1, +1, 01, 1.0


@lru_cache(maxsize=65_536)
def normalize_name(text: str) -> str:
    """A name in its one form: NFC, without invisible characters, single blanks and none around it.

    Case, width and the way numbers are written are kept: they may set names apart (:func:`similar_names`).

    >>> normalize_name("Mu\\u0308ller\\u200b ") == normalize_name("\\ufeffM\\u00fcller") == "M\\u00fcller"
    True
    >>> normalize_name("St.\\u00a0Mary")
    'St. Mary'
    """
    if text.isascii() and text.isprintable():
        return " ".join(text.split())
    visible = (sign for sign in _INVISIBLE.sub("", text.replace(_BLANK, " ")) if not _is_hidden(sign))
    return " ".join(unicodedata.normalize("NFC", "".join(visible)).split())


def _is_hidden(sign: str) -> bool:
    """Return whether a character is invisible and no blank."""
    kind = unicodedata.category(sign)
    return (kind == "Cf" and sign not in _VISIBLE) or (kind == "Cc" and not sign.isspace())


def to_name(value: object) -> str:
    """A value as a name: texts, and bytes of UTF-8, as :func:`normalize_name`; None and NaN are empty.

    Raises:
        DataError: bytes that are no UTF-8.
    """
    if isinstance(value, bytes):
        try:
            return normalize_name(value.decode())
        except UnicodeDecodeError as error:
            raise DataError(f"{value!r} is no text in UTF-8") from error
    if value is None or (isinstance(value, Real) and value != value):
        return ""
    return normalize_name(str(value))


def normalize_class_names(names: Iterable[str], what: str) -> tuple[str, ...]:
    """Names of classes, each in its one form.

    Args:
        what: where they come from, for errors.

    Raises:
        DataError: an empty name, or one that two of them have.

    >>> normalize_class_names(["cat", "dog", "cat\\u200b"], "classes")
    Traceback (most recent call last):
    ...
    fedstill.core.errors.DataError: classes: 'cat' and 'cat\\u200b' are one name: allowed is each name once
    """
    given = list(names)
    seen: dict[str, str] = {}
    for text in given:
        own = normalize_name(text)
        if not own:
            raise DataError(f"{what}: {text!a} is an empty name (expected a text that can be seen)")
        if own in seen:
            told = f"{seen[own]!a} and {text!a} are one name"
            raise DataError(f"{what}: {told} (expected each name once)")
        seen[own] = text
    return tuple(seen)


def sort_class_names(names: Iterable[str]) -> list[str]:
    """Names in the order in which every reader numbers classes: whole numbers by value, others as texts.

    >>> sort_class_names(["10", "9", "1"]), sort_class_names(["10", "9", "a"])
    (['1', '9', '10'], ['10', '9', 'a'])
    """
    texts = sorted(names)
    counts = {each: parse_count(each) for each in texts}
    return texts if None in counts.values() else sorted(texts, key=lambda each: counts[each] or 0)


def name_difference(one: str, other: str) -> str:
    """Return the one difference between two names: case, width or number form; empty for any other.

    >>> name_difference("Ward", "ward"), name_difference("\\uff21", "A"), name_difference("01", "1.0")
    ('case', 'width', 'the form of a number')
    >>> name_difference("1.1", "1.10")
    ''
    """
    if one == other or _fold(one) != _fold(other):
        return ""
    wide, others = (unicodedata.normalize("NFKC", each) for each in (one, other))
    if wide == others:
        return "width"
    return "case" if wide.casefold() == others.casefold() else "the form of a number"


def similar_names(names: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of names that :func:`name_difference` finds nearly equal: the first of such names with each other.

    >>> similar_names(["b", "B", "a", "1", "1.0", "01"])
    [('b', 'B'), ('1', '1.0'), ('1', '01')]
    """
    first: dict[str, str] = {}
    found = []
    for each in dict.fromkeys(names):
        before = first.setdefault(_fold(each), each)
        if before != each:
            found.append((before, each))
    return found


def _fold(text: str) -> str:
    """A name without case, width and the form of a number."""
    wide = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    digits = "".join(str(unicodedata.decimal(sign)) if sign.isdecimal() else sign for sign in wide)
    if found := _WHOLE.fullmatch(digits):
        sign, number = found.groups()
        return ("-" if sign == "-" and number != "0" else "") + number
    return digits


def unknown_name_text(text: str, known: Sequence[str]) -> str:
    """A name that is none of those known, and these, for an error; with what alone sets it apart from one.

    >>> unknown_name_text("Cat", ["cat", "dog"])
    "'Cat': allowed are cat, dog ('cat' differs by case alone)"
    """
    near = next((each for each in known if name_difference(text, each)), None)
    told = "" if near is None else f" ({near!a} differs by {name_difference(text, near)} alone)"
    return f"{repr(text) if near is None else ascii(text)}: allowed are {', '.join(known)}{told}"


def similar_names_note(what: str, names: Sequence[str]) -> str:
    """Return a note on names that are nearly equal and yet count as different, or an empty text.

    >>> similar_names_note("classes", ["cat", "Cat"])
    "classes 'cat' and 'Cat' differ by case alone, and count as two"
    """
    if not (pairs := similar_names(names)):
        return ""
    one, other = pairs[0]
    more = f" ({len(pairs) - 1} more such)" if len(pairs) > 1 else ""
    how = name_difference(one, other)
    return f"{what} {one!a} and {other!a} differ by {how} alone, and count as two{more}"


def strip_decimal_zeros(text: str) -> str:
    """A whole number without the decimal point and zeros that a spreadsheet adds; other texts as they are.

    >>> strip_decimal_zeros("7.0"), strip_decimal_zeros("07"), strip_decimal_zeros("7.5"), strip_decimal_zeros("7.")
    ('7', '07', '7.5', '7.')
    """
    return re.sub(r"^([+-]?[0-9]+)\.0+$", r"\1", text)


_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def parse_number(text: str) -> float | None:
    """The number that a text is, as spreadsheets and other languages read it; None: it is none.

    Python reads more: underscores between digits, blanks, digits of other scripts, ``nan`` and ``inf``.

    >>> parse_number("6.3"), parse_number("1e3"), parse_number("6_3"), parse_number("nan"), parse_number("\\u0663")
    (6.3, 1000.0, None, None, None)
    """
    return float(text) if _NUMBER.fullmatch(text) else None


def parse_cli_number(kind: type, text: str) -> Any:
    """A word of a command line as an int or a float, in digits and without underscores; None: it is none.

    >>> parse_cli_number(int, "-7"), parse_cli_number(float, "1e-3"), parse_cli_number(float, "inf"), parse_cli_number(int, "6_3"), parse_cli_number(int, " 7")
    (-7, 0.001, inf, None, None)
    """
    if kind is int:
        return int(text) if re.fullmatch("[+-]?[0-9]{1,18}", text) else None
    return float(text) if re.fullmatch("[+-]?inf", text) else parse_number(text)


def parse_count(text: str) -> int | None:
    """The whole number from 0 that a text of ASCII digits is; None: it is none, or one of over 18 digits.

    >>> parse_count("07"), parse_count("-1"), parse_count("\\u0663"), parse_count("9" * 5000)
    (7, None, None, None)
    """
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def has_decimal_comma(text: str) -> bool:
    """Return whether a text is a number with a decimal comma, such as ``3,14``."""
    return re.fullmatch(r"[+-]?[0-9]*,[0-9]+(?:[eE][+-]?[0-9]+)?", text) is not None


TEXT_DTYPE_KINDS = "USOT"  # kinds of arrays that hold texts


def normalize_column(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A column in which texts, and values of mixed types, are names; numbers stay as they are.

    >>> import numpy as np
    >>> normalize_column(np.array(["a ", "a"])).tolist(), normalize_column(np.array([1, 2])).tolist()
    (['a', 'a'], [1, 2])
    """
    if column.dtype.kind not in TEXT_DTYPE_KINDS:
        return column
    import numpy as np  # here, as the command line's help needs names and no arrays

    cells = column.ravel().tolist()
    return np.array([to_name(cell) for cell in cells], dtype=np.str_).reshape(column.shape)


def normalize_columns(columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Columns by their names, each as :func:`normalize_column`.

    Raises:
        DataError: two of one name.
    """
    keys = normalize_class_names(columns, "columns")
    return {key: normalize_column(column) for key, column in zip(keys, columns.values(), strict=True)}


def is_run_name(name: str) -> bool:
    """Whether a text can be the name of a run.

    >>> is_run_name("digits-0.5"), is_run_name("../other")
    (True, False)
    """
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name) is not None


def check_run_name(name: str) -> None:
    """Refuse what is no name of a run.

    Raises:
        ArgumentError: it is none.
    """
    if not is_run_name(name):
        raise ArgumentError("run", name, "up to 100 letters, digits, '.', '_' and '-'")
