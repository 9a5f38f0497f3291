"""Jinja environment of this folder's templates, and markup shared by pages."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fedstill.core.text_format import NOT_MEASURED, format_bytes, format_percent, format_seconds


@cache  # the environment caches compiled templates; compiling takes longer than rendering
def template_environment() -> Environment:
    """Return the Jinja environment with the filters ``duration``, ``percent`` and ``or_missing``."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["duration"] = lambda value: MISSING_MARKUP if value is None else format_seconds(value)
    environment.filters["percent"] = lambda value: MISSING_MARKUP if value is None else format_percent(value)
    environment.filters["or_missing"] = lambda value: MISSING_MARKUP if value is None else value
    return environment


MISSING_MARKUP = Markup('<span class="missing">{}</span>').format(NOT_MEASURED)


def bytes_markup(count: int | None) -> Markup:
    """Return a number of bytes in a readable unit, with the exact number as tooltip."""
    if count is None:
        return MISSING_MARKUP
    return Markup('<span title="{:,} bytes">{}</span>').format(count, format_bytes(count))
