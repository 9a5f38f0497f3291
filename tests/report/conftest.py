"""Fixtures of several files of tests of reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.comparison_files import write_comparison


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a comparison: three methods finished in the first setting, one was refused, none in the second."""
    return write_comparison(tmp_path)
