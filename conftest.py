"""Options of the tests: golden files, the part that runs by default; and collection of doctests."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule

pytest_plugins = ["pytester"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that rewrites ``tests/golden``."""
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden/*.txt instead of comparing"
    )
    parser.addoption(
        "--all",
        action="store_true",
        dest="all_tests",
        help="run the tests marked slow, and all cases of those marked sample, too; the default where single "
        "tests are named",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Collect doctests only from files that have some, since collecting imports the module."""
    found = yield
    return [
        each for each in found if not isinstance(each, DoctestModule) or ">>>" in file_path.read_text("utf-8")
    ]
