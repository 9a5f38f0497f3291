"""Mechanisms by name for tests that hold for several of them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from fedstill.privacy.config import MECHANISMS, PrivacyConfig


def make_mechanism(mechanism: str, **options: Any) -> PrivacyConfig:
    """Create a mechanism with those of the options that it has."""
    kind = MECHANISMS[mechanism]
    known = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in options.items() if name in known})
