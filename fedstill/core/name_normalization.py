"""Names in users' files (patients, sites, classes, columns) in normalized form, and names of runs.

Texts that look alike are often the same name: a file system or spreadsheet has stored its letters in another
Unicode form, or added a blank or an invisible character. Every reader of names applies
:func:`normalize_name`, so that one person, site or class counts once.
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
# Invisible characters of other categories: joiners, fillers and variation selectors.
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
_BLANK = "\u2800"  # braille without dots, which no definition counts as a blank
_WHOLE = re.compile(r"([+-]?)0*([0-9]+)(?:\.0*)?")  # 1, +1, 01, 1.0


@lru_cache(maxsize=65_536)
def normalize_name(text: str) -> str:
    """Return a name in normalized form: NFC, no invisible characters, single blanks, none around it.

    Case, width and number format are kept, as they may distinguish names (:func:`similar_name_pairs`).

    >>> normalize_name("Mu\\u0308ller\\u200b ") == normalize_name("\\ufeffM\\u00fcller") == "M\\u00fcller"
    True
    >>> normalize_name("St.\\u00a0Mary")
    'St. Mary'
    """
    if text.isascii() and text.isprintable():
        return " ".join(text.split())
    visible = (char for char in _INVISIBLE.sub("", text.replace(_BLANK, " ")) if not _is_hidden(char))
    return " ".join(unicodedata.normalize("NFC", "".join(visible)).split())


def _is_hidden(char: str) -> bool:
    """Return whether a character is invisible and no blank."""
    category = unicodedata.category(char)
    return (category == "Cf" and char not in _VISIBLE) or (category == "Cc" and not char.isspace())


def to_name(value: object) -> str:
    """Return a value as a name. Texts and UTF-8 bytes are normalized; None and NaN become empty.

    Raises:
        DataError: the bytes are not UTF-8.
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
    """Return names of classes in normalized form.

    Args:
        names: the names.
        what: what they name, for errors.

    Raises:
        DataError: a name is empty or occurs twice.

    >>> normalize_class_names(["cat", "dog", "cat\\u200b"], "classes")
    Traceback (most recent call last):
    ...
    fedstill.core.errors.DataError: classes: 'cat' and 'cat\\u200b' are one name (expected each name once)
    """
    texts = list(names)
    seen: dict[str, str] = {}
    for text in texts:
        name = normalize_name(text)
        if not name:
            raise DataError(f"{what}: {text!a} is an empty name (expected a text that can be seen)")
        if name in seen:
            message = f"{seen[name]!a} and {text!a} are one name"
            raise DataError(f"{what}: {message} (expected each name once)")
        seen[name] = text
    return tuple(seen)


def sort_class_names(names: Iterable[str]) -> list[str]:
    """Sort names as every reader numbers classes: integers by value, other names as texts.

    >>> sort_class_names(["10", "9", "1"]), sort_class_names(["10", "9", "a"])
    (['1', '9', '10'], ['10', '9', 'a'])
    """
    texts = sorted(names)
    counts = {text: parse_nonnegative_int(text) for text in texts}
    return texts if None in counts.values() else sorted(texts, key=lambda text: counts[text] or 0)


def spelling_difference(one: str, other: str) -> str:
    """Return the only difference of two names: case, width or number form; empty for any other difference.

    >>> [spelling_difference(*pair) for pair in (("Ward", "ward"), ("\\uff21", "A"), ("01", "1.0"))]
    ['case', 'width', 'the form of a number']
    >>> spelling_difference("1.1", "1.10")
    ''
    """
    if one == other or _fold(one) != _fold(other):
        return ""
    folded, other_folded = (unicodedata.normalize("NFKC", name) for name in (one, other))
    if folded == other_folded:
        return "width"
    return "case" if folded.casefold() == other_folded.casefold() else "the form of a number"


def similar_name_pairs(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return pairs of names that differ only as :func:`spelling_difference` says.

    Each name is paired with the first one that it is similar to.

    >>> similar_name_pairs(["b", "B", "a", "1", "1.0", "01"])
    [('b', 'B'), ('1', '1.0'), ('1', '01')]
    """
    first: dict[str, str] = {}
    pairs = []
    for name in dict.fromkeys(names):
        earlier = first.setdefault(_fold(name), name)
        if earlier != name:
            pairs.append((earlier, name))
    return pairs


def _fold(text: str) -> str:
    """Return a name without case, width and number form."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    digits = "".join(str(unicodedata.decimal(char)) if char.isdecimal() else char for char in folded)
    if found := _WHOLE.fullmatch(digits):
        char, number = found.groups()
        return ("-" if char == "-" and number != "0" else "") + number
    return digits


def unknown_name_text(text: str, known: Sequence[str]) -> str:
    """Describe an unknown name, the known ones and the similar one, for an error.

    >>> unknown_name_text("Cat", ["cat", "dog"])
    "'Cat' (expected cat, dog; 'cat' differs by case only)"
    """
    similar = next((name for name in known if spelling_difference(text, name)), None)
    hint = "" if similar is None else f"; {similar!a} differs by {spelling_difference(text, similar)} only"
    return f"{repr(text) if similar is None else ascii(text)} (expected {', '.join(known)}{hint})"


def similar_names_note(what: str, names: Sequence[str]) -> str:
    """Return a note on names that are similar but count as different, or an empty text.

    >>> similar_names_note("classes", ["cat", "Cat"])
    "classes 'cat' and 'Cat' differ by case only, and count as two"
    """
    if not (pairs := similar_name_pairs(names)):
        return ""
    one, other = pairs[0]
    more = f" ({len(pairs) - 1} more such)" if len(pairs) > 1 else ""
    kind = spelling_difference(one, other)
    return f"{what} {one!a} and {other!a} differ by {kind} only, and count as two{more}"


def strip_decimal_zeros(text: str) -> str:
    """Remove the decimal point and zeros that a spreadsheet adds to an integer; keep other texts.

    >>> [strip_decimal_zeros(text) for text in ("7.0", "07", "7.5", "7.")]
    ['7', '07', '7.5', '7.']
    """
    return re.sub(r"^([+-]?[0-9]+)\.0+$", r"\1", text)


_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def parse_number(text: str) -> float | None:
    """Return the number in a text as spreadsheets and other languages read it, or None.

    Python accepts more: underscores, blanks, digits of other scripts, ``nan`` and ``inf``.

    >>> [parse_number(text) for text in ("6.3", "1e3", "6_3", "nan", "\\u0663")]
    [6.3, 1000.0, None, None, None]
    """
    return float(text) if _NUMBER.fullmatch(text) else None


def parse_cli_number(kind: type, text: str) -> Any:
    """Return a command line word as int or float, or None. Digits only, no underscores.

    >>> [parse_cli_number(int, text) for text in ("-7", "6_3", " 7")]
    [-7, None, None]
    >>> parse_cli_number(float, "1e-3"), parse_cli_number(float, "inf")
    (0.001, inf)
    """
    if kind is int:
        return int(text) if re.fullmatch("[+-]?[0-9]{1,18}", text) else None
    return float(text) if re.fullmatch("[+-]?inf", text) else parse_number(text)


def parse_nonnegative_int(text: str) -> int | None:
    """Return the non-negative integer in a text of up to 18 ASCII digits, or None.

    >>> [parse_nonnegative_int(text) for text in ("07", "-1", "\\u0663", "9" * 5000)]
    [7, None, None, None]
    """
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def has_decimal_comma(text: str) -> bool:
    """Return whether a text is a number with a decimal comma, such as ``3,14``."""
    return re.fullmatch(r"[+-]?[0-9]*,[0-9]+(?:[eE][+-]?[0-9]+)?", text) is not None


TEXT_DTYPE_KINDS = "USOT"  # kinds of arrays that hold texts


def normalize_column(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a column in which texts and mixed values are normalized names; numbers are unchanged.

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
    """Return columns by normalized name, each as :func:`normalize_column` returns it.

    Raises:
        DataError: two columns have one name.
    """
    keys = normalize_class_names(columns, "columns")
    return {key: normalize_column(column) for key, column in zip(keys, columns.values(), strict=True)}


def is_run_name(name: str) -> bool:
    """Return whether a text can be the name of a run.

    >>> is_run_name("digits-0.5"), is_run_name("../other")
    (True, False)
    """
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name) is not None


def check_run_name(name: str) -> None:
    """Check the name of a run, which is also a folder name at the server and at the nodes.

    Raises:
        ArgumentError: the name is invalid.
    """
    if not is_run_name(name):
        raise ArgumentError("run", name, "up to 100 letters, digits, '.', '_' and '-'")


def natural_sort_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders ``node-2`` before ``node-10``.

    >>> sorted(["node-10", "node-2", "ward-3-b", "ward-3-a", "clinic"], key=natural_sort_key)
    ['clinic', 'node-2', 'node-10', 'ward-3-a', 'ward-3-b']
    """
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.findall(r"\d+|\D+", name)]
