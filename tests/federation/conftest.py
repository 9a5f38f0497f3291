"""Runs that several test files read but do not change."""

from __future__ import annotations

import pytest

from tests.support.processes import Unbroken, small


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    """The uninterrupted run, in one process, that tests compare interrupted ones with."""
    return Unbroken(small(), tmp_path_factory.mktemp("unbroken"))
