"""The templates of this folder, and the words that pages use for figures."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fedstill.core.text_format import NOT_MEASURED, format_bytes, format_percent, format_seconds


@cache  # it keeps the templates that it has compiled, which takes longer than to fill them
def environment() -> Environment:
    """What fills the templates."""
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["duration"] = lambda value: MISSING_MARKUP if value is None else format_seconds(value)
    made.filters["percent"] = lambda value: MISSING_MARKUP if value is None else format_percent(value)
    made.filters["or_missing"] = lambda value: MISSING_MARKUP if value is None else value
    return made


MISSING_MARKUP = Markup('<span class="missing">{}</span>').format(NOT_MEASURED)


def size(count: int | None) -> Markup:
    """Bytes for people, with the exact number for whoever points at them."""
    if count is None:
        return MISSING_MARKUP
    return Markup('<span title="{:,} bytes">{}</span>').format(count, format_bytes(count))
