"""Fixtures shared by several test files of reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.comparison_files import write_runs_to_compare


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a comparison: two settings; in the first, three methods finished and one was refused."""
    return write_runs_to_compare(tmp_path)
