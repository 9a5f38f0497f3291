"""Runs that several test files read and none changes."""

from __future__ import annotations

import pytest

from tests.support.processes import Unbroken, small


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    """The run that is broken in many ways, in one process and unbroken."""
    return Unbroken(small(), tmp_path_factory.mktemp("unbroken"))
