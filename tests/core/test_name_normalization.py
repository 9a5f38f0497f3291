"""Normalized names, and common number formats."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core.errors import DataError
from fedstill.core.name_normalization import (
    normalize_class_names,
    normalize_name,
    parse_cli_number,
    parse_number,
    similar_name_pairs,
    spelling_difference,
)

INVISIBLE = ["\u200b", "\ufeff", "\u00ad", "\u200d", "\u2060", "\u200e", "\ufe0f", "\u034f"]
TEXTS = st.text(st.characters(codec="utf-8") | st.sampled_from([*INVISIBLE, "\u00a0", "\u0308", "u"]))


@given(TEXTS)
def test_normalized_name_is_composed(text: str) -> None:
    normalized = normalize_name(text)
    assert (
        normalize_name(normalized)
        == normalized
        == unicodedata.normalize("NFC", normalized)
        == normalized.strip()
    )
    assert not any(sign in normalized for sign in INVISIBLE)


@given(TEXTS, st.sampled_from(["NFC", "NFD"]))
def test_ignores_unicode_form_and_surrounding_blanks(text: str, form: str) -> None:
    assert normalize_name(f"\u00a0{unicodedata.normalize(form, text)} \t") == normalize_name(text)


@given(st.text("abcXYZ\u00fc09"), st.integers(0, 20), st.sampled_from(INVISIBLE))
def test_ignores_only_invisible_characters(text: str, index: int, sign: str) -> None:
    assert normalize_name(text[:index] + sign + text[index:]) == text


def test_normalization_of_single_characters_is_idempotent() -> None:
    points = [point for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    for start in range(0, len(points), 4096):  # a letter on both sides of each character
        normalized = normalize_name("a".join(["", *map(chr, points[start : start + 4096]), ""]))
        assert normalize_name(normalized) == normalized


@pytest.mark.parametrize(
    ("one", "other", "how"),
    [
        ("P1", "p1", "case"),
        ("\uff11", "1", "width"),
        ("\uff21nna", "Anna", "width"),
        ("1", "1.0", "the form of a number"),
        ("01", "1", "the form of a number"),
        ("\u0661", "1", "the form of a number"),
        ("Stra\u00dfe", "STRASSE", "case"),
        ("1.1", "1.10", ""),
        ("12e3", "12000", ""),
        ("a", "b", ""),
    ],
)
def test_names_difference_between_names(one: str, other: str, how: str) -> None:
    assert spelling_difference(one, other) == spelling_difference(other, one) == how
    assert similar_name_pairs([one, other]) == ([(one, other)] if how else [])


def test_error_escapes_invisible_characters() -> None:
    with pytest.raises(DataError, match=r"'M\\xfcller' and 'Mu\\u0308ller'"):
        normalize_class_names(["M\u00fcller", "Mu\u0308ller"], "classes")
    with pytest.raises(DataError, match=r"'\\u200b'"):
        normalize_class_names(["a", "\u200b"], "classes")


@pytest.mark.parametrize("text", ["6_3", " 7", "nan", "inf", "Infinity", "\u0663", "0x10", "1e", "", "."])
def test_rejects_python_only_numbers(text: str) -> None:
    assert parse_number(text) is None


@pytest.mark.parametrize("text", ["6.3", "-7", "+1", ".5", "5.", "1e-5", "1E5"])
def test_reads_common_number_formats(text: str) -> None:
    assert parse_number(text) == float(text)


@pytest.mark.parametrize(
    ("kind", "text"), [(int, "1_0"), (int, "\u0663"), (int, "9" * 5000), (float, "1_0"), (float, "nan")]
)
def test_command_line_numbers_have_no_underscores(kind: type, text: str) -> None:
    assert parse_cli_number(kind, text) is None
